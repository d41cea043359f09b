package e2e_test

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// L3, L8, and the promise that execs outlive the daemon: kill -9, and what ran
// runs on, is joined again where it was, and keeps its deadlines.
func TestSandboxesOutliveTheDaemon(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{Name: "survivor", Labels: map[string]string{"a": "b"}, TTL: boxed.Duration(40 * time.Minute)})
	paused := n.create(boxed.Spec{})
	if _, err := n.Pause(t.Context(), paused.ID); err != nil {
		t.Fatal(err)
	}
	e, err := n.StartExec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"bash", "-c", "for i in $(seq 60); do echo $i; sleep 0.1; done; exit 4"}})
	if err != nil {
		t.Fatal(err)
	}
	n.stop(syscall.SIGKILL)
	n.start()
	after, err := n.Get(t.Context(), s.ID)
	if err != nil || after.State != boxed.StateRunning || after.Name != "survivor" || after.Labels["a"] != "b" || !after.ExpiresAt.Equal(s.ExpiresAt) {
		t.Fatalf("%+v, %v", after, err)
	}
	var out safeBuffer
	status, err := n.Attach(t.Context(), s.ID, e.ID, boxed.AttachRequest{Stdout: &out})
	if err != nil || status.Code != 4 || len(strings.Fields(out.String())) != 60 {
		t.Errorf("%+v %v %q", status, err, out.String())
	}
	if p, err := n.Get(t.Context(), paused.ID); err != nil || p.State != boxed.StatePaused {
		t.Errorf("the paused one: %+v, %v", p, err)
	}
	if _, err := n.Resume(t.Context(), paused.ID); err != nil {
		t.Error(err)
	}
	if text, _ := n.sh(paused.ID, "echo awake"); text != "awake\n" {
		t.Errorf("got %q", text)
	}
}

// An attached exec lives on too, and is its client's again by ID and offset.
func TestAttachedExecIsJoinedAgainByOffset(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{})
	var out safeBuffer
	started, ended := make(chan boxed.ExecID, 1), make(chan error, 1)
	go func() {
		_, err := n.Exec(t.Context(), s.ID, boxed.ExecRequest{
			Args:    []string{"bash", "-c", "for i in $(seq 50); do echo line $i; sleep 0.1; done"},
			Stdout:  &out,
			Started: func(id boxed.ExecID) { started <- id },
		})
		ended <- err
	}()
	id := <-started
	within(t, 10*time.Second, "some output", func() bool { return strings.Contains(out.String(), "line 5\n") })
	n.stop(syscall.SIGKILL)
	if err := <-ended; boxed.CodeOf(err) != boxed.CodeLost && boxed.CodeOf(err) != boxed.CodeNotReady {
		t.Errorf("the client got %v (%s), want lost: never an invented status", err, boxed.CodeOf(err))
	}
	n.start()
	status, err := n.Attach(t.Context(), s.ID, id, boxed.AttachRequest{StdoutOffset: int64(len(out.String())), Stdout: &out})
	if err != nil || status.Reason != boxed.ReasonExited || strings.Count(out.String(), "\n") != 50 || !strings.HasSuffix(out.String(), "line 50\n") {
		t.Errorf("%+v %v %q", status, err, out.String())
	}
}

// A sandbox of an earlier release keeps its agent, whose program stays until it
// ends; new sandboxes get the new one.
func TestUpgradeKeepsOldAgentsWorking(t *testing.T) {
	n := startNode(t)
	old := n.create(boxed.Spec{})
	n.stop(syscall.SIGTERM)
	n.agent = filepath.Join(t.TempDir(), "boxed-agent")
	if err := build(n.agent, "./agent/boxed-agent", "next"); err != nil {
		t.Fatal(err)
	}
	n.start()
	fresh := n.create(boxed.Spec{})
	for _, s := range []*boxed.Sandbox{old, fresh} {
		if text, _ := n.sh(s.ID, "echo works"); text != "works\n" {
			t.Errorf("%s: %q", s.ID, text)
		}
	}
	agents := func() int {
		entries, err := os.ReadDir(filepath.Join(n.dir, "agent"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	if got := agents(); got != 2 {
		t.Errorf("%d programs, want the old one and the new one", got)
	}
	if err := n.Destroy(t.Context(), old.ID); err != nil {
		t.Fatal(err)
	}
	n.stop(syscall.SIGTERM)
	n.start()
	if got := agents(); got != 1 {
		t.Errorf("%d programs after the last old sandbox, want 1", got)
	}
}

// L8, L18, L20: another daemon's containers, and anybody's with our labels, are
// not ours: not seen, not addressed, not swept.
func TestOthersContainersAreNotOurs(t *testing.T) {
	a, b := startNode(t), startNode(t)
	of := a.create(boxed.Spec{})
	if _, err := b.Get(t.Context(), of.ID); boxed.CodeOf(err) != boxed.CodeNotFound {
		t.Errorf("the other node: %v", err)
	}
	labels, err := exec.Command("docker", "inspect", "-f", `{{range $k, $v := .Config.Labels}}--label {{$k}}={{$v}} {{end}}`, "boxed-"+string(of.ID)).Output()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"run", "-d", "--network", "none"}, strings.Fields(string(labels))...)
	out, err := exec.Command("docker", append(args, "boxed/default:latest", "sleep", "1000")...).Output()
	if err != nil {
		t.Fatalf("start a foreign container: %v", err)
	}
	foreign := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("docker", "rm", "-f", foreign).Run() })
	a.stop(syscall.SIGKILL)
	a.start()
	if err := a.Destroy(t.Context(), of.ID); err != nil {
		t.Error(err)
	}
	if err := exec.Command("docker", "inspect", foreign).Run(); err != nil {
		t.Error("the foreign container was removed")
	}
	if _, err := a.Resolve(t.Context(), foreign[:12]); boxed.CodeOf(err) != boxed.CodeNotFound {
		t.Errorf("a container's ID addresses something: %v", err)
	}
}

// Stopped for good, nothing of a node is left on the engine or the disk.
func TestNothingIsLeftBehind(t *testing.T) {
	n := startNode(t)
	for range 3 {
		s := n.create(boxed.Spec{})
		n.sh(s.ID, "echo x > /workspace/f; sleep 100 &")
		if err := n.Destroy(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
		if err := n.Destroy(t.Context(), s.ID); err != nil { // L12
			t.Errorf("again: %v", err)
		}
		if _, err := n.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}}); boxed.CodeOf(err) != boxed.CodeGone {
			t.Errorf("exec after the end: %v", err) // L13
		}
		within(t, 30*time.Second, "it is cleared away", func() bool {
			_, err := os.Stat(filepath.Join(n.dir, "sandboxes", string(s.ID)))
			return os.IsNotExist(err) && exec.Command("docker", "inspect", "boxed-"+string(s.ID)).Run() != nil
		})
	}
}

// L19: what users call their sandboxes is in the record; the engine sees only
// labels of ours.
func TestUserLabelsStayInTheRecord(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{Labels: map[string]string{"com.docker.compose.project": "evil"}, Env: map[string]string{"SECRET": "hidden"}, Limits: boxed.Limits{Processes: 100}})
	out, err := exec.Command("docker", "inspect", "boxed-"+string(s.ID)).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"compose", "evil", "SECRET", "hidden"} {
		if strings.Contains(string(out), text) {
			t.Errorf("the engine knows %q", text)
		}
	}
	if got, err := n.Get(t.Context(), s.ID); err != nil || got.Labels["com.docker.compose.project"] != "evil" {
		t.Errorf("%+v %v", got, err)
	}
}

// A graceful stop leaves attached execs running too, also one whose client
// takes nothing and one whose input is open.
func TestGracefulStopLeavesExecsRunning(t *testing.T) {
	n := startNode(t, "--drain", "1s")
	s := n.create(boxed.Spec{})
	stuck := make(chan struct{})
	defer close(stuck)
	in, _ := io.Pipe()
	var started sync.WaitGroup
	for _, req := range []boxed.ExecRequest{
		{Args: []string{"bash", "-c", "while echo x; do sleep 0.1; done"}, Stdout: io.Discard},
		{Args: []string{"bash", "-c", "read x; sleep 100"}, Stdin: in, Stdout: io.Discard},
		{Args: []string{"yes"}, Stdout: blockedWriter(stuck)},
	} {
		started.Add(1)
		req.Started = func(boxed.ExecID) { started.Done() }
		go n.Client.Exec(context.Background(), s.ID, req)
	}
	started.Wait()
	time.Sleep(500 * time.Millisecond) // for `yes` to fill all that lies between
	n.stop(syscall.SIGTERM)
	n.start()
	execs, err := n.ListExecs(t.Context(), s.ID)
	if err != nil || len(execs) != 3 {
		t.Fatalf("%+v %v", execs, err)
	}
	for _, e := range execs {
		if !e.Running {
			t.Errorf("%v has ended: %+v", e.Args, e.Status)
		}
	}
}

type blockedWriter chan struct{}

func (b blockedWriter) Write(p []byte) (int, error) {
	<-b
	return len(p), nil
}
