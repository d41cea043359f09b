package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/transport"
)

// StartCluster makes a cluster, or joins one with a token. What fails leaves the
// node alone, as it was.
func (m *mesh) StartCluster(ctx context.Context, req boxed.ClusterRequest) (*boxed.ClusterStatus, error) {
	for field, value := range map[string]string{"listen": req.Listen, "advertise": req.Advertise} {
		if _, _, err := net.SplitHostPort(value); value != "" && err != nil {
			return nil, boxed.Errorf(boxed.CodeInvalid, "%s: %q is not an address and a port, like 192.168.1.10:%d", field, value, transport.DefaultPort).WithField(field)
		}
	}
	token := joinToken{Cluster: boxed.NewToken(10), Key: transport.NewClusterKey()}
	if req.Token != "" {
		var err error
		if token, err = parseToken(req.Token); err != nil {
			return nil, err
		}
	}
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	run := m.ctx
	m.mu.Unlock()
	if run == nil || run.Err() != nil {
		return nil, boxed.Errorf(boxed.CodeNotReady, "the node is starting or stopping; try again in a moment")
	}
	if id := m.remembered().ID; id != "" {
		return nil, boxed.Errorf(boxed.CodeConflict, "this node is in the cluster %s already; `boxedctl cluster leave` takes it out", id)
	}
	if err := m.become(token, req); err != nil {
		return nil, err
	}
	err := m.start(run)
	if err == nil && req.Token != "" {
		err = m.admitted(ctx)
	}
	if err != nil {
		m.down()
		if leaveErr := m.alone(); leaveErr != nil {
			m.log.Error("forget the cluster that was not joined", "err", leaveErr)
		}
		return nil, err
	}
	return m.ClusterStatus(ctx)
}

// admitted waits until a node of the cluster has let this one in.
func (m *mesh) admitted(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, joinPatience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		status := m.cluster.Status()
		for _, n := range status.Nodes[min(1, len(status.Nodes)):] {
			if n.State == boxed.NodeAlive {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			var why []string
			for _, f := range status.Faults {
				why = append(why, f.Message)
			}
			return boxed.Errorf(boxed.CodeNotReady, "no node of the cluster let this one in within %v: %s; is the token the present one, and can this host reach that address, TCP and UDP?",
				joinPatience, or(strings.Join(why, "; "), "none answers"))
		}
	}
}

// alone forgets the cluster.
func (m *mesh) alone() error {
	known := m.known()
	all, err := known.All()
	if err != nil {
		return err
	}
	for _, s := range all {
		if err := known.Delete(s.ID); err != nil {
			return err
		}
	}
	if err := m.cluster.Enter(node.ClusterState{}); err != nil {
		return err
	}
	// What others wrote is the cluster's: it must not come along into another one.
	if err := m.db.DropDocuments(func(d boxed.Document) bool { return boxed.NodeIDOf(d.Author) == m.id }); err != nil {
		return err
	}
	return errors.Join(m.keys.Reload(), m.sshKeys.Reload(), m.policies.Reload())
}

// leaveFlush is how long what a node takes back has to reach the others.
const leaveFlush = 3 * time.Second

// LeaveCluster takes this node out.
func (m *mesh) LeaveCluster(context.Context) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.remembered().ID == "" {
		return errNoCluster()
	}
	if err := m.keys.Unshare(m.id); err != nil {
		return err
	}
	m.cluster.Documents().Flush(leaveFlush)
	m.down()
	return m.alone()
}

func errNoCluster() error {
	return boxed.Errorf(boxed.CodeConflict, "this node is in no cluster; `boxedctl cluster init` makes one")
}

// ClusterToken is what the next node joins with.
func (m *mesh) ClusterToken(context.Context) (string, error) {
	keys, state := m.cluster.GateKeys(), m.remembered()
	if state.ID == "" || len(keys) == 0 {
		return "", errNoCluster()
	}
	t := joinToken{Cluster: state.ID, Key: keys[0]}
	for _, n := range m.cluster.Status().Nodes {
		if n.State == boxed.NodeAlive && n.Address != "" && len(t.Seeds) < maxSeeds {
			t.Seeds = append(t.Seeds, n.Address)
		}
	}
	return t.String(), nil
}

// ClusterStatus is what this node knows of its cluster.
func (m *mesh) ClusterStatus(ctx context.Context) (*boxed.ClusterStatus, error) {
	s := m.cluster.Status()
	list, err := m.node.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	s.Nodes = list.Nodes
	if s.ID != "" {
		s.Network = m.cfg.Mesh.Network
	}
	if m.tailnet != nil {
		s.Tailnet = m.tailnet.Standing()
		s.Tailnet.Blocked = blocked(s, m.tailnet.Seeds())
	}
	return s, nil
}

// blocked are the machines with the node tag which a fault says do not answer.
func blocked(s *boxed.ClusterStatus, tagged []string) (list []string) {
	for _, f := range s.Faults {
		for _, addr := range tagged {
			if (f.Peer == addr || strings.Contains(f.Message, addr)) && strings.Contains(f.Message, transport.ErrUnreachable.Error()) {
				list = append(list, addr)
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// RemoveNode removes a node for good.
func (m *mesh) RemoveNode(ctx context.Context, ref string) (*boxed.ClusterStatus, error) {
	id, err := m.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	if err := m.cluster.Remove(id); err != nil {
		return nil, err
	}
	return m.ClusterStatus(ctx)
}

// find is the ID of a node, which need not be there.
func (m *mesh) find(ctx context.Context, ref string) (boxed.NodeID, error) {
	list, err := m.node.ListNodes(ctx)
	if err != nil {
		return "", err
	}
	var found []boxed.NodeID
	for _, n := range list.Nodes {
		if string(n.ID) == ref || n.Name == ref {
			found = append(found, n.ID)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return "", boxed.Errorf(boxed.CodeConflict, "%q could be %d nodes; give the ID: %v", ref, len(found), found).With("ids", found)
	case boxed.NodeID(ref).Valid():
		return boxed.NodeID(ref), nil
	}
	return "", boxed.Errorf(boxed.CodeNotFound, "there is no node %q in the cluster; give its whole ID or name", ref)
}

// RotateClusterKey replaces the cluster key.
func (m *mesh) RotateClusterKey(ctx context.Context) (*boxed.ClusterStatus, error) {
	if err := m.cluster.Rotate(); err != nil {
		return nil, err
	}
	return m.ClusterStatus(ctx)
}
