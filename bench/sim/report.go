package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"time"
)

// reportCommand writes the document and its pictures.
func reportCommand(args []string, stderr io.Writer) error {
	root, err := repository()
	if err != nil {
		return err
	}
	paths := placesIn(root)
	flags := flag.NewFlagSet("sim report", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&paths.csv, "in", paths.csv, "file of the results")
	flags.StringVar(&paths.machine, "machine", paths.machine, "file that says where they were made")
	flags.StringVar(&paths.docs, "docs", paths.docs, "directory of simulation.md and of bench/sim-*.svg")
	if err := flags.Parse(args); err != nil {
		return err
	}
	rows, runs, err := readResults(paths)
	if err != nil {
		return err
	}
	made, err := documents(rows, runs)
	if err != nil {
		return err
	}
	for name, text := range made {
		if err := replace(filepath.Join(paths.docs, filepath.FromSlash(name)), text); err != nil {
			return err
		}
	}
	return nil
}

// documents are the files below docs that the rows give.
func documents(rows measured, runs map[string]run) (map[string][]byte, error) {
	made := map[string][]byte{}
	for name, c := range rows.charts() {
		picture, err := c.render()
		if err != nil {
			return nil, err
		}
		made["bench/"+name] = picture
	}
	d := &document{measured: rows, runs: runs}
	d.write()
	made["simulation.md"] = []byte(d.String())
	return made, nil
}

// document is docs/simulation.md as it grows.
type document struct {
	strings.Builder
	measured
	runs map[string]run
}

// say writes a line. Without args a percent sign may stand alone.
func (d *document) say(format string, args ...any) {
	if len(args) == 0 {
		d.WriteString(strings.ReplaceAll(format, "%%", "%") + "\n")
		return
	}
	fmt.Fprintf(d, format+"\n", args...)
}

// in is a number with its unit; a dash alone where there is none.
func in(v float64, unit string) string {
	if math.IsNaN(v) {
		return "–"
	}
	return figures(v) + " " + unit
}

func (d *document) write() {
	d.head()
	d.placement()
	d.gossip()
	d.documents()
	d.breaking()
	d.making()
}

// first is the share that the first node takes, with its interval.
func (d *document) first(system string, nodes, load int, stale float64, more ...any) string {
	r, ok := d.get(system, placed("first_try", nodes, load, stale, more...))
	if !ok {
		return "–"
	}
	return fmt.Sprintf("%s (%.2f–%.2f)", percent(r.P50), 100*r.Low, 100*r.High)
}

func yes(ok bool) string { return map[bool]string{true: "yes", false: "**no**"}[ok] }

func (d *document) head() {
	d.say(`# How far a mesh goes

<!-- Made from bench/results/sim.csv by "go run ./bench/sim report". -->

What becomes of boxed in meshes that nobody has at hand: 1,000 and 5,000 nodes, 100,000 sandboxes and more, nodes that fail, and
views of each other that are half a minute old. Placement runs the project's own scheduler and Ledger in virtual time.
Gossip and documents are the project's own up to 200 nodes, and a model above; what a model says is always called so.

## What is aimed at

| what | aim | boxed | reached |
|---|--:|--:|---|`)
	for _, n := range []int{5000, 1000} {
		for _, load := range []int{90, 80} {
			v := d.value(sysBoxed, placed("first_try", n, load, 30))
			d.say("| %s nodes at %d %% load, views 30 s stale: placements that the first node takes which is asked | ≥ 99 %% | %s | %s |",
				thousands(fmt.Sprint(n)), load, d.first(sysBoxed, n, load, 30), yes(v >= aim))
		}
	}
	d.say("")
	d.say(`In brackets what an interval of 95 % allows. That a node refuses costs a call, not the sandbox: the next node is asked, four in all.

## What is real here, and what is a model

| part | what runs | what does not |
|---|---|---|
| placement | ` + "`scheduler.Place`, `Fits` and `Ledger`" + ` of this revision, at every entry; every node admits by its own books; four nodes are asked at most, as by ` + "`node`" + ` | time is virtual, a call takes none; load of processors and round trips are equal; quotas, names and labels are left out |
| views | summaries on every change, at most every 250 ms, and every 10 s anyway; each entry hears of each node with a delay of its own, between a half and one and a half of what is said | the delay is a parameter, not gossip itself |
| membership to 200 nodes | ` + "`transport.Membership`" + ` over ` + "`memnet`" + `, with its encryption, signatures and timers, in one process | links: they lose nothing and take no time; TLS |
| membership above | **a model**: memberlist's rules for what is sent to whom, with one fitted number, and straight lines through what was measured | everything else |
| documents to 25 nodes | ` + "`transport.Documents`" + ` on stores in memory | disks; above 25 nodes it is a straight line, **a model** |
`)
}

func (d *document) making() {
	d.say(`## How it was made

%s arrive by chance at a steady rate. What each asks for is one of 20 templates by Zipf's law, from 256 MiB to 8 GiB (%s MiB on
average, 8.8 %% of them for 4 GiB or more). Half live for less than three minutes, one in ten for more than an hour, the mean is half an
hour and the most a day (60 %% lognormal around a minute, 30 %% around 15 minutes, 10 %% Pareto from an hour on). A mesh of servers has nodes
of 64, 128 and 256 GiB (35, 35 and 30 of a hundred): 1,000 of them hold 100,000 sandboxes at 90 %% load, and 5,000 hold 500,000. The small
nodes have 16, 32 and 64 GiB (50, 35 and 15): 5,000 of them hold 100,000. 1 %% of the nodes fail in an hour, are called silent after 3 s, and
come back empty after 2 to 10 minutes. Each point counts 20,000 placements (10,000 of 5,000 nodes), those at 90 %% and 30 s %s and %s, after
a time that is not counted; where the first node takes fewer than 90 %% of 3,000, these are all. What is asked, where, for how long and which node fails is the same for all systems of a point (seed 1); gossip's timers are not seeded.
`, "Sandboxes", thousands(fmt.Sprintf("%.0f", newDemand().meanMemory()/(1<<20))), thousands(fmt.Sprint(headline[1000])), thousands(fmt.Sprint(headline[5000])))
	d.say("| part | date | revision | seconds | load before | machine |\n|---|---|---|--:|--:|---|")
	for _, p := range parts() {
		if r, ok := d.runs[p.name]; ok {
			quick := ""
			if r.Quick {
				quick = ", **a quick run: not to be believed**"
			}
			d.say("| %s%s | %s | %s | %s | %s | %d cores of %s, %s MiB; Linux %s; %s |", p.name, quick, r.Date.Format("2006-01-02 15:04"), r.Revision,
				figures(r.Seconds), figures(r.Load), r.Cores, r.CPU, thousands(fmt.Sprint(r.MemoryMiB)), r.Kernel, r.Go)
		}
	}
	d.say(`
` + "`go run ./bench/sim`" + ` makes all of it anew, ` + "`-only placement`" + ` one part, ` + "`-quick`" + ` a small one in half a minute, and
` + "`go run ./bench/sim report`" + ` this page. The rows are in [sim.csv](../bench/results/sim.csv); the system ` + "`model`" + ` is never boxed.`)
}

func (d *document) documents() {
	d.say(`## Documents

API keys, quotas, templates and other small records are on every node. Who changes one sends it to all nodes that are there, eight at a
time; two nodes that compare all they have tell each other of every document in a digest.

| nodes | a changed document is on all after | 99th percentile | bytes sent for it | |
|--:|--:|--:|--:|---|`)
	var n, ms, bytes []float64
	for _, size := range []int{3, 10, 25} {
		took, ok := d.get(sysBoxed, named("document_to_all", "nodes", size))
		if !ok {
			continue
		}
		sent := d.value(sysBoxed, named("document_bytes", "nodes", size))
		n, ms, bytes = append(n, float64(size)), append(ms, took.P50), append(bytes, sent)
		d.say("| %d | %s ms | %s ms | %s | measured |", size, figures(took.P50), figures(took.P99), figures(sent))
	}
	if len(n) > 1 {
		t, b := fitLine(n, ms), fitLine(n, bytes)
		for _, size := range sizes {
			d.say("| %s | %s ms | – | %s | **model**: a line through the above, off by %s |", thousands(fmt.Sprint(size)), figures(t.at(float64(size))), figures(b.at(float64(size))), percent(t.off))
		}
	}
	d.say(`
On a real network each of those messages is a connection of its own, with a handshake; eight at a time and 5 ms each would make 3 s for
5,000 nodes.

| documents | digest | made in | compared in | a node of 1,000 sends for it | of 5,000 |
|--:|--:|--:|--:|--:|--:|`)
	for _, count := range []int{1000, 10_000} {
		size, ok := d.get(sysBoxed, named("digest_bytes", "documents", count))
		if !ok {
			continue
		}
		rate := func(nodes int) float64 { return 2 * size.P50 / comparing(10*time.Second, nodes).Seconds() }
		d.say("| %s | %s B | %s ms | %s ms | %s B/s (model) | %s B/s (model) |", thousands(fmt.Sprint(count)), figures(size.P50),
			figures(d.value(sysBoxed, named("digest_make", "documents", count))), figures(d.value(sysBoxed, named("digest_compare", "documents", count))),
			figures(rate(1000)), figures(rate(5000)))
	}
	d.say(`
A digest holds at most 200,000 documents, which is 6.4 MB of the 20 MB that memberlist takes.
`)
}

// nodesText is a number of nodes, or that there is none.
func nodesText(n float64) string {
	switch {
	case math.IsNaN(n):
		return "more than 5,000"
	case n <= float64(modelSizes[0]):
		return "fewer than " + fmt.Sprint(modelSizes[0])
	}
	return thousands(fmt.Sprintf("%.0f", n))
}

func (d *document) breaking() {
	d.say(`## Where it breaks

![where it breaks](bench/sim-breaks.svg)
`)
	late := d.lateFrom(summaryAge, summaryAge.Seconds())
	row := func(n int) {
		d.say("| %s | %s | %s | %s | %s | %s |", thousands(fmt.Sprint(n)),
			in(d.value(sysModel, viewDelay(n, 10*time.Second)), "s"), in(d.value(sysModel, viewDelay(n, 5*time.Second)), "s"), in(d.value(sysModel, viewDelay(n, 2*time.Second)), "s"),
			figures(d.value(sysModel, named("telling_bytes", "nodes", n, "pace", "lan", "publish", 5))), percent(d.firstAt(sysBoxed, n)))
	}
	d.say("| nodes | views late by, news every 10 s (model) | every 5 s (model) | every 2 s (model) | bytes per second of a node (model) | the first node takes |\n|--:|--:|--:|--:|--:|--:|")
	for _, n := range modelSizes {
		row(n)
	}
	per := d.value(sysModel, "messages_per_packet")
	d.say(`
**Gossip has a fixed capacity, whatever the size of the mesh.** On a LAN a node sends three packets every 50 ms and some with its pings,
of %s summaries each: it hears of at most %s summaries in a second, and passes each on 8 times among a hundred nodes and 16 times among
5,000. A mesh whose nodes tell of themselves every ten seconds has more news than that from some hundred nodes on: then each
summary is passed on fewer times than memberlist means to, and still gets everywhere at once. Among some hundreds it does not, and what
nodes have not heard they get when they compare all they have, every 60 s among 1,000 nodes and every 90 s among 5,000: views are late by
10 s and more from %s nodes on, or from %s where nodes tell of themselves every two seconds. Bytes do not break it: a node sends no more
than %s kB/s, and all summaries of 5,000 nodes are %s MB, of the 20 MB that memberlist takes.
`, figures(per), figures(math.Round(per*66.7)), nodesText(late), nodesText(d.lateFrom(2*time.Second, summaryAge.Seconds())), figures(math.Round(d.value(sysModel, named("telling_bytes", "nodes", 5000, "pace", "lan", "publish", 2))/1000)), figures(d.value(sysModel, named("compare_bytes", "nodes", 5000))/1e6))
	switch own := d.breaks(sysBoxed); {
	case math.IsNaN(d.firstAt(sysBoxed, 5000)):
		d.say("Placement in meshes whose views are that late was not looked at yet.")
	case math.IsNaN(own):
		d.say("Placement does not fall below 99 %% at the first try in any mesh that was looked at.")
	default:
		d.say("**Placement** at 90 %% load falls below 99 %% at the first try from %s nodes on (the line in the picture).", nodesText(own))
	}
	d.say(`
## What one would use beyond

- **Cells.** Meshes of a few hundred nodes, each with gossip, documents and placement of its own, and a front door that knows how full each
  cell is and sends a request to one of them. An ID names its node; a name of the cell beside it would keep routing without a directory. It
  is what keeps every number above where it was measured, and a fault of one cell out of the others.
- **A directory per cell instead of gossip** (etcd, Consul, or what a cloud has): nodes write their books there, and a few schedulers read
  them. Views are then a second old at 5,000 nodes, for the price of something that has to be there.
- **A scheduler of many machines above boxed**: Nomad and Kubernetes place by a book of their own that is never stale, Nomad at 5,000 nodes
  and more; boxed is then what runs on each node, with ` + "`place = own`" + `.
- Short of that, in one mesh: tell of what has changed by more than a few percent only, and less often the larger the mesh is.
`)
}
