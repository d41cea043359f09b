package e2e_test

import (
	"context"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// viewer is one of many clients on one terminal.
type viewer struct {
	t      *testing.T
	out    safeBuffer
	typed  *io.PipeWriter
	resize chan boxed.Size
	leave  context.CancelFunc
	ended  chan execEnd
}

func (n *node) view(t *testing.T, id boxed.ID, e boxed.ExecID, offset int64) *viewer {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	in, typed := io.Pipe()
	v := &viewer{t: t, typed: typed, resize: make(chan boxed.Size), leave: leave, ended: make(chan execEnd, 1)}
	go func() {
		status, err := n.Attach(ctx, id, e, boxed.AttachRequest{Stdin: in, Stdout: &v.out, Resize: v.resize, StdoutOffset: offset})
		v.ended <- execEnd{status, err, time.Now()}
		in.CloseWithError(io.ErrClosedPipe)
	}()
	t.Cleanup(leave)
	return v
}

func (v *viewer) types(text string) {
	v.t.Helper()
	if _, err := io.WriteString(v.typed, text); err != nil {
		v.t.Fatal(err)
	}
}

func (v *viewer) sees(pattern string) {
	v.t.Helper()
	re := regexp.MustCompile(pattern)
	for deadline := time.Now().Add(15 * time.Second); !re.MatchString(v.out.String()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			v.t.Fatalf("never saw %s, only %q", pattern, v.out.tail(2000))
		}
	}
}

// terminal starts a shell on a terminal that any number may join.
func (n *node) terminal(t *testing.T, id boxed.ID, size boxed.Size) *boxed.Exec {
	t.Helper()
	e, err := n.StartExec(t.Context(), id, boxed.ExecRequest{
		Args: []string{"bash", "--norc", "--noprofile"}, TTY: true, OpenStdin: true, Size: size, Env: map[string]string{"PS1": "> "},
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// P4, OpenSandbox 84e9b8dd and b98bf143: two viewers of one terminal fought, and
// output between the exit and the close was lost. Several viewers watch one
// terminal, each sees all of it, and it ends for each with the same status.
func TestManyWatchOneTerminal(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	e := n.terminal(t, id, boxed.Size{})
	viewers := make([]*viewer, 5)
	for i := range viewers {
		viewers[i] = n.view(t, id, e.ID, 0)
		viewers[i].types(fmt.Sprintf("echo from-$((%d+100))\r", i))
	}
	for _, v := range viewers {
		for i := range viewers {
			v.sees(fmt.Sprintf(`from-%d\r\n`, i+100))
		}
	}
	viewers[0].leave() // one that leaves ends nothing, for nobody
	if end := <-viewers[0].ended; boxed.CodeOf(end.err) != boxed.CodeCanceled {
		t.Errorf("who left: %+v", end)
	}
	late := n.view(t, id, e.ID, 0)
	late.sees(`from-104\r\n`)
	viewers = append(viewers[1:], late)
	// Much output at the very end: all of it comes before the exit.
	viewers[1].types("stty -echo; seq 1 30000; exit 9\r")
	var texts []string
	for i, v := range viewers {
		end := <-v.ended
		if end.err != nil || end.status.Code != 9 || end.status.Reason != boxed.ReasonExited {
			t.Errorf("viewer %d: %+v", i, end)
		}
		text := v.out.String()
		if int64(len(text)) != end.status.StdoutBytes || !strings.Contains(text, "\r\n29999\r\n30000\r\n") {
			t.Errorf("viewer %d saw %d bytes of %d, the last are %q", i, len(text), end.status.StdoutBytes, v.out.tail(60))
		}
		texts = append(texts, text)
	}
	for i, text := range texts[1:] {
		if text != texts[0] {
			t.Errorf("viewer %d saw something else than viewer 0", i+1)
		}
	}
}

// P4: of several viewers, the size follows the one that typed last. A window that
// is resized beside it changes nothing until its own viewer types.
func TestTheTerminalsSizeFollowsWhoTypedLast(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	e := n.terminal(t, id, boxed.Size{Cols: 80, Rows: 24})
	a, b := n.view(t, id, e.ID, 0), n.view(t, id, e.ID, 0)
	size := func(v *viewer, what, want string) {
		t.Helper()
		v.types("stty size | sed 's/^/" + what + "=/'\r")
		v.sees(regexp.QuoteMeta(what) + `=\d+ \d+\r\n`)
		if all := v.out.String(); !strings.Contains(all, what+"="+want+"\r\n") {
			t.Errorf("%s: want %s, saw %q", what, want, v.out.tail(100))
		}
	}
	a.types(":\r")
	a.resize <- boxed.Size{Cols: 100, Rows: 30}
	a.sees(`> `)
	within(t, 10*time.Second, "a's size", func() bool { return n.sizeOf(id, e) == "30 100" })
	size(a, "first", "30 100")
	b.resize <- boxed.Size{Cols: 120, Rows: 40} // b only watches so far
	size(a, "second", "30 100")
	size(b, "third", "40 120") // now it types, and the size is its own
	a.resize <- boxed.Size{Cols: 90, Rows: 20}
	size(b, "fourth", "40 120")
	size(a, "fifth", "20 90")
	a.types("exit\r")
	<-a.ended
	<-b.ended
}

// sizeOf is the size of an exec's terminal, as another program sees it.
func (n *node) sizeOf(id boxed.ID, e *boxed.Exec) string {
	out, _ := n.sh(id, fmt.Sprintf("stty size </proc/%d/fd/0", e.PID))
	return strings.TrimSpace(out)
}

// P1–P3 and P5, NVIDIA/OpenShell#543, #3080, #2228, #2447, cloudflare/sandbox-sdk#489,
// over the whole path: the size is there before the first byte and 0 is 80×24, a
// change of it arrives with SIGWINCH, without a terminal there is none and stderr
// is apart, and environment and directory are on a terminal what they are without.
func TestTerminalsOverTheWholePath(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{Env: map[string]string{"FROM_SPEC": "spec"}}).ID
	n.sh(id, "mkdir /workspace/sub")
	script := `test -t 0 && test -t 1 && test -t 2 && echo terminal; stty size 2>/dev/null; echo $FROM_SPEC $OWN; pwd; echo error >&2`
	for _, c := range []struct {
		size boxed.Size
		tty  bool
		want string
	}{
		{boxed.Size{}, true, "terminal\r\n24 80\r\nspec own\r\n/workspace/sub\r\nerror\r\n"},
		{boxed.Size{Cols: 132, Rows: 50}, true, "terminal\r\n50 132\r\nspec own\r\n/workspace/sub\r\nerror\r\n"},
		{boxed.Size{}, false, "spec own\n/workspace/sub\n"},
	} {
		var out, errs safeBuffer
		status, err := n.Exec(t.Context(), id, boxed.ExecRequest{
			Args: []string{"bash", "-c", script}, TTY: c.tty, Size: c.size, Dir: "sub", Env: map[string]string{"OWN": "own"}, Stdout: &out, Stderr: &errs,
		})
		if err != nil || status.Code != 0 || out.String() != c.want || (errs.String() == "error\n") == c.tty {
			t.Errorf("%+v: %q, %q, %+v, %v", c, out.String(), errs.String(), status, err)
		}
	}
	resize := make(chan boxed.Size, 1)
	var out safeBuffer
	done := make(chan execEnd, 1)
	go func() {
		status, err := n.Exec(t.Context(), id, boxed.ExecRequest{
			Args: []string{"bash", "-c", `trap 'stty size; exit 7' WINCH; stty size; while :; do sleep 0.05; done`},
			TTY:  true, Size: boxed.Size{Cols: 81, Rows: 25}, Stdout: &out, Resize: resize,
		})
		done <- execEnd{status, err, time.Now()}
	}()
	within(t, 10*time.Second, "the first size", func() bool { return out.String() == "25 81\r\n" })
	resize <- boxed.Size{Cols: 99, Rows: 33}
	if end := <-done; end.err != nil || end.status.Code != 7 || out.String() != "25 81\r\n33 99\r\n" {
		t.Errorf("%+v, %q", end, out.String())
	}
}
