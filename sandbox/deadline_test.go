package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

func ttl(d time.Duration) boxed.Update {
	v := boxed.Duration(d)
	return boxed.Update{TTL: &v}
}

func TestATTLEndsASandbox(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.TTL = boxed.Duration(10 * time.Minute) })
	forever := r.create(func(s *boxed.Spec) { s.TTL = boxed.Never })
	r.advance(10*time.Minute - 1)
	r.Sweep()
	r.works(s.ID)
	r.advance(1)
	r.Sweep()
	if end := r.waitEnd(s.ID, boxed.StateStopped, boxed.EndExpired); end.Message != "its ttl of 10m passed" {
		t.Errorf("message %q", end.Message)
	}
	r.advance(1000 * time.Hour)
	r.Sweep()
	r.works(forever.ID)
}

// L3, L5: the deadline is durable; a daemon that was away past it ends the
// sandbox when it is back.
func TestATTLThatPassedWhileTheDaemonWasAwayHolds(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.advance(2 * time.Hour)
	r.run()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndExpired)
	r.nothingLeft()
}

// L6: pausing stops both clocks.
func TestAPauseStopsTheClocks(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(10 * time.Minute) })
	r.advance(5 * time.Minute)
	for range 20 { // idempotent, and nothing is lost on the way
		for range 2 {
			p, err := r.Pause(t.Context(), s.ID)
			if err != nil || p.State != boxed.StatePaused || !p.ExpiresAt.IsZero() || p.PausedAt.IsZero() {
				t.Fatalf("%+v, %v", p, err)
			}
		}
		r.advance(100 * time.Hour)
		r.Sweep()
		_, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
		wantCode(t, err, boxed.CodeConflict, "resume")
		for range 2 {
			p, err := r.Resume(t.Context(), s.ID)
			if err != nil || p.State != boxed.StateRunning || !p.ExpiresAt.Equal(r.now().Add(55*time.Minute)) {
				t.Fatalf("%+v, %v", p, err)
			}
		}
		r.Sweep()
	}
	r.works(s.ID)
	// A new ttl while it is paused counts from its resuming.
	if _, err := r.Pause(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Update(s.ID, ttl(3*time.Hour), nil); err != nil {
		t.Fatal(err)
	}
	r.restart()
	r.advance(time.Hour)
	p, err := r.Resume(t.Context(), s.ID)
	if err != nil || !p.ExpiresAt.Equal(r.now().Add(3*time.Hour)) {
		t.Errorf("%+v, %v", p, err)
	}
}

// A freeze whose record cannot be written is taken back, and so is a thaw.
func TestAPauseThatCannotBeRecordedIsTakenBack(t *testing.T) {
	r := started(t)
	s := r.create()
	broken := func(string, sandbox.Record) error { return errors.New("boom") }
	r.records.Fail(broken)
	if _, err := r.Pause(t.Context(), s.ID); err == nil {
		t.Error("paused without a record")
	}
	r.works(s.ID)
	r.records.Fail(nil)
	if _, err := r.Pause(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.records.Fail(broken)
	if _, err := r.Resume(t.Context(), s.ID); err == nil {
		t.Error("resumed without a record")
	}
	all, _ := r.driver.List(t.Context())
	if len(all) != 1 || !all[0].Paused {
		t.Errorf("%+v", all)
	}
	r.records.Fail(nil)
	if _, err := r.Resume(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.works(s.ID)
}

// L5: whatever order renewals, pauses and sweeps come in, a sandbox lives
// exactly as long as the last decision says, and one that ended stays ended.
func TestRenewAgainstExpire(t *testing.T) {
	r := started(t, func(c *sandbox.Config) { c.LastUID = 265535 })
	rapid.Check(t, func(t *rapid.T) {
		s, err := r.tryCreate(func(s *boxed.Spec) { s.TTL = boxed.Duration(10 * time.Second) })
		if err != nil {
			t.Fatal(err)
		}
		defer r.Destroy(context.Background(), s.ID)
		// The model: when it ends, or what was left when it was paused.
		due, left, paused, dead := r.now().Add(10*time.Second), time.Duration(0), false, false
		// The Manager sweeps too, whenever it likes.
		swept := func() {
			dead = true
			r.eventually("it has ended", func() bool { return r.get(s.ID).State.Ended() })
		}
		mayEnd := func() bool { return !dead && !paused && !r.now().Before(due) }
		check := func(err error, what string) {
			switch {
			case mayEnd() && boxed.CodeOf(err) == boxed.CodeGone:
				swept()
			case dead && boxed.CodeOf(err) != boxed.CodeGone:
				t.Fatalf("%s of what has ended: %v", what, err)
			case !dead && err != nil:
				t.Fatalf("%s: %v", what, err)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"time passes": func(t *rapid.T) {
				r.advance(time.Duration(rapid.IntRange(1, 6000).Draw(t, "ms")) * time.Millisecond)
			},
			"to the instant": func(t *rapid.T) {
				if d := due.Sub(r.now()); !paused && !dead && d > 0 {
					r.advance(d)
				}
			},
			"sweep": func(t *rapid.T) {
				expired := !paused && !r.now().Before(due)
				r.Sweep()
				if expired && !dead {
					swept()
				}
			},
			"renew": func(t *rapid.T) {
				d := time.Duration(rapid.IntRange(1000, 8000).Draw(t, "ms")) * time.Millisecond
				_, err := r.Update(s.ID, ttl(d), nil)
				check(err, "renew")
				if due, left = r.now().Add(d), d; paused {
					due = time.Time{}
				}
			},
			"renew at once with a sweep": func(t *rapid.T) {
				expired := !paused && !r.now().Before(due) && !dead
				var wg sync.WaitGroup
				wg.Go(r.Sweep)
				_, err := r.Update(s.ID, ttl(5*time.Second), nil)
				wg.Wait()
				if expired && err != nil { // the sweep was first
					swept()
				}
				check(err, "renew")
				due, left = r.now().Add(5*time.Second), 5*time.Second
			},
			"pause": func(t *rapid.T) {
				if !dead && !paused && !r.now().Before(due) {
					return // which of the two is first is anybody's guess
				}
				_, err := r.Pause(context.Background(), s.ID)
				check(err, "pause")
				if !dead && !paused {
					paused, left = true, due.Sub(r.now())
				}
			},
			"resume": func(t *rapid.T) {
				_, err := r.Resume(context.Background(), s.ID)
				check(err, "resume")
				if !dead && paused {
					paused, due = false, r.now().Add(left)
				}
			},
			"": func(t *rapid.T) {
				got := r.get(s.ID)
				if mayEnd() && got.State != boxed.StateRunning {
					swept()
					got = r.get(s.ID)
				}
				if dead {
					if got.State != boxed.StateStopped || got.Reason != boxed.EndExpired {
						t.Fatalf("%s, %s", got.State, got.Reason)
					}
					return
				}
				if paused != (got.State == boxed.StatePaused) || !paused && !got.ExpiresAt.Equal(due) {
					t.Fatalf("%s until %v, want paused %t until %v", got.State, got.ExpiresAt, paused, due)
				}
			},
		})
	})
}

// L1, L23: what runs keeps a sandbox from being idle, silent or not.
func TestWhatCountsAsBusy(t *testing.T) {
	idle := func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(10 * time.Minute); s.TTL = boxed.Never }
	for name, begin := range map[string]func(r *rig, id boxed.ID) (end func()){
		"a silent exec": func(r *rig, id boxed.ID) func() {
			ctx, cancel := context.WithCancel(context.Background())
			began, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				r.Exec(ctx, id, boxed.ExecRequest{Args: []string{"sleep", "3600"}, Started: func(boxed.ExecID) { close(began) }})
			}()
			<-began
			return func() { cancel(); <-done }
		},
		"a terminal": func(r *rig, id boxed.ID) func() {
			ctx, cancel := context.WithCancel(context.Background())
			began, done := make(chan struct{}), make(chan struct{})
			in, typed := io.Pipe()
			go func() {
				defer close(done)
				r.Exec(ctx, id, boxed.ExecRequest{Args: []string{"cat"}, TTY: true, Stdin: in, Started: func(boxed.ExecID) { close(began) }})
			}()
			<-began
			return func() { cancel(); <-done; typed.Close() }
		},
		"a detached exec": func(r *rig, id boxed.ID) func() {
			e, err := r.StartExec(context.Background(), id, boxed.ExecRequest{Args: []string{"sleep", "3600"}})
			if err != nil {
				r.t.Fatal(err)
			}
			return func() { r.KillExec(context.Background(), id, e.ID) }
		},
		"a tunnel": func(r *rig, id boxed.ID) func() {
			e, err := r.StartExec(context.Background(), id, boxed.ExecRequest{Args: []string{"listen", "80"}})
			if err != nil {
				r.t.Fatal(err)
			}
			var end func()
			r.eventually("it listens", func() bool {
				conn, err := r.Dial(context.Background(), id, 80)
				if err == nil {
					end = func() { conn.Close() }
				}
				return err == nil
			})
			_ = e
			return func() { end(); r.KillExec(context.Background(), id, e.ID) }
		},
		"a download": func(r *rig, id boxed.ID) func() {
			if _, err := r.WriteFile(context.Background(), id, boxed.WriteRequest{Path: "f", Content: bytes.NewReader(make([]byte, 1<<20))}); err != nil {
				r.t.Fatal(err)
			}
			f, err := r.ReadFile(context.Background(), id, boxed.ReadRequest{Path: "f", Length: -1})
			if err != nil {
				r.t.Fatal(err)
			}
			return func() { f.Close() }
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := started(t)
			s := r.create(idle)
			end := begin(r, s.ID)
			for range 5 {
				r.advance(time.Hour)
				r.Sweep()
			}
			// A sweep decides behind our back: give a wrong decision the time to show.
			time.Sleep(50 * time.Millisecond)
			if got := r.get(s.ID); got.State != boxed.StateRunning {
				t.Fatalf("%s: %s", got.State, got.Message)
			}
			r.works(s.ID)
			end()
			r.eventually("it is idle in the end", func() bool {
				r.advance(time.Minute)
				r.Sweep()
				return r.get(s.ID).State.Ended()
			})
			r.waitEnd(s.ID, boxed.StateStopped, boxed.EndIdle)
		})
	}
}

// L4: configuration is no activity.
func TestSettingsAreNoActivity(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(10 * time.Minute) })
	for range 5 {
		r.advance(2*time.Minute - time.Second)
		idle, labels := boxed.Duration(10*time.Minute), map[string]string{"a": "b"}
		u := ttl(10 * time.Hour)
		u.IdleTimeout, u.Labels = &idle, &labels
		if _, err := r.Update(s.ID, u, nil); err != nil {
			t.Fatal(err)
		}
		r.Get(s.ID)
		r.List()
		r.Sweep()
	}
	r.works(s.ID) // this is
	r.advance(9 * time.Minute)
	r.Sweep()
	r.works(s.ID)
	r.advance(10 * time.Minute)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndIdle)
}

// L2: an agent that does not answer is no reason to end a sandbox as idle.
func TestAnAgentThatIsSilentIsNotIdle(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.IdleTimeout, s.TTL = boxed.Duration(time.Minute), boxed.Never })
	boxes := r.driver.Boxes()
	for id := range boxes {
		if err := r.driver.Pause(t.Context(), id); err != nil { // starved, for all that we can see
			t.Fatal(err)
		}
	}
	r.advance(time.Hour)
	r.Sweep()
	time.Sleep(50 * time.Millisecond)
	if got := r.get(s.ID); got.State != boxed.StateRunning {
		t.Fatalf("%s: %s", got.State, got.Message)
	}
}

// L13: calls of what is not running say what to do.
func TestCallsInEveryState(t *testing.T) {
	r := started(t)
	block := make(chan struct{})
	reached := make(chan boxed.ID, 1)
	r.driver.Fail(sandboxtest.Start, func(_ context.Context, _ string) error {
		reached <- r.List()[0].ID
		<-block
		return nil
	})
	made := make(chan error, 1)
	go func() {
		_, err := r.tryCreate()
		made <- err
	}()
	id := <-reached
	calls := map[string]func() error{
		"exec": func() error {
			_, err := r.Exec(t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
			return err
		},
		"pause":  func() error { _, err := r.Pause(t.Context(), id); return err },
		"resume": func() error { _, err := r.Resume(t.Context(), id); return err },
		"list":   func() error { _, err := r.ListFiles(t.Context(), id, "/"); return err },
		"dial":   func() error { _, err := r.Dial(t.Context(), id, 1); return err },
	}
	for name, call := range calls {
		t.Run("starting "+name, func(t *testing.T) { wantCode(t, call(), boxed.CodeConflict) })
	}
	close(block)
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	if err := r.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	calls["stats"] = func() error { _, err := r.Stats(t.Context(), id); return err }
	calls["update"] = func() error { _, err := r.Update(id, ttl(time.Hour), nil); return err }
	for name, call := range calls {
		t.Run("ended "+name, func(t *testing.T) { wantCode(t, call(), boxed.CodeGone, "destroyed as asked") })
	}
	id = boxed.NewID(testNode)
	for name, call := range calls {
		t.Run("absent "+name, func(t *testing.T) { wantCode(t, call(), boxed.CodeNotFound, fmt.Sprint(id)) })
	}
}

func TestWaitReturnsAtTheStateOrTheEnd(t *testing.T) {
	r := started(t)
	s := r.create()
	if got, err := r.Wait(t.Context(), s.ID, boxed.StateRunning); err != nil || got.State != boxed.StateRunning {
		t.Fatalf("%+v, %v", got, err)
	}
	done := make(chan *boxed.Sandbox, 2)
	for _, until := range []boxed.State{boxed.StatePaused, boxed.StateStopped} {
		go func() {
			got, err := r.Wait(context.Background(), s.ID, until)
			if err != nil {
				t.Error(err)
			}
			done <- got
		}()
	}
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got := <-done; got.State != boxed.StateStopped {
			t.Errorf("%+v", got)
		}
	}
	p := r.create()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := r.Wait(ctx, p.ID, boxed.StatePaused)
	wantCode(t, err, boxed.CodeDeadline)
}
