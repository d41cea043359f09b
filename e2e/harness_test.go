package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// bin holds the programs under test, built from this tree as make build does.
var bin string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "boxed-e2e")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	bin = dir
	for name, pkg := range map[string]string{"boxed-agent": "./agent/boxed-agent", "boxed-tools": "./agent/boxed-tools", "boxed-node": "./cmd/boxed-node", "boxedctl": "./cmd/boxedctl"} {
		if err := build(filepath.Join(dir, name), pkg, "e2e"); err != nil {
			return 1, err
		}
	}
	return m.Run(), nil
}

func build(out, pkg, version string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.version="+version, "-o", out, pkg)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

// node is a running boxed-node with a data directory of its own.
type node struct {
	*client.Client
	t        *testing.T
	dir      string
	endpoint string
	key      string
	agent    string
	program  string   // "": this build's
	host     *labHost // nil: this one
	environ  []string // besides this process's
	args     []string
	cmd      *exec.Cmd
	ended    chan error
	log      *safeBuffer
}

// startNode starts a node and waits until it is ready. Its sandboxes are ended
// after the test.
func startNode(t *testing.T, args ...string) *node {
	t.Helper()
	needEngine(t)
	n := &node{t: t, dir: t.TempDir(), agent: filepath.Join(bin, "boxed-agent"), args: args, log: &safeBuffer{}}
	n.endpoint = "http://" + freeAddress(t)
	return n.run()
}

// run starts the node for as long as the test runs.
func (n *node) run() *node {
	n.t.Helper()
	t := n.t
	n.start()
	t.Cleanup(func() {
		n.wipe()
		n.stop(syscall.SIGTERM)
		if n.Client != nil {
			n.Client.Close()
		}
		if t.Failed() {
			t.Logf("node: %s", n.log.tail(6000))
		}
	})
	return n
}

func needEngine(t *testing.T) {
	t.Helper()
	if err := exec.Command("docker", "version").Run(); err != nil {
		if os.Getenv("CI") != "" { // there make test has started one: its absence is a fault
			t.Fatal("no container engine answers")
		}
		t.Skip("no container engine answers; make test starts one")
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (n *node) start() {
	n.t.Helper()
	args := append([]string{"run", "--listen", strings.TrimPrefix(n.endpoint, "http://"), "--data-dir", n.dir, "--agent", n.agent}, n.args...)
	program := n.program
	if program == "" {
		program = filepath.Join(bin, "boxed-node")
	}
	web, cfg := http.DefaultClient, client.Config{Endpoint: n.endpoint}
	n.cmd = exec.Command(program, args...)
	if n.host != nil {
		n.cmd = n.host.command(context.Background(), program, args...)
		cfg.DialContext = n.host.dial
		web = &http.Client{Transport: &http.Transport{DialContext: n.host.dial, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	}
	n.cmd.Env = append(os.Environ(), n.environ...)
	n.cmd.Stdout, n.cmd.Stderr = n.log, n.log
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	ended := make(chan error, 1)
	n.ended = ended
	cmd := n.cmd
	go func() { ended <- cmd.Wait() }()
	within(n.t, 60*time.Second, "the node to be ready", func() bool {
		select {
		case err := <-ended:
			n.cmd = nil // what stops it would wait for ever
			n.t.Fatalf("the node ended: %v\n%s", err, n.log.tail(4000))
		default:
		}
		resp, err := web.Get(n.endpoint + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	key, err := os.ReadFile(filepath.Join(n.dir, "admin.key"))
	if err != nil {
		n.t.Fatal(err)
	}
	n.key = strings.TrimSpace(string(key))
	cfg.APIKey = n.key
	if n.Client, err = client.New(cfg); err != nil {
		n.t.Fatal(err)
	}
}

// stop ends the process and waits for it.
func (n *node) stop(sig syscall.Signal) {
	n.t.Helper()
	if n.cmd == nil {
		return
	}
	n.cmd.Process.Signal(sig)
	select {
	case <-n.ended:
	case <-time.After(30 * time.Second):
		n.cmd.Process.Kill()
		<-n.ended
		n.t.Error("the node did not stop in 30 s")
	}
	n.cmd = nil
}

// wipe ends the node's sandboxes, warm ones too, whether it still runs or not.
func (n *node) wipe() {
	entries, _ := os.ReadDir(filepath.Join(n.dir, "sandboxes"))
	n.stop(syscall.SIGTERM)
	for _, e := range entries {
		exec.Command("docker", "rm", "-f", "boxed-"+e.Name()).Run()
	}
}

// ctl runs boxedctl against the node and returns what it wrote.
func (n *node) ctl(args ...string) (stdout, stderr string, code int) {
	n.t.Helper()
	return n.ctlIn(nil, args...)
}

func (n *node) ctlIn(stdin io.Reader, args ...string) (stdout, stderr string, code int) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 120*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "boxedctl"), args...)
	if n.host != nil {
		cmd = n.host.command(ctx, filepath.Join(bin, "boxedctl"), args...)
	}
	cmd.Env = n.env()
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	err := cmd.Run()
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		n.t.Fatalf("boxedctl %q: %v", args, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func (n *node) env() []string {
	return append(os.Environ(),
		"PATH="+bin+":"+os.Getenv("PATH"), "BOXED_ENDPOINT="+n.endpoint, "BOXED_API_KEY="+n.key,
		"HOME="+n.dir+"/home", "XDG_CONFIG_HOME=", "NO_COLOR=1")
}

// create makes a sandbox of the default template.
func (n *node) create(spec boxed.Spec) *boxed.Sandbox {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 60*time.Second)
	defer cancel()
	s, err := n.Create(ctx, spec)
	if err != nil {
		n.t.Fatalf("create: %v", err)
	}
	return s
}

// sh runs a shell script and returns what it wrote to both streams.
func (n *node) sh(id boxed.ID, script string) (string, boxed.ExitStatus) {
	n.t.Helper()
	return n.exec(id, boxed.ExecRequest{Args: []string{"bash", "-c", script}})
}

func (n *node) exec(id boxed.ID, req boxed.ExecRequest) (string, boxed.ExitStatus) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 120*time.Second)
	defer cancel()
	var out safeBuffer
	req.Stdout, req.Stderr = &out, &out
	status, err := n.Exec(ctx, id, req)
	if err != nil {
		n.t.Fatalf("exec: %v", err)
	}
	return out.String(), status
}

func within(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain for %s", limit, what)
		}
	}
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *safeBuffer) tail(n int) string {
	text := s.String()
	return text[max(0, len(text)-n):]
}
