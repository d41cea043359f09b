package scheduler_test

import (
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// thousand is a mesh of 1,000 nodes of three sizes and every degree of fullness,
// of which three in ten do not take askOfThousand.
func thousand() []scheduler.NodeState {
	nodes := cluster(9, sizes(1000, 16, 32, 64)...)
	for i := range nodes {
		n := &nodes[i]
		n.Labels = map[string]string{"zone": []string{"a", "b", "c"}[i%3], "disk": "ssd"}
		n.Images = map[string]bool{"docker.io/library/python:3.12": i%2 == 0, "docker.io/library/node:22": true}
		share := float64((i*37)%85) / 100
		usable := n.Usable()
		n.Used = boxed.Capacity{MemoryBytes: int64(float64(usable.MemoryBytes) * share), CPUs: usable.CPUs * share / 2, Sandboxes: 10}
		n.Load, n.RTT = float64(i%23)/10, time.Duration(i%40)*time.Millisecond
		switch i % 20 {
		case 0:
			n.Silent = true
		case 1:
			n.Cordoned = true
		case 2:
			n.Ready, n.Problem = false, "the engine does not answer"
		case 3:
			n.Used.MemoryBytes = usable.MemoryBytes
		case 4:
			n.Labels = nil
		case 5:
			n.Place = boxed.PlaceOwn
		}
	}
	return nodes
}

func askOfThousand(entry boxed.NodeID) scheduler.Ask {
	a := ask(512*boxed.MiB, 1)
	a.Entry, a.Arch, a.Image, a.Labels = entry, "amd64", "docker.io/library/python:3.12", map[string]string{"disk": "ssd"}
	a.Isolation = scheduler.IsolationGVisor
	return a
}

func BenchmarkPlace1000(b *testing.B) {
	nodes := thousand()
	a := askOfThousand(nodes[500].ID)
	c, err := scheduler.Place(nodes, a)
	if err != nil {
		b.Fatal(err)
	}
	taken := 0
	for _, n := range nodes {
		if scheduler.Fits(n, a) == nil {
			taken++
		}
	}
	b.Logf("%d of %d nodes fit; chose %s", taken, len(nodes), c.Node)
	b.ReportAllocs()
	for b.Loop() {
		scheduler.Place(nodes, a)
	}
}

// All equal and empty: every node has to wait for its turn.
func BenchmarkPlace1000Equal(b *testing.B) {
	nodes := cluster(9, sizes(1000, 16)...)
	b.ReportAllocs()
	for b.Loop() {
		scheduler.Place(nodes, ask(512*boxed.MiB, 1))
	}
}

// What a caller with a Ledger adds to it.
func BenchmarkLedger1000(b *testing.B) {
	nodes := thousand()
	a := askOfThousand(nodes[500].ID)
	var l scheduler.Ledger
	for i := range 200 {
		l.Placed(nodes[i*5].ID, a, noon)
	}
	b.ReportAllocs()
	for b.Loop() {
		for i := range nodes {
			n := nodes[i]
			l.Apply(&n, a, noon, noon)
		}
	}
}

// Every node refuses, and each is told why.
func BenchmarkPlaceNowhere1000(b *testing.B) {
	nodes := thousand()
	a := ask(100*gib, 1)
	b.ReportAllocs()
	for b.Loop() {
		scheduler.Place(nodes, a)
	}
}

func BenchmarkFits(b *testing.B) {
	nodes := thousand()
	for name, i := range map[string]int{"yes": 10, "no": 1} {
		b.Run(name, func(b *testing.B) {
			a := askOfThousand("")
			b.ReportAllocs()
			for b.Loop() {
				scheduler.Fits(nodes[i], a)
			}
		})
	}
}

func sizes(n int, of ...int64) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = of[i%len(of)]
	}
	return out
}
