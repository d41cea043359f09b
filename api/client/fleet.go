package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/boxed-mesh/boxed"
)

func nodePath(ref string) string { return "/v1/nodes/" + url.PathEscape(ref) }

// ListNodes are the nodes of the mesh, the one that answers first.
func (c *Client) ListNodes(ctx context.Context) (boxed.NodeList, error) {
	list, err := get[boxed.NodeList](ctx, c, "/v1/nodes", nil)
	if err != nil {
		return boxed.NodeList{}, err
	}
	return *list, nil
}

// GetNode describes a node by its own word.
func (c *Client) GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error) {
	return get[boxed.NodeInfo](ctx, c, nodePath(ref), nil)
}

// CordonNode keeps new sandboxes away from a node, or lets them in again.
func (c *Client) CordonNode(ctx context.Context, ref string, on bool) (*boxed.NodeInfo, error) {
	action := "/uncordon"
	if on {
		action = "/cordon"
	}
	return ask[boxed.NodeInfo](ctx, c, http.MethodPost, nodePath(ref)+action, nil, nil)
}

// DrainNode empties a node.
func (c *Client) DrainNode(ctx context.Context, ref string, within boxed.Duration) (*boxed.NodeInfo, error) {
	return ask[boxed.NodeInfo](ctx, c, http.MethodPost, nodePath(ref)+"/drain", nil, map[string]boxed.Duration{"within": within})
}

// Explain says where a sandbox would go, and why not elsewhere.
func (c *Client) Explain(ctx context.Context, spec boxed.Spec) (*boxed.Explanation, error) {
	return ask[boxed.Explanation](ctx, c, http.MethodPost, "/v1/explain", nil, spec)
}

// Claim is for nodes only.
func (c *Client) Claim(ctx context.Context, idempotencyKey string, done bool) (*boxed.Sandbox, error) {
	out, err := ask[struct {
		Sandbox *boxed.Sandbox `json:"sandbox"`
	}](ctx, c, http.MethodPost, "/v1/claim", nil, map[string]any{"idempotency_key": idempotencyKey, "done": done})
	if err != nil {
		return nil, err
	}
	return out.Sandbox, nil
}

// StartCluster makes a cluster, or joins one.
func (c *Client) StartCluster(ctx context.Context, req boxed.ClusterRequest) (*boxed.ClusterStatus, error) {
	return ask[boxed.ClusterStatus](ctx, c, http.MethodPost, "/v1/cluster", nil, req)
}

// ClusterToken is what the next node joins with.
func (c *Client) ClusterToken(ctx context.Context) (string, error) {
	out, err := get[struct {
		Token string `json:"token"`
	}](ctx, c, "/v1/cluster/token", nil)
	if err != nil {
		return "", err
	}
	return out.Token, nil
}

// ClusterStatus describes the cluster as the node sees it.
func (c *Client) ClusterStatus(ctx context.Context) (*boxed.ClusterStatus, error) {
	return get[boxed.ClusterStatus](ctx, c, "/v1/cluster", nil)
}

// RemoveNode removes a node for good.
func (c *Client) RemoveNode(ctx context.Context, ref string) (*boxed.ClusterStatus, error) {
	return ask[boxed.ClusterStatus](ctx, c, http.MethodDelete, "/v1/cluster/nodes/"+url.PathEscape(ref), nil, nil)
}

// RotateClusterKey replaces the cluster key.
func (c *Client) RotateClusterKey(ctx context.Context) (*boxed.ClusterStatus, error) {
	return ask[boxed.ClusterStatus](ctx, c, http.MethodPost, "/v1/cluster/rotate-key", nil, nil)
}

// LeaveCluster takes the node out of its cluster.
func (c *Client) LeaveCluster(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/v1/cluster", nil, nil, nil)
}
