package e2e_test

import (
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// The first five minutes.
func TestFirstProgram(t *testing.T) {
	n := startNode(t)
	if out, errs, code := n.ctl("run", "-c", `print("hello")`); out != "hello\n" || code != 0 {
		t.Errorf("%q %q %d", out, errs, code)
	}
	if out, errs, code := n.ctl("run", "--lang", "javascript", "-c", `console.log([1,2].map(x => x * 2)); process.exit(5)`); out != "[ 2, 4 ]\n" || code != 5 {
		t.Errorf("%q %q %d", out, errs, code)
	}
	if out, errs, code := n.ctl("run", "--lang", "bash", "-c", `[[ -d /workspace ]] && pwd`); out != "/workspace\n" || code != 0 {
		t.Errorf("%q %q %d", out, errs, code)
	}
	if out, errs, code := n.ctl("smoke"); code != 0 {
		t.Errorf("smoke: %s%s", out, errs)
	}
}

// The stories of boxedctl, here on a real node.
func TestStoriesOnARealNode(t *testing.T) {
	n := startNode(t)
	cmd := exec.Command("go", "test", "-count=1", "-timeout=5m", "-run", "TestStories", "./internal/ctl")
	cmd.Dir = ".."
	cmd.Env = append(n.env(), "HOME=/root", "BOXED_TEST_ENDPOINT="+n.endpoint, "BOXED_TEST_API_KEY="+n.key)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// X15: what looks alike elsewhere is told apart.
func TestReasonsAreToldApart(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{})
	for _, c := range []struct {
		name string
		req  boxed.ExecRequest
		want boxed.ExitReason
	}{
		{"exit", boxed.ExecRequest{Args: []string{"false"}}, boxed.ReasonExited},
		{"kill", boxed.ExecRequest{Args: []string{"sh", "-c", "kill -9 $$"}}, boxed.ReasonSignaled},
		{"timeout", boxed.ExecRequest{Args: []string{"sleep", "60"}, Timeout: boxed.Duration(300 * time.Millisecond)}, boxed.ReasonTimeout},
		{"output", boxed.ExecRequest{Args: []string{"yes"}, MaxOutput: 10_000}, boxed.ReasonOutputLimit},
		{"memory", boxed.ExecRequest{Language: "python", Code: "x = [bytearray(1 << 20) for _ in range(4096)]"}, boxed.ReasonOOM},
	} {
		if out, status := n.exec(s.ID, c.req); status.Reason != c.want {
			t.Errorf("%s: %+v %.200q", c.name, status, out)
		}
	}
	// X25: it survived all of it.
	if out, _ := n.sh(s.ID, "echo alive"); out != "alive\n" {
		t.Errorf("got %q", out)
	}
}

// F8, facts on tmpfs: filling every writable place neither kills the sandbox nor
// touches the host's disk.
func TestFullSandboxLivesOn(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{})
	out, _ := n.sh(s.ID, `for d in /workspace ~ /tmp /output /dev/shm; do head -c 1G /dev/zero > $d/big 2>/dev/null || echo full; done; touch /etc/x /usr/x 2>&1 | grep -c 'Read-only'`)
	if out != "full\nfull\nfull\nfull\nfull\n2\n" {
		t.Errorf("got %q", out)
	}
	if _, status := n.sh(s.ID, "rm /workspace/big; echo x > /workspace/small"); status.Code != 0 {
		t.Errorf("%+v", status)
	}
}

// X24, X21 on the whole path: many at once, none lost, each its own.
func TestManyExecsAtOnce(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 25 {
				want := fmt.Sprintf("%d-%d\n", w, i)
				if out, status := n.sh(s.ID, "echo "+strings.TrimSpace(want)+"; exit 9"); out != want || status.Code != 9 {
					t.Errorf("%q %+v", out, status)
				}
			}
		})
	}
	wg.Wait()
	if out, _ := n.sh(s.ID, "ps -eo stat | grep -c ^Z"); out != "0\n" {
		t.Errorf("zombies: %s", out)
	}
}

// ttl and idle_timeout end sandboxes, and say which; a busy one is not idle (L1, X23).
func TestDeadlines(t *testing.T) {
	n := startNode(t)
	short := n.create(boxed.Spec{TTL: boxed.Duration(2 * time.Second)})
	idle := n.create(boxed.Spec{IdleTimeout: boxed.Duration(time.Second)})
	busy := n.create(boxed.Spec{IdleTimeout: boxed.Duration(time.Second)})
	if _, err := n.StartExec(t.Context(), busy.ID, boxed.ExecRequest{Args: []string{"sleep", "100"}}); err != nil {
		t.Fatal(err)
	}
	for s, want := range map[*boxed.Sandbox]boxed.EndReason{short: boxed.EndExpired, idle: boxed.EndIdle} {
		got, err := n.Wait(t.Context(), s.ID, boxed.StateStopped)
		if err != nil || got.Reason != want || got.State != boxed.StateStopped {
			t.Errorf("%+v %v, want %s", got, err, want)
		}
	}
	if got, err := n.Get(t.Context(), busy.ID); err != nil || got.State != boxed.StateRunning {
		t.Errorf("the busy one: %+v %v", got, err)
	}
}

// Someone removes or stops a container behind the node's back: the state and
// the reason are right within seconds (X25, L14).
func TestContainersThatEndByThemselves(t *testing.T) {
	n := startNode(t)
	s := n.create(boxed.Spec{})
	status := make(chan boxed.ExitStatus, 1)
	began := make(chan struct{})
	go func() {
		st, _ := n.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}, Started: func(boxed.ExecID) { close(began) }})
		status <- st
	}()
	<-began
	if err := exec.Command("docker", "kill", "boxed-"+string(s.ID)).Run(); err != nil {
		t.Fatal(err)
	}
	within(t, 5*time.Second, "failed: crashed", func() bool {
		got, err := n.Get(t.Context(), s.ID)
		return err == nil && got.State == boxed.StateFailed && got.Reason == boxed.EndCrashed
	})
	if st := <-status; st.Reason != boxed.ReasonLost || st.Code != -1 {
		t.Errorf("its exec: %+v", st)
	}
}

// Images that nobody has are told apart, in one line, and change nothing.
func TestMissingImages(t *testing.T) {
	n := startNode(t)
	for image, text := range map[string]string{
		"127.0.0.1:9/no/such:1": "no_route",
		"Not A Reference":       "image",
	} {
		_, errs, code := n.ctl("run", "--image", image, "--", "true")
		if code == 0 || len(strings.Split(strings.TrimSpace(errs), "\n")) > 3 {
			t.Errorf("%s: %d %q", image, code, errs)
		}
		_ = text
	}
	if list, err := n.List(t.Context(), boxed.Filter{}); err != nil || len(list.Sandboxes) != 0 {
		t.Errorf("%+v %v", list, err)
	}
}
