package scheduler_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

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

func TestPlacePrefersWarmThenTheLeastFullThenTheName(t *testing.T) {
	warm := func(n *scheduler.NodeState) { n.Warm = 1 }
	for name, tc := range map[string]struct {
		nodes []scheduler.NodeState
		want  string
		why   map[string]scheduler.Reason
	}{
		"warm":          {[]scheduler.NodeState{node("a"), node("b", used(8*gib, 8, 8), warm)}, "b", map[string]scheduler.Reason{"a": scheduler.OtherBetter}},
		"warm but full": {[]scheduler.NodeState{node("a"), node("b", used(9*gib, 8, 8), warm)}, "a", map[string]scheduler.Reason{"b": scheduler.NoMemory}},
		"by memory":     {[]scheduler.NodeState{node("a", used(4*gib, 1, 4)), node("b", used(3*gib, 1, 3))}, "b", map[string]scheduler.Reason{"a": scheduler.OtherBetter}},
		"by CPUs":       {[]scheduler.NodeState{node("a", used(gib, 12, 4)), node("b", used(3*gib, 1, 3))}, "b", map[string]scheduler.Reason{"a": scheduler.OtherBetter}},
		"by name":       {[]scheduler.NodeState{node("c"), node("b"), node("a")}, "a", map[string]scheduler.Reason{"b": scheduler.OtherBetter, "c": scheduler.OtherBetter}},
	} {
		t.Run(name, func(t *testing.T) {
			got, rejected, err := scheduler.Place(tc.nodes, ask(gib, 1))
			if err != nil || string(got) != tc.want {
				t.Errorf("got %s, %v; want %s", got, err, tc.want)
			}
			why := map[string]scheduler.Reason{}
			for _, r := range rejected {
				why[string(r.Node)] = r.Reason
			}
			if diff := cmp.Diff(tc.why, why); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTheErrorSaysWhetherWaitingHelps(t *testing.T) {
	down := func(n *scheduler.NodeState) { n.Ready = false }
	full := used(9*gib, 4, 9)
	kata := scheduler.Ask{Runtime: "kata"}
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
	} {
		t.Run(name, func(t *testing.T) {
			id, rejected, err := scheduler.Place(tc.nodes, tc.ask)
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

func drawNode(t *rapid.T, id string) scheduler.NodeState {
	n := scheduler.NodeState{
		ID: boxed.NodeID(id), Arch: rapid.SampledFrom([]string{"amd64", "arm64"}).Draw(t, "arch"),
		Runtimes: rapid.SampledFrom([][]string{nil, {"runc"}, {"runc", "runsc"}}).Draw(t, "runtimes"), Default: "runc",
		Ready: rapid.IntRange(0, 4).Draw(t, "ready") > 0, Draining: rapid.IntRange(0, 9).Draw(t, "draining") == 0, Cordoned: rapid.IntRange(0, 9).Draw(t, "cordoned") == 0,
		Total:  boxed.Capacity{MemoryBytes: rapid.Int64Range(0, 8*gib).Draw(t, "memory"), CPUs: rapid.Float64Range(0, 8).Draw(t, "cpus"), Sandboxes: rapid.IntRange(0, 20).Draw(t, "sandboxes")},
		Used:   boxed.Capacity{MemoryBytes: rapid.Int64Range(0, 8*gib).Draw(t, "used"), CPUs: rapid.Float64Range(0, 30).Draw(t, "used"), Sandboxes: rapid.IntRange(0, 20).Draw(t, "used")},
		Warm:   rapid.IntRange(0, 2).Draw(t, "warm"),
		Policy: scheduler.Policy{MemoryOvercommit: rapid.Float64Range(0.5, 2).Draw(t, "mo"), CPUOvercommit: rapid.Float64Range(0.5, 8).Draw(t, "co"), Reserve: rapid.Float64Range(0, 0.5).Draw(t, "reserve")},
	}
	return n
}

func drawAsk(t *rapid.T) scheduler.Ask {
	return scheduler.Ask{
		Limits:  boxed.Limits{MemoryBytes: rapid.Int64Range(0, 4*gib).Draw(t, "ask"), CPUs: rapid.Float64Range(0, 8).Draw(t, "ask")},
		Runtime: rapid.SampledFrom([]string{"", "runc", "runsc"}).Draw(t, "runtime"),
		Arch:    rapid.SampledFrom([]string{"", "amd64"}).Draw(t, "arch"),
		Node:    boxed.NodeID(rapid.SampledFrom([]string{"", "", "", "n1"}).Draw(t, "pin")),
	}
}

func TestPlaceAndFitsNeverDisagree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var nodes []scheduler.NodeState
		for i := range rapid.IntRange(0, 6).Draw(t, "nodes") {
			nodes = append(nodes, drawNode(t, fmt.Sprintf("n%d", i)))
		}
		ask := drawAsk(t)
		before := fmt.Sprintf("%+v", nodes)
		id, rejected, err := scheduler.Place(nodes, ask)
		if fmt.Sprintf("%+v", nodes) != before {
			t.Fatal("Place changed what it was given")
		}

		reasons := map[boxed.NodeID]scheduler.Reason{}
		for _, r := range rejected {
			if r.Message == "" || r.Reason == "" {
				t.Fatalf("no reason in %+v", r)
			}
			reasons[r.Node] = r.Reason
		}
		fits := 0
		for _, n := range nodes {
			r := scheduler.Fits(n, ask)
			switch {
			case r == nil:
				if fits++; n.ID != id && reasons[n.ID] != scheduler.OtherBetter {
					t.Fatalf("%s fits, its reason is %q", n.ID, reasons[n.ID])
				}
			case n.ID == id:
				t.Fatalf("placed on %s, which says %q", id, r.Message)
			case reasons[n.ID] != r.Reason:
				t.Fatalf("%s: Place says %q, Fits %q", n.ID, reasons[n.ID], r.Reason)
			}
		}
		if (err == nil) != (fits > 0) || (id == "") != (err != nil) {
			t.Fatalf("%d nodes fit; got %q, %v", fits, id, err)
		}
		if want := len(nodes) - min(fits, 1); len(rejected) != want || len(reasons) != want {
			t.Fatalf("%d rejections, want %d", len(rejected), want)
		}

		shuffled := rapid.Permutation(nodes).Draw(t, "order")
		again, rejectedAgain, _ := scheduler.Place(shuffled, ask)
		if again != id || !slices.Equal(rejected, rejectedAgain) {
			t.Fatalf("another order of the nodes gives %q instead of %q", again, id)
		}
	})
}

// More room never makes a sandbox fit less, and a larger sandbox never fits
// where a smaller one does not.
func TestFitsIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, ask := drawNode(t, "n1"), drawAsk(t)
		if scheduler.Fits(n, ask) != nil {
			return
		}
		better := n
		better.Total.MemoryBytes += rapid.Int64Range(0, gib).Draw(t, "+memory")
		better.Total.CPUs += rapid.Float64Range(0, 4).Draw(t, "+cpus")
		better.Used.MemoryBytes -= min(better.Used.MemoryBytes, rapid.Int64Range(0, gib).Draw(t, "-used"))
		better.Used.CPUs -= min(better.Used.CPUs, rapid.Float64Range(0, 4).Draw(t, "-used"))
		better.Used.Sandboxes = max(0, better.Used.Sandboxes-1)
		better.Warm++
		better.Runtimes = append(slices.Clone(n.Runtimes), "another")
		smaller := ask
		smaller.Limits.MemoryBytes -= min(ask.Limits.MemoryBytes, rapid.Int64Range(0, gib).Draw(t, "-ask"))
		smaller.Limits.CPUs -= min(ask.Limits.CPUs, rapid.Float64Range(0, 4).Draw(t, "-ask"))
		if r := scheduler.Fits(better, smaller); r != nil {
			t.Fatalf("a smaller sandbox on a better node: %s", r.Message)
		}
	})
}

// Admitting one after the other what fits never promises more than is usable.
func TestAdmissionNeverPromisesTooMuch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := node("a")
		n.Total.Sandboxes = rapid.IntRange(0, 12).Draw(t, "most")
		for range 30 {
			a := ask(rapid.Int64Range(0, 2*gib).Draw(t, "memory"), rapid.Float64Range(0.01, 4).Draw(t, "cpus"))
			if scheduler.Fits(n, a) != nil {
				continue
			}
			n.Used.MemoryBytes += a.Limits.MemoryBytes
			n.Used.CPUs += a.Limits.CPUs
			n.Used.Sandboxes++
		}
		usable := n.Usable()
		if n.Used.MemoryBytes > usable.MemoryBytes || n.Used.CPUs > usable.CPUs+0.05 || (n.Total.Sandboxes > 0 && n.Used.Sandboxes > n.Total.Sandboxes) {
			t.Fatalf("promised %+v of %+v", n.Used, usable)
		}
	})
}
