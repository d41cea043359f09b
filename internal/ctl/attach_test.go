//go:build unix

package ctl

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// stub is a service of which a test defines what it needs.
type stub struct {
	boxed.API
	boxed.Admin
	boxed.SSH
	boxed.Cluster
	boxed.Policies
	create func(context.Context, boxed.Spec) (*boxed.Sandbox, error)

	mu        sync.Mutex
	spec      boxed.Spec
	destroyed []boxed.ID
}

func (*stub) Run(context.Context, boxed.ID, boxed.ExecRequest) (*client.ExecResult, error) {
	return nil, errors.New("not in this test")
}

func (*stub) Version(context.Context) (string, error) { return "stub", nil }

func (s *stub) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	s.mu.Lock()
	s.spec = spec
	s.mu.Unlock()
	return s.create(ctx, spec)
}

// List has the sandbox that Create made although its caller had gone.
func (s *stub) List(_ context.Context, f boxed.Filter) (boxed.List, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if call := f.Labels[callLabel]; call == "" || call != s.spec.Labels[callLabel] {
		return boxed.List{}, nil
	}
	return boxed.List{Sandboxes: []boxed.Sandbox{{ID: "late"}}}, nil
}

func (s *stub) Destroy(_ context.Context, id boxed.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.destroyed = append(s.destroyed, id)
	return nil
}

// byHand are interrupts that a test raises itself.
func byHand() (in *interrupts, raise func(syscall.Signal)) {
	in = &interrupts{}
	var oneAtATime sync.Mutex
	return in, func(s syscall.Signal) {
		oneAtATime.Lock()
		defer oneAtATime.Unlock()
		in.mu.Lock()
		in.last = s
		handle := in.handle
		in.mu.Unlock()
		if handle != nil {
			handle(s)
		}
	}
}

func quietApp() (a *app, stdout, stderr *bytes.Buffer) {
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	a = testApp()
	a.stdout, a.stderr = stdout, stderr
	return a, stdout, stderr
}

// The race: Ctrl-C comes when the node has just made the sandbox and the answer
// is on its way. Nobody knows its ID, and it must not stay.
func TestAnInterruptedCreateLeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, _ := quietApp()
		in, raise := byHand()
		svc := &stub{create: func(ctx context.Context, _ boxed.Spec) (*boxed.Sandbox, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		time.AfterFunc(time.Second, func() { raise(syscall.SIGINT) })
		given := map[string]string{"mine": "yes"}
		_, err := a.makeSandbox(in, svc, boxed.Spec{Labels: given}, nil, "call-1")
		if exitOf(err) != exitInterrupted {
			t.Errorf("got %v", err)
		}
		if len(svc.destroyed) != 1 || svc.destroyed[0] != "late" {
			t.Errorf("destroyed %v", svc.destroyed)
		}
		if len(given) != 1 {
			t.Error("the caller's labels were changed")
		}
	})
}

// X7: a blocked read of our own stdin delays nothing.
func TestAProgramsEndDoesNotWaitForStdin(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	defer r.Close()
	a, _, _ := quietApp()
	a.stdin = r
	in, _ := byHand()
	status, err := a.attach(context.Background(), in, streams{stdin: true}, func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		req.Started("x")
		go func() { _, _ = req.Stdin.Read(make([]byte, 1)) }() // ends when the pipe is closed
		return boxed.ExitStatus{Reason: boxed.ReasonExited, Code: 5}, nil
	})
	if status != 5 || err != nil {
		t.Errorf("got %d, %v", status, err)
	}
}

// What was typed for a program that cannot start is left to the next one.
func TestStdinIsReadOnlyOnceTheProgramRuns(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, _ = w.WriteString("for the second")
	w.Close()
	a, _, _ := quietApp()
	a.stdin = r
	in, _ := byHand()
	_, err = a.attach(context.Background(), in, streams{stdin: true}, func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		go func() { _, _ = req.Stdin.Read(make([]byte, 100)) }() // a client may be that eager
		return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeStartFailed, "no such program")
	})
	if exitOf(err) != exitCannotStart {
		t.Errorf("got %v", err)
	}
	_, _ = a.attach(context.Background(), in, streams{stdin: true}, func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		req.Started("x")
		buf := make([]byte, 100)
		if n, _ := req.Stdin.Read(buf); string(buf[:n]) != "for the second" {
			t.Errorf("read %q", buf[:n])
		}
		return boxed.ExitStatus{}, nil
	})
}

func TestTheFirstSignalIsTheProgramsAndTheSecondKills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, _ := quietApp()
		in, raise := byHand()
		var got []string
		time.AfterFunc(1*time.Second, func() { raise(syscall.SIGINT) })
		time.AfterFunc(2*time.Second, func() { raise(syscall.SIGINT) })
		start := time.Now()
		status, err := a.attach(context.Background(), in, streams{}, func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			req.Started("x")
			for {
				select {
				case s := <-req.Signals:
					got = append(got, s)
				case <-ctx.Done():
					return boxed.ExitStatus{}, ctx.Err()
				}
			}
		})
		if status != exitInterrupted || err != nil || strings.Join(got, " ") != "INT" || time.Since(start) != 2*time.Second {
			t.Errorf("status %d, %v, signals %v after %v", status, err, got, time.Since(start))
		}
	})
}

func TestBeforeTheProgramRunsOneSignalEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, _ := quietApp()
		in, raise := byHand()
		time.AfterFunc(time.Second, func() { raise(syscall.SIGTERM) })
		status, err := a.attach(context.Background(), in, streams{}, func(ctx context.Context, _ boxed.ExecRequest) (boxed.ExitStatus, error) {
			<-ctx.Done()
			return boxed.ExitStatus{}, ctx.Err()
		})
		if status != 143 || err != nil {
			t.Errorf("got %d, %v", status, err)
		}
	})
}

// run ends a program that TERM does not: its sandbox is to be destroyed.
func TestAfterTermAProgramHasAGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, _ := quietApp()
		in, raise := byHand()
		time.AfterFunc(time.Second, func() { raise(syscall.SIGTERM) })
		start := time.Now()
		status, _ := a.attach(context.Background(), in, streams{grace: 5 * time.Second}, func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			req.Started("x")
			<-ctx.Done()
			return boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, nil
		})
		if status != 143 || time.Since(start) != 6*time.Second {
			t.Errorf("status %d after %v", status, time.Since(start))
		}
	})
}

// A link that hangs cannot keep boxedctl.
func TestACallThatIgnoresItsEndIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, _ := quietApp()
		in, raise := byHand()
		release := make(chan struct{})
		time.AfterFunc(1*time.Second, func() { raise(syscall.SIGINT) })
		time.AfterFunc(2*time.Second, func() { raise(syscall.SIGINT) })
		start := time.Now()
		status, _ := a.attach(context.Background(), in, streams{}, func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			req.Started("x")
			<-release
			return boxed.ExitStatus{}, nil
		})
		if status != exitInterrupted || time.Since(start) != 2*time.Second+forcedAfter {
			t.Errorf("status %d after %v", status, time.Since(start))
		}
		close(release)
	})
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestAReaderThatGoesAwayEndsTheProgramQuietly(t *testing.T) {
	a, _, stderr := quietApp()
	a.stdout = brokenPipe{}
	in, _ := byHand()
	status, err := a.attach(context.Background(), in, streams{}, func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		req.Started("x")
		for ctx.Err() == nil {
			if n, err := req.Stdout.Write([]byte("line\n")); n != 5 || err != nil {
				t.Errorf("the program's output failed: %d, %v", n, err)
			}
		}
		return boxed.ExitStatus{}, ctx.Err()
	})
	if status != exitPipe || err != nil || stderr.Len() > 0 {
		t.Errorf("got %d, %v, %q", status, err, stderr)
	}
}
