package node

import (
	"context"
	"io"
	"net"
	"net/http"

	"github.com/boxed-mesh/boxed"
)

// at finds who serves calls about a sandbox: this host, or the node that its ID
// names. Nothing is looked up, so no directory can be wrong; that a node is
// silent its Peer says, which asks it all the same: gossip is a hint.
func (n *Node) at(ctx context.Context, id boxed.ID) (boxed.API, error) {
	owner := id.Node()
	if owner == n.cfg.ID {
		return n.host, nil
	}
	mesh := n.others(ctx)
	if mesh == nil {
		return n.host, nil // which has no such sandbox, and says so
	}
	if _, known := mesh.Node(owner); !known {
		return nil, errNoNode(id)
	}
	return mesh.Peer(owner), nil
}

// Owner carries requests about a sandbox to the node that its ID names; nil is
// this one. It is for front doors that pass a request on as it came.
func (n *Node) Owner(ctx context.Context, id boxed.ID) (http.RoundTripper, error) {
	owner, mesh := id.Node(), n.others(ctx)
	if owner == n.cfg.ID || mesh == nil {
		return nil, nil
	}
	if _, known := mesh.Node(owner); !known {
		return nil, errNoNode(id)
	}
	return mesh.HTTP(owner), nil
}

func errNoNode(id boxed.ID) error {
	return boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %s: no node of the mesh is %s", id, id.Node())
}

// on calls f at the owner of a sandbox.
func on[T any](ctx context.Context, n *Node, id boxed.ID, f func(boxed.API) (T, error)) (T, error) {
	api, err := n.at(ctx, id)
	if err != nil {
		var zero T
		return zero, err
	}
	return f(api)
}

// do is on for what answers nothing.
func (n *Node) do(ctx context.Context, id boxed.ID, f func(boxed.API) error) error {
	api, err := n.at(ctx, id)
	if err != nil {
		return err
	}
	return f(api)
}

// Get returns living sandboxes and end records.
func (n *Node) Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Sandbox, error) { return a.Get(ctx, id) })
}

// Wait returns when the sandbox is in the state, or has ended.
func (n *Node) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Sandbox, error) { return a.Wait(ctx, id, until) })
}

// Destroy ends a sandbox.
func (n *Node) Destroy(ctx context.Context, id boxed.ID) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.Destroy(ctx, id) })
}

// Update changes a living sandbox.
func (n *Node) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Sandbox, error) { return a.Update(ctx, id, u) })
}

// Pause freezes a sandbox.
func (n *Node) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Sandbox, error) { return a.Pause(ctx, id) })
}

// Resume thaws a sandbox.
func (n *Node) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Sandbox, error) { return a.Resume(ctx, id) })
}

// Stats is what a sandbox uses now.
func (n *Node) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Stats, error) { return a.Stats(ctx, id) })
}

// lostStatus is the end of an exec of which nothing is known.
func lostStatus() boxed.ExitStatus { return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1} }

// Exec runs a program.
func (n *Node) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	api, err := n.at(ctx, id)
	if err != nil {
		return lostStatus(), err
	}
	return api.Exec(ctx, id, req)
}

// StartExec starts a program that outlives the call.
func (n *Node) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Exec, error) { return a.StartExec(ctx, id, req) })
}

// Attach joins an exec.
func (n *Node) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	api, err := n.at(ctx, id)
	if err != nil {
		return lostStatus(), err
	}
	return api.Attach(ctx, id, exec, req)
}

// GetExec describes an exec.
func (n *Node) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.Exec, error) { return a.GetExec(ctx, id, exec) })
}

// ListExecs lists a sandbox's execs.
func (n *Node) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	return on(ctx, n, id, func(a boxed.API) ([]boxed.Exec, error) { return a.ListExecs(ctx, id) })
}

// SignalExec signals an exec.
func (n *Node) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.SignalExec(ctx, id, exec, signal, tree) })
}

// KillExec ends an exec's tree.
func (n *Node) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.KillExec(ctx, id, exec) })
}

// Stat describes a path.
func (n *Node) Stat(ctx context.Context, id boxed.ID, path string) (*boxed.FileInfo, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.FileInfo, error) { return a.Stat(ctx, id, path) })
}

// ListFiles lists a directory.
func (n *Node) ListFiles(ctx context.Context, id boxed.ID, path string) ([]boxed.FileInfo, error) {
	return on(ctx, n, id, func(a boxed.API) ([]boxed.FileInfo, error) { return a.ListFiles(ctx, id, path) })
}

// ReadFile opens a part of a file.
func (n *Node) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.FileReader, error) { return a.ReadFile(ctx, id, req) })
}

// WriteFile writes a file.
func (n *Node) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.FileInfo, error) { return a.WriteFile(ctx, id, req) })
}

// Mkdir makes a directory.
func (n *Node) Mkdir(ctx context.Context, id boxed.ID, path string, parents bool) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.Mkdir(ctx, id, path, parents) })
}

// Remove removes a path.
func (n *Node) Remove(ctx context.Context, id boxed.ID, path string, recursive bool) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.Remove(ctx, id, path, recursive) })
}

// Move renames a path.
func (n *Node) Move(ctx context.Context, id boxed.ID, from, to string) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.Move(ctx, id, from, to) })
}

// ReadTar streams a path as a tar.
func (n *Node) ReadTar(ctx context.Context, id boxed.ID, path string) (io.ReadCloser, error) {
	return on(ctx, n, id, func(a boxed.API) (io.ReadCloser, error) { return a.ReadTar(ctx, id, path) })
}

// WriteTar unpacks a tar.
func (n *Node) WriteTar(ctx context.Context, id boxed.ID, path string, tar io.Reader) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.WriteTar(ctx, id, path, tar) })
}

// ListPorts lists what listens inside.
func (n *Node) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	return on(ctx, n, id, func(a boxed.API) ([]boxed.Port, error) { return a.ListPorts(ctx, id) })
}

// Dial connects to a port inside.
func (n *Node) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	return on(ctx, n, id, func(a boxed.API) (net.Conn, error) { return a.Dial(ctx, id, port) })
}
