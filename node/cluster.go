package node

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// Kinds of documents about the cluster itself.
const (
	removedKind    = "node.removed" // by node ID; grow-only
	clusterKeyKind = "cluster.key"  // by the cluster's ID: the key in force, sealed to each node
)

// ClusterState is what a node must remember to be in its cluster. It holds the
// cluster key: keep it in a file of mode 0600.
type ClusterState struct {
	ID      string                 `json:"id"`
	Keys    []transport.ClusterKey `json:"keys"`    // in force, the first to send with
	Retired []transport.ClusterKey `json:"retired"` // were in force, the last first
	// Met is when another node was there last, to within an hour.
	Met time.Time `json:"met,omitzero"`
}

// ClusterConfig is what a Cluster needs. Store, Clock and Identity are required.
type ClusterConfig struct {
	Store    transport.DocumentStore
	Clock    *boxed.Clock
	Identity ed25519.PrivateKey
	State    ClusterState             // without an ID: none yet
	Save     func(ClusterState) error // nil: it is not kept
	// Control are the nodes whose documents may grant power; empty: all of the cluster.
	Control []boxed.NodeID
	Log     *slog.Logger
	Now     func() time.Time
}

// Cluster is who belongs to it and by which secret: the cluster keys, the list of
// nodes that were removed, and the documents that all nodes share. A node that is
// alone has one too, without an ID. Run keeps it up; the other methods are safe for
// concurrent use.
type Cluster struct {
	cfg  ClusterConfig
	id   boxed.NodeID
	docs *transport.Documents
	live atomic.Pointer[Live]
	// adopting is the key to go over to; a newer one takes its place.
	adopting chan transport.ClusterKey

	// denied is a copy of removed for callbacks of gossip, which wait for no disk.
	denied atomic.Pointer[map[boxed.NodeID]bool]

	mu        sync.Mutex // held over a write of the state
	state     ClusterState
	removed   map[boxed.NodeID]bool
	newest    string                // ID of the key that came by document last
	newestKey transport.ClusterKey  // and the key
	sealedTo  map[boxed.NodeID]bool // whom it was made for
}

// Live is what a Cluster runs on while its node is in the mesh.
type Live struct {
	Members *transport.Membership
	// Drop closes the connections with nodes that were removed. Nil: nothing does.
	Drop func(gone func(boxed.NodeID) bool)
	// Forget drops what is known of a node.
	Forget func(boxed.NodeID) error
}

// NewCluster reads the documents.
func NewCluster(cfg ClusterConfig) (*Cluster, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{
		cfg: cfg, id: boxed.NodeIDOf(cfg.Identity.Public().(ed25519.PublicKey)), state: cfg.State, removed: map[boxed.NodeID]bool{},
		adopting: make(chan transport.ClusterKey, 1),
	}
	c.docs = transport.NewDocuments(transport.DocumentsConfig{
		Store: cfg.Store, Clock: cfg.Clock, Identity: cfg.Identity, Peers: c.peers, Send: c.send, Trusted: c.Trusted, Log: cfg.Log, Now: cfg.Now,
	})
	return c, c.readRemoved()
}

// tooLong is how long a node may be away and trust the documents that it has: less
// than tombstones are kept.
const tooLong = 89 * 24 * time.Hour

// startAfresh drops what may have been deleted while the node was without company
// for so long, now that it has some: it takes that anew from the others. A
// revocation is never dropped, nor what this node wrote itself.
func (c *Cluster) startAfresh(away time.Duration) {
	c.cfg.Log.Warn("this node was without company for longer than deletions are remembered; it takes a copy of the mesh's documents", "for", away.Round(time.Hour))
	err := c.cfg.Store.DropDocuments(func(d boxed.Document) bool { return d.Revoked || boxed.NodeIDOf(d.Author) == c.id })
	if err != nil {
		c.cfg.Log.Error("drop old documents", "err", err)
	}
	for _, id := range c.peers() {
		c.docs.Greet(id)
	}
}

// metEvery is how often it is written down that others are there.
const (
	metEvery  = time.Hour
	lookEvery = 10 * time.Second // whether others are there
)

// noteMet writes down that others are there.
func (c *Cluster) noteMet(others int) {
	now := c.cfg.Now().UTC()
	c.mu.Lock()
	defer c.mu.Unlock()
	away := now.Sub(c.state.Met)
	if others == 0 || c.state.ID == "" || away < metEvery {
		return
	}
	if !c.state.Met.IsZero() && away >= tooLong {
		c.startAfresh(away)
	}
	s := c.state
	s.Met = now
	if err := c.keepLocked(s); err != nil {
		c.cfg.Log.Error("remember that others are there", "err", err)
	}
}

// Documents are those that all nodes share.
func (c *Cluster) Documents() *transport.Documents { return c.docs }

// State is what is to be remembered. Without an ID the node is alone.
func (c *Cluster) State() ClusterState {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Keys, s.Retired = slices.Clone(s.Keys), slices.Clone(s.Retired)
	return s
}

// Enter makes the node one of a cluster, or of none with the zero state.
func (c *Cluster) Enter(s ClusterState) error {
	c.mu.Lock()
	err := c.keepLocked(s)
	if err == nil {
		c.newest, c.newestKey, c.sealedTo = "", transport.ClusterKey{}, nil
		clear(c.removed)
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return c.readRemoved()
}

// keepLocked is held across the write: what is in force is on the disk.
func (c *Cluster) keepLocked(s ClusterState) error {
	if c.cfg.Save != nil {
		if err := c.cfg.Save(s); err != nil {
			return fmt.Errorf("keep the cluster key: %w", err)
		}
	}
	c.state = s
	return nil
}

// SetLive says what the cluster runs on now; nil: nothing.
func (c *Cluster) SetLive(l *Live) { c.live.Store(l) }

func (c *Cluster) peers() (ids []boxed.NodeID) {
	l := c.live.Load()
	if l == nil {
		return nil
	}
	for _, s := range l.Members.Nodes() {
		if s.ID != c.id && s.State == boxed.NodeAlive {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

func (c *Cluster) send(id boxed.NodeID, msg []byte) error {
	l := c.live.Load()
	if l == nil {
		return boxed.Errorf(boxed.CodeNotReady, "this node is in no mesh")
	}
	return l.Members.Send(id, msg)
}

// Denied reports whether a node was removed.
func (c *Cluster) Denied(id boxed.NodeID) bool {
	denied := c.denied.Load()
	return denied != nil && (*denied)[id]
}

// Removed are the nodes that were removed.
func (c *Cluster) Removed() []boxed.NodeID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.removed))
}

// Trusted reports whether an author may write documents of a kind: all that there
// are grant power, so a node that was removed may write none, and with a control
// list only the nodes on it.
func (c *Cluster) Trusted(_ string, author ed25519.PublicKey) bool {
	id := boxed.NodeIDOf(author)
	if id == c.id {
		return true
	}
	return !c.Denied(id) && (len(c.cfg.Control) == 0 || slices.Contains(c.cfg.Control, id))
}

// Run passes documents on and heeds those about the cluster until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { c.docs.Run(ctx) })
	parts.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case key := <-c.adopting:
				c.adopt(ctx, key)
			}
		}
	})
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		changed := c.docs.DocumentsChanged()
		if err := c.readRemoved(); err != nil {
			c.cfg.Log.Error("read the list of removed nodes", "err", err)
		}
		if err := c.readKey(); err != nil {
			c.cfg.Log.Error("read the cluster key", "err", err)
		}
		for wait := true; wait; {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
				wait = false
			case <-look.C:
				c.noteMet(len(c.peers()))
			}
		}
	}
}

// readRemoved makes the deny-list from its documents, and puts out who is on it.
func (c *Cluster) readRemoved() error {
	docs, err := c.docs.Documents(removedKind)
	if err != nil {
		return err
	}
	var news []boxed.NodeID
	c.mu.Lock()
	for _, d := range docs {
		// Only a revocation counts: it is grow-only, whatever the stamps say.
		var why removal
		if json.Unmarshal(d.Body, &why) != nil || why.Cluster != c.state.ID {
			continue
		}
		if id := boxed.NodeID(d.Key); d.Revoked && id.Valid() && !c.removed[id] {
			c.removed[id] = true
			news = append(news, id)
		}
	}
	denied := maps.Clone(c.removed)
	c.denied.Store(&denied)
	c.mu.Unlock()
	l := c.live.Load()
	if len(news) == 0 || l == nil {
		return nil
	}
	if l.Drop != nil {
		l.Drop(c.Denied)
	}
	for _, id := range news {
		c.cfg.Log.Warn("a node was removed from the cluster", "peer", id)
		if err := l.Forget(id); err != nil {
			return err
		}
	}
	return nil
}

// removal is the body of an entry of the deny-list. One of another cluster, which
// the node was in before, does not count.
type removal struct {
	Cluster string       `json:"cluster"`
	By      boxed.NodeID `json:"by"`
	At      time.Time    `json:"at"`
}

// Remove puts a node out for good: it is on the deny-list of every node, and the
// cluster key is replaced by one that it does not have. What it wrote that is in
// force is signed anew, since nothing of it is accepted from now on.
func (c *Cluster) Remove(id boxed.NodeID) error {
	switch {
	case !id.Valid():
		return boxed.Errorf(boxed.CodeInvalid, "%q is not a node's ID", id).WithField("node")
	case id == c.id:
		return boxed.Errorf(boxed.CodeConflict, "a node does not remove itself; leave with `boxedctl cluster leave`, or remove it from another node")
	case c.State().ID == "":
		return boxed.Errorf(boxed.CodeConflict, "this node is in no cluster")
	}
	if err := c.mayControl(); err != nil {
		return err
	}
	if err := c.inherit(id); err != nil {
		return err
	}
	if err := c.put(removedKind, string(id), removal{Cluster: c.State().ID, By: c.id, At: c.cfg.Now().UTC()}, true); err != nil {
		return err
	}
	if err := c.readRemoved(); err != nil {
		return err
	}
	return c.Rotate()
}

// mayControl refuses what the other nodes would not take from this one.
func (c *Cluster) mayControl() error {
	if len(c.cfg.Control) > 0 && !slices.Contains(c.cfg.Control, c.id) {
		return boxed.Errorf(boxed.CodeForbidden, "this node may not do that for the cluster (mesh.control); do it on one of %v", c.cfg.Control)
	}
	return nil
}

// MayControl is for what else writes documents that grant power.
func (c *Cluster) MayControl() error { return c.mayControl() }

// inherit signs the documents of another author as this node's, but for the API
// keys of that node's own configuration: whoever has its disk has those, and they
// are worthless from now on.
func (c *Cluster) inherit(from boxed.NodeID) error {
	var theirs []boxed.Document
	err := c.cfg.Store.AllDocuments(func(d boxed.Document) error {
		if boxed.NodeIDOf(d.Author) == from {
			theirs = append(theirs, d)
		}
		return nil
	})
	for _, d := range theirs {
		d.Stamp = c.cfg.Clock.Next(c.cfg.Now())
		var key keyBody
		if d.Kind == KeyKind && json.Unmarshal(d.Body, &key) == nil && key.Config == from {
			d.Revoked = true
		}
		d.Sign(c.cfg.Identity)
		if _, putErr := c.docs.PutDocument(d); putErr != nil {
			err = errors.Join(err, putErr)
		}
	}
	return err
}

func (c *Cluster) put(kind, key string, body any, revoked bool) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	d := boxed.Document{Kind: kind, Key: key, Stamp: c.cfg.Clock.Next(c.cfg.Now()), Revoked: revoked, Body: raw}
	d.Sign(c.cfg.Identity)
	_, err = c.docs.PutDocument(d)
	return err
}

// Status is what this node knows of its cluster.
func (c *Cluster) Status() *boxed.ClusterStatus {
	s := c.State()
	out := &boxed.ClusterStatus{ID: s.ID, Held: c.docs.Held(), Removed: c.Removed(), Nodes: []boxed.NodeSummary{}, Faults: []boxed.MeshFault{}}
	if keys := c.GateKeys(); len(keys) > 0 {
		out.Key = keys[0].ID()
	}
	if l := c.live.Load(); l != nil {
		out.Nodes, out.Faults = l.Members.Nodes(), l.Members.Faults()
	}
	return out
}
