package tsnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"tailscale.com/client/local"
	"tailscale.com/ipn/ipnstate"
	"tailscale.com/tailcfg"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// dialAttempt is how long one attempt to connect may take. A dial of the
// library's that meets the remains of a closed connection stalls, and another one
// from another port does not (10 of 949 did).
const dialAttempt = 2 * time.Second

// localTimeout bounds a question to the library itself.
const localTimeout = 5 * time.Second

// Dial connects to a node. to.Addr is the address and port of a peer that is in
// the network map and has the tag; anything else is refused before a packet is
// sent.
func (n *Network) Dial(ctx context.Context, to transport.Target, service transport.Service) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, transport.HandshakeTimeout)
	defer cancel()
	addr, err := netip.ParseAddrPort(to.Addr)
	if err != nil || addr.Addr().Zone() != "" || addr.Port() == 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%q is not an address and a port of a node", to.Addr)
	}
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	raw, err := n.dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("node %s at %s: %w", to.ID, to.Addr, err)
	}
	conn, err := n.cfg.Gate.Dial(ctx, raw, to.ID, service)
	if err != nil {
		return nil, err
	}
	tracked := n.door.Track(conn)
	if tracked == nil {
		conn.Close()
		return nil, net.ErrClosed
	}
	return tracked, nil
}

// dial opens a connection over the tailnet to a machine with the tag.
func (n *Network) dial(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	if status := n.Status(); status.State != Running {
		return nil, fmt.Errorf("%w: this machine is not on the tailnet (%s)", transport.ErrUnreachable, status.State)
	}
	for {
		// Looked up for each attempt: the library would dial what has left the network
		// map meanwhile by the host's network.
		node, err := n.tagged(ctx, addr.Addr())
		if err != nil {
			return nil, err
		}
		if node.HomeDERP == 0 && len(node.Endpoints) == 0 && ctx.Err() == nil {
			// It has only just joined, and there is no way to it yet. WireGuard would fail,
			// and try again only after five seconds.
			rest(ctx, pauseNews, nil)
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, dialAttempt)
		conn, err := n.server.Dial(attempt, "tcp", addr.String())
		stalled := attempt.Err() != nil
		cancel()
		switch {
		case err == nil && !n.ours(conn.LocalAddr()):
			conn.Close()
			return nil, fmt.Errorf("%w: it has left the tailnet", transport.ErrUnreachable)
		case err == nil:
			l := &link{Conn: conn, all: n.links}
			n.links.keep(l, addr.Addr(), process(node))
			return l, nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("%w: %w: no answer; it is off, or the tailnet's policy does not let this machine reach its port %d", transport.ErrUnreachable, ctx.Err(), addr.Port())
		case !stalled:
			return nil, fmt.Errorf("%w: %w", transport.ErrUnreachable, err)
		}
		n.cfg.Log.Debug("a dial over the tailnet stalled and is tried again", "addr", addr)
	}
}

// pass refuses a connection from what is not a machine with the tag.
func (n *Network) pass(ctx context.Context, c net.Conn) error {
	l, ok := c.(*link)
	from, err := netip.ParseAddrPort(addrText(c.RemoteAddr()))
	if !ok || err != nil {
		return fmt.Errorf("%w: it has no address", transport.ErrStranger)
	}
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	node, err := n.tagged(ctx, from.Addr())
	if err != nil {
		return fmt.Errorf("from %s: %w", from, err)
	}
	n.links.keep(l, from.Addr(), process(node))
	return nil
}

// tagged is the machine with an address, if it is another one of this tailnet and
// has the tag.
func (n *Network) tagged(ctx context.Context, addr netip.Addr) (*tailcfg.Node, error) {
	if slices.Contains(n.current().self, addr) {
		return nil, fmt.Errorf("%w: that is this machine's own address", transport.ErrStranger)
	}
	// By the address alone it is a machine's own: neither one in a subnet that it
	// routes, nor a port of this host that the library knows.
	who, err := n.client.WhoIs(ctx, addr.String())
	switch {
	case errors.Is(err, local.ErrPeerNotFound):
		return nil, fmt.Errorf("%w: no machine of the tailnet that this one may see has that address", transport.ErrStranger)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", transport.ErrUnreachable, err)
	case shared(who.Node):
		return nil, fmt.Errorf("%w: %s belongs to another tailnet", transport.ErrStranger, who.Node.Name)
	case !slices.Contains(who.Node.Tags, n.cfg.Tag):
		return nil, fmt.Errorf("%w: the machine %s does not have %s; %s", transport.ErrStranger, who.Node.Name, n.cfg.Tag, giveTag(n.cfg.Tag))
	}
	return who.Node, nil
}

// answers asks a machine below TCP and below WireGuard, which no policy of the
// tailnet forbids. (The library's TSMP ping would too, and makes its Close stall
// for five seconds at the other end when that closes meanwhile.)
func (n *Network) answers(ctx context.Context, peer netip.Addr) (string, bool) {
	node, err := n.tagged(ctx, peer)
	if err != nil {
		return "", false
	}
	var res *ipnstate.PingResult
	res, err = n.client.Ping(ctx, peer, tailcfg.PingDisco)
	return process(node), err == nil && res.Err == ""
}

// process names the run of a machine's daemon: this key is made at each start.
func process(node *tailcfg.Node) string {
	if node.DiscoKey.IsZero() {
		return ""
	}
	return node.DiscoKey.String()
}

// ours reports whether a is an address of this machine on the tailnet.
func (n *Network) ours(a net.Addr) bool {
	addr, err := netip.ParseAddrPort(addrText(a))
	return err == nil && slices.Contains(n.current().self, addr.Addr())
}

func addrText(a net.Addr) string {
	if a == nil {
		return "" // the connection is closed already
	}
	return a.String()
}
