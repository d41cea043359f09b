// Package tcpnet is a transport.Network over the host's own TCP and UDP, on one
// port of each: for a LAN, for a tailnet that the host is on by itself, and for
// nodes on one machine. Connections pass a transport.Gate. Start reading at
// [New].
package tcpnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// Config configures a Network. Gate is required.
type Config struct {
	Gate *transport.Gate
	// Listen is the address and port for TCP and UDP. Port 0 is any that is free in both.
	Listen string
	// Advertise is the host:port that others dial. "": that of Listen, or where
	// that stands for all addresses, the one that the host's default route goes out by.
	Advertise string
	Log       *slog.Logger
}

// Network implements transport.Network.
type Network struct {
	cfg  Config
	door *transport.Door
	udp  *net.UDPConn
	addr string

	mu    sync.Mutex
	taken bool // the packet socket
}

var _ transport.Network = (*Network)(nil)

// How long silence of the other host is borne. The kernel asks after it without
// a byte of ours, so a link that was cut ends a connection by itself, whatever
// runs on it.
const (
	keepIdle   = 5 * time.Second // without a byte, before it is asked after
	keepEvery  = 2 * time.Second
	keepCount  = 4
	unanswered = 13 * time.Second // for bytes that are not acknowledged; the same in all
)

// portTries is how often a port is sought that is free for TCP and for UDP.
const portTries = 16

// New listens. Its errors say what is in the way.
func New(ctx context.Context, cfg Config) (*Network, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	tcp, udp, err := listen(ctx, cfg.Listen)
	if err != nil {
		return nil, err
	}
	n := &Network{cfg: cfg, udp: udp, addr: cfg.Advertise}
	if n.addr == "" {
		if n.addr, err = advertise(tcp.Addr().(*net.TCPAddr).AddrPort()); err != nil {
			return nil, errors.Join(err, tcp.Close(), udp.Close())
		}
	}
	n.door = transport.NewDoor(cfg.Gate, tcp, nil, cfg.Log)
	return n, nil
}

// listen opens both sockets on one port.
func listen(ctx context.Context, address string) (*net.TCPListener, *net.UDPConn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, nil, boxed.Errorf(boxed.CodeInvalid, "%q is not an address and a port for other nodes, like 192.168.1.10:%d", address, transport.DefaultPort)
	}
	for try := 1; ; try++ {
		ln, err := (&net.ListenConfig{Control: tune, KeepAliveConfig: keep}).Listen(ctx, "tcp", address)
		if err != nil {
			return nil, nil, inUse(address, err)
		}
		bound := net.JoinHostPort(host, strconv.Itoa(ln.Addr().(*net.TCPAddr).Port))
		pc, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", bound)
		if err == nil {
			return ln.(*net.TCPListener), pc.(*net.UDPConn), nil
		}
		ln.Close()
		if port != "0" || try == portTries || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, nil, inUse(bound, err)
		}
	}
}

func inUse(address string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return boxed.Errorf(boxed.CodeConflict, "%s, where other nodes are to reach this one, is in use by another program; stop it (ss -lntup shows which), or choose another port with mesh.listen: %w", address, err)
	}
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		return boxed.Errorf(boxed.CodeInvalid, "%s is no address of this host (ip address shows them); mend mesh.listen: %w", address, err)
	}
	return fmt.Errorf("listen for other nodes on %s: %w", address, err)
}

// advertise is what others dial for a listener.
func advertise(bound netip.AddrPort) (string, error) {
	if !bound.Addr().IsUnspecified() {
		return bound.String(), nil
	}
	// No datagram is sent: connecting only asks the routing table.
	for _, target := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		c, err := net.Dial("udp", target)
		if err != nil {
			continue
		}
		addr := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
		c.Close()
		return netip.AddrPortFrom(addr, bound.Port()).String(), nil
	}
	return "", boxed.Errorf(boxed.CodeInvalid, "this host has no default route, so which of its addresses do other nodes reach? Say it with mesh.advertise, or listen on that one")
}

// Addr is the address that others dial.
func (n *Network) Addr() string { return n.addr }

// Dial connects to a node.
func (n *Network) Dial(ctx context.Context, to transport.Target, service transport.Service) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, transport.HandshakeTimeout)
	defer cancel()
	// A name would go to the host's resolver, and what that answers is not the mesh's.
	if _, err := netip.ParseAddrPort(to.Addr); err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%q is not an address and a port of a node", to.Addr)
	}
	raw, err := (&net.Dialer{Control: tune, KeepAliveConfig: keep}).DialContext(ctx, "tcp", to.Addr)
	if err != nil {
		return nil, fmt.Errorf("node %s at %s: %w: %w", to.ID, to.Addr, transport.ErrUnreachable, err)
	}
	conn, err := n.cfg.Gate.Dial(ctx, raw, to.ID, service)
	if err != nil {
		return nil, err
	}
	if conn = n.door.Track(conn); conn == nil {
		raw.Close()
		return nil, net.ErrClosed
	}
	return conn, nil
}

// keep asks after a silent peer.
var keep = net.KeepAliveConfig{Enable: true, Idle: keepIdle, Interval: keepEvery, Count: keepCount}

// tune bounds how long bytes may go unacknowledged. Accepted sockets inherit it
// from the listener's.
func tune(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unanswered/time.Millisecond))
	})
	return errors.Join(err, failed)
}

// Listen accepts connections to a service.
func (n *Network) Listen(service transport.Service) (transport.Listener, error) {
	return n.door.Listen(service)
}

// Packets is the UDP socket.
func (n *Network) Packets() (net.PacketConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken {
		return nil, errors.New("the datagrams have a reader already")
	}
	n.taken = true
	return n.udp, nil
}

// Drop closes the connections with nodes that gone reports.
func (n *Network) Drop(gone func(boxed.NodeID) bool) { n.door.Drop(gone) }

// Close closes both sockets and all connections.
func (n *Network) Close() error {
	err := n.udp.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil // by who took it
	}
	return errors.Join(n.door.Close(), err)
}
