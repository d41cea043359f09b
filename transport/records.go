package transport

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
)

// TLS has records of at most 16 KiB, and crypto/tls reads and writes the socket
// for each. A stream through another node would pay for that twice, so records are
// read and written in larger pieces.
const (
	rawBuffer  = 128 << 10 // read ahead of TLS
	recordHead = 5
)

// How long a farewell may take to be written, and how long the other side is heard
// out after it. To a peer that is gone, nobody listens.
const (
	byeLimit  = time.Second
	hearLimit = 5 * time.Second
)

// errBroken stands for a socket that ends before TLS does, which crypto/tls takes
// for an end like any other where it comes between two records.
var errBroken = fmt.Errorf("the connection broke: %w", io.ErrUnexpectedEOF)

// gated is a connection that has passed the gate.
type gated struct {
	*tls.Conn
	raw  *records
	peer boxed.Peer

	writing sync.Mutex
	broken  atomic.Bool
	closing atomic.Bool // by this end
}

func (c *gated) Peer() boxed.Peer { return c.peer }

// Write sends all records of b at once.
func (c *gated) Write(b []byte) (int, error) {
	n, err := c.WriteBuffers(net.Buffers{b})
	return int(n), err
}

// Read takes what has come, as many records as fit.
func (c *gated) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	for err == nil && n < len(b) && c.raw.whole() {
		var more int
		more, err = c.Conn.Read(b[n:])
		n += more
	}
	if err != nil && c.closing.Load() {
		err = net.ErrClosed
	}
	if err != nil && err != io.EOF && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, net.ErrClosed) {
		c.broken.Store(true)
	}
	if n > 0 {
		err = nil // it comes again with the next Read
	}
	return n, err
}

func (c *gated) Broken() bool { return c.broken.Load() }

func (c *gated) Abort() error {
	c.closing.Store(true)
	return c.raw.Conn.Close()
}

// farewell closes this side of the connection, and reports whether the other side
// is to be heard out. Who reads here stops.
func (c *gated) farewell() bool {
	c.closing.Store(true)
	c.raw.Conn.SetWriteDeadline(time.Now().Add(byeLimit))
	half, ok := c.raw.Conn.(interface{ CloseWrite() error })
	if !ok || c.Conn.CloseWrite() != nil || half.CloseWrite() != nil {
		return false
	}
	c.raw.Conn.SetReadDeadline(time.Unix(1, 0))
	return true
}

// hearOut reads away what comes until the other side has closed too. A socket that
// is closed with something unread resets the connection, and where links lose
// packets that overtakes the farewell: then the other side would take it for broken.
func (c *gated) hearOut() {
	defer time.AfterFunc(hearLimit, func() { c.raw.Conn.Close() }).Stop()
	c.raw.reading.Lock() // who read has stopped
	defer c.raw.reading.Unlock()
	c.raw.Conn.SetReadDeadline(time.Time{})
	io.Copy(io.Discard, c.raw.Conn)
}

// SetReadDeadline does nothing any more once this end has closed.
func (c *gated) SetReadDeadline(t time.Time) error {
	if c.closing.Load() {
		return net.ErrClosed
	}
	return c.Conn.SetReadDeadline(t)
}

// SetDeadline is both.
func (c *gated) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *gated) WriteBuffers(bufs net.Buffers) (total int64, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.raw.hold()
	for _, b := range bufs {
		var n int
		n, err = c.Conn.Write(b)
		if total += int64(n); err != nil {
			break
		}
	}
	if flushErr := c.raw.release(); err == nil {
		err = flushErr
	}
	return total, err
}

// records is the socket below TLS.
type records struct {
	net.Conn
	in   *bufio.Reader // of TLS's one reader
	left int           // of the record that TLS reads now

	reading sync.Mutex // held over a read
	mu      sync.Mutex
	holding bool
	out     []byte
}

func newRecords(raw net.Conn) *records {
	return &records{Conn: raw, in: bufio.NewReaderSize(raw, rawBuffer)}
}

// Read yields no more than the present record: what TLS has read ahead itself,
// whole could not see.
func (r *records) Read(b []byte) (int, error) {
	r.reading.Lock()
	defer r.reading.Unlock()
	if r.left == 0 {
		head, err := r.in.Peek(recordHead)
		if err == io.EOF {
			err = errBroken
		}
		if err != nil {
			return 0, err
		}
		r.left = recordSize(head)
	}
	n, err := r.in.Read(b[:min(len(b), r.left)])
	if err == io.EOF {
		err = errBroken
	}
	r.left -= n
	return n, err
}

// whole reports whether the next record has come to its end, so that reading it
// does not wait.
func (r *records) whole() bool {
	if r.left > 0 || r.in.Buffered() < recordHead {
		return false
	}
	head, err := r.in.Peek(recordHead)
	return err == nil && r.in.Buffered() >= recordSize(head)
}

// recordSize is that of a record with its head (RFC 8446, section 5.1). What is
// no TLS gives a number too, and TLS says what is wrong.
func recordSize(head []byte) int { return recordHead + int(binary.BigEndian.Uint16(head[3:])) }

// hold gathers what is written until release sends it.
func (r *records) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holding = true
}

func (r *records) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.holding {
		return r.Conn.Write(b)
	}
	if len(r.out) > 0 && len(r.out)+len(b) > rawBuffer {
		if err := r.flushLocked(); err != nil {
			return 0, err
		}
	}
	r.out = append(r.out, b...)
	return len(b), nil
}

func (r *records) release() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holding = false
	return r.flushLocked()
}

func (r *records) flushLocked() error {
	if len(r.out) == 0 {
		return nil
	}
	_, err := r.Conn.Write(r.out)
	r.out = r.out[:0]
	return err
}
