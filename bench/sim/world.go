package main

import (
	"container/heap"
	"crypto/ed25519"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// Times of a world.
const (
	summaryEvery = 250 * time.Millisecond // as node has it: what has changed is told so often,
	summaryAge   = 10 * time.Second       // and what has not, so often
	noticed      = 3 * time.Second        // from a node's death until the first nodes call it silent
	refillEvery  = time.Second            // of a node's pool, one at a time
	poolSize     = 4                      // warm sandboxes of the first template, in at most a quarter of what is free
	maxTries     = 4                      // nodes that are asked for one sandbox, as node has it
)

// start is when a world begins, by everybody's clock.
var start = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// scene is what a world is made of.
type scene struct {
	nodes    int
	gibs     []int64   // sizes of nodes,
	shares   []float64 // and how many nodes in a hundred have them
	load     float64   // of the memory that nodes may promise
	stale    time.Duration
	skewed   bool // 20 % of the nodes are asked for 80 % of the sandboxes
	life     lifetimes
	failures float64 // of a node per hour
	tactics  tactics

	mesh   string // what its nodes are
	asks   int    // that are counted
	warmup time.Duration
	seed   uint64
}

// meshOf is a mesh of servers of which 1,000 hold 100,000 sandboxes at 90 % load.
func meshOf(nodes int) scene {
	s := scene{
		nodes: nodes, gibs: []int64{64, 128, 256}, shares: []float64{35, 35, 30}, mesh: "servers",
		load: 0.9, stale: 30 * time.Second, life: ordinary(), failures: 0.01, seed: 1, asks: 20_000,
	}
	if nodes > 1000 { // each placement takes long
		s.asks = 10_000
	}
	return s
}

// smallNodes is a mesh of machines that are so small that 5,000 of them hold no
// more than 100,000 sandboxes at 90 % load.
func smallNodes(nodes int) scene {
	s := meshOf(nodes)
	s.gibs, s.shares, s.mesh = []int64{16, 32, 64}, []float64{50, 35, 15}, "small"
	return s
}

// host is a node: the truth, and what it told.
type host struct {
	state  scheduler.NodeState // what does not change
	usable boxed.Capacity
	used   boxed.Capacity
	warm   int
	down   bool
	life   int           // how often it has come back
	back   time.Duration // when it last did
	refill bool          // is under way
	told   []moment      // oldest first
	phase  time.Duration // of its summaries
}

// moment is what a summary says, and from when on.
type moment struct {
	at     time.Duration
	used   boxed.Capacity
	warm   int
	silent bool
}

// world is a mesh in virtual time.
type world struct {
	scene
	now    time.Duration
	hosts  []host // by their IDs
	index  map[boxed.NodeID]int
	events agenda
	demand *demand
	chance *rand.Rand // arrivals, sizes, lifetimes and failures: alike for all tactics
	dice   *rand.Rand // what tactics throw
	asks   []scheduler.Ask

	entries []entry
	view    []scheduler.NodeState // twice the mesh, so that every entry finds it in the order of its own ring
	toldAt  []time.Duration       // when the summaries in view were told
	shown   []scheduler.NodeState // to Place, for the ask that is being placed
	rate    float64               // arrivals in a second

	live, ended, lost int
	placed            int
	counting          bool
	tally
}

// event is something that will happen.
type event struct {
	at     time.Duration
	number int // in which they were written down
	kind   eventKind
	host   int
	life   int // of the host, for which it holds
	ask    int
}

type eventKind uint8

const (
	arrives eventKind = iota
	ends
	fails
	falls // is called silent
	returns
	refills
	sampled
)

type agenda struct {
	list  []event
	count int
}

func (a *agenda) Len() int { return len(a.list) }
func (a *agenda) Less(i, j int) bool {
	if a.list[i].at != a.list[j].at {
		return a.list[i].at < a.list[j].at
	}
	return a.list[i].number < a.list[j].number
}
func (a *agenda) Swap(i, j int) { a.list[i], a.list[j] = a.list[j], a.list[i] }
func (a *agenda) Push(x any)    { a.list = append(a.list, x.(event)) }
func (a *agenda) Pop() any {
	last := a.list[len(a.list)-1]
	a.list = a.list[:len(a.list)-1]
	return last
}

func (w *world) plan(e event) {
	e.number = w.events.count
	w.events.count++
	heap.Push(&w.events, e)
}

// newWorld makes a mesh that has its load already, spread as evenly as it goes.
func newWorld(s scene) *world {
	w := &world{
		scene: s, index: map[boxed.NodeID]int{}, demand: newDemand(),
		chance: rand.New(rand.NewPCG(s.seed, 1)), dice: rand.New(rand.NewPCG(s.seed, 2)),
		hosts: make([]host, s.nodes), entries: make([]entry, s.nodes), toldAt: make([]time.Duration, s.nodes),
	}
	for _, t := range w.demand.list {
		w.asks = append(w.asks, scheduler.Ask{Limits: t.limits, Image: t.name, Arch: "amd64"})
	}
	w.makeHosts()
	w.fill()
	total := 0.0
	for i := range w.hosts {
		total += float64(w.hosts[i].usable.MemoryBytes)
	}
	w.rate = s.load * total / (w.demand.meanMemory() * s.life.mean())
	w.plan(event{at: w.wait(w.rate), kind: arrives})
	w.plan(event{at: s.warmup, kind: sampled})
	return w
}

func (w *world) makeHosts() {
	for i := range w.hosts {
		key := make([]byte, ed25519.PublicKeySize)
		binary.BigEndian.PutUint64(key, w.seed)
		binary.BigEndian.PutUint32(key[8:], uint32(i))
		gibs := w.gibs[len(w.gibs)-1]
		for k, u := 0, w.chance.Float64()*100; k < len(w.gibs); k++ {
			if u -= w.shares[k]; u < 0 {
				gibs = w.gibs[k]
				break
			}
		}
		h := &w.hosts[i]
		h.state = scheduler.NodeState{
			ID: boxed.NodeIDOf(key), Arch: "amd64", Runtimes: []string{"runc"}, Default: "runc", Ready: true, Place: boxed.PlaceAny,
			Total: boxed.Capacity{MemoryBytes: gibs * gib, CPUs: float64(gibs) / 4}, Policy: scheduler.DefaultPolicy(),
		}
		h.state.Capacity = h.state.Usable()
		h.usable = h.state.Capacity
		h.phase = time.Duration(w.chance.Int64N(int64(summaryAge)))
	}
	slices.SortFunc(w.hosts, func(a, b host) int { return strings.Compare(string(a.state.ID), string(b.state.ID)) })
	w.view = make([]scheduler.NodeState, 2*w.nodes)
	for i := range w.hosts {
		w.index[w.hosts[i].state.ID] = i
		w.view[i], w.view[i+w.nodes] = w.hosts[i].state, w.hosts[i].state
	}
}

// fill places what is there at the beginning on the least full nodes, and plans
// when it ends and when nodes fail. Some nodes are down.
func (w *world) fill() {
	for i := range w.hosts {
		const away = 360.0 / 3600 // of an hour, on average
		if w.chance.Float64() < w.failures*away/(1+w.failures*away) {
			w.hosts[i].down = true
			w.plan(event{at: seconds(600 * w.chance.Float64()), kind: returns, host: i})
		} else if w.failures > 0 {
			w.plan(event{at: w.wait(w.failures / 3600), kind: fails, host: i})
		}
	}
	want := 0.0
	order := &leastFull{w: w}
	for i := range w.hosts {
		if !w.hosts[i].down {
			want += w.load * float64(w.hosts[i].usable.MemoryBytes)
			order.list = append(order.list, i)
		}
	}
	heap.Init(order)
	for misses := 0; want > 0 && misses < 1000; {
		ask, life := w.demand.draw(w.chance), w.life.rest(w.chance)
		at := order.find(ask)
		if at < 0 {
			misses++
			continue
		}
		w.admit(order.list[at], ask, life)
		heap.Fix(order, at)
		want -= float64(w.asks[ask].Limits.MemoryBytes)
	}
	for i := range w.hosts {
		h := &w.hosts[i]
		h.warm = w.pool(i)
		h.told = []moment{{at: math.MinInt64, used: h.used, warm: h.warm, silent: h.down}}
	}
}

// leastFull is a heap of nodes.
type leastFull struct {
	w    *world
	list []int
}

func (l *leastFull) Len() int { return len(l.list) }
func (l *leastFull) Less(i, j int) bool {
	return l.w.fullness(l.list[i]) < l.w.fullness(l.list[j])
}
func (l *leastFull) Swap(i, j int) { l.list[i], l.list[j] = l.list[j], l.list[i] }
func (l *leastFull) Push(any)      {}
func (l *leastFull) Pop() any      { return nil }

// find is the place in the heap of a node with room: the least full, or one of
// the next.
func (l *leastFull) find(ask int) int {
	for at, i := range l.list {
		if l.w.fits(i, ask) {
			return at
		}
	}
	return -1
}

func (w *world) fullness(i int) float64 {
	return float64(w.hosts[i].used.MemoryBytes) / float64(w.hosts[i].usable.MemoryBytes)
}

// wait is how long until the next of events that come by chance at a rate.
func (w *world) wait(perSecond float64) time.Duration {
	return seconds(w.chance.ExpFloat64() / perSecond)
}

// truth is a node as it is.
func (w *world) truth(i int) scheduler.NodeState {
	h := &w.hosts[i]
	s := h.state
	s.Used, s.Warm, s.Silent = h.used, h.warm, h.down
	return s
}

func (w *world) fits(i, ask int) bool { return scheduler.Fits(w.truth(i), w.asks[ask]) == nil }

// room reports whether any node has room for it.
func (w *world) room(ask int) bool {
	from := w.dice.IntN(w.nodes)
	for k := range w.hosts {
		if w.fits((from+k)%w.nodes, ask) {
			return true
		}
	}
	return false
}
