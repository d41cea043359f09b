package main

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// The systems of the tables, with what they are called there.
var tableSystems = []struct{ system, name string }{
	{sysBoxed, "boxed"}, {sysSpread, "omniscient, spread"}, {sysBestFit, "omniscient, best fit"},
}

func (d *document) placement() {
	d.say(`## Placement by load

![by load](bench/sim-load.svg)

Views are 30 s stale. *Omniscient* has the truth before it: once with the same scheduler, once as a packer that takes the fullest
node with room. Refused is who got no node at all; in brackets those for whom some node had room, as one sees who
knows all.
`)
	for _, n := range sizes {
		d.say("%s nodes:\n", thousands(fmt.Sprint(n)))
		d.say("| load | system | first node takes | nodes asked, p99 | refused (with room) | load reached | fullest node by the mean | most sandboxes on a node |\n|--:|---|--:|--:|--:|--:|--:|--:|")
		for _, load := range loads {
			for _, s := range tableSystems {
				d.placedRow(s.system, s.name, n, load, 30)
			}
		}
		d.say("")
	}
	d.staleness()
	d.whyEqual()
	d.otherWorlds()
}

func (d *document) placedRow(system, name string, n, load int, stale float64, more ...any) {
	at := func(what string) string { return placed(what, n, load, stale, more...) }
	if _, ok := d.get(system, at("first_try")); !ok {
		return
	}
	tries, _ := d.get(system, at("tries"))
	d.say("| %d %% | %s | %s | %s | %s (%s) | %s | %s | %s |", load, name, d.first(system, n, load, stale, more...), figures(math.Ceil(tries.P99)),
		percent(d.value(system, at("refused"))), percent(d.value(system, at("refused_with_room"))), percent(d.value(system, at("load"))),
		figures(d.value(system, at("fullest_by_mean"))), figures(d.value(system, at("most_sandboxes"))))
}

func (d *document) staleness() {
	d.say(`## Placement by the age of views

![by age](bench/sim-stale.svg)

At 90 % load.

| views stale by | 1,000 nodes | 5,000 nodes |
|--:|--:|--:|`)
	for _, s := range stales {
		d.say("| %d s | %s | %s |", s, d.first(sysBoxed, 1000, 90, float64(s)), d.first(sysBoxed, 5000, 90, float64(s)))
	}
	d.say("")
}

// whyEqual says why turns decide in the emptier half, what the first node was like
// that refused, and what else was tried.
func (d *document) whyEqual() {
	d.say(`## Why the emptier half is equal

All entries see the same few nodes as the emptiest. In 30 s some %s sandboxes are placed in a mesh of 5,000 nodes; if they all went to
those few, they would be full within a second, and refuse the rest until their summaries have come round. A Ledger remembers what its own
entry placed, and of 5,000 entries each places one in 18 s: it is the width of what counts as equal that decides, and not what an entry
remembers. So `+"`scheduler.Place`"+` takes the emptier half of the nodes for equally full, and turns decide between them.
`, thousands(fmt.Sprintf("%.0f", math.Round(30*arrivals(meshOf(5000))/100)*100)))
	d.say("First tries that were refused, by what explains it best, at 90 %% load and views 30 s stale:\n")
	d.say("| nodes | system | refused | was down | had come back empty | seemed to have a warm one | asked for 4 GiB or more | other |\n|--:|---|--:|--:|--:|--:|--:|--:|")
	for _, n := range sizes {
		for _, s := range tableSystems[:1] {
			at := func(what string) float64 { return d.value(s.system, placed(what, n, 90, 30)) }
			d.say("| %s | %s | %s | %s | %s | %s | %s | %s |", thousands(fmt.Sprint(n)), s.name, percent(1-at("first_try")), percent(at("missed_gone")),
				percent(at("missed_back")), percent(at("missed_warm")), percent(at("missed_large")), percent(at("missed_other")))
		}
	}
	d.say("\nChanges that were tried around the real scheduler, at 90 %% load and views 30 s stale:\n")
	d.say("| variant | 1,000 nodes | 5,000 nodes | fullest node by the mean, 5,000 nodes |\n|---|--:|--:|--:|")
	line := func(system, what string) {
		d.say("| %s | %s | %s | %s |", what, d.first(system, 1000, 90, 30), d.first(system, 5000, 90, 30), figures(d.value(system, placed("fullest_by_mean", 5000, 90, 30))))
	}
	line(sysBoxed, "boxed as it is")
	for _, v := range variants {
		line(v.name, v.what)
	}
	d.say("")
}

// arrivals are those of a scene, in a second.
func arrivals(s scene) float64 { return newWorld(s).rate }

func (d *document) otherWorlds() {
	d.say(`## Other worlds

At 90 % load and views 30 s stale.

| mesh | system | first node takes | asks for 4 GiB or more | refused (with room) |
|---|---|--:|--:|--:|`)
	for _, w := range []struct {
		name  string
		nodes int
		more  []any
	}{
		{"1,000 nodes, a fifth of them asked for 80 %", 1000, []any{"entries", "skewed"}},
		{"5,000 nodes, a fifth of them asked for 80 %", 5000, []any{"entries", "skewed"}},
		{"1,000 nodes, lifetimes of a quarter", 1000, []any{"life", hectic().name}},
		{"5,000 nodes, lifetimes of a quarter", 5000, []any{"life", hectic().name}},
		{"5,000 small nodes, which hold 100,000", 5000, []any{"mesh", "small"}},
	} {
		for _, s := range tableSystems {
			at := func(what string) string { return placed(what, w.nodes, 90, 30, w.more...) }
			if _, ok := d.get(s.system, at("first_try")); ok {
				d.say("| %s | %s | %s | %s | %s (%s) |", w.name, s.name, d.first(s.system, w.nodes, 90, 30, w.more...), percent(d.value(s.system, at("large_first_try"))),
					percent(d.value(s.system, at("refused"))), percent(d.value(s.system, at("refused_with_room"))))
			}
		}
	}
	d.say(`
On small nodes an ask for 8 GiB takes a half of the most common kind of node. Who spreads leaves no such holes at 90 % load, so the few
that come up by chance are what all of these asks go for at once. No entry's memory and no turn helps there; larger nodes do, or asks that
are not half a machine.
`)
}

func (d *document) gossip() {
	d.say(`## Membership

![gossip](bench/sim-gossip.svg)

Measured with real memberships in one process. A node that is in no hurry sends a ping and an answer in 300 ms and compares all it knows with
another every 10 s, or less often from 33 nodes on. *Busy* is the part of this machine's processors that all nodes together used: near 100 %
it is the machine that is measured. All nodes begin at once, which is the hardest way: memberlist passes news on by the number of nodes that
it knows, which are few then, and who was missed waits for the next comparison. So it takes between two seconds and half a minute, by chance.

| nodes | pace | news every | all saw all after | a change is known to all after (p95) | a death (slowest) | datagrams per second | bytes per second, no news | with news | views old (p99) | busy |
|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|`)
	for _, c := range crowds(false) {
		if _, ok := d.get(sysBoxed, named("view_age", "nodes", c.nodes, "pace", c.pace, "publish", c.publish.Seconds())); ok {
			d.crowdRow(c)
		}
	}
	d.say("\nThe model beside what was measured, and beyond it. Where nodes are more than 200, **all of it is the model's**.\n")
	d.say("| nodes | a change is known to all after: measured | model | a death: measured | model | bytes per second, no news: measured | model |\n|--:|--:|--:|--:|--:|--:|--:|")
	for _, n := range []int{50, 100, 200, 500, 1000, 2000, 5000} {
		at := func(system, what string) float64 {
			return d.value(system, named(what, "nodes", n, "pace", "lan"))
		}
		quiet := at(sysBoxed, "quiet_datagram_bytes") + at(sysBoxed, "quiet_stream_bytes")
		d.say("| %s | %s | %s | %s | %s | %s | %s |", thousands(fmt.Sprint(n)), in(at(sysBoxed, "change_to_all"), "s"), in(at(sysModel, "change_to_all"), "s"),
			in(at(sysBoxed, "death_to_all"), "s"), in(at(sysModel, "death_to_all"), "s"), figures(quiet), figures(at(sysModel, "quiet_bytes")))
	}
	d.say("")
	d.wan()
	d.fits()
}

// wan is where meshes of up to 200 nodes were measured, whatever this machine was
// doing: ten times less is computed at that pace.
func (d *document) wan() {
	d.say("At the pace of a WAN, which takes a tenth of the computing:\n\n| nodes | a change is known to all after: measured | model | a death |\n|--:|--:|--:|--:|")
	for _, n := range []int{50, 100, 200} {
		metric := named("change_to_all", "nodes", n, "pace", "wan")
		got, ok := d.get(sysBoxed, metric)
		if !ok {
			continue
		}
		d.say("| %d | %s s | %s s | %s s |", n, figures(got.P50), figures(d.value(sysModel, metric+" for=check")), figures(d.value(sysBoxed, named("death_to_all", "nodes", n, "pace", "wan"))))
	}
	d.say("")
	for _, c := range crowds(false) {
		if _, gave := d.get(sysBoxed, named("gave_up", "nodes", c.nodes, "pace", c.pace, "publish", c.publish.Seconds())); gave {
			d.say("%d nodes at the pace of a %s did not come to rest in one process on this machine: nodes that get no processor in time are called silent, and what is said about that costs processors too. It says nothing of a mesh, whose nodes have a machine each; up to 200 nodes were therefore measured at the pace of a WAN.\n", c.nodes, strings.ToUpper(string(c.pace)))
		}
	}
}

func (d *document) crowdRow(c crowd) {
	at := func(what string, more ...any) row {
		r, _ := d.get(sysBoxed, named(what, append([]any{"nodes", c.nodes, "pace", c.pace}, more...)...))
		return r
	}
	publish := []any{"publish", c.publish.Seconds()}
	ages, change, death := at("view_age", publish...), at("change_to_all"), at("death_to_all")
	quiet, joined := at("quiet_datagram_bytes").P50+at("quiet_stream_bytes").P50, at("join_all").P50
	if c.changes == 0 { // what the same mesh showed without news is in another line
		change, death, quiet, joined = row{P50: math.NaN(), P95: math.NaN()}, row{P99: math.NaN()}, math.NaN(), math.NaN()
	}
	known := "–"
	if !math.IsNaN(change.P50) {
		known = fmt.Sprintf("%s (%s) s", figures(change.P50), figures(change.P95))
	}
	d.say("| %d | %s | %s | %s | %s | %s | %s | %s | %s | %s (%s) s | %s |", c.nodes, c.pace, c.publish, in(joined, "s"), known,
		in(death.P99, "s"), figures(at("telling_datagrams", publish...).P50), figures(quiet),
		figures(at("telling_datagram_bytes", publish...).P50+at("telling_stream_bytes", publish...).P50), figures(ages.P50), figures(ages.P99), percent(at("busy", publish...).P50))
}

// fits says what was fitted, and how far off it is.
func (d *document) fits() {
	fit := func(what string) row {
		r, _ := d.get(sysModel, "fit "+what)
		return r
	}
	quiet, whole, death, message := fit("quiet_datagram_bytes"), fit("compare_bytes"), fit("death_to_all"), fit("message_bytes")
	d.say(`| what | fitted | off by (root of the mean square, by the mean) |
|---|---|--:|`)
	d.say("| pings and their answers | %s B/s per node | %s |", figures(quiet.P50), percent(quiet.P99))
	d.say("| all that a node knows, when it compares | %s B + %s B × nodes, twice in max(10 s, 10 s × (⌈log₂ nodes⌉ − 4)) | %s |", figures(whole.P50), figures(whole.P95), percent(whole.P99))
	d.say("| a death is known to all | %s s + %s s × log₁₀ nodes | %s |", figures(death.P50), figures(death.P95), percent(death.P99))
	d.say("| a summary in a packet | %s B | %s |", figures(message.P50), percent(message.P99))
	d.say("| summaries in a packet | %s | see below |", figures(d.value(sysModel, "messages_per_packet")))
	d.say(`
How old views are in meshes that have more news than gossip has room for, which is what the number of summaries in a packet was fitted to:

| nodes | pace | news every | median age: measured | model | p95: measured | model |
|--:|---|--:|--:|--:|--:|--:|`)
	for _, o := range d.overloads(false) {
		got, _ := d.get(sysBoxed, o.metric())
		model, _ := d.get(sysModel, o.metric()+" for=check")
		d.say("| %d | %s | %s | %s s | %s s | %s s | %s s |", o.nodes, o.pace, o.publish.Round(time.Second), figures(got.P50), figures(model.P50), figures(got.P95), figures(model.P95))
	}
	d.say("")
}
