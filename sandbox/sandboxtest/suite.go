package sandboxtest

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Fixture is what a driver brings to the suite.
type Fixture struct {
	Driver sandbox.Driver
	Node   boxed.NodeID
	Agent  string // the agent program on this host
	// Image is a reference with sh, coreutils and perl: any Debian image.
	Image string
	// Languages maps a language that the image has to code that prints "hello".
	Languages map[string]string
	// Crash ends a container as if its first process had died, with a code other
	// than 0. Nil: the driver has no such means.
	Crash func(t *testing.T, containerID string)
	// NoEgress says that the driver's sandboxes have no loopback of their own.
	NoEgress bool
}

// Run runs the contract suite. newFixture is called once for each group of
// tests; what it makes is cleaned up with t. Whoever passes it is a driver.
func Run(t *testing.T, newFixture func(t *testing.T) Fixture) {
	t.Run("driver", func(t *testing.T) { runDriver(t, newFixture(t)) })
	t.Run("sandbox", func(t *testing.T) { runSandbox(t, newFixture(t)) })
	t.Run("life", func(t *testing.T) { runLife(t, newFixture(t)) })
	t.Run("egress", func(t *testing.T) { runEgress(t, newFixture(t)) })
}

// limits are small enough for many sandboxes at once.
func limits() boxed.Limits {
	return boxed.Limits{
		MemoryBytes: 256 * boxed.MiB, CPUs: 1, Processes: 64, OpenFiles: 1024, WorkspaceBytes: 32 * boxed.MiB,
		HomeBytes: 8 * boxed.MiB, TmpBytes: 8 * boxed.MiB, OutputBytes: 8 * boxed.MiB, ShmBytes: 4 * boxed.MiB,
	}
}

// site is a Manager over a driver, with a clock that goes on and can be moved.
type site struct {
	*sandbox.Manager
	t       *testing.T
	f       Fixture
	cfg     sandbox.Config
	records *Records
	ahead   *atomic.Int64
	made    map[boxed.ID]bool
	ended   func()
}

func newSite(t *testing.T, f Fixture, change ...func(*sandbox.Config)) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "bx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &site{t: t, f: f, records: &Records{}, ahead: new(atomic.Int64), made: map[boxed.ID]bool{}}
	s.cfg = sandbox.Config{
		Node: f.Node, Dir: filepath.Join(dir, "boxes"), Agent: f.Agent, Driver: f.Driver, Records: s.records,
		Templates: map[string]boxed.Template{boxed.DefaultTemplate: {Name: boxed.DefaultTemplate, Image: f.Image, Limits: limits()}},
		Log:       slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
		Now:       func() time.Time { return time.Now().Add(time.Duration(s.ahead.Load())) },
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(&s.cfg)
	}
	t.Cleanup(func() {
		if s.ended == nil {
			return
		}
		for _, b := range s.List() {
			if err := s.Destroy(context.Background(), b.ID); err != nil {
				t.Errorf("clean up: %v", err)
			}
		}
		eventually(t, "what was made is cleared away", func() bool {
			all, err := s.f.Driver.List(context.Background())
			return err == nil && !slices.ContainsFunc(all, func(c sandbox.Status) bool { return s.made[c.Sandbox] })
		})
		s.ended()
	})
	s.run()
	return s
}

// run starts a Manager, and returns when it has recovered.
func (s *site) run() {
	s.t.Helper()
	m, err := sandbox.New(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	s.Manager = m
	s.ended = func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("run: %v", err)
		}
	}
	eventually(s.t, "the manager has recovered", m.Recovered)
}

func (s *site) restart() {
	s.t.Helper()
	s.ended()
	s.run()
}

func (s *site) create(change ...func(*boxed.Spec)) *boxed.Sandbox {
	s.t.Helper()
	spec := boxed.Spec{Template: boxed.DefaultTemplate, Image: s.f.Image, Dir: boxed.DefaultDir, Limits: limits(), TTL: boxed.Duration(time.Hour)}
	for _, c := range change {
		c(&spec)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	b, err := s.Create(ctx, "ann", spec, func(sandbox.Admission) error { return nil })
	if err != nil {
		s.t.Fatalf("create: %v", err)
	}
	s.made[b.ID] = true
	return b
}

// result is what became of a program.
type result struct {
	out, err string
	status   boxed.ExitStatus
}

// run runs a program to its end, within a bound.
func (s *site) exec(id boxed.ID, req boxed.ExecRequest) result {
	s.t.Helper()
	var out, errs bytes.Buffer
	req.Stdout, req.Stderr = &out, &errs
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	status, err := s.Exec(ctx, id, req)
	if err != nil {
		s.t.Fatalf("exec %q: %v", req.Args, err)
	}
	return result{out.String(), errs.String(), status}
}

// sh runs a script that the suite knows.
func (s *site) sh(id boxed.ID, script string, args ...string) result {
	s.t.Helper()
	return s.exec(id, boxed.ExecRequest{Args: append([]string{"sh", "-c", script, "sh"}, args...)})
}

func (s *site) works(id boxed.ID) {
	s.t.Helper()
	if r := s.exec(id, boxed.ExecRequest{Args: []string{"echo", "works"}}); r.out != "works\n" {
		s.t.Errorf("echo: %+v", r)
	}
}

// background starts an exec whose output can be looked at while it runs.
type background struct {
	id     boxed.ExecID
	out    *buffer
	ended  chan struct{}
	status boxed.ExitStatus
	err    error
	cancel context.CancelFunc
}

func (s *site) begin(id boxed.ID, req boxed.ExecRequest) *background {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b := &background{out: &buffer{}, ended: make(chan struct{}), cancel: cancel}
	started := make(chan boxed.ExecID, 1)
	req.Stdout, req.Started = b.out, func(id boxed.ExecID) { started <- id }
	go func() {
		defer close(b.ended)
		b.status, b.err = s.Exec(ctx, id, req)
	}()
	s.t.Cleanup(func() { cancel(); <-b.ended })
	select {
	case b.id = <-started:
	case <-b.ended:
		s.t.Fatalf("exec %q: %v", req.Args, b.err)
	}
	return b
}

func (b *background) wait(t *testing.T) boxed.ExitStatus {
	t.Helper()
	select {
	case <-b.ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the exec does not end")
	}
	return b.status
}

// processes is how many processes of an exec live.
func (s *site) processes(id boxed.ID, exec boxed.ExecID) int {
	s.t.Helper()
	e, err := s.GetExec(context.Background(), id, exec)
	if err != nil {
		s.t.Fatal(err)
	}
	return e.Processes
}

// buffer can be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func wantCode(t *testing.T, what string, err error, codes ...boxed.Code) {
	t.Helper()
	if !slices.Contains(codes, boxed.CodeOf(err)) {
		t.Errorf("%s: got %v (%s), want %v", what, err, boxed.CodeOf(err), codes)
	}
}

// newBox makes the Box of a sandbox, its directory, and the host's side of its
// agent.
func newBox(t *testing.T, f Fixture) (sandbox.Box, *agent.Host) {
	t.Helper()
	image, err := f.Driver.Image(t.Context(), f.Image, func(sandbox.PullProgress) {})
	if err != nil {
		t.Fatalf("image: %v", err)
	}
	info, err := f.Driver.Info(t.Context())
	if err != nil {
		t.Fatalf("info: %v", err)
	}
	dir, err := os.MkdirTemp("", "bx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	const uid = 234000
	for name, text := range map[string]string{
		"passwd": fmt.Sprintf("root:x:0:0::/:/bin/false\nsandbox:x:%d:%d::%s:/bin/sh\n", uid, uid, sandbox.GuestHome),
		"group":  fmt.Sprintf("root:x:0:\nsandbox:x:%d:\n", uid),
		"hosts":  "127.0.0.1 localhost\n", "resolv.conf": "nameserver 127.0.0.1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	host, err := agent.Listen(agent.HostConfig{
		Dir: dir, Socket: sandbox.SocketName, Secret: boxed.NewToken(52), Config: agent.Config{UID: uid, Home: sandbox.GuestHome},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	return sandbox.Box{
		ID: boxed.NewID(f.Node), Nonce: boxed.NewToken(26), Image: image, Runtime: info.Default, Limits: limits(), UID: uid,
		Mount: dir, Agent: f.Agent,
	}, host
}

// launch creates and starts a Box, and waits for its agent.
func launch(t *testing.T, f Fixture) (id string, box sandbox.Box, host *agent.Host) {
	t.Helper()
	box, host = newBox(t, f)
	id, err := f.Driver.Create(t.Context(), box)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		if err := f.Driver.Remove(context.Background(), id); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	if err := f.Driver.Start(t.Context(), id); err != nil {
		t.Fatalf("start: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := host.Ready(ctx); err != nil {
		t.Fatalf("the agent does not connect: %v", err)
	}
	return id, box, host
}
