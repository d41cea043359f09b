package boxedtest

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
	"github.com/boxed-mesh/boxed/scheduler"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/memnet"
)

// Node is one node. What is embedded, and the exported parts but Driver, are of
// its present life.
type Node struct {
	*node.Node
	ID      boxed.NodeID
	Driver  *sandboxtest.Driver // its containers survive the node
	Manager *sandbox.Manager
	Keys    *node.Keys
	Cluster *node.Cluster
	Members *transport.Membership
	Vouch   *node.Assertions

	c        *Cluster
	number   int
	identity ed25519.PrivateKey
	records  *sandboxtest.Records
	db       *store.Store
	dir      string
	known    *known

	mu       sync.Mutex
	state    node.ClusterState
	settings node.Settings
	life     *life
}

// life is from a start to an end.
type life struct {
	network *memnet.Network
	server  *api.Server
	http    *http.Server
	peers   *node.Peers
	leave   context.CancelFunc // of the membership
	end     context.CancelFunc // of the rest
	gossip  sync.WaitGroup
	parts   sync.WaitGroup
}

func (n *Node) running() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.life != nil
}

// Load and Save keep what an operator sets.
func (n *Node) load() (node.Settings, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.settings, nil
}

type settingsStore struct{ n *Node }

func (s settingsStore) Load() (node.Settings, error) { return s.n.load() }

func (s settingsStore) Save(v node.Settings) error {
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	s.n.settings = v
	return nil
}

func (n *Node) start() {
	n.c.t.Helper()
	if err := n.begin(); err != nil {
		n.c.t.Fatalf("start node %d: %v", n.number, err)
	}
}

func (n *Node) begin() (err error) {
	l := &life{network: n.c.Hub.Join(n.ID)}
	log := n.c.log.With("of", n.number)
	n.mu.Lock()
	state := n.state
	n.mu.Unlock()
	n.Cluster, err = node.NewCluster(node.ClusterConfig{
		Store: n.db, Clock: n.db.Clock(), Identity: n.identity, State: state, Log: log,
		Save: func(s node.ClusterState) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.state = s
			return nil
		},
	})
	if err != nil {
		return err
	}
	n.Keys, err = node.NewKeys(node.KeysConfig{
		Documents: n.Cluster.Documents(), Signer: n.identity, Clock: n.db.Clock(), Logger: log,
		Trusted:  func(author ed25519.PublicKey) bool { return n.Cluster.Trusted(node.KeyKind, author) },
		MayWrite: n.Cluster.MayControl,
	})
	if err != nil {
		return err
	}
	if err := n.beginSandboxes(); err != nil {
		return err
	}
	if err := n.beginMesh(l); err != nil {
		return err
	}
	l.server, err = api.New(api.Config{Service: n.Node, Admin: n.Keys, Owner: n.Owner, Vouched: n.Vouch.Verify, Auth: n.Keys, Logger: log, Version: "test"})
	if err != nil {
		return err
	}
	l.http = l.server.PeerHTTPServer(n.ID, transport.PeerOf)
	ln, err := l.network.Listen(transport.API)
	if err != nil {
		return err
	}
	var ctx context.Context
	ctx, l.end = context.WithCancel(context.Background())
	for _, run := range []func(context.Context) error{n.Manager.Run, n.Keys.Run, n.Cluster.Run, n.Node.Run} {
		l.parts.Go(func() { run(ctx) })
	}
	l.parts.Go(func() { l.http.Serve(ln) })
	n.mu.Lock()
	n.life = l
	n.mu.Unlock()
	return nil
}

func (n *Node) beginSandboxes() (err error) {
	template := boxed.Template{Name: boxed.DefaultTemplate, Image: "base", Limits: Template()}
	cfg := node.Config{
		ID: n.ID, Name: fmt.Sprintf("n%d", n.number), Version: "test", Driver: n.Driver, Events: n.db,
		Templates: map[string]boxed.Template{template.Name: template}, Defaults: Template(),
		TTL: boxed.DefaultTTL, MaxTTL: boxed.DefaultMaxTTL, Policy: scheduler.Policy{MemoryOvercommit: 4, CPUOvercommit: 64},
		Load:     func() float64 { return 0 }, // all are on one machine
		Settings: settingsStore{n}, Log: n.c.log.With("of", n.number),
	}
	for _, change := range n.c.change {
		change(n.number, &cfg)
	}
	n.Manager, err = sandbox.New(sandbox.Config{
		Node: n.ID, Dir: n.dir, Agent: "/nonexistent", Driver: n.Driver, Records: n.records, Templates: cfg.Templates,
		Emit: func(e boxed.Event) { n.db.AppendEvent(e) }, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	cfg.Manager = n.Manager
	n.Node, err = node.New(cfg)
	return err
}

func (n *Node) beginMesh(l *life) (err error) {
	var seeds []string
	for _, other := range n.c.Nodes {
		if other.number < n.number && other.running() {
			seeds = append(seeds, other.life.network.Addr())
		}
	}
	n.Members, err = transport.NewMembership(transport.MembershipConfig{
		Network: l.network, Cluster: "test", Identity: n.identity, Keys: n.Cluster.GossipKeys, Known: n.known,
		Seeds:  func(context.Context) []string { return seeds },
		Denied: n.Cluster.Denied, Exchange: n.Cluster.Documents(), Heard: n.Heard, Log: n.c.log.With("of", n.number),
	}, boxed.NodeSummary{Name: fmt.Sprintf("n%d", n.number)})
	if err != nil {
		return err
	}
	n.Vouch = node.NewAssertions(n.identity, nil, n.c.log.With("of", n.number))
	l.peers = node.NewPeers(l.network, n.Members, n.Vouch)
	n.Cluster.SetLive(&node.Live{Members: n.Members, Forget: l.peers.Forget})
	n.SetMesh(l.peers)
	var ctx context.Context
	ctx, l.leave = context.WithCancel(context.Background())
	l.gossip.Go(func() { n.Members.Run(ctx) })
	return nil
}

// stop ends the present life, at once or with a goodbye.
func (n *Node) stop(kill bool) {
	n.mu.Lock()
	l := n.life
	n.life = nil
	n.mu.Unlock()
	if l == nil {
		return
	}
	if kill {
		l.network.Close()
	} else {
		n.Drain()
		limit, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		l.server.Shutdown(limit)
		cancel()
	}
	l.leave()
	l.gossip.Wait()
	l.http.Close()
	l.end()
	short, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	l.server.Shutdown(short)
	cancel()
	l.parts.Wait()
	l.peers.Close()
	l.network.Close()
}

// Serve serves the node's API to clients on a listener until the test ends.
func (n *Node) Serve(ln net.Listener) {
	n.c.t.Helper()
	server := n.life.server.HTTPServer()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			n.c.t.Error(err)
		}
	}()
	n.c.t.Cleanup(func() { server.Close(); <-done })
}
