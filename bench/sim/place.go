package main

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// tactics is how a node is chosen. The zero one is boxed's own: scheduler.Place
// on what the entry has heard and what its Ledger remembers.
type tactics struct {
	bestFit bool // a packer that knows the truth
	// remember leaves out a node that has refused until it tells of itself again.
	remember bool
	// sample shows Place only so many nodes, drawn anew each time (0: all).
	sample int
	// level is the part of the nodes that count as equally full: who is emptier
	// than the fullest of these counts as full as that.
	level float64
}

// entry is what a node remembers of what it placed.
type entry struct {
	ledger  scheduler.Ledger
	recent  []int                 // nodes that are in the ledger, perhaps
	refused map[int]time.Duration // nodes, and when they did
}

// tally is what came of the asks that were counted.
type tally struct {
	arrived int
	tries   [maxTries + 1]int // asks that were admitted by the so-many-th node that was asked
	nowhere int               // asks for which the entry knew of no node, at whatever try
	tired   int               // asks that were refused by as many nodes as are asked
	needed  int               // of both: those for which some node had room
	missed  misses

	loads, fullest, busiest, ages []float64
	large                         [2]int // asks for 4 GiB and more: admitted at the first try, of all
}

// misses are first tries that were refused, by what the node was like.
type misses struct{ gone, back, warm, large, other int }

func (m misses) sum() int { return m.gone + m.back + m.warm + m.large + m.other }

const largeAsk = 4 << 30

var errFull = boxed.Errorf(boxed.CodeExhausted, "the node is full")

// arrive places one sandbox. What is asked, where and for how long does not hang
// on how it is placed.
func (w *world) arrive() {
	ask, life, e := w.demand.draw(w.chance), w.life.draw(w.chance), w.entry()
	if w.counting {
		w.arrived++
		if w.asks[ask].Limits.MemoryBytes >= largeAsk {
			w.large[1]++
		}
	}
	if w.tactics.bestFit {
		w.pack(ask, life)
		return
	}
	a := w.asks[ask]
	a.Entry = w.hosts[e].state.ID
	var refused map[boxed.NodeID]error
	for try := 1; try <= maxTries; try++ {
		a.Exclude = refused
		i, warm, ok := w.choose(e, try, a)
		if !ok {
			w.refuse(ask, &w.nowhere)
			return
		}
		if w.try(e, i, ask, a, life) {
			w.admitted(try, ask)
			return
		}
		if try == 1 {
			w.miss(i, ask, warm)
		}
		if refused == nil {
			refused = map[boxed.NodeID]error{}
		}
		refused[w.hosts[i].state.ID] = errFull
	}
	w.refuse(ask, &w.tired)
}

// entry is a node that is asked: by the scene's skew, and never one that is down.
func (w *world) entry() int {
	for {
		i := w.chance.IntN(w.nodes)
		if w.skewed && w.chance.Float64() < 0.75 { // 0.25 × 20 % + 0.75 = 80 %
			i = (i / 5) * 5
		}
		if !w.hosts[i].down {
			return i
		}
	}
}

// try asks a node, which judges by its own books, and keeps the entry's Ledger as
// node does.
func (w *world) try(e, i, ask int, a scheduler.Ask, life time.Duration) bool {
	en := &w.entries[e]
	var placed scheduler.Placement
	if e != i {
		placed = en.ledger.Placed(w.hosts[i].state.ID, a, start.Add(w.now))
	}
	a.Exclude = nil
	if scheduler.Fits(w.truth(i), a) != nil {
		if e != i {
			en.ledger.Withdraw(placed)
		}
		if w.tactics.remember {
			if en.refused == nil {
				en.refused = map[int]time.Duration{}
			}
			en.refused[i] = w.now
		}
		return false
	}
	w.admit(i, ask, life)
	if h := &w.hosts[i]; ask == 0 && h.warm > 0 {
		h.warm--
	}
	w.changed(i)
	if e != i {
		en.ledger.Admitted(placed, start.Add(w.now))
		if !slices.Contains(en.recent, i) {
			en.recent = append(en.recent, i)
		}
	}
	return true
}

// choose is Place, on what the entry knows, which later tries share with the first.
// warm says that the node seemed to have a warm sandbox for it.
func (w *world) choose(e, try int, a scheduler.Ask) (i int, warm, ok bool) {
	if try == 1 {
		w.shown = w.look(e, a)
		w.remembered(e, w.shown, a)
		if w.counting && w.arrived%64 == 0 {
			k := w.dice.IntN(w.nodes)
			w.ages = append(w.ages, (w.now - w.toldAt[k]).Seconds())
		}
		w.shown = w.tactics.apply(w, w.shown, a)
	}
	choice, err := scheduler.Place(w.shown, a)
	if err != nil && w.tactics.sample > 0 { // all may know what a few do not
		w.shown = w.look(e, a)
		w.remembered(e, w.shown, a)
		choice, err = scheduler.Place(w.shown, a)
	}
	if err != nil {
		return 0, false, false
	}
	i = w.index[choice.Node]
	return i, w.view[e+w.ring(e, i)].Warm > 0, true
}

// ring is how far a node is from an entry, in the order of IDs.
func (w *world) ring(e, i int) int {
	if i < e {
		return i - e + w.nodes
	}
	return i - e
}

// remembered applies the entry's Ledger where there is something in it.
func (w *world) remembered(e int, view []scheduler.NodeState, a scheduler.Ask) {
	en := &w.entries[e]
	en.recent = slices.DeleteFunc(en.recent, func(i int) bool {
		k := w.ring(e, i)
		en.ledger.Apply(&view[k], a, start.Add(w.toldAt[i]), start.Add(w.now))
		return view[k].Recent.Sandboxes == 0
	})
	for i, at := range en.refused {
		k := w.ring(e, i)
		if w.toldAt[i] > at {
			delete(en.refused, i)
			continue
		}
		view[k].Silent = true
	}
}

// apply changes what Place sees.
func (t tactics) apply(w *world, view []scheduler.NodeState, a scheduler.Ask) []scheduler.NodeState {
	if t.level > 0 {
		t.flatten(view, a)
	}
	if t.sample > 0 && t.sample < len(view) {
		few := make([]scheduler.NodeState, 0, t.sample)
		for range t.sample {
			k := w.dice.IntN(len(view))
			if !slices.ContainsFunc(few, func(n scheduler.NodeState) bool { return n.ID == view[k].ID }) {
				few = append(few, view[k])
			}
		}
		return few
	}
	return view
}

// flatten makes the emptiest nodes with room count as full as the fullest of them.
func (t tactics) flatten(view []scheduler.NodeState, a scheduler.Ask) {
	const steps = 1000
	var full [steps + 1]int
	fit := 0
	for k := range view {
		if n := &view[k]; scheduler.Fits(*n, a) == nil {
			full[steps*n.Used.MemoryBytes/n.Capacity.MemoryBytes]++
			fit++
		}
	}
	floor := 0
	for below := full[0]; floor < steps && float64(below) < t.level*float64(fit); below += full[floor] {
		floor++
	}
	for k := range view {
		n := &view[k]
		most := n.Capacity.MemoryBytes - a.Limits.MemoryBytes // with which it still fits
		if want := min(most, n.Capacity.MemoryBytes*int64(floor)/steps); n.Used.MemoryBytes < want {
			n.Used.MemoryBytes = want
		}
	}
}

// pack places on the fullest node that has room, by the truth.
func (w *world) pack(ask int, life time.Duration) {
	best, least := -1, int64(math.MaxInt64)
	for i := range w.hosts {
		h := &w.hosts[i]
		if free := h.usable.MemoryBytes - h.used.MemoryBytes; free < least && !h.down && free >= w.asks[ask].Limits.MemoryBytes && w.fits(i, ask) {
			best, least = i, free
		}
	}
	if best < 0 {
		w.refuse(ask, &w.nowhere)
		return
	}
	w.admit(best, ask, life)
	w.changed(best)
	w.admitted(1, ask)
}

func (w *world) admitted(try, ask int) {
	if !w.counting {
		return
	}
	w.tries[try]++
	if try == 1 && w.asks[ask].Limits.MemoryBytes >= largeAsk {
		w.large[0]++
	}
}

// refuse counts an ask that nobody took, and whether somebody could have.
func (w *world) refuse(ask int, why *int) {
	if !w.counting {
		return
	}
	*why++
	if w.room(ask) {
		w.needed++
	}
}

// miss counts a first try that was refused, by what explains it best.
func (w *world) miss(i, ask int, warm bool) {
	if !w.counting {
		return
	}
	h, m := &w.hosts[i], &w.missed
	switch {
	case h.down:
		m.gone++
	case h.life > 0 && w.now-h.back < 2*w.stale+summaryAge:
		m.back++
	case warm:
		m.warm++
	case w.asks[ask].Limits.MemoryBytes >= largeAsk:
		m.large++
	default:
		m.other++
	}
}

// sample looks at all nodes.
func (w *world) sample() {
	var used, usable, fullest, busiest float64
	for i := range w.hosts {
		h := &w.hosts[i]
		if h.down {
			continue
		}
		used += float64(h.used.MemoryBytes)
		usable += float64(h.usable.MemoryBytes)
		fullest = max(fullest, w.fullness(i))
		busiest = max(busiest, float64(h.used.Sandboxes))
	}
	w.loads = append(w.loads, used/usable)
	w.fullest = append(w.fullest, fullest/(used/usable))
	w.busiest = append(w.busiest, busiest)
}

// check says what is wrong with a world: sandboxes that came from nowhere, were
// lost without a count, or have more room than there is.
func (w *world) check() error {
	there := 0
	for i := range w.hosts {
		h := &w.hosts[i]
		there += h.used.Sandboxes
		if h.used.MemoryBytes < 0 || h.used.MemoryBytes > h.usable.MemoryBytes || h.used.CPUs > h.usable.CPUs+1e-6 {
			return errors.New("a node has promised what it has not")
		}
	}
	if there != w.live || w.placed != w.live+w.ended+w.lost {
		return errors.New("sandboxes were lost without a count, or came from nowhere")
	}
	if got := w.tries[1] + w.tries[2] + w.tries[3] + w.tries[4] + w.nowhere + w.tired; got != w.arrived {
		return errors.New("not every ask has an answer")
	}
	return nil
}

// first is the share of asks that the first node took which was asked.
func (t tally) first() float64 { return float64(t.tries[1]) / float64(t.arrived) }
