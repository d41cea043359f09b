// Package tsnet is a transport.Network over a tailnet, by a tailnet node in this
// process: for hosts that share no network, behind NAT and firewalls. The host
// itself need not be on the tailnet, and is not put on it.
//
// A connection is one between boxed nodes if both ends carry the node tag on the
// tailnet, and have then passed a transport.Gate: neither the tailnet alone nor
// the cluster key alone makes a node. Nothing but a tagged peer of the network
// map is ever dialled, by its address; names are not resolved, and nothing falls
// through to the host's own network (case M6).
//
// The tailnet node is durable: its keys lie in a directory, it keeps its address
// when the daemon starts again, and it is started once and never again from a
// request's path (case M5). Joining may need a person; [Network.Status] says so,
// and what to do.
//
// tailscale's own log goes to Config.Log at debug level, and none of it is sent
// to Tailscale: the package switches that off for the whole process, by
// envknob.SetNoLogsNoSupport. The library reads TS_AUTHKEY, TS_CLIENT_SECRET and
// its like from the environment where Config.AuthKey is "".
//
// Start reading at [New]. A whole tailnet for tests is in tailnettest.
package tsnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tailscale.com/client/local"
	"tailscale.com/envknob"
	"tailscale.com/ipn"
	"tailscale.com/tsnet"
	"tailscale.com/types/logger"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// DefaultTag is the tag of machines that are boxed nodes.
const DefaultTag = "tag:boxed"

// Config configures a Network. Dir and Gate are required.
type Config struct {
	// Dir keeps the machine's keys, and is made with mode 0700. Whoever has a copy
	// of it is this machine; two daemons must not share one. The library also keeps
	// its log there, of at most 50 MiB.
	Dir string
	// Hostname is the machine's name on the tailnet. "": "boxed-" and the host's.
	Hostname string
	// AuthKey logs the machine in without a person, the first time and after its
	// key has expired. "": Status has a URL to open. An OAuth client secret serves
	// too; it is traded for a key over the network at each start, and New waits.
	AuthKey string
	// ControlURL is the tailnet's control server, a headscale say. "": Tailscale's.
	ControlURL string
	// Tag is what boxed nodes are told by; the machine asks for it. "": DefaultTag.
	Tag string
	// Ephemeral machines leave the tailnet as they are closed. For tests only: a
	// host is durable, or else it is another machine after each start (case M5).
	Ephemeral bool
	Gate      *transport.Gate
	Log       *slog.Logger
}

// Network implements transport.Network.
type Network struct {
	cfg    Config
	server *tsnet.Server
	client *local.Client
	local  *http.Transport
	door   *transport.Door
	links  *links
	stop   context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	view    view
	changed chan struct{} // closed with each new view
	login   login
	udp     net.PacketConn
	taken   bool // udp has a reader
	closed  bool
}

var _ transport.Network = (*Network)(nil)

// farewellWait bounds what Close waits for others.
const farewellWait = 500 * time.Millisecond

// New starts the tailnet node, and does not wait for it to be connected: that is
// [Network.Up]. ctx bounds the start only.
func New(ctx context.Context, cfg Config) (*Network, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if err := privateDir(cfg.Dir); err != nil {
		return nil, err
	}
	envknob.SetNoLogsNoSupport()
	n := &Network{cfg: cfg, changed: make(chan struct{}), view: view{status: Status{State: Starting, Hostname: cfg.Hostname}}}
	n.server = &tsnet.Server{
		Dir: cfg.Dir, Hostname: cfg.Hostname, AuthKey: cfg.AuthKey, ControlURL: cfg.ControlURL,
		Ephemeral: cfg.Ephemeral, AdvertiseTags: []string{cfg.Tag}, Logf: debugf(cfg.Log), UserLogf: debugf(cfg.Log),
	}
	if err := n.server.Start(); err != nil {
		return nil, fmt.Errorf("start the tailnet node with the state in %s: %w", cfg.Dir, err)
	}
	library, err := n.server.LocalClient()
	if err != nil {
		return nil, errors.Join(err, n.server.Close())
	}
	// Its own client leaves connections open, for which its server waits five
	// seconds when it closes.
	n.local = &http.Transport{DialContext: library.Dial}
	n.client = &local.Client{Transport: n.local, OmitAuth: true}
	// The listener is there before the node has an address, and takes what is for
	// the node's own addresses only.
	raw, err := n.server.Listen("tcp", ":"+strconv.Itoa(transport.DefaultPort))
	if err != nil {
		return nil, errors.Join(err, n.server.Close())
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.links = newLinks(n.answers, cfg.Log)
	pass := func(c net.Conn) error { return n.pass(run, c) }
	n.door = transport.NewDoor(cfg.Gate, &incoming{Listener: raw, network: n}, pass, cfg.Log)
	n.refresh(ctx)
	n.work.Go(func() { n.watch(run) })
	n.work.Go(func() { n.links.run(run) })
	return n, nil
}

// complete checks cfg and puts in the defaults.
func (cfg Config) complete() (Config, error) {
	if cfg.Gate == nil || cfg.Dir == "" {
		return cfg, errors.New("tsnet: a network needs a gate and a directory")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Tag == "" {
		cfg.Tag = DefaultTag
	}
	if !strings.HasPrefix(cfg.Tag, "tag:") {
		return cfg, boxed.Errorf(boxed.CodeInvalid, "%q is not a tag of a tailnet; one looks like %s", cfg.Tag, DefaultTag)
	}
	if cfg.ControlURL == "" {
		cfg.ControlURL = ipn.DefaultControlURL // else the library looks in the environment
	}
	if cfg.Hostname == "" {
		host, err := os.Hostname()
		if err != nil {
			return cfg, fmt.Errorf("name the machine for the tailnet: %w", err)
		}
		host, _, _ = strings.Cut(host, ".")
		cfg.Hostname = "boxed-" + strings.ToLower(host)
	}
	return cfg, nil
}

// privateDir makes a directory that is the daemon's alone, or makes it so.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of the tailnet's keys: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("keep the tailnet's keys from others: %w", err)
	}
	return nil
}

// debugf is the library's way to log.
func debugf(log *slog.Logger) logger.Logf {
	return func(format string, args ...any) {
		if log.Enabled(context.Background(), slog.LevelDebug) {
			log.Debug("tailscale", "text", strings.TrimSpace(fmt.Sprintf(format, args...)))
		}
	}
}

// Addr is this machine's address on the tailnet, with the port; "" until it has
// been up once.
func (n *Network) Addr() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.view.status.Addr
}

// Listen accepts connections to a service. It may be called before the machine is
// up.
func (n *Network) Listen(service transport.Service) (transport.Listener, error) {
	return n.door.Listen(service)
}

// Packets is the UDP socket on the machine's own address. There is none before
// [Network.Up]: until then the error is ErrUnreachable.
func (n *Network) Packets() (net.PacketConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
		return nil, net.ErrClosed
	case n.taken:
		return nil, errors.New("the datagrams have a reader already")
	case n.udp == nil:
		return nil, fmt.Errorf("the tailnet: %w: this machine is not up yet", transport.ErrUnreachable)
	}
	n.taken = true
	n.udp.SetReadDeadline(time.Time{})
	return &lent{PacketConn: n.udp, network: n}, nil
}

// lent is the socket for datagrams in the hands of who took it: closing it gives
// it back, since the machine has only one.
type lent struct {
	net.PacketConn
	network *Network
	closed  atomic.Bool
}

func (l *lent) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := l.PacketConn.ReadFrom(b)
	if l.closed.Load() {
		return 0, nil, net.ErrClosed
	}
	return n, from, err
}

func (l *lent) Close() error {
	if l.closed.Swap(true) {
		return net.ErrClosed
	}
	l.PacketConn.SetReadDeadline(time.Unix(1, 0))
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	l.network.taken = false
	return nil
}

// Drop closes the connections with nodes that gone reports.
func (n *Network) Drop(gone func(boxed.NodeID) bool) { n.door.Drop(gone) }

// Close takes the machine off the tailnet until the next New. Of the library's
// goroutines, none that belong to this machine is left.
func (n *Network) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	udp := n.udp
	n.view.status.State, n.view.ready = Stopped, false
	n.view.status.Problem, n.view.status.Next = "the tailnet node is stopped", "start boxed-node again"
	close(n.changed)
	n.changed = make(chan struct{})
	n.mu.Unlock()

	peers := n.links.peers()
	n.stop()
	err := n.door.Close()
	n.farewell(peers)
	if udp != nil {
		if e := udp.Close(); !errors.Is(e, net.ErrClosed) { // by who took it
			err = errors.Join(err, e)
		}
	}
	n.work.Wait()
	n.local.CloseIdleConnections()
	return errors.Join(err, n.server.Close())
}

// farewell waits until the goodbyes of connections that were closed have arrived:
// the library ends without sending what it holds, and then the others would not
// know for a while. By when another machine has answered two questions that were
// put after them, they are there.
func (n *Network) farewell(peers []netip.Addr) {
	ctx, cancel := context.WithTimeout(context.Background(), farewellWait)
	defer cancel()
	var asked sync.WaitGroup
	for _, peer := range peers {
		asked.Go(func() {
			for range 2 {
				n.answers(ctx, peer)
			}
		})
	}
	asked.Wait()
}

// incoming is the listener on the tailnet. Its connections are links.
type incoming struct {
	net.Listener
	network *Network
}

func (l *incoming) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &link{Conn: c, all: l.network.links}, nil
}

// Addr is where others reach it.
func (l *incoming) Addr() net.Addr {
	if addr, err := netip.ParseAddrPort(l.network.Addr()); err == nil {
		return net.TCPAddrFromAddrPort(addr)
	}
	return l.Listener.Addr()
}
