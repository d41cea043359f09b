package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// slower is how many times longer than on a quiet machine a call may take, in the
// median, whatever another sandbox or this host does.
const slower = 10

// probe is what a bystander does, and how long each of it took.
type probe struct {
	names []string
	calls []func(context.Context) error
}

// bystander executes true in a sandbox, and asks the node two things: one that
// goes by its records, one that goes by nothing.
func (n *node) bystander(id boxed.ID) *probe {
	get := func(path string) func(context.Context) error {
		return func(ctx context.Context) error {
			req, err := http.NewRequestWithContext(ctx, "GET", n.endpoint+path, nil)
			if err != nil {
				return err
			}
			req.Header.Set("Authorization", "Bearer "+n.key)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
				return fmt.Errorf("%d, %w", resp.StatusCode, err)
			}
			return nil
		}
	}
	return &probe{
		names: []string{"exec", "list", "health"},
		calls: []func(context.Context) error{
			func(ctx context.Context) error {
				status, err := n.Exec(ctx, id, boxed.ExecRequest{Args: []string{"true"}})
				if err == nil && status.Code != 0 {
					err = fmt.Errorf("%+v", status)
				}
				return err
			},
			get("/v1/sandboxes"), get("/healthz"),
		},
	}
}

// times is how long each of many calls took, sorted.
type times []time.Duration

func (d times) at(share float64) time.Duration { return d[int(share*float64(len(d)-1))] }

// measure makes each call 60 times, in turn, or as often as 6 seconds allow.
func (p *probe) measure(t *testing.T) map[string]times {
	t.Helper()
	got := map[string]times{}
	for began := time.Now(); len(got["exec"]) < 60 && (time.Since(began) < 6*time.Second || len(got["exec"]) < 5); {
		for i, call := range p.calls {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			start := time.Now()
			err := call(ctx)
			took := time.Since(start)
			cancel()
			if err != nil {
				t.Fatalf("%s: %v", p.names[i], err)
			}
			got[p.names[i]] = append(got[p.names[i]], took)
		}
	}
	for _, name := range p.names {
		slices.Sort(got[name])
	}
	return got
}

// holds compares a bystander's calls on a quiet machine with those beside load,
// which returns once it is under way, with what ends it. A machine that runs other
// tests too is noisy by itself, so the best of three rounds counts.
func (p *probe) holds(t *testing.T, load func(t *testing.T) (stop func())) {
	t.Helper()
	for round := 1; ; round++ {
		quiet := p.measure(t)
		stop := load(t)
		beside := p.measure(t)
		stop()
		var late []string
		for _, name := range p.names {
			q, b := quiet[name], beside[name]
			t.Logf("%-6s quiet p50 %v p95 %v; beside p50 %v p95 %v max %v (%d calls): %.1f times", name,
				q.at(0.5).Round(time.Microsecond), q.at(0.95).Round(time.Microsecond), b.at(0.5).Round(time.Microsecond),
				b.at(0.95).Round(time.Microsecond), b.at(1).Round(time.Microsecond), len(b), float64(b.at(0.5))/float64(q.at(0.5)))
			if b.at(0.5) > slower*q.at(0.5) {
				late = append(late, fmt.Sprintf("%s %v, quiet %v", name, b.at(0.5), q.at(0.5)))
			}
		}
		if len(late) == 0 {
			return
		}
		if round == 3 {
			t.Errorf("delayed by more than %d times in each of %d rounds: %s", slower, round, strings.Join(late, "; "))
			return
		}
	}
}

// noise runs programs in a sandbox, all at once, until it is stopped. Those that
// end are started again.
func (n *node) noise(t *testing.T, id boxed.ID, requests ...boxed.ExecRequest) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var started sync.WaitGroup
	for _, req := range requests {
		started.Add(1)
		once := sync.OnceFunc(started.Done)
		running.Go(func() {
			for ctx.Err() == nil {
				req.Started = func(boxed.ExecID) { once() }
				if _, err := n.Exec(ctx, id, req); err != nil && ctx.Err() == nil && boxed.CodeOf(err) != boxed.CodeQuota {
					t.Errorf("the noise: %v", err)
					once()
					return
				}
			}
		})
	}
	started.Wait()
	return func() {
		cancel()
		running.Wait()
	}
}

// slowly takes a little of what is written to it, with pauses.
type slowly struct{ each time.Duration }

func (s slowly) Write(p []byte) (int, error) {
	time.Sleep(s.each)
	return len(p), nil
}

// stuckWriter takes nothing until it is let go.
type stuckWriter struct{ let <-chan struct{} }

func (s stuckWriter) Write(p []byte) (int, error) {
	<-s.let
	return len(p), nil
}

// A sandbox at any of its limits is its own problem: another one's programs start,
// and the node answers, as if it were not there.
func TestASandboxAtItsLimitDelaysNobody(t *testing.T) {
	alone(t)
	n := startBareNode(t)
	loud, id := n.create(boxed.Spec{}).ID, n.create(boxed.Spec{}).ID
	p := n.bystander(id)
	p.measure(t) // what is made once is there
	for _, load := range append(n.programs(loud), n.floods(loud)...) {
		t.Run(load.name, func(t *testing.T) { p.holds(t, load.begin) })
	}
}

// load is something that a sandbox does at one of its limits.
type load struct {
	name  string
	begin func(t *testing.T) (stop func())
}

func bash(script string) boxed.ExecRequest {
	return boxed.ExecRequest{Args: []string{"bash", "-c", script}}
}

// programs are loads that stay inside their sandbox.
func (n *node) programs(loud boxed.ID) []load {
	return []load{
		{"CPU", func(t *testing.T) func() {
			return n.noise(t, loud, bash("for i in $(seq 20); do while :; do :; done & done; wait"))
		}},
		{"processes", func(t *testing.T) func() {
			return n.noise(t, loud, bash("bomb() { bomb | bomb & }; bomb; while :; do bomb; done 2>/dev/null"))
		}},
		{"memory", func(t *testing.T) func() {
			eat := boxed.ExecRequest{Language: "python", Code: "x = []\nwhile True: x.append(bytearray(1 << 22))"}
			return n.noise(t, loud, eat, eat)
		}},
	}
}

// floods are loads that reach the node.
func (n *node) floods(loud boxed.ID) []load {
	return []load{
		{"output limit", func(t *testing.T) func() {
			req := bash("yes")
			req.MaxOutput = 4 << 20
			return n.noise(t, loud, req, req)
		}},
		{"output that nobody reads", func(t *testing.T) func() {
			let := make(chan struct{})
			attached := bash("yes | cat")
			attached.Stdout = stuckWriter{let}
			e, err := n.StartExec(t.Context(), loud, bash("yes | cat"))
			if err != nil {
				t.Fatal(err)
			}
			stop := n.noise(t, loud, attached, attached, attached, attached)
			return func() {
				close(let)
				stop()
				if err := n.KillExec(t.Context(), loud, e.ID); err != nil {
					t.Error(err)
				}
			}
		}},
		{"output that is read slowly", func(t *testing.T) func() {
			req := bash("yes | cat")
			req.Stdout = slowly{20 * time.Millisecond}
			return n.noise(t, loud, req, req, req, req)
		}},
		{"output that is read", func(t *testing.T) func() {
			req := bash("yes | cat")
			req.Stdout = io.Discard
			return n.noise(t, loud, req)
		}},
		{"output byte by byte", func(t *testing.T) func() {
			req := boxed.ExecRequest{Language: "python", Code: "import os\nwhile True: os.write(1, b'x')", Stdout: io.Discard}
			return n.noise(t, loud, req, req)
		}},
		{"files", func(t *testing.T) func() { return n.transfers(t, loud) }},
		{"connections", func(t *testing.T) func() { return n.hoard(t, loud) }},
	}
}

// transfers uploads and downloads without a pause, from programs of their own: what
// is measured is not how this test shares itself.
func (n *node) transfers(t *testing.T, id boxed.ID) (stop func()) {
	t.Helper()
	var stops []func()
	for i := range 4 {
		cmd := exec.Command("bash", "-c", `
while head -c 16M /dev/zero | boxedctl cp - "$1:$2" && boxedctl cp "$1:$2" - >/dev/null; do echo once; done`, "bash", string(id), fmt.Sprint("file", i))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		cmd.Env = n.env()
		ready := &firstLine{wrote: make(chan struct{})}
		cmd.Stdout, cmd.Stderr = ready, t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		stops = append(stops, func() {
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-ended
		})
		select {
		case <-ready.wrote:
		case err := <-ended:
			t.Fatalf("a transfer: %v", err)
		}
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// hoard holds as many connections as it is given: programs with their input open,
// tunnels, and requests that were never sent to their end.
func (n *node) hoard(t *testing.T, id boxed.ID) (stop func()) {
	t.Helper()
	in, w := io.Pipe()
	var requests []boxed.ExecRequest
	for range 100 {
		requests = append(requests, boxed.ExecRequest{Args: []string{"cat"}, Stdin: in, Stdout: io.Discard})
	}
	stops := []func(){n.noise(t, id, requests...), func() { w.Close() }}
	if _, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Language: "python", Code: `
import socket, time
s = socket.create_server(("127.0.0.1", 8123), backlog=500)
k = []
while True: k.append(s.accept())`}); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		within(t, 20*time.Second, "a tunnel", func() bool {
			c, err := n.Dial(t.Context(), id, 8123)
			if err == nil {
				stops = append(stops, func() { c.Close() })
			}
			return err == nil
		})
	}
	for range 200 {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(n.endpoint, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "PUT /v1/sandboxes/%s/files?path=half HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\nhalf", id, n.key)
		stops = append(stops, func() { c.Close() })
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
		within(t, 30*time.Second, "what was held to be let go", func() bool {
			execs, err := n.ListExecs(t.Context(), id)
			for _, e := range execs {
				if e.Running {
					err = n.KillExec(t.Context(), id, e.ID)
				}
			}
			return err == nil
		})
	}
}

// A host at a load of 50 delays neither a sandbox's programs nor the node's
// answers by more than that, whether the load has a control group or session of
// its own, as services and logins have, or shares that of the node.
func TestABusyHostDelaysNobodyMuch(t *testing.T) {
	alone(t)
	n := startBareNode(t)
	p := n.bystander(n.create(boxed.Spec{}).ID)
	p.measure(t)
	// What is measured is the node, not how long this test waits for a processor.
	if err := renice(os.Getpid(), -15); err != nil {
		t.Skipf("this test needs the right to raise priorities: %v", err)
	}
	defer renice(os.Getpid(), 0)
	t.Run("beside", func(t *testing.T) {
		if text, err := os.ReadFile("/proc/sys/kernel/sched_autogroup_enabled"); err != nil || strings.TrimSpace(string(text)) != "1" {
			t.Skip("this kernel gives sessions no group of their own")
		}
		p.holds(t, func(t *testing.T) func() { return busy(t, true) })
	})
	t.Run("in the node's group", func(t *testing.T) { // with the priority that its service gives it
		if group, err := os.ReadFile("/proc/self/autogroup"); err == nil && len(group) == 0 {
			t.Skip("nobody has begun a session here, so each loop is weighed against a whole sandbox; run it with setsid")
		}
		if err := renice(n.cmd.Process.Pid, unitNice(t)); err != nil {
			t.Fatal(err)
		}
		p.holds(t, func(t *testing.T) func() { return busy(t, false) })
	})
}

// unitNice is the priority of the node's service.
func unitNice(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("../deploy/boxed-node.service.in")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^Nice=(-?\d+)$`).FindStringSubmatch(string(text))
	if m == nil {
		return 0
	}
	nice, _ := strconv.Atoi(m[1])
	return nice
}

// renice sets the priority of all threads of a process; new ones inherit it.
func renice(pid, nice int) error {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		tid, _ := strconv.Atoi(filepath.Base(task))
		if e := syscall.Setpriority(syscall.PRIO_PROCESS, tid, nice); e != nil && e != syscall.ESRCH {
			err = e
		}
	}
	return err
}

// busy runs 50 busy loops of normal priority, in a session of their own or in
// this one. They end with their shell, and that with its input: a test that is
// killed leaves nothing.
func busy(t *testing.T, apart bool) (stop func()) {
	t.Helper()
	cmd := exec.Command("bash", "-c", `trap 'kill $(jobs -p)' EXIT; read; for i in $(seq 50); do while :; do :; done & done; echo ready; read`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: apart}
	hold, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ready := &firstLine{wrote: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = ready, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := renice(cmd.Process.Pid, 0); err != nil { // before it starts them
		t.Error(err)
	}
	io.WriteString(hold, "\n")
	<-ready.wrote
	return func() {
		hold.Close()
		cmd.Wait() // its status is the last read's
	}
}

// alone skips a test that loads the whole host, unless nothing else runs on it.
func alone(t *testing.T) {
	t.Helper()
	if os.Getenv("BOXED_ALONE") == "" {
		t.Skip("it loads the whole host; make test runs it after all others, with BOXED_ALONE=1")
	}
}
