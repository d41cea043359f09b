package tsnet_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/transporttest"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

// served accepts and drops connections, and returns how many came through.
func served(t *testing.T, n transport.Network) (count func() int64) {
	t.Helper()
	l, err := n.Listen(transport.API)
	if err != nil {
		t.Fatal(err)
	}
	var got atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptPeer()
			if err != nil {
				return
			}
			got.Add(1)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return got.Load
}

func dialErr(n, to transporttest.Node) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := n.Dial(ctx, transport.Target{ID: to.ID, Addr: to.Addr()}, transport.API)
	if err == nil {
		c.Close()
	}
	return err
}

// Decision 11: the tag makes no node, and the cluster key makes none.
func TestTheTagAndTheClusterKeyAdmit(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	tagged, other := node(t, newConfig(t, tailnet, key)), node(t, newConfig(t, tailnet, key))
	untaggedConfig := newConfig(t, tailnet, key)
	untagged := node(t, untaggedConfig)
	keyless := node(t, newConfig(t, tailnet, transport.NewClusterKey()))
	acquainted(t, tagged, other, untagged, keyless)
	counts := map[string]func() int64{"tagged": served(t, tagged), "untagged": served(t, untagged), "keyless": served(t, keyless)}

	if err := tailnet.SetTags(untaggedConfig.Hostname); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is seen that one machine has lost its tag", func() bool {
		return len(network(tagged).Peers()) == 2 && network(untagged).Status().Problem != ""
	})
	if s := network(untagged).Status(); s.State != tsnet.Running || !strings.Contains(s.Problem, tsnet.DefaultTag) || !strings.Contains(s.Next, "tagOwners") {
		t.Errorf("it says %+v", s)
	}
	if err := dialErr(untagged, tagged); err == nil {
		t.Error("a machine without the tag is let in by the cluster key")
	}
	if err := dialErr(tagged, untagged); !errors.Is(err, transport.ErrStranger) || !strings.Contains(err.Error(), tsnet.DefaultTag) {
		t.Errorf("to a machine without the tag: %v", err)
	}
	if err := dialErr(keyless, tagged); !errors.Is(err, transport.ErrStranger) {
		t.Errorf("from a machine without the cluster key: %v", err)
	}
	if err := dialErr(tagged, keyless); !errors.Is(err, transport.ErrStranger) {
		t.Errorf("to a machine without the cluster key: %v", err)
	}
	for name, count := range counts {
		if count() != 0 {
			t.Errorf("%s: %d connections came through", name, count())
		}
	}
	if err := dialErr(other, tagged); err != nil {
		t.Errorf("a machine with both: %v", err)
	}
}

// A tag of another tailnet is not ours.
func TestAMachineSharedFromAnotherTailnetIsRefused(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a, cfg := node(t, newConfig(t, tailnet, key)), newConfig(t, tailnet, key)
	b := node(t, cfg)
	acquainted(t, a, b)
	served(t, b)
	if err := dialErr(a, b); err != nil {
		t.Fatal(err)
	}
	if err := tailnet.Share(cfg.Hostname); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is no longer a peer", func() bool { return len(network(a).Peers()) == 0 })
	if err := dialErr(a, b); !errors.Is(err, transport.ErrStranger) {
		t.Errorf("got %v", err)
	}
}

// Case M6: what is not a machine with the tag is refused before anything is sent,
// and the host's own network and resolver are not used.
func TestNothingFallsThroughToTheHost(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a, routerConfig := node(t, newConfig(t, tailnet, key)), newConfig(t, tailnet, key)
	router := node(t, routerConfig)
	acquainted(t, a, router)

	var reached atomic.Int64
	addrs := []string{a.Addr(), "100.64.99.99:7946", "100.100.100.100:80", "[fd7a:115c:a1e0::99]:7946", "[::1]:7946", "0.0.0.0:7946", strings.TrimPrefix(tailnet.ControlURL, "http://")}
	for _, ip := range hostAddrs(t) {
		l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
		if err != nil {
			continue // IPv6 may be off
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				reached.Add(1)
				c.Close()
			}
		}()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		addrs = append(addrs, l.Addr().String(), "localhost:"+port, "boxed-x:"+port)
		if addr := netip.MustParseAddr(ip); addr.Is4() {
			addrs = append(addrs, "[::ffff:"+ip+"]:"+port)
			if err := tailnet.SetRoutes(routerConfig.Hostname, netip.PrefixFrom(addr, 32)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, addr := range addrs {
		start := time.Now()
		c, err := a.Dial(within(t, patience), transport.Target{Addr: addr}, transport.API)
		if err == nil {
			t.Errorf("%s: got %v", addr, c.Peer())
			continue
		}
		if _, e := netip.ParseAddrPort(addr); e == nil && !errors.Is(err, transport.ErrStranger) {
			t.Errorf("%s: got %v", addr, err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("%s: it took %v to refuse", addr, took)
		}
	}
	if reached.Load() != 0 {
		t.Errorf("%d connections reached the host", reached.Load())
	}
}

// hostAddrs are the host's own addresses, of all its interfaces.
func hostAddrs(t *testing.T) (list []string) {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if ip := a.(*net.IPNet).IP; !ip.IsLinkLocalUnicast() {
			list = append(list, ip.String())
		}
	}
	return list
}

// A node is dialled as soon as it is in the network map, and may have listened
// before it was up itself.
func TestListeningBeginsBeforeTheMachineIsUp(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a, cfg := node(t, newConfig(t, tailnet, key)), newConfig(t, tailnet, key)
	n := start(t, cfg)
	count := served(t, n)
	if _, err := n.Packets(); err != nil && !errors.Is(err, transport.ErrUnreachable) {
		t.Errorf("datagrams: %v", err)
	}
	b := transporttest.Node{ID: cfg.Gate.ID(), Network: up(t, n)}
	acquainted(t, a, b)
	if err := dialErr(a, b); err != nil {
		t.Error(err)
	}
	eventually(t, "it is accepted", func() bool { return count() == 1 })
}

func TestDroppingANodeEndsItsConnections(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a, b := node(t, newConfig(t, tailnet, key)), node(t, newConfig(t, tailnet, key))
	acquainted(t, a, b)
	l, err := b.Listen(transport.API)
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Dial(within(t, patience), transport.Target{ID: b.ID, Addr: b.Addr()}, transport.API)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := l.AcceptPeer(); err != nil {
		t.Fatal(err)
	}
	network(b).Drop(func(id boxed.NodeID) bool { return id == a.ID })
	c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}
