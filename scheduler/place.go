package scheduler

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/boxed-mesh/boxed"
)

// Place chooses a node for the sandbox, and gives a reason for each of the
// others. The order of nodes does not matter, and the same facts give the same
// choice.
//
// Of the nodes where it fits, one that has a warm sandbox for it wins, because
// that is 20 ms instead of 300; then the one that would be least full, which
// spreads both load and what is lost with a machine; then the lowest ID.
//
// Without a node the error's code says whether waiting helps: unavailable (no
// node could ever take it), not_ready (those that could are not ready), not_found
// (it is pinned to a node that is not there), else exhausted. Its Detail["nodes"]
// has the rejections.
func Place(nodes []NodeState, ask Ask) (boxed.NodeID, []Rejection, error) {
	var fit []NodeState
	rejected := []Rejection{}
	for _, n := range nodes {
		if r := Fits(n, ask); r != nil {
			rejected = append(rejected, *r)
		} else {
			fit = append(fit, n)
		}
	}
	if len(fit) == 0 {
		sortRejections(rejected)
		return "", rejected, nowhere(rejected, ask)
	}
	best := slices.MinFunc(fit, func(a, b NodeState) int { return compare(a, b, ask) })
	for _, n := range fit {
		if n.ID != best.ID {
			rejected = append(rejected, Rejection{Node: n.ID, Reason: OtherBetter, Message: whyNot(n, best, ask)})
		}
	}
	sortRejections(rejected)
	return best.ID, rejected, nil
}

// compare is negative if a is the better choice.
func compare(a, b NodeState, ask Ask) int {
	return cmp.Or(
		cmp.Compare(warm(b), warm(a)),
		cmp.Compare(fill(a, ask), fill(b, ask)),
		cmp.Compare(a.ID, b.ID),
	)
}

func warm(n NodeState) int { return min(n.Warm, 1) }

// fill is how full the node would be with the sandbox, in percent of what it
// may promise, by the scarcer of memory and CPUs. Whole percents: a node should
// not win by a rounding of what gossip told about it.
func fill(n NodeState, ask Ask) int {
	usable := n.Usable()
	memory := share(float64(n.Used.MemoryBytes-n.Idle.MemoryBytes+ask.Limits.MemoryBytes), float64(usable.MemoryBytes))
	cpus := share(n.Used.CPUs-n.Idle.CPUs+ask.Limits.CPUs, usable.CPUs)
	return int(100 * max(memory, cpus))
}

func share(part, whole float64) float64 {
	if whole <= 0 {
		return 1
	}
	return part / whole
}

func whyNot(n, best NodeState, ask Ask) string {
	switch {
	case warm(n) != warm(best):
		return fmt.Sprintf("it fits; node %s has a warm sandbox for it", best.ID)
	case fill(n, ask) != fill(best, ask):
		return fmt.Sprintf("it fits and would be %d %% full; node %s would be %d %% full", fill(n, ask), best.ID, fill(best, ask))
	}
	return fmt.Sprintf("it fits; node %s is as good, and comes first by name", best.ID)
}

func nowhere(rejected []Rejection, ask Ask) error {
	switch considered := slices.DeleteFunc(slices.Clone(rejected), func(r Rejection) bool { return r.Reason == NotPinned }); {
	case ask.Node != "" && len(considered) == 0:
		return boxed.Errorf(boxed.CodeNotFound, "there is no node %s", ask.Node).WithField("node").With("nodes", rejected)
	case len(considered) == 0:
		return boxed.Errorf(boxed.CodeNotReady, "no node is there").With("nodes", rejected)
	case len(considered) == 1:
		return considered[0].AsError().With("nodes", rejected)
	default:
		return boxed.Errorf(commonCode(considered), "no node of %d takes it; on node %s: %s", len(considered), considered[0].Node, considered[0].Message).
			With("nodes", rejected)
	}
}

// commonCode is exhausted if room on one node is all that is missing, not_ready
// if a node that is not ready might take it, and unavailable if none ever can.
func commonCode(rejected []Rejection) boxed.Code {
	codes := map[boxed.Code]bool{}
	for _, r := range rejected {
		codes[r.code()] = true
	}
	for _, code := range []boxed.Code{boxed.CodeExhausted, boxed.CodeNotReady} {
		if codes[code] {
			return code
		}
	}
	return boxed.CodeUnavailable
}

func sortRejections(rs []Rejection) {
	slices.SortFunc(rs, func(a, b Rejection) int { return cmp.Compare(a.Node, b.Node) })
}
