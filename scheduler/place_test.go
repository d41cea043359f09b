package scheduler_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

func warm(n *scheduler.NodeState) { n.Warm = 1 }

func image(n *scheduler.NodeState) { n.Images = map[string]bool{"python:3.12": true} }

func load(l float64) func(*scheduler.NodeState) {
	return func(n *scheduler.NodeState) { n.Load = l }
}

func away(d time.Duration) func(*scheduler.NodeState) {
	return func(n *scheduler.NodeState) { n.RTT = d }
}

func TestPlacePrefers(t *testing.T) {
	type nodes = []scheduler.NodeState
	pack := func(a *scheduler.Ask) { a.Strategy = scheduler.Pack }
	from := func(id boxed.NodeID) func(*scheduler.Ask) { return func(a *scheduler.Ask) { a.Entry = id } }
	tenth := int64(9 * gib / 10)
	for name, tc := range map[string]struct {
		nodes nodes
		ask   func(*scheduler.Ask)
		want  string
		says  string // of node a, or of b where a is chosen
	}{
		"a warm sandbox":                     {nodes{node("a"), node("b", used(8*gib-tenth, 8, 8), warm)}, nil, "b", "has a warm sandbox"},
		"not a warm one without room":        {nodes{node("a"), node("b", used(9*gib, 8, 8), warm)}, nil, "a", "0 MiB left"},
		"a warm sandbox before the image":    {nodes{node("a", image), node("b", warm)}, nil, "b", "has a warm sandbox"},
		"the image, though fuller":           {nodes{node("a"), node("b", used(2*gib, 1, 2), image)}, nil, "b", "it fits and lacks the image, which counts as 30 % of a node"},
		"not the image where it is full":     {nodes{node("a"), node("b", used(4*gib, 4, 8), image)}, nil, "a", "counts as 44 % full; node a as 0 % full"},
		"packing, the image":                 {nodes{node("a", used(4*gib, 1, 4)), node("b", used(3*gib, 1, 3), image)}, func(a *scheduler.Ask) { a.Strategy = scheduler.Pack }, "b", "lacks the image"},
		"the least full by memory":           {nodes{node("a", used(4*gib, 1, 4)), node("b", used(3*gib, 1, 3))}, nil, "b", "counts as 44 % full; node b as 33 % full"},
		"the least full by CPUs":             {nodes{node("a", used(gib, 12, 4)), node("b", used(3*gib, 1, 3))}, nil, "b", "counts as 83 % full"},
		"not by less than a step":            {nodes{node("a", used(gib+gib/4, 1, 4)), node("b", used(gib, 1, 3))}, nil, "a", "turn"},
		"not the busy":                       {nodes{node("a", load(3.2)), node("b", used(gib, 1, 1))}, nil, "b", "load of 3.2 per core"},
		"the busy before the full":           {nodes{node("a", load(1.9)), node("b", used(4*gib, 1, 1))}, nil, "a", "counts as 44 % full with a load of 0.0 per core; node a as 0 % full with 1.9"},
		"a load of less is nothing":          {nodes{node("a", load(1.5)), node("b", load(0))}, nil, "a", "turn"},
		"the near before the far":            {nodes{node("a", away(12*time.Millisecond)), node("b", away(9*time.Millisecond))}, nil, "b", "12ms away"},
		"not the near by little":             {nodes{node("a", away(9*time.Millisecond)), node("b", away(3*time.Millisecond))}, nil, "a", "turn"},
		"the empty before the near":          {nodes{node("a", away(time.Minute)), node("b", used(3*gib, 1, 1))}, nil, "a", "counts as 33 % full"},
		"the first by name without an entry": {nodes{node("b"), node("a"), node("c")}, nil, "a", "its turn comes first"},
		"the entry itself":                   {nodes{node("a"), node("b"), node("c")}, from("b"), "b", "its turn comes first from node b"},
		"who comes after the entry":          {nodes{node("a"), node("c"), node("d")}, from("b"), "c", "from node b"},
		"round the ring":                     {nodes{node("b"), node("a")}, from("c"), "a", "from node c"},
		"after an entry that has no room":    {nodes{node("a"), node("b", used(9*gib, 9, 9)), node("c")}, from("b"), "c", "from node b"},
		"packing, the fullest":               {nodes{node("a", used(gib, 1, 1)), node("b", used(4*gib, 1, 4))}, pack, "b", "the fullest up to 85 % goes first"},
		"packing, not beyond 85 %":           {nodes{node("a"), node("b", used(7*gib, 1, 7))}, pack, "a", "88 % full"},
		"packing, the least beyond 85 %":     {nodes{node("a", used(8*gib-tenth/10, 1, 7)), node("b", used(7*gib, 1, 7))}, pack, "b", "88 % full"},
		"packing, not the busy":              {nodes{node("a", used(4*gib, 1, 4), load(9)), node("b", used(3*gib, 1, 4))}, pack, "b", "load of 9.0"},
		"packing, below 85 % though busy":    {nodes{node("a", used(7*gib, 1, 7)), node("b", load(50))}, pack, "b", "88 % full"},
		"packing, a warm sandbox":            {nodes{node("a", used(gib, 1, 1)), node("b", warm)}, pack, "b", "warm"},
	} {
		t.Run(name, func(t *testing.T) {
			a := ask(gib, 1)
			a.Image = "python:3.12"
			if tc.ask != nil {
				tc.ask(&a)
			}
			c, err := scheduler.Place(tc.nodes, a)
			if err != nil || string(c.Node) != tc.want {
				t.Errorf("got %s, %v; want %s", c.Node, err, tc.want)
			}
			rejected := c.Rejected()
			if len(rejected) != len(tc.nodes)-1 {
				t.Fatalf("got %v", rejected)
			}
			if !strings.Contains(rejected[0].Message, tc.says) {
				t.Errorf("got %q, want %q", rejected[0].Message, tc.says)
			}
		})
	}
}

// The entry has room for it, but is so small that it would be nearly full.
func TestALargeSandboxGoesWhereItFillsLess(t *testing.T) {
	nodes := cluster(1, 16, 64)
	a := ask(10*gib, 1)
	a.Entry = nodes[0].ID
	if c, err := scheduler.Place(nodes, a); err != nil || c.Node != nodes[1].ID {
		t.Errorf("got %v, %v", c.Node, err)
	}
}

// A node that says it holds less than nothing, or gives up more than it holds.
func TestAStrangeSnapshotIsGraded(t *testing.T) {
	for name, n := range map[string]scheduler.NodeState{
		"less than nothing": node("a", used(-5*gib, -3, 0)),
		"not a number":      node("a", used(0, math.NaN(), 0), load(math.NaN())),
		"all idle": node("a", func(n *scheduler.NodeState) {
			n.Idle = boxed.Capacity{MemoryBytes: math.MaxInt64 / 4, CPUs: 1e300}
		}),
	} {
		if _, err := scheduler.Place([]scheduler.NodeState{n, node("b")}, ask(1, 0)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheErrorNamesANodeThatWasMeant(t *testing.T) {
	a := ask(gib, 1)
	a.Near = []boxed.NodeID{"b"}
	_, err := scheduler.Place([]scheduler.NodeState{node("a"), node("b", used(9*gib, 4, 9)), node("c")}, a)
	if err == nil || !strings.HasPrefix(err.Error(), "it asks for 1024 MiB of memory and the node has 0 MiB left") {
		t.Errorf("got %v", err)
	}
}

func TestANodeThatRefusedIsPassedOver(t *testing.T) {
	nodes := []scheduler.NodeState{node("a"), node("b"), node("c")}
	a := ask(gib, 1)
	a.Entry, a.Exclude = "b", map[boxed.NodeID]error{}
	var order []string
	for {
		c, err := scheduler.Place(nodes, a)
		if err != nil {
			if boxed.CodeOf(err) != boxed.CodeExhausted || !strings.Contains(err.Error(), "it refused: full by now") {
				t.Errorf("got %v", err)
			}
			break
		}
		order = append(order, string(c.Node))
		a.Exclude[c.Node] = boxed.Errorf(boxed.CodeExhausted, "full by now")
	}
	if got := strings.Join(order, " "); got != "b c a" {
		t.Errorf("asked %s", got)
	}
}
