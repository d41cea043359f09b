package main_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

func TestProgramsRun(t *testing.T) {
	s := start(t)
	out, errs, exit := s.run(t, script("echo out; echo err >&2; id -u; exit 7"), "")
	if out != "out\n231000\n" || errs != "err\n" || exit.Code != 7 || exit.Reason != agent.ExitExited {
		t.Errorf("got %q, %q, %+v", out, errs, exit)
	}
	if out, _, exit := s.run(t, command("cat"), "hello"); out != "hello" || exit.Code != 0 {
		t.Errorf("cat: %q %+v", out, exit)
	}
	// X7: without stdin, a program that reads it gets its end at once.
	if out, _, _ := s.run(t, script("cat; readlink /proc/self/fd/0"), ""); out != "/dev/null\n" {
		t.Errorf("stdin is %q", out)
	}
	// X18: bytes exactly as written.
	if out, _, _ := s.run(t, script(`printf 'a\n\n\nb\0c\377'`), ""); out != "a\n\n\nb\x00c\xff" {
		t.Errorf("got %q", out)
	}
	if out, _, exit := s.run(t, script("kill -9 $$"), ""); exit.Reason != agent.ExitSignaled || exit.Signal != "KILL" || exit.Code != 137 {
		t.Errorf("%q %+v", out, exit)
	}
}

// User code has no capability, and the agent has three.
func TestUserCodeHasNoCapability(t *testing.T) {
	s := start(t)
	out, _, _ := s.run(t, script("grep -E 'CapEff|CapPrm|CapInh|CapAmb|NoNewPrivs' /proc/self/status; grep CapPrm /proc/1/status"), "")
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		switch {
		case name == "NoNewPrivs" && value == "1", value == "0000000000000000":
		case name == "CapPrm" && value == "00000000000000e0" && !strings.HasSuffix(out, line):
			t.Errorf("user code has %s", line)
		case value == "00000000000000e0":
		default:
			t.Errorf("unexpected %s", line)
		}
	}
}

// X19, X27: what cannot start says why, at once.
func TestWhatCannotStartSaysWhy(t *testing.T) {
	s := start(t)
	s.run(t, script("printf '#!/no/such/thing\\n' > /tmp/bad; printf 'junk' > /tmp/junk; chmod 755 /tmp/bad /tmp/junk; touch /tmp/plain"), "")
	missing := command("true")
	missing.Dir = "/tmp/nowhere"
	file := command("true")
	file.Dir = "/tmp/plain"
	lang := script("")
	lang.Argv, lang.Language, lang.Env = nil, "javascript", []string{"PATH=/nonexistent"}
	for _, c := range []struct {
		start agent.ExecStart
		code  string
		text  string
	}{
		{command("no-such-program"), agent.ErrNotFound, "no-such-program"},
		{command("/no/such/program"), agent.ErrNotFound, "/no/such/program"},
		{command("/tmp/plain"), agent.ErrStartFailed, "/tmp/plain"},
		{command("/tmp/bad"), agent.ErrNotFound, "interpreter"},
		{command("/tmp/junk"), agent.ErrStartFailed, "/tmp/junk"},
		{command("/tmp"), agent.ErrStartFailed, "/tmp"},
		{missing, agent.ErrInvalid, "/tmp/nowhere"},
		{file, agent.ErrInvalid, "/tmp/plain"},
		{lang, agent.ErrNotFound, "no node"},
		{command("a\x00b"), agent.ErrInvalid, "zero byte"},
		{command(), agent.ErrInvalid, "no program"},
		{command("echo", strings.Repeat("x", 200<<10)), agent.ErrTooLarge, "too large"},
	} {
		_, err := s.Exec(t.Context(), c.start, agent.Streams{})
		var e *agent.Error
		if !errors.As(err, &e) || e.Code != c.code || !strings.Contains(e.Message, c.text) {
			t.Errorf("%.40q: got %v, want %s about %q", c.start.Argv, err, c.code, c.text)
		}
	}
}

// X17: a program of 1 MiB runs, and its traceback names a file.
func TestLargeCodeRuns(t *testing.T) {
	s := start(t)
	a := script("")
	a.Argv, a.Language = nil, "python"
	a.Code = []byte("x = '" + strings.Repeat("a", 1<<20) + "'\nprint(len(x))\nraise ValueError('here')\n")
	out, errs, exit := s.run(t, a, "")
	if out != "1048576\n" || exit.Code != 1 || !strings.Contains(errs, "main.py\", line 3") {
		t.Errorf("%q %.300q %+v", out, errs, exit)
	}
	if left, _, _ := s.run(t, script("ls /tmp"), ""); left != "" {
		t.Errorf("left behind: %q", left)
	}
}

// X1, X2: a timeout ends every descendant, however it hid.
func TestTimeoutEndsTheWholeTree(t *testing.T) {
	s := start(t)
	a := script("setsid sh -c 'sleep 101 & (sleep 102 &) ; nohup env -i sleep 103' & sleep 104")
	a.TimeoutMS = 300
	began := time.Now()
	_, _, exit := s.run(t, a, "")
	if exit.Reason != agent.ExitTimeout || time.Since(began) > 5*time.Second {
		t.Errorf("%+v after %v", exit, time.Since(began))
	}
	if left, _, _ := s.run(t, script("pgrep -a sleep; true"), ""); left != "" {
		t.Errorf("still there: %s", left)
	}
}

// X2: a bomb at the process limit is gone within 3 s, another exec is
// untouched, and the agent lives.
func TestForkBombIsKilled(t *testing.T) {
	s := start(t)
	other := script("sleep 2; echo fine")
	var wg sync.WaitGroup
	wg.Go(func() {
		if out, _, exit := s.run(t, other, ""); out != "fine\n" {
			t.Errorf("the other exec: %q %+v", out, exit)
		}
	})
	bomb := command("bash", "-c", "bomb() { bomb | bomb & }; bomb; while :; do bomb; done")
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	s.Exec(ctx, bomb, agent.Streams{})
	began := time.Now()
	if err := s.Kill(t.Context(), bomb.ID, agent.ExitCanceled); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("killing took %v", took)
	}
	wg.Wait()
	if left, _, _ := s.run(t, script("pgrep -c bash; true"), ""); left != "0\n" {
		t.Errorf("bomb processes left: %s", left)
	}
}

// An exec's processes cannot take another mark and so get away.
func TestTheMarkCannotBeChanged(t *testing.T) {
	s := start(t)
	out, _, _ := s.run(t, script("prlimit --rss=5:5 true 2>&1; bash -c 'ulimit -Hm 5' 2>&1; prlimit --nofile=100:100 echo works"), "")
	if strings.Count(out, "not permitted") != 2 || !strings.HasSuffix(out, "works\n") {
		t.Errorf("got %q", out)
	}
}

// X3: the leader's exit is the end, whatever it leaves behind; that lives on
// until it is killed by exec ID.
func TestBackgroundChildrenHoldNobodyUp(t *testing.T) {
	s := start(t)
	for range 5 {
		a := script("sleep 1000 & echo started")
		began := time.Now()
		out, _, exit := s.run(t, a, "")
		if out != "started\n" || exit.Code != 0 || time.Since(began) > 2*time.Second {
			t.Fatalf("%q %+v after %v", out, exit, time.Since(began))
		}
		infos, err := s.Execs(t.Context())
		if err != nil || infos[len(infos)-1].Processes != 1 {
			t.Fatalf("%+v, %v", infos, err)
		}
		if err := s.Kill(t.Context(), a.ID, agent.ExitCanceled); err != nil {
			t.Fatal(err)
		}
	}
	if left, _, _ := s.run(t, script("pgrep -a sleep; true"), ""); left != "" {
		t.Errorf("still there: %s", left)
	}
}

// X4: a signal reaches a handler, the leader's or everybody's.
func TestSignals(t *testing.T) {
	s := start(t)
	a := script("trap 'echo got it; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
	var out lockedBuffer
	ended := make(chan agent.Exit, 1)
	go func() {
		exit, err := s.Exec(t.Context(), a, agent.Streams{Stdout: &out})
		if err != nil {
			t.Error(err)
		}
		ended <- exit
	}()
	waitFor(t, func() bool { return strings.Contains(out.String(), "ready") })
	if err := s.Signal(t.Context(), a.ID, "NOSUCH", false); err == nil {
		t.Error("an unknown signal was taken")
	}
	if err := s.Signal(t.Context(), a.ID, "TERM", false); err != nil {
		t.Fatal(err)
	}
	if exit := <-ended; exit.Code != 3 || exit.Reason != agent.ExitExited || !strings.Contains(out.String(), "got it") {
		t.Errorf("%+v %q", exit, out.String())
	}
}

// Canceling ends the exec and everything in it (X2, X4).
func TestCancelEndsTheTree(t *testing.T) {
	s := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	var out lockedBuffer
	go func() {
		waitFor(t, func() bool { return strings.Contains(out.String(), "ready") })
		cancel()
	}()
	exit, err := s.Exec(ctx, script("sleep 200 & echo ready; wait"), agent.Streams{Stdout: &out})
	if !errors.Is(err, context.Canceled) || exit.Reason != agent.ExitCanceled {
		t.Errorf("%+v %v", exit, err)
	}
	if left, _, _ := s.run(t, script("pgrep -a sleep; true"), ""); left != "" {
		t.Errorf("still there: %s", left)
	}
}

// P1–P3, P5: a terminal has the size that was asked for from the first byte on,
// changes it, and is a terminal; without one nothing is.
func TestTerminal(t *testing.T) {
	s := start(t)
	if out, _, _ := s.run(t, script("test -t 1 || test -t 0 || echo none"), ""); out != "none\n" {
		t.Errorf("without a terminal: %q", out)
	}
	zero := script("stty size; test -t 0 && test -t 1 && test -t 2 && echo tty; echo $X; pwd; tty; : > $(tty) && echo mine")
	zero.TTY, zero.Env = true, append(zero.Env, "X=y")
	if out, _, _ := s.run(t, zero, ""); !strings.HasPrefix(out, "24 80\r\ntty\r\ny\r\n/tmp\r\n/dev/pts/") || !strings.HasSuffix(out, "mine\r\n") {
		t.Errorf("got %q", out)
	}
	erase := script("stty -a | grep -ow -- '-*iutf8'")
	erase.TTY = true
	if out, _, _ := s.run(t, erase, ""); out != "iutf8\r\n" {
		t.Errorf("it erases bytes: %q", out)
	}
	a := script("trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.05; done")
	a.TTY, a.Cols, a.Rows = true, 100, 40
	var out lockedBuffer
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Exec(t.Context(), a, agent.Streams{Stdout: &out})
	}()
	waitFor(t, func() bool { return out.String() == "40 100\r\n" })
	if err := s.Resize(t.Context(), a.ID, 120, 50); err != nil {
		t.Fatal(err)
	}
	<-ended
	if out.String() != "40 100\r\n50 120\r\n" {
		t.Errorf("got %q", out.String())
	}
}

// X5, X24: quick programs lose neither output nor exit code, and leave no zombie.
func TestQuickExecsLoseNothing(t *testing.T) {
	s := start(t)
	var wg sync.WaitGroup
	starts := make(chan agent.ExecStart)
	for range 4 {
		wg.Go(func() {
			for a := range starts {
				if out, _, exit := s.run(t, a, ""); out != "x\n" || exit.Code != 5 {
					t.Errorf("%q %+v", out, exit)
				}
			}
		})
	}
	for range 500 {
		starts <- script("echo x; exit 5")
	}
	close(starts)
	wg.Wait()
	if zombies, _, _ := s.run(t, script("ps -eo stat | grep -c ^Z"), ""); zombies != "0\n" {
		t.Errorf("zombies: %s", zombies)
	}
}

// X8, X10: large input and output arrive whole; an early exit is told to the writer.
func TestLargeStreamsArriveWhole(t *testing.T) {
	s := start(t)
	const size = 100 << 20
	seed := [32]byte{1}
	want := sha256.New()
	io.Copy(want, io.LimitReader(rand.NewChaCha8(seed), size))
	got := sha256.New()
	a := command("cat")
	a.Stdin = true
	exit, err := s.Exec(t.Context(), a, agent.Streams{Stdin: io.LimitReader(rand.NewChaCha8(seed), size), Stdout: got})
	if err != nil || exit.Code != 0 || exit.StdoutBytes != size || !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		t.Errorf("%+v %v", exit, err)
	}
	early := command("true")
	early.Stdin = true
	r, w := io.Pipe()
	written := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, rand.NewChaCha8(seed))
		written <- err
	}()
	if exit, err := s.Exec(t.Context(), early, agent.Streams{Stdin: r}); err != nil || exit.Code != 0 {
		t.Errorf("%+v %v", exit, err)
	}
	select {
	case err := <-written:
		if !errors.Is(err, agent.ErrStdinClosed) {
			t.Errorf("the writer got %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the writer hangs")
	}
}

// A slow reader gets all that was written before the leader ended, and a
// timeout frees what it held (X21).
func TestSlowReadersLoseNothing(t *testing.T) {
	s := start(t)
	var got lockedBuffer
	slow := writerFunc(func(p []byte) (int, error) {
		if len(got.String()) < 1<<20 {
			time.Sleep(10 * time.Millisecond)
		}
		return got.Write(p)
	})
	exit, err := s.Exec(t.Context(), script("head -c 3000000 /dev/zero"), agent.Streams{Stdout: slow})
	if err != nil || exit.StdoutBytes != 3000000 || len(got.String()) != 3000000 {
		t.Errorf("%+v %v, %d bytes", exit, err, len(got.String()))
	}
}

func TestOutputLimit(t *testing.T) {
	s := start(t)
	a := script("yes")
	a.MaxOutput = 100_000
	out, _, exit := s.run(t, a, "")
	if exit.Reason != agent.ExitOutputLimit || len(out) != 100_000 {
		t.Errorf("%+v %d", exit, len(out))
	}
}

// X11–X13: a detached exec never waits for a reader; readers come, go and
// resume by offset.
func TestDetachedExecsKeepTheirEnd(t *testing.T) {
	s := start(t)
	a := script("seq 1 400000; sleep 0.2; echo last")
	info, err := s.Start(t.Context(), a)
	if err != nil || info.PID == 0 {
		t.Fatalf("%+v %v", info, err)
	}
	var whole strings.Builder
	for i := 1; i <= 400000; i++ {
		fmt.Fprintln(&whole, i)
	}
	whole.WriteString("last\n")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			var out bytes.Buffer
			var dropped int64
			at := agent.Attach{ID: a.ID, Stdout: int64(i) * 1000}
			exit, err := s.Attach(t.Context(), at, agent.Streams{Stdout: &out, Gap: func(stderr bool, n int64) {
				if out.Len() > 0 { // a gap in the middle: what was read before it must be counted
					dropped += int64(out.Len())
					out.Reset()
				}
				dropped += n
			}})
			if err != nil || exit.Reason != agent.ExitExited {
				t.Errorf("%+v %v", exit, err)
			}
			if want := whole.String()[at.Stdout+dropped:]; out.String() != want {
				t.Errorf("reader %d: %d bytes after %d dropped, want %d", i, out.Len(), dropped, len(want))
			}
		})
	}
	wg.Wait()
	exit, err := s.Attach(t.Context(), agent.Attach{ID: a.ID, Stdout: int64(whole.Len()) - 5}, agent.Streams{Stdout: writerFunc(func(p []byte) (int, error) {
		if string(p) != "last\n" {
			t.Errorf("got %q", p)
		}
		return len(p), nil
	})})
	if err != nil || exit.StdoutBytes != int64(whole.Len()) {
		t.Errorf("%+v %v", exit, err)
	}
}

// The daemon goes away and comes back: execs live on and are joined again by
// ID and offset, and nobody without the secret takes its place (I2).
func TestExecsOutliveTheHost(t *testing.T) {
	s := start(t)
	a := script("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i; sleep 0.1; done; exit 4")
	var out lockedBuffer
	ended := make(chan error, 1)
	go func() {
		_, err := s.Exec(t.Context(), a, agent.Streams{Stdout: &out})
		ended <- err
	}()
	waitFor(t, func() bool { return strings.Contains(out.String(), "3\n") })
	first := s.Host
	first.Close()
	if err := <-ended; !errors.Is(err, agent.ErrClosed) {
		t.Errorf("the old host's call: %v", err)
	}
	s.listen(t, true)
	exit, err := s.Attach(t.Context(), agent.Attach{ID: a.ID, Own: true, Stdout: int64(len(out.String()))}, agent.Streams{Stdout: &out})
	if err != nil || exit.Code != 4 || out.String() != "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n" {
		t.Errorf("%+v %v %q", exit, err, out.String())
	}
	s.Close()
	s.secret = "another"
	s.listen(t, true)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := s.Ready(ctx); err == nil {
		t.Error("a guest with another secret was taken")
	}
}

// A link that breaks under an exec is taken up without loss (X13, X14).
func TestBrokenLinkIsTakenUp(t *testing.T) {
	s := start(t)
	a := script("for i in $(seq 1 2000); do echo line $i; done; sleep 0.3; echo end")
	var out lockedBuffer
	ended := make(chan error, 1)
	go func() {
		_, err := s.Exec(t.Context(), a, agent.Streams{Stdout: &out})
		ended <- err
	}()
	waitFor(t, func() bool { return strings.Contains(out.String(), "line 2000") })
	s.BreakLink()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(out.String(), "line 2000\nend\n") || strings.Count(out.String(), "\n") != 2001 {
		t.Errorf("got …%q", out.String()[max(0, len(out.String())-40):])
	}
}

// The exec that takes all memory is told from one that is killed (X15); see the
// Docker suite for the first. Here: a kill from inside is signaled.
func TestKilledFromInsideIsSignaled(t *testing.T) {
	s := start(t)
	_, _, exit := s.run(t, script("(sleep 0.1; kill -9 $$) & sleep 5"), "")
	if exit.Reason != agent.ExitSignaled || exit.Code != 137 {
		t.Errorf("%+v", exit)
	}
}

// I1 (in part; the rest runs in real containers): user code reaches PID 1 in no way.
func TestUserCodeCannotTouchTheAgent(t *testing.T) {
	s := start(t)
	code := script(`
for s in 1 2 3 6 9 11 15 19; do kill -$s 1 2>/dev/null && echo killed $s; done
prlimit --pid 1 --nofile=1 2>/dev/null && echo limited
renice -n 19 -p 1 >/dev/null 2>&1 && echo reniced
for t in /proc/1/task/*; do renice -n 19 -p ${t##*/} >/dev/null 2>&1 && echo reniced thread; taskset -p 1 ${t##*/} >/dev/null 2>&1 && echo moved; done
cat /proc/1/environ /proc/1/mem /proc/1/maps 2>/dev/null | head -c 1
ls /proc/1/fd 2>/dev/null
python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/run/boxed/agent.sock"); print("connected")' 2>/dev/null
true`)
	if out, _, _ := s.run(t, code, ""); out != "" {
		t.Errorf("got %q", out)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("waited in vain")
			return
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A process whose main thread has exited looks like a zombie and is not one: a
// timeout ends it all the same.
func TestTheTreeIsKilledWithoutItsMainThread(t *testing.T) {
	s := start(t)
	a := command("python3", "-c", `
import ctypes, threading, time
threading.Thread(target=lambda: [time.sleep(0.05) for _ in range(2000)]).start()
ctypes.CDLL(None).syscall(60, 0)`)
	a.TimeoutMS = 500
	began := time.Now()
	if _, _, exit := s.run(t, a, ""); exit.Reason != agent.ExitTimeout || time.Since(began) > 5*time.Second {
		t.Errorf("%+v after %v", exit, time.Since(began))
	}
}

// User code may stop a new process between fork and exec. That delays other
// programs by seconds at most, and how running ones end by nothing.
func TestStoppedStartsHoldNobodyForLong(t *testing.T) {
	s := start(t)
	// A lease on the file that is executed holds execve until it is broken.
	holder := command("python3", "-c", `
import fcntl, os, shutil, signal, time
shutil.copy("/bin/true", "/tmp/prog")
os.chmod("/tmp/prog", 0o755)
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open("/tmp/prog", os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
os.close(fd)
fd = os.open("/tmp/prog", os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
open("/tmp/ready", "w")
time.sleep(60)`)
	if _, err := s.Start(t.Context(), holder); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		_, err := s.Stat(t.Context(), "/tmp/ready")
		return err == nil
	})
	long := script("sleep 1; exit 3")
	ended := make(chan agent.Exit, 1)
	go func() {
		exit, err := s.Exec(t.Context(), long, agent.Streams{})
		if err != nil {
			t.Error(err)
		}
		ended <- exit
	}()
	waitFor(t, func() bool { infos, err := s.Execs(t.Context()); return err == nil && len(infos) == 2 })
	began := time.Now()
	stuck := make(chan error, 1)
	go func() {
		_, err := s.Exec(t.Context(), command("/tmp/prog"), agent.Streams{})
		stuck <- err
	}()
	if exit := <-ended; exit.Code != 3 || time.Since(began) > 4*time.Second {
		t.Errorf("another exec's end: %+v after %v", exit, time.Since(began))
	}
	if err := <-stuck; code(err) != agent.ErrStartFailed {
		t.Errorf("the held one: %v", err)
	}
	if out, _, _ := s.run(t, script("echo fine"), ""); out != "fine\n" || time.Since(began) > 20*time.Second {
		t.Errorf("%q after %v", out, time.Since(began))
	}
}

// moby/moby#31243: a program may open its own streams by name.
func TestStreamsCanBeOpenedByName(t *testing.T) {
	s := start(t)
	if out, errs, exit := s.run(t, script("echo a > /dev/stdout; echo b > /dev/stderr; cat /dev/stdin; echo c > /proc/self/fd/2"), "in\n"); out != "a\nin\n" || errs != "b\nc\n" {
		t.Errorf("%q %q %+v", out, errs, exit)
	}
}

// Descriptors that the agent was started with are not for programs (the kind of
// CVE-2024-21626).
func TestProgramsInheritNoDescriptor(t *testing.T) {
	s := start(t)
	if out, _, _ := s.run(t, command("ls", "/proc/self/fd"), ""); out != "0\n1\n2\n3\n" { // 3 is ls's own
		t.Errorf("got %q", out)
	}
}

// A program may close its streams a moment before it ends (cat does): that is
// no reason to hang its terminal up.
func TestTerminalOutlivesClosedStreams(t *testing.T) {
	s := start(t)
	a := command("bash", "-c", "echo bye; exec <&- >&- 2>&-; sleep 0.1; exit 6")
	a.TTY = true
	if out, _, exit := s.run(t, a, ""); out != "bye\r\n" || exit.Code != 6 || exit.Reason != agent.ExitExited {
		t.Errorf("%q %+v", out, exit)
	}
}

// X16: output that was cut is never reported as complete, however the leader's
// end and the limit race.
func TestCutOutputIsAlwaysSaid(t *testing.T) {
	s := start(t)
	for range 40 {
		a := command("head", "-c", "20000", "/dev/zero")
		a.MaxOutput = 10_000
		if out, _, exit := s.run(t, a, ""); exit.Reason != agent.ExitOutputLimit || len(out) != 10_000 {
			t.Fatalf("%+v %d", exit, len(out))
		}
	}
}

// X10, X12: a reader that stalls while other execs come and go loses nothing.
func TestStalledReaderLosesNothing(t *testing.T) {
	s := start(t)
	resume := make(chan struct{})
	var got int
	stall := writerFunc(func(p []byte) (int, error) {
		<-resume
		got += len(p)
		return len(p), nil
	})
	ended := make(chan error, 1)
	go func() {
		_, err := s.Exec(t.Context(), command("head", "-c", "1000000", "/dev/zero"), agent.Streams{Stdout: stall})
		ended <- err
	}()
	for range 20 {
		s.run(t, command("true"), "")
	}
	close(resume)
	if err := <-ended; err != nil || got != 1_000_000 {
		t.Errorf("%d bytes, %v", got, err)
	}
}

// Whoever joins an exec and leaves again, with its input open, leaves it running.
func TestLeavingAnAttachWithInputOpenEndsNothing(t *testing.T) {
	s := start(t)
	for range 40 {
		a := command("sleep", "100")
		a.Stdin = true
		if _, err := s.Start(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		in, w := io.Pipe()
		stop := context.AfterFunc(ctx, func() { w.CloseWithError(errors.New("the client left")) })
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Attach(ctx, agent.Attach{ID: a.ID}, agent.Streams{Stdin: in})
		}()
		w.Write([]byte("x"))
		cancel()
		<-done
		stop()
		infos, err := s.Execs(t.Context())
		if err != nil || infos[len(infos)-1].Exit != nil {
			t.Fatalf("%+v %v", infos[len(infos)-1], err)
		}
		s.Kill(t.Context(), a.ID, agent.ExitCanceled)
	}
}

// What a sandbox that waits costs its host is little of its own, and few pages of
// the agent's program.
func TestAnIdleAgentGivesItsMemoryBack(t *testing.T) {
	s := start(t)
	for range 20 {
		s.run(t, script("head -c 1000000 /dev/zero"), "")
	}
	before, err := s.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has become smaller", func() bool {
		now, err := s.Stats(t.Context())
		return err == nil && now.RSSBytes < before.RSSBytes-1<<20
	})
	if _, _, exit := s.run(t, script("exit 3"), ""); exit.Code != 3 {
		t.Errorf("%+v", exit)
	}
}
