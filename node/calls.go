package node

import (
	"context"
	"io"
	"net"

	"github.com/boxed-mesh/boxed"
)

// The calls below look whether the caller may see the sandbox, and pass on.

// Destroy ends a sandbox. Destroying what has ended is nil.
func (n *Node) Destroy(ctx context.Context, id boxed.ID) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.Destroy(ctx, id)
}

// Pause freezes a sandbox.
func (n *Node) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Pause(ctx, id)
}

// Resume thaws a sandbox.
func (n *Node) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Resume(ctx, id)
}

// Stats is what a sandbox uses now.
func (n *Node) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Stats(ctx, id)
}

// Exec runs a program.
func (n *Node) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	if err := checkExec(req); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	return n.cfg.Manager.Exec(ctx, id, req)
}

// StartExec starts a program that outlives the call.
func (n *Node) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	if err := checkExec(req); err != nil {
		return nil, err
	}
	return n.cfg.Manager.StartExec(ctx, id, req)
}

// Attach joins an exec.
func (n *Node) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	return n.cfg.Manager.Attach(ctx, id, exec, req)
}

// GetExec describes an exec.
func (n *Node) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.GetExec(ctx, id, exec)
}

// ListExecs lists a sandbox's execs.
func (n *Node) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.ListExecs(ctx, id)
}

// SignalExec signals an exec.
func (n *Node) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.SignalExec(ctx, id, exec, signal, tree)
}

// KillExec ends an exec's tree.
func (n *Node) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.KillExec(ctx, id, exec)
}

// Stat describes a path.
func (n *Node) Stat(ctx context.Context, id boxed.ID, path string) (*boxed.FileInfo, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Stat(ctx, id, path)
}

// ListFiles lists a directory.
func (n *Node) ListFiles(ctx context.Context, id boxed.ID, path string) ([]boxed.FileInfo, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.ListFiles(ctx, id, path)
}

// ReadFile opens a part of a file.
func (n *Node) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.ReadFile(ctx, id, req)
}

// WriteFile writes a file.
func (n *Node) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.WriteFile(ctx, id, req)
}

// Mkdir makes a directory.
func (n *Node) Mkdir(ctx context.Context, id boxed.ID, path string, parents bool) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.Mkdir(ctx, id, path, parents)
}

// Remove removes a path.
func (n *Node) Remove(ctx context.Context, id boxed.ID, path string, recursive bool) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.Remove(ctx, id, path, recursive)
}

// Move renames a path.
func (n *Node) Move(ctx context.Context, id boxed.ID, from, to string) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.Move(ctx, id, from, to)
}

// ReadTar streams a path as a tar.
func (n *Node) ReadTar(ctx context.Context, id boxed.ID, path string) (io.ReadCloser, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.ReadTar(ctx, id, path)
}

// WriteTar unpacks a tar.
func (n *Node) WriteTar(ctx context.Context, id boxed.ID, path string, tar io.Reader) error {
	if _, err := n.mine(ctx, id); err != nil {
		return err
	}
	return n.cfg.Manager.WriteTar(ctx, id, path, tar)
}

// ListPorts lists what listens inside.
func (n *Node) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.ListPorts(ctx, id)
}

// Dial connects to a port inside.
func (n *Node) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	if _, err := n.mine(ctx, id); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Dial(ctx, id, port)
}
