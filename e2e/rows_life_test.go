package e2e_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// L7, e2b-dev/E2B#884, #1104: data was lost on the second resume. 20 rounds of
// pause and resume, with the hash of files in every writable place after each,
// as a program and as a download see them, while programs run on: each writes
// every number once, attached or not, and a connection inside stays open.
func TestTwentyPausesLoseNothing(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	if out, status := n.sh(id, `for d in /workspace ~ /tmp /output /dev/shm; do mkdir $d/kept; for i in 1 2 3; do head -c ${i}000000 /dev/urandom > $d/kept/$i; done; done; mkfifo /tmp/pipe`); status.Code != 0 {
		t.Fatalf("%q, %+v", out, status)
	}
	const hashes = `find /workspace/kept ~/kept /tmp/kept /output/kept /dev/shm/kept -type f -exec sha256sum {} + | sort`
	want, _ := n.sh(id, hashes)
	if strings.Count(want, "\n") != 15 {
		t.Fatalf("%q", want)
	}
	attachedOut, attached := n.counter(t, id)
	detached, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", counting}})
	if err != nil {
		t.Fatal(err)
	}
	talk := n.echo(t, id)
	for round := range 20 {
		for range 1 + round%2 { // again is no error
			if s, err := n.Pause(t.Context(), id); err != nil || s.State != boxed.StatePaused {
				t.Fatalf("pause %d: %+v, %v", round, s, err)
			}
		}
		_, err := n.Exec(t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
		if boxed.CodeOf(err) != boxed.CodeConflict || !strings.Contains(err.Error(), "resume") {
			t.Fatalf("exec while it is paused: %v", err)
		}
		for range 1 + round%2 {
			if s, err := n.Resume(t.Context(), id); err != nil || s.State != boxed.StateRunning {
				t.Fatalf("resume %d: %+v, %v", round, s, err)
			}
		}
		if got, _ := n.sh(id, hashes); got != want {
			t.Fatalf("round %d:\n%s\nwant\n%s", round, got, want)
		}
		talk(fmt.Sprintf("round %d\n", round))
		read := n.download(t, id, "/output/kept/3")
		if line, _, _ := strings.Cut(want[strings.Index(want, "/output/kept/3")-66:], " "); read != strings.TrimSpace(line) {
			t.Fatalf("round %d: downloaded %s, want %s", round, read, line)
		}
		before := strings.Count(attachedOut.String(), "\n")
		within(t, 10*time.Second, "what ran to run on", func() bool { return strings.Count(attachedOut.String(), "\n") > before })
	}
	if err := n.SignalExec(t.Context(), id, attached, "TERM", false); err != nil {
		t.Error(err)
	}
	if err := n.SignalExec(t.Context(), id, detached.ID, "TERM", false); err != nil {
		t.Error(err)
	}
	var rest safeBuffer
	if status, err := n.Attach(t.Context(), id, detached.ID, boxed.AttachRequest{Stdout: &rest}); err != nil || status.Code != 17 {
		t.Errorf("the detached one: %+v, %v", status, err)
	}
	within(t, 10*time.Second, "the attached one to end", func() bool { return strings.HasSuffix(attachedOut.String(), "end\n") })
	for name, out := range map[string]string{"attached": attachedOut.String(), "detached": rest.String()} {
		lines := strings.Split(strings.TrimSuffix(out, "end\n"), "\n")
		for i, line := range lines[:len(lines)-1] {
			if line != fmt.Sprint(i) {
				t.Errorf("%s: line %d is %q", name, i, line)
				break
			}
		}
	}
}

// counting writes numbers until it is told to end.
const counting = `trap 'echo end; exit 17' TERM; i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done`

// counter starts counting, attached.
func (n *node) counter(t *testing.T, id boxed.ID) (*safeBuffer, boxed.ExecID) {
	t.Helper()
	out, started, done := &safeBuffer{}, make(chan boxed.ExecID, 1), make(chan struct{})
	go func() {
		defer close(done)
		status, err := n.Exec(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", counting}, Stdout: out, Started: func(e boxed.ExecID) { started <- e }})
		if err != nil || status.Code != 17 {
			t.Errorf("the attached one: %+v, %v", status, err)
		}
	}()
	t.Cleanup(func() { <-done })
	return out, <-started
}

// echo connects to a program inside that sends each line back; the returned
// function says one and wants it back.
func (n *node) echo(t *testing.T, id boxed.ID) func(line string) {
	t.Helper()
	_, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Language: "python", Code: `
import socket
s = socket.create_server(("127.0.0.1", 8123))
while True:
    c, _ = s.accept()
    while d := c.recv(65536): c.sendall(d)`})
	if err != nil {
		t.Fatal(err)
	}
	var lines *bufio.Reader
	var conn io.ReadWriteCloser
	within(t, 20*time.Second, "a connection", func() bool {
		c, err := n.Dial(t.Context(), id, 8123)
		if err == nil {
			conn, lines = c, bufio.NewReader(c)
			t.Cleanup(func() { c.Close() })
		}
		return err == nil
	})
	return func(line string) {
		t.Helper()
		if _, err := io.WriteString(conn, line); err != nil {
			t.Fatalf("the connection: %v", err)
		}
		if got, err := lines.ReadString('\n'); err != nil || got != line {
			t.Fatalf("the connection: %q, %v", got, err)
		}
	}
}

// download hashes a file.
func (n *node) download(t *testing.T, id boxed.ID, path string) string {
	t.Helper()
	f, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: path, Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := newSum()
	if _, err := io.Copy(out, f); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// L13, e2b-dev/E2B#1419: a sandbox that died in the middle of a request gave a
// raw connection reset. Whatever is under way ends with a code of its own; where
// an answer can still be given it is "gone" with the reason, and so is every later
// one.
func TestRequestsUnderADyingSandboxAreTyped(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	n.sh(id, "truncate -s 8G big")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	calls := n.under(t, ctx, id)
	var ready sync.WaitGroup
	ends := make(chan string, len(calls))
	for name, call := range calls {
		ready.Add(1)
		go func() {
			end := call(sync.OnceFunc(ready.Done))
			code := boxed.CodeOf(end.err)
			var e *boxed.Error
			ok := end.err == nil || errors.As(end.err, &e)
			for _, want := range end.codes {
				if want == code && ok {
					ends <- ""
					return
				}
			}
			ends <- fmt.Sprintf("%s: %v (%s)", name, end.err, code)
		}()
	}
	ready.Wait()
	if err := exec.Command("docker", "kill", "boxed-"+string(id)).Run(); err != nil {
		t.Fatal(err)
	}
	died := time.Now()
	for range calls {
		select {
		case problem := <-ends:
			if problem != "" {
				t.Error(problem)
			}
		case <-time.After(40 * time.Second):
			t.Fatal("a request does not end")
		}
	}
	if took := time.Since(died); took > 20*time.Second {
		t.Errorf("they ended only after %v", took)
	}
	within(t, 5*time.Second, "the state to be right", func() bool {
		got, err := n.Get(t.Context(), id)
		return err == nil && got.State == boxed.StateFailed
	})
	status, answer := n.call("POST", "/v1/sandboxes/"+string(id)+"/exec", map[string]any{"args": []string{"true"}})
	detail, _ := answer["detail"].(map[string]any)
	if status != 410 || answer["code"] != string(boxed.CodeGone) || detail["reason"] != string(boxed.EndCrashed) || !strings.Contains(fmt.Sprint(answer["message"]), "137") {
		t.Errorf("after it: %d %v", status, answer)
	}
}

// ending is how a request ended, and with what codes it may.
type ending struct {
	err   error
	codes []boxed.Code
}

// under are requests that last as long as their sandbox does; each says when it is
// under way.
func (n *node) under(t *testing.T, ctx context.Context, id boxed.ID) map[string]func(began func()) ending {
	return map[string]func(began func()) ending{
		"one call": func(began func()) ending {
			time.AfterFunc(200*time.Millisecond, began)
			r, err := n.Run(ctx, id, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
			if err == nil && (r.Reason != boxed.ReasonLost || r.Code != -1 || r.Message == "") {
				t.Errorf("one call: %+v", r)
			}
			return ending{err, []boxed.Code{"", boxed.CodeGone}}
		},
		"a stream": func(began func()) ending {
			status, err := n.Exec(ctx, id, boxed.ExecRequest{Args: []string{"sleep", "1000"}, Started: func(boxed.ExecID) { began() }})
			if err == nil && (status.Reason != boxed.ReasonLost || status.Code != -1 || status.Message == "") {
				t.Errorf("a stream: %+v", status)
			}
			return ending{err, []boxed.Code{"", boxed.CodeGone}}
		},
		"an upload": func(began func()) ending {
			_, err := n.WriteFile(ctx, id, boxed.WriteRequest{Path: "f", Content: &trickle{told: began}})
			return ending{err, []boxed.Code{boxed.CodeGone, boxed.CodeLost}}
		},
		"a download": func(began func()) ending {
			f, err := n.ReadFile(ctx, id, boxed.ReadRequest{Path: "big", Length: -1})
			if err != nil {
				return ending{err, nil}
			}
			defer f.Close()
			buf := make([]byte, 64<<10)
			_, err = io.ReadFull(f, buf)
			began()
			for err == nil {
				_, err = f.Read(buf)
				time.Sleep(10 * time.Millisecond)
			}
			return ending{err, []boxed.Code{boxed.CodeGone, boxed.CodeLost}} // its answer had begun
		},
	}
}

// trickle gives a little at a time, without an end, and says when the first of it
// was taken.
type trickle struct {
	told func()
	n    int
}

func (r *trickle) Read(p []byte) (int, error) {
	if r.n++; r.n == 2 {
		r.told()
	}
	time.Sleep(time.Millisecond)
	return len(p[:min(len(p), 1000)]), nil
}

// L12, cloudflare/sandbox-sdk#799: concurrent destroys fought, and destroying what
// never started failed. 20 at once, by ID, of a sandbox in each state.
func TestDestroysAgree(t *testing.T) {
	n := startBareNode(t)
	running, paused := n.create(boxed.Spec{}).ID, n.create(boxed.Spec{}).ID
	if _, err := n.Pause(t.Context(), paused); err != nil {
		t.Fatal(err)
	}
	_, err := n.Create(t.Context(), boxed.Spec{Image: "boxed-test/no-such-image:1", Name: "never"})
	if err == nil {
		t.Fatal("an image that does not exist")
	}
	list, err := n.List(t.Context(), boxed.Filter{States: []boxed.State{boxed.StateFailed}})
	if err != nil {
		t.Fatal(err)
	}
	ids := []boxed.ID{running, paused}
	for _, s := range list.Sandboxes { // what never started
		ids = append(ids, s.ID)
	}
	var all sync.WaitGroup
	for _, id := range ids {
		for range 20 {
			all.Go(func() {
				if err := n.Destroy(t.Context(), id); err != nil {
					t.Errorf("%s: %v", id, err)
				}
				if got, err := n.Get(t.Context(), id); err != nil || !got.State.Ended() {
					t.Errorf("destroy returned before the end: %+v, %v", got, err)
				}
			})
		}
	}
	all.Wait()
	// A create that is under way ends with its destroy, and its name is free.
	made := make(chan error, 1)
	go func() {
		_, err := n.Create(t.Context(), boxed.Spec{Name: "soon-gone"})
		made <- err
	}()
	within(t, 20*time.Second, "the create to begin", func() bool {
		list, err := n.List(t.Context(), boxed.Filter{Name: "soon-gone"})
		if err != nil || len(list.Sandboxes) == 0 {
			return false
		}
		if err := n.Destroy(t.Context(), list.Sandboxes[0].ID); err != nil {
			t.Errorf("while it was made: %v", err)
		}
		return true
	})
	if err := <-made; err != nil && boxed.CodeOf(err) != boxed.CodeGone {
		t.Errorf("the create: %v (%s)", err, boxed.CodeOf(err))
	}
	n.create(boxed.Spec{Name: "soon-gone"})
}
