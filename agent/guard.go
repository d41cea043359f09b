package agent

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
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
	guestStreams   = 256       // streams that a guest may open at once
	controlRate    = 20_000    // frames without data per second, sustained
	controlBurst   = 40_000
	hostWriteLimit = 20 * time.Second // for one write to a guest
)

// errProtocol marks a guest that broke the multiplexer's rules.
type errProtocol struct{ what string }

func (e *errProtocol) Error() string { return "agent protocol: " + e.what }

// guard sits between the socket and yamux on the host's side and checks the
// header of every frame that the guest sends, before yamux sees it.
type guard struct {
	net.Conn
	broken func(error) // called once, before Read fails

	head   [12]byte
	have   int // bytes of head read
	passed int // bytes of head given to yamux
	body   int // bytes of the frame's body still to pass
	pings  int
	opened map[uint32]bool
	tokens float64
	last   time.Time
}

func newGuard(conn net.Conn, broken func(error)) *guard {
	return &guard{Conn: conn, broken: broken, opened: map[uint32]bool{}, tokens: controlBurst, last: time.Now()}
}

// Write gives every write a deadline: a guest that never reads holds nobody.
func (g *guard) Write(p []byte) (int, error) {
	g.SetWriteDeadline(time.Now().Add(hostWriteLimit))
	return g.Conn.Write(p)
}

// Read passes frames through. It never gives yamux a header that was not
// checked.
func (g *guard) Read(p []byte) (int, error) {
	if g.body > 0 {
		n, err := g.Conn.Read(p[:min(len(p), g.body)])
		g.body -= n
		return n, err
	}
	if g.passed == g.have {
		if _, err := io.ReadFull(g.Conn, g.head[:]); err != nil {
			return 0, err
		}
		if err := g.check(); err != nil {
			g.broken(err)
			return 0, err
		}
		g.have, g.passed = len(g.head), 0
	}
	n := copy(p, g.head[g.passed:g.have])
	if g.passed += n; g.passed == g.have {
		g.have, g.passed = 0, 0
		if g.head[1] == typeData {
			g.body = int(binary.BigEndian.Uint32(g.head[8:]))
		}
	}
	return n, nil
}

// yamux's frame types and flags (its specification, version 0).
const (
	typeData, typeWindow, typePing, typeGoAway = 0, 1, 2, 3
	flagSYN, flagFIN, flagRST                  = 1, 4, 8
)

// check judges one header.
func (g *guard) check() error {
	typ, flags := g.head[1], binary.BigEndian.Uint16(g.head[2:])
	id, length := binary.BigEndian.Uint32(g.head[4:]), binary.BigEndian.Uint32(g.head[8:])
	if g.head[0] != 0 || typ > typeGoAway {
		return &errProtocol{fmt.Sprintf("frame of version %d, type %d", g.head[0], typ)}
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
		if flags&flagSYN != 0 {
			g.opened[id] = true
			if len(g.opened) > guestStreams {
				return &errProtocol{"too many streams"}
			}
		}
		if flags&(flagFIN|flagRST) != 0 {
			delete(g.opened, id)
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
	c.AcceptBacklog = guestStreams
	c.LogOutput = io.Discard
	return c
}
