package tsnet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tailscale.com/ipn"
	"tailscale.com/ipn/ipnstate"
	"tailscale.com/tsconst"

	"github.com/boxed-mesh/boxed/transport"
)

// State says how far a machine is on the tailnet.
type State string

// The states.
const (
	Starting      State = "starting"
	NeedsLogin    State = "needs_login"    // a person or an auth key must log it in
	NeedsApproval State = "needs_approval" // a person must let the machine in
	Running       State = "running"
	Expired       State = "expired" // its key is over; it must be logged in again
	Stopped       State = "stopped"
)

// expiryWarning is how long before the machine's key expires that is a problem.
const expiryWarning = 14 * 24 * time.Hour

// Status is the machine's state on the tailnet.
type Status struct {
	State     State
	LoginURL  string    // to open in a browser, where a login is needed and there is one
	Hostname  string    // as it was asked for; the tailnet may have added a number
	DNSName   string    // full, without a final dot; "" before the first login
	Addr      string    // host:port, as Network.Addr
	KeyExpiry time.Time // the zero time: never
	Problem   string    // what is wrong, for a person; "" if nothing is
	Next      string    // what to do about it
}

// Peer is another machine with the node tag: a seed of the gossip.
type Peer struct {
	Name   string // full, without a final dot
	Addr   string // host:port to dial
	Online bool   // as the control server sees it
}

// view is what the Network last saw of the tailnet. It is replaced, not changed.
type view struct {
	status   Status
	ready    bool // running, with a relay and both sockets
	self     []netip.Addr
	peers    []Peer
	routers  []router
	certs    []string  // names that the tailnet helps to get certificates for
	alone    time.Time // since when the control server has not been there; zero: it is
	services []string  // of which this machine is an approved host
}

// router is a machine that routes subnets.
type router struct {
	name    string
	subnets []netip.Prefix
}

// routerOf is the machine behind which addr is, or "".
func (v view) routerOf(addr netip.Addr) string {
	for _, r := range v.routers {
		if slices.ContainsFunc(r.subnets, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			return r.name
		}
	}
	return ""
}

// current is the last view.
func (n *Network) current() view {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.view
}

// Status is the machine's state, as of a moment ago. It does not wait for
// anything.
func (n *Network) Status() Status { return n.current().status }

// Peers are the other machines of the tailnet with the node tag, by name: those
// that are off too, but not yet one to which the tailnet knows no way.
func (n *Network) Peers() []Peer { return slices.Clone(n.current().peers) }

// Up waits until the machine is on the tailnet, has its address and a relay, and
// both sockets are open. When ctx ends first, the error says what is missing, and
// is ErrUnreachable.
func (n *Network) Up(ctx context.Context) error {
	for {
		n.mu.Lock()
		v, changed, closed := n.view, n.changed, n.closed
		n.mu.Unlock()
		switch {
		case closed:
			return net.ErrClosed
		case v.ready:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			text := "this machine is " + string(v.status.State)
			if v.status.Problem != "" {
				text = v.status.Problem + "; " + v.status.Next
			}
			return fmt.Errorf("join the tailnet: %w: %s: %w", transport.ErrUnreachable, text, ctx.Err())
		}
	}
}

// How often the view is renewed, at least.
const (
	pauseReady   = 15 * time.Second
	pauseWaiting = time.Second
	pauseNearly  = 100 * time.Millisecond // running, and the relay is being chosen
	pauseNews    = 50 * time.Millisecond  // at most: news come in bursts
)

// watch keeps the view until ctx ends.
func (n *Network) watch(ctx context.Context) {
	news := make(chan struct{}, 1)
	var bus sync.WaitGroup
	defer bus.Wait()
	bus.Go(func() {
		for ctx.Err() == nil {
			n.follow(ctx, news)
			rest(ctx, pauseWaiting, nil) // it falls behind at times, and then ends
		}
	})
	for ctx.Err() == nil {
		rest(ctx, pauseNews, nil)
		n.refresh(ctx)
		pause := pauseWaiting
		switch v := n.current(); {
		case v.ready:
			pause = pauseReady
		case v.status.State == Running:
			pause = pauseNearly
		}
		rest(ctx, pause, news)
	}
}

// rest waits for a time, for news, or for the end of ctx.
func rest(ctx context.Context, pause time.Duration, news <-chan struct{}) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-news:
	case <-ctx.Done():
	}
}

// login is what became of the last attempt to log in, if it failed.
type login struct {
	err     string
	refusal string // the last thing that a control server said for a person to read
}

// refused reports whether it failed by the control server's word.
func (l login) refused() bool { return l.err != "" && l.err == l.refusal }

// follow reads the library's notices, of which only those of logins are looked at:
// the rest is looked up when one comes.
func (n *Network) follow(ctx context.Context, news chan<- struct{}) {
	bus, err := n.client.WatchIPNBus(ctx, ipn.NotifyInitialState|ipn.NotifyInitialHealthState|ipn.NotifyPeerChanges)
	if err != nil {
		return
	}
	defer bus.Close()
	for {
		notice, err := bus.Next()
		if err != nil {
			return
		}
		if notice.Health != nil {
			err := notice.Health.Warnings[tsconst.HealthWarnableLoginState].Args["error"]
			n.mu.Lock()
			n.login.err = err
			n.mu.Unlock()
		}
		if notice.ErrMessage != nil {
			n.mu.Lock()
			n.login.refusal = *notice.ErrMessage
			n.mu.Unlock()
		}
		select {
		case news <- struct{}{}:
		default:
		}
	}
}

// refresh makes a new view, and opens the datagram socket when there is an
// address to open it on.
func (n *Network) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	st, err := n.client.Status(ctx)
	if err != nil {
		return // it is closing
	}
	n.mu.Lock()
	old, login, udp := n.view, n.login, n.udp
	n.mu.Unlock()
	v := n.viewOf(st, login, old)
	if v.status.State == Running && udp == nil {
		if pc, err := n.server.ListenPacket("udp", v.status.Addr); err != nil {
			n.cfg.Log.Warn("listen for datagrams on the tailnet", "addr", v.status.Addr, "err", err)
		} else {
			udp = datagrams{pc}
		}
	}
	v.ready = v.status.State == Running && udp != nil && st.Self.Relay != ""
	if n.publish(v, udp) && old.status.differs(v.status) {
		logStatus(n.cfg.Log, v.status)
	}
}

// publish makes v the current view, unless the Network is closed.
func (n *Network) publish(v view, udp net.PacketConn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		if udp != nil {
			udp.Close()
		}
		return false
	}
	n.view, n.udp = v, udp
	close(n.changed)
	n.changed = make(chan struct{})
	return true
}

// viewOf is what st says. Of the old view it keeps the address that others have
// been told.
func (n *Network) viewOf(st *ipnstate.Status, last login, old view) view {
	v := view{self: st.TailscaleIPs, alone: old.alone}
	v.status = Status{State: stateOf(st, last), LoginURL: st.AuthURL, Hostname: n.cfg.Hostname, Addr: old.status.Addr}
	if self := st.Self; self != nil {
		v.status.DNSName = strings.TrimSuffix(self.DNSName, ".")
		v.services = servicesOf(self)
		if self.KeyExpiry != nil {
			v.status.KeyExpiry = *self.KeyExpiry
		}
		switch {
		case self.Online:
			v.alone = time.Time{}
		case v.alone.IsZero():
			v.alone = time.Now()
		}
	}
	if v.status.State == Running {
		v.status.LoginURL = ""
		if v.status.Addr == "" {
			v.status.Addr = meshAddr(st.TailscaleIPs)
		}
	}
	if st.CurrentTailnet != nil && st.CurrentTailnet.MagicDNSEnabled {
		v.certs = st.CertDomains
	}
	for _, p := range st.Peer {
		name := strings.TrimSuffix(p.DNSName, ".")
		if p.PrimaryRoutes != nil {
			if nets := subnets(p.PrimaryRoutes.AsSlice()); len(nets) > 0 {
				v.routers = append(v.routers, router{name, nets})
			}
		}
		reachable := p.Relay != "" || p.CurAddr != "" // not so for a moment after it has joined
		if addr := meshAddr(p.TailscaleIPs); addr != "" && reachable && hasTag(p, n.cfg.Tag) && !p.ShareeNode && p.AltSharerUserID == 0 {
			v.peers = append(v.peers, Peer{Name: name, Addr: addr, Online: p.Online})
		}
	}
	slices.SortFunc(v.peers, func(a, b Peer) int { return strings.Compare(a.Name+a.Addr, b.Name+b.Addr) })
	v.status.Problem, v.status.Next = n.advise(st, v, last)
	return v
}

func stateOf(st *ipnstate.Status, last login) State {
	state, _ := ipn.StateFromString(st.BackendState)
	expired := st.Self != nil && (st.Self.Expired || st.Self.KeyExpiry != nil && st.Self.KeyExpiry.Before(time.Now()))
	switch {
	case expired && state != ipn.Stopped:
		return Expired
	case state == ipn.NeedsLogin && (st.AuthURL != "" || last.refused()):
		return NeedsLogin
	case state == ipn.NeedsMachineAuth:
		return NeedsApproval
	case state == ipn.Running:
		return Running
	case state == ipn.Stopped:
		return Stopped
	}
	return Starting // NeedsLogin too, until the control server has said how
}

// meshAddr is where boxed listens on a machine with these addresses: the IPv4 one
// if it has one.
func meshAddr(addrs []netip.Addr) string {
	if len(addrs) == 0 {
		return ""
	}
	addr := addrs[0]
	if i := slices.IndexFunc(addrs, netip.Addr.Is4); i >= 0 {
		addr = addrs[i]
	}
	return net.JoinHostPort(addr.String(), strconv.Itoa(transport.DefaultPort))
}

// differs reports whether a person should hear of the change from s to t.
func (s Status) differs(t Status) bool {
	return s.State != t.State || s.Problem != t.Problem || s.Next != t.Next
}

func hasTag(p *ipnstate.PeerStatus, tag string) bool {
	return p.Tags != nil && slices.Contains(p.Tags.AsSlice(), tag)
}
