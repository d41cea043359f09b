package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// lockedBuffer is a buffer that one goroutine fills and another looks at.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Len()
}

func (l *lockedBuffer) Bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.b.Bytes())
}

// L12: concurrent destroys wait for one another, and one removal is enough.
func TestDestroyIsIdempotentAndCoalesced(t *testing.T) {
	r := started(t)
	s := r.create()
	var steps atomic.Int32
	r.onStep(func(_ boxed.ID, step string) error {
		if step == "remove" {
			steps.Add(1)
		}
		return nil
	})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := r.Destroy(t.Context(), s.ID); err != nil {
				t.Errorf("destroy: %v", err)
			}
			if got, err := r.Get(s.ID); err != nil || !got.State.Ended() {
				t.Errorf("it returned before the end: %+v, %v", got, err)
			}
		})
	}
	wg.Wait()
	if steps.Load() != 1 {
		t.Errorf("%d removals", steps.Load())
	}
	r.nothingLeft()
	if events := r.eventsOf(s.ID); events[len(events)-1] != boxed.EventStopped || len(events) != 3 {
		t.Errorf("events %v", events)
	}
	wantCode(t, r.Destroy(t.Context(), boxed.NewID(testNode)), boxed.CodeNotFound)
}

// L13, X14: what runs when its sandbox is destroyed ends typed, with no
// invented code.
func TestADestroyEndsWhatRunsInIt(t *testing.T) {
	r := started(t)
	s := r.create()
	began := make(chan struct{})
	type end struct {
		status boxed.ExitStatus
		err    error
	}
	ended := make(chan end, 1)
	go func() {
		status, err := r.Exec(context.Background(), s.ID, boxed.ExecRequest{
			Args: []string{"sleep", "1000"}, Started: func(boxed.ExecID) { close(began) },
		})
		ended <- end{status, err}
	}()
	<-began
	out, status := r.exec(s.ID, "true")
	if out != "" || status.Code != 0 {
		t.Fatal(status)
	}
	if _, err := r.StartExec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"listen", "80"}}); err != nil {
		t.Fatal(err)
	}
	var conn net.Conn
	r.eventually("it listens", func() bool {
		var err error
		conn, err = r.Dial(t.Context(), s.ID, 80)
		return err == nil
	})
	defer conn.Close()
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	e := <-ended
	if e.err != nil || e.status.Reason != boxed.ReasonLost || e.status.Code != -1 || e.status.Message == "" {
		t.Errorf("%+v, %v", e.status, e.err)
	}
	conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the tunnel ended with %v", err)
	}
	r.nothingLeft()
}

// L11: the end is bounded even if the agent does not do what it is asked.
func TestADestroyDoesNotNeedTheAgent(t *testing.T) {
	r := started(t)
	s := r.create()
	p := r.create()
	r.driver.Cut(s.ID)
	if _, err := r.Pause(t.Context(), p.ID); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for _, id := range []boxed.ID{s.ID, p.ID} {
		if err := r.Destroy(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	r.nothingLeft()
}

// L9: each step of destroy can fail, and is repeated by the sweep.
func TestADestroyStepThatFailsIsRepeated(t *testing.T) {
	for _, step := range destroySteps {
		for _, reason := range []boxed.EndReason{boxed.EndDestroyed, boxed.EndExpired, boxed.EndIdle} {
			t.Run(step+" "+string(reason), func(t *testing.T) {
				r := started(t)
				s := r.create(func(s *boxed.Spec) { s.IdleTimeout = boxed.Duration(10 * time.Minute) })
				var failures atomic.Int32
				r.onStep(func(_ boxed.ID, got string) error {
					if got == step && failures.Add(1) <= 2 {
						return boxed.Errorf(boxed.CodeNotReady, "boom")
					}
					return nil
				})
				switch reason {
				case boxed.EndDestroyed:
					wantCode(t, r.Destroy(t.Context(), s.ID), boxed.CodeNotReady, step)
				case boxed.EndExpired:
					ttl := boxed.Duration(time.Second)
					if _, err := r.Update(s.ID, boxed.Update{TTL: &ttl}, nil); err != nil {
						t.Fatal(err)
					}
					r.advance(time.Second)
				case boxed.EndIdle:
					r.advance(11 * time.Minute)
				}
				r.eventually("the sweep ends it", func() bool {
					r.advance(time.Minute) // at most so long between tries
					r.Sweep()
					return r.get(s.ID).State.Ended()
				})
				r.waitEnd(s.ID, boxed.StateStopped, reason)
				if failures.Load() < 3 {
					t.Errorf("it failed %d times", failures.Load())
				}
				r.nothingLeft()
			})
		}
	}
}

// I7: an agent that breaks the protocol ends its sandbox, and nobody else's.
func TestAnAgentThatBreaksTheProtocolEndsItsSandbox(t *testing.T) {
	for name, attack := range map[string][]byte{
		"bad version":    {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9},
		"too large":      {0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff},
		"flood of pings": bytes.Repeat([]byte{0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, 1000),
	} {
		t.Run(name, func(t *testing.T) {
			r := started(t)
			good := r.create()
			go_ := make(chan struct{})
			r.driver.SetAgent(func(ctx context.Context, box sandbox.Box, dial func() (net.Conn, error)) {
				conn, err := dial()
				if err != nil {
					return
				}
				defer conn.Close()
				if err := sayHello(conn); err != nil {
					return
				}
				<-go_
				conn.Write(attack)
				<-ctx.Done()
			})
			s := r.create()
			close(go_)
			r.waitEnd(s.ID, boxed.StateFailed, boxed.EndAgentProtocol)
			r.left(1)
			r.works(good.ID)
			r.driver.SetAgent(nil)
		})
	}
}

// X25: an agent that never dials fails the create, and only that.
func TestAnAgentThatNeverDialsFailsTheCreate(t *testing.T) {
	r := started(t)
	r.driver.SetAgent(sandboxtest.Silent)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := r.Create(ctx, "ann", r.spec(), anybody)
	wantCode(t, err, boxed.CodeDeadline)
	r.nothingLeft()
}

// End records are kept for a while, and then forgotten.
func TestEndRecordsArePruned(t *testing.T) {
	r := started(t, func(c *sandbox.Config) { c.EndedFor, c.EndedMost = 24*time.Hour, 3 })
	var ids []boxed.ID
	for range 5 {
		s := r.create()
		if err := r.Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
		r.advance(time.Minute)
	}
	r.nothingLeft()
	r.eventually("all is cleared away", func() bool { return r.Clearing() == 0 })
	r.Forget()
	if n := len(r.List()); n != 5 {
		t.Errorf("%d records while their uids rest", n)
	}
	r.advance(sandbox.UIDRest)
	r.Forget()
	if n := len(r.List()); n != 3 {
		t.Errorf("%d records, want the youngest 3", n)
	}
	_, err := r.Get(ids[0])
	wantCode(t, err, boxed.CodeNotFound)
	r.restart()
	if n := len(r.List()); n != 3 {
		t.Errorf("%d records after a restart", n)
	}
	r.advance(25 * time.Hour)
	r.Forget()
	if all, _ := r.records.All(); len(r.List()) != 0 || len(all) != 0 {
		t.Errorf("%d records, %d durable", len(r.List()), len(all))
	}
}
