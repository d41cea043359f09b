package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/boxed-mesh/boxed"
)

// gossip is what memberlist asks and tells. Its calls come with memberlist's
// locks held, so they neither block nor call back.
type gossip struct{ *Membership }

// NodeMeta is the node's own signed summary.
func (g *gossip) NodeMeta(int) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.meta
}

// NotifyAlive judges what is said of a node before it counts: the summary must be
// signed by the key that the name is of, and say the same address. So a stranger
// with the cluster key cannot move a node that is there to itself.
func (g *gossip) NotifyAlive(n *memberlist.Node) error {
	if n.Name == string(g.id) {
		return nil
	}
	s, err := g.summaries.read(n.Name, n.Meta)
	switch {
	case err != nil:
		g.Fault(plainName(n.Name), err)
		return err
	case string(s.ID) != n.Name:
		return fmt.Errorf("the summary is node %s's", s.ID)
	case s.Address != n.Address():
		return fmt.Errorf("it is said to be at %s, and says %s itself", n.Address(), s.Address)
	case g.cfg.Denied(s.ID):
		return errors.New("it was removed from the cluster")
	}
	return nil
}

// NotifyMerge judges a whole list of nodes; each is judged by NotifyAlive.
func (g *gossip) NotifyMerge([]*memberlist.Node) error { return nil }

func (g *gossip) NotifyJoin(n *memberlist.Node) { g.heard(n, true) }

func (g *gossip) NotifyUpdate(n *memberlist.Node) { g.heard(n, false) }

func (g *gossip) heard(n *memberlist.Node, joined bool) {
	if n.Name == string(g.id) {
		return
	}
	s, err := g.summaries.read(n.Name, n.Meta)
	if err != nil {
		return // NotifyAlive has said so
	}
	now := g.cfg.Now()
	g.mu.Lock()
	old := g.nodes[s.ID]
	if old == nil && !g.roomLocked() {
		g.mu.Unlock()
		return
	}
	if old == nil {
		old = &member{}
		g.nodes[s.ID] = old
	}
	s.State, s.Since, s.RTT, s.Ahead, s.Proven = boxed.NodeAlive, old.Since, old.RTT, old.Ahead, old.Proven
	changed := old.State != boxed.NodeAlive
	if changed {
		s.Since = now
	}
	old.NodeSummary = s
	g.mu.Unlock()
	g.clearFault(string(s.ID))
	g.clearFault(s.Address)
	if changed {
		g.log.Info("a node is there", "peer", s.ID, "name", s.Name, "addr", s.Address)
		g.cfg.Changed(s)
		if g.cfg.Exchange != nil {
			g.cfg.Exchange.Greet(s.ID)
		}
		kick(g.joined)
	}
}

// maxNodes bounds the nodes that are known. Whoever has the cluster key can speak of
// as many as it likes; those that never proved anything give way first.
const maxNodes = 4096

func (g *gossip) roomLocked() bool {
	if len(g.nodes) < maxNodes {
		return true
	}
	for id, n := range g.nodes {
		if !n.Proven && n.State != boxed.NodeAlive {
			delete(g.nodes, id)
			return true
		}
	}
	return false
}

func (g *gossip) NotifyLeave(n *memberlist.Node) {
	now := g.cfg.Now()
	g.mu.Lock()
	old := g.nodes[boxed.NodeID(n.Name)]
	if old == nil {
		g.mu.Unlock()
		return
	}
	old.State, old.Since = boxed.NodeSilent, now
	if old.Draining { // its last words
		old.State = boxed.NodeStopped
	}
	s := old.NodeSummary
	g.mu.Unlock()
	g.log.Warn("a node is gone", "peer", s.ID, "name", s.Name, "state", s.State)
	g.cfg.Changed(s)
	kick(g.joined)
}

// NotifyConflict hears that one name is at two addresses.
func (g *gossip) NotifyConflict(existing, other *memberlist.Node) {
	if _, err := decodeSummary(other.Meta); err != nil {
		return
	}
	g.Fault(plainName(existing.Name), fmt.Errorf("two daemons have this node's key, at %s and %s: stop one of them, and give it a key of its own", existing.Address(), other.Address()))
}

// AckPayload is the time, so that clocks can be compared.
func (g *gossip) AckPayload() []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(g.cfg.Now().UnixMilli()))
}

func (g *gossip) NotifyPingComplete(n *memberlist.Node, rtt time.Duration, payload []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.nodes[boxed.NodeID(n.Name)]
	if m == nil {
		return
	}
	ms := float64(rtt.Microseconds()) / 1000
	if m.RTT == 0 {
		m.RTT = ms
	}
	m.RTT += (ms - m.RTT) / 4
	if len(payload) == 8 {
		m.Ahead = int64(binary.BigEndian.Uint64(payload)) - g.cfg.Now().Add(-rtt/2).UnixMilli()
	}
}

// NotifyMsg is a message of another's Broadcast. Whoever has the cluster key may
// have sent it. What it is given is memberlist's.
func (g *gossip) NotifyMsg(b []byte) {
	if len(b) < 2 || b[0] != messageBroadcast || g.cfg.Heard == nil {
		return
	}
	msg := append([]byte(nil), b[1:]...)
	if name := g.cfg.Heard(msg); name != "" {
		g.Broadcast(name, msg) // a message goes to few nodes; these pass it on
	}
}

func (g *gossip) GetBroadcasts(overhead, limit int) [][]byte {
	return g.queue.GetBroadcasts(overhead, limit)
}

func (g *gossip) LocalState(bool) []byte {
	if g.cfg.Exchange == nil {
		return nil
	}
	return g.cfg.Exchange.State()
}

func (g *gossip) MergeRemoteState(b []byte, _ bool) {
	if g.cfg.Exchange != nil && len(b) > 0 {
		g.cfg.Exchange.Compare(append([]byte(nil), b...))
	}
}

// reconcile remembers on the disk who is there, outside of memberlist's locks.
func (m *Membership) reconcile() {
	if m.cfg.Known == nil {
		return
	}
	m.mu.Lock()
	var put []boxed.NodeSummary
	for _, n := range m.nodes {
		if n.saved != n.State {
			n.saved = n.State
			put = append(put, n.NodeSummary)
		}
	}
	m.mu.Unlock()
	for _, s := range put {
		if err := m.cfg.Known.Put(s); err != nil {
			m.log.Error("remember a node", "peer", s.ID, "err", err)
		}
	}
}

// plainName bounds and cleans a name that has not been proved.
func plainName(s string) string { return strings.ToValidUTF8(clip(s, 40), "?") }

// gossipWire is memberlist's transport over a Network.
type gossipWire struct {
	net     Network
	log     *slog.Logger
	pc      net.PacketConn
	ln      Listener
	packets chan *memberlist.Packet
	streams chan net.Conn
	// accepted hears of each node that has proved itself. Nil: nobody does.
	accepted func(boxed.NodeID)
	done     chan struct{}
	once     sync.Once
	work     sync.WaitGroup
	dials    context.Context
	noDials  context.CancelFunc // ends dials, those under way too
}

var _ memberlist.NodeAwareTransport = (*gossipWire)(nil)

func newGossipWire(n Network, log *slog.Logger, accepted func(boxed.NodeID)) (*gossipWire, error) {
	ln, err := n.Listen(Gossip)
	if err != nil {
		return nil, fmt.Errorf("listen for gossip: %w", err)
	}
	pc, err := n.Packets()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for gossip: %w", err), ln.Close())
	}
	w := &gossipWire{
		net: n, log: log, pc: pc, ln: ln, done: make(chan struct{}),
		packets: make(chan *memberlist.Packet, 256), streams: make(chan net.Conn), accepted: accepted,
	}
	w.dials, w.noDials = context.WithCancel(context.Background())
	w.work.Go(w.readPackets)
	w.work.Go(w.readStreams)
	return w, nil
}

func (w *gossipWire) readPackets() {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := w.pc.ReadFrom(buf)
		if err != nil {
			select {
			case <-w.done:
				return
			case <-time.After(10 * time.Millisecond): // an ICMP answer to what was sent, say
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		if n == 0 || n > MaxPacket { // no node sends larger ones
			continue
		}
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: time.Now()}
		select {
		case w.packets <- p:
		case <-w.done:
			return
		}
	}
}

func (w *gossipWire) readStreams() {
	for {
		c, err := w.ln.AcceptPeer()
		if err != nil {
			return
		}
		if w.accepted != nil {
			w.accepted(c.Peer().Node)
		}
		select {
		case w.streams <- c:
		case <-w.done:
			c.Close()
			return
		}
	}
}

func (w *gossipWire) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	addr, err := netip.ParseAddrPort(w.net.Addr())
	if err != nil {
		return nil, 0, fmt.Errorf("the network has no address yet: %w", err)
	}
	return addr.Addr().AsSlice(), int(addr.Port()), nil
}

func (w *gossipWire) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = w.pc.WriteTo(b, net.UDPAddrFromAddrPort(to))
	return time.Now(), err
}

func (w *gossipWire) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	return w.WriteTo(b, to.Addr)
}

func (w *gossipWire) DialTimeout(addr string, limit time.Duration) (net.Conn, error) {
	return w.DialAddressTimeout(memberlist.Address{Addr: addr}, limit)
}

// DialAddressTimeout bounds a dial further: who does not answer in three seconds
// is tried again soon anyway, and a rejoin waits for it.
func (w *gossipWire) DialAddressTimeout(to memberlist.Address, limit time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(w.dials, min(limit, dialGossip))
	defer cancel()
	return w.net.Dial(ctx, Target{ID: boxed.NodeID(to.Name), Addr: to.Addr}, Gossip)
}

func (w *gossipWire) PacketCh() <-chan *memberlist.Packet { return w.packets }
func (w *gossipWire) StreamCh() <-chan net.Conn           { return w.streams }

func (w *gossipWire) Shutdown() error {
	var err error
	w.once.Do(func() {
		close(w.done)
		w.noDials()
		err = errors.Join(w.ln.Close(), w.pc.Close())
		w.work.Wait()
	})
	return err
}

// gossipLog turns memberlist's lines into ours. They are about packets that
// anybody may send, so they are for whoever looks for a fault, and not for
// everybody's log.
func gossipLog(l *slog.Logger) *log.Logger { return log.New(gossipLines{l}, "", 0) }

type gossipLines struct{ log *slog.Logger }

func (g gossipLines) Write(b []byte) (int, error) {
	g.log.Debug("gossip", "said", strings.TrimSpace(strings.ToValidUTF8(clip(string(b), 512), "?")))
	return len(b), nil
}
