package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// A direct connection serves one exec after the other without the multiplexer
// between: an exec costs half the changes of threads that way, and its output is
// copied less often. The guest dials one as soon as it is linked. Requests are
// frames here, so that a guest that reads on tells them from input of the exec
// before. What does not find the connection free takes a stream of the
// multiplexer.

// streamBuffer is what an exec's stream is read into, in bytes; no frame on it is
// larger.
const streamBuffer = 2 * ChunkSize

var streamReaders = sync.Pool{New: func() any { return newFrameReader() }}

// readerOf is a buffered reader of an exec's stream, until done is called.
func readerOf(c net.Conn) (r *frameReader, done func()) {
	if d, ok := c.(*direct); ok {
		return d.r, func() {}
	}
	r = streamReaders.Get().(*frameReader)
	r.use(c)
	return r, func() {
		r.use(nil)
		streamReaders.Put(r)
	}
}

// direct is the host's end.
type direct struct {
	net.Conn
	r *frameReader // nil while nobody uses it: a hundred idle sandboxes hold no buffers
}

func (d *direct) Read(p []byte) (int, error) { return d.r.Read(p) }

// maxDirect is the size of a program and its arguments, in bytes, that surely
// fit into one frame once they are base64 in JSON in JSON.
const maxDirect = maxFrame / 2

// size is what of a request may be large.
func (s *ExecStart) size() (n int) {
	n = len(s.Code)
	for _, arg := range s.Argv {
		n += len(arg)
	}
	for _, v := range s.Env {
		n += len(v)
	}
	return n
}

// fresh reports whether the connection is alive and nothing is on it: what a
// guest sends without having been asked is not the answer to the next question.
func (d *direct) fresh() bool {
	c, ok := d.Conn.(*conn)
	if !ok {
		return false
	}
	raw, err := c.Conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return false
	}
	idle := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		idle = err == syscall.EAGAIN
	})
	return err == nil && idle
}

// takeDirect keeps a direct connection for the next exec; one is enough.
func (h *Host) takeDirect(conn net.Conn) error {
	h.mu.Lock()
	old := h.direct
	if old != nil && old.fresh() {
		h.mu.Unlock()
		return errors.New("a direct connection while there is one")
	}
	h.direct = &direct{Conn: conn}
	h.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return nil
}

// idleDirect takes the direct connection, if there is one that nobody uses.
func (h *Host) idleDirect() *direct {
	h.mu.Lock()
	d := h.direct
	h.direct = nil
	h.mu.Unlock()
	if d == nil {
		return nil
	}
	if !d.fresh() {
		d.Close()
		return nil
	}
	d.r = streamReaders.Get().(*frameReader)
	d.r.use(d.Conn)
	return d
}

// askExec starts an exec over the direct connection if that is free.
func (h *Host) askExec(ctx context.Context, start ExecStart) (net.Conn, func() bool, error) {
	var d *direct
	if start.size() <= maxDirect {
		d = h.idleDirect()
	}
	if d == nil {
		return h.ask(ctx, h.open, opExec, start, &Attached{})
	}
	raw, err := json.Marshal(start)
	if err != nil {
		d.Close()
		return nil, nil, err
	}
	// No goroutine of its own, as ask needs: the connection knows deadlines, so that
	// ctx can break it off.
	opened := func(context.Context) (net.Conn, error) { return d, nil }
	return h.answered(ctx, h.exchange(ctx, opened, Request{Op: opExec, Args: raw}), &Attached{})
}

// release is done with what askExec opened. whole says that the exec's stream
// was read to its end and nothing more will be written to it.
func (h *Host) release(c net.Conn, whole bool) {
	d, ok := c.(*direct)
	if !ok || !whole || d.r.Buffered() > 0 {
		c.Close()
		return
	}
	d.r.use(nil)
	streamReaders.Put(d.r)
	d.r = nil
	h.mu.Lock()
	keep := h.direct == nil && !h.closed
	if keep {
		h.direct = d
	}
	h.mu.Unlock()
	if !keep {
		c.Close()
	}
}

// writeRequest sends a request in the manner of its stream.
func writeRequest(c net.Conn, req Request) error {
	if _, ok := c.(*direct); !ok {
		return writeMessage(c, req)
	}
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	return writeFrame(c, frameRequest, body)
}

// How soon a guest dials a direct connection again.
const (
	directPause    = 20 * time.Millisecond
	directPauseMax = 5 * time.Second
)

// serveDirects keeps one direct connection to the host until ctx ends.
func (g *Guest) serveDirects(ctx context.Context) {
	// One at a time: that of a control connection that broke may live on, and a host
	// has one.
	g.directs.Lock()
	defer g.directs.Unlock()
	for pause := directPause; ; pause = min(2*pause, directPauseMax) {
		if ctx.Err() != nil {
			return
		}
		if conn, err := g.dial(); err == nil {
			if _, err = g.hello(conn, Hello{Direct: true}); err == nil {
				if g.serveDirect(conn) > 0 {
					pause = directPause
				}
			}
			conn.Close()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// serveDirect serves one request after the other until the connection ends, and
// returns how many. It alone reads the connection; each request is served by a
// goroutine of its own, which writes, and gets what belongs to it through a pipe.
func (g *Guest) serveDirect(conn net.Conn) (served int) {
	left, leave := context.WithCancel(context.Background())
	defer leave()
	r := bufio.NewReaderSize(conn, 4<<10)
	var buf []byte
	var input *io.PipeWriter
	answered := make(chan struct{}, 1)
	answered <- struct{}{}
	for {
		typ, payload, grown, err := readFrame(r, buf)
		if err != nil {
			if input != nil {
				input.CloseWithError(err)
			}
			return served
		}
		if buf = grown; cap(buf) > streamBuffer {
			buf = nil
		}
		if typ != frameRequest {
			if input != nil {
				writeFrame(input, typ, payload) // of a request that has been answered: dropped
			}
			continue
		}
		var req Request
		if json.Unmarshal(payload, &req) != nil {
			return served
		}
		served++
		<-answered
		var in *io.PipeReader
		in, input = io.Pipe()
		go func() {
			g.answer(directCall{conn, in, left}, req)
			in.Close()
			answered <- struct{}{}
		}()
	}
}

// directCall is one request's part of a direct connection.
type directCall struct {
	net.Conn
	in   *io.PipeReader
	left context.Context // ends with the connection
}

func (c directCall) Read(p []byte) (int, error) { return c.in.Read(p) }
