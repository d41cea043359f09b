package scheduler_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

func drawNode(t *rapid.T, id string) scheduler.NodeState {
	one := func(of int, what string) bool { return rapid.IntRange(1, of).Draw(t, what) == 1 }
	n := scheduler.NodeState{
		ID: boxed.NodeID(id), Arch: rapid.SampledFrom([]string{"amd64", "amd64", "arm64"}).Draw(t, "arch"),
		Runtimes: rapid.SampledFrom([][]string{nil, {"runc"}, {"runc", "runsc"}, {"kata", "runsc", "crun"}}).Draw(t, "runtimes"),
		Default:  rapid.SampledFrom([]string{"runc", "runc", "crun", ""}).Draw(t, "default"),
		Labels:   rapid.SampledFrom([]map[string]string{nil, {"zone": "a"}, {"zone": "b", "gpu": "yes"}}).Draw(t, "labels"),
		Silent:   one(10, "silent"), Ready: !one(5, "not ready"), Draining: one(10, "draining"), Cordoned: one(10, "cordoned"),
		Place:  rapid.SampledFrom([]boxed.PlaceRule{"", "", "", boxed.PlaceAny, boxed.PlaceOwn, boxed.PlaceNever}).Draw(t, "place"),
		Total:  boxed.Capacity{MemoryBytes: rapid.Int64Range(0, 8*gib).Draw(t, "memory"), CPUs: rapid.Float64Range(0, 8).Draw(t, "cpus"), Sandboxes: rapid.IntRange(0, 20).Draw(t, "sandboxes")},
		Used:   boxed.Capacity{MemoryBytes: rapid.Int64Range(0, 8*gib).Draw(t, "used"), CPUs: rapid.Float64Range(0, 30).Draw(t, "used"), Sandboxes: rapid.IntRange(0, 20).Draw(t, "used")},
		Warm:   rapid.IntRange(0, 2).Draw(t, "warm"),
		Images: rapid.SampledFrom([]map[string]bool{nil, {"python": true}}).Draw(t, "images"),
		Load:   rapid.Float64Range(0, 5).Draw(t, "load"), RTT: time.Duration(rapid.IntRange(0, 80).Draw(t, "rtt")) * time.Millisecond,
		Policy: scheduler.Policy{MemoryOvercommit: rapid.Float64Range(0.5, 2).Draw(t, "mo"), CPUOvercommit: rapid.Float64Range(0.5, 8).Draw(t, "co"), Reserve: rapid.Float64Range(0, 0.5).Draw(t, "reserve")},
	}
	if one(3, "says what it may promise") {
		n.Capacity = n.Usable()
	}
	return n
}

func drawAsk(t *rapid.T) scheduler.Ask {
	ids := func(what string) []boxed.NodeID {
		return rapid.SampledFrom([][]boxed.NodeID{nil, nil, nil, {"n1"}, {"n0", "n1", "n2", "n3"}}).Draw(t, what)
	}
	return scheduler.Ask{
		Limits:    boxed.Limits{MemoryBytes: rapid.Int64Range(0, 4*gib).Draw(t, "ask"), CPUs: rapid.Float64Range(0, 8).Draw(t, "ask")},
		Runtime:   rapid.SampledFrom([]string{"", "", "runc", "runsc"}).Draw(t, "runtime"),
		Isolation: rapid.SampledFrom([]string{"", "", "container", "gvisor", "vm"}).Draw(t, "isolation"),
		Arch:      rapid.SampledFrom([]string{"", "", "amd64"}).Draw(t, "arch"),
		Image:     rapid.SampledFrom([]string{"", "python"}).Draw(t, "image"),
		Labels:    rapid.SampledFrom([]map[string]string{nil, nil, {"zone": "b"}, {"zone": "a", "gpu": "yes"}}).Draw(t, "labels"),
		Node:      boxed.NodeID(rapid.SampledFrom([]string{"", "", "", "", "n1"}).Draw(t, "pin")),
		Near:      ids("near"), Apart: ids("apart"),
		Entry:    boxed.NodeID(rapid.SampledFrom([]string{"", "n0", "n2", "n9"}).Draw(t, "entry")),
		Exclude:  rapid.SampledFrom([]map[boxed.NodeID]error{nil, nil, {"n1": nil}, {"n0": boxed.Errorf(boxed.CodeExhausted, "full"), "n2": nil}}).Draw(t, "exclude"),
		Strategy: rapid.SampledFrom([]scheduler.Strategy{"", scheduler.Spread, scheduler.Pack}).Draw(t, "strategy"),
	}
}

func TestPlaceAndFitsNeverDisagree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var nodes []scheduler.NodeState
		for i := range rapid.IntRange(0, 6).Draw(t, "nodes") {
			nodes = append(nodes, drawNode(t, fmt.Sprintf("n%d", i)))
		}
		ask := drawAsk(t)
		before := fmt.Sprintf("%+v %+v", nodes, ask)
		choice, err := scheduler.Place(nodes, ask)
		id, rejected := choice.Node, choice.Rejected()
		if fmt.Sprintf("%+v %+v", nodes, ask) != before {
			t.Fatal("Place changed what it was given")
		}

		reasons := map[boxed.NodeID]scheduler.Reason{}
		for _, r := range rejected {
			if r.Message == "" || r.Reason == "" {
				t.Fatalf("no reason in %+v", r)
			}
			reasons[r.Node] = r.Reason
		}
		fits := 0
		for _, n := range nodes {
			r := scheduler.Fits(n, ask)
			switch {
			case r == nil:
				if fits++; n.ID != id && reasons[n.ID] != scheduler.OtherBetter {
					t.Fatalf("%s fits, its reason is %q", n.ID, reasons[n.ID])
				}
			case n.ID == id:
				t.Fatalf("placed on %s, which says %q", id, r.Message)
			case reasons[n.ID] != r.Reason:
				t.Fatalf("%s: Place says %q, Fits %q", n.ID, reasons[n.ID], r.Reason)
			}
		}
		if (err == nil) != (fits > 0) || (id == "") != (err != nil) {
			t.Fatalf("%d nodes fit; got %q, %v", fits, id, err)
		}
		if want := len(nodes) - min(fits, 1); len(rejected) != want || len(reasons) != want {
			t.Fatalf("%d rejections, want %d", len(rejected), want)
		}
		if err, ok := ask.Exclude[id]; ok {
			t.Fatalf("chose %s, which refused it with %v", id, err)
		}

		again, _ := scheduler.Place(rapid.Permutation(nodes).Draw(t, "order"), ask)
		if again.Node != id || !slices.Equal(rejected, again.Rejected()) {
			t.Fatalf("another order of the nodes gives %q instead of %q", again.Node, id)
		}
	})
}

// Of equals the first by ID from the entry on, whatever IDs look like.
func TestTheRingGoesByID(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[ab]{1,2}|aaaaaaaa[ab]{0,2}|[a-z2-7]{16}`)
		ids := rapid.SliceOfNDistinct(id, 1, 12, rapid.ID).Draw(t, "ids")
		entry := id.Draw(t, "entry")
		var nodes []scheduler.NodeState
		for _, id := range ids {
			nodes = append(nodes, node(id))
		}
		a := ask(gib, 1)
		a.Entry = boxed.NodeID(entry)
		choice, err := scheduler.Place(nodes, a)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(ids)
		i, _ := slices.BinarySearch(ids, entry)
		if want := ids[i%len(ids)]; string(choice.Node) != want {
			t.Fatalf("of %q, %q chose %q, want %q", ids, entry, choice.Node, want)
		}
	})
}

func TestRuntimeForAndFitsNeverDisagree(t *testing.T) {
	later := []scheduler.Reason{scheduler.TooLarge, scheduler.NoRoom, scheduler.NoMemory, scheduler.NoCPU}
	rapid.Check(t, func(t *rapid.T) {
		n, ask := drawNode(t, "n1"), drawAsk(t)
		runtime, r := scheduler.RuntimeFor(n, ask), scheduler.Fits(n, ask)
		switch {
		case r == nil || slices.Contains(later, r.Reason):
			if runtime == "" {
				t.Fatal("it has no runtime, and Fits does not mind")
			}
		case r.Reason == scheduler.NoRuntime || r.Reason == scheduler.NoIsolation:
			if runtime != "" {
				t.Fatalf("it would run it with %s, and Fits says %q", runtime, r.Message)
			}
		}
		if runtime == "" {
			return
		}
		strength := []string{scheduler.IsolationContainer, scheduler.IsolationGVisor, scheduler.IsolationVM}
		if !slices.Contains(n.Runtimes, runtime) || (ask.Runtime != "" && runtime != ask.Runtime) ||
			slices.Index(strength, scheduler.IsolationOf(runtime)) < slices.Index(strength, ask.Isolation) {
			t.Fatalf("%q of %q for %+v", runtime, n.Runtimes, ask)
		}
	})
}

// More room never makes a sandbox fit less, and one that asks for less never
// fits less.
func TestFitsIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, ask := drawNode(t, "n1"), drawAsk(t)
		n.Capacity = boxed.Capacity{}
		if scheduler.Fits(n, ask) != nil {
			return
		}
		better := n
		better.Total.MemoryBytes += rapid.Int64Range(0, gib).Draw(t, "+memory")
		better.Total.CPUs += rapid.Float64Range(0, 4).Draw(t, "+cpus")
		better.Used.MemoryBytes -= min(better.Used.MemoryBytes, rapid.Int64Range(0, gib).Draw(t, "-used"))
		better.Used.CPUs -= min(better.Used.CPUs, rapid.Float64Range(0, 4).Draw(t, "-used"))
		better.Used.Sandboxes = max(0, better.Used.Sandboxes-1)
		better.Warm++
		better.Runtimes = append(slices.Clone(n.Runtimes), "another")
		better.Place = ""
		smaller := ask
		smaller.Limits.MemoryBytes -= min(ask.Limits.MemoryBytes, rapid.Int64Range(0, gib).Draw(t, "-ask"))
		smaller.Limits.CPUs -= min(ask.Limits.CPUs, rapid.Float64Range(0, 4).Draw(t, "-ask"))
		drop := func(what string, do func()) {
			if rapid.Bool().Draw(t, "without "+what) {
				do()
			}
		}
		drop("labels", func() { smaller.Labels = nil })
		drop("near", func() { smaller.Near = nil })
		drop("apart", func() { smaller.Apart = nil })
		drop("exclude", func() { smaller.Exclude = nil })
		drop("node", func() { smaller.Node = "" })
		if r := scheduler.Fits(better, smaller); r != nil {
			t.Fatalf("a smaller sandbox on a better node: %s", r.Message)
		}
	})
}

// Pack leaves nodes free, but fills none beyond 85 % while another has room.
func TestPackKeepsBelow85PercentWhileItCan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := ask(rapid.Int64Range(1, 4*gib).Draw(t, "ask"), 0.01)
		a.Strategy = scheduler.Pack
		would := map[boxed.NodeID]float64{}
		var nodes []scheduler.NodeState
		for i := range rapid.IntRange(1, 6).Draw(t, "nodes") {
			n := node(fmt.Sprintf("n%d", i), used(rapid.Int64Range(0, 9*gib).Draw(t, "used"), 0, 0), load(rapid.Float64Range(0, 50).Draw(t, "load")))
			nodes = append(nodes, n)
			would[n.ID] = float64(n.Used.MemoryBytes+a.Limits.MemoryBytes) / float64(n.Usable().MemoryBytes)
		}
		choice, err := scheduler.Place(nodes, a)
		if err != nil || would[choice.Node] <= 0.85 {
			return
		}
		for id, w := range would {
			if w < 0.85 {
				t.Fatalf("chose %s, now %.0f %% full, and %s would be %.0f %% full", choice.Node, 100*would[choice.Node], id, 100*w)
			}
		}
	})
}

// Many entries place by snapshots of any age, and each node admits by its own
// books: none ever promises more than it may.
func TestAdmissionNeverPromisesTooMuch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var books, snapshot []scheduler.NodeState
		for i := range rapid.IntRange(1, 4).Draw(t, "nodes") {
			n := node(fmt.Sprintf("n%d", i))
			n.Total.Sandboxes = rapid.IntRange(0, 12).Draw(t, "most")
			books = append(books, n)
		}
		ledgers := make([]scheduler.Ledger, len(books))
		snapshot = slices.Clone(books)
		for range 40 {
			if rapid.IntRange(0, 9).Draw(t, "news") == 0 {
				snapshot = slices.Clone(books)
			}
			entry := rapid.IntRange(0, len(books)-1).Draw(t, "entry")
			a := ask(rapid.Int64Range(0, 2*gib).Draw(t, "memory"), rapid.Float64Range(0.01, 4).Draw(t, "cpus"))
			a.Entry, a.Exclude = books[entry].ID, map[boxed.NodeID]error{}
			for range 3 {
				view := slices.Clone(snapshot)
				for i := range view {
					ledgers[entry].Apply(&view[i], a, noon, noon)
				}
				choice, err := scheduler.Place(view, a)
				if err != nil {
					break
				}
				if _, ok := a.Exclude[choice.Node]; ok {
					t.Fatalf("chose %s again", choice.Node)
				}
				p := ledgers[entry].Placed(choice.Node, a, noon)
				i := slices.IndexFunc(books, func(n scheduler.NodeState) bool { return n.ID == choice.Node })
				admit := a
				admit.Exclude = nil
				if r := scheduler.Fits(books[i], admit); r != nil {
					ledgers[entry].Withdraw(p)
					a.Exclude[choice.Node] = r.AsError()
					continue
				}
				books[i].Used.MemoryBytes += a.Limits.MemoryBytes
				books[i].Used.CPUs += a.Limits.CPUs
				books[i].Used.Sandboxes++
				break
			}
		}
		for _, n := range books {
			usable := n.Usable()
			if n.Used.MemoryBytes > usable.MemoryBytes || n.Used.CPUs > usable.CPUs+0.05 || (n.Total.Sandboxes > 0 && n.Used.Sandboxes > n.Total.Sandboxes) {
				t.Fatalf("promised %+v of %+v", n.Used, usable)
			}
		}
	})
}
