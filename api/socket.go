package api

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"
)

// socket is a connection that a WebSocket took over. Each write is one or more
// whole frames: the library flushes its buffer once for each, and output goes
// past the library, so that none of it is copied on its way.
type socket struct {
	net.Conn
	idle time.Duration // for a write

	mu    sync.Mutex // held over a write
	armed time.Time  // when the deadline was set
	head  [messageHead + 1]byte
	parts [2][]byte
}

// messageHead is the size of the longest head of an unmasked message, in bytes.
const messageHead = 10

// buffersWriter is a connection between nodes (transport.Conn).
type buffersWriter interface {
	WriteBuffers(net.Buffers) (int64, error)
}

// vectored reports whether several slices are one write.
func (s *socket) vectored() bool {
	switch s.Conn.(type) {
	case *net.TCPConn, *net.UnixConn, buffersWriter:
		return true
	}
	return false
}

// Write implements net.Conn.
func (s *socket) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arm()
	return s.Conn.Write(p)
}

// passedOn is how much of another node's stream is written at a time.
const passedOn = 128 << 10

// ReadFrom writes what r yields: what is passed on from another node, in pieces as
// large as they come.
func (s *socket) ReadFrom(r io.Reader) (total int64, err error) {
	buf := make([]byte, passedOn)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			written, werr := s.Write(buf[:n])
			if total += int64(written); werr != nil {
				return total, werr
			}
		}
		switch err {
		case nil:
		case io.EOF:
			return total, nil
		default:
			return total, err
		}
	}
}

// writeMessage writes a binary message of one byte and a payload.
func (s *socket) writeMessage(first byte, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arm()
	s.parts = [2][]byte{append(appendMessageHead(s.head[:0], 1+len(payload)), first), payload}
	defer func() { s.parts = [2][]byte{} }()
	parts := net.Buffers(s.parts[:])
	if c, ok := s.Conn.(buffersWriter); ok {
		_, err := c.WriteBuffers(parts)
		return err
	}
	_, err := parts.WriteTo(s.Conn)
	return err
}

// arm gives a write its time. A deadline costs more than a small write: it is set
// anew once a part of it is over.
func (s *socket) arm() {
	if now := time.Now(); now.Sub(s.armed) > s.idle/8 {
		s.armed = now
		s.SetWriteDeadline(now.Add(s.idle))
	}
}

// appendMessageHead appends the head of an unmasked binary message of n bytes
// (RFC 6455, section 5.2).
func appendMessageHead(b []byte, n int) []byte {
	b = append(b, 0x80|0x2) // final, binary
	switch {
	case n < 126:
		return append(b, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 126), uint16(n))
	}
	return binary.BigEndian.AppendUint64(append(b, 127), uint64(n))
}
