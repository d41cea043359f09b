package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// aim is what placements are to find room by at the first try.
const aim = 0.99

// placed is a metric of placement in a mesh of servers.
func placed(what string, nodes, load int, stale float64, more ...any) string {
	return named(what, append([]any{"nodes", nodes, "load", load, "stale", decimal(stale, 1)}, more...)...)
}

// curveOf collects points of one curve, leaving out those that are not there.
func curveOf(name, class string, model bool, xs []float64, y func(x float64) float64) curve {
	c := curve{name: name, class: class, model: model}
	for _, x := range xs {
		if v := y(x); !math.IsNaN(v) {
			c.x, c.y = append(c.x, x), append(c.y, v)
		}
	}
	return c
}

func floats[N int | float64](list []N) (out []float64) {
	for _, v := range list {
		out = append(out, float64(v))
	}
	return out
}

// charts are the pictures that the rows give, by the names of their files.
func (m measured) charts() map[string]chart {
	return map[string]chart{
		"sim-load.svg":   {"Placements that the first node takes, by load, with views 30 s stale", m.byNodes("load of the memory, percent", floats(loads), m.atLoad)},
		"sim-stale.svg":  {"Placements that the first node takes, by the age of views, at 90 % load", m.byNodes("seconds that views are stale", floats(stales), m.atStale)},
		"sim-gossip.svg": {"What gossip takes", m.gossipPanes()},
		"sim-breaks.svg": {"Where it breaks: nodes that tell of themselves every 5 s, at 90 % load", m.breakPanes()},
	}
}

func (m measured) atLoad(system string, nodes int, x float64) float64 {
	return m.value(system, placed("first_try", nodes, int(x), 30))
}

func (m measured) atStale(system string, nodes int, x float64) float64 {
	return m.value(system, placed("first_try", nodes, 90, x))
}

// byNodes are two panels, one for each number of nodes.
func (m measured) byNodes(xName string, xs []float64, of func(string, int, float64) float64) (panes []pane) {
	for _, n := range sizes {
		at := func(system string) func(float64) float64 {
			return func(x float64) float64 { return of(system, n, x) }
		}
		curves := []curve{
			curveOf("boxed", "boxed", false, xs, at(sysBoxed)),
			curveOf("omniscient", "fourth", false, xs, at(sysSpread)),
		}
		panes = append(panes, pane{
			title: thousands(fmt.Sprint(n)) + " nodes", xName: xName, xs: xs, even: true, low: foot(curves), high: 1, ticks: 5, share: true,
			line: aim, cut: math.NaN(), curves: curves,
		})
	}
	return panes
}

// foot is where an axis of shares begins: at 80 % where all are above.
func foot(curves []curve) float64 {
	for _, c := range curves {
		if len(c.y) > 0 && slices.Min(c.y) < 0.8 {
			return 0
		}
	}
	return 0.8
}

var meshTicks = []float64{3, 10, 30, 100, 300, 1000, 5000}

// gossipPanes show what was measured, and the model beside it and beyond.
func (m measured) gossipPanes() []pane {
	sizes, beyond := floats(m.lanSizes()), floats(modelSizes)
	metric := func(system, what string) func(float64) float64 {
		return func(n float64) float64 { return m.value(system, named(what, "nodes", int(n), "pace", "lan")) }
	}
	quiet := func(n float64) float64 {
		return metric(sysBoxed, "quiet_datagram_bytes")(n) + metric(sysBoxed, "quiet_stream_bytes")(n)
	}
	telling := func(n float64) float64 {
		return m.value(sysModel, named("telling_bytes", "nodes", int(n), "pace", "lan", "publish", summaryAge.Seconds()))
	}
	return []pane{
		{title: "A change is known to all after, seconds", xName: "nodes", xs: meshTicks, low: 0, high: 0.5, ticks: 5, line: math.NaN(), cut: math.NaN(), curves: []curve{
			curveOf("measured", "boxed", false, sizes, metric(sysBoxed, "change_to_all")),
			curveOf("model", "third", true, beyond, metric(sysModel, "change_to_all")),
		}},
		{title: "A death is known to all after, seconds", xName: "nodes", xs: meshTicks, low: 0, high: 6, ticks: 6, line: math.NaN(), cut: math.NaN(), curves: []curve{
			curveOf("measured", "boxed", false, sizes, metric(sysBoxed, "death_to_all")),
			curveOf("model", "third", true, beyond, metric(sysModel, "death_to_all")),
		}},
		{title: "A node sends, bytes per second", xName: "nodes", xs: meshTicks, low: 100, high: 1e6, tall: true, line: math.NaN(), cut: math.NaN(), curves: []curve{
			curveOf("measured, no news", "boxed", false, sizes, quiet),
			curveOf("model, no news", "third", true, beyond, metric(sysModel, "quiet_bytes")),
			curveOf("model, every 10 s", "other", true, beyond, telling),
		}},
	}
}

// breakPanes show views, bytes and placements over the number of nodes.
func (m measured) breakPanes() []pane {
	beyond, xs := floats(modelSizes), []float64{50, 100, 200, 500, 1000, 2000, 5000}
	model := func(what string, every float64) func(float64) float64 {
		return func(n float64) float64 {
			return m.value(sysModel, named(what, "nodes", int(n), "pace", "lan", "publish", every))
		}
	}
	first := func(system string) func(float64) float64 {
		return func(n float64) float64 { return m.firstAt(system, int(n)) }
	}
	firsts := []curve{curveOf("boxed", "boxed", false, beyond, first(sysBoxed))}
	late, cut := m.lateFrom(scalePublish, summaryAge.Seconds()), m.breaks(sysBoxed)
	says := func(n float64) string { return "from " + thousands(fmt.Sprintf("%.0f", n)) + " nodes" }
	return []pane{
		{title: "Views are late by, seconds (model; 0.1 is the least)", xName: "nodes", xs: xs, low: 0.1, high: 100, tall: true, line: summaryAge.Seconds(), cut: late, cutSays: says(late), curves: []curve{
			curveOf("news every 10 s", "third", true, beyond, model("view_delay", 10)),
			curveOf("news every 5 s", "boxed", true, beyond, model("view_delay", 5)),
			curveOf("news every 2 s", "other", true, beyond, model("view_delay", 2)),
		}},
		{title: "A node sends, bytes per second (model)", xName: "nodes", xs: xs, low: 0, high: 150_000, ticks: 5, line: math.NaN(), cut: late, curves: []curve{
			curveOf("news every 10 s", "third", true, beyond, model("telling_bytes", 10)),
			curveOf("news every 5 s", "boxed", true, beyond, model("telling_bytes", 5)),
			curveOf("no news", "fourth", true, beyond, func(n float64) float64 {
				return m.value(sysModel, named("quiet_bytes", "nodes", int(n), "pace", "lan"))
			}),
		}},
		{title: "The first node takes, with views that late", xName: "nodes", xs: xs, low: foot(firsts), high: 1, ticks: 5, share: true, line: aim, cut: cut, cutSays: says(cut), curves: firsts},
	}
}

// firstAt is the share of placements that the first node takes, in a mesh whose
// views are as late as the model says.
func (m measured) firstAt(system string, nodes int) float64 {
	r, ok := m.get(sysModel, viewDelay(nodes, scalePublish))
	if !ok {
		return math.NaN()
	}
	delay := math.Round(r.P50*10) / 10
	return m.value(system, placed("first_try", nodes, 90, delay))
}

// breaks is the number of nodes from which on the first node takes less than is
// aimed at; NaN if there is none.
func (m measured) breaks(system string) float64 {
	return crossing(func(n int) float64 { return aim - m.firstAt(system, n) })
}

// lateFrom is the number of nodes from which on views are late by so many seconds.
func (m measured) lateFrom(publish time.Duration, late float64) float64 {
	return crossing(func(n int) float64 { return m.value(sysModel, viewDelay(n, publish)) - late })
}

// crossing is the number of nodes at which something begins to be over 0, between
// two that were looked at by their logarithms.
func crossing(of func(nodes int) float64) float64 {
	last := math.NaN()
	for i, n := range modelSizes {
		v := of(n)
		if v > 0 {
			if i == 0 || math.IsNaN(last) {
				return float64(n)
			}
			from, to := math.Log(float64(modelSizes[i-1])), math.Log(float64(n))
			return math.Round(math.Exp(from+(to-from)*last/(last-v))/10) * 10
		}
		last = v
	}
	return math.NaN()
}
