package tcpnet_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tcpnet"
	"github.com/boxed-mesh/boxed/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNetwork(t *testing.T) {
	for name, listen := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6": "[::1]:0"} {
		t.Run(name, func(t *testing.T) {
			transporttest.Run(t, func(t *testing.T, count int) (nodes []transporttest.Node) {
				key := transport.NewClusterKey()
				for range count {
					nodes = append(nodes, newNode(t, nodeConfig{keys: []transport.ClusterKey{key}, listen: listen}).Node)
				}
				return nodes
			})
		})
	}
}

// node is a Network, and the key that it was given.
type node struct {
	transporttest.Node
	rekeyed *atomic.Pointer[[]byte]
}

type nodeConfig struct {
	retired  []transport.ClusterKey
	keys     []transport.ClusterKey
	listen   string
	identity ed25519.PrivateKey
	denied   func(boxed.NodeID) bool
}

func newNode(t *testing.T, c nodeConfig) node {
	t.Helper()
	if c.identity == nil {
		_, c.identity, _ = ed25519.GenerateKey(rand.Reader)
	}
	if c.listen == "" {
		c.listen = "127.0.0.1:0"
	}
	rekeyed := &atomic.Pointer[[]byte]{}
	gate, err := transport.NewGate(transport.GateConfig{
		Identity: c.identity, Keys: func() []transport.ClusterKey { return c.keys }, Denied: c.denied,
		Retired:  func(boxed.NodeID) []transport.ClusterKey { return c.retired },
		Handover: func() []byte { return []byte("the new one, sealed") },
		Rekeyed:  func(h []byte) { rekeyed.Store(&h) },
	})
	if err != nil {
		t.Fatal(err)
	}
	n, err := tcpnet.New(t.Context(), tcpnet.Config{Gate: gate, Listen: c.listen})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return node{transporttest.Node{ID: gate.ID(), Network: n}, rekeyed}
}

// served accepts and drops connections, and returns how many came through.
func served(t *testing.T, n node) (count func() int) {
	t.Helper()
	l, err := n.Listen(transport.API)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan struct{}, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptPeer()
			if err != nil {
				return
			}
			c.Close()
			got <- struct{}{}
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return func() int { return len(got) }
}

func dialErr(n, to node) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := n.Dial(ctx, transport.Target{ID: to.ID, Addr: to.Addr()}, transport.API)
	if err == nil {
		c.Close()
	}
	return err
}

func TestTheClusterKeyAdmits(t *testing.T) {
	oldKey, newKey, other := transport.NewClusterKey(), transport.NewClusterKey(), transport.NewClusterKey()
	keys := func(ks ...transport.ClusterKey) []transport.ClusterKey { return ks }
	for name, tc := range map[string]struct {
		dials, accepts  []transport.ClusterKey
		dialsRetired    []transport.ClusterKey
		acceptsRetired  []transport.ClusterKey
		in, givenTheNew bool
	}{
		"the same":                             {dials: keys(newKey), accepts: keys(newKey), in: true},
		"another cluster's":                    {dials: keys(other), accepts: keys(newKey, oldKey)},
		"none":                                 {accepts: keys(newKey)},
		"replaced":                             {dials: keys(oldKey), accepts: keys(newKey, oldKey)},
		"replaced while a known one was away":  {dials: keys(oldKey), accepts: keys(newKey), acceptsRetired: keys(oldKey), in: true, givenTheNew: true},
		"replaced, to one that has it not yet": {dials: keys(newKey, oldKey), dialsRetired: keys(oldKey), accepts: keys(oldKey), in: true},
		"replaced, to a stranger with the old": {dials: keys(newKey, oldKey), accepts: keys(oldKey)},
	} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t, nodeConfig{keys: tc.dials, retired: tc.dialsRetired})
			b := newNode(t, nodeConfig{keys: tc.accepts, retired: tc.acceptsRetired})
			count := served(t, b)
			err := dialErr(a, b)
			if tc.in != (err == nil) {
				t.Fatalf("got %v", err)
			}
			if !tc.in && (!errors.Is(err, transport.ErrStranger) || count() != 0 && tc.accepts[0] == newKey) {
				t.Errorf("got %v, and %d accepted", err, count())
			}
			if name == "another cluster's" && !strings.Contains(err.Error(), "boxedctl cluster token") {
				t.Errorf("%q does not say what to do", err)
			}
			if got := a.rekeyed.Load(); tc.givenTheNew != (got != nil && string(*got) == "the new one, sealed") {
				t.Errorf("it was given %v", got)
			}
		})
	}
}

// Case I9: the cluster key alone cannot pose as a node that is there.
func TestTheClusterKeyDoesNotMakeAnotherNode(t *testing.T) {
	key := []transport.ClusterKey{transport.NewClusterKey()}
	victim, thief, client := newNode(t, nodeConfig{keys: key}), newNode(t, nodeConfig{keys: key}), newNode(t, nodeConfig{keys: key})
	count := served(t, thief)
	posing := node{Node: transporttest.Node{ID: victim.ID, Network: thief}}
	if err := dialErr(client, posing); !errors.Is(err, transport.ErrStranger) || !strings.Contains(err.Error(), string(thief.ID)) {
		t.Errorf("got %v", err)
	}
	if count() != 0 {
		t.Error("the thief was talked to")
	}
}

// Case I9: a removed node is out, in both directions, though it has the key.
func TestARemovedNodeIsRefused(t *testing.T) {
	key := []transport.ClusterKey{transport.NewClusterKey()}
	removed := newNode(t, nodeConfig{keys: key})
	denied := func(id boxed.NodeID) bool { return id == removed.ID }
	n := newNode(t, nodeConfig{keys: key, denied: denied})
	count := served(t, n)
	served(t, removed)
	if err := dialErr(removed, n); !errors.Is(err, transport.ErrStranger) || !strings.Contains(err.Error(), "removed") {
		t.Errorf("dialling in: %v", err)
	}
	if err := dialErr(n, removed); !errors.Is(err, transport.ErrStranger) || !strings.Contains(err.Error(), "removed") {
		t.Errorf("dialling out: %v", err)
	}
	if count() != 0 {
		t.Error("it was let in")
	}
}

func TestTwoDaemonsWithOneKeyAreTold(t *testing.T) {
	key := []transport.ClusterKey{transport.NewClusterKey()}
	_, identity, _ := ed25519.GenerateKey(rand.Reader)
	a, b := newNode(t, nodeConfig{keys: key, identity: identity}), newNode(t, nodeConfig{keys: key, identity: identity})
	served(t, b)
	if err := dialErr(a, b); !errors.Is(err, transport.ErrStranger) || !strings.Contains(err.Error(), "copy of its key") {
		t.Errorf("got %v", err)
	}
}

// What is connected by whoever can reach the port is bounded, in number and in
// time, and does not keep nodes out.
func TestStrangersDoNotKeepNodesOut(t *testing.T) {
	key := []transport.ClusterKey{transport.NewClusterKey()}
	a, b := newNode(t, nodeConfig{keys: key}), newNode(t, nodeConfig{keys: key})
	served(t, b)
	for i := range 40 {
		c, err := net.Dial("tcp", b.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		switch i % 4 {
		case 1:
			io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
		case 2:
			c.Write(make([]byte, 1<<10))
		case 3: // TLS, and then nothing: no proof
			tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"boxed-api/1"}})
			go tc.Handshake()
		}
	}
	if err := dialErr(a, b); err != nil {
		t.Error(err)
	}
}

func TestDroppingANodeEndsItsConnections(t *testing.T) {
	key := []transport.ClusterKey{transport.NewClusterKey()}
	a, b := newNode(t, nodeConfig{keys: key}), newNode(t, nodeConfig{keys: key})
	l, err := b.Listen(transport.API)
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Dial(t.Context(), transport.Target{ID: b.ID, Addr: b.Addr()}, transport.API)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := l.AcceptPeer(); err != nil {
		t.Fatal(err)
	}
	b.Node.Network.(*tcpnet.Network).Drop(func(id boxed.NodeID) bool { return id == a.ID })
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}
