// Package memnet is a transport.Network within one process, for tests. Nodes join
// a [Hub], which can part them, lose their datagrams and delay them. Who is at
// the other end is what the Hub says; nothing is encrypted.
package memnet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// Hub is what nodes are joined by.
type Hub struct {
	mu    sync.Mutex
	nodes map[string]*Network // by address
	count uint16
	side  map[boxed.NodeID]int // of a partition; nodes that are not in it are on side 0
	conns map[*conn]struct{}   // dialled ones, each with its other end
	loss  float64
	delay time.Duration
}

// NewHub makes a Hub with perfect links.
func NewHub() *Hub {
	return &Hub{nodes: map[string]*Network{}, side: map[boxed.NodeID]int{}, conns: map[*conn]struct{}{}}
}

// Join is a node's Network. Its address is new each time.
func (h *Hub) Join(id boxed.NodeID) *Network {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.count++
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 77, byte(h.count >> 8), byte(h.count)}), transport.DefaultPort)
	n := &Network{
		hub: h, id: id, addr: addr, services: map[transport.Service]*listener{}, done: make(chan struct{}),
		packets: make(chan packet, 1024),
	}
	h.nodes[addr.String()] = n
	return n
}

// Partition parts the groups from each other. A node in none of them is with the
// first. Connections across break, and new ones are not answered.
func (h *Hub) Partition(groups ...[]boxed.NodeID) {
	h.mu.Lock()
	clear(h.side)
	for i, group := range groups {
		for _, id := range group {
			h.side[id] = i
		}
	}
	var cut []*conn
	for c := range h.conns {
		if !h.joinedLocked(c.from, c.to) {
			cut = append(cut, c)
		}
	}
	h.mu.Unlock()
	for _, c := range cut {
		c.breakOff()
	}
}

// Heal joins all again.
func (h *Hub) Heal() { h.Partition() }

// Weather makes datagrams be lost, each with the given probability, and late.
func (h *Hub) Weather(loss float64, delay time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.loss, h.delay = loss, delay
}

func (h *Hub) joinedLocked(a, b boxed.NodeID) bool { return h.side[a] == h.side[b] }

// reach finds a node that from can reach; nil if it is cut off or not there.
func (h *Hub) reach(from boxed.NodeID, addr string) *Network {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.nodes[addr]; n != nil && h.joinedLocked(from, n.id) {
		return n
	}
	return nil
}

// Network implements transport.Network.
type Network struct {
	hub     *Hub
	id      boxed.NodeID
	addr    netip.AddrPort
	done    chan struct{}
	once    sync.Once
	packets chan packet

	mu       sync.Mutex // guards services; not held with the hub's
	services map[transport.Service]*listener
	taken    bool
}

var _ transport.Network = (*Network)(nil)

// Addr is the address that others dial.
func (n *Network) Addr() string { return n.addr.String() }

// Dial connects to a node.
func (n *Network) Dial(ctx context.Context, to transport.Target, service transport.Service) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, transport.HandshakeTimeout)
	defer cancel()
	if _, err := netip.ParseAddrPort(to.Addr); err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%q is not an address and a port of a node", to.Addr)
	}
	other := n.hub.reach(n.id, to.Addr)
	if other == nil || n.closed() { // nobody says that nobody is there
		<-ctx.Done()
		return nil, fmt.Errorf("node %s at %s: %w: %w", to.ID, to.Addr, transport.ErrUnreachable, ctx.Err())
	}
	if to.ID != "" && other.id != to.ID {
		return nil, fmt.Errorf("node %s at %s: %w: node %s answers there", to.ID, to.Addr, transport.ErrStranger, other.id)
	}
	if other.id == n.id {
		return nil, fmt.Errorf("node at %s: %w: this node itself answers there", to.Addr, transport.ErrStranger)
	}
	other.mu.Lock()
	l := other.services[service]
	other.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("node %s at %s: %w: it serves no %s", other.id, to.Addr, transport.ErrStranger, service)
	}
	mine, its, err := n.pair(other)
	if err != nil {
		return nil, err
	}
	select {
	case l.queue <- its:
		return mine, nil
	case <-l.done:
	case <-ctx.Done():
	}
	mine.breakOff()
	return nil, fmt.Errorf("node %s at %s: %w", other.id, to.Addr, transport.ErrUnreachable)
}

// pair makes both ends of a connection: sockets, for their buffers and deadlines.
func (n *Network) pair(other *Network) (mine, its *conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ends := [2]net.Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "memnet")
		end, fileErr := net.FileConn(f)
		err = errors.Join(err, fileErr, f.Close())
		ends[i] = end
	}
	if err != nil {
		return nil, nil, err
	}
	mine = &conn{Conn: ends[0], local: n.addr, remote: other.addr, from: n.id, to: other.id, hub: n.hub}
	its = &conn{Conn: ends[1], local: other.addr, remote: n.addr, from: other.id, to: n.id, hub: n.hub}
	mine.other, its.other = its, mine
	n.hub.mu.Lock()
	defer n.hub.mu.Unlock()
	n.hub.conns[mine] = struct{}{}
	n.hub.conns[its] = struct{}{}
	return mine, its, nil
}

// Listen accepts connections to a service.
func (n *Network) Listen(service transport.Service) (transport.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed():
		return nil, net.ErrClosed
	case n.services[service] != nil:
		return nil, fmt.Errorf("%s is listened for already", service)
	}
	l := &listener{net: n, service: service, queue: make(chan *conn, 64), done: make(chan struct{})}
	n.services[service] = l
	return l, nil
}

// Packets is the socket for datagrams.
func (n *Network) Packets() (net.PacketConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken {
		return nil, errors.New("the datagrams have a reader already")
	}
	n.taken = true
	return &packetConn{net: n, done: make(chan struct{})}, nil
}

func (n *Network) closed() bool {
	select {
	case <-n.done:
		return true
	default:
		return false
	}
}

// Close leaves the hub, as a process that ends: its connections break.
func (n *Network) Close() error {
	n.once.Do(func() {
		n.mu.Lock()
		close(n.done)
		var open []*listener
		for _, l := range n.services {
			open = append(open, l)
		}
		n.mu.Unlock()
		for _, l := range open {
			l.Close()
		}
		n.hub.mu.Lock()
		delete(n.hub.nodes, n.Addr())
		var mine []*conn
		for c := range n.hub.conns {
			if c.from == n.id && c.local == n.addr {
				mine = append(mine, c)
			}
		}
		n.hub.mu.Unlock()
		for _, c := range mine {
			c.breakOff()
		}
	})
	return nil
}

// conn is one end of a connection.
type conn struct {
	net.Conn
	hub           *Hub
	from, to      boxed.NodeID
	local, remote netip.AddrPort
	other         *conn
	broken        atomic.Bool
}

func (c *conn) Peer() boxed.Peer     { return boxed.Peer{Node: c.to, Address: c.remote.String()} }
func (c *conn) LocalAddr() net.Addr  { return net.TCPAddrFromAddrPort(c.local) }
func (c *conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

func (c *conn) Broken() bool { return c.broken.Load() }

func (c *conn) Close() error {
	c.hub.mu.Lock()
	delete(c.hub.conns, c)
	c.hub.mu.Unlock()
	return c.Conn.Close()
}

func (c *conn) Abort() error {
	c.other.broken.Store(true)
	return c.Close()
}

func (c *conn) WriteBuffers(bufs net.Buffers) (int64, error) {
	bufs = slices.Clone(bufs) // WriteTo consumes it
	return bufs.WriteTo(c.Conn)
}

// breakOff ends both ends.
func (c *conn) breakOff() {
	c.Abort()
	c.other.Abort()
}

type listener struct {
	net     *Network
	service transport.Service
	queue   chan *conn
	once    sync.Once
	done    chan struct{}
}

func (l *listener) AcceptPeer() (transport.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Accept() (net.Conn, error) { return l.AcceptPeer() }
func (l *listener) Addr() net.Addr            { return net.TCPAddrFromAddrPort(l.net.addr) }

func (l *listener) Close() error {
	l.once.Do(func() {
		l.net.mu.Lock()
		delete(l.net.services, l.service)
		l.net.mu.Unlock()
		close(l.done)
		for {
			select {
			case c := <-l.queue:
				c.breakOff()
			default:
				return
			}
		}
	})
	return nil
}

type packet struct {
	data []byte
	from netip.AddrPort
}

// packetConn is a datagram socket. Its reader has a deadline, its writer none: a
// queue that is full drops, as a socket's does.
type packetConn struct {
	net  *Network
	once sync.Once
	done chan struct{}

	mu       sync.Mutex
	deadline time.Time
}

func (p *packetConn) ReadFrom(b []byte) (int, net.Addr, error) {
	p.mu.Lock()
	deadline := p.deadline
	p.mu.Unlock()
	var late <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
		defer t.Stop()
		late = t.C
	}
	select {
	case got := <-p.net.packets:
		return copy(b, got.data), net.UDPAddrFromAddrPort(got.from), nil
	case <-p.done:
		return 0, nil, net.ErrClosed
	case <-p.net.done:
		return 0, nil, net.ErrClosed
	case <-late:
		return 0, nil, os.ErrDeadlineExceeded
	}
}

func (p *packetConn) WriteTo(b []byte, to net.Addr) (int, error) {
	if p.net.closed() {
		return 0, net.ErrClosed
	}
	if len(b) > transport.MaxPacket {
		return 0, unix.EMSGSIZE
	}
	h := p.net.hub
	h.mu.Lock()
	lost, delay := rand.Float64() < h.loss, h.delay
	h.mu.Unlock()
	other := h.reach(p.net.id, to.String())
	if other == nil || lost {
		return len(b), nil
	}
	got := packet{append([]byte(nil), b...), p.net.addr}
	deliver := func() {
		select {
		case other.packets <- got:
		default:
		}
	}
	if delay > 0 {
		time.AfterFunc(time.Duration(rand.Int64N(int64(2*delay))), deliver)
	} else {
		deliver()
	}
	return len(b), nil
}

func (p *packetConn) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *packetConn) LocalAddr() net.Addr { return net.UDPAddrFromAddrPort(p.net.addr) }

func (p *packetConn) SetDeadline(t time.Time) error { return p.SetReadDeadline(t) }

func (p *packetConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	return nil
}

func (p *packetConn) SetWriteDeadline(time.Time) error { return nil }
