// Package tailnettest is a whole tailnet for tests: a control server, a relay and
// a STUN server in this process, without an account and without the internet.
// Machines join it with ControlURL, from this process or from others.
package tailnettest

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"tailscale.com/derp/derpserver"
	"tailscale.com/envknob"
	"tailscale.com/net/netns"
	"tailscale.com/net/stunserver"
	"tailscale.com/tailcfg"
	"tailscale.com/tstest/integration/testcontrol"
	"tailscale.com/types/key"
	"tailscale.com/types/logger"
)

// Domain is what the machines' full names end in.
const Domain = "tail-test.ts.net"

// Config says how a Tailnet is. The zero Config is an open one: each machine that
// asks is let in, with the tags that it asks for.
type Config struct {
	// Listen is where the control server listens. The relay and the STUN server
	// listen on other ports of the same address. "": 127.0.0.1:0.
	Listen string
	// RequireAuth makes each machine wait until its login URL is completed, with
	// [Tailnet.CompleteLogin].
	RequireAuth bool
	// AuthKey is the only one that is taken. "": none is asked for.
	AuthKey string
	// RequireApproval makes each machine wait for an approval.
	RequireApproval bool
	// HTTPS says that machines get certificates. There is nobody who makes them.
	HTTPS bool
	// Logf takes the servers' log. Nil: it is thrown away.
	Logf func(format string, args ...any)
}

// Tailnet is one.
type Tailnet struct {
	// ControlURL is what machines join by.
	ControlURL string
	// Control is the control server, for what there is no method for here.
	Control *testcontrol.Server

	stop  []func()
	close sync.Once
}

// Start makes a Tailnet that ends with the test, and sets this process up for
// machines of it, as Setup does. At most one Config.
func Start(t testing.TB, config ...Config) *Tailnet {
	t.Helper()
	var cfg Config
	if len(config) > 0 {
		cfg = config[0]
	}
	t.Cleanup(Setup())
	n, err := Run(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// Setup makes this process one whose machines reach a Tailnet on its own host,
// also without another network, and returns what undoes it. Other processes need
// [Env].
func Setup() (undo func()) {
	before := map[string]string{}
	for name, value := range env() {
		before[name] = envknob.String(name)
		envknob.Setenv(name, value)
	}
	netns.SetEnabled(false)
	return func() {
		for name, value := range before {
			envknob.Setenv(name, value)
		}
		netns.SetEnabled(true)
	}
}

func env() map[string]string {
	return map[string]string{
		"TS_ASSUME_NETWORK_UP_FOR_TEST": "1",    // with loopback only, the library takes it that there is no network
		"TS_NO_LOGS_NO_SUPPORT":         "true", // nothing leaves this host
	}
}

// Env is what the environment of another process must have, as in exec.Cmd.Env.
func Env() (list []string) {
	for _, name := range slices.Sorted(maps.Keys(env())) {
		list = append(list, name+"="+env()[name])
	}
	return list
}

// Run makes a Tailnet, which the caller closes.
func Run(cfg Config) (*Tailnet, error) {
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.Logf == nil {
		cfg.Logf = logger.Discard
	}
	n := &Tailnet{}
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen for the control server: %w", err)
	}
	host, _, _ := net.SplitHostPort(l.Addr().String())
	derp, err := n.relay(host, cfg.Logf)
	if err != nil {
		l.Close()
		n.Close()
		return nil, err
	}
	n.Control = &testcontrol.Server{
		Logf: cfg.Logf, DERPMap: derp, MagicDNSDomain: Domain, AllOnline: true,
		RequireAuth: cfg.RequireAuth, RequireAuthKey: cfg.AuthKey, RequireMachineAuth: cfg.RequireApproval,
		// Not nil: machines get the tags that they ask for.
		TagOwners: map[string][]string{},
	}
	if cfg.HTTPS {
		n.Control.DNSConfig = &tailcfg.DNSConfig{Proxied: true}
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: n.Control, ErrorLog: log.New(logWriter(cfg.Logf), "", 0)}}
	n.Control.HTTPTestServer = server
	server.Start()
	n.ControlURL = server.URL
	n.stop = append(n.stop, func() { server.CloseClientConnections(); server.Close() })
	return n, nil
}

// relay starts a DERP and a STUN server, and is the map to them.
func (n *Tailnet) relay(host string, logf logger.Logf) (*tailcfg.DERPMap, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for the relay: %w", err)
	}
	derp := derpserver.New(key.NewNode(), logf)
	server := &httptest.Server{Listener: l, Config: &http.Server{
		Handler: derpserver.Handler(derp), ErrorLog: log.New(logWriter(logf), "", 0),
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}}
	server.StartTLS()
	n.stop = append(n.stop, func() { server.CloseClientConnections(); server.Close(); derp.Close() })

	ctx, cancel := context.WithCancel(context.Background())
	stun := stunserver.New(ctx)
	if err := stun.Listen(net.JoinHostPort(host, "0")); err != nil {
		cancel()
		return nil, fmt.Errorf("listen for STUN: %w", err)
	}
	served := make(chan struct{})
	go func() { defer close(served); stun.Serve() }()
	n.stop = append(n.stop, func() { cancel(); <-served })

	return &tailcfg.DERPMap{Regions: map[int]*tailcfg.DERPRegion{1: {
		RegionID: 1, RegionCode: "test",
		Nodes: []*tailcfg.DERPNode{{
			Name: "t1", RegionID: 1, HostName: host, IPv4: host, IPv6: "none", InsecureForTests: true, STUNTestIP: host,
			DERPPort: l.Addr().(*net.TCPAddr).Port, STUNPort: stun.LocalAddr().(*net.UDPAddr).Port,
		}},
	}}}, nil
}

// Close ends it. Machines of it must have been closed before.
func (n *Tailnet) Close() {
	n.close.Do(func() {
		for _, stop := range slices.Backward(n.stop) {
			stop()
		}
	})
}

// CompleteLogin does what a person does at a login URL.
func (n *Tailnet) CompleteLogin(url string) bool { return n.Control.CompleteAuth(url) }

// Machine is the machine with a host name, or with a tailnet address; nil if
// there is none.
func (n *Tailnet) Machine(which string) *tailcfg.Node {
	for _, node := range n.Control.AllNodes() {
		named := node.Hostinfo.Valid() && node.Hostinfo.Hostname() == which
		if named || slices.ContainsFunc(node.Addresses, func(p netip.Prefix) bool { return p.Addr().String() == which }) {
			return node
		}
	}
	return nil
}

// Update changes a machine, which Machine finds, and tells all of it.
func (n *Tailnet) Update(which string, change func(*tailcfg.Node)) error {
	node := n.Machine(which)
	if node == nil {
		return fmt.Errorf("there is no machine %s on the tailnet", which)
	}
	change(node)
	n.Control.UpdateNode(node)
	return nil
}

// SetTags changes a machine's tags.
func (n *Tailnet) SetTags(which string, tags ...string) error {
	return n.Update(which, func(node *tailcfg.Node) { node.Tags = tags })
}

// SetKeyExpiry says when a machine's key expires; the zero time: never.
func (n *Tailnet) SetKeyExpiry(which string, at time.Time) error {
	return n.Update(which, func(node *tailcfg.Node) { node.KeyExpiry = at })
}

// Share makes a machine one that another tailnet has shared with this one.
func (n *Tailnet) Share(which string) error {
	return n.Update(which, func(node *tailcfg.Node) { node.Sharer = node.User + 1000 })
}

// Approve lets a machine in that waits for an approval.
func (n *Tailnet) Approve(which string) error {
	return n.Update(which, func(node *tailcfg.Node) { node.MachineAuthorized = true })
}

// SetRoutes makes a machine the router of subnets.
func (n *Tailnet) SetRoutes(which string, subnets ...netip.Prefix) error {
	node := n.Machine(which)
	if node == nil {
		return fmt.Errorf("there is no machine %s on the tailnet", which)
	}
	n.Control.SetSubnetRoutes(node.Key, subnets)
	return nil
}

// SetCaps grants each machine capabilities towards each, by name, with values of
// JSON.
func (n *Tailnet) SetCaps(caps map[string][]string) {
	grants := tailcfg.PeerCapMap{}
	for name, values := range caps {
		for _, v := range values {
			grants[tailcfg.PeerCapability(name)] = append(grants[tailcfg.PeerCapability(name)], tailcfg.RawMessage(v))
		}
	}
	n.Control.SetGlobalAppCaps(grants)
}

// logWriter makes lines of a server's log lines of logf.
type logWriter func(format string, args ...any)

func (w logWriter) Write(p []byte) (int, error) {
	w("%s", p)
	return len(p), nil
}
