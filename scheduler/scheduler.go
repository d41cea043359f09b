// Package scheduler decides where a sandbox goes. It is pure: it reads a
// snapshot of nodes and an [Ask], and says which node and why not the others.
// It reserves nothing and talks to nobody.
//
// [Fits] is the one place that knows whether a sandbox may go to a node. The
// node that places asks it of a snapshot, which may be stale; the node that
// admits asks it again of its own books, under its lock. So the two cannot
// disagree about the rules, only about the facts. Start reading there; [Place]
// chooses among the nodes that fit, and a [Ledger] remembers what a snapshot
// cannot know yet.
package scheduler

import (
	"math"
	"time"

	"github.com/boxed-mesh/boxed"
)

// NodeState is what is known of one node, as far as it matters for one Ask.
// Nothing here is changed or kept: maps and slices may be shared.
type NodeState struct {
	ID       boxed.NodeID
	Arch     string   // amd64 or arm64
	Runtimes []string // OCI runtimes that work
	Default  string   // the runtime of an Ask that names neither it nor an isolation; "" if none works
	Labels   map[string]string

	Silent   bool   // it does not answer, as the placing node sees it
	Ready    bool   // its engine answers and it has recovered
	Problem  string // why it is not, for a person
	Draining bool   // it is stopping
	Cordoned bool   // an operator keeps new sandboxes away
	Place    boxed.PlaceRule

	// Total is the machine: its memory, its CPUs, and the most sandboxes that
	// it may hold (0: no such bound).
	Total boxed.Capacity
	// Capacity is what the node itself says it may promise. Where it is zero,
	// that is worked out of Total and Policy.
	Capacity boxed.Capacity
	Policy   Policy
	// Used is what is promised to sandboxes that have not ended, warm ones too.
	Used boxed.Capacity
	// Idle is the part of Used that warm sandboxes hold which nobody has
	// claimed: the node gives it up for a sandbox that needs the room.
	Idle boxed.Capacity
	// Recent is the part of Used that the node has from a [Ledger].
	Recent boxed.Capacity

	Warm   int             // how many warm sandboxes would serve this Ask at once
	Images map[string]bool // images that are there, by reference
	Load   float64         // of the last minute, per core
	RTT    time.Duration   // from the node that places; 0 if unknown, and of that node itself
}

// Policy is how much of a machine a node promises.
type Policy struct {
	MemoryOvercommit float64 // promised memory may be so many times the usable memory
	CPUOvercommit    float64 // likewise
	Reserve          float64 // share of memory and CPUs that is kept for the host
}

// DefaultPolicy promises memory once, since a host that runs out of it kills,
// and CPUs four times, since sandboxes mostly wait.
func DefaultPolicy() Policy {
	return Policy{MemoryOvercommit: 1, CPUOvercommit: 4, Reserve: 0.10}
}

// Usable is what the node may promise in all.
func (n NodeState) Usable() boxed.Capacity { return n.usable() }

func (n *NodeState) usable() boxed.Capacity {
	if n.Capacity != (boxed.Capacity{}) {
		return n.Capacity
	}
	share := 1 - n.Policy.Reserve
	return boxed.Capacity{
		MemoryBytes: int64(float64(n.Total.MemoryBytes) * share * n.Policy.MemoryOvercommit),
		CPUs:        roundCPUs(float64(n.Total.CPUs) * share * n.Policy.CPUOvercommit),
		Sandboxes:   n.Total.Sandboxes,
	}
}

// Strategy says which of the nodes that fit is preferred.
type Strategy string

// The strategies. Anything else is Spread.
const (
	Spread Strategy = "spread" // the least full: the default, also ""
	Pack   Strategy = "pack"   // the fullest that stays under 85 %, so that others can be switched off
)

// Ask is one sandbox that wants a place.
type Ask struct {
	Limits    boxed.Limits      // resolved; only memory and CPUs count here
	Runtime   string            // "" is any that gives the isolation
	Isolation string            // the least that it needs, see [IsolationOf]; "" is any
	Arch      string            // "" is any; of the image, where it is known
	Image     string            // reference, as in NodeState.Images; "" if it does not matter
	Labels    map[string]string // the node must have all of them

	Node  boxed.NodeID   // "" is any; a pinned sandbox goes there or nowhere
	Near  []boxed.NodeID // if not empty: on one of these, where others are that it works with
	Apart []boxed.NodeID // on none of these, where others are that must not fail with it

	// Entry is the node that the sandbox is asked of, which places it. A node
	// with [boxed.PlaceOwn] takes only its own.
	Entry boxed.NodeID
	// Exclude has the nodes that have refused it already in this placement, and
	// their errors. An error's code becomes that of the [Rejection].
	Exclude map[boxed.NodeID]error

	Strategy Strategy
}

// Reason says why a node does not take a sandbox. The list is closed.
type Reason string

// The reasons.
const (
	NotPinned   Reason = "pinned"        // the sandbox is pinned to another node
	NotNear     Reason = "affinity"      // it is not one of the nodes that the sandbox must be on
	NotApart    Reason = "anti_affinity" // it is one of the nodes that the sandbox must not be on
	Refused     Reason = "refused"       // it was asked in this placement, and said no
	RuledOut    Reason = "place"         // it takes no sandboxes, or only those that are asked of itself
	Silent      Reason = "silent"        // it does not answer
	NotReady    Reason = "not_ready"     // its engine does not answer, or it is starting
	Draining    Reason = "draining"      // it is stopping
	Cordoned    Reason = "cordoned"      // an operator keeps sandboxes away
	WrongArch   Reason = "arch"          // another architecture
	NoLabels    Reason = "labels"        // it lacks a label that the sandbox needs
	NoIsolation Reason = "isolation"     // no runtime that isolates as much, or the one asked for does not
	NoRuntime   Reason = "runtime"       // it does not have that runtime
	NoMemory    Reason = "memory"        // promised already
	NoCPU       Reason = "cpu"           // promised already
	NoRoom      Reason = "sandboxes"     // it holds as many as it may
	TooLarge    Reason = "too_large"     // more than the node could give if it were empty
	OtherBetter Reason = "other_better"  // it fits, another was chosen
)

// Rejection says why one node was not chosen.
type Rejection struct {
	Node    boxed.NodeID `json:"node"`
	Reason  Reason       `json:"reason"`
	Message string       `json:"message"` // for a person

	refused boxed.Code // of a node that refused, its code
}

// AsError is the rejection as the error that a caller of create sees when this
// was the only node.
func (r *Rejection) AsError() *boxed.Error {
	err := boxed.Errorf(r.code(), "%s", r.Message).With("reason", string(r.Reason)).With("nodes", []Rejection{*r})
	if f := r.Reason.field(); f != "" {
		err.WithField(f)
	}
	return err
}

// field is what of the request would have to change, or "".
func (r Reason) field() string {
	switch r {
	case TooLarge:
		return "limits"
	case NoRuntime:
		return "runtime"
	case NoIsolation:
		return "placement.isolation"
	case NoLabels:
		return "placement.node_labels"
	case NotNear:
		return "placement.near"
	case NotApart:
		return "placement.apart"
	case WrongArch:
		return "image"
	}
	return ""
}

func (r *Rejection) code() boxed.Code {
	switch r.Reason {
	case Refused:
		if r.refused != "" && r.refused != boxed.CodeInternal { // what is wrong inside a node is wrong there, for now
			return r.refused
		}
		return boxed.CodeNotReady
	case Silent, NotReady, Draining, Cordoned:
		return boxed.CodeNotReady
	case NotNear, NotApart, RuledOut, WrongArch, NoLabels, NoIsolation, NoRuntime, TooLarge:
		return boxed.CodeUnavailable
	}
	return boxed.CodeExhausted
}

// roundCPUs rounds to a thousandth of a CPU, so that sums of 0.1 come out even.
func roundCPUs(v float64) float64 { return math.Round(v*1000) / 1000 }
