package node

import (
	"context"
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

// host is the sandboxes of this machine: every method is about those, and knows
// of no other node. It decides who may see and do what.
type host struct {
	cfg      Config
	total    boxed.Capacity
	started  time.Time
	draining atomic.Bool
	settings settings
	claims   claims
	usage    usages

	mu     sync.Mutex // guards what is known of the engine
	info   sandbox.Info
	err    error
	asked  time.Time
	asking chan struct{} // closed when the question under way is answered; nil without one
}

var _ boxed.API = (*host)(nil)

func newHost(cfg Config) (*host, error) {
	total, err := Machine()
	if err != nil {
		return nil, err
	}
	total.Sandboxes = cfg.Most
	h := &host{cfg: cfg, total: total, started: cfg.Now(), claims: claims{now: cfg.Now}}
	return h, h.settings.load(cfg.Settings)
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
func (h *host) Drain() { h.draining.Store(true) }

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
func (h *host) lately(ctx context.Context) (sandbox.Info, error) {
	h.mu.Lock()
	age := h.cfg.Now().Sub(h.asked)
	if h.asked.IsZero() || h.err != nil || age > engineLately {
		h.mu.Unlock()
		return h.engine(ctx)
	}
	defer h.mu.Unlock()
	if age >= engineAgain && h.asking == nil {
		h.asking = make(chan struct{})
		go h.ask(h.asking)
	}
	return h.info, nil
}

// engine describes the engine. Many ask; one asks the engine.
func (h *host) engine(ctx context.Context) (sandbox.Info, error) {
	h.mu.Lock()
	if h.cfg.Now().Sub(h.asked) < engineFresh && !h.asked.IsZero() {
		defer h.mu.Unlock()
		return h.info, h.err
	}
	answered := h.asking
	if answered == nil {
		answered = make(chan struct{})
		h.asking = answered
		go h.ask(answered)
	}
	known, info := !h.asked.IsZero() && h.err == nil, h.info
	h.mu.Unlock()
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
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.info, h.err
}

// ask asks the engine once. Its end closes answered, so a test that waits for
// an answer waits for the goroutine.
func (h *host) ask(answered chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	info, err := h.cfg.Driver.Info(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.info, h.err, h.asked, h.asking = info, err, h.cfg.Now(), nil
	close(answered)
}

// Ready returns why the node cannot take work, or nothing.
func (h *host) Ready(ctx context.Context) []string {
	return h.problems(h.engine(ctx))
}

// problems are why the node cannot take work, where the engine says info or err.
func (h *host) problems(info sandbox.Info, err error) []string {
	problems := []string{}
	switch {
	case err != nil:
		problems = append(problems, boxed.AsError(err).Message)
	case len(info.Runtimes) == 0:
		problems = append(problems, "no OCI runtime of the engine can start a container")
	}
	if !h.cfg.Manager.Recovered() {
		problems = append(problems, "the node is recovering its sandboxes")
	}
	if h.draining.Load() {
		problems = append(problems, "the node is stopping")
	}
	return problems
}

// state is this node as the scheduler sees it; used is what is reserved.
func (h *host) state(info sandbox.Info, engineErr error, used boxed.Capacity) scheduler.NodeState {
	s := scheduler.NodeState{
		ID: h.cfg.ID, Arch: runtime.GOARCH, Runtimes: info.Runtimes, Default: info.Default,
		Ready: engineErr == nil, Draining: h.draining.Load(), Total: h.total, Used: used, Policy: h.cfg.Policy,
		Cordoned: h.settings.get().Cordoned, Place: h.cfg.Place, Labels: h.cfg.Labels(),
	}
	if engineErr != nil {
		s.Problem = boxed.AsError(engineErr).Message
	}
	return s
}

// NodeInfo describes this node.
func (h *host) NodeInfo(ctx context.Context) (*boxed.NodeInfo, error) {
	info, err := h.engine(ctx)
	problems := append(h.problems(info, err), info.Problems...)
	used, _ := h.cfg.Manager.Used()
	pools, hits, misses := h.cfg.Manager.Pools()
	for _, p := range pools {
		if p.Problem != "" {
			problems = append(problems, "pool "+p.Template+": "+p.Problem)
		}
	}
	templates := []boxed.Template{}
	for _, name := range h.templateNames() {
		templates = append(templates, h.cfg.Templates[name])
	}
	state := h.state(info, err, used)
	return &boxed.NodeInfo{
		ID: h.cfg.ID, Name: h.cfg.Name, Version: h.cfg.Version,
		Ready: err == nil && h.cfg.Manager.Recovered() && len(info.Runtimes) > 0, Problems: problems, Draining: h.draining.Load(),
		Arch: runtime.GOARCH, Runtimes: append([]string{}, info.Runtimes...), Default: info.Default, Engine: info.Engine, Cgroup: info.Cgroup,
		Templates: templates, Capacity: state.Usable(), Used: used, Sandboxes: used.Sandboxes,
		Pool: pools, WarmHits: hits, WarmMisses: misses, StartedAt: h.started,
		Cordoned: state.Cordoned, Drain: h.drainStatus(), Place: h.cfg.Place, Labels: h.cfg.Labels(),
	}, nil
}
