//go:build linux

package ctl

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// asProgram in the environment makes the test binary boxedctl itself, for tests
// that run it without testscript.
const asProgram = "BOXEDCTL_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		asBoxedctl()
		return
	}
	os.Setenv("GORACE", noRaceSleep)
	testscript.Main(m, map[string]func(){"boxedctl": asBoxedctl})
}

// asBoxedctl is boxedctl as a process.
func asBoxedctl() { os.Exit(Main("", os.Args[1:])) }

// noRaceSleep in GORACE keeps a program that was built with -race from sleeping
// for a second before it ends; the stories run hundreds of them.
const noRaceSleep = "atexit_sleep_ms=0"

// live is the node that the stories run against instead of a fake one.
func live() (endpoint, key string, ok bool) {
	endpoint, key = os.Getenv("BOXED_TEST_ENDPOINT"), os.Getenv("BOXED_TEST_API_KEY")
	return endpoint, key, endpoint != "" && key != ""
}

// testNode is the live node, or else a fake one that ends with the test.
func testNode(t *testing.T) (endpoint, key string) {
	t.Helper()
	if endpoint, key, ok := live(); ok {
		return endpoint, key
	}
	endpoint, err := startFake(t.TempDir(), t.Cleanup)
	if err != nil {
		t.Fatal(err)
	}
	return endpoint, fakeUserKey
}

// TestStories runs testdata/*.txtar against the real program and a fake node,
// or the one named by BOXED_TEST_ENDPOINT and BOXED_TEST_API_KEY (an
// administrator's key). A story finds in its environment NAME, a prefix for the
// names of its sandboxes, which are destroyed after it.
func TestStories(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                "testdata",
		RequireUniqueNames: true,
		Setup:              setUp,
		Condition: func(cond string) (bool, error) {
			_, _, isLive := live()
			switch cond {
			case "live":
				return isLive, nil
			case "python":
				_, err := exec.LookPath("python3")
				return isLive || err == nil, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"silentstdin": silentStdin,
			"eventually":  eventually,
			"firstline":   firstLineOf,
			"get":         httpGet,
		},
	})
}

func setUp(env *testscript.Env) error {
	endpoint, key, isLive := live()
	env.Setenv("NAME", "story-"+boxed.NewToken(8))
	env.Setenv("HOME", env.WorkDir+"/home")
	env.Setenv("GORACE", noRaceSleep)
	env.Setenv("PYENV_ROOT", os.Getenv("PYENV_ROOT"))
	if !isLive {
		dir, err := os.MkdirTemp("", "boxedctl-fake-")
		if err != nil {
			return err
		}
		env.Defer(func() { os.RemoveAll(dir) })
		key = fakeAdminKey
		if endpoint, err = startFake(dir, env.Defer); err != nil {
			return err
		}
	} else {
		env.Defer(func() { removeAll(env, endpoint, key) })
	}
	env.Setenv("BOXED_ENDPOINT", endpoint)
	env.Setenv("BOXED_API_KEY", key)
	return nil
}

// removeAll destroys what a story left on a live node.
func removeAll(env *testscript.Env, endpoint, key string) {
	c, err := client.New(client.Config{Endpoint: endpoint, APIKey: key})
	if err != nil {
		env.T().Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := c.List(ctx, boxed.Filter{Limit: 1000})
	if err != nil {
		env.T().Log(err)
	}
	for _, sb := range list.Sandboxes {
		if strings.HasPrefix(sb.Name, env.Getenv("NAME")) {
			_ = c.Destroy(ctx, sb.ID) // its ttl ends it otherwise
		}
	}
}

// passedOn are the variables that commands of this file pass to programs.
var passedOn = []string{"HOME", "PATH", "BOXED_ENDPOINT", "BOXED_API_KEY", "NAME", "GORACE"}

// silentStdin runs a command whose stdin is a pipe that stays open and silent.
func silentStdin(ts *testscript.TestScript, neg bool, args []string) {
	path, err := exec.LookPath(args[0])
	if p, ok := lookIn(ts.Getenv("PATH"), args[0]); ok {
		path, err = p, nil
	}
	ts.Check(err)
	cmd := exec.Command(path, args[1:]...)
	for _, k := range passedOn {
		cmd.Env = append(cmd.Env, k+"="+ts.Getenv(k))
	}
	cmd.Dir = ts.Getenv("WORK")
	pr, pw, err := os.Pipe() // a real pipe: exec.Cmd would wait for the copy of another one
	ts.Check(err)
	defer pr.Close()
	defer pw.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = pr, ts.Stdout(), ts.Stderr()
	ts.Check(cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err = <-done:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		ts.Fatalf("still runs after 20 s: it waits for its stdin")
	}
	if (err != nil) != neg {
		ts.Fatalf("ended with %v", err)
	}
}

func lookIn(path, name string) (string, bool) {
	for dir := range strings.SplitSeq(path, ":") {
		if p, err := exec.LookPath(dir + "/" + name); err == nil {
			return p, true
		}
	}
	return "", false
}

// eventually repeats a command of boxedctl until it has the wanted outcome, at
// most 20 seconds: eventually 'text on stdout' boxedctl ARGS…
func eventually(ts *testscript.TestScript, neg bool, args []string) {
	path, ok := lookIn(ts.Getenv("PATH"), args[1])
	if !ok {
		ts.Fatalf("no program %s", args[1])
	}
	var out []byte
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		cmd := exec.Command(path, args[2:]...)
		for _, k := range passedOn {
			cmd.Env = append(cmd.Env, k+"="+ts.Getenv(k))
		}
		cmd.Dir = ts.Getenv("WORK")
		out, _ = cmd.CombinedOutput()
		if strings.Contains(string(out), args[0]) != neg {
			return
		}
	}
	ts.Fatalf("never; the last output was %q", out)
}

// firstLineOf puts the first line of a file into a variable: firstline VAR FILE.
func firstLineOf(ts *testscript.TestScript, _ bool, args []string) {
	line, _, _ := strings.Cut(strings.TrimSpace(ts.ReadFile(args[1])), "\n")
	ts.Setenv(args[0], line)
}

// httpGet requests a path from an address until it answers: get ADDRESS PATH TEXT.
func httpGet(ts *testscript.TestScript, _ bool, args []string) {
	var out string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		conn, err := net.DialTimeout("tcp", args[0], time.Second)
		if err != nil {
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		fmt.Fprintf(conn, "GET %s HTTP/1.0\r\n\r\n", args[1])
		raw, _ := io.ReadAll(conn)
		conn.Close()
		if out = string(raw); strings.Contains(out, args[2]) {
			return
		}
	}
	ts.Fatalf("no %q from %s, only %q", args[2], args[0], out)
}
