package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Fits reports why the node cannot take the sandbox, or nil if it can. It tries
// first what holds for ever, then whether the node can be asked at all (what
// else is known of one that cannot may be old), then what is lasting, and last
// its room. It allocates nothing where the sandbox fits.
func Fits(n NodeState, ask Ask) *Rejection {
	if v := judge(&n, &ask); v != fits {
		return v.explain(&n, &ask)
	}
	return nil
}

// verdict is why not, without the words: most nodes' words are never read.
type verdict uint8

const (
	fits verdict = iota
	notPinned
	notNear
	notApart
	refused
	ruledOut
	silent
	draining
	cordoned
	notReady
	wrongArch
	lacksLabels
	weakIsolation
	noRuntime
	tooMuchMemory
	moreCPUsThanThere
	moreCPUsThanUsable
	asManyAsMay
	noMemory
	noCPUs
)

func judge(n *NodeState, ask *Ask) verdict {
	switch {
	case ask.Node != "" && ask.Node != n.ID:
		return notPinned
	case len(ask.Near) > 0 && !slices.Contains(ask.Near, n.ID):
		return notNear
	case slices.Contains(ask.Apart, n.ID):
		return notApart
	}
	if len(ask.Exclude) > 0 {
		if _, ok := ask.Exclude[n.ID]; ok {
			return refused
		}
	}
	switch {
	case !takesFrom(n, ask.Entry):
		return ruledOut
	case n.Silent:
		return silent
	case n.Draining:
		return draining
	case n.Cordoned:
		return cordoned
	case !n.Ready:
		return notReady
	case ask.Arch != "" && ask.Arch != n.Arch:
		return wrongArch
	case !hasLabels(n, ask):
		return lacksLabels
	}
	if v := runtimeVerdict(n, ask); v != fits {
		return v
	}
	r := roomOf(n, ask)
	return r.verdict(n)
}

// takesFrom says whether the node takes what the entry places. A rule of a
// later release, which this one does not know, takes nothing.
func takesFrom(n *NodeState, entry boxed.NodeID) bool {
	switch n.Place {
	case "", boxed.PlaceAny:
		return true
	case boxed.PlaceOwn:
		return entry == n.ID
	}
	return false
}

func hasLabels(n *NodeState, ask *Ask) bool {
	for k, v := range ask.Labels {
		if has, ok := n.Labels[k]; !ok || has != v {
			return false
		}
	}
	return true
}

// room is what is asked and what there is.
type room struct {
	memory, freeMemory int64
	cpus, freeCPUs     float64
	usable             boxed.Capacity
	held               int // sandboxes that do not give way
}

func roomOf(n *NodeState, ask *Ask) room {
	usable := n.usable()
	return room{
		memory: ask.Limits.MemoryBytes, freeMemory: usable.MemoryBytes - (n.Used.MemoryBytes - n.Idle.MemoryBytes),
		cpus: roundCPUs(ask.Limits.CPUs), freeCPUs: roundCPUs(usable.CPUs - (n.Used.CPUs - n.Idle.CPUs)),
		usable: usable, held: n.Used.Sandboxes - n.Idle.Sandboxes,
	}
}

func (r *room) verdict(n *NodeState) verdict {
	switch {
	case r.memory > r.usable.MemoryBytes:
		return tooMuchMemory
	case r.cpus > n.Total.CPUs:
		// Over-commit shares CPUs out between sandboxes; it does not make more of
		// them for one, and engines refuse it.
		return moreCPUsThanThere
	case r.cpus > r.usable.CPUs:
		return moreCPUsThanUsable
	case r.usable.Sandboxes > 0 && r.held >= r.usable.Sandboxes:
		return asManyAsMay
	case r.memory > r.freeMemory:
		return noMemory
	case r.cpus > r.freeCPUs:
		return noCPUs
	}
	return fits
}

// explain is the verdict in words: what is needed, and what the node has.
func (v verdict) explain(n *NodeState, ask *Ask) *Rejection {
	no := func(r Reason, format string, args ...any) *Rejection {
		return &Rejection{Node: n.ID, Reason: r, Message: fmt.Sprintf(format, args...)}
	}
	switch v {
	case notPinned:
		return no(NotPinned, "the sandbox is pinned to node %s", ask.Node)
	case notNear:
		return no(NotNear, "the sandbox must be on node %s", some(ask.Near))
	case notApart:
		return no(NotApart, "the sandbox must not be on node %s, where others are that it keeps apart from", n.ID)
	case refused:
		return refusal(n.ID, ask.Exclude[n.ID])
	case ruledOut:
		return no(RuledOut, "%s", ruleInWords(n, ask.Entry))
	case silent:
		return no(Silent, "the node %s; its sandboxes may well go on, but new ones go elsewhere", or(n.Problem, "does not answer"))
	case draining:
		return no(Draining, "the node is stopping and takes no new sandboxes")
	case cordoned:
		return no(Cordoned, "an operator keeps new sandboxes away from the node")
	case notReady:
		return no(NotReady, "the node is not ready: %s", or(n.Problem, "it did not say why"))
	case wrongArch:
		return no(WrongArch, "the image is for %s and the node is %s", ask.Arch, n.Arch)
	case lacksLabels:
		return no(NoLabels, "%s", labelsInWords(n, ask))
	case weakIsolation:
		return no(NoIsolation, "%s", isolationInWords(n, ask))
	case noRuntime:
		return no(NoRuntime, "the node has no runtime %q (it has %q)", or(ask.Runtime, n.Default), n.Runtimes)
	}
	r := roomOf(n, ask)
	return r.explain(v, n, no)
}

func (r *room) explain(v verdict, n *NodeState, no func(Reason, string, ...any) *Rejection) *Rejection {
	switch v {
	case tooMuchMemory:
		return no(TooLarge, "it asks for %s of memory and the node has %s for sandboxes in all", mib(r.memory), mib(r.usable.MemoryBytes))
	case moreCPUsThanThere:
		return no(TooLarge, "it asks for %s CPUs and the node has %s", num(r.cpus), num(n.Total.CPUs))
	case moreCPUsThanUsable:
		return no(TooLarge, "it asks for %s CPUs and the node has %s for sandboxes in all", num(r.cpus), num(r.usable.CPUs))
	case asManyAsMay:
		return no(NoRoom, "the node holds %d sandboxes, which is as many as it may", r.held)
	case noMemory:
		return no(NoMemory, "it asks for %s of memory and the node has %s left of %s", mib(r.memory), mib(max(0, r.freeMemory)), mib(r.usable.MemoryBytes))
	default:
		return no(NoCPU, "it asks for %s CPUs and the node has %s left of %s", num(r.cpus), num(max(0, r.freeCPUs)), num(r.usable.CPUs))
	}
}

func refusal(id boxed.NodeID, err error) *Rejection {
	r := &Rejection{Node: id, Reason: Refused, Message: "it refused", refused: boxed.CodeOf(err)}
	if err != nil {
		r.Message += ": " + boxed.AsError(err).Message
	}
	return r
}

func ruleInWords(n *NodeState, entry boxed.NodeID) string {
	switch n.Place {
	case boxed.PlaceNever:
		return "the node takes no sandboxes (its rule is place = never)"
	case boxed.PlaceOwn:
		return fmt.Sprintf("the node takes only sandboxes that are asked of itself (its rule is place = own), and this one was asked of %s", or(string(entry), "another"))
	}
	return fmt.Sprintf("the node has the rule place = %q, which this release does not know", n.Place)
}

func labelsInWords(n *NodeState, ask *Ask) string {
	var needs, has []string
	for _, k := range slices.Sorted(maps.Keys(ask.Labels)) {
		switch v, ok := n.Labels[k]; {
		case !ok:
			has = append(has, "no label "+k)
		case v != ask.Labels[k]:
			has = append(has, k+"="+v)
		default:
			continue
		}
		needs = append(needs, k+"="+ask.Labels[k])
	}
	return fmt.Sprintf("it needs a node with %s, and the node has %s", some(needs), some(has))
}

// some lists the first few: there may be hundreds.
func some[S ~string](names []S) string {
	const few = 5
	var b strings.Builder
	for i, name := range names[:min(few, len(names))] {
		switch {
		case i > 0 && i == len(names)-1:
			b.WriteString(" or ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(string(name))
	}
	if len(names) > few {
		fmt.Fprintf(&b, " or %d more", len(names)-few)
	}
	return b.String()
}

func mib(n int64) string { return strconv.FormatInt(n/boxed.MiB, 10) + " MiB" }

func num(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

func or(s, fallback string) string {
	if s != "" {
		return s
	}
	return fallback
}
