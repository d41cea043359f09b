package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

func oneUID(c *sandbox.Config) { c.FirstUID, c.LastUID = 300000, 300000 }

// again writes an end record once more, under an ID that sorts after all others.
func (r *rig) again(id boxed.ID, ended time.Time) {
	r.t.Helper()
	all, err := r.records.All()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, rec := range all {
		if rec.Sandbox.ID == id {
			rec.Sandbox.ID, rec.Sandbox.EndedAt = boxed.ID("zzzzzzzzzz-"+string(testNode)), ended
			if err := r.records.Put(string(rec.Sandbox.ID), rec); err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

// Records come in the order of their IDs, whatever happened when.
func TestAUIDIsHeldWhateverOlderRecordsSay(t *testing.T) {
	r := started(t, oneUID)
	old := r.create()
	if err := r.Destroy(t.Context(), old.ID); err != nil {
		t.Fatal(err)
	}
	ended := r.now()
	r.advance(sandbox.UIDRest + time.Second)
	s := r.create(func(s *boxed.Spec) { s.TTL = boxed.Never })
	r.again(old.ID, ended)
	r.restart()
	if _, err := r.tryCreate(); boxed.CodeOf(err) != boxed.CodeExhausted || r.UIDsInUse() != 1 {
		t.Errorf("%d in use, %v", r.UIDsInUse(), err)
	}
	r.works(s.ID)
	// Of two ends the later one counts.
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.restart()
	_, err := r.tryCreate()
	wantCode(t, err, boxed.CodeExhausted)
}

func TestEndRecordsAreKeptWhileTheirUIDsRest(t *testing.T) {
	r := started(t, oneUID, func(c *sandbox.Config) { c.EndedFor, c.EndedMost = time.Minute, 1 })
	s := r.create()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.advance(sandbox.UIDRest / 2)
	r.Forget()
	r.restart()
	_, err := r.tryCreate()
	wantCode(t, err, boxed.CodeExhausted)
	r.advance(sandbox.UIDRest)
	r.Forget()
	if n := len(r.List()); n != 0 {
		t.Errorf("%d records", n)
	}
	r.create()
}

// What is not needed to say how it ended is not kept for a day.
func TestEndRecordsHoldNoSecrets(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.Env = map[string]string{"TOKEN": "secret"} })
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.nothingLeft()
	r.eventually("all is cleared away", func() bool { return r.Clearing() == 0 })
	all, err := r.records.All()
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	if rec := all[0]; rec.Secret != "" || rec.Sandbox.Env != nil || rec.ImageEnv != nil || rec.ContainerID != "" {
		t.Errorf("%+v", rec)
	}
	if got := r.get(s.ID); got.Env != nil {
		t.Errorf("env %v", got.Env)
	}
}

// A full disk must not keep alive what may fill it; the end record is written as
// soon as it can be.
func TestAnEndThatCannotBeWrittenEndsAllTheSame(t *testing.T) {
	r := started(t)
	s := r.create()
	r.records.Fail(func(string, sandbox.Record) error { return boxed.Errorf(boxed.CodeNoSpace, "full") })
	wantCode(t, r.Destroy(t.Context(), s.ID), boxed.CodeNoSpace, "ended")
	if n := len(r.driver.Containers()); n != 0 {
		t.Errorf("%d containers are left", n)
	}
	if got := r.get(s.ID); got.State != boxed.StateStopping {
		t.Errorf("it is %s", got.State)
	}
	r.records.Fail(nil)
	r.advance(time.Minute)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
	r.nothingLeft()
}

// What is done often looks at the living only: there may be 10,000 end records.
func TestTheEndedAreNotAmongTheLiving(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	var last boxed.ID
	for range 5 {
		last = r.create().ID
		if err := r.Destroy(t.Context(), last); err != nil {
			t.Fatal(err)
		}
	}
	r.waitWarm(1)
	if n := r.Living(); n != 1 {
		t.Errorf("%d living", n)
	}
	r.restart()
	r.waitWarm(1)
	if n := r.Living(); n != 1 || len(r.List()) != 5 {
		t.Errorf("%d living, %d listed", n, len(r.List()))
	}
}

// A step that comes too late finds the end decided.
func TestNothingComesBackFromItsEnd(t *testing.T) {
	r := started(t)
	s := r.create()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	events := len(r.eventsOf(s.ID))
	wantCode(t, r.StepRecord(s.ID), boxed.CodeGone)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
	if n := len(r.eventsOf(s.ID)); n != events {
		t.Errorf("%d more events", n-events)
	}
}

func TestAnEndThatFailsIsTriedAgainLessAndLessOften(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	r := started(t, func(c *sandbox.Config) {
		c.Log = slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(p)
		}), nil))
	})
	s := r.create()
	var tries atomic.Int32
	r.driver.Fail(sandboxtest.Gone, func(context.Context, string) error { return boxed.Errorf(boxed.CodeUnavailable, "unseen") })
	r.driver.Fail(sandboxtest.Remove, func(context.Context, string) error {
		tries.Add(1)
		return errors.New("boom")
	})
	err := r.Destroy(t.Context(), s.ID)
	wantCode(t, err, boxed.CodeInternal, "boom")
	_, err = r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
	if wantCode(t, err, boxed.CodeGone); boxed.AsError(err).Detail["ended_at"] != nil {
		t.Errorf("it has not ended: %v", boxed.AsError(err).Detail)
	}
	for _, seconds := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
		before := tries.Load()
		r.advance(time.Duration(seconds)*time.Second - 1)
		r.Sweep()
		time.Sleep(5 * time.Millisecond)
		if n := tries.Load(); n != before {
			t.Errorf("tried before %d s", seconds)
		}
		r.advance(1)
		r.eventually("it is tried", func() bool { r.Sweep(); return tries.Load() > before })
		r.eventually("the try is over", func() bool { return r.Judged(s.ID) })
	}
	mu.Lock()
	if n := strings.Count(log.String(), "boom"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	mu.Unlock()
	r.driver.Fail(sandboxtest.Remove, nil)
	r.advance(time.Minute)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// Linux has nobody pay for connections that are not accepted.
func TestTooManySocketsEndASandbox(t *testing.T) {
	r := started(t)
	s, other := r.create(), r.create()
	r.driver.SetSockets(s.ID, sandbox.MaxSockets+1)
	r.driver.SetSockets(other.ID, sandbox.MaxSockets)
	r.Look(t.Context())
	if end := r.waitEnd(s.ID, boxed.StateFailed, boxed.EndSockets); !strings.Contains(end.Message, "8193 TCP connections") {
		t.Errorf("message %q", end.Message)
	}
	r.left(1)
	r.works(other.ID)
}
