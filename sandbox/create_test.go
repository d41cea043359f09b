package sandbox_test

import (
	"context"
	"errors"
	"net"
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

func TestASandboxLivesAndEnds(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) {
		s.Name, s.Labels = "web", map[string]string{"k": "v"}
		s.Env = map[string]string{"A": "1"}
		s.Files = []boxed.File{{Path: "sub/hello", Content: []byte("hi")}, {Path: "/tmp/x", Content: []byte("y"), Mode: 0o600}}
	})
	if s.State != boxed.StateRunning || s.Owner != "ann" || s.Name != "web" || s.WarmMiss != "template" || s.Warm ||
		s.ImageDigest != "sha256:1" || s.Runtime != sandboxtest.Runtime || !s.ExpiresAt.Equal(r.now().Add(time.Hour)) {
		t.Errorf("%+v", s)
	}
	r.works(s.ID)
	body, err := r.ReadFile(t.Context(), s.ID, boxed.ReadRequest{Path: "sub/hello", Length: -1})
	if err != nil || body.Info.Path != "/workspace/sub/hello" || body.Length != 2 {
		t.Fatalf("%+v, %v", body, err)
	}
	body.Close()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
	r.nothingLeft()
	want := []boxed.EventType{boxed.EventCreated, boxed.EventStarted, boxed.EventExec, boxed.EventExecEnd, boxed.EventStopped}
	if got := r.eventsOf(s.ID); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	// Whoever comes later learns why.
	_, err = r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
	wantCode(t, err, boxed.CodeGone, "destroyed")
	if e := boxed.AsError(err); e.Detail["reason"] != "destroyed" {
		t.Errorf("detail %v", e.Detail)
	}
}

// L10: a create that fails at a step leaves nothing, and the record says why.
func TestACreateThatFailsAtAnyStepLeavesNothing(t *testing.T) {
	for _, step := range append(slices.Clone(createSteps), "driver create", "driver start", "driver limit", "write record", "dir", "files") {
		t.Run(step, func(t *testing.T) {
			r := started(t)
			boom := errors.New("boom")
			var specs []func(*boxed.Spec)
			code := boxed.CodeInternal
			switch step {
			case "driver create":
				code = boxed.CodeNotReady
				r.driver.Fail(sandboxtest.Create, func(context.Context, string) error { return boxed.Errorf(boxed.CodeNotReady, "boom") })
			case "driver start":
				r.driver.Fail(sandboxtest.Start, func(context.Context, string) error { return boom })
			case "driver limit": // only a warm one needs it
				r.end()
				withPool(1)(&r.cfg)
				r.run()
				r.waitWarm(1)
				r.driver.Fail(sandboxtest.Create, func(context.Context, string) error { return errors.New("the pool must not come back") })
				r.driver.Fail(sandboxtest.Limit, func(context.Context, string) error { return boom })
				specs = append(specs, func(s *boxed.Spec) { s.Limits.MemoryBytes *= 2 })
			case "write record":
				r.records.Fail(func(_ string, rec sandbox.Record) error {
					if rec.Sandbox.State == boxed.StateRunning {
						return boom
					}
					return nil
				})
			case "dir":
				code = boxed.CodeInvalid
				specs = append(specs, func(s *boxed.Spec) { s.Dir = "/usr/nowhere" })
			case "files":
				code = boxed.CodeInvalid
				specs = append(specs, func(s *boxed.Spec) { s.Files = []boxed.File{{Path: "/etc/passwd"}} })
			default:
				r.onStep(func(_ boxed.ID, s string) error {
					if s == step {
						return boom
					}
					return nil
				})
			}
			_, err := r.tryCreate(specs...)
			wantCode(t, err, code)
			list := r.List()
			if len(list) != 1 {
				t.Fatalf("%d records", len(list))
			}
			s := r.waitEnd(list[0].ID, boxed.StateFailed, boxed.EndCreateFailed)
			if !strings.Contains(s.Message, "step") {
				t.Errorf("the record says %q", s.Message)
			}
			if code == boxed.CodeInvalid && boxed.AsError(err).Field() == "" {
				t.Errorf("no field: %v", err)
			}
			r.driver.Fail(sandboxtest.List, nil)
			r.nothingLeft()
		})
	}
}

// L9, L10: if even the undo fails, the sandbox is stopping until the sweep has
// done it, and its name is free again.
func TestAnUndoThatFailsIsFinishedByTheSweep(t *testing.T) {
	for _, step := range destroySteps {
		t.Run(step, func(t *testing.T) {
			r := started(t)
			var broken atomic.Bool
			broken.Store(true)
			r.onStep(func(_ boxed.ID, s string) error {
				if broken.Load() && (s == "start" || s == step) {
					return errors.New("boom")
				}
				return nil
			})
			named := func(s *boxed.Spec) { s.Name = "again" }
			if _, err := r.tryCreate(named); err == nil {
				t.Fatal("it was made")
			}
			id := r.List()[0].ID
			if s := r.get(id); s.State.Ended() {
				t.Fatalf("it is %s although the step failed", s.State)
			}
			broken.Store(false)
			r.advance(time.Minute)
			r.Sweep()
			r.waitEnd(id, boxed.StateFailed, boxed.EndCreateFailed)
			r.nothingLeft()
			r.create(named)
		})
	}
}

// L10: a caller that leaves takes its half-made sandbox with it.
func TestACallerThatLeavesDuringACreateLeavesNothing(t *testing.T) {
	for _, step := range createSteps {
		t.Run(step, func(t *testing.T) {
			r := started(t)
			ctx, cancel := context.WithCancel(t.Context())
			r.onStep(func(_ boxed.ID, s string) error {
				if s == step {
					cancel()
				}
				return nil
			})
			if step == "link" {
				r.driver.SetAgent(sandboxtest.Silent)
			}
			if s, err := r.Create(ctx, "ann", r.spec(), anybody); err == nil {
				// Too late to notice: then it is a whole sandbox.
				if s.State != boxed.StateRunning {
					t.Errorf("%+v", s)
				}
				return
			} else if c := boxed.CodeOf(err); c != boxed.CodeCanceled {
				t.Errorf("got %v (%s)", err, c)
			}
			r.waitEnd(r.List()[0].ID, boxed.StateFailed, boxed.EndCreateFailed)
			r.nothingLeft()
		})
	}
}

// X25, X27: a container whose first process ends at once does not keep its
// caller waiting for a minute.
func TestACreateWhoseAgentDiesSaysSoSoon(t *testing.T) {
	r := started(t)
	r.driver.SetAgent(func(ctx context.Context, box sandbox.Box, _ func() (net.Conn, error)) {
		go r.driver.Crash(box.ID, 3, false)
		<-ctx.Done()
	})
	began := time.Now()
	_, err := r.tryCreate()
	if err == nil || errors.Is(err, boxed.CodeGone) || time.Since(began) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	s := r.get(r.List()[0].ID)
	if s.State != boxed.StateFailed || !strings.Contains(s.Message, "exit code 3") {
		t.Errorf("%s, %s: %q", s.State, s.Reason, s.Message)
	}
	r.nothingLeft()
}

// L12, L13: a destroy during a create ends it, and its caller hears "gone".
func TestADestroyDuringACreateEndsIt(t *testing.T) {
	for _, step := range createSteps {
		t.Run(step, func(t *testing.T) {
			r := started(t)
			if step == "link" {
				r.driver.SetAgent(sandboxtest.Silent)
			}
			var once sync.Once
			reached := make(chan boxed.ID, 1)
			r.onStep(func(id boxed.ID, s string) error {
				if s == step {
					once.Do(func() { reached <- id })
				}
				return nil
			})
			failed := make(chan error, 1)
			go func() {
				_, err := r.tryCreate()
				failed <- err
			}()
			id := <-reached
			if err := r.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; err != nil {
				wantCode(t, err, boxed.CodeGone, "destroyed as asked")
			}
			r.waitEnd(id, boxed.StateStopped, boxed.EndDestroyed)
			r.nothingLeft()
		})
	}
}

// The room and the name of a sandbox are reserved with the decision.
func TestAdmissionIsJudgedUnderOneLock(t *testing.T) {
	r := started(t)
	const most = 3
	admit := func(a sandbox.Admission) error {
		if a.Used().Sandboxes >= most {
			return boxed.Errorf(boxed.CodeExhausted, "full")
		}
		if id := a.Named("ann", "one"); id != "" {
			return boxed.Errorf(boxed.CodeConflict, "taken")
		}
		return nil
	}
	var wg sync.WaitGroup
	var made, taken, full atomic.Int32
	for range 30 {
		wg.Go(func() {
			_, err := r.Create(t.Context(), "ann", r.spec(func(s *boxed.Spec) { s.Name = "one" }), admit)
			switch boxed.CodeOf(err) {
			case "":
				made.Add(1)
			case boxed.CodeConflict:
				taken.Add(1)
			default:
				full.Add(1)
			}
		})
	}
	wg.Wait()
	if made.Load() != 1 || taken.Load() != 29 {
		t.Errorf("made %d, taken %d, else %d", made.Load(), taken.Load(), full.Load())
	}
}

// A name cannot be had twice by renaming either.
func TestConcurrentRenamesGiveANameOnce(t *testing.T) {
	r := started(t)
	var boxes []*boxed.Sandbox
	for range 8 {
		boxes = append(boxes, r.create())
	}
	name := "wanted"
	admit := func(a sandbox.Admission) error {
		if a.Named("ann", name) != "" {
			return boxed.Errorf(boxed.CodeConflict, "taken")
		}
		return nil
	}
	slow := make(chan struct{})
	r.records.Fail(func(string, sandbox.Record) error { <-slow; return nil })
	var wg sync.WaitGroup
	var got atomic.Int32
	for _, s := range boxes {
		wg.Go(func() {
			if _, err := r.Update(s.ID, boxed.Update{Name: &name}, admit); err == nil {
				got.Add(1)
			}
		})
	}
	time.AfterFunc(50*time.Millisecond, func() { close(slow) })
	wg.Wait()
	if got.Load() != 1 {
		t.Errorf("%d have the name", got.Load())
	}
	// One that cannot be written is not taken.
	r.records.Fail(func(string, sandbox.Record) error { return errors.New("boom") })
	other := "other"
	if _, err := r.Update(boxes[0].ID, boxed.Update{Name: &other}, nil); err == nil {
		t.Error("an update without its record")
	}
	r.records.Fail(nil)
	for _, s := range r.List() {
		if s.Name == other {
			t.Error("the name stayed")
		}
	}
}

func TestUIDsAreUniqueAndRest(t *testing.T) {
	r := started(t, func(c *sandbox.Config) { c.FirstUID, c.LastUID = 300000, 300003 })
	seen := map[int]bool{}
	var last boxed.ID
	for range 4 {
		s := r.create()
		uid := r.UID(string(s.ID))
		if seen[uid] || uid < 300000 || uid > 300003 {
			t.Errorf("uid %d", uid)
		}
		seen[uid], last = true, s.ID
	}
	_, err := r.tryCreate()
	wantCode(t, err, boxed.CodeExhausted, "uid")
	uid := r.UID(string(last))
	if err := r.Destroy(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	_, err = r.tryCreate()
	wantCode(t, err, boxed.CodeExhausted)
	r.restart() // what rests is known from the records
	_, err = r.tryCreate()
	wantCode(t, err, boxed.CodeExhausted)
	r.advance(sandbox.UIDRest + time.Second)
	if s := r.create(func(s *boxed.Spec) { s.TTL = boxed.Never }); r.UID(string(s.ID)) != uid {
		t.Errorf("uid %d, want the rested %d", r.UID(string(s.ID)), uid)
	}
}

func TestARuntimeOrImageThatIsNotThereSaysSo(t *testing.T) {
	r := started(t)
	_, err := r.tryCreate(func(s *boxed.Spec) { s.Runtime = "nonesuch" })
	if wantCode(t, err, boxed.CodeUnavailable, "nonesuch"); boxed.AsError(err).Field() != "runtime" {
		t.Errorf("field %q", boxed.AsError(err).Field())
	}
	_, err = r.tryCreate(func(s *boxed.Spec) { s.Runtime = "broken" })
	wantCode(t, err, boxed.CodeUnavailable, "it is broken")
	_, err = r.tryCreate(func(s *boxed.Spec) { s.Image = "missing" })
	if wantCode(t, err, boxed.CodeImage); boxed.AsError(err).Detail["reason"] != "not_found" {
		t.Errorf("%v", boxed.AsError(err).Detail)
	}
	if len(r.List()) != 0 {
		t.Error("a record was made")
	}
}
