// Package node is the host daemon: it implements [boxed.API] for the sandboxes
// of this host. It decides who may see and do what, completes and checks specs,
// admits within capacity and quotas, and routes a call to the node that owns
// the sandbox, which its ID names.
//
// It knows neither HTTP nor Docker; sandbox.Manager does the work on this host,
// and a Mesh reaches the others. Start reading at [Node] and [Node.Create].
package node

import (
	"context"
	"log/slog"
	"net/http"
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

	Place    boxed.PlaceRule          // "": PlaceAny
	Load     func() float64           // of the last minute, per core; nil: this machine's
	Labels   func() map[string]string // of this node; nil: none
	Strategy scheduler.Strategy       // by which this node places
	Settings SettingsStore            // nil: what an operator sets is forgotten at a restart

	Egress *EgressConfig // nil: no sandbox gets out

	Log *slog.Logger
	Now func() time.Time
}

// Settings are what an operator sets on a running node.
type Settings struct {
	Cordoned bool      `json:"cordoned,omitempty"`
	By       string    `json:"by,omitempty"` // whose key
	At       time.Time `json:"at,omitzero"`
	// DrainUntil is when what is left is ended; zero without a drain.
	DrainUntil time.Time `json:"drain_until,omitzero"`
	Drained    bool      `json:"drained,omitempty"` // nothing was left, which an event has said
}

// SettingsStore keeps Settings over restarts.
type SettingsStore interface {
	Load() (Settings, error)
	Save(Settings) error
}

// Quota bounds what one owner's living sandboxes hold. Zero is no bound.
type Quota struct {
	Sandboxes   int
	MemoryBytes int64
}

// Node serves one host, and passes on what concerns another. All methods are
// safe for concurrent use.
type Node struct {
	*host
	mesh   atomic.Pointer[Mesh]
	ledger scheduler.Ledger
	wake   chan struct{} // capacity 1: tell the mesh, whatever it was told last
	// changed has capacity 1: what the node holds has changed.
	changed chan struct{}
}

var _ boxed.API = (*Node)(nil)

// Mesh is the other nodes. Peers is one.
type Mesh interface {
	// Nodes are this node, first, and all others that are known.
	Nodes() []boxed.NodeSummary
	Node(id boxed.NodeID) (boxed.NodeSummary, bool)
	// Publish tells the others of this node.
	Publish(boxed.NodeSummary) error
	// Broadcast gossips a short message; one under the same name that is still on its
	// way gives way to it.
	Broadcast(name string, msg []byte)
	// Peer calls a node, as whoever is in the call's context.
	Peer(id boxed.NodeID) boxed.API
	// HTTP carries requests to a node's API.
	HTTP(id boxed.NodeID) http.RoundTripper
}

// New makes a Node over a Manager, which its owner runs. It is alone until SetMesh.
func New(cfg Config) (*Node, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Quota == nil {
		cfg.Quota = func(string) Quota { return Quota{} }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Labels == nil {
		cfg.Labels = func() map[string]string { return nil }
	}
	if cfg.Load == nil {
		cfg.Load = load
	}
	if cfg.Place == "" {
		cfg.Place = boxed.PlaceAny
	}
	h, err := newHost(cfg)
	if err != nil {
		return nil, err
	}
	return &Node{host: h, wake: make(chan struct{}, 1), changed: make(chan struct{}, 1)}, nil
}

// Name is what people call the node.
func (n *Node) Name() string { return n.cfg.Name }

// SetMesh makes the node one of many; nil makes it alone again.
func (n *Node) SetMesh(m Mesh) {
	if m == nil {
		n.mesh.Store(nil)
		return
	}
	n.mesh.Store(&m)
	kick(n.wake)
}

// others is the mesh for a call that may go there: nil if there is none, or if a
// node passed the call on, which is done once.
func (n *Node) others(ctx context.Context) Mesh {
	m := n.mesh.Load()
	if m == nil || boxed.HopFrom(ctx) != "" {
		return nil
	}
	return *m
}

func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
