package main

import (
	"container/heap"
	"context"
	"fmt"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// run lives through the scene, and says what came of it.
func (w *world) run(ctx context.Context) (tally, error) {
	for turn := 0; w.arrived < w.scene.asks && !w.plain(); turn++ {
		if turn%256 == 0 && ctx.Err() != nil {
			return w.tally, ctx.Err()
		}
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		h := &w.hosts[e.host]
		switch e.kind {
		case arrives:
			w.plan(event{at: w.now + w.wait(w.rate), kind: arrives})
			w.arrive()
		case ends:
			if h.life == e.life {
				w.end(e.host, e.ask)
			}
		case fails:
			w.fail(e.host)
		case falls:
			if h.life == e.life {
				w.tell(e.host)
			}
		case returns:
			w.comeBack(e.host)
		case refills:
			h.refill = false
			if h.warm < w.pool(e.host) {
				h.warm++
				w.tell(e.host)
			}
			w.refill(e.host)
		case sampled:
			w.counting = true
			w.sample()
			w.plan(event{at: w.now + 10*time.Second, kind: sampled})
		}
	}
	return w.tally, w.check()
}

// plain reports whether the first node takes so few that more placements would
// not say more.
func (w *world) plain() bool { return w.arrived >= 3000 && w.first() < 0.9 }

// admit writes a sandbox in a node's books. It is the one place where that is
// done, and where nothing must ever be promised twice.
func (w *world) admit(i, ask int, life time.Duration) {
	h, limits := &w.hosts[i], w.asks[ask].Limits
	h.used.MemoryBytes += limits.MemoryBytes
	h.used.CPUs += limits.CPUs
	h.used.Sandboxes++
	if h.down || h.used.MemoryBytes > h.usable.MemoryBytes || h.used.CPUs > h.usable.CPUs+1e-6 {
		panic(fmt.Sprintf("node %s took what it has no room for: %+v of %+v", h.state.ID, h.used, h.usable))
	}
	w.placed++
	w.live++
	w.plan(event{at: w.now + life, kind: ends, host: i, life: h.life, ask: ask})
}

func (w *world) end(i, ask int) {
	h, limits := &w.hosts[i], w.asks[ask].Limits
	h.used.MemoryBytes -= limits.MemoryBytes
	h.used.CPUs -= limits.CPUs
	h.used.Sandboxes--
	w.live--
	w.ended++
	w.changed(i)
}

// changed tells others of what has changed on a node, and sees to its pool.
func (w *world) changed(i int) {
	h := &w.hosts[i]
	h.warm = min(h.warm, w.pool(i))
	w.tell(i)
	w.refill(i)
}

// pool is how many warm sandboxes a node may hold now.
func (w *world) pool(i int) int {
	h := &w.hosts[i]
	free := (h.usable.MemoryBytes - h.used.MemoryBytes) / 4
	return int(min(poolSize, free/w.asks[0].Limits.MemoryBytes))
}

func (w *world) refill(i int) {
	h := &w.hosts[i]
	if h.refill || h.down || h.warm >= w.pool(i) {
		return
	}
	h.refill = true
	w.plan(event{at: w.now + refillEvery, kind: refills, host: i})
}

// fail ends a node, and all that is on it.
func (w *world) fail(i int) {
	h := &w.hosts[i]
	w.lost += h.used.Sandboxes
	w.live -= h.used.Sandboxes
	h.used, h.warm, h.down = boxed.Capacity{}, 0, true
	h.life++
	w.plan(event{at: w.now + noticed, kind: falls, host: i, life: h.life})
	w.plan(event{at: w.now + seconds(120+480*w.chance.Float64()), kind: returns, host: i})
}

func (w *world) comeBack(i int) {
	h := &w.hosts[i]
	h.down, h.back = false, w.now
	h.life++
	w.plan(event{at: w.now + w.wait(w.failures/3600), kind: fails, host: i})
	w.changed(i)
}

// tell writes a summary, which a node does at most every 250 ms.
func (w *world) tell(i int) {
	h := &w.hosts[i]
	at := w.now
	if w.stale > 0 {
		at += summaryEvery - (w.now+h.phase)%summaryEvery
	}
	m := moment{at: at, used: h.used, warm: h.warm, silent: h.down}
	if last := &h.told[len(h.told)-1]; last.at == at {
		*last = m
		return
	}
	h.told = append(h.told, m)
	// What even the last to hear has heard is told once.
	old := 0
	for old+1 < len(h.told) && h.told[old+1].at < w.now-2*w.stale {
		old++
	}
	if old > 16 {
		h.told = append(h.told[:0], h.told[old:]...)
	}
}

// heard is what an entry knows of a node: what was told by then, and when that was.
func (w *world) heard(e, i int) (m moment, told time.Duration) {
	h := &w.hosts[i]
	until := w.now - w.delay(e, i)
	k := len(h.told) - 1
	for k > 0 && h.told[k].at > until {
		k--
	}
	// Between changes the same is told again.
	again := until - (until+h.phase)%summaryAge
	return h.told[k], max(h.told[k].at, again)
}

// delay is how long it takes for what a node tells to get to an entry: by chance
// between a half and one and a half of the scene's, and always the same for the two.
func (w *world) delay(e, i int) time.Duration {
	if w.stale == 0 || e == i {
		return 0
	}
	x := w.seed ^ uint64(e)<<32 ^ uint64(i)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	return w.stale/2 + time.Duration(float64(w.stale)*float64(x>>11)/(1<<53))
}

// look fills in what an entry knows of all nodes, in the order of its ring, which
// spares the scheduler the sorting. The entry's own books are no older than now.
func (w *world) look(e int, a scheduler.Ask) []scheduler.NodeState {
	view := w.view[e : e+w.nodes]
	for k := range view {
		i := e + k
		if i >= w.nodes {
			i -= w.nodes
		}
		n := &view[k]
		n.Recent = boxed.Capacity{}
		m, told := w.heard(e, i)
		if i == e || w.stale == 0 {
			m, told = moment{used: w.hosts[i].used, warm: w.hosts[i].warm, silent: w.hosts[i].down}, w.now
		}
		n.Used, n.Warm, n.Silent = m.used, m.warm, m.silent
		if a.Image != w.asks[0].Image { // only the first template has a pool
			n.Warm = 0
		}
		w.toldAt[i] = told
	}
	return view
}
