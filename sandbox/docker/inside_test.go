package docker_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// world is a Manager with the real agent on a runtime: what a node has below
// its API. The attackers are programs that it runs as any user's.
type world struct {
	*sandbox.Manager
	t       *testing.T
	r       *oci
	d       *docker.Driver
	cfg     sandbox.Config
	image   string
	stopped func() error
}

// probeImage is an image with the guest in it: /probe, and /suid with the
// set-uid bit.
const probeImage = "boxed-test/probe:1"

// brought has a sync.Once for each engine that was given probeImage.
var brought sync.Map

// uidRanges keeps the sandboxes of worlds that are there at once apart.
var uidRanges atomic.Int64

// bringProbe makes probeImage on a runtime's engine.
func bringProbe(t *testing.T, r *oci) {
	t.Helper()
	once, _ := brought.LoadOrStore(r.host, new(sync.Once))
	once.(*sync.Once).Do(func() { makeProbe(t, r) })
}

func makeProbe(t *testing.T, r *oci) {
	t.Helper()
	root := t.TempDir()
	program, err := os.ReadFile(guestProgram)
	for name, mode := range map[string]os.FileMode{"probe": 0o755, "suid": 0o755 | os.ModeSetuid | os.ModeSetgid} {
		err = errors.Join(err, os.WriteFile(filepath.Join(root, name), program, 0o755), os.Chmod(filepath.Join(root, name), mode))
	}
	if err != nil {
		t.Fatal(err)
	}
	r.importImage(t, probeImage, root)
}

// insideLimits have room for attackers: a runtime with a kernel of its own needs
// memory for each process.
func insideLimits() boxed.Limits {
	return boxed.Limits{
		MemoryBytes: 256 * boxed.MiB, CPUs: 1, Processes: 300, OpenFiles: 4096, WorkspaceBytes: 16 * boxed.MiB, HomeBytes: 8 * boxed.MiB,
		TmpBytes: 8 * boxed.MiB, OutputBytes: 4 * boxed.MiB, ShmBytes: 4 * boxed.MiB,
	}
}

func newWorld(t *testing.T, r *oci, change ...func(*sandbox.Config)) *world {
	t.Helper()
	program := realAgent(t)
	w := &world{t: t, r: r, image: probeImage, d: r.driver(t, func(c *docker.Config) { c.AgentPath, c.Runtimes = program, []string{r.name} })}
	dir, err := os.MkdirTemp("", "bx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	first := 300_000 + 100*int(uidRanges.Add(1))
	w.cfg = sandbox.Config{
		FirstUID: first, LastUID: first + 99,
		Node: testNode, Dir: filepath.Join(dir, "boxes"), Agent: program, Driver: w.d, Records: &sandboxtest.Records{},
		Templates: map[string]boxed.Template{boxed.DefaultTemplate: {Name: boxed.DefaultTemplate, Image: probeImage, Limits: insideLimits()}},
	}
	for _, c := range change {
		c(&w.cfg)
	}
	w.run()
	t.Cleanup(func() {
		if w.stopped == nil {
			return
		}
		for _, b := range w.List() {
			if err := w.Destroy(context.Background(), b.ID); err != nil {
				t.Errorf("clean up: %v", err)
			}
		}
		if err := w.stopped(); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return w
}

// run starts a Manager and returns when it has recovered.
func (w *world) run() {
	w.t.Helper()
	m, err := sandbox.New(w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	w.Manager = m
	w.stopped = func() error {
		cancel()
		return <-done
	}
	eventually(w.t, "the manager has recovered", m.Recovered)
}

func (w *world) spec(change ...func(*boxed.Spec)) boxed.Spec {
	spec := boxed.Spec{Template: boxed.DefaultTemplate, Image: w.image, Dir: boxed.DefaultDir, Limits: w.cfg.Templates[boxed.DefaultTemplate].Limits, TTL: boxed.Duration(time.Hour)}
	for _, c := range change {
		c(&spec)
	}
	return spec
}

// inside is a sandbox of a world.
type inside struct {
	w  *world
	id boxed.ID
}

func (w *world) create(change ...func(*boxed.Spec)) *inside {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	b, err := w.Create(ctx, "ann", w.spec(change...), func(sandbox.Admission) error { return nil })
	if err != nil {
		w.t.Fatalf("create: %v", err)
	}
	return &inside{w: w, id: b.ID}
}

// container finds the sandbox's container.
func (b *inside) container() sandbox.Status {
	b.w.t.Helper()
	all, err := b.w.d.List(context.Background())
	if err != nil {
		b.w.t.Fatal(err)
	}
	for _, s := range all {
		if s.Sandbox == b.id {
			return s
		}
	}
	b.w.t.Fatalf("%s has no container", b.id)
	return sandbox.Status{}
}

// exec runs a program to its end, within a bound, and gives what it wrote.
func (b *inside) exec(argv ...string) (string, boxed.ExitStatus) {
	b.w.t.Helper()
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	status, err := b.w.Exec(ctx, b.id, boxed.ExecRequest{Args: argv, Stdout: &out, Stderr: &out})
	if err != nil {
		b.w.t.Fatalf("exec %q: %v", argv, err)
	}
	return strings.TrimSpace(out.String()), status
}

// probe runs the guest's probe and gives what it wrote, or how it ended.
func (b *inside) probe(args ...string) string {
	b.w.t.Helper()
	out, status := b.exec(append([]string{"/probe"}, args...)...)
	if status.Reason != boxed.ReasonExited {
		return out + string(status.Reason)
	}
	return out
}

// works says what a quick exec cannot do any more.
func (b *inside) works(after string) {
	b.w.t.Helper()
	if got := b.probe("call", "getpid"); got != "ok" {
		b.w.t.Errorf("after %s an exec says %q", after, got)
	}
}

// job is an exec that goes on.
type job struct {
	id     boxed.ExecID
	out    *lockedBuffer
	ended  chan struct{}
	cancel context.CancelFunc
}

// begin runs a probe behind, until the test ends or the job is ended.
func (b *inside) begin(args ...string) *job {
	b.w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	j := &job{out: &lockedBuffer{}, ended: make(chan struct{}), cancel: cancel}
	started := make(chan boxed.ExecID, 1)
	failed := make(chan error, 1)
	go func() {
		defer close(j.ended)
		_, err := b.w.Exec(ctx, b.id, boxed.ExecRequest{
			Args: append([]string{"/probe"}, args...), Stdout: j.out, Stderr: j.out, Started: func(id boxed.ExecID) { started <- id },
		})
		failed <- err
	}()
	b.w.t.Cleanup(j.end)
	select {
	case j.id = <-started:
	case err := <-failed:
		b.w.t.Fatalf("exec %q: %v", args, err)
	}
	return j
}

// end ends the job's whole tree.
func (j *job) end() {
	j.cancel()
	<-j.ended
}

// says waits for a text in the job's output, or for its end.
func (j *job) says(t *testing.T, text string) bool {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(2 * time.Millisecond) {
		if strings.Contains(j.out.String(), text) {
			return true
		}
		select {
		case <-j.ended:
			return strings.Contains(j.out.String(), text)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("it does not say %q but %q", text, j.out.String())
		}
	}
}

// lockedBuffer can be read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
