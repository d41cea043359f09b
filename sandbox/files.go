package sandbox

import (
	"context"
	"io"
	"net"
	"path"
	"sync"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// path makes a caller's path absolute.
func (b *box) path(p string) string {
	if path.IsAbs(p) {
		return p
	}
	return path.Join(b.record().Sandbox.Dir, p)
}

// Stat describes a path; links are not followed.
func (m *Manager) Stat(ctx context.Context, id boxed.ID, p string) (*boxed.FileInfo, error) {
	var info *boxed.FileInfo
	err := m.with(id, func(b *box, host *agent.Host) error {
		found, err := host.Stat(ctx, b.path(p))
		info = fileInfo(found)
		return b.linkError(err)
	})
	if err != nil {
		return nil, err
	}
	return info, nil
}

// ListFiles lists a directory.
func (m *Manager) ListFiles(ctx context.Context, id boxed.ID, p string) ([]boxed.FileInfo, error) {
	list := []boxed.FileInfo{}
	err := m.with(id, func(b *box, host *agent.Host) error {
		infos, err := host.List(ctx, b.path(p))
		for _, info := range infos {
			list = append(list, *fileInfo(info))
		}
		return b.linkError(err)
	})
	return list, err
}

func fileInfo(i agent.FileInfo) *boxed.FileInfo {
	return &boxed.FileInfo{
		Name: i.Name, Path: i.Path, Type: i.Type, Size: i.Size, Mode: i.Mode & 0o7777, ModifiedAt: i.ModTime, Target: i.Target,
	}
}

// ReadFile opens a part of a regular file. Until it is closed the sandbox is
// busy.
func (m *Manager) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	b, host, done, err := m.hold(id)
	if err != nil {
		return nil, err
	}
	body, info, err := host.Read(ctx, agent.Read{Path: b.path(req.Path), Offset: req.Offset, Length: req.Length})
	if err != nil {
		done()
		return nil, b.linkError(err)
	}
	return &boxed.FileReader{
		ReadCloser: &heldReader{ReadCloser: body, b: b, done: done},
		Info:       *fileInfo(info.Info), Offset: info.Offset, Length: info.Length,
	}, nil
}

// heldReader keeps a sandbox busy until it is closed.
type heldReader struct {
	io.ReadCloser
	b    *box
	done func()
}

func (r *heldReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = r.b.linkError(err)
	}
	return n, err
}

func (r *heldReader) Close() error {
	r.done()
	return r.ReadCloser.Close()
}

// WriteFile writes one file, whole or not at all.
func (m *Manager) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	var info *boxed.FileInfo
	err := m.with(id, func(b *box, host *agent.Host) error {
		w := agent.Write{Path: b.path(req.Path), Mode: req.Mode, Parents: req.Parents}
		written, err := host.Write(ctx, w, req.Content)
		info = fileInfo(written)
		return b.transferError(err)
	})
	if err != nil {
		return nil, err
	}
	return info, nil
}

// transferError is linkError that leaves errors of the caller's own reader be.
func (b *box) transferError(err error) error {
	mapped := b.linkError(err)
	if boxed.CodeOf(mapped) == boxed.CodeInternal && boxed.CodeOf(err) != boxed.CodeInternal {
		return err
	}
	return mapped
}

// Mkdir makes a directory.
func (m *Manager) Mkdir(ctx context.Context, id boxed.ID, p string, parents bool) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		return b.linkError(host.Mkdir(ctx, b.path(p), parents))
	})
}

// Remove removes a file or directory.
func (m *Manager) Remove(ctx context.Context, id boxed.ID, p string, recursive bool) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		return b.linkError(host.Remove(ctx, b.path(p), recursive))
	})
}

// Move renames.
func (m *Manager) Move(ctx context.Context, id boxed.ID, from, to string) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		return b.linkError(host.Move(ctx, b.path(from), b.path(to)))
	})
}

// ReadTar streams a path as a tar.
func (m *Manager) ReadTar(ctx context.Context, id boxed.ID, p string) (io.ReadCloser, error) {
	b, host, done, err := m.hold(id)
	if err != nil {
		return nil, err
	}
	body, err := host.ReadTar(ctx, b.path(p))
	if err != nil {
		done()
		return nil, b.linkError(err)
	}
	return &heldReader{ReadCloser: body, b: b, done: done}, nil
}

// WriteTar unpacks a tar into a directory.
func (m *Manager) WriteTar(ctx context.Context, id boxed.ID, p string, tar io.Reader) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		return b.transferError(host.WriteTar(ctx, b.path(p), tar))
	})
}

// ListPorts lists what listens inside.
func (m *Manager) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	ports := []boxed.Port{}
	err := m.with(id, func(b *box, host *agent.Host) error {
		found, err := host.Ports(ctx)
		for _, p := range found {
			ports = append(ports, boxed.Port{Port: p.Port, Address: clip(p.Address), Process: clip(p.Process)})
		}
		return b.linkError(err)
	})
	return ports, err
}

// Dial connects to a loopback port inside. The connection keeps the sandbox
// busy until it is closed.
func (m *Manager) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	b, host, done, err := m.hold(id)
	if err != nil {
		return nil, err
	}
	conn, err := host.Dial(ctx, port)
	if err != nil {
		done()
		return nil, b.linkError(err)
	}
	return &heldConn{Conn: conn, done: done}, nil
}

// heldConn keeps a sandbox busy until it is closed.
type heldConn struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *heldConn) Close() error {
	c.once.Do(c.done)
	return c.Conn.Close()
}

// CloseWrite ends one direction.
func (c *heldConn) CloseWrite() error {
	return c.Conn.(interface{ CloseWrite() error }).CloseWrite()
}

// Stats is what a sandbox uses now, as the host and as its agent see it.
func (m *Manager) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	if err := b.alive(); err != nil {
		return nil, err
	}
	r := b.record()
	if r.ContainerID == "" {
		return nil, boxed.Errorf(boxed.CodeConflict, "sandbox %s is not running yet; wait for it", id)
	}
	stats, err := m.cfg.Driver.Stats(ctx, r.ContainerID)
	if err != nil {
		return nil, err
	}
	if host := b.link(); r.Sandbox.State == boxed.StateRunning && host != nil {
		if inside, err := host.Stats(ctx); err == nil {
			stats.Execs, stats.AgentRSSBytes, stats.Processes = inside.Execs, inside.RSSBytes, int64(inside.Processes)
		}
	}
	stats.MemoryLimit, stats.At = r.Sandbox.Limits.MemoryBytes, m.cfg.Now()
	return &stats, nil
}
