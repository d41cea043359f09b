package sandbox_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// holdRemove makes the engine's removals wait, and returns what lets them go on.
func (r *rig) holdRemove() (release func()) {
	gate := make(chan struct{})
	r.driver.Fail(sandboxtest.Remove, func(ctx context.Context, _ string) error {
		select {
		case <-gate:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	return func() {
		r.driver.Fail(sandboxtest.Remove, nil)
		close(gate)
	}
}

// L11, superradcompany/microsandbox#697: a stop is over when no process is left,
// not when the engine has tidied up.
func TestADestroyDoesNotWaitForTheEngine(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.Name = "again" })
	release := r.holdRemove()
	defer release()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	got := r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
	if used, _ := r.Used(); used != (boxed.Capacity{}) {
		t.Errorf("%+v is still reserved", used)
	}
	_, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
	wantCode(t, err, boxed.CodeGone)
	again := r.create(func(s *boxed.Spec) { s.Name = "again" })
	if again.ID == got.ID {
		t.Error("the same sandbox")
	}
	if n := r.driver.Running(); n != 1 {
		t.Errorf("%d containers run", n)
	}
}

// What cannot be seen to be gone is removed before its end is said.
func TestADestroyWaitsForTheEngineWhereTheKernelDoesNotTell(t *testing.T) {
	r := started(t)
	s := r.create()
	r.driver.Fail(sandboxtest.Gone, func(context.Context, string) error { return boxed.Errorf(boxed.CodeUnavailable, "unseen") })
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if n := len(r.driver.Containers()); n != 0 {
		t.Errorf("%d containers are left", n)
	}
}

func TestClearingAwayIsTriedUntilItSucceeds(t *testing.T) {
	r := started(t)
	s := r.create()
	var tries atomic.Int32
	r.driver.Fail(sandboxtest.Remove, func(context.Context, string) error {
		if tries.Add(1) == 1 {
			return errors.New("boom")
		}
		return nil
	})
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.nothingLeft()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
}

// L8, bytedance/deer-flow#1972: a restart in between leaks no container.
func TestTheNextLifeClearsAwayWhatThisOneDidNot(t *testing.T) {
	r := started(t)
	s := r.create()
	release := r.holdRemove()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.end()
	release()
	r.run()
	r.nothingLeft()
	if got := r.get(s.ID); got.State != boxed.StateStopped || got.Reason != boxed.EndDestroyed {
		t.Errorf("%s, %s", got.State, got.Reason)
	}
}

// The engine's disk must not fill with what is to be cleared away.
func TestClearingAwayThatDoesNotKeepUpHoldsDestroysBack(t *testing.T) {
	r := started(t, func(c *sandbox.Config) { c.Making = 64 })
	release := r.holdRemove()
	var ids []boxed.ID
	for range sandbox.MaxClearing + 1 {
		ids = append(ids, r.create().ID)
	}
	last := ids[len(ids)-1]
	for _, id := range ids[:len(ids)-1] {
		if err := r.Destroy(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() { done <- r.Destroy(context.Background(), last) }()
	r.eventually("its processes are gone", func() bool { return r.driver.Running() == 0 })
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	r.nothingLeft()
}
