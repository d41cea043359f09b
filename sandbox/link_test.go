package sandbox_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// A signal that comes before its program has started is not lost.
func TestAnEarlySignalArrives(t *testing.T) {
	r := started(t)
	s := r.create()
	signals := make(chan string, 1)
	signals <- "TERM"
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	status, err := r.Exec(ctx, s.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}, Signals: signals})
	if err != nil || status.Reason != boxed.ReasonSignaled || status.Signal != "TERM" {
		t.Errorf("%+v, %v", status, err)
	}
}

// Output that was on its way when a link broke, and is not kept any more, is
// said to be missing.
func TestOutputThatIsMissingIsSaid(t *testing.T) {
	r := started(t)
	const size = 400 * 64 << 10
	var written atomic.Int64
	r.driver.SetProgram("spew", func(p *sandboxtest.Proc) int {
		for range size / (64 << 10) {
			n, err := p.Stdout.Write(make([]byte, 64<<10))
			if written.Add(int64(n)); err != nil {
				return 1
			}
		}
		return 0
	})
	stalls := func() {
		for last := int64(-1); last != written.Load(); time.Sleep(200 * time.Millisecond) {
			last = written.Load()
		}
	}
	s := r.create()
	// Less is on its way over the multiplexer than is kept, and then nothing is
	// missing: the direct connection of a new sandbox may not be there yet.
	for range 10 {
		total, once := 0, sync.Once{}
		lost := make(chan struct{})
		status, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"spew"}, Stdout: writerFunc(func(p []byte) (int, error) {
			once.Do(func() {
				r.driver.Mute(s.ID)
				go func() {
					defer close(lost)
					stalls() // it has ended, or the agent waits for more of it to be taken
					r.driver.Cut(s.ID)
				}()
			})
			total += len(p)
			return len(p), nil
		})})
		<-lost
		if err == nil && total == size {
			continue
		}
		if wantCode(t, err, boxed.CodeLost, "bytes of output are missing"); status.Reason != boxed.ReasonExited || total >= size {
			t.Errorf("%d bytes, %+v", total, status)
		}
		return
	}
	t.Error("nothing was ever missing")
}

// An orphan of a paused sandbox is ended once it runs again: its client could
// not come back before.
func TestOrphansOfAPausedSandboxEndAfterItIsResumed(t *testing.T) {
	r := started(t)
	s := r.create()
	ctx, away := context.WithCancelCause(context.Background())
	ids, done := make(chan boxed.ExecID, 1), make(chan struct{})
	go func() {
		defer close(done)
		r.Exec(ctx, s.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}, Started: func(id boxed.ExecID) { ids <- id }})
	}()
	id := <-ids
	away(boxed.ErrGoingAway)
	<-done
	if _, err := r.Pause(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.end()
	r.make()
	r.SetOrphanGrace(100 * time.Millisecond)
	r.begin()
	r.eventually("it has recovered", r.Recovered)
	time.Sleep(200 * time.Millisecond)
	if _, err := r.Resume(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	running := func() bool {
		e, err := r.GetExec(t.Context(), s.ID, id)
		if err != nil {
			t.Fatal(err)
		}
		return e.Running
	}
	if !running() {
		t.Error("its client had no time to come back")
	}
	r.eventually("it is killed", func() bool { return !running() })
}

// What the caller could have avoided names the field.
func TestABadPathOfAFileNamesItsField(t *testing.T) {
	r := started(t)
	_, err := r.tryCreate(func(s *boxed.Spec) { s.Files = []boxed.File{{Path: "a"}, {Path: "b\x00c"}} })
	if wantCode(t, err, boxed.CodeInvalid); boxed.AsError(err).Field() != "files[1].path" {
		t.Errorf("field %q of %v", boxed.AsError(err).Field(), err)
	}
}

// "Execs live on when boxed-node goes away": an attached exec whose client
// comes back in time goes on, byte for byte; one whose client does not is
// killed after the grace; a detached one stays.
func TestAttachedExecsWaitForTheirClientsAfterARestart(t *testing.T) {
	r := started(t)
	line := make(chan struct{}, 100)
	r.driver.SetProgram("count", func(p *sandboxtest.Proc) int {
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(p.Stdout, "%d\n", i); err != nil || !p.Sleep(2*time.Millisecond) {
				return 1
			}
			select {
			case line <- struct{}{}:
			default:
			}
		}
	})
	s := r.create()
	start := func() (boxed.ExecID, *lockedBuffer, chan error, context.CancelCauseFunc) {
		ctx, cancel := context.WithCancelCause(context.Background())
		var out lockedBuffer
		ids, done := make(chan boxed.ExecID, 1), make(chan error, 1)
		go func() {
			_, err := r.Exec(ctx, s.ID, boxed.ExecRequest{
				Args: []string{"count"}, Stdout: &out, Started: func(id boxed.ExecID) { ids <- id },
			})
			done <- err
		}()
		return <-ids, &out, done, cancel
	}
	back, out, backDone, away := start()
	gone, _, goneDone, awayToo := start()
	detached, err := r.StartExec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("it writes", func() bool { return out.Len() > 10 })
	away(boxed.ErrGoingAway)
	awayToo(boxed.ErrGoingAway)
	<-backDone
	<-goneDone
	r.end()
	r.make()
	r.SetOrphanGrace(300 * time.Millisecond)
	r.begin()
	r.eventually("it has recovered", r.Recovered)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := out.Len()
	attached := make(chan error, 1)
	go func() {
		_, err := r.Attach(ctx, s.ID, back, boxed.AttachRequest{StdoutOffset: int64(seen), Stdout: out})
		attached <- err
	}()
	state := func(id boxed.ExecID) *boxed.Exec {
		e, err := r.GetExec(t.Context(), s.ID, id)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	r.eventually("the other one is killed", func() bool { return !state(gone).Running })
	if e := state(gone); e.Status.Reason != boxed.ReasonCanceled {
		t.Errorf("%+v", e.Status)
	}
	if !state(back).Running || !state(detached.ID).Running {
		t.Error("the wrong ones were killed")
	}
	r.eventually("more comes", func() bool { return out.Len() > seen+100 })
	cancel()
	<-attached
	want := &bytes.Buffer{}
	for i := 0; want.Len() < out.Len(); i++ {
		fmt.Fprintf(want, "%d\n", i)
	}
	if !bytes.Equal(out.Bytes(), want.Bytes()[:out.Len()]) {
		t.Error("bytes were lost or came twice")
	}
}

// X12, X13, X14: a link that breaks under an exec is taken up where it was.
func TestABrokenLinkLosesNoByte(t *testing.T) {
	r := started(t)
	const lines = 20_000
	r.driver.SetProgram("count", func(p *sandboxtest.Proc) int {
		for i := range lines {
			fmt.Fprintf(p.Stdout, "%d\n", i)
			if i%50 == 0 {
				p.Sleep(time.Millisecond)
			}
		}
		return 5
	})
	s := r.create()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var out strings.Builder
	var cutting sync.WaitGroup
	// From the first byte on: before it nobody can know whether the program was started.
	cut := sync.OnceFunc(func() {
		cutting.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(20 * time.Millisecond):
					r.driver.Cut(s.ID)
				}
			}
		})
	})
	status, err := r.Exec(ctx, s.ID, boxed.ExecRequest{Args: []string{"count"}, Stdout: writerFunc(func(p []byte) (int, error) {
		cut()
		return out.Write(p)
	})})
	cancel()
	cutting.Wait()
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "%d\n", i)
	}
	if out.String() != want.String() || status.Code != 5 || status.Reason != boxed.ReasonExited {
		t.Errorf("%d bytes of %d, %+v", out.Len(), want.Len(), status)
	}
}
