package boxedtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
)

// Case I9: a removed node is out within a second, on all nodes, and does not come
// back by a restart; what it made that is in force stays in force.
func TestARemovedNodeIsOutWithinASecond(t *testing.T) {
	c := boxedtest.New(t, 4)
	removed, rest := c.Nodes[3], c.Nodes[:3]
	root := boxed.WithPrincipal(context.Background(), boxed.Principal{Owner: "root", Role: boxed.RoleAdmin})
	key, err := removed.Keys.CreateKey(root, boxed.KeyRequest{Owner: "ann", Role: boxed.RoleUser})
	if err != nil {
		t.Fatal(err)
	}
	c.Eventually("the key is known", func() bool {
		_, err := c.Nodes[0].Keys.Authenticate(root, key.Secret)
		return err == nil
	})
	before := c.Nodes[1].Cluster.Status().Key
	start := time.Now()
	if err := c.Nodes[0].Cluster.Remove(removed.ID); err != nil {
		t.Fatal(err)
	}
	c.Eventually("no node lists it", func() bool {
		for _, n := range rest {
			if _, listed := n.Members.Node(removed.ID); listed {
				return false
			}
		}
		return true
	})
	if took := time.Since(start); took > time.Second {
		t.Errorf("it took %v", took)
	}
	for _, n := range rest {
		if _, err := n.Keys.Authenticate(root, key.Secret); err != nil {
			t.Errorf("a key that it made is worthless: %v", err)
		}
	}
	if _, err := removed.Keys.CreateKey(root, boxed.KeyRequest{Owner: "eve", Role: boxed.RoleAdmin}); err != nil {
		t.Fatal(err) // on its own disk it may write what it likes
	}
	c.Eventually("the key is replaced on those that stay", func() bool {
		for _, n := range rest {
			if keys := n.Cluster.GossipKeys(); len(keys) == 0 || keys[0].ID() == before {
				return false
			}
		}
		return true
	})
	c.Kill(removed)
	c.Restart(removed)
	time.Sleep(3 * time.Second) // it tries every two
	for _, n := range rest {
		if _, listed := n.Members.Node(removed.ID); listed {
			t.Error("it is back")
		}
		keys, _ := n.Keys.ListKeys(root)
		for _, k := range keys {
			if k.Owner == "eve" {
				t.Error("what it wrote after its removal is in force")
			}
		}
	}
	c.WaitMesh(rest...)
}

func TestTheClusterKeyIsReplacedOnAllNodes(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	before := c.Nodes[0].Cluster.Status().Key
	away := c.Nodes[2]
	c.Kill(away)
	c.WaitState(away, boxed.NodeSilent)
	if err := c.Nodes[0].Cluster.Rotate(); err != nil {
		t.Fatal(err)
	}
	if now := c.Nodes[0].Cluster.Status().Key; now == before {
		t.Error("the status still names the old key")
	}
	c.Eventually("both have it", func() bool {
		return c.Nodes[1].Cluster.Status().Key == c.Nodes[0].Cluster.Status().Key && c.Nodes[1].Cluster.Status().Key != before
	})
	sb := c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[1].ID})
	c.WaitRunning(ann, c.Nodes[0], sb.ID)
}
