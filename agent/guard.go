package agent

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/yamux"
)

// Bounds of what a guest may do to the host's multiplexer. yamux answers every
// ping with a goroutine, queues what nobody reads and takes any number of
// streams: measured without these, one guest took a host to 4 GiB and 1.2
// million goroutines in 8 s.
const (
	muxWindow      = 256 << 10 // of one stream, bytes; yamux's smallest
	guestPings     = 64        // pings of a guest in a row; the hosts' peers send none
	hostStreams    = 256       // streams of the host that wait for a guest to take them
	controlRate    = 20_000    // frames without data per second, sustained
	controlBurst   = 40_000
	hostWriteLimit = 20 * time.Second // for one write to a guest
)

// errProtocol marks a guest that broke the multiplexer's rules.
type errProtocol struct{ what string }

func (e *errProtocol) Error() string { return "agent protocol: " + e.what }

// guard sits between the socket and yamux on the host's side and checks the
// header of every frame that the guest sends, before yamux sees it. yamux gets
// whole frames only: it holds a stream's lock while it reads the body of a
// frame, so that a guest that stops in the middle of one would hold everybody
// who waits on that stream, past any deadline.
type guard struct {
	net.Conn
	broken func(error) // called once, before Read fails

	r      *bufio.Reader
	frame  []byte // the present one, header and body
	passed int    // bytes of it given to yamux
	pings  int
	tokens float64
	last   time.Time
}

// guardKeeps is how large a buffer an idle guard keeps, in bytes.
const guardKeeps = 64 << 10

func newGuard(conn net.Conn, broken func(error)) *guard {
	return &guard{Conn: conn, broken: broken, r: bufio.NewReaderSize(conn, 16<<10), tokens: controlBurst, last: time.Now()}
}

// Read passes frames through.
func (g *guard) Read(p []byte) (int, error) {
	if g.passed == len(g.frame) {
		if err := g.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, g.frame[g.passed:])
	g.passed += n
	return n, nil
}

// next reads and checks one frame.
func (g *guard) next() error {
	if cap(g.frame) > guardKeeps {
		g.frame = nil
	}
	head := append(g.frame[:0], make([]byte, muxHead)...)
	g.frame, g.passed = head[:0], 0
	if _, err := io.ReadFull(g.r, head); err != nil {
		return err
	}
	if err := g.check(head); err != nil {
		g.broken(err)
		return err
	}
	body := 0
	if head[1] == typeData {
		body = int(binary.BigEndian.Uint32(head[8:]))
	}
	frame := slices.Grow(head, body)[:muxHead+body]
	if _, err := io.ReadFull(g.r, frame[muxHead:]); err != nil {
		return noEOF(err)
	}
	g.frame = frame
	return nil
}

// yamux's frame types and flags (its specification, version 0).
const (
	muxHead                                    = 12
	typeData, typeWindow, typePing, typeGoAway = 0, 1, 2, 3
	flagSYN                                    = 1
)

// check judges one header.
func (g *guard) check(head []byte) error {
	typ, flags := head[1], binary.BigEndian.Uint16(head[2:])
	id, length := binary.BigEndian.Uint32(head[4:]), binary.BigEndian.Uint32(head[8:])
	if head[0] != 0 || typ > typeGoAway {
		return &errProtocol{fmt.Sprintf("frame of version %d, type %d", head[0], typ)}
	}
	if typ == typeData && length > muxWindow {
		return &errProtocol{fmt.Sprintf("data frame of %d bytes", length)}
	}
	if typ == typePing {
		if g.pings++; g.pings > guestPings {
			return &errProtocol{"too many pings"}
		}
	}
	if typ == typeData || typ == typeWindow {
		// All streams are the host's. One that nobody here reads would still be
		// given a window's worth of memory.
		if flags&flagSYN != 0 {
			return &errProtocol{fmt.Sprintf("it opened stream %d", id)}
		}
	}
	if typ != typeData || length == 0 {
		return g.spend()
	}
	return nil
}

// spend takes one frame without data from the guest's budget.
func (g *guard) spend() error {
	now := time.Now()
	g.tokens = min(controlBurst, g.tokens+now.Sub(g.last).Seconds()*controlRate)
	g.last = now
	if g.tokens--; g.tokens < 0 {
		return &errProtocol{"too many frames without data"}
	}
	return nil
}

// muxConfig is yamux's configuration on both sides. Keep-alive is off: it drops
// paused sandboxes.
func muxConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = false
	c.MaxStreamWindowSize = muxWindow
	c.ConnectionWriteTimeout = hostWriteLimit
	c.StreamOpenTimeout = 0 // a paused sandbox answers when it is resumed
	// A stream that one side has left must not take in what the other sends for long.
	c.StreamCloseTimeout = 5 * time.Second
	c.AcceptBacklog = hostStreams
	c.LogOutput = io.Discard
	return c
}
