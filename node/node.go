// Package node is the host daemon: it implements [boxed.API] for the sandboxes
// of this host. It decides who may see and do what, completes and checks specs,
// admits within capacity and quotas, and routes a call to the sandbox's owner,
// which so far is this node or nobody.
//
// It knows neither HTTP nor Docker; sandbox.Manager does the work. Start
// reading at [Node] and [Node.Create].
package node

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/scheduler"
)

// EventLog keeps events. store.Store is one.
type EventLog interface {
	AppendEvent(boxed.Event) boxed.Event
	EventsAfter(after boxed.Cursor, limit int) ([]boxed.Event, error)
	EventsNow() boxed.Cursor
	EventsChanged() <-chan struct{}
}

// Config configures a Node. ID, Manager, Driver and Events are required.
type Config struct {
	ID      boxed.NodeID
	Name    string
	Version string
	Manager *sandbox.Manager
	Driver  sandbox.Driver
	Events  EventLog

	Templates map[string]boxed.Template // with complete limits
	Defaults  boxed.Limits              // of an image without a template
	Highest   boxed.Limits              // zero fields: only the node's capacity bounds
	TTL       boxed.Duration            // of a spec without one
	MaxTTL    boxed.Duration
	Idle      boxed.Duration // 0: none
	Quota     func(owner string) Quota
	Policy    scheduler.Policy
	Most      int // sandboxes; 0: as many as fit
	Log       *slog.Logger
	Now       func() time.Time
}

// Quota bounds what one owner's living sandboxes hold. Zero is no bound.
type Quota struct {
	Sandboxes   int
	MemoryBytes int64
}

// Node serves one host. All methods are safe for concurrent use.
type Node struct {
	cfg      Config
	total    boxed.Capacity
	started  time.Time
	draining atomic.Bool

	mu     sync.Mutex // guards what is known of the engine
	info   sandbox.Info
	err    error
	asked  time.Time
	asking chan struct{} // closed when the question under way is answered; nil without one
}

var _ boxed.API = (*Node)(nil)

// New makes a Node over a Manager, which its owner runs.
func New(cfg Config) (*Node, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Quota == nil {
		cfg.Quota = func(string) Quota { return Quota{} }
	}
	total, err := Machine()
	if err != nil {
		return nil, err
	}
	total.Sandboxes = cfg.Most
	return &Node{cfg: cfg, total: total, started: cfg.Now()}, nil
}

// Machine is the memory and the cores of this host.
func Machine() (boxed.Capacity, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return boxed.Capacity{}, err
	}
	c := boxed.Capacity{CPUs: float64(runtime.NumCPU())}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "MemTotal:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				return c, err
			}
			c.MemoryBytes = kib << 10
		}
	}
	return c, nil
}

// Drain stops admitting new sandboxes. Calls about living ones go on.
func (n *Node) Drain() { n.draining.Store(true) }

// How long what is known of the engine is believed, and how long one question
// may take before the node counts as not ready.
const (
	engineFresh   = 2 * time.Second
	enginePatient = 900 * time.Millisecond
	engineLately  = 10 * time.Minute // to place a sandbox by
	engineAgain   = time.Minute      // from then on it is asked anew meanwhile, which takes a core for 20 ms
)

// lately describes the engine without waiting for it, if it was well not long
// ago: it takes longer to answer than to claim a warm sandbox, which does not need
// it. What does need it finds out what has changed.
func (n *Node) lately(ctx context.Context) (sandbox.Info, error) {
	n.mu.Lock()
	age := n.cfg.Now().Sub(n.asked)
	if n.asked.IsZero() || n.err != nil || age > engineLately {
		n.mu.Unlock()
		return n.engine(ctx)
	}
	defer n.mu.Unlock()
	if age >= engineAgain && n.asking == nil {
		n.asking = make(chan struct{})
		go n.ask(n.asking)
	}
	return n.info, nil
}

// engine describes the engine. Many ask; one asks the engine.
func (n *Node) engine(ctx context.Context) (sandbox.Info, error) {
	n.mu.Lock()
	if n.cfg.Now().Sub(n.asked) < engineFresh && !n.asked.IsZero() {
		defer n.mu.Unlock()
		return n.info, n.err
	}
	answered := n.asking
	if answered == nil {
		answered = make(chan struct{})
		n.asking = answered
		go n.ask(answered)
	}
	known, info := !n.asked.IsZero() && n.err == nil, n.info
	n.mu.Unlock()
	patience := time.NewTimer(enginePatient)
	defer patience.Stop()
	select {
	case <-answered:
	case <-ctx.Done():
		return info, ctx.Err()
	case <-patience.C:
		if !known {
			return info, boxed.Errorf(boxed.CodeNotReady, "the container engine does not answer yet")
		}
		return info, boxed.Errorf(boxed.CodeNotReady, "the container engine is slow to answer")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.info, n.err
}

// ask asks the engine once. Its end closes answered, so a test that waits for
// an answer waits for the goroutine.
func (n *Node) ask(answered chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	info, err := n.cfg.Driver.Info(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.info, n.err, n.asked, n.asking = info, err, n.cfg.Now(), nil
	close(answered)
}

// Ready returns why the node cannot take work, or nothing.
func (n *Node) Ready(ctx context.Context) []string {
	return n.problems(n.engine(ctx))
}

// problems are why the node cannot take work, where the engine says info or err.
func (n *Node) problems(info sandbox.Info, err error) []string {
	problems := []string{}
	switch {
	case err != nil:
		problems = append(problems, boxed.AsError(err).Message)
	case len(info.Runtimes) == 0:
		problems = append(problems, "no OCI runtime of the engine can start a container")
	}
	if !n.cfg.Manager.Recovered() {
		problems = append(problems, "the node is recovering its sandboxes")
	}
	if n.draining.Load() {
		problems = append(problems, "the node is stopping")
	}
	return problems
}

// state is this node as the scheduler sees it; used is what is reserved.
func (n *Node) state(info sandbox.Info, engineErr error, used boxed.Capacity) scheduler.NodeState {
	s := scheduler.NodeState{
		ID: n.cfg.ID, Arch: runtime.GOARCH, Runtimes: info.Runtimes, Default: info.Default,
		Ready: engineErr == nil, Draining: n.draining.Load(), Total: n.total, Used: used, Policy: n.cfg.Policy,
	}
	if engineErr != nil {
		s.Problem = boxed.AsError(engineErr).Message
	}
	return s
}

// NodeInfo describes this node.
func (n *Node) NodeInfo(ctx context.Context) (*boxed.NodeInfo, error) {
	info, err := n.engine(ctx)
	problems := append(n.problems(info, err), info.Problems...)
	used, _ := n.cfg.Manager.Used()
	pools, hits, misses := n.cfg.Manager.Pools()
	for _, p := range pools {
		if p.Problem != "" {
			problems = append(problems, "pool "+p.Template+": "+p.Problem)
		}
	}
	templates := []boxed.Template{}
	for _, name := range n.templateNames() {
		templates = append(templates, n.cfg.Templates[name])
	}
	state := n.state(info, err, used)
	return &boxed.NodeInfo{
		ID: n.cfg.ID, Name: n.cfg.Name, Version: n.cfg.Version,
		Ready: err == nil && n.cfg.Manager.Recovered() && len(info.Runtimes) > 0, Problems: problems, Draining: n.draining.Load(),
		Arch: runtime.GOARCH, Runtimes: append([]string{}, info.Runtimes...), Default: info.Default, Engine: info.Engine, Cgroup: info.Cgroup,
		Templates: templates, Capacity: state.Usable(), Used: used, Sandboxes: used.Sandboxes,
		Pool: pools, WarmHits: hits, WarmMisses: misses, StartedAt: n.started,
	}, nil
}
