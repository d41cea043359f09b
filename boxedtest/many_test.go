package boxedtest_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
)

// Twenty nodes that place at the same time, each by what it last heard of the
// others, spread what is asked of them evenly, and one list has all of it.
func TestTwentyNodesHoldTwoThousandSandboxes(t *testing.T) {
	const nodes, each = 20, 100
	c := boxedtest.New(t, nodes)
	ann := c.As("ann")
	var creating sync.WaitGroup
	for _, by := range c.Nodes {
		for range 4 {
			creating.Go(func() {
				for range each / 4 {
					if _, err := by.Create(ann, boxed.Spec{}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	creating.Wait()
	for _, n := range c.Nodes {
		if held := n.Driver.Running(); held > each*3/2 || held < each/2 {
			t.Errorf("%s holds %d, and %d would be even", n.ID, held, each)
		}
	}
	seen := map[boxed.ID]bool{}
	for cursor, pages := "", 0; ; pages++ {
		var page boxed.List
		c.Eventually("all nodes answer", func() (ok bool) {
			var err error
			page, err = c.Nodes[pages%nodes].List(ann, boxed.Filter{Limit: 300, Cursor: cursor}) // each page by another node
			return err == nil && len(page.Incomplete) == 0
		})
		for _, s := range page.Sandboxes {
			if seen[s.ID] {
				t.Fatalf("%s is listed twice", s.ID)
			}
			seen[s.ID] = true
		}
		if cursor = page.Next; cursor == "" {
			break
		}
	}
	if len(seen) != nodes*each {
		t.Errorf("%d of %d are listed", len(seen), nodes*each)
	}
}

// A list over pages has each sandbox once, also of a node that is away for one
// page and back for the next, and of one that joins in between.
func TestAListOverPagesLosesNothingWhileNodesComeAndGo(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	want := map[boxed.ID]bool{}
	for i := range 30 {
		want[c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[i%3].ID}).ID] = true
	}
	got := map[boxed.ID]bool{}
	cursor := ""
	next := func() (incomplete int) {
		t.Helper()
		page, err := c.Nodes[0].List(ann, boxed.Filter{Limit: 4, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page.Sandboxes {
			if got[s.ID] {
				t.Errorf("%s is listed twice", s.ID)
			}
			got[s.ID] = true
		}
		cursor = page.Next
		return len(page.Incomplete)
	}
	next()
	c.Kill(c.Nodes[2])
	c.WaitState(c.Nodes[2], boxed.NodeSilent)
	if next() != 1 {
		t.Error("the page does not say that a node is missing")
	}
	next()
	c.Restart(c.Nodes[2])
	late := c.Add()
	c.WaitMesh(c.Nodes...)
	want[c.Create(ann, c.Nodes[0], boxed.Spec{Node: late.ID}).ID] = true
	for cursor != "" {
		next()
	}
	for id := range want {
		if !got[id] {
			t.Errorf("%s of %d is not listed", id, len(want))
		}
	}
}

// The events of all nodes come as one stream, each once, and a cursor of one node
// is good on another.
func TestOneStreamHasTheEventsOfAllNodes(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	type seen struct {
		sandbox boxed.ID
		typ     boxed.EventType
	}
	collect := func(by *boxedtest.Node, after boxed.Cursor, until int) (map[seen]int, boxed.Cursor) {
		t.Helper()
		events := map[seen]int{}
		cursor := after
		for e, err := range by.Events(ann, after) {
			if err != nil {
				t.Fatal(err)
			}
			events[seen{e.Sandbox, e.Type}]++
			if cursor = e.Cursor; len(events) == until {
				break
			}
		}
		return events, cursor
	}
	var first []*boxed.Sandbox
	for _, n := range c.Nodes {
		first = append(first, c.Create(ann, c.Nodes[0], boxed.Spec{Node: n.ID}))
	}
	events, cursor := collect(c.Nodes[0], boxed.CursorOldest, 6) // created and started
	for _, s := range first {
		if events[seen{s.ID, boxed.EventCreated}] != 1 || events[seen{s.ID, boxed.EventStarted}] != 1 {
			t.Errorf("of %s: %v", s.ID, events)
		}
	}
	c.Kill(c.Nodes[2])
	c.WaitState(c.Nodes[2], boxed.NodeSilent)
	second := c.Create(ann, c.Nodes[1], boxed.Spec{})
	c.Restart(c.Nodes[2])
	c.WaitMesh(c.Nodes...)
	third := c.Create(ann, c.Nodes[1], boxed.Spec{Node: c.Nodes[2].ID})
	events, _ = collect(c.Nodes[1], cursor, 4)
	for _, s := range []*boxed.Sandbox{second, third} {
		if events[seen{s.ID, boxed.EventCreated}] != 1 || events[seen{s.ID, boxed.EventStarted}] != 1 {
			t.Errorf("of %s: %v", s.ID, events)
		}
	}
}

// What a node did that had said nothing when the stream broke off is not lost: the
// cursor knows when the stream began.
func TestEventsOfAQuietNodeAreNotLostOverAReconnect(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	watch, stop := context.WithTimeout(ann, 10*time.Second)
	defer stop()
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		time.Sleep(300 * time.Millisecond) // until the stream is there
		c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[0].ID})
	}()
	var cursor boxed.Cursor
	for e, err := range c.Nodes[0].Events(watch, "") {
		if err != nil {
			t.Fatal(err)
		}
		cursor = e.Cursor
		break
	}
	<-watching
	quiet := c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[2].ID})
	again, end := context.WithTimeout(ann, 10*time.Second)
	defer end()
	for e, err := range c.Nodes[1].Events(again, cursor) {
		if err != nil {
			t.Fatalf("the event of %s was lost: %v", quiet.ID, err)
		}
		if e.Sandbox == quiet.ID {
			return
		}
	}
}
