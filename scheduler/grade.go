package scheduler

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/boxed-mesh/boxed"
)

const (
	stepPercent = 5  // of how full a node is; a summary is seconds old
	packPercent = 85 // above, a node has no room for what its sandboxes do not use yet

	busyLoad  = 1.5 // per core; below, a machine has time for one more
	loadStep  = 0.5
	mostSteps = 100 / stepPercent // a load is never worse than a full node

	// pullPercent is how much fuller a node counts that has to pull the image. More,
	// and a few nodes that have it get all that names it until they are full; less,
	// and a mesh of three pulls each image three times for its first three sandboxes.
	pullPercent = 30

	// smallShare is the share of a node up to which a sandbox goes by turns, and
	// above which it goes where it fills less. The default limits are 14 % of a
	// machine of 4 GiB and 2 cores.
	smallShare = 0.15
)

// seat is a node that fits, in the ring of those that do.
type seat struct {
	place uint64 // from the entry on
	index int
}

// ranked gives the grades of the nodes that fit, in order of their turns.
func ranked(nodes []NodeState, ask *Ask) []grade {
	ring := seats(nodes, ask)
	grades := make([]grade, len(ring))
	for i, s := range ring {
		grades[i] = gradeOf(&nodes[s.index], ask, float64(i)/float64(len(ring)))
		grades[i].index = s.index
	}
	if ask.Strategy != Pack {
		level(grades)
	}
	return grades
}

// first is the best grade, or nil if there is none.
func first(grades []grade) *grade {
	var best *grade
	for i := range grades {
		if g := &grades[i]; best == nil || g.compare(best) < 0 {
			best = g
		}
	}
	return best
}

// level makes the emptier half of the nodes equally full, so that their turns
// decide. All entries see the same few nodes emptiest, at once and some time ago:
// going there, they would refuse nearly every sandbox of a mesh of thousands,
// as bench/sim finds. Of nodes that serve a sandbox in another way, warm or with a
// pull, each kind has a half of its own: the few that have an image are not to
// wait until the many without it are as full.
func level(grades []grade) {
	const highest = 2*mostSteps + pullPercent/stepPercent
	var held [2][2][highest + 1]int
	var count [2][2]int
	for i := range grades {
		g := &grades[i]
		held[number(g.warm)][number(g.pulls)][g.fill]++
		count[number(g.warm)][number(g.pulls)]++
	}
	var levels [2][2]int
	for w := range levels {
		for p := range levels[w] {
			for below, step := 0, 0; step <= highest && below < max(1, count[w][p]/2); step++ {
				below += held[w][p][step]
				levels[w][p] = step
			}
		}
	}
	for i := range grades {
		g := &grades[i]
		g.fill = max(g.fill, levels[number(g.warm)][number(g.pulls)])
	}
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// seats are the nodes that fit, in order of IDs from the entry on and round to
// the one before it.
func seats(nodes []NodeState, ask *Ask) []seat {
	ring := make([]seat, 0, len(nodes))
	entry := prefix(ask.Entry)
	for i := range nodes {
		if v := judge(&nodes[i], ask); v != fits {
			continue
		}
		s := seat{place: prefix(nodes[i].ID) - entry, index: i}
		if s.place == 0 && nodes[i].ID < ask.Entry {
			s.place = math.MaxUint64 // the very last
		}
		ring = append(ring, s)
	}
	slices.SortFunc(ring, func(a, b seat) int {
		if a.place != b.place { // which nearly always tells them apart, and faster
			return cmp.Compare(a.place, b.place)
		}
		return cmp.Compare(nodes[a.index].ID, nodes[b.index].ID)
	})
	return ring
}

// prefix is the first bytes of an ID as a number that sorts like it.
func prefix(id boxed.NodeID) uint64 {
	var b [8]byte
	copy(b[:], id)
	return binary.BigEndian.Uint64(b[:])
}

// grade is all that is compared of a node, in this order. Smaller is better.
type grade struct {
	warm bool // it has a warm sandbox for it
	fill int  // steps, by the strategy, with the load and with a pull
	far  uint8
	due  float64

	index   int  // of the node
	percent int  // how full it counts as, for a person
	pulls   bool // the image is not there
}

func (g *grade) compare(o *grade) int {
	switch {
	case g.warm != o.warm:
		return cmp.Compare(number(o.warm), number(g.warm))
	case g.fill != o.fill:
		return cmp.Compare(g.fill, o.fill)
	case g.far != o.far:
		return cmp.Compare(g.far, o.far)
	}
	return cmp.Compare(g.due, o.due)
}

// gradeOf grades a node that fits. Its phase is where it stands in the ring: 0
// for the entry or who comes next, up to nearly 1 for who comes just before it.
//
// Nodes of one size come up one by one round the ring: the turn is of those that
// the entry gave the fewest lately, and of these of the earliest phase. For nodes
// of many sizes the same is said in shares of a node: that which the entry gave
// out of it lately, and its phase times that which the sandbox would be of it. So
// the larger come up more often; and as each node stands at every phase for some
// entry, all entries together give each what is due to its size.
//
// That is why a small sandbox does not count in how full a node would be: all
// entries at once would find that it is least of the largest node.
//
// Pack has no turns. It goes on with the node where it is.
func gradeOf(n *NodeState, ask *Ask, phase float64) grade {
	g := grade{warm: n.Warm > 0, far: distance(n.RTT)}
	r := roomOf(n, ask)
	memory, cpus := float64(r.usable.MemoryBytes), r.usable.CPUs
	ofMemory, ofCPUs := share(float64(r.memory), memory), share(r.cpus, cpus)
	withMemory, withCPUs := share(memory-float64(r.freeMemory-r.memory), memory), share(cpus-(r.freeCPUs-r.cpus), cpus)
	full := max(withMemory, withCPUs)
	if ask.Strategy != Pack {
		full = max(withMemory-min(ofMemory, smallShare), withCPUs-min(ofCPUs, smallShare))
		lately := max(share(float64(n.Recent.MemoryBytes), memory), share(n.Recent.CPUs, cpus))
		g.due = lately + phase*max(ofMemory, ofCPUs)
	}
	g.percent = min(max(int(100*full), 0), 100)
	g.fill = g.percent / stepPercent
	if ask.Strategy == Pack && full <= packPercent/100.0 {
		g.fill = -g.fill - 2*mostSteps // before all that are above, with any load
	}
	g.fill += busySteps(n.Load)
	if g.pulls = !g.warm && ask.Image != "" && !n.Images[ask.Image]; g.pulls {
		g.fill += pullPercent / stepPercent
	}
	return g
}

func busySteps(load float64) int {
	if !(load > busyLoad) { // nor if it is not a number
		return 0
	}
	return int(math.Ceil(min((load-busyLoad)/loadStep, mostSteps)))
}

// distance is coarse: within 10 ms are a LAN, a city, and a host that is too busy to
// answer at once.
func distance(rtt time.Duration) uint8 {
	switch {
	case rtt < 10*time.Millisecond:
		return 0
	case rtt < 50*time.Millisecond:
		return 1
	case rtt < 150*time.Millisecond:
		return 2
	}
	return 3
}

// share is part of whole, within 0 and 1.
func share(part, whole float64) float64 {
	if whole <= 0 {
		return 1
	}
	return min(max(part/whole, 0), 1)
}
