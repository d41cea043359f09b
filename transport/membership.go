package transport

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/boxed-mesh/boxed"
)

// Pace says how fast gossip goes.
type Pace string

// The paces. On a LAN a node that was killed is known to be within three
// seconds; over a WAN a link may stall for some without a node being called silent.
const (
	PaceLAN Pace = "lan"
	PaceWAN Pace = "wan"
)

// Times of membership.
const (
	rejoinEvery  = 2 * time.Second // nodes that are not there are tried again
	rejoinAtOnce = 4               // so many of them, in turn
	publishRest  = 200 * time.Millisecond
	publishLimit = time.Second
	leaveLimit   = 2 * time.Second
	dialGossip   = 3 * time.Second
)

// KnownNodes keeps the nodes that were ever seen, over restarts.
type KnownNodes interface {
	All() ([]boxed.NodeSummary, error)
	Put(boxed.NodeSummary) error
	Delete(boxed.NodeID) error
}

// Exchange is what nodes give each other beside gossip: Documents is one.
type Exchange interface {
	// State is what the node sends when two nodes compare all they know.
	State() []byte
	// Compare takes in what the other's State was.
	Compare(state []byte)
	// Message takes in what another node's Send sent. None of the four may block
	// for long, and what they are given is theirs to keep.
	Message(from boxed.NodeID, msg []byte)
	// Greet hears of a node that has come.
	Greet(id boxed.NodeID)
}

// MembershipConfig is what a Membership needs. Network, Cluster, Identity and Keys
// are required.
type MembershipConfig struct {
	Network  Network
	Cluster  string // tells clusters apart that can reach each other
	Identity ed25519.PrivateKey
	// Keys are the cluster keys in force; what is sent is encrypted for the first.
	Keys  func() []ClusterKey
	Seeds func(context.Context) []string // host:port of nodes to find the others by
	Known KnownNodes                     // nil: none are remembered
	Pace  Pace                           // "": PaceLAN
	// Denied reports whether a node was removed. Nil: none was.
	Denied   func(boxed.NodeID) bool
	Exchange Exchange // nil: none
	// Heard takes what another node's Broadcast sent, and returns the name under which
	// it is passed on, "" if it was no news. It must not block. Nil: nothing.
	Heard func(msg []byte) (name string)
	// Changed is called when a node has come, fallen silent or stopped. It must
	// not block. Nil: not.
	Changed func(boxed.NodeSummary)
	Log     *slog.Logger
	Now     func() time.Time
}

// Membership is who is in the mesh, as this node sees it. Run keeps it up; the
// other methods are safe for concurrent use.
type Membership struct {
	cfg       MembershipConfig
	id        boxed.NodeID
	log       *slog.Logger
	list      *memberlist.Memberlist
	wire      *gossipWire
	messages  *messages
	ring      *memberlist.Keyring
	queue     *memberlist.TransmitLimitedQueue
	dirty     chan struct{} // capacity 1: the summary has changed
	joined    chan struct{} // capacity 1: try now
	summaries knownSummaries

	mu     sync.Mutex
	own    boxed.NodeSummary
	meta   []byte
	nodes  map[boxed.NodeID]*member
	faults map[string]boxed.MeshFault
}

type member struct {
	boxed.NodeSummary
	saved boxed.NodeState // as it is remembered
}

// NewMembership begins to take part: it answers, but knows nobody until Run.
// own is the node's first summary.
func NewMembership(cfg MembershipConfig, own boxed.NodeSummary) (*Membership, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Denied == nil {
		cfg.Denied = func(boxed.NodeID) bool { return false }
	}
	if cfg.Changed == nil {
		cfg.Changed = func(boxed.NodeSummary) {}
	}
	if cfg.Seeds == nil {
		cfg.Seeds = func(context.Context) []string { return nil }
	}
	m := &Membership{
		cfg: cfg, id: boxed.NodeIDOf(cfg.Identity.Public().(ed25519.PublicKey)), log: cfg.Log,
		dirty: make(chan struct{}, 1), joined: make(chan struct{}, 1),
		nodes: map[boxed.NodeID]*member{}, faults: map[string]boxed.MeshFault{},
	}
	m.queue = &memberlist.TransmitLimitedQueue{NumNodes: m.count, RetransmitMult: 3}
	if err := m.recall(); err != nil {
		return nil, err
	}
	if err := m.set(own); err != nil {
		return nil, err
	}
	keys := cfg.Keys()
	if len(keys) == 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "there is no cluster key")
	}
	var secrets [][]byte
	for _, k := range keys {
		secrets = append(secrets, k.derive("gossip"))
	}
	var err error
	if m.ring, err = memberlist.NewKeyring(secrets, secrets[0]); err != nil {
		return nil, err
	}
	if m.wire, err = newGossipWire(cfg.Network, m.log, m.proved); err != nil {
		return nil, err
	}
	take := func(from boxed.NodeID, msg []byte) {
		m.proved(from)
		if cfg.Exchange != nil && len(msg) > 0 {
			cfg.Exchange.Message(from, msg)
		}
	}
	if m.messages, err = listenMessages(cfg.Network, take, m.log); err != nil {
		return nil, errors.Join(err, m.wire.Shutdown())
	}
	if m.list, err = memberlist.Create(m.memberlistConfig()); err != nil {
		m.messages.close()
		return nil, errors.Join(fmt.Errorf("begin to gossip: %w", err), m.wire.Shutdown())
	}
	return m, nil
}

// memberlistConfig has our own settings. On a LAN: a node that is gone is asked
// after within (nodes-1)/2 × 300 ms on average, found missing 150 ms later, and
// suspected for 0.9 s, or for 1.8 s where no other node agrees, before it is called
// silent. A node that has no time
// to answer is asked by others and by TCP as well, and its own judgement counts
// less the later it is itself (the awareness multiplier).
func (m *Membership) memberlistConfig() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	if m.cfg.Pace == PaceWAN {
		c = memberlist.DefaultWANConfig()
	} else {
		c.ProbeInterval, c.ProbeTimeout = 300*time.Millisecond, 150*time.Millisecond
		c.GossipInterval, c.SuspicionMult, c.SuspicionMaxTimeoutMult = 50*time.Millisecond, 3, 2
		c.PushPullInterval, c.GossipToTheDeadTime = 10*time.Second, 10*time.Second
	}
	c.Name, c.Label, c.Keyring = string(m.id), "boxed "+m.cfg.Cluster, m.ring
	c.Transport, c.UDPBufferSize, c.TCPTimeout = m.wire, MaxPacket, 10*time.Second
	c.EnableCompression = false   // keys and signatures do not get smaller, and LZW takes more time than all else
	c.DNSConfigPath = "/dev/null" // addresses only; nothing is resolved
	c.DeadNodeReclaimTime = time.Millisecond
	d := &gossip{m}
	c.Delegate, c.Events, c.Alive, c.Ping, c.Conflict, c.Merge = d, d, d, d, d, d
	c.LogOutput, c.Logger = nil, gossipLog(m.log)
	return c
}

// recall takes the nodes that were seen in earlier lives for silent.
func (m *Membership) recall() error {
	if m.cfg.Known == nil {
		return nil
	}
	all, err := m.cfg.Known.All()
	if err != nil {
		return fmt.Errorf("read the nodes that were seen before: %w", err)
	}
	for _, s := range all {
		if s.ID == m.id || m.cfg.Denied(s.ID) {
			continue
		}
		saved := s.State
		if s.State == boxed.NodeAlive {
			s.State, s.Since = boxed.NodeSilent, m.cfg.Now()
		}
		m.nodes[s.ID] = &member{NodeSummary: s, saved: saved}
	}
	return nil
}

// Run finds the other nodes, and finds them again when they were away, until ctx
// ends. Then it says goodbye, and returns when all of it has ended.
func (m *Membership) Run(ctx context.Context) error {
	defer m.close()
	defer context.AfterFunc(ctx, m.wire.noDials)() // a rejoin under way would hold it up
	publish, stop := context.WithCancel(ctx)
	var parts sync.WaitGroup
	parts.Go(func() { m.publish(publish) })
	defer parts.Wait()
	defer stop()
	for {
		m.rejoin(ctx)
		m.reconcile()
		wait := time.NewTimer(rejoinEvery/2 + rand.N(rejoinEvery/2))
		select {
		case <-ctx.Done():
			wait.Stop()
			return nil
		case <-wait.C:
		case <-m.joined:
			wait.Stop()
		}
	}
}

func (m *Membership) close() {
	m.mu.Lock()
	own := m.own
	m.mu.Unlock()
	own.Draining, own.Ready = true, false
	if err := m.set(own); err == nil && m.list.NumMembers() > 1 {
		// The last summary says why it leaves; others hold its sandboxes for stopped, not lost.
		_ = m.list.UpdateNode(publishLimit)
	}
	if err := m.list.Leave(leaveLimit); err != nil {
		m.log.Debug("say goodbye to the mesh", "err", err)
	}
	if err := m.list.Shutdown(); err != nil {
		m.log.Warn("stop gossiping", "err", err)
	}
	m.messages.close()
}

// rejoin dials nodes that are not there: the seeds, and every node ever seen.
// That is what mends a mesh after a partition in which each side has given up on
// the other.
func (m *Membership) rejoin(ctx context.Context) {
	alive := map[string]bool{m.cfg.Network.Addr(): true}
	var away []Target
	m.mu.Lock()
	for _, n := range m.nodes {
		if n.State == boxed.NodeAlive {
			alive[n.Address] = true
		} else if !m.cfg.Denied(n.ID) && n.Address != "" {
			away = append(away, Target{ID: n.ID, Addr: n.Address})
		}
	}
	m.mu.Unlock()
	known := map[string]bool{}
	for _, t := range away {
		known[t.Addr] = true
	}
	for _, seed := range m.cfg.Seeds(ctx) {
		if !alive[seed] && !known[seed] {
			away, known[seed] = append(away, Target{Addr: seed}), true
		}
	}
	rand.Shuffle(len(away), func(i, j int) { away[i], away[j] = away[j], away[i] })
	var tries sync.WaitGroup
	for _, t := range away[:min(len(away), rejoinAtOnce)] {
		tries.Go(func() { m.join(t) })
	}
	tries.Wait()
}

func (m *Membership) join(t Target) {
	addr := t.Addr
	if t.ID != "" {
		addr = string(t.ID) + "/" + t.Addr
	}
	if _, err := m.list.Join([]string{addr}); err != nil {
		m.Fault(peerName(t), errors.New(plainJoin(err, t.Addr)))
		return
	}
	m.clearFault(peerName(t))
}

func peerName(t Target) string {
	if t.ID != "" {
		return string(t.ID)
	}
	return t.Addr
}

// Rejoin tries at once what is tried every two seconds anyway.
func (m *Membership) Rejoin() { kick(m.joined) }

func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Publish replaces what this node tells of itself. It is on its way within 200 ms,
// and more often than that it is not sent.
func (m *Membership) Publish(s boxed.NodeSummary) error {
	if err := m.set(s); err != nil {
		return err
	}
	kick(m.dirty)
	return nil
}

func (m *Membership) set(s boxed.NodeSummary) error {
	s.ID, s.Address, s.State, s.At = m.id, m.cfg.Network.Addr(), boxed.NodeAlive, m.cfg.Now()
	s.Key = m.cfg.Identity.Public().(ed25519.PublicKey)
	meta, err := encodeSummary(s, m.cfg.Identity)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.own.Since.IsZero() {
		s.Since = m.cfg.Now()
	} else {
		s.Since = m.own.Since
	}
	m.own, m.meta = s, meta
	return nil
}

func (m *Membership) publish(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.dirty:
		}
		if err := m.list.UpdateNode(publishLimit); err != nil {
			m.log.Debug("tell the mesh of this node", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(publishRest):
		}
	}
}

// Nodes are this node, first, and the others that are in the mesh or were, in the
// order of their IDs.
func (m *Membership) Nodes() []boxed.NodeSummary {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := append(make([]boxed.NodeSummary, 0, len(m.nodes)+1), m.own)
	for id, n := range m.nodes {
		if !m.cfg.Denied(id) {
			list = append(list, n.NodeSummary)
		}
	}
	slices.SortFunc(list[1:], func(a, b boxed.NodeSummary) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return list
}

// Node is what is known of one node.
func (m *Membership) Node(id boxed.NodeID) (boxed.NodeSummary, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id == m.id {
		return m.own, true
	}
	n := m.nodes[id]
	if n == nil || m.cfg.Denied(id) {
		return boxed.NodeSummary{}, false
	}
	return n.NodeSummary, true
}

// Forget drops what is known of a node that was removed.
func (m *Membership) Forget(id boxed.NodeID) error {
	m.mu.Lock()
	delete(m.nodes, id)
	m.mu.Unlock()
	if m.cfg.Known == nil {
		return nil
	}
	return m.cfg.Known.Delete(id)
}

// UseKeys takes the cluster keys in force into use, the first for sending.
func (m *Membership) UseKeys() error {
	keys := m.cfg.Keys()
	if len(keys) == 0 {
		return boxed.Errorf(boxed.CodeInvalid, "there is no cluster key")
	}
	wanted := map[string]bool{}
	for _, k := range keys {
		secret := k.derive("gossip")
		wanted[string(secret)] = true
		if err := m.ring.AddKey(secret); err != nil {
			return err
		}
	}
	if err := m.ring.UseKey(keys[0].derive("gossip")); err != nil {
		return err
	}
	for _, secret := range m.ring.GetKeys() {
		if !wanted[string(secret)] {
			if err := m.ring.RemoveKey(secret); err != nil {
				return err
			}
		}
	}
	return nil
}
