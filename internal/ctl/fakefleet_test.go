//go:build linux

package ctl

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// fakeFleet is what a fake node knows of a mesh: itself, and two others that it
// makes up. attic is silent; cellar is well, and of another version.
type fakeFleet struct {
	cordoned map[boxed.NodeID]bool
	drain    *boxed.Drain // of the node itself; Waiting is filled in
	cluster  string
	key      int
	removed  []boxed.NodeID
}

const (
	fakeAttic  = boxed.NodeID("bbbbbbbbbbbbbbbb")
	fakeCellar = boxed.NodeID("cccccccccccccccc")
	fakeToken  = "boxedjoin_abcDEF-123"

	fakeCluster = "mesh000001"
)

func (n *fakeNode) ListNodes(ctx context.Context) (boxed.NodeList, error) {
	info, err := n.NodeInfo(ctx)
	if err != nil {
		return boxed.NodeList{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	list := []boxed.NodeSummary{
		{
			ID: info.ID, Name: info.Name, Version: info.Version, State: boxed.NodeAlive, Ready: true, Arch: info.Arch, Runtimes: info.Runtimes,
			Capacity: info.Capacity, Used: info.Used, Labels: map[string]string{"disk": "fast"}, Address: "192.0.2.1:7946", Cordoned: n.fleet.cordoned[info.ID],
		},
		{
			ID: fakeAttic, Name: "attic", Version: info.Version, State: boxed.NodeSilent, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Arch: "arm64",
			Capacity: info.Capacity, Cordoned: true, Address: "192.0.2.2:7946", Ahead: -4200, Runtimes: []string{},
		},
		{
			ID: fakeCellar, Name: "cellar", Version: "fake-0", State: boxed.NodeAlive, Ready: true, Arch: "amd64", Runtimes: []string{"runc"}, Place: boxed.PlaceOwn,
			Capacity: boxed.Capacity{MemoryBytes: 8 << 30, CPUs: 16, Sandboxes: 100}, Used: boxed.Capacity{MemoryBytes: 1 << 30, CPUs: 2, Sandboxes: 2},
			Address: "192.0.2.3:7946", RTT: 1.25, Problem: "the disk is nearly full", Cordoned: n.fleet.cordoned[fakeCellar],
		},
	}
	return boxed.NodeList{Nodes: slices.DeleteFunc(list, func(s boxed.NodeSummary) bool { return slices.Contains(n.fleet.removed, s.ID) })}, nil
}

func (n *fakeNode) GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error) {
	info, err := n.NodeInfo(ctx)
	if err != nil {
		return nil, err
	}
	list, err := n.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	id, err := findNode(list.Nodes, ref)
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no node %q in the mesh", ref)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	info.Cordoned = n.fleet.cordoned[id]
	switch id {
	case fakeAttic:
		return nil, boxed.Errorf(boxed.CodeNotReady, "node attic (bbbbbbbbbbbbbbbb) does not answer, since 2026-01-02T03:04:05Z; what runs there goes on, and can be reached when it is back")
	case fakeCellar:
		info.ID, info.Name, info.Version, info.Place = id, "cellar", "fake-0", boxed.PlaceOwn
		info.Labels = map[string]string{"disk": "slow", "gpu": ""}
		return info, nil
	}
	if n.fleet.drain != nil {
		d := *n.fleet.drain
		d.Waiting = []boxed.ID{}
		for _, b := range n.boxes {
			if !b.State.Ended() {
				d.Waiting = append(d.Waiting, b.ID)
			}
		}
		info.Drain = &d
	}
	return info, nil
}

func (n *fakeNode) CordonNode(ctx context.Context, ref string, on bool) (*boxed.NodeInfo, error) {
	if err := n.admin(ctx); err != nil {
		return nil, err
	}
	info, err := n.GetNode(ctx, ref)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	if n.fleet.cordoned == nil {
		n.fleet.cordoned = map[boxed.NodeID]bool{}
	}
	n.fleet.cordoned[info.ID] = on
	if !on {
		n.fleet.drain = nil
	}
	n.mu.Unlock()
	return n.GetNode(ctx, ref)
}

func (n *fakeNode) DrainNode(ctx context.Context, ref string, within boxed.Duration) (*boxed.NodeInfo, error) {
	if _, err := n.CordonNode(ctx, ref, true); err != nil {
		return nil, err
	}
	n.mu.Lock()
	now := time.Now().UTC()
	n.fleet.drain = &boxed.Drain{Since: now, Deadline: now.Add(within.D())}
	n.mu.Unlock()
	return n.GetNode(ctx, ref)
}

// Explain knows no scheduler, only some rules that the stories ask for.
func (n *fakeNode) Explain(ctx context.Context, spec boxed.Spec) (*boxed.Explanation, error) {
	own := boxed.Verdict{Node: fakeNodeID, Name: "fake", Chosen: true, Fits: true, Message: "it would go there"}
	switch p := spec.Placement; {
	case spec.Limits.MemoryBytes > 64<<30:
		own = boxed.Verdict{Node: fakeNodeID, Name: "fake", Reason: "too_large", Message: "128 GiB of memory is more than the node has"}
	case p != nil && len(p.Apart) > 0:
		own = boxed.Verdict{Node: fakeNodeID, Name: "fake", Reason: "anti_affinity", Message: "it has " + string(p.Apart[0])}
	case p != nil && p.NodeLabels["disk"] != "" && p.NodeLabels["disk"] != "fast":
		own = boxed.Verdict{Node: fakeNodeID, Name: "fake", Reason: "labels", Message: "it has not disk=" + p.NodeLabels["disk"]}
	}
	return &boxed.Explanation{Verdicts: []boxed.Verdict{
		own,
		{Node: fakeAttic, Name: "attic", Reason: "silent", Message: "the node does not answer"},
		{Node: fakeCellar, Name: "cellar", Reason: "place", Message: "it takes only what is asked of itself", Fits: spec.Name == "second-best"},
	}}, nil
}

func (n *fakeNode) NodeInfo(context.Context) (*boxed.NodeInfo, error) {
	return &boxed.NodeInfo{
		ID: fakeNodeID, Name: "fake", Version: "fake-1", Ready: true, Problems: []string{}, Arch: "amd64", Runtimes: []string{"runc", "runsc"},
		Default: "runc", Engine: "none", Cgroup: 2, Templates: []boxed.Template{{Name: boxed.DefaultTemplate, Image: "fake", Limits: boxed.DefaultLimits()}},
		Pool: []boxed.PoolInfo{}, WarmMisses: map[string]int64{"image": 2}, StartedAt: time.Now().UTC(),
	}, nil
}

// status is the cluster; without one it is the node alone.
func (n *fakeNode) status(ctx context.Context) (*boxed.ClusterStatus, error) {
	list, err := n.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s := &boxed.ClusterStatus{ID: n.fleet.cluster, Nodes: list.Nodes, Removed: n.fleet.removed}
	if s.ID == "" {
		s.Nodes = s.Nodes[:1]
		return s, nil
	}
	s.Key, s.Network = "key"+string(rune('1'+n.fleet.key)), "tcp"
	now := time.Now().UTC()
	s.Faults = []boxed.MeshFault{{At: now, Peer: "192.0.2.9:7946", Message: "it does not have the cluster key"}}
	s.Held = []boxed.HeldDocument{{Kind: "apikey", Key: "k1", Author: fakeAttic, Stamp: now.Add(time.Hour)}}
	return s, nil
}

// inCluster checks the caller, and that the node is in a cluster.
func (n *fakeNode) inCluster(ctx context.Context) error {
	if err := n.admin(ctx); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fleet.cluster == "" {
		return boxed.Errorf(boxed.CodeConflict, "this node is in no cluster; `boxedctl cluster init` makes one")
	}
	return nil
}

func (n *fakeNode) StartCluster(ctx context.Context, req boxed.ClusterRequest) (*boxed.ClusterStatus, error) {
	switch {
	case n.inCluster(ctx) == nil:
		return nil, boxed.Errorf(boxed.CodeConflict, "this node is in the cluster %s already; `boxedctl cluster leave` takes it out", fakeCluster)
	case req.Listen != "" && !strings.Contains(req.Listen, ":"):
		return nil, boxed.Errorf(boxed.CodeInvalid, "listen: %q is not an address and a port", req.Listen).WithField("listen")
	case req.Token != "" && !strings.HasPrefix(req.Token, "boxedjoin_"):
		return nil, boxed.Errorf(boxed.CodeInvalid, "that is not a join token").WithField("token")
	case req.Token != "" && req.Token != fakeToken:
		return nil, boxed.Errorf(boxed.CodeNotReady, "no node of the cluster let this one in within 10s: none answers")
	}
	n.mu.Lock()
	n.fleet.cluster = fakeCluster
	n.mu.Unlock()
	return n.status(ctx)
}

func (n *fakeNode) ClusterToken(ctx context.Context) (string, error) {
	return fakeToken, n.inCluster(ctx)
}

func (n *fakeNode) ClusterStatus(ctx context.Context) (*boxed.ClusterStatus, error) {
	return n.status(ctx)
}

func (n *fakeNode) RemoveNode(ctx context.Context, ref string) (*boxed.ClusterStatus, error) {
	if err := n.inCluster(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.fleet.removed = append(n.fleet.removed, boxed.NodeID(ref))
	n.fleet.key++
	n.mu.Unlock()
	return n.status(ctx)
}

func (n *fakeNode) RotateClusterKey(ctx context.Context) (*boxed.ClusterStatus, error) {
	if err := n.inCluster(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.fleet.key++
	n.mu.Unlock()
	return n.status(ctx)
}

func (n *fakeNode) LeaveCluster(ctx context.Context) error {
	if err := n.inCluster(ctx); err != nil {
		return err
	}
	n.mu.Lock()
	n.fleet = fakeFleet{}
	n.mu.Unlock()
	return nil
}

func (n *fakeNode) Claim(context.Context, string, bool) (*boxed.Sandbox, error) { return nil, nil }
