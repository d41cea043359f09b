package main

import (
	"fmt"
	"io"
	"math"
	"time"
)

// line is y = a + b x, fitted by least squares.
type line struct {
	a, b float64
	off  float64 // root of the mean square of what is off, as part of the mean of y
}

func fitLine(x, y []float64) line {
	mx, my := mean(x), mean(y)
	var xy, xx float64
	for i := range x {
		xy += (x[i] - mx) * (y[i] - my)
		xx += (x[i] - mx) * (x[i] - mx)
	}
	l := line{b: 0, a: my}
	if xx > 0 {
		l.b = xy / xx
		l.a = my - l.b*mx
	}
	sum := 0.0
	for i := range x {
		sum += math.Pow(y[i]-l.at(x[i]), 2)
	}
	l.off = math.Sqrt(sum/float64(len(x))) / my
	return l
}

func (l line) at(x float64) float64 { return l.a + l.b*x }

// measured finds lines by their metric.
type measured []row

func (m measured) get(system, metric string) (row, bool) {
	for _, r := range m {
		if r.System == system && r.Metric == metric {
			return r, true
		}
	}
	nan := math.NaN()
	return row{P50: nan, P95: nan, P99: nan, Low: nan, High: nan}, false
}

func (m measured) value(system, metric string) float64 {
	r, _ := m.get(system, metric)
	return r.P50
}

// lanSizes are the meshes that were measured at the pace of a LAN.
func (m measured) lanSizes() (list []int) {
	for _, n := range []int{3, 10, 25, 50, 100, 200} {
		if _, ok := m.get(sysBoxed, named("quiet_datagrams", "nodes", n, "pace", "lan")); ok {
			list = append(list, n)
		}
	}
	return list
}

// modelSizes are what the model is asked of. A mesh has to be real up to 200.
var modelSizes = []int{50, 100, 200, 500, 1000, 2000, 5000}

// publishes is how often nodes tell of themselves in the model: as seldom as they
// do, and as often as those do on which something changes every other second.
var publishes = []time.Duration{summaryAge, 5 * time.Second, 2 * time.Second}

// modelPart fits the model to what was measured, says how well it does, and asks
// it of larger meshes.
func modelPart(m measured, quick bool, log io.Writer) (rows []row, err error) {
	sizes := m.lanSizes()
	if len(sizes) < 2 {
		return nil, fmt.Errorf("membership has to be measured before it can be modelled")
	}
	per := fitPacket(m, log)
	rows = append(rows, number(sysModel, "messages_per_packet", "messages", 1, float64(per)))
	rows = append(rows, held(m, per, quick)...)
	bytes, fitted := fitTraffic(m, per, quick)
	rows = append(rows, fitted...)
	ask := modelSizes
	if quick {
		ask = []int{50, 200}
	}
	for _, n := range ask {
		trials := max(1, min(10, 2000/n))
		rows = append(rows,
			spread(sysModel, named("change_to_all", "nodes", n, "pace", "lan"), "s", gossipLAN(n, per, 0).change(trials)),
			number(sysModel, named("death_to_all", "nodes", n, "pace", "lan"), "s", 1, bytes.death.at(math.Log10(float64(n)))),
			number(sysModel, named("quiet_bytes", "nodes", n, "pace", "lan"), "B/s", 1, bytes.quiet.at(0)+bytes.compare(n)),
			number(sysModel, named("compare_bytes", "nodes", n), "B", 1, bytes.whole.at(float64(n))))
		for _, publish := range publishes {
			ages, packets, messages := viewsOf(n, per, publish)
			under := func(what string) string {
				return named(what, "nodes", n, "pace", "lan", "publish", publish.Seconds())
			}
			delay := max(0.1, mean(ages)-publish.Seconds()/2)
			rows = append(rows,
				spread(sysModel, under("view_age"), "s", ages),
				number(sysModel, under("view_delay"), "s", len(ages), delay),
				number(sysModel, under("telling_datagrams"), "1/s", 1, packets),
				number(sysModel, under("telling_bytes"), "B/s", 1, bytes.quiet.at(0)+bytes.compare(n)+messages*bytes.message))
			fmt.Fprintf(log, "  model of %d nodes, each telling every %v: views %.1f s old (p99 %.1f)\n", n, publish, quantile(ages, 0.5), quantile(ages, 0.99))
		}
	}
	return rows, nil
}

// viewsOf runs the model until comparisons have gone round, and looks for half as
// long as that takes.
func viewsOf(nodes, per int, publish time.Duration) (ages []float64, packets, messages float64) {
	g := gossipLAN(nodes, per, publish)
	long := max(comparing(g.pushPull, nodes), 2*publish)
	return g.views(long*3/2, long/2)
}

// overloads are the measured meshes in which nodes told more than gossip has room
// for, or nearly.
type overload struct {
	nodes   int
	pace    string
	publish time.Duration
}

func (m measured) overloads(quick bool) (list []overload) {
	all := []overload{{50, "lan", 2 * time.Second}, {50, "wan", summaryAge}, {100, "wan", summaryAge}, {200, "wan", summaryAge}}
	if quick {
		all = []overload{{10, "lan", 2 * time.Second}}
	}
	for _, o := range all {
		if _, ok := m.get(sysBoxed, o.metric()); ok {
			list = append(list, o)
		}
	}
	return list
}

func (o overload) metric() string {
	return named("view_age", "nodes", o.nodes, "pace", o.pace, "publish", o.publish.Seconds())
}

func (o overload) model(per int) []float64 {
	g := gossipLAN(o.nodes, per, o.publish)
	if o.pace == "wan" {
		g = gossipWAN(o.nodes, per, o.publish)
	}
	ages, _, _ := g.views(60*time.Second, 200*time.Second)
	return ages
}

// fitPacket finds how many messages a packet holds: the number with which the
// model's ages of views come closest to those measured, in their logarithms.
func fitPacket(m measured, log io.Writer) int {
	best, least := 3, math.Inf(1)
	for per := 1; per <= 6; per++ {
		off := 0.0
		for _, o := range m.overloads(false) {
			r, _ := m.get(sysBoxed, o.metric())
			ages := o.model(per)
			off += math.Pow(math.Log(quantile(ages, 0.5)/r.P50), 2) + math.Pow(math.Log(quantile(ages, 0.95)/r.P95), 2)
		}
		if off > 0 && off < least {
			best, least = per, off
		}
	}
	fmt.Fprintf(log, "  a packet holds %d messages, by the ages of views\n", best)
	return best
}

// held is what the model says of what was measured too.
func held(m measured, per int, quick bool) (rows []row) {
	for _, n := range m.lanSizes() {
		rows = append(rows, spread(sysModel, named("change_to_all", "nodes", n, "pace", "lan", "for", "check"), "s", gossipLAN(n, per, 0).change(20)))
	}
	for _, n := range []int{50, 100, 200} {
		if r, ok := m.get(sysBoxed, named("change_to_all", "nodes", n, "pace", "wan")); ok {
			rows = append(rows, spread(sysModel, r.Metric+" for=check", "s", gossipWAN(n, per, 0).change(20)))
		}
	}
	for _, o := range m.overloads(quick) {
		rows = append(rows, spread(sysModel, o.metric()+" for=check", "s", o.model(per)))
	}
	return rows
}

// fits are the lines of what a node sends.
type fits struct {
	quiet   line    // datagrams' bytes per second without news: the same for all sizes
	whole   line    // bytes of all that a node has, when two compare it, by nodes
	message float64 // bytes of one message of gossip in a datagram
	death   line    // seconds until a death is known to all, by the logarithm of nodes
}

// compare is what a node sends in a second to compare all: it begins one
// comparison in every interval, answers one, and sends all that it has in each.
func (f fits) compare(nodes int) float64 {
	return 2 * f.whole.at(float64(nodes)) / comparing(10*time.Second, nodes).Seconds()
}

func fitTraffic(m measured, per int, quick bool) (f fits, rows []row) {
	var n, log, quiet, death, messages, gossiped []float64
	for _, size := range m.lanSizes() {
		at := func(what string, more ...any) float64 {
			return m.value(sysBoxed, named(what, append([]any{"nodes", size, "pace", "lan"}, more...)...))
		}
		n, log = append(n, float64(size)), append(log, math.Log10(float64(size)))
		quiet, death = append(quiet, at("quiet_datagram_bytes")), append(death, at("death_to_all"))
		for _, r := range m {
			var nodes int
			var every float64
			if got, _ := fmt.Sscanf(r.Metric, "telling_datagram_bytes nodes=%d pace=lan publish=%g", &nodes, &every); got != 2 || nodes != size {
				continue
			}
			_, _, sent := gossipLAN(size, per, seconds(every)).views(30*time.Second, 60*time.Second)
			messages, gossiped = append(messages, sent), append(gossiped, r.P50-at("quiet_datagram_bytes"))
		}
	}
	wholeOf, whole := compared(m)
	f.quiet, f.death = fitLine(n, quiet), fitLine(log, death)
	f.quiet = line{a: mean(quiet), off: f.quiet.off}
	f.whole = fitLine(wholeOf, whole)
	f.message = slope(messages, gossiped)
	add := func(what string, l line) {
		r := number(sysModel, "fit "+what, "a, b, off", len(n), l.a)
		r.P95, r.P99 = l.b, l.off
		rows = append(rows, r)
	}
	add("quiet_datagram_bytes", f.quiet)
	add("compare_bytes", f.whole)
	add("death_to_all", f.death)
	add("message_bytes", line{a: f.message, off: offSlope(messages, gossiped, f.message)})
	return f, rows
}

// slope is b of y = b x.
func slope(x, y []float64) float64 {
	var xy, xx float64
	for i := range x {
		xy, xx = xy+x[i]*y[i], xx+x[i]*x[i]
	}
	return xy / xx
}

func offSlope(x, y []float64, b float64) float64 {
	sum := 0.0
	for i := range x {
		sum += math.Pow(y[i]-b*x[i], 2)
	}
	return math.Sqrt(sum/float64(len(x))) / mean(y)
}

// compared is how many bytes a node sent in a comparison, in meshes of so many
// nodes. Over a WAN there are too few to count. Both ends of a stream send what they have.
func compared(m measured) (nodes, bytes []float64) {
	for _, r := range m {
		var n int
		var every float64
		if got, _ := fmt.Sscanf(r.Metric, "telling_stream_bytes nodes=%d pace=lan publish=%g", &n, &every); got != 2 || n <= 3 || r.P50 == 0 {
			continue
		}
		streams := m.value(sysBoxed, named("telling_streams", "nodes", n, "pace", "lan", "publish", every))
		nodes, bytes = append(nodes, float64(n)), append(bytes, r.P50/streams/2)
	}
	return nodes, bytes
}
