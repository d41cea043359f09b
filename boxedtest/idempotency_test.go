package boxedtest_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
)

// keyFrom is a UUID of version 7 that was made at a time.
func keyFrom(t time.Time, n int) string {
	ms := uint64(t.UnixMilli())
	return fmt.Sprintf("%08x-%04x-7000-8000-%012x", ms>>16, ms&0xffff, n)
}

func TestACreateThatIsSentAgainIsTheSameSandbox(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann, bob := c.As("ann"), c.As("bob")
	spec := boxed.Spec{IdempotencyKey: "build-1", Labels: map[string]string{"a": "1"}}
	first := c.Create(ann, c.Nodes[0], spec)
	for _, by := range c.Nodes {
		if again := c.Create(ann, by, spec); again.ID != first.ID {
			t.Errorf("by %s it is %s, not %s", by.ID, again.ID, first.ID)
		}
	}
	if other := c.Create(bob, c.Nodes[1], spec); other.ID == first.ID {
		t.Error("another owner's key is not the same")
	}
	different := spec
	different.Labels = map[string]string{"a": "2"}
	if _, err := c.Nodes[1].Create(ann, different); boxed.CodeOf(err) != boxed.CodeConflict {
		t.Errorf("another spec under the key: %v", err)
	}
	if err := c.Nodes[2].Destroy(ann, first.ID); err != nil {
		t.Fatal(err)
	}
	if again, err := c.Nodes[1].Create(ann, spec); err != nil || again.ID != first.ID || !again.State.Ended() {
		t.Errorf("after its end: %+v, %v", again, err)
	}
}

// While a node is silent that may have made it, a retry makes no second one.
func TestARetryWaitsForANodeThatMayKnow(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	key := keyFrom(time.Now(), 1)
	spec := boxed.Spec{IdempotencyKey: key}
	first := c.Create(ann, c.Nodes[0], boxed.Spec{IdempotencyKey: key, Node: c.Nodes[2].ID})
	c.Kill(c.Nodes[2])
	c.WaitState(c.Nodes[2], boxed.NodeSilent)
	for _, k := range []string{key, "a-key-that-does-not-tell-its-age"} {
		if sb, err := c.Nodes[1].Create(ann, boxed.Spec{IdempotencyKey: k}); boxed.CodeOf(err) != boxed.CodeNotReady {
			t.Errorf("%q: got %+v, %v", k, sb, err)
		}
	}
	// A key that was made since cannot be known there.
	young := c.Create(ann, c.Nodes[1], boxed.Spec{IdempotencyKey: keyFrom(time.Now().Add(2*time.Minute), 2)})
	if young.ID == first.ID {
		t.Error("it is the first one")
	}
	c.Restart(c.Nodes[2])
	c.WaitMesh(c.Nodes...)
	if again := c.Create(ann, c.Nodes[1], spec); again.ID != first.ID {
		t.Errorf("it is %s, not %s", again.ID, first.ID)
	}
}

// Also where all ask one node, which makes none itself.
func TestOfManyAtOnceUnderOneKeyThereIsOneSandbox(t *testing.T) {
	for name, by := range map[string]func(*boxedtest.Cluster, int) *boxedtest.Node{
		"of all nodes": func(c *boxedtest.Cluster, i int) *boxedtest.Node { return c.Nodes[i%4] },
		"of one node":  func(c *boxedtest.Cluster, _ int) *boxedtest.Node { return c.Nodes[0] },
	} {
		t.Run(name, func(t *testing.T) { manyAtOnce(t, by) })
	}
}

func manyAtOnce(t *testing.T, entry func(*boxedtest.Cluster, int) *boxedtest.Node) {
	c := boxedtest.New(t, 4)
	ann := c.As("ann")
	if _, err := c.Nodes[0].CordonNode(c.AsAdmin("op"), c.Nodes[0].Name(), true); err != nil {
		t.Fatal(err)
	}
	for round := range 5 {
		key := fmt.Sprintf("round-%d", round)
		var mu sync.Mutex
		ids := map[boxed.ID]bool{}
		var asking sync.WaitGroup
		for i := range 8 {
			by := entry(c, i)
			asking.Go(func() {
				for end := time.Now().Add(boxedtest.Patience); time.Now().Before(end); time.Sleep(time.Duration(10+7*i) * time.Millisecond) {
					sb, err := by.Create(ann, boxed.Spec{IdempotencyKey: key})
					if err == nil {
						mu.Lock()
						ids[sb.ID] = true
						mu.Unlock()
						return
					}
					if boxed.CodeOf(err) != boxed.CodeNotReady {
						t.Errorf("got %v", err)
						return
					}
				}
				t.Error("it was told to wait for ever")
			})
		}
		asking.Wait()
		if len(ids) != 1 {
			t.Fatalf("%d sandboxes were made: %v", len(ids), ids)
		}
	}
	list, err := c.Nodes[0].List(ann, boxed.Filter{Limit: 100})
	if err != nil || len(list.Sandboxes) != 5 {
		t.Errorf("%d sandboxes, %v", len(list.Sandboxes), err)
	}
}
