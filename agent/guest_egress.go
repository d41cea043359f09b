package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed/internal/relay"
)

// Loopback opens listeners on the sandbox's loopback. A Handler that has it can serve
// egress.
type Loopback interface {
	Listen(network, address string) (net.Listener, error)
	ListenPacket(network, address string) (net.PacketConn, error)
}

// Bounds within the guest, which shares its memory and its descriptors with nobody else.
const (
	maxHandshakes   = 4                // at once: the host holds few connections that have not said what they are
	maxNameListens  = 1024             // listeners of synthetic addresses; those used longest ago are closed
	maxDNSAtOnce    = 64               // queries; more are dropped, and asked again
	dnsTCPLimit     = 10 * time.Second // of one connection
	egressHelloTime = 5 * time.Second
)

// entries are the guest's side of egress.
type entries struct {
	guest      *Guest
	loopback   Loopback
	handshakes chan struct{}
	queries    chan struct{}
	conns      chan struct{}

	mu     sync.Mutex
	config EgressConfig
	close  func() // nil: not open
	names  map[string]*synthetic
	next   netip.Addr
	used   []*listening // those of names, the one used longest ago first
}

// synthetic is a name's address. It is given once: what a program has found out stays true
// for as long as the sandbox lives.
type synthetic struct {
	name string
	addr netip.Addr
}

// listening is a listener at a synthetic address.
type listening struct {
	net.Listener
	at netip.AddrPort
}

func newEntries(g *Guest, l Loopback) *entries {
	return &entries{
		guest: g, loopback: l, handshakes: make(chan struct{}, maxHandshakes), queries: make(chan struct{}, maxDNSAtOnce),
		conns: make(chan struct{}, MaxEgressConns), names: map[string]*synthetic{}, next: netip.MustParseAddr("127.64.0.1"),
	}
}

// configure opens the entries, or closes them.
func (e *entries) configure(c *EgressConfig) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case c == nil && e.close != nil:
		e.close()
		e.close = nil
	case c != nil && e.close == nil:
		stop, err := e.open(*c)
		if err != nil {
			return err
		}
		e.config, e.close = *c, stop
	case c != nil && *c != e.config:
		return &Error{Code: ErrConflict, Message: "egress is open on other ports"}
	}
	return nil
}

// open listens at all entries, or at none.
func (e *entries) open(c EgressConfig) (stop func(), err error) {
	var closers []func() error
	stop = func() {
		for _, c := range closers {
			c()
		}
		for _, l := range e.used {
			l.Close()
		}
		e.used = nil
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	listen := func(port uint16, serve func(net.Conn)) {
		if err != nil {
			return
		}
		var l net.Listener
		if l, err = e.loopback.Listen("tcp4", "127.0.0.1:"+strconv.Itoa(int(port))); err == nil {
			closers = append(closers, l.Close)
			go e.accept(l, serve)
		}
	}
	listen(c.HTTP, func(conn net.Conn) { e.hand(conn, Intent{Entry: EntryHTTP}) })
	listen(c.SOCKS, func(conn net.Conn) { e.hand(conn, Intent{Entry: EntrySOCKS}) })
	listen(c.DNS, e.serveDNSConn)
	if err == nil {
		var packets net.PacketConn
		if packets, err = e.loopback.ListenPacket("udp4", "127.0.0.1:"+strconv.Itoa(int(c.DNS))); err == nil {
			closers = append(closers, packets.Close)
			go e.serveDNS(packets)
		}
	}
	if err != nil {
		return nil, &Error{Code: ErrConflict, Message: "open egress: " + err.Error()}
	}
	return stop, nil
}

// accept serves connections until the listener is closed. Nothing else ends it.
func (e *entries) accept(l net.Listener, serve func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, say
			time.Sleep(20 * time.Millisecond)
			continue
		}
		select {
		case e.conns <- struct{}{}:
		default:
			reset(conn)
			continue
		}
		go func() {
			serve(conn)
			conn.Close()
			<-e.conns
		}()
	}
}

// reset closes a connection so that its program learns that it was refused.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	conn.Close()
}

// dial hands a new connection to the host, as what the intent says.
func (e *entries) dial(intent Intent) (net.Conn, error) {
	e.handshakes <- struct{}{}
	defer func() { <-e.handshakes }()
	conn, err := e.guest.dial()
	if err != nil {
		return nil, err
	}
	if _, err := e.guest.hello(conn, Hello{Egress: &intent}); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// hand pumps bytes between a program and the host.
func (e *entries) hand(conn net.Conn, intent Intent) {
	host, err := e.dial(intent)
	if err == nil && intent.Entry == EntryName {
		var r Response
		// As long as the host takes to find, judge and reach the destination, or to ask.
		if err = readMessage(host, maxHello, &r); err == nil && r.Error != nil {
			err = r.Error
		}
	}
	if err != nil {
		if host != nil {
			host.Close()
		}
		reset(conn)
		return
	}
	relay.Both(conn, host, relay.Options{Drain: time.Minute})
}

// errNoAddress says that no name gets an address any more.
var errNoAddress = errors.New("all synthetic addresses are given")

// address gives a name its synthetic address, and sees to it that somebody listens there.
func (e *entries) address(name string, ports []uint16) (netip.Addr, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.close == nil {
		return netip.Addr{}, net.ErrClosed
	}
	s := e.names[name]
	if s == nil {
		if len(e.names) >= MaxNames {
			return netip.Addr{}, errNoAddress
		}
		s = &synthetic{name: name, addr: e.next}
		e.names[name] = s
		e.next = e.next.Next()
		if last := e.next.As4()[3]; last == 255 || last == 0 { // some programs take these for no hosts
			e.next = netip.AddrFrom4([4]byte{127, e.next.As4()[1], e.next.As4()[2], 255}).Next().Next()
		}
	}
	for _, port := range ports[:min(len(ports), MaxNamePorts)] {
		if err := e.listenLocked(s, port); err != nil {
			return netip.Addr{}, err
		}
	}
	return s.addr, nil
}

func (e *entries) listenLocked(s *synthetic, port uint16) error {
	at := netip.AddrPortFrom(s.addr, port)
	if i := slices.IndexFunc(e.used, func(l *listening) bool { return l.at == at }); i >= 0 {
		l := e.used[i]
		e.used = append(slices.Delete(e.used, i, i+1), l)
		return nil
	}
	if len(e.used) >= maxNameListens {
		e.used[0].Close()
		e.used = slices.Delete(e.used, 0, 1)
	}
	l, err := e.loopback.Listen("tcp4", at.String())
	if err != nil {
		return err
	}
	e.used = append(e.used, &listening{l, at})
	go e.accept(l, func(conn net.Conn) { e.hand(conn, Intent{Entry: EntryName, Host: s.name, Port: port}) })
	return nil
}

// serveCanary looks from inside whether the sandbox is shut.
func (g *Guest) serveCanary(c Canary) (CanaryResult, error) {
	begun := time.Now()
	if g.entries == nil {
		return CanaryResult{}, &Error{Code: ErrUnavailable, Message: "this agent serves no egress"}
	}
	problem := canaryShut()
	if problem == "" && !c.Open {
		problem = canaryNames()
	}
	if problem == "" && c.Open {
		problem = g.entries.canary(c.Name)
	}
	return CanaryResult{Problem: problem, Micros: time.Since(begun).Microseconds()}, nil
}

// canary asks the entries for a name that is denied.
func (e *entries) canary(name string) string {
	e.mu.Lock()
	c, open := e.config, e.close != nil
	e.mu.Unlock()
	if !open {
		return "its entries are not open"
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	looked := make(chan string, 1)
	go func() { looked <- deniedName(ctx, c.DNS, name) }() // a create waits for both
	tunnel := deniedCONNECT(ctx, c.HTTP, name)
	return cmp.Or(<-looked, tunnel)
}

// deniedName says what is wrong with the answer to a name that is denied, or "".
func deniedName(ctx context.Context, port uint16, name string) string {
	if code, err := askDNS(ctx, port, name); err != nil || code != codeNoName {
		return fmt.Sprintf("a name that is denied was answered with code %d, %v", code, err)
	}
	return ""
}

// deniedCONNECT is the same of a tunnel.
func deniedCONNECT(ctx context.Context, port uint16, name string) string {
	if status, err := askCONNECT(ctx, port, name); err != nil || status != 403 {
		return fmt.Sprintf("a CONNECT that is denied was answered with %d, %v", status, err)
	}
	return ""
}
