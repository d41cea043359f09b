package boxedtest_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
)

// A probe of memberlist's that is under way when it is shut down ends with its own
// deadline, two seconds later at most.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

func TestAnyNodeServesAnySandbox(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	for _, by := range c.Nodes {
		sb := c.Create(ann, by, boxed.Spec{})
		for _, through := range c.Nodes {
			var out bytes.Buffer
			status, err := through.Exec(ann, sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader("hello"), Stdout: &out})
			if err != nil || status.Code != 0 || out.String() != "hello" {
				t.Errorf("made by %s, through %s: %+v, %v, %q", by.ID, through.ID, status, err, out.String())
			}
		}
		if err := c.Other(c.Owner(sb)).Destroy(ann, sb.ID); err != nil {
			t.Error(err)
		}
	}
}

func TestAKilledNodesSandboxesGoOn(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	sb := c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[2].ID})
	c.Kill(c.Nodes[2])
	c.WaitState(c.Nodes[2], boxed.NodeSilent)
	start := time.Now()
	_, err := c.Nodes[0].Get(ann, sb.ID)
	if boxed.CodeOf(err) != boxed.CodeNotReady || !strings.Contains(err.Error(), "n2") || !strings.Contains(err.Error(), "since 20") {
		t.Errorf("got %v", err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	list, err := c.Nodes[0].List(ann, boxed.Filter{})
	if err != nil || len(list.Incomplete) != 1 || list.Incomplete[0] != c.Nodes[2].ID {
		t.Errorf("got %+v, %v", list, err)
	}
	c.Restart(c.Nodes[2])
	c.WaitRunning(ann, c.Nodes[0], sb.ID)
	if n := c.Nodes[2].Driver.Running(); n != 1 {
		t.Errorf("%d containers run", n)
	}
}

func TestAPartitionKeepsEachSideAtWork(t *testing.T) {
	c := boxedtest.New(t, 3)
	ann := c.As("ann")
	far := c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[2].ID})
	c.Partition(c.Nodes[:2], c.Nodes[2:])
	c.Eventually("the sides lose each other", func() bool {
		a, _ := c.Nodes[0].Members.Node(c.Nodes[2].ID)
		b, _ := c.Nodes[2].Members.Node(c.Nodes[0].ID)
		return a.State == boxed.NodeSilent && b.State == boxed.NodeSilent
	})
	c.Create(ann, c.Nodes[0], boxed.Spec{})
	c.Create(ann, c.Nodes[2], boxed.Spec{})
	if _, err := c.Nodes[2].Get(ann, far.ID); err != nil {
		t.Error(err)
	}
	c.Heal()
	c.WaitMesh(c.Nodes...)
	list, err := c.Nodes[1].List(ann, boxed.Filter{})
	if err != nil || len(list.Sandboxes) != 3 || len(list.Incomplete) != 0 {
		t.Errorf("%d sandboxes, %v, %v", len(list.Sandboxes), list.Incomplete, err)
	}
}

func TestAKeyIsKnownAndRevokedOnEveryNodeWithinASecond(t *testing.T) {
	c := boxedtest.New(t, 5)
	ann := c.As("ann")
	id, secret := boxed.PrincipalFrom(ann).Key, boxed.CredentialFrom(ann)
	root := boxed.WithPrincipal(context.Background(), boxed.Principal{Owner: "root", Role: boxed.RoleAdmin})
	start := time.Now()
	if err := c.Nodes[4].Keys.RevokeKey(root, id); err != nil {
		t.Fatal(err)
	}
	c.Eventually("it is worthless everywhere", func() bool {
		for _, n := range c.Nodes {
			if _, err := n.Keys.Authenticate(root, secret); err == nil {
				return false
			}
		}
		return true
	})
	t.Logf("after %v", time.Since(start))
}

// A drain ends what is left when its time is up, and says once that the node is
// empty, over a restart too.
func TestADrainedNodeSaysSoOnce(t *testing.T) {
	c := boxedtest.New(t, 2)
	ann, root := c.As("ann"), c.AsAdmin("root")
	sb := c.Create(ann, c.Nodes[0], boxed.Spec{Node: c.Nodes[1].ID})
	if _, err := c.Nodes[0].DrainNode(root, "n1", 0); err != nil {
		t.Fatal(err)
	}
	said := func() (times int) {
		ctx, cancel := context.WithTimeout(root, time.Second)
		defer cancel()
		for e, err := range c.Nodes[0].Events(ctx, boxed.CursorOldest) {
			if err == nil && e.Type == boxed.EventNodeDrained {
				times++
			}
		}
		return times
	}
	c.Eventually("the node is drained", func() bool { return said() == 1 })
	if got, err := c.Nodes[0].Get(ann, sb.ID); err != nil || got.Reason != boxed.EndDrained {
		t.Errorf("%+v, %v", got, err)
	}
	c.Stop(c.Nodes[1])
	c.Restart(c.Nodes[1])
	c.WaitMesh(c.Nodes...)
	info, err := c.Nodes[0].GetNode(root, "n1")
	if err != nil || !info.Cordoned || info.Drain == nil || len(info.Drain.Waiting) != 0 {
		t.Errorf("after a restart: %+v, %v", info, err)
	}
	if n := said(); n != 1 {
		t.Errorf("it was said %d times", n)
	}
}
