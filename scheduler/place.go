package scheduler

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/boxed-mesh/boxed"
)

// Choice is what [Place] found.
type Choice struct {
	Node boxed.NodeID // "" if no node takes the sandbox

	nodes []NodeState
	ask   Ask
}

// Place chooses a node for the sandbox. IDs of nodes are unique; their order does
// not matter, and the same facts give the same choice. The choice keeps nodes and
// the maps and slices of ask, which must not change while it is in use.
//
// Of the nodes where it fits, the first by this order is chosen:
//
//  1. one that has a warm sandbox for it, because that is 20 ms instead of 300;
//  2. by how full it would be, in steps of 5 %, by the ask's strategy: what
//     gossip told is not worth more. To spread, a sandbox of up to 15 % of the
//     node does not count in that, and of a larger one what is above; and the
//     emptier half of the nodes count as equally full. A node without the image
//     counts as 30 % fuller, because pulling takes longer than all the rest. A
//     load above 1.5 per core makes a node one step worse for each half begun;
//  3. the nearer by round trip: under 10 ms, under 50, under 150, or more;
//  4. by its turn, which begins with the entry itself and goes on to the nodes
//     after it in order of IDs.
//
// Turns keep many entries that see the same stale snapshot from all choosing the
// same node; gradeOf says how.
//
// Without a node the error's code says whether waiting helps: exhausted (room is
// all that is missing), not_ready (a node that cannot be asked now might take
// it), not_found (it is pinned to a node that is not there), unavailable (no node
// could ever take it), or the code with which all have refused it. Its
// Detail["nodes"] has the rejections.
func Place(nodes []NodeState, ask Ask) (Choice, error) {
	c := Choice{nodes: nodes, ask: ask}
	if best := first(ranked(nodes, &c.ask)); best != nil {
		c.Node = nodes[best.index].ID
		return c, nil
	}
	return c, nowhere(c.Rejected(), ask)
}

// Rejected gives the reason for each node that was not chosen, by ID. The words
// are made here: most callers want none of them.
func (c Choice) Rejected() []Rejection {
	grades := ranked(c.nodes, &c.ask)
	best := first(grades)
	rejected := make([]Rejection, 0, len(c.nodes))
	for i := range grades {
		if g := &grades[i]; g != best {
			n, chosen := &c.nodes[g.index], &c.nodes[best.index]
			rejected = append(rejected, Rejection{Node: n.ID, Reason: OtherBetter, Message: whyNot(n, chosen, g, best, &c.ask)})
		}
	}
	for i := range c.nodes {
		n := &c.nodes[i]
		if v := judge(n, &c.ask); v != fits {
			rejected = append(rejected, *v.explain(n, &c.ask))
		}
	}
	slices.SortFunc(rejected, func(a, b Rejection) int { return cmp.Compare(a.Node, b.Node) })
	return rejected
}

func nowhere(rejected []Rejection, ask Ask) error {
	considered := without(rejected, NotPinned)
	if ask.Node != "" && len(considered) == 0 {
		return boxed.Errorf(boxed.CodeNotFound, "there is no node %s", ask.Node).WithField("node").With("nodes", rejected)
	}
	// What is said of a node that was never meant says nothing new.
	if meant := without(considered, NotNear, NotApart); len(meant) > 0 {
		considered = meant
	}
	switch len(considered) {
	case 0:
		return boxed.Errorf(boxed.CodeNotReady, "no node is there").With("nodes", rejected)
	case 1:
		return considered[0].AsError().With("nodes", rejected)
	}
	code := commonCode(considered)
	example := considered[max(0, slices.IndexFunc(considered, func(r Rejection) bool { return r.code() == code }))]
	err := boxed.Errorf(code, "no node of %d takes it; on node %s: %s", len(considered), example.Node, example.Message).With("nodes", rejected)
	if f := example.Reason.field(); f != "" && len(without(considered, example.Reason)) == 0 {
		err.WithField(f)
	}
	return err
}

func without(rejected []Rejection, reasons ...Reason) []Rejection {
	return slices.DeleteFunc(slices.Clone(rejected), func(r Rejection) bool { return slices.Contains(reasons, r.Reason) })
}

// commonCode is what all have in common; else exhausted if room on one node is
// all that is missing, not_ready if a node that is not ready might take it, and
// unavailable if none ever can.
func commonCode(rejected []Rejection) boxed.Code {
	codes := map[boxed.Code]bool{}
	for _, r := range rejected {
		codes[r.code()] = true
	}
	if len(codes) == 1 {
		return rejected[0].code()
	}
	for _, code := range []boxed.Code{boxed.CodeExhausted, boxed.CodeNotReady} {
		if codes[code] {
			return code
		}
	}
	return boxed.CodeUnavailable
}

// whyNot says by what node b was better than n.
func whyNot(n, b *NodeState, g, best *grade, ask *Ask) string {
	switch {
	case g.warm != best.warm:
		return fmt.Sprintf("it fits; node %s has a warm sandbox for it", b.ID)
	case g.fill != best.fill && g.pulls && !best.pulls:
		return fmt.Sprintf("it fits and lacks the image, which counts as %d %% of a node; node %s has it and is not fuller by that", pullPercent, b.ID)
	case g.fill != best.fill && busySteps(n.Load) != busySteps(b.Load):
		return fmt.Sprintf("it fits and counts as %d %% full with a load of %.1f per core; node %s as %d %% full with %.1f",
			g.percent, n.Load, b.ID, best.percent, b.Load)
	case g.fill != best.fill && ask.Strategy == Pack:
		return fmt.Sprintf("it fits and would be %d %% full; node %s would be %d %% full, and the fullest up to %d %% goes first",
			g.percent, b.ID, best.percent, packPercent)
	case g.fill != best.fill:
		return fmt.Sprintf("it fits and counts as %d %% full; node %s as %d %% full", g.percent, b.ID, best.percent)
	case g.far != best.far:
		return fmt.Sprintf("it fits and is %v away; node %s is %v away", n.RTT, b.ID, b.RTT)
	case ask.Entry == "":
		return fmt.Sprintf("it fits; node %s is as good, and its turn comes first", b.ID)
	}
	return fmt.Sprintf("it fits; node %s is as good, and its turn comes first from node %s", b.ID, ask.Entry)
}
