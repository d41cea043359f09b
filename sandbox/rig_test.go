package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

const (
	testNode  = boxed.NodeID("aaaaaaaaaaaaaaaa")
	testImage = "base"
)

// rig is one Manager after another over the same records, directory and fake
// driver.
type rig struct {
	*sandbox.Manager
	t       *testing.T
	cfg     sandbox.Config
	driver  *sandboxtest.Driver
	records *sandboxtest.Records
	dir     string
	clock   atomic.Int64
	ended   func() // ends the present Manager and waits

	mu     sync.Mutex
	step   func(id boxed.ID, step string) error
	events []boxed.Event
}

// newRig makes everything but the first Manager; see run.
func newRig(t *testing.T, change ...func(*sandbox.Config)) *rig {
	t.Helper()
	r := &rig{t: t, driver: sandboxtest.New(), records: &sandboxtest.Records{}, dir: filepath.Join(t.TempDir(), "boxes")}
	r.clock.Store(time.Now().UnixNano()) // agents have no other
	r.driver.SetImage(testImage, "sha256:1")
	r.cfg = sandbox.Config{
		Node: testNode, Dir: r.dir, Agent: "/nonexistent/agent", Driver: r.driver, Records: r.records,
		Templates: map[string]boxed.Template{
			boxed.DefaultTemplate: {Name: boxed.DefaultTemplate, Image: testImage, Limits: boxed.DefaultLimits()},
		},
		FirstUID: 200000, LastUID: 200999,
		Step: func(id boxed.ID, step string) error {
			r.mu.Lock()
			f := r.step
			r.mu.Unlock()
			if f != nil {
				return f(id, step)
			}
			return nil
		},
		Emit: func(e boxed.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e)
		},
		Now: r.now,
	}
	for _, c := range change {
		c(&r.cfg)
	}
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		r.end()
		r.driver.Close()
		goleak.VerifyNone(t, ignore)
	})
	return r
}

// started is newRig and run.
func started(t *testing.T, change ...func(*sandbox.Config)) *rig {
	t.Helper()
	r := newRig(t, change...)
	r.run()
	return r
}

func withPool(n int) func(*sandbox.Config) {
	return func(c *sandbox.Config) {
		tpl := c.Templates[boxed.DefaultTemplate]
		tpl.Pool = n
		c.Templates = map[string]boxed.Template{boxed.DefaultTemplate: tpl}
	}
}

func (r *rig) now() time.Time          { return time.Unix(0, r.clock.Load()).UTC() }
func (r *rig) advance(d time.Duration) { r.clock.Add(int64(d)) }

func (r *rig) onStep(f func(id boxed.ID, step string) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step = f
}

// make makes the next Manager without running it.
func (r *rig) make() {
	r.t.Helper()
	m, err := sandbox.New(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	m.SetLookPause(10 * time.Millisecond)
	r.Manager, r.ended = m, nil
}

// run makes the next Manager and runs it until it has recovered.
func (r *rig) run() {
	r.t.Helper()
	r.make()
	r.begin()
	r.eventually("it has recovered", r.Recovered)
}

func (r *rig) begin() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	m := r.Manager
	go func() { done <- m.Run(ctx) }()
	r.ended = func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			r.t.Errorf("run: %v", err)
		}
	}
}

// end ends the present Manager as a stop of the daemon does.
func (r *rig) end() {
	if r.ended != nil {
		r.ended()
		r.ended = nil
	}
}

// restart is a stop and a start.
func (r *rig) restart() {
	r.t.Helper()
	r.end()
	r.run()
}

// killAt kills the daemon before the first step for which at says so, or at a
// write of a record: from then on the old Manager does nothing more, and the
// next one finds what had been written. It returns whether that has happened.
func (r *rig) killAt(at func(step string) bool) (killed *atomic.Bool) {
	killed = new(atomic.Bool)
	m, old := r.Manager, r.records
	die := func(step string) {
		if killed.Load() || at(step) {
			if killed.CompareAndSwap(false, true) {
				r.mu.Lock()
				r.records = old.Copy()
				r.mu.Unlock()
				m.Abandon()
			}
			runtime.Goexit()
		}
	}
	r.onStep(func(_ boxed.ID, step string) error {
		die(step)
		return nil
	})
	old.Fail(func(_ string, rec sandbox.Record) error {
		die("put " + string(rec.Sandbox.State))
		return nil
	})
	return killed
}

// afterKill starts the next daemon.
func (r *rig) afterKill() {
	r.t.Helper()
	r.end()
	r.onStep(nil)
	r.cfg.Records = r.records
	r.run()
}

func (r *rig) spec(change ...func(*boxed.Spec)) boxed.Spec {
	s := boxed.Spec{
		Template: boxed.DefaultTemplate, Image: testImage, Dir: boxed.DefaultDir, Limits: boxed.DefaultLimits(),
		TTL: boxed.Duration(time.Hour),
	}
	for _, c := range change {
		c(&s)
	}
	return s
}

func anybody(sandbox.Admission) error { return nil }

func (r *rig) create(change ...func(*boxed.Spec)) *boxed.Sandbox {
	r.t.Helper()
	s, err := r.tryCreate(change...)
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	return s
}

func (r *rig) tryCreate(change ...func(*boxed.Spec)) (*boxed.Sandbox, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return r.Create(ctx, "ann", r.spec(change...), anybody)
}

// in calls f in a goroutine and waits for its end, also by Goexit.
func in(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("not within 15 s: %s", what)
		}
	}
}

func (r *rig) get(id boxed.ID) boxed.Sandbox {
	r.t.Helper()
	s, err := r.Get(id)
	if err != nil {
		r.t.Fatal(err)
	}
	return *s
}

// waitEnd waits for the end of a sandbox and checks why.
func (r *rig) waitEnd(id boxed.ID, state boxed.State, reason boxed.EndReason) boxed.Sandbox {
	r.t.Helper()
	r.eventually(string(id)+" has ended", func() bool { return r.get(id).State.Ended() })
	s := r.get(id)
	if s.State != state || s.Reason != reason || s.Message == "" || s.EndedAt.IsZero() {
		r.t.Errorf("ended as %s, %s, %q at %v; want %s, %s", s.State, s.Reason, s.Message, s.EndedAt, state, reason)
	}
	return s
}

// nothingLeft checks that only end records are left.
func (r *rig) nothingLeft() {
	r.t.Helper()
	r.left(0)
}

// left checks that there are n sandboxes, whatever one looks at.
func (r *rig) left(n int) {
	r.t.Helper()
	look := func() (containers, dirs, uids int) {
		entries, err := os.ReadDir(r.dir)
		if err != nil {
			r.t.Fatal(err)
		}
		return len(r.driver.Containers()), len(entries), r.UIDsInUse()
	}
	r.eventually("what was to go is gone", func() bool {
		c, d, u := look()
		return c == n && d == n && u == n
	})
}

func (r *rig) exec(id boxed.ID, args ...string) (string, boxed.ExitStatus) {
	r.t.Helper()
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	status, err := r.Exec(ctx, id, boxed.ExecRequest{Args: args, Stdout: &out})
	if err != nil {
		r.t.Fatalf("exec %q: %v", args, err)
	}
	return out.String(), status
}

func (r *rig) works(id boxed.ID) {
	r.t.Helper()
	if out, status := r.exec(id, "echo", "works"); out != "works\n" || status.Reason != boxed.ReasonExited {
		r.t.Errorf("echo: %q, %+v", out, status)
	}
}

func (r *rig) eventsOf(id boxed.ID) (types []boxed.EventType) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Sandbox == id {
			types = append(types, e.Type)
		}
	}
	return types
}

func (r *rig) ready() (ready, filling int) {
	infos, _, _ := r.Pools()
	for _, p := range infos {
		ready, filling = ready+p.Ready, filling+p.Filling
	}
	return ready, filling
}

func (r *rig) waitWarm(n int) {
	r.t.Helper()
	r.eventually("the pool is full", func() bool { ready, filling := r.ready(); return ready == n && filling == 0 })
}

func wantCode(t *testing.T, err error, code boxed.Code, text ...string) {
	t.Helper()
	if boxed.CodeOf(err) != code {
		t.Errorf("got %v (%s), want %s", err, boxed.CodeOf(err), code)
		return
	}
	for _, part := range text {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

var (
	createSteps  = []string{"record", "mount", "socket", "container", "start", "link"}
	destroySteps = []string{"stopping", "end", "remove", "unlink", "directory", "ended"}
)
