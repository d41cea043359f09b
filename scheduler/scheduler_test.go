package scheduler_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

const gib = 1024 * boxed.MiB

// node is a ready machine of 10 GiB and 4 CPUs, of which 9 GiB and 14.4 CPUs
// may be promised.
func node(id string, change ...func(*scheduler.NodeState)) scheduler.NodeState {
	n := scheduler.NodeState{
		ID: boxed.NodeID(id), Arch: "amd64", Runtimes: []string{"runc", "runsc"}, Default: "runc", Ready: true,
		Total: boxed.Capacity{MemoryBytes: 10 * gib, CPUs: 4}, Policy: scheduler.DefaultPolicy(),
	}
	for _, c := range change {
		c(&n)
	}
	return n
}

func used(memory int64, cpus float64, sandboxes int) func(*scheduler.NodeState) {
	return func(n *scheduler.NodeState) {
		n.Used = boxed.Capacity{MemoryBytes: memory, CPUs: cpus, Sandboxes: sandboxes}
	}
}

func labelled(kv ...string) func(*scheduler.NodeState) {
	return func(n *scheduler.NodeState) {
		n.Labels = map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			n.Labels[kv[i]] = kv[i+1]
		}
	}
}

func rule(r boxed.PlaceRule) func(*scheduler.NodeState) {
	return func(n *scheduler.NodeState) { n.Place = r }
}

func ask(memory int64, cpus float64) scheduler.Ask {
	return scheduler.Ask{Limits: boxed.Limits{MemoryBytes: memory, CPUs: cpus}}
}

func TestFits(t *testing.T) {
	for name, tc := range map[string]struct {
		node   scheduler.NodeState
		ask    scheduler.Ask
		reason scheduler.Reason // "": it fits
		says   string
	}{
		"an empty node":            {node("a"), ask(512*boxed.MiB, 1), "", ""},
		"all that may be promised": {node("a"), ask(9*gib, 4), "", ""},
		"what the reserve holds":   {node("a"), ask(9*gib+1, 1), scheduler.TooLarge, "9216 MiB for sandboxes in all"},
		"more CPUs than there are": {node("a"), ask(gib, 4.5), scheduler.TooLarge, "4.5 CPUs and the node has 4"},
		"the last of the memory":   {node("a", used(8*gib, 1, 8)), ask(gib, 1), "", ""},
		"beyond the memory":        {node("a", used(8*gib, 1, 8)), ask(gib+1, 1), scheduler.NoMemory, "1024 MiB left of 9216 MiB"},
		"the last of the CPUs":     {node("a", used(gib, 13.4, 8)), ask(gib, 1), "", ""},
		"beyond the CPUs":          {node("a", used(gib, 13.5, 8)), ask(gib, 1), scheduler.NoCPU, "0.9 left of 14.4"},
		"sums of tenths":           {node("a", used(gib, 14.1, 8)), ask(gib, 0.3), "", ""},
		"as many as it may":        {node("a", used(0, 0, 8), func(n *scheduler.NodeState) { n.Total.Sandboxes = 8 }), ask(gib, 1), scheduler.NoRoom, "8 sandboxes"},
		"one fewer than it may":    {node("a", used(0, 0, 7), func(n *scheduler.NodeState) { n.Total.Sandboxes = 8 }), ask(gib, 1), "", ""},
		"room that warm ones hold": {node("a", used(9*gib, 14.4, 9), func(n *scheduler.NodeState) {
			n.Idle = boxed.Capacity{MemoryBytes: gib, CPUs: 1, Sandboxes: 1}
			n.Total.Sandboxes = 9
		}), ask(gib, 1), "", ""},
		"no over-commit of CPUs":    {node("a", used(gib, 3, 3), func(n *scheduler.NodeState) { n.Policy.CPUOvercommit = 1 }), ask(gib, 1), scheduler.NoCPU, "0.6 left of 3.6"},
		"over-commit of memory":     {node("a", used(9*gib, 1, 9), func(n *scheduler.NodeState) { n.Policy.MemoryOvercommit = 2 }), ask(gib, 1), "", ""},
		"draining":                  {node("a", func(n *scheduler.NodeState) { n.Draining = true }), ask(1, 1), scheduler.Draining, "stopping"},
		"cordoned":                  {node("a", func(n *scheduler.NodeState) { n.Cordoned = true }), ask(1, 1), scheduler.Cordoned, "operator"},
		"not ready, whatever else":  {node("a", func(n *scheduler.NodeState) { n.Ready, n.Problem, n.Default = false, "docker is down", "" }), ask(100*gib, 1), scheduler.NotReady, "docker is down"},
		"a runtime that it has":     {node("a"), scheduler.Ask{Runtime: "runsc"}, "", ""},
		"a runtime that it has not": {node("a"), scheduler.Ask{Runtime: "kata"}, scheduler.NoRuntime, `no runtime "kata"`},
		"no runtime that works":     {node("a", func(n *scheduler.NodeState) { n.Default = "" }), ask(1, 1), scheduler.NoRuntime, ""},
		"an image of another kind":  {node("a"), scheduler.Ask{Arch: "arm64"}, scheduler.WrongArch, "arm64"},
		"isolation enough":          {node("a"), scheduler.Ask{Isolation: "gvisor"}, "", ""},
		"isolation beyond it":       {node("a"), scheduler.Ask{Isolation: "vm"}, scheduler.NoIsolation, `isolation vm and the node's runtimes ["runc" "runsc"]`},
		"isolation of no kind":      {node("a"), scheduler.Ask{Isolation: "faraday"}, scheduler.NoIsolation, "faraday"},
		"isolation against runtime": {node("a"), scheduler.Ask{Isolation: "gvisor", Runtime: "runc"}, scheduler.NoIsolation, "leave one of them out"},
		"isolation and its runtime": {node("a"), scheduler.Ask{Isolation: "gvisor", Runtime: "kata"}, scheduler.NoRuntime, `no runtime "kata"`},
		"labels that it has":        {node("a", labelled("zone", "b", "gpu", "yes")), scheduler.Ask{Labels: map[string]string{"gpu": "yes"}}, "", ""},
		"labels that it has not": {
			node("a", labelled("zone", "b")),
			scheduler.Ask{Labels: map[string]string{"zone": "c", "gpu": "yes"}},
			scheduler.NoLabels, "needs a node with gpu=yes or zone=c, and the node has no label gpu or zone=b",
		},
		"near, and it is":           {node("a"), scheduler.Ask{Near: []boxed.NodeID{"b", "a"}}, "", ""},
		"near, and it is not":       {node("a"), scheduler.Ask{Near: []boxed.NodeID{"b", "c"}}, scheduler.NotNear, "on node b or c"},
		"near too many to name":     {node("a"), scheduler.Ask{Near: []boxed.NodeID{"b", "c", "d", "e", "f", "g", "h"}}, scheduler.NotNear, "b, c, d, e, f or 2 more"},
		"apart, and it is":          {node("a"), scheduler.Ask{Apart: []boxed.NodeID{"b"}}, "", ""},
		"apart, and it is not":      {node("a"), scheduler.Ask{Apart: []boxed.NodeID{"b", "a"}}, scheduler.NotApart, "not be on node a"},
		"takes any":                 {node("a", rule(boxed.PlaceAny)), scheduler.Ask{Entry: "b"}, "", ""},
		"takes its own, is own":     {node("a", rule(boxed.PlaceOwn)), scheduler.Ask{Entry: "a"}, "", ""},
		"takes its own, is not":     {node("a", rule(boxed.PlaceOwn)), scheduler.Ask{Entry: "b"}, scheduler.RuledOut, "asked of b"},
		"takes its own, unknown":    {node("a", rule(boxed.PlaceOwn)), scheduler.Ask{}, scheduler.RuledOut, "asked of another"},
		"takes none":                {node("a", rule(boxed.PlaceNever)), scheduler.Ask{Entry: "a", Node: "a"}, scheduler.RuledOut, "takes no sandboxes"},
		"a rule of the future":      {node("a", rule("moonlit")), scheduler.Ask{Entry: "a"}, scheduler.RuledOut, "moonlit"},
		"silent, whatever else":     {node("a", func(n *scheduler.NodeState) { n.Silent, n.Ready = true, false }), ask(1, 1), scheduler.Silent, "does not answer"},
		"it said no before":         {node("a"), scheduler.Ask{Exclude: map[boxed.NodeID]error{"a": boxed.Errorf(boxed.CodeExhausted, "all full")}}, scheduler.Refused, "it refused: all full"},
		"it said no, no matter why": {node("a"), scheduler.Ask{Exclude: map[boxed.NodeID]error{"a": nil}}, scheduler.Refused, "it refused"},
		"another said no":           {node("a"), scheduler.Ask{Exclude: map[boxed.NodeID]error{"b": nil}}, "", ""},
		"what it says it may promise": {
			node("a", func(n *scheduler.NodeState) { n.Capacity = boxed.Capacity{MemoryBytes: 2 * gib, CPUs: 8} }), ask(3*gib, 1),
			scheduler.TooLarge, "2048 MiB for sandboxes in all",
		},
		"pinned here":               {node("a"), scheduler.Ask{Node: "a"}, "", ""},
		"pinned elsewhere":          {node("a"), scheduler.Ask{Node: "b"}, scheduler.NotPinned, "b"},
		"a node that knows nothing": {scheduler.NodeState{ID: "a", Ready: true, Runtimes: []string{"runc"}, Default: "runc"}, ask(1, 1), scheduler.TooLarge, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := scheduler.Fits(tc.node, tc.ask)
			if r == nil {
				if tc.reason != "" {
					t.Fatalf("it fits, want %s", tc.reason)
				}
				return
			}
			if r.Reason != tc.reason || !strings.Contains(r.Message, tc.says) || r.Node != tc.node.ID {
				t.Errorf("got %+v, want %s, %q", *r, tc.reason, tc.says)
			}
		})
	}
}

// It is asked of every node for every placement.
func TestFitsAllocatesNothing(t *testing.T) {
	nodes := thousand()
	a := askOfThousand(nodes[0].ID)
	if r := scheduler.Fits(nodes[10], a); r != nil {
		t.Fatal(r.Message)
	}
	if n := testing.AllocsPerRun(100, func() { scheduler.Fits(nodes[10], a) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestTheErrorSaysWhetherWaitingHelps(t *testing.T) {
	down := func(n *scheduler.NodeState) { n.Ready = false }
	full := used(9*gib, 4, 9)
	silent := func(n *scheduler.NodeState) { n.Silent = true }
	kata := scheduler.Ask{Runtime: "kata"}
	near := ask(gib, 1)
	near.Near = []boxed.NodeID{"b"}
	refusedBy := func(a, b boxed.Code) scheduler.Ask {
		return scheduler.Ask{Exclude: map[boxed.NodeID]error{"a": boxed.Errorf(a, "no"), "b": boxed.Errorf(b, "no")}}
	}
	for name, tc := range map[string]struct {
		nodes []scheduler.NodeState
		ask   scheduler.Ask
		code  boxed.Code
		field string
	}{
		"nothing is there":           {nil, ask(1, 1), boxed.CodeNotReady, ""},
		"the only node is full":      {[]scheduler.NodeState{node("a", full)}, ask(gib, 1), boxed.CodeExhausted, ""},
		"the only node is down":      {[]scheduler.NodeState{node("a", down)}, ask(gib, 1), boxed.CodeNotReady, ""},
		"the only node is too small": {[]scheduler.NodeState{node("a")}, ask(20*gib, 1), boxed.CodeUnavailable, "limits"},
		"no node has the runtime":    {[]scheduler.NodeState{node("a"), node("b")}, kata, boxed.CodeUnavailable, ""},
		"one full, one without":      {[]scheduler.NodeState{node("a", full), node("b", func(n *scheduler.NodeState) { n.Runtimes = nil })}, ask(gib, 1), boxed.CodeExhausted, ""},
		"one down, one without":      {[]scheduler.NodeState{node("a", down), node("b")}, kata, boxed.CodeNotReady, ""},
		"pinned to one that is full": {[]scheduler.NodeState{node("a", full), node("b")}, scheduler.Ask{Node: "a", Limits: boxed.Limits{MemoryBytes: gib, CPUs: 1}}, boxed.CodeExhausted, ""},
		"pinned to one not there":    {[]scheduler.NodeState{node("b")}, scheduler.Ask{Node: "a"}, boxed.CodeNotFound, "node"},
		"one silent, one without":    {[]scheduler.NodeState{node("a", silent), node("b")}, kata, boxed.CodeNotReady, ""},
		"no node isolates as much":   {[]scheduler.NodeState{node("a"), node("b")}, scheduler.Ask{Isolation: "vm"}, boxed.CodeUnavailable, "placement.isolation"},
		"all are too small":          {[]scheduler.NodeState{node("a"), node("b")}, ask(20*gib, 1), boxed.CodeUnavailable, "limits"},
		"no node has the label":      {[]scheduler.NodeState{node("a"), node("b")}, scheduler.Ask{Labels: map[string]string{"gpu": "yes"}}, boxed.CodeUnavailable, "placement.node_labels"},
		"none may be on its own":     {[]scheduler.NodeState{node("a"), node("b")}, scheduler.Ask{Apart: []boxed.NodeID{"a", "b"}}, boxed.CodeUnavailable, "placement.apart"},
		"near to one that is full":   {[]scheduler.NodeState{node("a"), node("b", full)}, near, boxed.CodeExhausted, ""},
		"near to one not there":      {[]scheduler.NodeState{node("a"), node("c")}, near, boxed.CodeUnavailable, "placement.near"},
		"none takes what is placed":  {[]scheduler.NodeState{node("a", rule(boxed.PlaceNever)), node("b", rule(boxed.PlaceOwn))}, ask(1, 1), boxed.CodeUnavailable, ""},
		"the only node refused":      {[]scheduler.NodeState{node("a")}, scheduler.Ask{Exclude: map[boxed.NodeID]error{"a": boxed.Errorf(boxed.CodeQuota, "you have 3")}}, boxed.CodeQuota, ""},
		"all refused alike":          {[]scheduler.NodeState{node("a"), node("b")}, refusedBy(boxed.CodeImage, boxed.CodeImage), boxed.CodeImage, ""},
		"one refused for want":       {[]scheduler.NodeState{node("a"), node("b")}, refusedBy(boxed.CodeImage, boxed.CodeExhausted), boxed.CodeExhausted, ""},
		"refused, by a fault of its": {[]scheduler.NodeState{node("a"), node("b")}, refusedBy(boxed.CodeInternal, boxed.CodeInternal), boxed.CodeNotReady, ""},
	} {
		t.Run(name, func(t *testing.T) {
			choice, err := scheduler.Place(tc.nodes, tc.ask)
			id, rejected := choice.Node, choice.Rejected()
			if id != "" || !errors.Is(err, tc.code) || len(rejected) != len(tc.nodes) {
				t.Errorf("got %q, %v, %v; want %s", id, rejected, err, tc.code)
			}
			e := boxed.AsError(err)
			if tc.field != "" && e.Field() != tc.field {
				t.Errorf("the field is %q, want %q", e.Field(), tc.field)
			}
			if got, ok := e.Detail["nodes"].([]scheduler.Rejection); !ok || len(got) != len(tc.nodes) {
				t.Errorf("the detail has %v", e.Detail["nodes"])
			}
		})
	}
}
