package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"
)

// sizes are the numbers of nodes that placement is looked at in detail for.
var sizes = []int{1000, 5000}

// headline is how many placements are counted at 90 % load and 30 s.
var headline = map[int]int{1000: 100_000, 5000: 20_000}

// loads are in percent, and staleness of views in seconds.
var (
	loads  = []int{50, 70, 80, 90, 95, 98}
	stales = []int{0, 1, 5, 10, 30, 60, 120}
)

// variants are changes to how a node is chosen that were tried, around the real
// scheduler. What they are is said in the report.
var variants = []struct {
	name, what string
	tactics    tactics
}{
	{"variant-remember", "an entry leaves out a node that refused until it tells of itself again", tactics{remember: true}},
	{"variant-draw4", "Place sees four nodes that are drawn, and all only if none of them has room", tactics{sample: 4}},
	{"variant-most", "three quarters of the nodes with room count as equally full instead of a half", tactics{level: 0.75}},
}

func tacticsOf(system string) tactics {
	for _, v := range variants {
		if v.name == system {
			return v.tactics
		}
	}
	return tactics{bestFit: system == sysBestFit}
}

// point is a scene that is run with one of the systems.
type point struct {
	scene
	system string
}

func (p point) params() []any {
	list := []any{"nodes", p.nodes, "load", int(p.load*100 + 0.5), "stale", decimal(p.staleness(), 1)}
	if p.mesh != "servers" {
		list = append(list, "mesh", p.mesh)
	}
	if p.skewed {
		list = append(list, "entries", "skewed")
	}
	if p.life.name != ordinary().name {
		list = append(list, "life", p.life.name)
	}
	return list
}

// staleness is by what the point is known: an omniscient one stands beside those
// that are as stale as its scene says, and does not feel it.
func (p point) staleness() float64 { return p.stale.Seconds() }

// points are all that are run, but for those of scalePoints.
func points(quick bool) (list []point) {
	if quick {
		for _, system := range []string{sysBoxed, "variant-most", sysSpread, sysBestFit} {
			s := meshOf(200)
			s.asks, s.stale = 2000, 5*time.Second
			list = append(list, point{s, system})
		}
		return list
	}
	add := func(s scene, systems ...string) {
		for _, system := range systems {
			same := func(p point) bool {
				return p.system == system && fmt.Sprint(p.params()) == fmt.Sprint(point{s, system}.params())
			}
			if !slices.ContainsFunc(list, same) {
				list = append(list, point{s, system})
			}
		}
	}
	for _, n := range slices.Backward(sizes) { // what takes longest goes first
		s := meshOf(n)
		s.asks = headline[n]
		add(s, sysBoxed)
		s.asks = meshOf(n).asks
		for _, v := range variants {
			add(s, v.name)
		}
		for _, load := range loads {
			s.load = float64(load) / 100
			add(s, sysBoxed, sysSpread, sysBestFit)
		}
		s.load = 0.9
		for _, stale := range stales {
			s.stale = time.Duration(stale) * time.Second
			add(s, sysBoxed)
		}
		s = meshOf(n)
		s.skewed = true
		add(s, sysBoxed)
	}
	s := meshOf(1000) // of 5,000 it would be 1,100 in a second
	s.life = hectic()
	add(s, sysBoxed)
	add(smallNodes(5000), sysBoxed, sysSpread, sysBestFit)
	return list
}

// scalePoints are meshes whose views are as late as the model says that they are
// in one of that many nodes.
func scalePoints(delays map[int]float64) (list []point) {
	for _, n := range slices.Backward(slices.Sorted(maps.Keys(delays))) {
		s := meshOf(n)
		s.stale = seconds(delays[n]).Round(100 * time.Millisecond)
		list = append(list, point{s, sysBoxed})
	}
	return list
}

// runPoints runs points, as many at once as there are processors.
func runPoints(ctx context.Context, list []point, log io.Writer) ([]row, error) {
	results := make([]tally, len(list))
	errs := make([]error, len(list))
	slots := make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))
	var running sync.WaitGroup
	for i, p := range list {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		running.Go(func() {
			defer func() { <-slots }()
			from := time.Now()
			results[i], errs[i] = p.run(ctx)
			fmt.Fprintf(log, "  %d/%d %s %v: %s at the first try (%.0f s)\n", i+1, len(list), p.system, p.params(), percent(results[i].first()), time.Since(from).Seconds())
		})
	}
	running.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var rows []row
	for i, p := range list {
		if errs[i] != nil {
			return nil, fmt.Errorf("%s %v: %w", p.system, p.params(), errs[i])
		}
		rows = append(rows, p.rows(results[i])...)
	}
	return rows, nil
}

func (p point) run(ctx context.Context) (tally, error) {
	s := p.scene
	s.tactics = tacticsOf(p.system)
	// What is there at the beginning was spread by somebody who knew all: that is
	// not counted.
	s.warmup = 15*time.Second + p.stale*6/5
	if p.system == sysSpread || p.system == sysBestFit {
		s.stale = 0
	}
	return newWorld(s).run(ctx)
}

func (p point) rows(t tally) []row {
	name := func(what string) string { return named(what, p.params()...) }
	refused := t.nowhere + t.tired
	tries := make([]float64, 0, t.arrived)
	for try, n := range t.tries {
		for range n {
			tries = append(tries, float64(try))
		}
	}
	rows := []row{
		proportion(p.system, name("first_try"), t.tries[1], t.arrived),
		spread(p.system, name("tries"), "nodes", tries),
		proportion(p.system, name("refused"), refused, t.arrived),
		proportion(p.system, name("refused_with_room"), t.needed, t.arrived),
		proportion(p.system, name("large_first_try"), t.large[0], t.large[1]),
		number(p.system, name("load"), "share", len(t.loads), mean(t.loads)),
		spread(p.system, name("fullest_by_mean"), "ratio", t.fullest),
		spread(p.system, name("most_sandboxes"), "sandboxes", t.busiest),
	}
	if len(t.ages) > 0 {
		rows = append(rows, spread(p.system, name("told_ago"), "s", t.ages))
	}
	if all := t.missed.sum(); all > 0 {
		for _, m := range []struct {
			why string
			n   int
		}{{"gone", t.missed.gone}, {"back", t.missed.back}, {"warm", t.missed.warm}, {"large", t.missed.large}, {"other", t.missed.other}} {
			rows = append(rows, number(p.system, name("missed_"+m.why), "share", all, float64(m.n)/float64(all)))
		}
	}
	return rows
}
