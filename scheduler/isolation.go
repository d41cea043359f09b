package scheduler

import (
	"fmt"
	"slices"
	"strings"
)

// The kinds of isolation, from the weakest: each satisfies an ask for one
// before it.
const (
	IsolationContainer = "container" // the host's kernel
	IsolationGVisor    = "gvisor"    // a kernel in user space, which few calls of the host's get past
	IsolationVM        = "vm"        // a kernel of its own on virtual hardware
)

// IsolationOf is the kind of isolation that an OCI runtime of this name gives.
// A name is what an operator made of it: one that is not known counts as the
// weakest kind.
func IsolationOf(runtime string) string {
	name := strings.TrimPrefix(runtime, "io.containerd.")
	switch {
	case strings.HasPrefix(name, "kata"):
		return IsolationVM
	case strings.HasPrefix(name, "runsc"), strings.HasPrefix(name, "gvisor"):
		return IsolationGVisor
	}
	return IsolationContainer
}

// strength orders the kinds; one that is not known is stronger than all, so
// that nothing satisfies it.
func strength(isolation string) int {
	switch isolation {
	case "":
		return 0
	case IsolationContainer:
		return 1
	case IsolationGVisor:
		return 2
	case IsolationVM:
		return 3
	}
	return 4
}

// RuntimeFor is the runtime that the node would run the sandbox with, or "" if
// it has none for it: the one asked for, else the node's default if it isolates
// enough, else the weakest that does, since that is the fastest. Without an
// isolation it is the default or none.
func RuntimeFor(n NodeState, ask Ask) string { return runtimeFor(&n, &ask) }

func runtimeFor(n *NodeState, ask *Ask) string {
	need := strength(ask.Isolation)
	if named := or(ask.Runtime, n.Default); slices.Contains(n.Runtimes, named) && named != "" && strength(IsolationOf(named)) >= need {
		return named
	}
	if ask.Runtime != "" || need == 0 {
		return ""
	}
	best, least := "", strength("")
	for _, r := range n.Runtimes {
		if s := strength(IsolationOf(r)); r != "" && s >= need && (best == "" || s < least) {
			best, least = r, s
		}
	}
	return best
}

// runtimeVerdict is fits if and only if runtimeFor finds a runtime.
func runtimeVerdict(n *NodeState, ask *Ask) verdict {
	switch {
	case runtimeFor(n, ask) != "":
		return fits
	case ask.Isolation == "":
		return noRuntime
	case ask.Runtime != "" && strength(IsolationOf(ask.Runtime)) >= strength(ask.Isolation):
		return noRuntime
	}
	return weakIsolation
}

func isolationInWords(n *NodeState, ask *Ask) string {
	if ask.Runtime != "" {
		return fmt.Sprintf("it asks for the isolation %s and for the runtime %q, which gives %s; leave one of them out",
			ask.Isolation, ask.Runtime, IsolationOf(ask.Runtime))
	}
	return fmt.Sprintf("it asks for the isolation %s and the node's runtimes %q do not give it", ask.Isolation, n.Runtimes)
}
