package node

import (
	"context"

	"github.com/boxed-mesh/boxed"
)

// checkEgress judges what a spec wants to reach, and says in it who asks.
func (h *host) checkEgress(spec boxed.Spec, who boxed.Principal) error {
	if spec.Egress == nil {
		return nil
	}
	if h.cfg.Egress == nil {
		return boxed.Errorf(boxed.CodeUnavailable, "egress: this node gives sandboxes no way out; leave it away").WithField("egress")
	}
	spec.Egress.Admin = who.Admin()
	return h.cfg.Egress.Check(who.Owner, spec.Egress)
}

// MeshNodes are this node, first, and all others that are known.
func (n *Node) MeshNodes() []boxed.NodeSummary {
	if m := n.others(context.Background()); m != nil {
		return m.Nodes()
	}
	return nil
}
