package node

import (
	"context"
	"io"
	"net"

	"github.com/boxed-mesh/boxed"
)

// The calls below look whether the caller may see the sandbox, and pass on.

// Destroy ends a sandbox. Destroying what has ended is nil.
func (h *host) Destroy(ctx context.Context, id boxed.ID) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.Destroy(ctx, id)
}

// Pause freezes a sandbox.
func (h *host) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Pause(ctx, id)
}

// Resume thaws a sandbox.
func (h *host) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Resume(ctx, id)
}

// Stats is what a sandbox uses now.
func (h *host) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Stats(ctx, id)
}

// Exec runs a program.
func (h *host) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	if err := checkExec(req); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	return h.cfg.Manager.Exec(ctx, id, req)
}

// StartExec starts a program that outlives the call.
func (h *host) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	if err := checkExec(req); err != nil {
		return nil, err
	}
	return h.cfg.Manager.StartExec(ctx, id, req)
}

// Attach joins an exec.
func (h *host) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, err
	}
	return h.cfg.Manager.Attach(ctx, id, exec, req)
}

// GetExec describes an exec.
func (h *host) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.GetExec(ctx, id, exec)
}

// ListExecs lists a sandbox's execs.
func (h *host) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.ListExecs(ctx, id)
}

// SignalExec signals an exec.
func (h *host) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.SignalExec(ctx, id, exec, signal, tree)
}

// KillExec ends an exec's tree.
func (h *host) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.KillExec(ctx, id, exec)
}

// Stat describes a path.
func (h *host) Stat(ctx context.Context, id boxed.ID, path string) (*boxed.FileInfo, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Stat(ctx, id, path)
}

// ListFiles lists a directory.
func (h *host) ListFiles(ctx context.Context, id boxed.ID, path string) ([]boxed.FileInfo, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.ListFiles(ctx, id, path)
}

// ReadFile opens a part of a file.
func (h *host) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.ReadFile(ctx, id, req)
}

// WriteFile writes a file.
func (h *host) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.WriteFile(ctx, id, req)
}

// Mkdir makes a directory.
func (h *host) Mkdir(ctx context.Context, id boxed.ID, path string, parents bool) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.Mkdir(ctx, id, path, parents)
}

// Remove removes a path.
func (h *host) Remove(ctx context.Context, id boxed.ID, path string, recursive bool) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.Remove(ctx, id, path, recursive)
}

// Move renames a path.
func (h *host) Move(ctx context.Context, id boxed.ID, from, to string) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.Move(ctx, id, from, to)
}

// ReadTar streams a path as a tar.
func (h *host) ReadTar(ctx context.Context, id boxed.ID, path string) (io.ReadCloser, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.ReadTar(ctx, id, path)
}

// WriteTar unpacks a tar.
func (h *host) WriteTar(ctx context.Context, id boxed.ID, path string, tar io.Reader) error {
	if _, err := h.mine(ctx, id); err != nil {
		return err
	}
	return h.cfg.Manager.WriteTar(ctx, id, path, tar)
}

// ListPorts lists what listens inside.
func (h *host) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.ListPorts(ctx, id)
}

// Dial connects to a port inside.
func (h *host) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Dial(ctx, id, port)
}
