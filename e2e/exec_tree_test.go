package e2e_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// hiders are programs that leave processes in every way that a shell's job
// control, a session or an empty environment hides, and then go on themselves.
const hiders = `setsid sh -c 'sleep 1001 & sleep 1002' &
(setsid sleep 1003 &)
nohup env -i /bin/sleep 1004 >/dev/null 2>&1 &
sh -c 'trap "" TERM HUP INT; sleep 1005; sleep 1006' &
(sleep 1007 & exec sleep 1008) >/dev/null 2>&1 </dev/null &
echo started; wait; sleep 1009`

// began starts an exec and returns when it has written a line.
func (n *node) began(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (exec boxed.ExecID, ended <-chan execEnd) {
	n.t.Helper()
	started, wrote, done := make(chan boxed.ExecID, 1), make(chan struct{}), make(chan execEnd, 1)
	out := &firstLine{wrote: wrote}
	req.Stdout, req.Started = out, func(e boxed.ExecID) { started <- e }
	go func() {
		status, err := n.Exec(ctx, id, req)
		done <- execEnd{status, err, time.Now()}
	}()
	select {
	case <-wrote:
		return <-started, done
	case end := <-done:
		n.t.Fatalf("it ended before it wrote: %+v", end)
	case <-time.After(30 * time.Second):
		n.t.Fatal("it wrote nothing in 30 s")
	}
	return "", nil
}

type execEnd struct {
	status boxed.ExitStatus
	err    error
	at     time.Time
}

// firstLine closes wrote at the first line.
type firstLine struct {
	wrote chan struct{}
	over  bool
}

func (f *firstLine) Write(p []byte) (int, error) {
	if !f.over && strings.Contains(string(p), "\n") {
		f.over = true
		close(f.wrote)
	}
	return len(p), nil
}

// X1, daytonaio/daytona#2602, elie222/rakazo#28: a timeout of 2 s on a sleep of
// 5 s returned after 5 s, since only the outer shell was killed and grandchildren
// held the pipes.
// X2, superradcompany/microsandbox#1104, alibaba/OpenSandbox#924: killing a
// shell left its children eating CPU; the same on a disconnect and on a delete.
// However an exec ends, none of its processes is there afterwards, as this host
// sees it, and another exec of the sandbox has noticed nothing.
func TestEveryDescendantEndsWithItsExec(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	agent := n.agentPID(id)
	_, other := n.began(t.Context(), id, boxed.ExecRequest{Args: []string{"sh", "-c", "echo other; exec sleep 1000"}})
	script := boxed.ExecRequest{Args: []string{"bash", "-c", hiders}}
	alone := func(t *testing.T) { // the agent and the other one
		t.Helper()
		within(t, 5*time.Second, "all of its processes to be gone", func() bool { return len(insiders(agent)) == 2 })
	}
	crowd := func(t *testing.T) {
		t.Helper()
		within(t, 10*time.Second, "its processes to run", func() bool { return len(insiders(agent)) >= 2+9 })
	}
	t.Run("timeout", func(t *testing.T) {
		req, began := script, time.Now()
		req.Timeout = boxed.Duration(2 * time.Second)
		_, ended := n.began(t.Context(), id, req)
		crowd(t)
		end := <-ended
		if took := end.at.Sub(began); end.err != nil || end.status.Reason != boxed.ReasonTimeout || took < 2*time.Second || took > 4*time.Second {
			t.Errorf("%+v after %v", end, took)
		}
		alone(t)
	})
	t.Run("timeout of one call", func(t *testing.T) {
		began := time.Now()
		result, err := n.Run(t.Context(), id, boxed.ExecRequest{Args: script.Args, Timeout: boxed.Duration(time.Second)})
		if took := time.Since(began); err != nil || result.Reason != boxed.ReasonTimeout || string(result.Stdout) != "started\n" || took > 3*time.Second {
			t.Errorf("%+v, %v after %v", result, err, took)
		}
		alone(t)
	})
	t.Run("kill", func(t *testing.T) {
		e, ended := n.began(t.Context(), id, script)
		crowd(t)
		if err := n.KillExec(t.Context(), id, e); err != nil {
			t.Error(err)
		}
		alone(t)
		if end := <-ended; end.err != nil || end.status.Reason != boxed.ReasonCanceled {
			t.Errorf("%+v", end)
		}
	})
	t.Run("disconnect", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		_, ended := n.began(ctx, id, script)
		crowd(t)
		leave()
		if end := <-ended; boxed.CodeOf(end.err) != boxed.CodeCanceled {
			t.Errorf("%+v", end)
		}
		alone(t)
	})
	t.Run("output limit", func(t *testing.T) {
		_, status := n.exec(id, boxed.ExecRequest{Args: []string{"bash", "-c", "setsid yes & (yes &) ; yes"}, MaxOutput: 1 << 20})
		if status.Reason != boxed.ReasonOutputLimit {
			t.Errorf("%+v", status)
		}
		alone(t)
	})
	select {
	case end := <-other:
		t.Errorf("the other exec ended: %+v", end)
	default:
	}
	t.Run("destroy", func(t *testing.T) {
		_, ended := n.began(t.Context(), id, script)
		crowd(t)
		inside := insiders(agent)
		if err := n.Destroy(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		for pid := range inside {
			if rss(pid) > 0 {
				t.Errorf("process %d outlives the sandbox", pid)
			}
		}
		for _, ended := range []<-chan execEnd{ended, other} {
			if end := <-ended; end.status.Reason != boxed.ReasonLost || end.status.Code != -1 || end.status.Message == "" {
				t.Errorf("%+v", end)
			}
		}
	})
}

// X4, moby/moby#35703: an exec could neither be signalled nor killed, and
// outlived its client. Signal, kill, list and wait go by the exec's ID, from any
// client; a TERM reaches the program's handler.
func TestExecsAreSignalledListedAndWaitedFor(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	start := func(script string) *boxed.Exec {
		e, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", script}})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	handler := start(`trap 'echo got TERM; exit 33' TERM; trap 'echo got USR1' USR1; echo ready; while :; do sleep 0.05; done`)
	plain := start(`sleep 1000`)
	reads := func(e *boxed.Exec, text string) {
		t.Helper()
		within(t, 10*time.Second, text, func() bool {
			var out safeBuffer
			if _, err := n.Attach(t.Context(), id, e.ID, boxed.AttachRequest{NoFollow: true, Stdout: &out}); err != nil {
				t.Fatal(err)
			}
			return strings.Contains(out.String(), text)
		})
	}
	reads(handler, "ready")
	list, err := n.ListExecs(t.Context(), id)
	if err != nil || len(list) != 2 || list[0].ID != handler.ID || !list[0].Running || !list[1].Running || list[1].Processes == 0 || !list[1].Detached {
		t.Errorf("%+v, %v", list, err)
	}
	waited := make(chan *boxed.Exec, 2)
	for _, e := range []*boxed.Exec{handler, plain} {
		go func() {
			got, err := n.WaitExec(t.Context(), id, e.ID)
			if err != nil {
				t.Errorf("wait: %v", err)
			}
			waited <- got
		}()
	}
	if err := n.SignalExec(t.Context(), id, handler.ID, "USR1", false); err != nil {
		t.Error(err)
	}
	reads(handler, "got USR1")
	if err := n.SignalExec(t.Context(), id, handler.ID, "SIGTERM", false); err != nil {
		t.Error(err)
	}
	if got := <-waited; got == nil || got.ID != handler.ID || got.Running || got.Status.Reason != boxed.ReasonExited || got.Status.Code != 33 {
		t.Errorf("%+v", got)
	}
	reads(handler, "got TERM")
	if err := n.KillExec(t.Context(), id, plain.ID); err != nil {
		t.Error(err)
	}
	if got := <-waited; got == nil || got.ID != plain.ID || got.Status.Reason != boxed.ReasonCanceled || got.Processes != 0 {
		t.Errorf("%+v", got)
	}
	// What has ended can still be asked after, and is not signalled.
	if err := n.SignalExec(t.Context(), id, handler.ID, "KILL", true); err != nil {
		t.Errorf("a signal to what has ended: %v", err)
	}
	if got, err := n.GetExec(t.Context(), id, handler.ID); err != nil || got.Status == nil || got.Status.Code != 33 {
		t.Errorf("%+v, %v", got, err)
	}
	// Over the stream, as a client's own.
	signals := make(chan string, 1)
	_, ended := n.began(t.Context(), id, boxed.ExecRequest{
		Args: []string{"bash", "-c", `trap 'exit 44' INT; echo ready; while :; do sleep 0.05; done`}, Signals: signals,
	})
	signals <- "INT"
	if end := <-ended; end.err != nil || end.status.Code != 44 {
		t.Errorf("%+v", end)
	}
}
