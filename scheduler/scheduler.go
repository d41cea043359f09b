// Package scheduler decides where a sandbox goes. It is pure: it reads a
// snapshot of nodes and an [Ask], and says which node and why not the others.
// It reserves nothing and talks to nobody.
//
// [Fits] is the one place that knows whether a sandbox has room on a node. The
// node that places asks it of a snapshot, which may be stale; the node that
// admits asks it again of its own books, under its lock. So the two cannot
// disagree about the rules, only about the facts. Start reading there.
package scheduler

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/boxed-mesh/boxed"
)

// NodeState is what is known of one node.
type NodeState struct {
	ID       boxed.NodeID
	Arch     string   // amd64 or arm64
	Runtimes []string // OCI runtimes that work
	Default  string   // the runtime of an Ask that names none; "" if none works

	Ready    bool   // its engine answers and it has recovered
	Problem  string // why it is not, for a person
	Draining bool   // it is stopping
	Cordoned bool   // an operator keeps new sandboxes away

	// Total is the machine: its memory, its CPUs, and the most sandboxes that
	// it may hold (0: no such bound).
	Total boxed.Capacity
	// Used is what is promised to sandboxes that have not ended.
	Used boxed.Capacity
	// Idle is the part of Used that warm sandboxes hold which nobody has
	// claimed: the node gives it up for a sandbox that needs the room.
	Idle boxed.Capacity
	// Warm is how many warm sandboxes would serve this Ask at once.
	Warm int

	Policy Policy
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

// Usable is what a node with this policy may promise in all.
func (n NodeState) Usable() boxed.Capacity {
	share := 1 - n.Policy.Reserve
	return boxed.Capacity{
		MemoryBytes: int64(float64(n.Total.MemoryBytes) * share * n.Policy.MemoryOvercommit),
		CPUs:        roundCPUs(float64(n.Total.CPUs) * share * n.Policy.CPUOvercommit),
		Sandboxes:   n.Total.Sandboxes,
	}
}

// Ask is one sandbox that wants a place.
type Ask struct {
	Limits  boxed.Limits // resolved; only memory and CPUs count here
	Runtime string       // "" is the node's default
	Arch    string       // "" is any; of the image, where it is known
	Node    boxed.NodeID // "" is any; a pinned sandbox goes there or nowhere
}

// Reason says why a node does not take a sandbox. The list is closed.
type Reason string

// The reasons.
const (
	NotReady    Reason = "not_ready"    // its engine does not answer, or it is starting
	Draining    Reason = "draining"     // it is stopping
	Cordoned    Reason = "cordoned"     // an operator keeps sandboxes away
	WrongArch   Reason = "arch"         // another architecture
	NoRuntime   Reason = "runtime"      // it does not have that runtime
	NoMemory    Reason = "memory"       // promised already
	NoCPU       Reason = "cpu"          // promised already
	NoRoom      Reason = "sandboxes"    // it holds as many as it may
	TooLarge    Reason = "too_large"    // more than the node could give if it were empty
	NotPinned   Reason = "pinned"       // the sandbox is pinned to another node
	OtherBetter Reason = "other_better" // it fits, another was chosen
)

// Rejection says why one node was not chosen.
type Rejection struct {
	Node    boxed.NodeID `json:"node"`
	Reason  Reason       `json:"reason"`
	Message string       `json:"message"` // for a person
}

// AsError is the rejection as the error that a caller of create sees when this
// was the only node.
func (r *Rejection) AsError() *boxed.Error {
	err := boxed.Errorf(r.code(), "%s", r.Message).With("reason", string(r.Reason)).With("nodes", []Rejection{*r})
	switch r.Reason { // what of the request would have to change
	case TooLarge:
		err.WithField("limits")
	case NoRuntime:
		err.WithField("runtime")
	case WrongArch:
		err.WithField("image")
	}
	return err
}

func (r *Rejection) code() boxed.Code {
	switch r.Reason {
	case NotReady, Draining, Cordoned:
		return boxed.CodeNotReady
	case WrongArch, NoRuntime, TooLarge:
		return boxed.CodeUnavailable
	}
	return boxed.CodeExhausted
}

// Fits reports why the node cannot take the sandbox, or nil if it can. The
// reasons are tried from the most lasting to the most passing, except that a
// node which is not ready says so first: what else is known of it may be old.
func Fits(n NodeState, ask Ask) *Rejection {
	no := func(r Reason, format string, args ...any) *Rejection {
		return &Rejection{Node: n.ID, Reason: r, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case ask.Node != "" && ask.Node != n.ID:
		return no(NotPinned, "the sandbox is pinned to node %s", ask.Node)
	case n.Draining:
		return no(Draining, "the node is stopping and takes no new sandboxes")
	case n.Cordoned:
		return no(Cordoned, "an operator keeps new sandboxes away from the node")
	case !n.Ready:
		return no(NotReady, "the node is not ready: %s", or(n.Problem, "it did not say why"))
	case ask.Arch != "" && ask.Arch != n.Arch:
		return no(WrongArch, "the image is for %s and the node is %s", ask.Arch, n.Arch)
	}
	if runtime := or(ask.Runtime, n.Default); runtime == "" || !slices.Contains(n.Runtimes, runtime) {
		return no(NoRuntime, "the node has no runtime %q (it has %q)", runtime, n.Runtimes)
	}
	return room(n, ask, no)
}

// room is the part of Fits about quantities.
func room(n NodeState, ask Ask, no func(Reason, string, ...any) *Rejection) *Rejection {
	usable := n.Usable()
	memory, cpus := ask.Limits.MemoryBytes, roundCPUs(ask.Limits.CPUs)
	freeMemory := usable.MemoryBytes - (n.Used.MemoryBytes - n.Idle.MemoryBytes)
	freeCPUs := roundCPUs(usable.CPUs - (n.Used.CPUs - n.Idle.CPUs))
	switch {
	case memory > usable.MemoryBytes:
		return no(TooLarge, "it asks for %s of memory and the node has %s for sandboxes in all", mib(memory), mib(usable.MemoryBytes))
	case cpus > n.Total.CPUs:
		// Over-commit shares CPUs out between sandboxes; it does not make more of
		// them for one, and engines refuse it.
		return no(TooLarge, "it asks for %s CPUs and the node has %s", num(cpus), num(n.Total.CPUs))
	case cpus > usable.CPUs:
		return no(TooLarge, "it asks for %s CPUs and the node has %s for sandboxes in all", num(cpus), num(usable.CPUs))
	case usable.Sandboxes > 0 && n.Used.Sandboxes-n.Idle.Sandboxes >= usable.Sandboxes:
		return no(NoRoom, "the node holds %d sandboxes, which is as many as it may", n.Used.Sandboxes-n.Idle.Sandboxes)
	case memory > freeMemory:
		return no(NoMemory, "it asks for %s of memory and the node has %s left of %s", mib(memory), mib(max(0, freeMemory)), mib(usable.MemoryBytes))
	case cpus > freeCPUs:
		return no(NoCPU, "it asks for %s CPUs and the node has %s left of %s", num(cpus), num(max(0, freeCPUs)), num(usable.CPUs))
	}
	return nil
}

// roundCPUs rounds to a thousandth of a CPU, so that sums of 0.1 come out even.
func roundCPUs(v float64) float64 { return math.Round(v*1000) / 1000 }

func mib(n int64) string { return strconv.FormatInt(n/boxed.MiB, 10) + " MiB" }

func num(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

func or(s, fallback string) string {
	if s != "" {
		return s
	}
	return fallback
}
