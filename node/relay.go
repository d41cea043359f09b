package node

import (
	"context"
	"net"

	"github.com/boxed-mesh/boxed"
)

// RelayEgress connects for a sandbox of the node that asks, or makes the requests that use
// a secret which this node holds.
func (h *host) RelayEgress(ctx context.Context, r boxed.EgressRelay) (net.Conn, error) {
	origin, owner := boxed.HopFrom(ctx), boxed.PrincipalFrom(ctx).Owner
	switch {
	case origin == "" || owner == "":
		return nil, boxed.Errorf(boxed.CodeForbidden, "nodes ask each other this")
	case h.cfg.Egress == nil:
		return nil, errNoEgress()
	}
	return h.cfg.Egress.Keeper.Foreign(ctx, origin, owner, r)
}

// RelayEgress is a host's.
func (n *Node) RelayEgress(ctx context.Context, r boxed.EgressRelay) (net.Conn, error) {
	return n.host.RelayEgress(ctx, r)
}

// Relay connects for a sandbox of this node by way of another, which takes this node's word
// for whose it is.
func (n *Node) Relay(ctx context.Context, to boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error) {
	mesh := n.others(context.Background())
	if mesh == nil {
		return nil, boxed.Errorf(boxed.CodeNotReady, "this node is in no cluster")
	}
	if _, known := mesh.Node(to); !known {
		return nil, boxed.Errorf(boxed.CodeNotReady, "no node %s is known", to)
	}
	who := boxed.WithPrincipal(ctx, boxed.Principal{Owner: owner, Role: boxed.RoleUser})
	return mesh.Peer(to).RelayEgress(who, r)
}
