package scheduler_test

import (
	"crypto/ed25519"
	"slices"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

var noon = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// herd is many entries that place at once, each from the same snapshot, which
// nobody renews, and each with a Ledger of its own.
type herd struct {
	nodes   []scheduler.NodeState
	entries int
	each    int
	ask     scheduler.Ask
	warm    int // of each node
}

// realID is one such as nodes have: where it stands in the ring is by chance.
func realID(seed byte, i int) boxed.NodeID {
	key := make([]byte, ed25519.PublicKeySize)
	key[0], key[1], key[2] = seed, byte(i), byte(i>>8)
	return boxed.NodeIDOf(key)
}

func cluster(seed byte, sizes ...int64) []scheduler.NodeState {
	var nodes []scheduler.NodeState
	for i, gibs := range sizes {
		nodes = append(nodes, node(string(realID(seed, i)), func(n *scheduler.NodeState) {
			n.Total = boxed.Capacity{MemoryBytes: gibs * gib, CPUs: float64(gibs) / 4}
		}))
	}
	return nodes
}

// place gives how many sandboxes each node got. The entries take turns.
func (h herd) place(t *testing.T) map[boxed.NodeID]int {
	t.Helper()
	ledgers := make([]scheduler.Ledger, h.entries)
	got := map[boxed.NodeID]int{}
	for range h.each {
		for e := range h.entries {
			ask := h.ask
			ask.Entry = h.nodes[e].ID
			view := slices.Clone(h.nodes)
			for i := range view {
				view[i].Warm = h.warm
				ledgers[e].Apply(&view[i], ask, noon, noon)
			}
			c, err := scheduler.Place(view, ask)
			if err != nil {
				t.Fatal(err)
			}
			ledgers[e].Placed(c.Node, ask, noon)
			got[c.Node]++
		}
	}
	return got
}

// What one entry places, and what all do at once, comes out even, although none
// sees what the others do.
func TestEntriesThatSeeTheSameStaleSnapshotSpread(t *testing.T) {
	arrivals := map[string]struct{ entries, each int }{
		"20 entries":     {20, 10},
		"5 entries":      {5, 40},
		"1 entry":        {1, 200},
		"20, 3 each":     {20, 3},
		"20, one at all": {20, 1},
	}
	meshes := map[string][]int64{
		"equal":           sizes(20, 64),
		"three sizes":     sizes(20, 16, 32, 64),
		"one large":       append(sizes(19, 16), 128),
		"three, in order": append(append(sizes(7, 16), sizes(7, 32)...), sizes(6, 64)...),
	}
	asks := map[string]scheduler.Ask{
		"tiny":    ask(64*boxed.MiB, 0.1),
		"default": ask(512*boxed.MiB, 1),
		"large":   ask(gib+gib/2, 1),
	}
	for arrival, by := range arrivals {
		for mesh, of := range meshes {
			for size, a := range asks {
				for _, warm := range []int{0, 4} {
					for seed := range byte(4) {
						h := herd{nodes: cluster(seed, of...), entries: by.entries, each: by.each, ask: a, warm: warm}
						h.check(t, arrival+", "+mesh+", "+size)
					}
				}
			}
		}
	}
}

// check allows each node half as much again as its due, and where there are but
// few sandboxes, one or two more: there are no halves.
func (h herd) check(t *testing.T, name string) {
	t.Helper()
	got := h.place(t)
	var all float64
	for _, n := range h.nodes {
		all += float64(n.Total.MemoryBytes)
	}
	for _, n := range h.nodes {
		due := float64(h.entries*h.each) * float64(n.Total.MemoryBytes) / all
		most := 1.5 * due
		if h.entries*h.each < 200 {
			most += 1.5
		}
		if float64(got[n.ID]) > most {
			t.Errorf("%s, %d warm: a node of %d GiB got %d, and its due is %.1f", name, h.warm, n.Total.MemoryBytes/gib, got[n.ID], due)
		}
	}
}

// Hundreds of nodes that are about as full, of which a few are emptier: were these
// the choice of all, they would get everything (bench/sim, 5,000 nodes at 90 % load).
func TestTheEmptiestFewDoNotGetItAll(t *testing.T) {
	nodes := cluster(3, sizes(300, 64)...)
	for i := range nodes {
		share := 0.80 + float64(i%10)/100
		if i%50 == 0 {
			share = 0.55
		}
		nodes[i].Used.MemoryBytes = int64(share * float64(nodes[i].Usable().MemoryBytes))
	}
	h := herd{nodes: nodes, entries: 300, each: 1, ask: ask(gib, 0.1)}
	for id, got := range h.place(t) {
		if got > 15 { // a turn is that of the next node which is not among the fuller half
			t.Errorf("node %s got %d of 300", id, got)
		}
	}
}

// One node of ten has the image: it gets more, but not all until it is full.
func TestANodeWithTheImageIsNotFilledUp(t *testing.T) {
	nodes := cluster(4, sizes(10, 16)...)
	nodes[3].Images = map[string]bool{"python:3.12": true}
	a := ask(gib, 0.1)
	a.Image = "python:3.12"
	h := herd{nodes: nodes, entries: 1, each: 60, ask: a}
	got := h.place(t)
	if with := got[nodes[3].ID]; with < 5 || with > 10 {
		t.Errorf("the node with the image got %d of 60, which is %d of its 14", with, with)
	}
	for _, n := range nodes {
		if got[n.ID] < 4 {
			t.Errorf("node %s got %d", n.ID, got[n.ID])
		}
	}
}
