//go:build linux

package ctl

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
)

// terminal is boxedctl on a pseudo-terminal.
type terminal struct {
	t      *testing.T
	master *os.File
	slave  *os.File // kept open, so that its modes can be read after the program's end
	cmd    *exec.Cmd
	before unix.Termios
	ended  chan error

	mu  sync.Mutex
	out bytes.Buffer
}

// onTerminal starts boxedctl on a terminal of 100 columns and 30 rows.
func onTerminal(t *testing.T, endpoint, key string, args ...string) *terminal {
	t.Helper()
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	tm := &terminal{t: t, master: master, slave: slave, ended: make(chan error, 1)}
	t.Cleanup(func() { master.Close(); slave.Close() })
	tm.resize(100, 30)
	tm.before = tm.modes()
	tm.cmd = exec.Command(os.Args[0], args...)
	tm.cmd.Env = append(os.Environ(), asProgram+"=1", "BOXED_ENDPOINT="+endpoint, "BOXED_API_KEY="+key, "HOME="+t.TempDir(), "TERM=xterm")
	tm.cmd.Stdin, tm.cmd.Stdout, tm.cmd.Stderr = slave, slave, slave
	tm.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := tm.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tm.cmd.Process.Kill() })
	go func() { tm.ended <- tm.cmd.Wait() }()
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			tm.mu.Lock()
			tm.out.Write(buf[:n])
			tm.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return tm
}

func (tm *terminal) modes() unix.Termios {
	tm.t.Helper()
	m, err := unix.IoctlGetTermios(int(tm.slave.Fd()), unix.TCGETS)
	if err != nil {
		tm.t.Fatal(err)
	}
	return *m
}

func (tm *terminal) resize(cols, rows uint16) {
	tm.t.Helper()
	if err := pty.Setsize(tm.master, &pty.Winsize{Cols: cols, Rows: rows}); err != nil {
		tm.t.Fatal(err)
	}
}

func (tm *terminal) typed(s string) {
	tm.t.Helper()
	if _, err := tm.master.WriteString(s); err != nil {
		tm.t.Fatal(err)
	}
}

// sees waits until the pattern has appeared in what came since the last call.
func (tm *terminal) sees(pattern string) {
	tm.t.Helper()
	re := regexp.MustCompile(pattern)
	var all string
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		tm.mu.Lock()
		all = tm.out.String()
		at := re.FindStringIndex(all)
		if at != nil {
			tm.out.Next(at[1])
		}
		tm.mu.Unlock()
		if at != nil {
			return
		}
	}
	tm.t.Fatalf("never saw %s, only %q", pattern, all)
}

// ends waits for boxedctl's end and checks that the terminal is as it was.
func (tm *terminal) ends(status int) {
	tm.t.Helper()
	select {
	case err := <-tm.ended:
		got := 0
		if err != nil {
			got = tm.cmd.ProcessState.ExitCode()
		}
		if got != status {
			tm.t.Errorf("exit status %d, want %d", got, status)
		}
	case <-time.After(15 * time.Second):
		tm.t.Fatal("boxedctl does not end")
	}
	if tm.modes() != tm.before {
		tm.t.Error("the terminal is not as it was before")
	}
}

// makeBox makes a sandbox that is destroyed after the test.
func makeBox(t *testing.T, endpoint, key string) (name string) {
	t.Helper()
	name = "terminal-" + boxed.NewToken(8)
	home := t.TempDir()
	for _, args := range [][]string{{"create", "--name", name}, {"rm", "-f", name}} {
		do := func() {
			cmd := exec.Command(os.Args[0], args...)
			cmd.Env = append(os.Environ(), asProgram+"=1", "BOXED_ENDPOINT="+endpoint, "BOXED_API_KEY="+key, "HOME="+home)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Logf("%v: %v: %s", args, err, out)
			}
		}
		if args[0] == "create" {
			do()
		} else {
			t.Cleanup(do)
		}
	}
	return name
}

// P1, P2: the size is there from the start and follows the window; keys reach
// the program, Ctrl-C too; its status comes back and the terminal is restored.
func TestTerminalIsTheProgramsOwn(t *testing.T) {
	endpoint, key := testNode(t)
	box := makeBox(t, endpoint, key)
	tm := onTerminal(t, endpoint, key, "exec", "-it", box, "bash", "--norc", "--noprofile")
	tm.typed("echo ready-$((1+1)); stty size\r")
	tm.sees(`ready-2\r\n30 100\r\n`)
	tm.resize(90, 20)
	tm.typed("for i in 1 2 3 4 5 6 7 8 9; do [ \"$(stty size)\" = '20 90' ] && break; sleep 0.1; done; echo \"now=$(stty size)\"\r")
	tm.sees(`now=20 90\r\n`)
	tm.typed("echo before; sleep 100\r")
	tm.sees(`before\r\n`)
	time.Sleep(200 * time.Millisecond) // until sleep is in the foreground; too early is harmless but tests less
	tm.typed("\x03")
	tm.typed("echo after=$?\r")
	tm.sees(`after=130\r\n`)
	tm.typed("exit 3\r")
	tm.ends(3)
}

// However boxedctl ends, the terminal is given back.
func TestTerminalIsRestoredAfterASignal(t *testing.T) {
	endpoint, key := testNode(t)
	box := makeBox(t, endpoint, key)
	tm := onTerminal(t, endpoint, key, "exec", "-it", box, "bash", "-c", "trap '' TERM HUP; echo ready; sleep 100")
	tm.sees(`ready\r\n`)
	if tm.modes() == tm.before {
		t.Error("the terminal is not raw while the program has it")
	}
	for range 2 {
		_ = tm.cmd.Process.Signal(syscall.SIGTERM)
		time.Sleep(100 * time.Millisecond)
	}
	tm.ends(128 + int(syscall.SIGTERM))
}

func TestTerminalIsRestoredWhenTheNodeGoesAway(t *testing.T) {
	var stop []func()
	endpoint, err := startFake(t.TempDir(), func(f func()) { stop = append(stop, f) })
	if err != nil {
		t.Fatal(err)
	}
	box := makeBox(t, endpoint, fakeUserKey)
	tm := onTerminal(t, endpoint, fakeUserKey, "exec", "-it", box, "bash", "-c", "echo ready; sleep 100")
	tm.sees(`ready\r\n`)
	for _, f := range stop {
		f()
	}
	tm.sees(`boxedctl: `)
	tm.ends(exitBoxed)
}

// X20: bash if there is one. A terminal on both sides makes it interactive.
func TestShellAndReplAreInteractive(t *testing.T) {
	endpoint, key := testNode(t)
	box := makeBox(t, endpoint, key)
	tm := onTerminal(t, endpoint, key, "shell", box)
	tm.typed("echo shell=$BASH_VERSION flags=$-\r")
	tm.sees(`shell=\d.*flags=\w*i`)
	tm.typed("\x04")
	tm.ends(0)

	tm = onTerminal(t, endpoint, key, "repl", box, "--lang", "bash")
	tm.typed("echo $((40+2)); exit 4\r")
	tm.sees(`42\r\n`)
	tm.ends(4)
}

func TestColoursAndWidthOnATerminal(t *testing.T) {
	endpoint, key := testNode(t)
	makeBox(t, endpoint, key)
	tm := onTerminal(t, endpoint, key, "ls")
	tm.sees("\x1b\\[32mrunning\x1b\\[0m")
	tm.ends(0)
	tm = onTerminal(t, endpoint, key, "ls", "--no-color")
	tm.ends(0)
	time.Sleep(50 * time.Millisecond)
	tm.mu.Lock()
	defer tm.mu.Unlock()
	if strings.Contains(tm.out.String(), "\x1b") {
		t.Errorf("colours in %q", tm.out.String())
	}
}
