// Package relay pumps bytes both ways between two connections. Half-close is passed on:
// when one side has said its last, the other may still speak for a while. A connection on
// which nothing happens holds no buffer. It knows nothing of what the bytes are. Start
// reading at Both.
package relay

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Options of Both. The zero value has no bounds.
type Options struct {
	// Idle ends both directions when neither has moved a byte for so long; 0 is never.
	Idle time.Duration
	// Drain is how long one direction may go on when the other has ended; 0 is for ever.
	Drain time.Duration
	// Passed is told of the bytes of a read before they are written on: up is from a to b.
	// It may wait, to slow them down; an error ends both directions. May be nil.
	Passed func(up bool, n int) error
}

// Result is what passed.
type Result struct {
	Up, Down int64 // bytes written from a to b, and from b to a
	Err      error // why it ended, nil when both sides had said their last
}

// ErrIdle is the end of a pair on which nothing happened.
var ErrIdle = errors.New("nothing was sent for too long")

// errDrained ends the direction that goes on for too long after the other's end.
var errDrained = errors.New("the other side had ended")

// bufferSize is how much is read at once, in bytes: more gains nothing on loopback.
const bufferSize = 64 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// pair is two connections and what is known of both directions.
type pair struct {
	opts  Options
	start time.Time
	last  atomic.Int64 // when a byte passed last, since start
	ends  atomic.Int64 // when the direction that is left must have ended, since start; 0: not yet known
}

// Both pumps until both directions have ended, then closes both connections.
func Both(a, b net.Conn, opts Options) Result {
	p := &pair{opts: opts, start: time.Now()}
	var res Result
	var up, down error
	var wg sync.WaitGroup
	wg.Go(func() {
		res.Up, up = p.pump(b, a, true)
		p.ended(a, b, up)
	})
	res.Down, down = p.pump(a, b, false)
	p.ended(b, a, down)
	wg.Wait()
	a.Close()
	b.Close()
	for _, err := range []error{up, down} {
		if err != nil && !errors.Is(err, errDrained) && res.Err == nil {
			res.Err = err
		}
	}
	return res
}

// ended is called when nothing more comes from src to dst. An orderly end is passed on,
// and gives the other direction its time; any other ends that as well.
func (p *pair) ended(src, dst net.Conn, err error) {
	now := time.Now()
	if err != nil {
		p.ends.Store(max(1, int64(now.Sub(p.start))))
		src.SetDeadline(now)
		dst.SetDeadline(now)
		return
	}
	if half, ok := dst.(interface{ CloseWrite() error }); ok {
		half.CloseWrite()
	}
	if p.opts.Drain > 0 {
		p.ends.Store(int64(now.Sub(p.start) + p.opts.Drain))
		dst.SetReadDeadline(now.Add(p.opts.Drain)) // which the other direction reads
		src.SetWriteDeadline(now.Add(p.opts.Drain))
	}
}

// pump copies from src to dst until src has said its last (nil) or something fails.
func (p *pair) pump(dst, src net.Conn, up bool) (n int64, err error) {
	r := newReader(src)
	if p.opts.Idle > 0 {
		p.extend(src, p.opts.Idle)
	}
	for {
		buf, size, err := r.read()
		if size > 0 {
			if p.opts.Passed != nil {
				if err := p.opts.Passed(up, size); err != nil {
					buffers.Put(buf)
					return n, err
				}
			}
			w, werr := dst.Write(buf[:size])
			n += int64(w)
			if werr != nil {
				buffers.Put(buf)
				return n, werr
			}
			p.last.Store(int64(time.Since(p.start)))
		}
		if buf != nil {
			buffers.Put(buf)
		}
		switch {
		case err == nil:
		case err == io.EOF:
			return n, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := p.timeout(src); err != nil {
				return n, err
			}
		default:
			return n, err
		}
	}
}

// timeout judges a read that timed out: a byte of the other direction keeps both.
func (p *pair) timeout(src net.Conn) error {
	passed := time.Since(p.start)
	if ends := time.Duration(p.ends.Load()); ends > 0 && passed >= ends {
		return errDrained
	} else if ends > 0 { // an idle deadline, of before
		src.SetReadDeadline(p.start.Add(ends))
		return nil
	}
	left := p.opts.Idle - (passed - time.Duration(p.last.Load()))
	if left <= 0 || p.opts.Idle == 0 {
		return ErrIdle
	}
	p.extend(src, left)
	return nil
}

// extend gives a read more time, but not more than there is since the other side's end, of
// which it may have come to know meanwhile.
func (p *pair) extend(src net.Conn, d time.Duration) {
	src.SetReadDeadline(time.Now().Add(d))
	if ends := time.Duration(p.ends.Load()); ends > 0 {
		src.SetReadDeadline(p.start.Add(ends))
	}
}

// reader reads a connection with buffers of the pool. Where the connection is a socket, a
// buffer is taken only when there is something to read: thousands of idle connections hold
// none.
type reader struct {
	conn net.Conn
	raw  syscall.RawConn // nil: not a socket
}

func newReader(conn net.Conn) *reader {
	r := &reader{conn: conn}
	if sc, ok := conn.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			r.raw = raw
		}
	}
	return r
}

// read returns a buffer, which the caller gives back, and how much of it was filled. The
// buffer is nil if nothing was.
func (r *reader) read() (buf *[bufferSize]byte, n int, err error) {
	if r.raw == nil {
		buf = buffers.Get().(*[bufferSize]byte)
		n, err = r.conn.Read(buf[:])
		return buf, n, err
	}
	var rerr error
	err = r.raw.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*[bufferSize]byte)
		for {
			if n, rerr = syscall.Read(int(fd), buf[:]); rerr != syscall.EINTR {
				break
			}
		}
		if rerr == syscall.EAGAIN {
			buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	})
	switch {
	case err != nil:
		return buf, 0, err
	case rerr != nil:
		return buf, 0, os.NewSyscallError("read", rerr)
	case n == 0:
		return buf, 0, io.EOF
	}
	return buf, n, nil
}
