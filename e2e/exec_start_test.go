package e2e_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// call makes a request of the API by hand, and returns its status and answer.
func (n *node) call(method, path string, body any) (int, map[string]any) {
	n.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		n.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(n.t.Context(), method, n.endpoint+path, bytes.NewReader(raw))
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+n.key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer := map[string]any{}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		n.t.Fatalf("%s %s: %d, %v", method, path, resp.StatusCode, err)
	}
	return resp.StatusCode, answer
}

// X19, superradcompany/microsandbox#466: a missing working directory gave exit
// code 255 and no text. X27: an exec of a program that could not be started hung
// until its sandbox's deadline. Each is an error of its own, at once, that names
// what is missing, and nothing is left running.
func TestWhatCannotStartIsSaidAtOnce(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	n.sh(id, `cd /workspace; echo text > plain; printf '#!/no/such/interpreter\n' > bad; chmod 755 bad; mkdir dir`)
	for name, c := range map[string]struct {
		body   map[string]any
		status int
		code   boxed.Code
		text   string
		ctl    []string
		exit   int
	}{
		"a missing directory": {
			map[string]any{"args": []string{"true"}, "dir": "/no/where"},
			400, boxed.CodeInvalid, "/no/where",
			[]string{"exec", "-w", "/no/where", string(id), "true"},
			125,
		},
		"a file as directory": {
			map[string]any{"args": []string{"true"}, "dir": "plain"},
			400, boxed.CodeInvalid, "/workspace/plain",
			[]string{"exec", "-w", "plain", string(id), "true"},
			125,
		},
		"a missing program": {
			map[string]any{"args": []string{"no-such-program"}},
			422, boxed.CodeStartFailed, "no-such-program",
			[]string{"exec", string(id), "no-such-program"},
			127,
		},
		"a missing path": {
			map[string]any{"args": []string{"/no/such/program"}},
			422, boxed.CodeStartFailed, "/no/such/program",
			[]string{"exec", string(id), "/no/such/program"},
			127,
		},
		"no executable": {
			map[string]any{"args": []string{"./plain"}},
			422, boxed.CodeStartFailed, "./plain",
			[]string{"exec", string(id), "./plain"},
			126,
		},
		"a missing interpreter": {
			map[string]any{"args": []string{"./bad"}},
			422, boxed.CodeStartFailed, "interpreter",
			[]string{"exec", string(id), "./bad"},
			127,
		},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			status, answer := n.call("POST", "/v1/sandboxes/"+string(id)+"/exec", c.body)
			if message := fmt.Sprint(answer["message"]); status != c.status || answer["code"] != string(c.code) || !strings.Contains(message, c.text) || answer["exit_code"] != nil {
				t.Errorf("%d %v", status, answer)
			}
			if _, errs, code := n.ctl(c.ctl...); code != c.exit || !strings.Contains(errs, c.text) {
				t.Errorf("boxedctl: %d %q", code, errs)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
	if execs, err := n.ListExecs(t.Context(), id); err != nil || len(execs) != 1 { // that which made the files
		t.Errorf("%+v, %v", execs, err)
	}
}

// X17, daytonaio/daytona#3918: a long command failed on the kernel's limit of
// arguments. A program of 1 MiB runs in each language, and what is too long for
// arguments says what to do instead.
func TestLongProgramsRun(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	filler := strings.Repeat("x", 1<<20)
	for language, code := range map[string]string{
		"python": "s = '" + filler + "'\nprint(len(s))", "javascript": "const s = '" + filler + "'\nconsole.log(s.length)",
		"bash": "s='" + filler + "'\necho ${#s}",
	} {
		if out, status := n.exec(id, boxed.ExecRequest{Language: language, Code: code}); out != "1048576\n" || status.Code != 0 {
			t.Errorf("%s: %.200q, %+v", language, out, status)
		}
		result, err := n.Run(t.Context(), id, boxed.ExecRequest{Language: language, Code: code})
		if err != nil || string(result.Stdout) != "1048576\n" {
			t.Errorf("%s: %+v, %v", language, result, err)
		}
	}
	_, err := n.Exec(t.Context(), id, boxed.ExecRequest{Args: []string{"echo", filler}})
	if e := boxed.AsError(err); e.Code != boxed.CodeInvalid || !strings.HasPrefix(e.Field(), "args") {
		t.Errorf("an argument of 1 MiB: %v (%s), %v", err, e.Code, e.Detail)
	}
}

// smallImage imports an image of the host's programs, with the libraries that
// they need, and of a copy of the agent as a program without any.
func smallImage(t *testing.T, programs ...string) string {
	t.Helper()
	var rootfs bytes.Buffer
	w := tar.NewWriter(&rootfs)
	seen := map[string]bool{}
	add := func(from, to string) {
		if seen[to] {
			return
		}
		seen[to] = true
		text, err := os.ReadFile(from)
		if err == nil {
			err = w.WriteHeader(&tar.Header{Name: strings.TrimPrefix(to, "/"), Mode: 0o755, Size: int64(len(text))})
		}
		if err == nil {
			_, err = w.Write(text)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add(filepath.Join(bin, "boxed-agent"), "/bin/hello")
	library := regexp.MustCompile(`(/\S+) \(0x`)
	for _, name := range programs {
		from, err := exec.LookPath(name)
		if err != nil {
			t.Fatalf("this host has no %s to put into an image", name)
		}
		add(from, "/bin/"+name)
		out, err := exec.Command("ldd", from).Output()
		if err != nil {
			t.Fatalf("ldd %s: %v", from, err)
		}
		for _, m := range library.FindAllStringSubmatch(string(out), -1) {
			add(m[1], m[1])
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	name := "boxed-test/e2e-" + strings.ToLower(boxed.NewToken(10)) + ":1"
	cmd := exec.Command("docker", "import", "-", name)
	cmd.Stdin = &rootfs
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("docker import: %v\n%s", err, out)
	}
	t.Cleanup(func() { exec.Command("docker", "rmi", "-f", name).Run() })
	return name
}

// X20, NVIDIA/OpenShell#3147: /bin/bash was assumed. The shell is the one that the
// image has; where it has none that is said, and its programs run all the same.
func TestNoShellIsAssumed(t *testing.T) {
	none, sh := smallImage(t), smallImage(t, "sh")
	n := startBareNode(t)
	t.Run("an image with sh alone", func(t *testing.T) {
		id := n.create(boxed.Spec{Image: sh}).ID
		out, errs, code := n.ctlIn(strings.NewReader("echo $((40+2)); exit 5\n"), "shell", string(id))
		if out != "42\n" || code != 5 {
			t.Errorf("shell: %q, %q, %d", out, errs, code)
		}
		out, status := n.exec(id, boxed.ExecRequest{Language: "bash", Code: "echo $((40+2)); exit 6"})
		if out != "42\n" || status.Code != 6 {
			t.Errorf("code: %q, %+v", out, status)
		}
	})
	t.Run("an image without a shell", func(t *testing.T) {
		id := n.create(boxed.Spec{Image: none}).ID
		if out, errs, code := n.ctl("exec", string(id), "hello", "--version"); out != "boxed-agent e2e\n" || code != 0 {
			t.Errorf("its own program: %q, %q, %d", out, errs, code)
		}
		_, errs, code := n.ctlIn(strings.NewReader(""), "shell", string(id))
		if code != 127 || !strings.Contains(errs, "neither bash nor sh") || !strings.Contains(errs, "boxedctl exec") {
			t.Errorf("shell: %q, %d", errs, code)
		}
		for _, language := range boxed.Languages() {
			_, err := n.Exec(t.Context(), id, boxed.ExecRequest{Language: language, Code: "x"})
			if e := boxed.AsError(err); e.Code != boxed.CodeStartFailed || !strings.Contains(e.Message, "choose an image") {
				t.Errorf("%s: %v (%s)", language, err, e.Code)
			}
		}
		_, errs, code = n.ctl("exec", string(id), "sh", "-c", "true")
		if code != 127 || !strings.Contains(errs, "sh is not a program in this image's PATH") {
			t.Errorf("sh by name: %q, %d", errs, code)
		}
		// Files need no program of the image either.
		if _, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "f", Content: strings.NewReader("x")}); err != nil {
			t.Error(err)
		}
	})
}

// X22, daytonaio/daytona#4750: the client's HTTP timeout beat the exec's own. The
// deadline is the node's, whichever way is taken, and it comes as one reason; a
// caller that gives up earlier gets its own code, and the program ends.
// X23, daytona#4741: a silent command was taken for an idle one.
func TestTheDeadlineIsTheNodes(t *testing.T) {
	n := startBareNode(t)
	s := n.create(boxed.Spec{IdleTimeout: boxed.Duration(time.Second)})
	id, agent := s.ID, n.agentPID(s.ID)
	// Silent for longer than the sandbox may be idle, and than the request's own deadline is not.
	req := boxed.ExecRequest{Args: []string{"sleep", "60"}, Timeout: boxed.Duration(2 * time.Second)}
	ways := map[string]func() (boxed.ExitReason, error){
		"one call": func() (boxed.ExitReason, error) {
			r, err := n.Run(t.Context(), id, req)
			if err != nil {
				return "", err
			}
			return r.Reason, nil
		},
		"a stream": func() (boxed.ExitReason, error) {
			_, status, err := n.collect(t.Context(), id, req)
			return status.Reason, err
		},
		"boxedctl": func() (boxed.ExitReason, error) {
			_, errs, code := n.ctl("exec", "--timeout", "2s", string(id), "sleep", "60")
			if code != 124 || !strings.Contains(errs, "timeout") {
				return "", fmt.Errorf("status %d, %q", code, errs)
			}
			return boxed.ReasonTimeout, nil
		},
	}
	var all sync.WaitGroup
	for name, run := range ways {
		all.Go(func() {
			began := time.Now()
			reason, err := run()
			if took := time.Since(began); err != nil || reason != boxed.ReasonTimeout || took < 2*time.Second || took > 8*time.Second {
				t.Errorf("%s: %s, %v after %v", name, reason, err, took)
			}
			if got, err := n.Get(t.Context(), id); err != nil || got.State != boxed.StateRunning {
				t.Errorf("the sandbox: %+v, %v", got, err)
			}
		})
	}
	all.Wait()
	t.Run("a caller that gives up", func(t *testing.T) {
		for name, run := range map[string]func(context.Context) error{
			"one call": func(ctx context.Context) error { _, err := n.Run(ctx, id, req); return err },
			"a stream": func(ctx context.Context) error { _, _, err := n.collect(ctx, id, req); return err },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			err := run(ctx)
			cancel()
			if boxed.CodeOf(err) != boxed.CodeDeadline {
				t.Errorf("%s: %v (%s)", name, err, boxed.CodeOf(err))
			}
			within(t, 2*time.Second, "the program to end", func() bool { return len(insiders(agent)) == 1 })
		}
	})
}

// X26, e2b-dev/infra#1580: programs saw all cores of the host and made as many
// threads. What asks for the number is told the quota, by the environment that
// runtimes heed; who asks for something else gets it.
func TestProgramsSeeTheirQuotaOfCPUs(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("one core cannot be fewer")
	}
	n := startBareNode(t)
	const names = "GOMAXPROCS OMP_NUM_THREADS OPENBLAS_NUM_THREADS PYTHON_CPU_COUNT RAYON_NUM_THREADS"
	ask := `nproc; for n in ` + names + `; do echo ${!n-unset}; done`
	for cpus, want := range map[float64]string{0.5: "1", 1: "1", 1.5: "2"} {
		id := n.create(boxed.Spec{Limits: boxed.Limits{CPUs: cpus}}).ID
		if out, _ := n.sh(id, ask); out != strings.Repeat(want+"\n", 6) {
			t.Errorf("%g CPUs: %q", cpus, out)
		}
		if out, status := n.exec(id, boxed.ExecRequest{Args: []string{"bash", "-c", "echo $GOMAXPROCS"}, Env: map[string]string{"GOMAXPROCS": "7"}}); out != "7\n" {
			t.Errorf("its own choice: %q, %+v", out, status)
		}
		if err := n.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

// X21, cloudflare/sandbox-sdk#446, #438: one stuck command blocked all later ones.
// A sandbox that is full of stuck execs says so, and says what to do; what they
// held is free when their timeouts have passed, and meanwhile its files are served.
func TestStuckExecsBlockNothingForGood(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	stuck := boxed.ExecRequest{Args: []string{"sh", "-c", "exec 9>/tmp/lock; flock 9; sleep 1000"}, Timeout: boxed.Duration(5 * time.Second)}
	began := time.Now()
	for i := range boxed.MaxExecs {
		if _, err := n.StartExec(t.Context(), id, stuck); err != nil {
			t.Fatalf("number %d after %v: %v", i, time.Since(began), err)
		}
		if i == boxed.MaxExecs/2 {
			if out, _ := n.sh(id, "echo free"); out != "free\n" {
				t.Errorf("beside stuck ones: %q", out)
			}
		}
	}
	if time.Since(began) < 4*time.Second { // else the first of them have ended
		_, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
		if boxed.CodeOf(err) != boxed.CodeQuota || !strings.Contains(err.Error(), "kill one") {
			t.Errorf("one too many: %v (%s)", err, boxed.CodeOf(err))
		}
	} else {
		t.Logf("this machine is too slow to fill a sandbox: %v", time.Since(began))
	}
	if _, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "f", Content: strings.NewReader("x")}); err != nil {
		t.Errorf("a file: %v", err)
	}
	within(t, 30*time.Second, "their timeouts to pass", func() bool {
		stats, err := n.Stats(t.Context(), id)
		return err == nil && stats.Execs == 0
	})
	if out, status := n.sh(id, "flock -n /tmp/lock echo free"); out != "free\n" {
		t.Errorf("what they held: %q, %+v", out, status)
	}
	if left := len(insiders(n.agentPID(id))); left != 1 {
		t.Errorf("%d processes are left", left)
	}
}
