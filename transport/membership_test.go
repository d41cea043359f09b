package transport_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/memnet"
	"github.com/boxed-mesh/boxed/transport/tcpnet"
)

// A probe of memberlist's that is under way when it is shut down ends with its own
// deadline, two seconds later at most.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

// peer is one node that takes part in gossip.
type peer struct {
	*transport.Membership
	id       boxed.NodeID
	identity ed25519.PrivateKey
	net      transport.Network
	known    *knownNodes
	stop     func()
}

// knownNodes remembers in memory.
type knownNodes struct {
	mu    sync.Mutex
	nodes map[boxed.NodeID]boxed.NodeSummary
}

func (k *knownNodes) All() (all []boxed.NodeSummary, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.nodes {
		all = append(all, s)
	}
	return all, nil
}

func (k *knownNodes) Put(s boxed.NodeSummary) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.nodes == nil {
		k.nodes = map[boxed.NodeID]boxed.NodeSummary{}
	}
	k.nodes[s.ID] = s
	return nil
}

func (k *knownNodes) Delete(id boxed.NodeID) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.nodes, id)
	return nil
}

func newIdentity() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
}

func idOf(key ed25519.PrivateKey) boxed.NodeID {
	return boxed.NodeIDOf(key.Public().(ed25519.PublicKey))
}

// mesh makes nodes on one hub, each with the address of the first as its seed.
type mesh struct {
	t     *testing.T
	hub   *memnet.Hub
	key   transport.ClusterKey
	seeds []string
}

func newMesh(t *testing.T) *mesh {
	return &mesh{t: t, hub: memnet.NewHub(), key: transport.NewClusterKey()}
}

func (m *mesh) start(identity ed25519.PrivateKey, known *knownNodes, change ...func(*transport.MembershipConfig)) *peer {
	m.t.Helper()
	n := m.hub.Join(idOf(identity))
	return m.startOn(n, identity, known, change...)
}

func (m *mesh) startOn(n transport.Network, identity ed25519.PrivateKey, known *knownNodes, change ...func(*transport.MembershipConfig)) *peer {
	m.t.Helper()
	seeds := slices.Clone(m.seeds)
	if len(m.seeds) == 0 {
		m.seeds = []string{n.Addr()}
	}
	cfg := transport.MembershipConfig{
		Network: n, Cluster: "test", Identity: identity, Keys: func() []transport.ClusterKey { return []transport.ClusterKey{m.key} },
		Seeds: func(context.Context) []string { return seeds },
	}
	if known != nil {
		cfg.Known = known
	}
	if os.Getenv("BOXED_TEST_LOG") != "" {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for _, c := range change {
		c(&cfg)
	}
	p := &peer{id: idOf(identity), identity: identity, net: n, known: known}
	var err error
	if p.Membership, err = transport.NewMembership(cfg, boxed.NodeSummary{Name: "n-" + string(p.id[:4]), Ready: true}); err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); p.Run(ctx) }()
	p.stop = sync.OnceFunc(func() { cancel(); <-done; n.Close() })
	m.t.Cleanup(p.stop)
	return p
}

// kill ends a node as kill -9 does: its network is gone before it can say so.
func (p *peer) kill() {
	p.net.Close()
	p.stop()
}

func (p *peer) states() map[boxed.NodeID]boxed.NodeState {
	states := map[boxed.NodeID]boxed.NodeState{}
	for _, s := range p.Nodes() {
		states[s.ID] = s.State
	}
	return states
}

func eventually(t *testing.T, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			t.Fatalf("%s: not within %v", what, within)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(start)
}

func allSee(state boxed.NodeState, seen []*peer, by []*peer) func() bool {
	return func() bool {
		for _, b := range by {
			states := b.states()
			for _, s := range seen {
				if states[s.id] != state {
					return false
				}
			}
		}
		return true
	}
}

func TestNodesFindEachOther(t *testing.T) {
	m := newMesh(t)
	var peers []*peer
	for range 5 {
		peers = append(peers, m.start(newIdentity(), nil))
	}
	took := eventually(t, 20*time.Second, "all see all", allSee(boxed.NodeAlive, peers, peers))
	t.Logf("after %v", took)
	nodes := peers[2].Nodes()
	if len(nodes) != 5 || nodes[0].ID != peers[2].id {
		t.Errorf("it lists %v", nodes)
	}
}

func TestAKilledNodeIsSilentAndAStoppedOneStopped(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.start(newIdentity(), nil), m.start(newIdentity(), nil), m.start(newIdentity(), nil)
	all := []*peer{a, b, c}
	eventually(t, 20*time.Second, "all see all", allSee(boxed.NodeAlive, all, all))
	c.stop()
	eventually(t, 20*time.Second, "c is stopped", allSee(boxed.NodeStopped, []*peer{c}, []*peer{a, b}))
	b.kill()
	took := eventually(t, 20*time.Second, "b is silent", allSee(boxed.NodeSilent, []*peer{b}, []*peer{a}))
	t.Logf("silent after %v", took)
}

// Case M1, hashicorp/memberlist#222, metallb/metallb#589: after a partition nobody
// rejoined, once each side had given up on the other.
func TestAHealedPartitionRejoins(t *testing.T) {
	for name, count := range map[string]int{"one and one": 2, "two and one": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMesh(t)
			var peers []*peer
			var ids []boxed.NodeID
			for range count {
				p := m.start(newIdentity(), nil)
				peers, ids = append(peers, p), append(ids, p.id)
			}
			eventually(t, 20*time.Second, "all see all", allSee(boxed.NodeAlive, peers, peers))
			m.hub.Partition(ids[:count-1], ids[count-1:])
			eventually(t, 30*time.Second, "each side gives up on the other", func() bool {
				return allSee(boxed.NodeSilent, peers[count-1:], peers[:count-1])() && allSee(boxed.NodeSilent, peers[:count-1], peers[count-1:])()
			})
			time.Sleep(11 * time.Second) // beyond the time for which memberlist gossips to the dead
			m.hub.Heal()
			took := eventually(t, 30*time.Second, "all see all again", allSee(boxed.NodeAlive, peers, peers))
			t.Logf("after %v", took)
		})
	}
}

// A node that comes back at another address, with all others restarted
// meanwhile, finds them by what it remembers; the seed is gone.
func TestRememberedNodesAreFoundWithoutTheSeed(t *testing.T) {
	m := newMesh(t)
	seed := m.start(newIdentity(), &knownNodes{})
	a, b := m.start(newIdentity(), &knownNodes{}), m.start(newIdentity(), &knownNodes{})
	all := []*peer{seed, a, b}
	eventually(t, 20*time.Second, "all see all", allSee(boxed.NodeAlive, all, all))
	eventually(t, 20*time.Second, "all are remembered", func() bool {
		known, _ := a.known.All()
		return len(known) == 2
	})
	seed.kill()
	a.kill()
	a2 := m.start(a.identity, a.known)
	eventually(t, 30*time.Second, "a and b see each other", allSee(boxed.NodeAlive, []*peer{a2, b}, []*peer{a2, b}))
	eventually(t, 20*time.Second, "the seed is silent", allSee(boxed.NodeSilent, []*peer{seed}, []*peer{a2, b}))
}

func TestASummaryReachesAllNodes(t *testing.T) {
	m := newMesh(t)
	a, b := m.start(newIdentity(), nil), m.start(newIdentity(), nil)
	eventually(t, 20*time.Second, "they meet", allSee(boxed.NodeAlive, []*peer{a, b}, []*peer{a, b}))
	labels, runtimes, warm := map[string]string{}, []string{}, map[string]int{}
	for i := range boxed.MaxNodeLabels {
		labels[fmt.Sprintf("k%d", i)] = "value"
	}
	for i := range 10 {
		runtimes = append(runtimes, fmt.Sprintf("runtime-%d", i))
		warm[fmt.Sprintf("template-of-a-long-name-%d", i)] = 4
	}
	want := boxed.NodeSummary{
		Name: "büro", Ready: true, Cordoned: true, Place: boxed.PlaceOwn, Labels: labels, Runtimes: runtimes, Default: "runtime-3", Warm: warm,
		Arch: "amd64", Version: "v1.2.3", Problem: strings.Repeat("the disk is full; ", 40),
		Total: boxed.Capacity{MemoryBytes: 64 << 30, CPUs: 16}, Capacity: boxed.Capacity{MemoryBytes: 57 << 30, CPUs: 57.6, Sandboxes: 200},
		Used: boxed.Capacity{MemoryBytes: 3<<30 + 1, CPUs: 2.5, Sandboxes: 5}, Load: 0.75,
	}
	if err := b.Publish(want); err != nil {
		t.Fatal(err)
	}
	var got boxed.NodeSummary
	eventually(t, 20*time.Second, "the summary arrives", func() bool {
		got, _ = a.Node(b.id)
		return got.Name == "büro"
	})
	if got.Default != "runtime-3" || got.Place != boxed.PlaceOwn || !got.Cordoned || got.Capacity != want.Capacity || got.Load != 0.75 {
		t.Errorf("got %+v", got)
	}
	if got.Used.MemoryBytes != 3<<30+boxed.MiB {
		t.Errorf("what is promised is rounded up: %d", got.Used.MemoryBytes)
	}
	eventually(t, 20*time.Second, "the round trip is measured", func() bool { n, _ := a.Node(b.id); return n.RTT > 0 })
}

// Case I9: whoever has the cluster key and not a node's own key cannot move that
// node to itself, nor speak for it.
func TestTheClusterKeyCannotMoveANode(t *testing.T) {
	m := newMesh(t)
	a, victim := m.start(newIdentity(), nil), m.start(newIdentity(), nil)
	eventually(t, 20*time.Second, "they meet", allSee(boxed.NodeAlive, []*peer{a, victim}, []*peer{a, victim}))
	where := victim.net.Addr()
	// The thief joins the hub under the victim's name, which the in-memory network
	// believes, and signs with its own key.
	thief := newIdentity()
	n := m.hub.Join(victim.id)
	forged := transport.ForgeMembership(t, transport.MembershipConfig{
		Network: n, Cluster: "test", Identity: thief, Keys: func() []transport.ClusterKey { return []transport.ClusterKey{m.key} },
	}, victim.id)
	defer n.Close()
	defer forged.Close()
	forged.Join(a.net.Addr())
	for range 20 {
		time.Sleep(50 * time.Millisecond)
		if got, _ := a.Node(victim.id); got.Address != where || got.Name != "n-"+string(victim.id[:4]) {
			t.Fatalf("the node is now %+v", got)
		}
	}
}

func TestARemovedNodeIsNotSeen(t *testing.T) {
	m := newMesh(t)
	removed := newIdentity()
	var denied sync.Map
	deny := func(c *transport.MembershipConfig) {
		c.Denied = func(id boxed.NodeID) bool { _, is := denied.Load(id); return is }
	}
	a, b := m.start(newIdentity(), nil, deny), m.start(removed, nil)
	eventually(t, 20*time.Second, "they meet", allSee(boxed.NodeAlive, []*peer{a, b}, []*peer{a, b}))
	denied.Store(b.id, true)
	if _, there := a.Node(b.id); there || len(a.Nodes()) != 1 {
		t.Errorf("it is still listed: %v", a.Nodes())
	}
}

// tcpMesh starts a node on TCP and UDP of the loopback.
func (m *mesh) startTCP(keys []transport.ClusterKey, identity ed25519.PrivateKey) *peer {
	m.t.Helper()
	gate, err := transport.NewGate(transport.GateConfig{Identity: identity, Keys: func() []transport.ClusterKey { return keys }})
	if err != nil {
		m.t.Fatal(err)
	}
	n, err := tcpnet.New(m.t.Context(), tcpnet.Config{Gate: gate, Listen: "127.0.0.1:0"})
	if err != nil {
		m.t.Fatal(err)
	}
	return m.startOn(n, identity, nil, func(c *transport.MembershipConfig) { c.Keys = func() []transport.ClusterKey { return keys } })
}

func TestOverTCPAWrongKeyIsAFaultWithAnAnswer(t *testing.T) {
	m := newMesh(t)
	right, wrong := []transport.ClusterKey{m.key}, []transport.ClusterKey{transport.NewClusterKey()}
	a, b := m.startTCP(right, newIdentity()), m.startTCP(right, newIdentity())
	eventually(t, 20*time.Second, "they meet", allSee(boxed.NodeAlive, []*peer{a, b}, []*peer{a, b}))
	stranger := m.startTCP(wrong, newIdentity())
	eventually(t, 20*time.Second, "it is told", func() bool {
		f := stranger.Faults()
		return len(f) == 1 && strings.Contains(f[0].Message, "boxedctl cluster token")
	})
	if len(a.Nodes()) != 2 || len(stranger.Nodes()) != 1 {
		t.Errorf("%d and %d nodes", len(a.Nodes()), len(stranger.Nodes()))
	}
}

func TestTheClusterKeyIsReplacedUnderway(t *testing.T) {
	m := newMesh(t)
	oldKey, newKey := m.key, transport.NewClusterKey()
	var mu sync.Mutex
	keys := []transport.ClusterKey{oldKey}
	use := func(c *transport.MembershipConfig) {
		c.Keys = func() []transport.ClusterKey { mu.Lock(); defer mu.Unlock(); return slices.Clone(keys) }
	}
	a, b := m.start(newIdentity(), nil, use), m.start(newIdentity(), nil, use)
	all := []*peer{a, b}
	eventually(t, 20*time.Second, "they meet", allSee(boxed.NodeAlive, all, all))
	for _, now := range [][]transport.ClusterKey{{oldKey, newKey}, {newKey, oldKey}, {newKey}} {
		mu.Lock()
		keys = now
		mu.Unlock()
		for _, p := range all {
			if err := p.UseKeys(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(300 * time.Millisecond)
	}
	if err := a.Publish(boxed.NodeSummary{Name: "renamed"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "they still gossip", func() bool { n, _ := b.Node(a.id); return n.Name == "renamed" })
	if !allSee(boxed.NodeAlive, all, all)() {
		t.Errorf("%v, %v", a.states(), b.states())
	}
}
