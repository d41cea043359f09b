package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// L1: what ran in the background until a minute ago was activity, though nobody
// looked while it ran.
func TestTheEndOfADetachedExecIsActivity(t *testing.T) {
	r := newRig(t)
	stop := make(chan struct{})
	r.driver.SetProgram("job", func(p *sandboxtest.Proc) int { <-stop; return 0 })
	r.advance(-9 * time.Minute)
	r.run()
	s := r.create(func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(10 * time.Minute) })
	if _, err := r.StartExec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"job"}}); err != nil {
		t.Fatal(err)
	}
	r.clock.Store(time.Now().UnixNano()) // nine minutes later
	// It ends by itself: a call that ended it would be activity.
	close(stop)
	time.Sleep(50 * time.Millisecond) // which cannot be seen without being activity
	r.advance(9 * time.Minute)
	r.Sweep()
	r.eventually("it is judged", func() bool { return r.Judged(s.ID) })
	if got := r.get(s.ID); got.State != boxed.StateRunning {
		t.Fatalf("%s: %s", got.State, got.Message)
	}
	r.advance(2 * time.Minute)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndIdle)
}

// An exec and an idle sandbox's end decide once which of them was first.
func TestAnExecAgainstAnIdleEnd(t *testing.T) {
	r := started(t)
	for range 50 {
		s := r.create(func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(time.Minute) })
		r.advance(time.Minute)
		var wg sync.WaitGroup
		wg.Go(r.Sweep)
		status, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
		wg.Wait()
		if err == nil && status.Reason != boxed.ReasonExited {
			t.Fatalf("it ended under an exec: %+v", status)
		}
		if err != nil {
			wantCode(t, err, boxed.CodeGone, "idle")
		}
		if err := r.Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// A pause is no way around the highest ttl, nor is a restart in between.
func TestAPauseHasAnEnd(t *testing.T) {
	r := started(t, func(c *sandbox.Config) { c.PausedMost = 24 * time.Hour })
	s := r.create()
	forever := r.create(func(s *boxed.Spec) { s.TTL = boxed.Never })
	for _, id := range []boxed.ID{s.ID, forever.ID} {
		if _, err := r.Pause(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	r.advance(24*time.Hour - 1)
	r.Sweep()
	r.restart()
	if got := r.get(s.ID); got.State != boxed.StatePaused {
		t.Fatalf("%s: %s", got.State, got.Message)
	}
	r.advance(1)
	r.Sweep()
	if end := r.waitEnd(s.ID, boxed.StateStopped, boxed.EndExpired); end.Message != "it was paused for 24h, as long as a ttl may be" {
		t.Errorf("message %q", end.Message)
	}
	if got := r.get(forever.ID); got.State != boxed.StatePaused {
		t.Errorf("one that lives for ever is %s", got.State)
	}
}

// Whoever leaves meanwhile leaves nothing half done.
func TestAPauseOutlivesItsCaller(t *testing.T) {
	r := started(t)
	s := r.create()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := r.Pause(ctx, s.ID); err != nil || got.State != boxed.StatePaused {
		t.Fatalf("%+v, %v", got, err)
	}
	if got, err := r.Resume(ctx, s.ID); err != nil || got.State != boxed.StateRunning {
		t.Fatalf("%+v, %v", got, err)
	}
	r.works(s.ID)
}

// fickle freezes, and says that it could not.
type fickle struct{ sandbox.Driver }

func (f fickle) Pause(ctx context.Context, id string) error {
	return errors.Join(f.Driver.Pause(ctx, id), errors.New("the answer was lost"))
}

func TestAPauseThatFailsIsTakenBack(t *testing.T) {
	r := newRig(t)
	r.cfg.Driver = fickle{r.driver}
	r.run()
	s := r.create()
	if _, err := r.Pause(t.Context(), s.ID); err == nil {
		t.Fatal("paused")
	}
	r.works(s.ID)
}

// What could not be thawed or frozen at the start is, as soon as the engine does it.
func TestAContainerIsMadeAsPausedAsItsRecordSays(t *testing.T) {
	r := started(t)
	s, p := r.create(), r.create()
	if _, err := r.Pause(t.Context(), p.ID); err != nil {
		t.Fatal(err)
	}
	for id, box := range r.driver.Boxes() {
		change := r.driver.Pause
		if box.ID == p.ID {
			change = r.driver.Resume
		}
		if err := change(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	r.Look(t.Context())
	r.works(s.ID)
	r.eventually("the other one is frozen", func() bool {
		all, _ := r.driver.List(t.Context())
		for _, c := range all {
			if c.Paused != (c.Sandbox == p.ID) {
				return false
			}
		}
		return true
	})
}

// What changes nothing is not written, and nobody is told.
func TestWhatChangesNothingWritesNothing(t *testing.T) {
	r := started(t)
	s, p := r.create(), r.create()
	if _, err := r.Pause(t.Context(), p.ID); err != nil {
		t.Fatal(err)
	}
	puts, events := r.records.Puts(), len(r.eventsOf(s.ID))+len(r.eventsOf(p.ID))
	for range 2 {
		if _, err := r.Pause(t.Context(), p.ID); err != nil {
			t.Error(err)
		}
		if _, err := r.Resume(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
		if got, err := r.Update(s.ID, boxed.Update{}, nil); err != nil || got.ID != s.ID {
			t.Error(got, err)
		}
	}
	if n := r.records.Puts(); n != puts {
		t.Errorf("%d writes", n-puts)
	}
	if n := len(r.eventsOf(s.ID)) + len(r.eventsOf(p.ID)); n != events {
		t.Errorf("%d events", n-events)
	}
}

// A clock that is set back lengthens no life beyond its ttl.
func TestAClockThatIsSetBackLengthensNoLife(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.advance(-100 * time.Hour)
	r.run()
	if got := r.get(s.ID); !got.ExpiresAt.Equal(r.now().Add(time.Hour)) {
		t.Errorf("expires %v, now %v", got.ExpiresAt, r.now())
	}
}

// Whoever waits for a state is shown that state, however short it was.
func TestWaitShowsWhatItWaitedFor(t *testing.T) {
	r := started(t)
	s := r.create()
	for range 50 {
		shown := make(chan *boxed.Sandbox, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			got, _ := r.Wait(ctx, s.ID, boxed.StatePaused)
			shown <- got
		}()
		if _, err := r.Pause(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Resume(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		cancel()
		if got := <-shown; got != nil && got.State != boxed.StatePaused {
			t.Fatalf("it is %s", got.State)
		}
	}
}

// A laptop that was shut for longer than a sandbox's ttl does not end it the moment
// it is opened: there is an event, and time to renew it.
func TestNothingEndsTheMomentAHostWakes(t *testing.T) {
	var asleep atomic.Int64
	r := newRig(t, func(c *sandbox.Config) { c.Asleep = func() time.Duration { return time.Duration(asleep.Load()) } })
	r.run()
	renewed := r.create(func(s *boxed.Spec) { s.TTL = boxed.Duration(time.Hour) })
	left := r.create(func(s *boxed.Spec) { s.TTL = boxed.Duration(time.Hour) })
	asleep.Store(int64(8 * time.Hour))
	r.advance(8 * time.Hour)
	r.Sweep()
	r.advance(time.Minute)
	r.Sweep()
	r.mu.Lock()
	told := slices.ContainsFunc(r.events, func(e boxed.Event) bool {
		return e.Type == boxed.EventNodeWarn && strings.Contains(e.Message, "8h0m0s")
	})
	r.mu.Unlock()
	if !told {
		t.Error("there is no event")
	}
	for _, s := range []*boxed.Sandbox{renewed, left} {
		if got := r.get(s.ID); got.State != boxed.StateRunning {
			t.Fatalf("%s: %s", got.State, got.Message)
		}
	}
	ttl := boxed.Duration(time.Hour)
	if _, err := r.Update(renewed.ID, boxed.Update{TTL: &ttl}, nil); err != nil {
		t.Fatal(err)
	}
	r.advance(2 * time.Minute)
	r.Sweep()
	r.waitEnd(left.ID, boxed.StateStopped, boxed.EndExpired)
	if got := r.get(renewed.ID); got.State != boxed.StateRunning {
		t.Errorf("%s: %s", got.State, got.Message)
	}
}
