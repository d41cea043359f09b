package scheduler

import (
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

const (
	// LedgerKeeps is how long a Ledger remembers a placement of which no summary
	// tells: longer than gossip takes to pass one on, and short enough that what
	// never came to be does not keep a node empty.
	LedgerKeeps = 10 * time.Second
	// LedgerHolds is how many placements a Ledger remembers: 1,000 a second.
	// More are not remembered.
	LedgerHolds = 10_000
)

// Ledger remembers what this node placed on others since they last told of
// themselves, so that its next placement counts it. It reads no clock. The zero
// Ledger is empty, and safe for use by several goroutines. What a node places on
// itself does not belong here: its own books are no older than now.
type Ledger struct {
	mu     sync.Mutex
	placed map[boxed.NodeID][]placement
	held   int
	last   uint64
}

type placement struct {
	number   uint64
	limits   boxed.Limits
	kind     kind
	since    time.Time // by the clock of this node
	admitted time.Time // by the clock of the node that admitted it; zero until then
}

// kind is what a warm sandbox must have in common with an ask.
type kind struct{ image, runtime, isolation string }

func kindOf(ask *Ask) kind { return kind{ask.Image, ask.Runtime, ask.Isolation} }

// Placement names one entry of a Ledger. The zero one names none.
type Placement struct {
	node   boxed.NodeID
	number uint64
}

// Placed remembers that a sandbox is being placed on a node. Call it before the
// node is asked, and Admitted or Withdraw with what it gave once the node has
// answered; without, it is forgotten after [LedgerKeeps].
func (l *Ledger) Placed(node boxed.NodeID, ask Ask, now time.Time) Placement {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held >= LedgerHolds {
		for id := range l.placed {
			l.forgetLocked(id, func(p placement) bool { return stale(p, now) })
		}
	}
	if l.held >= LedgerHolds {
		return Placement{}
	}
	if l.placed == nil {
		l.placed = map[boxed.NodeID][]placement{}
	}
	l.last++
	l.held++
	l.placed[node] = append(l.placed[node], placement{number: l.last, limits: ask.Limits, kind: kindOf(&ask), since: now})
	return Placement{node: node, number: l.last}
}

// Admitted says when the node wrote the sandbox in its books, by its own clock:
// the time of its creation. From then on a summary that the node made later
// counts it, and the Ledger forgets it when it sees one.
func (l *Ledger) Admitted(p Placement, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.IndexFunc(l.placed[p.node], func(q placement) bool { return q.number == p.number }); i >= 0 {
		l.placed[p.node][i].admitted = at
	}
}

// Withdraw forgets a placement that the node refused.
func (l *Ledger) Withdraw(p Placement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetLocked(p.node, func(q placement) bool { return q.number == p.number })
}

// Apply adds to a node what it was given since it made the summary that n was
// read from, and takes away the warm sandboxes that are claimed by then, as far
// as they are such as ask wants. n is fresh from the summary. told is when the node made the summary, by its
// own clock; now is by the clock of this node.
func (l *Ledger) Apply(n *NodeState, ask Ask, told, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.placed[n.ID]) == 0 {
		return
	}
	l.forgetLocked(n.ID, func(p placement) bool {
		return stale(p, now) || (!p.admitted.IsZero() && told.After(p.admitted))
	})
	var sum boxed.Capacity
	for _, p := range l.placed[n.ID] {
		sum.MemoryBytes += p.limits.MemoryBytes
		sum.CPUs += p.limits.CPUs
		sum.Sandboxes++
		if n.Warm > 0 && p.kind == kindOf(&ask) {
			n.Warm--
		}
	}
	sum.CPUs = roundCPUs(sum.CPUs)
	n.Recent = sum
	n.Used.MemoryBytes += sum.MemoryBytes
	n.Used.CPUs += sum.CPUs
	n.Used.Sandboxes += sum.Sandboxes
}

// stale says that it is long ago, or that the clock was set back.
func stale(p placement, now time.Time) bool {
	age := now.Sub(p.since)
	return age >= LedgerKeeps || age < -LedgerKeeps
}

func (l *Ledger) forgetLocked(node boxed.NodeID, drop func(placement) bool) {
	before := len(l.placed[node])
	kept := slices.DeleteFunc(l.placed[node], drop)
	l.held -= before - len(kept)
	if len(kept) == 0 {
		delete(l.placed, node)
		return
	}
	l.placed[node] = kept
}
