package sandbox

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Config configures a Manager. Node, Dir, Agent, Driver and Records are required.
type Config struct {
	Node    boxed.NodeID
	Dir     string // of this host, one directory below it for each sandbox
	Agent   string // the agent program on this host; the path names its content
	Tools   string // the program at boxed.ToolsPath; "": sandboxes have none
	Driver  Driver
	Records Records
	// Templates by name. One of them is boxed.DefaultTemplate.
	Templates map[string]boxed.Template
	// Runtime is used when neither spec nor template names one; "" means the driver's.
	Runtime string
	// UIDs of sandboxes, both ends included.
	FirstUID, LastUID int
	// Egress lets sandboxes out; nil: none ever leaves.
	Egress Egress
	// Refill is how many warm sandboxes are made at once; 2 is where a host of 2
	// cores saturates.
	Refill int
	// PoolRoom is how much memory warm sandboxes may reserve, in bytes, where
	// claimed ones have reserved used; nil means no bound. It must not call the
	// Manager.
	PoolRoom func(used boxed.Capacity) int64
	// Emit takes events; it must not block. Nil drops them.
	Emit func(boxed.Event)
	// EndedFor and EndedMost bound how long, and how many, end records are kept.
	EndedFor  time.Duration
	EndedMost int
	// PausedMost is how long a sandbox may stay paused, unless its ttl is never; 0
	// is no bound.
	PausedMost time.Duration
	// Making is how many sandboxes are made at once for those who wait for them;
	// others queue. 0 is as many as there are cores, and 2 at least.
	Making int
	// Step is called before each step of create and destroy; an error is that
	// step's. For tests.
	Step func(sandbox boxed.ID, step string) error
	// Asleep is how long the host has been suspended in all; nil: this machine.
	Asleep func() time.Duration
	Log    *slog.Logger
	Now    func() time.Time
}

// Defaults of Config, and other times of a sandbox's life.
const (
	DefaultRefill = 2

	uidRest       = time.Hour        // an ended sandbox's uid is not used again for so long
	leaseGrace    = 10 * time.Minute // an agent without a host ends after the ttl and this
	pooledLease   = time.Hour        // of a warm sandbox
	orphanGrace   = 60 * time.Second // an attached exec waits so long for its client after a restart
	orphanPause   = 5 * time.Second  // between tries to end those whose client did not come
	askLimit      = 10 * time.Second // for a question that an agent may leave unanswered
	mendLimit     = 10 * time.Second // for a container that is not frozen or thawed as its record says
	sweepEvery    = time.Second
	forgetEvery   = time.Minute
	lookEvery     = 5 * time.Second  // at the engine, for containers that ended unseen
	lookPause     = time.Second      // between looks at the engine while recovering
	missingLooks  = 3                // looks in a row before a container counts as vanished
	sharedStreams = 512              // of all links, beyond what each may have anyway: 128 MiB if all are filled
	stepLimit     = 60 * time.Second // for one step of create or destroy
	endLimit      = 2 * time.Second  // for an agent to exit, and every process with it
	linkLook      = time.Second      // between looks whether a container that does not connect still runs
)

// Manager owns the sandboxes of this host. It implements no rights: its callers
// have checked who may do what. All methods are safe for concurrent use.
type Manager struct {
	cfg    Config
	log    *slog.Logger
	bootID string
	work   sync.WaitGroup // destroys and other work that outlives a call
	// These two are the constants of their names; tests shorten them.
	orphanGrace time.Duration
	lookPause   time.Duration
	stop        chan struct{} // closed by detach
	making      queue
	rush        queue
	streams     *agent.Budget // of all sandboxes' links together
	clearSlots  chan struct{}

	mu        sync.Mutex
	boxes     map[boxed.ID]*box // end records too
	living    map[boxed.ID]*box // those of boxes that have not ended
	uids      uidPool
	closed    bool
	recovered bool
	pools     map[string]*pool // by template
	misses    map[string]int64
	hits      int64
	claimed   time.Time     // when a warm sandbox was claimed last, by the real clock
	asleep    time.Duration // of the host, as of the last sweep
	awake     time.Time     // until when no deadline ends a sandbox, as it has slept
	clearing  int           // ended sandboxes of which something is left
	wake      chan struct{} // tells Run that a pool needs filling
	pulls     pulls
	roots     map[string][]byte // certificates that images trust, by digest
}

// New makes a Manager. Run recovers what an earlier life left; until then
// every call but Recovered answers not_ready.
func New(cfg Config) (*Manager, error) {
	cfg.FirstUID = cmp.Or(cfg.FirstUID, boxed.DefaultFirstUID)
	cfg.LastUID = cmp.Or(cfg.LastUID, boxed.DefaultLastUID)
	cfg.Refill = cmp.Or(cfg.Refill, DefaultRefill)
	cfg.Making = cmp.Or(cfg.Making, max(2, runtime.NumCPU()))
	cfg.EndedFor = cmp.Or(cfg.EndedFor, boxed.DefaultEndedFor.D())
	cfg.EndedMost = cmp.Or(cfg.EndedMost, boxed.DefaultEndedMost)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Emit == nil {
		cfg.Emit = func(boxed.Event) {}
	}
	if cfg.Asleep == nil {
		cfg.Asleep = hostAsleep
	}
	if cfg.Step == nil {
		cfg.Step = func(boxed.ID, string) error { return nil }
	}
	if err := os.MkdirAll(cfg.Dir, 0o711); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, err
	}
	cfg.Dir = dir
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cfg.Log, bootID: strings.TrimSpace(string(boot)),
		boxes: map[boxed.ID]*box{}, living: map[boxed.ID]*box{}, pools: map[string]*pool{}, misses: map[string]int64{}, roots: map[string][]byte{},
		uids: newUIDPool(cfg.FirstUID, cfg.LastUID), wake: make(chan struct{}, 1),
		stop: make(chan struct{}), pulls: newPulls(), orphanGrace: orphanGrace, lookPause: lookPause,
		streams: agent.NewBudget(sharedStreams), making: queue{free: cfg.Making}, rush: queue{free: rushEach * runtime.NumCPU()}, clearSlots: make(chan struct{}, cfg.Refill),
	}
	m.asleep = cfg.Asleep()
	for name, t := range cfg.Templates {
		m.pools[name] = &pool{template: t}
	}
	return m, nil
}

// Run recovers, then sweeps deadlines, watches the engine and fills the pools
// until ctx ends. Sandboxes live on: the next Run adopts them.
func (m *Manager) Run(ctx context.Context) error {
	defer m.detach()
	if err := m.recover(ctx); err != nil {
		return err
	}
	var parts sync.WaitGroup
	for _, part := range []func(context.Context){m.sweep, m.look, m.watch, m.refresh, m.fill} {
		parts.Go(func() { part(ctx) })
	}
	parts.Wait()
	return nil
}

// detach ends all links, and waits for the work under way.
func (m *Manager) detach() {
	m.mu.Lock()
	m.closed = true
	close(m.stop)
	boxes := slices.Collect(maps.Values(m.living))
	m.mu.Unlock()
	m.work.Wait()
	for _, b := range boxes {
		b.closeHost()
	}
}

// later runs work that must not hold its caller up, unless the Manager is
// closing: the sweep of its next life finds what is due.
func (m *Manager) later(work func(ctx context.Context)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	m.work.Go(func() { work(context.Background()) })
}

// untilStop is ctx that ends with the Manager too: for questions that an agent
// may leave unanswered.
func (m *Manager) untilStop(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	go func() {
		select {
		case <-m.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// all are the living ones and those with an end record.
func (m *Manager) all() []*box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.boxes))
}

// alive are those that have not ended. There may be a thousand times as many
// end records, so whatever is done often looks at these only.
func (m *Manager) alive() []*box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.living))
}

// Recovered reports whether calls are served.
func (m *Manager) Recovered() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recovered
}

// known looks up a sandbox that was handed out, to be looked at.
func (m *Manager) known(id boxed.ID) (*box, error) {
	m.mu.Lock()
	b, recovered := m.boxes[id], m.recovered
	m.mu.Unlock()
	switch {
	case b != nil && b.shown():
		return b, nil
	case !recovered:
		return nil, errRecovering()
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %s", id)
}

// find is known for whoever uses or changes it: what became of it is not sure
// before the engine has been asked.
func (m *Manager) find(id boxed.ID) (*box, error) {
	if !m.Recovered() {
		return nil, errRecovering()
	}
	return m.known(id)
}

// errRecovering is the answer to what must wait until the Manager has recovered.
func errRecovering() error {
	return boxed.Errorf(boxed.CodeNotReady, "the node is still recovering its sandboxes; try again in a moment")
}

// Get returns a living sandbox or an end record.
func (m *Manager) Get(id boxed.ID) (*boxed.Sandbox, error) {
	b, err := m.known(id)
	if err != nil {
		return nil, err
	}
	return b.view(), nil
}

// List returns all that were handed out, newest first, end records too.
func (m *Manager) List() []boxed.Sandbox {
	var list []boxed.Sandbox
	for _, b := range m.all() {
		if b.shown() {
			list = append(list, *b.view())
		}
	}
	slices.SortFunc(list, func(a, b boxed.Sandbox) int {
		// Not Compare, which heeds a reading of the monotonic clock: cursors hold these.
		return cmp.Or(cmp.Compare(b.CreatedAt.UnixNano(), a.CreatedAt.UnixNano()), strings.Compare(string(a.ID), string(b.ID)))
	})
	return list
}

// Wait returns when the sandbox is in the state, or has ended.
func (m *Manager) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	b, err := m.known(id)
	if err != nil {
		return nil, err
	}
	return b.wait(ctx, func(r *Record) bool { return r.Sandbox.State == until || r.Sandbox.State.Ended() })
}

// Used is what claimed sandboxes have reserved, and Warm what pooled ones have.
func (m *Manager) Used() (used, warm boxed.Capacity) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.usedLocked()
}

// UsedByOwner is what each owner's living sandboxes have reserved.
func (m *Manager) UsedByOwner() map[string]boxed.Capacity {
	m.mu.Lock()
	defer m.mu.Unlock()
	by := map[string]boxed.Capacity{}
	Admission{m}.each(func(s *boxed.Sandbox) {
		c := by[s.Owner]
		c.MemoryBytes += s.Limits.MemoryBytes
		c.CPUs += s.Limits.CPUs
		c.Sandboxes++
		by[s.Owner] = c
	})
	return by
}

func (m *Manager) usedLocked() (used, warm boxed.Capacity) {
	for _, b := range m.living {
		b.look(func(r *Record) {
			if r.Sandbox.State.Ended() {
				return
			}
			sum := &used
			if r.Pooled {
				sum = &warm
			}
			sum.MemoryBytes += r.Sandbox.Limits.MemoryBytes
			sum.CPUs += r.Sandbox.Limits.CPUs
			sum.Sandboxes++
		})
	}
	return used, warm
}

func (m *Manager) emit(typ boxed.EventType, s *boxed.Sandbox, fill func(*boxed.Event)) {
	e := boxed.Event{
		Type: typ, At: m.cfg.Now(), Node: m.cfg.Node, Sandbox: s.ID, Owner: s.Owner,
		State: s.State, Reason: string(s.Reason), Message: s.Message,
	}
	if fill != nil {
		fill(&e)
	}
	m.cfg.Emit(e)
}
