package agent

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"sync"
	"time"
)

// Stat describes a path without following a link.
func (h *Host) Stat(ctx context.Context, path string) (info FileInfo, err error) {
	err = h.call(ctx, opStat, Path{Path: path}, &info)
	return info, err
}

// List lists a directory.
func (h *Host) List(ctx context.Context, path string) ([]FileInfo, error) {
	list := bounded[FileInfo]{most: MaxListing}
	err := h.call(ctx, opList, Path{Path: path}, &list)
	return list.items, err
}

// Mkdir makes a directory.
func (h *Host) Mkdir(ctx context.Context, path string, parents bool) error {
	return h.call(ctx, opMkdir, Path{Path: path, Parents: parents}, nil)
}

// Remove removes a file or directory.
func (h *Host) Remove(ctx context.Context, path string, recursive bool) error {
	return h.call(ctx, opRemove, Path{Path: path, Recursive: recursive}, nil)
}

// Move renames.
func (h *Host) Move(ctx context.Context, from, to string) error {
	return h.call(ctx, opMove, Move{From: from, To: to}, nil)
}

// Read opens a part of a file. The caller closes the reader; it fails, rather
// than end early, if not all of the part arrives.
func (h *Host) Read(ctx context.Context, r Read) (io.ReadCloser, ReadInfo, error) {
	var info ReadInfo
	conn, stop, err := h.ask(ctx, h.openBulk, opRead, r, &info)
	if err != nil {
		return nil, info, err
	}
	return &chunkBody{chunkReader: newChunkReader(conn), host: h, ctx: ctx, conn: conn, stop: stop, left: info.Length}, info, nil
}

// ReadTar streams a directory or file as a tar. The caller closes it.
func (h *Host) ReadTar(ctx context.Context, path string) (io.ReadCloser, error) {
	conn, stop, err := h.ask(ctx, h.openBulk, opReadTar, Path{Path: path}, nil)
	if err != nil {
		return nil, err
	}
	return &chunkBody{chunkReader: newChunkReader(conn), host: h, ctx: ctx, conn: conn, stop: stop, left: -1}, nil
}

// chunkBody is a chunkReader that owns its connection.
type chunkBody struct {
	*chunkReader
	host *Host
	ctx  context.Context // of the call that this body is the answer of
	conn net.Conn
	stop func() bool
	left int64 // bytes that were announced and have not come; < 0: no number was
}

func (b *chunkBody) Read(p []byte) (int, error) {
	n, err := b.chunkReader.Read(p)
	if b.left >= 0 {
		if b.left -= int64(n); b.left < 0 {
			n, err = 0, &errProtocol{"a file longer than announced"}
		} else if err == io.EOF && b.left > 0 {
			err = &errProtocol{"a file shorter than announced"}
		}
	}
	if err != nil && err != io.EOF {
		err = b.host.linkError(b.ctx, err)
	}
	return n, err
}

func (b *chunkBody) Close() error {
	b.stop()
	return b.conn.Close()
}

// Write writes one file, whole or not at all.
func (h *Host) Write(ctx context.Context, w Write, content io.Reader) (info FileInfo, err error) {
	err = h.upload(ctx, opWrite, w, content, &info)
	return info, err
}

// WriteTar unpacks a tar into a directory.
func (h *Host) WriteTar(ctx context.Context, path string, tar io.Reader) error {
	return h.upload(ctx, opWriteTar, Path{Path: path}, tar, nil)
}

// upload sends content and reads the second response. A guest that answers
// before the end (no space, say) ends the sending.
func (h *Host) upload(ctx context.Context, op string, args any, content io.Reader, out any) error {
	conn, stop, err := h.ask(ctx, h.openBulk, op, args, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer stop()
	answered := make(chan answer, 1)
	go func() {
		value, err := h.readResponse(ctx, conn)
		answered <- answer{value: value, err: err}
	}()
	w := &chunkWriter{w: conn}
	_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{content}, make([]byte, 64<<10))
	sent := w.finish(err)
	if err != nil && sent == nil { // the caller's reader failed, the link did not
		conn.Close()
		<-answered
		return err
	}
	var a answer
	select {
	case a = <-answered:
	case <-time.After(hostWriteLimit):
		conn.Close()
		a = <-answered
	}
	if a.err == nil && out != nil {
		if err := json.Unmarshal(a.value, out); err != nil {
			a.err = &errProtocol{"an answer that is not one: " + err.Error()}
		}
	}
	if a.err != nil {
		return h.linkError(ctx, a.err)
	}
	return nil
}

// Dial connects to a loopback port inside.
func (h *Host) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	conn, stop, err := h.ask(ctx, h.openBulk, opDial, Dial{Port: port}, nil)
	if err != nil {
		return nil, err
	}
	stop()
	return &tunnel{Conn: conn, r: newChunkReader(conn)}, nil
}

// tunnel is a connection to a port inside, framed so that one direction can
// end before the other.
type tunnel struct {
	net.Conn
	r *chunkReader

	mu   sync.Mutex
	w    chunkWriter
	shut bool
}

func (t *tunnel) Read(p []byte) (int, error) { return t.r.Read(p) }

func (t *tunnel) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shut {
		return 0, net.ErrClosed
	}
	t.w.w = t.Conn
	return t.w.Write(p)
}

// CloseWrite ends one direction.
func (t *tunnel) CloseWrite() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shut {
		return nil
	}
	t.shut = true
	t.w.w = t.Conn
	return t.w.finish(nil)
}
