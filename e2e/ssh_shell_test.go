package e2e_test

import (
	"bytes"
	"io"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// sshTerminal is a client that types and reads.
type sshTerminal struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser

	mu   sync.Mutex
	got  bytes.Buffer
	more chan struct{} // something was written; capacity 1
}

// terminal starts ssh -tt.
func (c *sshClient) terminal(user string, args ...string) *sshTerminal {
	c.t.Helper()
	term := &sshTerminal{t: c.t, more: make(chan struct{}, 1), cmd: c.command(append([]string{"-tt", user + "@127.0.0.1"}, args...)...)}
	var err error
	if term.in, err = term.cmd.StdinPipe(); err != nil {
		c.t.Fatal(err)
	}
	term.cmd.Stdout, term.cmd.Stderr = term, term
	if err := term.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(term.kill)
	return term
}

func (s *sshTerminal) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case s.more <- struct{}{}:
	default:
	}
	return s.got.Write(p)
}

func (s *sshTerminal) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got.String()
}

// say types a line and waits for what it brings, which must not be in the line.
func (s *sshTerminal) say(line, want string) {
	s.t.Helper()
	if _, err := io.WriteString(s.in, line+"\n"); err != nil {
		s.t.Fatal(err)
	}
	s.wait(want)
}

func (s *sshTerminal) wait(want string) {
	s.t.Helper()
	late := time.After(20 * time.Second)
	for !strings.Contains(s.text(), want) {
		select {
		case <-s.more:
		case <-late:
			s.t.Fatalf("no %q in %q", want, s.text())
		}
	}
}

// kill is the link being lost, as far as the node can tell.
func (s *sshTerminal) kill() {
	if s.cmd.ProcessState == nil {
		s.cmd.Process.Kill()
		s.cmd.Wait()
	}
}

// end waits for its end and returns the status.
func (s *sshTerminal) end() int {
	s.t.Helper()
	s.in.Close()
	s.cmd.Wait()
	return s.cmd.ProcessState.ExitCode()
}

// shells are the lingering terminals of a sandbox that run.
func shells(n *node, id boxed.ID) (running, viewers int) {
	execs, err := n.ListExecs(n.t.Context(), id)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, e := range execs {
		if e.Running && e.TTY && e.Linger > 0 {
			running, viewers = running+1, viewers+e.Viewers
		}
	}
	return running, viewers
}

// A shell whose link is lost is there when its owner comes back, with what it has
// shown; what ran in it ran on, and another shell is another's.
func TestALostLinkComesBackToItsShell(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	first := c.terminal("box")
	first.say("x=kept; echo one$((1+1))", "one2")
	first.say("(sleep 1; echo late > /workspace/late; echo l''ate) &", "] ")
	first.kill()
	within(t, 10*time.Second, "the node to notice", func() bool { _, viewers := shells(n, sb.ID); return viewers == 0 })

	back := c.terminal("box")
	back.wait("back in the shell")
	back.wait("one2") // is shown again
	back.say("echo $x$((2+2))", "kept4")
	back.wait("late")
	other := c.terminal("box")
	other.say("echo [$x]", "[]")
	if running, viewers := shells(n, sb.ID); running != 2 || viewers != 2 {
		t.Errorf("%d shells, %d viewers", running, viewers)
	}
	fresh := c.terminal("box+new")
	fresh.say("echo [$x]; exit 3", "[]")
	if code := fresh.end(); code != 3 {
		t.Errorf("its status is %d", code)
	}

	// Several in one: both see it, and it ends for both.
	guest := c.terminal("box+attach")
	guest.wait("somebody else")
	guest.say("x=guest", "x=guest")
	other.say("echo $x$((3+3)); exit 5", "guest6")
	if a, b := guest.end(), other.end(); a != 5 || b != 5 {
		t.Errorf("they ended with %d and %d", a, b)
	}
	back.say("exit 4", "")
	if code := back.end(); code != 4 {
		t.Errorf("its status is %d", code)
	}
	if running, _ := shells(n, sb.ID); running != 0 {
		t.Errorf("%d shells are left", running)
	}
	if _, errs, code := c.run("", "-tt", "box+attach@127.0.0.1"); code != 255 || !strings.Contains(errs, "nobody has a shell") {
		t.Errorf("%q, %d", errs, code)
	}
}

// A sandbox of new ends with its shell, and not with the link to it; its banner says
// what it is.
func TestANewSandboxOutlivesALostLink(t *testing.T) {
	n, c := startSSH(t)
	term := c.terminal("new")
	term.wait("boxed: it ends with this shell")
	id := boxed.ID(strings.Fields(term.text()[strings.Index(term.text(), "boxed: "):])[1])
	if lines := strings.Count(term.text(), "boxed: "); lines > 4 {
		t.Errorf("the banner has %d lines", lines)
	}
	term.say("x=kept; echo in$((1+1))", "in2")
	term.kill()
	within(t, 10*time.Second, "the node to notice", func() bool { _, viewers := shells(n, id); return viewers == 0 })
	back := c.terminal(string(id))
	back.say("echo $x$((2+2)); exit 6", "kept4")
	if code := back.end(); code != 6 {
		t.Errorf("its status is %d", code)
	}
	within(t, 10*time.Second, "it to be gone", func() bool {
		sb, err := n.Get(t.Context(), id)
		return err == nil && sb.State.Ended()
	})
}

// A language's own prompt on a terminal.
func TestAREPLOverSSH(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	repl := c.terminal("box", "repl", "python")
	repl.wait(">>> ")
	repl.say("print(6*7, flush=True)", "42\r\n")
	repl.say("exit(3)", "")
	if code := repl.end(); code != 3 {
		t.Errorf("its status is %d", code)
	}
	repl = c.terminal("box+repl.js")
	repl.say("6*7", "42")
	repl.say("process.exit(4)", "")
	if code := repl.end(); code != 4 {
		t.Errorf("its status is %d", code)
	}
	for _, args := range [][]string{{"box@127.0.0.1", "repl", "cobol"}, {"box+repl.cobol@127.0.0.1"}} {
		if _, errs, code := c.run("", args...); code != 255 || !strings.Contains(errs, `no REPL of "cobol"; there is one of python, javascript, bash`) {
			t.Errorf("%q: %q, %d", args, errs, code)
		}
	}
}

// Options of a user name that mean nothing are an error that says what there is.
func TestOptionsOfTheUserName(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	for user, want := range map[string]string{
		"box+keep":       `"keep" is no option`,
		"box+new+attach": "asks for a new shell and for the last one",
		"new+a+b":        "two templates",
		"+new":           "names no sandbox",
	} {
		if _, errs, code := c.run("", user+"@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, want) {
			t.Errorf("%s: %q, %d", user, errs, code)
		}
	}
}

// A terminal is told that its sandbox is about to end.
func TestATerminalIsWarned(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box", TTL: boxed.Duration(62 * time.Second)})
	term := c.terminal("box")
	term.wait("this sandbox ends in 1m")
	term.wait("ssh boxed renew " + sb.ID.Random())
	if _, errs, code := c.run("", "boxed@127.0.0.1", "renew", sb.ID.Random(), "--ttl", "1h"); code != 0 {
		t.Error(errs)
	}
}

// A recorded terminal says so, shows in its recording what it showed and nothing that
// was typed unseen, and is its owner's.
func TestTerminalsAreRecorded(t *testing.T) {
	n, c := startSSH(t)
	n.args = append(n.args, "--ssh-record")
	n.stop(15)
	n.start()
	n.create(boxed.Spec{Name: "box"})
	term := c.terminal("box")
	term.wait("this terminal is recorded")
	term.say("stty -echo; echo sh''own; read x; stty echo", "shown")
	term.say("secret", "$ ")
	term.say("echo $((6*7)); exit", "42")
	term.end()
	id, errs, code := n.ctl("replay", "-o", "name")
	if id = strings.TrimSpace(id); code != 0 || id == "" || strings.Contains(id, "\n") {
		t.Fatalf("%q, %q", id, errs)
	}
	out, errs, code := n.ctl("replay", id, "--speed", "0")
	if code != 0 || !strings.Contains(out, "shown") || !strings.Contains(out, "42") || strings.Contains(out, "secret") {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	bob := n.as("bob")
	if out, _, _ := bob.ctl("replay", "-o", "name"); out != "" {
		t.Errorf("bob sees %q", out)
	}
	if _, errs, code := bob.ctl("replay", id); code == 0 || !strings.Contains(errs, "no recording") {
		t.Errorf("bob reads it: %q, %d", errs, code)
	}
	c.run("", "box@127.0.0.1", "true") // has no terminal
	if again, _, _ := n.ctl("replay", "-o", "name"); strings.TrimSpace(again) != id {
		t.Errorf("got %q", again)
	}
}
