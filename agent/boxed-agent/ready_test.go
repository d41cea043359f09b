package main_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

func python(code string) agent.ExecStart {
	a := command()
	a.Language, a.Code = "python", []byte(code)
	return a
}

// waits is the main file of the interpreter that waits for its program, or "".
func (s *sandbox) waits(t *testing.T) string {
	t.Helper()
	dirs, err := s.List(t.Context(), "/tmp")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if main, err := s.Stat(t.Context(), dir.Path+"/main.py"); err == nil && main.Type == "fifo" {
			return main.Path
		}
	}
	return ""
}

// ready runs a Python program, and waits until an interpreter waits for the next.
func (s *sandbox) ready(t *testing.T) (main string) {
	t.Helper()
	s.run(t, python("pass"), "")
	eventually(t, "an interpreter waits", func() bool { main = s.waits(t); return main != "" })
	return main
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

func (s *sandbox) prints(t *testing.T, a agent.ExecStart) string {
	t.Helper()
	out, errs, exit := s.run(t, a, "")
	if exit.Reason != agent.ExitExited || exit.Code != 0 {
		t.Fatalf("%+v: %s", exit, errs)
	}
	return strings.TrimSpace(out)
}

func TestAnInterpreterThatWaitsRunsAProgramAsAnyOther(t *testing.T) {
	s := start(t)
	const code = `import sys, os
print(sys.argv == [__file__], __name__, sys.path[0] == os.path.dirname(__file__), os.getcwd(), os.environ["HOME"], sys.stdin.read() == "")
print(open(__file__).read().count("count"), sys.flags.isolated, os.environ["PYTHONPATH"], len(os.listdir("/proc/self/fd")))
print(__file__)`
	cold, _, _ := s.run(t, python(code), "")
	main := s.ready(t)
	warm, _, exit := s.run(t, python(code), "")
	if exit.Reason != agent.ExitExited || exit.Code != 0 {
		t.Fatalf("%+v", exit)
	}
	split := func(out string) (string, string) {
		lines := strings.Split(strings.TrimSpace(out), "\n")
		return strings.Join(lines[:len(lines)-1], "\n"), lines[len(lines)-1]
	}
	wantOut, coldFile := split(cold)
	gotOut, file := split(warm)
	if file != main || coldFile == main {
		t.Errorf("%s and %s ran, %s waited", coldFile, file, main)
	}
	if gotOut != wantOut {
		t.Errorf("it printed\n%s\nand cold\n%s", gotOut, wantOut)
	}
	if _, err := s.Stat(t.Context(), strings.TrimSuffix(main, "/main.py")); err == nil {
		t.Error("its directory is still there")
	}
}

func TestATracebackOfOneThatWaitedShowsTheLine(t *testing.T) {
	s := start(t)
	main := s.ready(t)
	_, errs, exit := s.run(t, python("x = 1\nx / 0  # here\n"), "")
	if exit.Code != 1 || !strings.Contains(errs, fmt.Sprintf("File %q, line 2", main)) || !strings.Contains(errs, "x / 0  # here") {
		t.Errorf("%+v: %s", exit, errs)
	}
}

func TestProgramsThatRunInWaitingInterpretersShareNothing(t *testing.T) {
	s := start(t)
	s.ready(t)
	const leave = `import builtins, sys, os, random, threading, atexit, signal
builtins.left = 1
sys.meta_path.insert(0, type("hook", (), {"find_spec": staticmethod(lambda *a: None)}))
sys.modules["left"] = sys
os.environ["LEFT"] = "1"
fd = os.open("/tmp", os.O_RDONLY); os.set_inheritable(fd, True); os.dup2(fd, 77)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.chdir("/"); os.umask(0o777)
random.seed(1)
`
	const look = `import builtins, sys, os, random, signal
print(hasattr(builtins, "left"), len(sys.meta_path), "left" in sys.modules, "LEFT" in os.environ, os.path.exists("/proc/self/fd/77"),
	signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, os.getcwd(), oct(os.umask(0o22)))
print(os.getpid(), random.random(), hash("seed"))`
	pristine := strings.Split(s.prints(t, python(look)), "\n")
	s.ready(t)
	if out, errs, exit := s.run(t, python(leave), ""); exit.Code != 0 || out+errs != "" {
		t.Fatalf("%s%s%+v", out, errs, exit)
	}
	seen := map[string]bool{}
	for range 3 {
		main := ""
		eventually(t, "an interpreter waits", func() bool { main = s.waits(t); return main != "" })
		lines := strings.Split(s.prints(t, python(look)), "\n")
		if lines[0] != pristine[0] {
			t.Errorf("it found %s, the first one %s", lines[0], pristine[0])
		}
		for _, v := range strings.Fields(lines[1]) {
			if seen[v] {
				t.Errorf("%s came twice", v)
			}
			seen[v] = true
		}
	}
}

// What Python reads as it starts is as it is when the program is asked for.
func TestWhatChangesBeforeTheProgramIsHeeded(t *testing.T) {
	t.Run("through the files API", func(t *testing.T) {
		s := start(t)
		s.ready(t)
		w := agent.Write{Path: "/tmp/sitecustomize.py"}
		if _, err := s.Write(t.Context(), w, strings.NewReader("import builtins; builtins.custom = 'yes'")); err != nil {
			t.Fatal(err)
		}
		if got := s.prints(t, python("print(custom)")); got != "yes" {
			t.Error(got)
		}
	})
	t.Run("by a program", func(t *testing.T) {
		s := start(t)
		s.ready(t)
		s.run(t, script("echo 'import builtins; builtins.custom = 1' > /tmp/sitecustomize.py"), "")
		if got := s.prints(t, python("print(custom)")); got != "1" {
			t.Error(got)
		}
	})
	t.Run("by what a program left behind", func(t *testing.T) {
		s := start(t)
		s.ready(t)
		s.run(t, script("(sleep 0.3; echo 'import builtins; builtins.custom = 1' > /tmp/sitecustomize.py; sleep 1000) >/dev/null 2>&1 &"), "")
		eventually(t, "it has written", func() bool {
			_, err := s.Stat(t.Context(), "/tmp/sitecustomize.py")
			return err == nil
		})
		if got := s.prints(t, python("print(custom)")); got != "1" {
			t.Error(got)
		}
	})
	t.Run("a directory for modules that was not there", func(t *testing.T) {
		s := start(t)
		s.ready(t)
		s.run(t, python("import site, os; os.makedirs(site.getusersitepackages()); open(site.getusersitepackages() + '/left.py', 'w')"), "")
		eventually(t, "an interpreter waits", func() bool { return s.waits(t) != "" })
		s.prints(t, python("import left"))
	})
}

func TestWhatAWaitingInterpreterCannotDoIsDoneWithoutIt(t *testing.T) {
	s := start(t)
	for name, c := range map[string]struct {
		change func(*agent.ExecStart)
		stdin  string
		want   string
	}{
		"another environment": {func(a *agent.ExecStart) {
			a.Env = append(a.Env, "X=1")
			a.Code = []byte("import os; print(os.environ['X'])")
		}, "", "1"},
		"another directory": {func(a *agent.ExecStart) { a.Dir = "/"; a.Code = []byte("import os; print(os.getcwd())") }, "", "/"},
		"input":             {func(a *agent.ExecStart) { a.Stdin = true; a.Code = []byte("print(input())") }, "hello\n", "hello"},
		"much code":         {func(a *agent.ExecStart) { a.Code = []byte("x = '" + strings.Repeat("x", 1<<20) + "'; print(len(x))") }, "", "1048576"},
		"another encoding":  {func(a *agent.ExecStart) { a.Code = []byte("# -*- coding: latin-1 -*-\nprint(len('\xe4'))") }, "", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			s.ready(t)
			a := python("")
			c.change(&a)
			out, errs, exit := s.run(t, a, c.stdin)
			if strings.TrimSpace(out) != c.want || exit.Code != 0 {
				t.Errorf("%q, %+v: %s", out, exit, errs)
			}
		})
	}
}

func TestAWaitingInterpreterThatIsKilledIsNotMissed(t *testing.T) {
	s := start(t)
	s.ready(t)
	s.run(t, script("kill -9 -1"), "")
	if got := s.prints(t, python("print(1)")); got != "1" {
		t.Error(got)
	}
}

func TestAProgramInAWaitingInterpreterTimesOutAndIsKilled(t *testing.T) {
	s := start(t)
	s.ready(t)
	a := python("import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)")
	a.TimeoutMS = 300
	if _, _, exit := s.run(t, a, ""); exit.Reason != agent.ExitTimeout {
		t.Errorf("%+v", exit)
	}
	eventually(t, "nothing of it is left", func() bool {
		return s.prints(t, script("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[m]ain.py' || true")) == "0"
	})
}

// The first exec of a sandbox that waited in a pool finds one.
func TestAnUnusedSandboxHasAnInterpreterWaiting(t *testing.T) {
	s := start(t)
	a := python("print(__file__)")
	config := agent.Config{UID: testUID, Home: "/tmp", Ready: &agent.ReadyConfig{Language: "python", Env: a.Env, Dir: a.Dir}}
	if err := s.Configure(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	main := ""
	eventually(t, "an interpreter waits", func() bool { main = s.waits(t); return main != "" })
	if got := s.prints(t, a); got != main {
		t.Errorf("%s ran, %s waited", got, main)
	}
}
