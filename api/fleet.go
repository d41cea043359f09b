package api

import (
	"net/http"

	"github.com/boxed-mesh/boxed"
)

func (c *call) nodeInfo() error {
	info, err := c.s.cfg.Service.NodeInfo(c.ctx)
	return c.replyNode(info, err)
}

// replyNode answers with a node whose lists and maps are never null.
func (c *call) replyNode(info *boxed.NodeInfo, err error) error {
	if err != nil {
		return err
	}
	n := *info
	n.Problems, n.Runtimes, n.Templates, n.Pool = never(n.Problems), never(n.Runtimes), never(n.Templates), never(n.Pool)
	if n.WarmMisses == nil {
		n.WarmMisses = map[string]int64{}
	}
	return c.reply(http.StatusOK, n)
}

func (c *call) listNodes() error {
	list, err := c.s.cfg.Service.ListNodes(c.ctx)
	if err != nil {
		return err
	}
	list.Nodes = never(list.Nodes)
	for i := range list.Nodes {
		list.Nodes[i].Runtimes = never(list.Nodes[i].Runtimes)
	}
	return c.reply(http.StatusOK, list)
}

func (c *call) getNode() error {
	info, err := c.s.cfg.Service.GetNode(c.ctx, c.v.str("node"))
	return c.replyNode(info, err)
}

func (c *call) cordonNode() error   { return c.cordon(true) }
func (c *call) uncordonNode() error { return c.cordon(false) }

func (c *call) cordon(on bool) error {
	info, err := c.s.cfg.Service.CordonNode(c.ctx, c.v.str("node"), on)
	return c.replyNode(info, err)
}

func (c *call) drainNode() error {
	req, err := readInto[struct {
		Within boxed.Duration `json:"within"`
	}](c)
	if err != nil {
		return err
	}
	info, err := c.s.cfg.Service.DrainNode(c.ctx, c.v.str("node"), req.Within)
	return c.replyNode(info, err)
}

func (c *call) explain() error {
	spec, err := readInto[boxed.Spec](c)
	if err != nil {
		return err
	}
	e, err := c.s.cfg.Service.Explain(c.ctx, spec)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, boxed.Explanation{Verdicts: never(e.Verdicts)})
}

func (c *call) claim() error {
	if _, passedOn := hopOf(c.r); !passedOn {
		return boxed.Errorf(boxed.CodeForbidden, "nodes ask each other this")
	}
	req, err := readInto[struct {
		Key  string `json:"idempotency_key"`
		Done bool   `json:"done"`
	}](c)
	if err != nil {
		return err
	}
	sb, err := c.s.cfg.Service.Claim(c.ctx, req.Key, req.Done)
	if err != nil {
		return err
	}
	if sb != nil {
		shown := presentable(*sb)
		sb = &shown
	}
	return c.reply(http.StatusOK, map[string]any{"sandbox": sb})
}

// cluster is the port for the cluster, if there is one and the caller may use it.
func (c *call) cluster() (boxed.Cluster, error) {
	_, passedOn := hopOf(c.r)
	switch {
	case passedOn || !c.who.Admin():
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an administrator's key may do this, on the node itself")
	case c.s.cfg.Cluster == nil:
		return nil, boxed.Errorf(boxed.CodeUnavailable, "this node has no mesh")
	}
	return c.s.cfg.Cluster, nil
}

// onCluster answers with what the cluster is after do.
func (c *call) onCluster(do func(boxed.Cluster) (*boxed.ClusterStatus, error)) error {
	cl, err := c.cluster()
	if err != nil {
		return err
	}
	status, err := do(cl)
	if err != nil {
		return err
	}
	s := *status
	s.Nodes, s.Faults, s.Held, s.Removed = never(s.Nodes), never(s.Faults), never(s.Held), never(s.Removed)
	for i := range s.Nodes {
		s.Nodes[i].Runtimes = never(s.Nodes[i].Runtimes)
	}
	return c.reply(http.StatusOK, s)
}

func (c *call) clusterStatus() error {
	return c.onCluster(func(cl boxed.Cluster) (*boxed.ClusterStatus, error) { return cl.ClusterStatus(c.ctx) })
}

func (c *call) startCluster() error {
	return c.onCluster(func(cl boxed.Cluster) (*boxed.ClusterStatus, error) {
		req, err := readInto[boxed.ClusterRequest](c)
		if err != nil {
			return nil, err
		}
		return cl.StartCluster(c.ctx, req)
	})
}

func (c *call) rotateClusterKey() error {
	return c.onCluster(func(cl boxed.Cluster) (*boxed.ClusterStatus, error) { return cl.RotateClusterKey(c.ctx) })
}

func (c *call) removeNode() error {
	return c.onCluster(func(cl boxed.Cluster) (*boxed.ClusterStatus, error) { return cl.RemoveNode(c.ctx, c.v.str("node")) })
}

func (c *call) leaveCluster() error {
	cl, err := c.cluster()
	if err != nil {
		return err
	}
	if err := cl.LeaveCluster(c.ctx); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) clusterToken() error {
	cl, err := c.cluster()
	if err != nil {
		return err
	}
	token, err := cl.ClusterToken(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]string{"token": token})
}
