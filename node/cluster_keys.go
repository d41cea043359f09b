package node

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// Times of a cluster key.
const (
	keySwitch  = 2 * time.Second  // from when nodes are told of a new key until it is used to send
	keyOverlap = 20 * time.Second // and how long the old one is accepted after that
	maxRetired = 8                // old keys that a known node may prove when it comes back
)

// GossipKeys are the cluster keys that gossip may be encrypted for, the first to
// send with.
func (c *Cluster) GossipKeys() []transport.ClusterKey { return c.State().Keys }

// GateKeys are the cluster key in force, and after it the one that is being
// replaced.
func (c *Cluster) GateKeys() []transport.ClusterKey {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest == "" {
		return slices.Clone(c.state.Keys)
	}
	keys := []transport.ClusterKey{c.newestKey}
	for _, k := range c.state.Keys {
		if k != c.newestKey {
			keys = append(keys, k)
		}
	}
	return keys
}

// Retired are the keys that a node may prove which has not got the one in force:
// none for a node that the present key was not sealed to. So who learnt an old key
// does not get in by it under a new name.
func (c *Cluster) Retired(id boxed.NodeID) []transport.ClusterKey {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.sealedTo[id] || c.removed[id] {
		return nil
	}
	var old []transport.ClusterKey
	for _, k := range append(slices.Clone(c.state.Keys), c.state.Retired...) {
		if k.ID() != c.newest {
			old = append(old, k)
		}
	}
	return old
}

// Handover is the document of the key in force, for a node that has not got it.
func (c *Cluster) Handover() []byte {
	d, err := c.docs.Document(clusterKeyKind, c.State().ID)
	if err != nil {
		return nil
	}
	raw, err := cbor.Marshal(d)
	if err != nil || len(raw) > transport.MaxHandover {
		return nil
	}
	return raw
}

// Rekeyed takes the document of the key in force from another node. That node has
// proved an old key only, so it is judged as any document is: by who signed it.
func (c *Cluster) Rekeyed(handover []byte) {
	var d boxed.Document
	if cbor.Unmarshal(handover, &d) != nil || d.Kind != clusterKeyKind || d.Key != c.State().ID {
		return
	}
	c.docs.Take(d)
}

func retire(retired []transport.ClusterKey, keys ...transport.ClusterKey) []transport.ClusterKey {
	all := slices.Clone(keys)
	for _, k := range retired {
		if !slices.Contains(all, k) {
			all = append(all, k)
		}
	}
	return all[:min(len(all), maxRetired)]
}

func (c *Cluster) useKeys(l *Live) {
	if err := l.Members.UseKeys(); err != nil {
		c.cfg.Log.Error("use the cluster keys", "err", err)
	}
}

// sealedKey is the body of the document of the cluster key.
type sealedKey struct {
	ID     string                  `json:"id"`
	Sealed map[boxed.NodeID][]byte `json:"sealed"`
}

// readKey takes a new cluster key from its document.
func (c *Cluster) readKey() error {
	d, err := c.docs.Document(clusterKeyKind, c.State().ID)
	if boxed.CodeOf(err) == boxed.CodeNotFound {
		return nil
	} else if err != nil {
		return err
	}
	var body sealedKey
	if !c.Trusted(clusterKeyKind, d.Author) || json.Unmarshal(d.Body, &body) != nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	sealed, mine := body.Sealed[c.id]
	if c.state.ID != d.Key || !mine || body.ID == c.newest && len(c.sealedTo) > 0 {
		return nil
	}
	raw, err := transport.Open(c.cfg.Identity, []byte(clusterKeyKind), sealed)
	if err != nil || len(raw) != len(transport.ClusterKey{}) {
		return fmt.Errorf("the new cluster key is not for this node: %w", err)
	}
	key := transport.ClusterKey(raw)
	if key.ID() != body.ID || slices.Contains(c.state.Retired, key) {
		return nil // an old document
	}
	c.newest, c.newestKey, c.sealedTo = body.ID, key, map[boxed.NodeID]bool{}
	for id := range body.Sealed {
		c.sealedTo[id] = true
	}
	if len(c.state.Keys) == 1 && c.state.Keys[0] == key {
		return nil // it is in force already
	}
	for { // the newest counts
		select {
		case c.adopting <- key:
			return nil
		default:
		}
		select {
		case <-c.adopting:
		default:
		}
	}
}

// adopt goes over to a new key: first both are accepted, then it is used to send,
// then the old one is no longer accepted. It stops when a newer one has come, or the
// node is in another cluster.
func (c *Cluster) adopt(ctx context.Context, key transport.ClusterKey) {
	cluster := c.State().ID
	for _, stage := range []struct {
		wait time.Duration
		keys func(old []transport.ClusterKey) []transport.ClusterKey
	}{
		{0, func(old []transport.ClusterKey) []transport.ClusterKey { return append(old, key) }},
		{keySwitch, func(old []transport.ClusterKey) []transport.ClusterKey {
			return append([]transport.ClusterKey{key}, old...)
		}},
		{keyOverlap, func([]transport.ClusterKey) []transport.ClusterKey { return []transport.ClusterKey{key} }},
	} {
		for end := time.Now().Add(stage.wait); time.Now().Before(end); {
			if len(c.adopting) > 0 {
				return
			}
			select {
			case <-ctx.Done(): // the next life begins with what was kept, and the document again
				return
			case <-time.After(min(time.Until(end), 100*time.Millisecond)):
			}
		}
		c.mu.Lock()
		s := c.state
		if s.ID != cluster || c.newest != key.ID() {
			c.mu.Unlock()
			return
		}
		old := slices.DeleteFunc(slices.Clone(s.Keys), func(k transport.ClusterKey) bool { return k == key })
		s.Keys, s.Retired = stage.keys(old), retire(s.Retired, old...)
		err := c.keepLocked(s)
		c.mu.Unlock()
		if err != nil {
			c.cfg.Log.Error("take the new cluster key", "err", err)
			return
		}
		if l := c.live.Load(); l != nil {
			c.useKeys(l)
		}
	}
	c.cfg.Log.Info("the cluster key was replaced", "key", key.ID())
}

// Rotate makes a new cluster key and gives it to every node that has proved to
// belong to the cluster, sealed to each. A node that is away gets it when it comes
// back.
func (c *Cluster) Rotate() error {
	if err := c.mayControl(); err != nil {
		return err
	}
	l := c.live.Load()
	if l == nil || c.State().ID == "" {
		return boxed.Errorf(boxed.CodeConflict, "this node is in no cluster")
	}
	// Gossip alone, which whoever has the old key can speak, makes no node.
	l.Members.Prove(provePatience)
	key := transport.NewClusterKey()
	body := sealedKey{ID: key.ID(), Sealed: map[boxed.NodeID][]byte{}}
	for _, s := range l.Members.Nodes() {
		if s.Key == nil || c.Denied(s.ID) || s.ID != c.id && !s.Proven {
			continue
		}
		sealed, err := transport.Seal(s.Key, []byte(clusterKeyKind), key[:])
		if err != nil {
			return err
		}
		body.Sealed[s.ID] = sealed
	}
	if raw, err := json.Marshal(body); err == nil && len(raw) > boxed.MaxDocument {
		return boxed.Errorf(boxed.CodeTooLarge, "the cluster knows of %d nodes, which is more than a new key can be sealed to at once; remove those that are silent for good", len(body.Sealed))
	}
	if err := c.put(clusterKeyKind, c.State().ID, body, false); err != nil {
		return err
	}
	// Not when Run gets to it: a token that is asked for next has the new key.
	return c.readKey()
}

// provePatience is how long nodes have to prove that they belong to the cluster.
const provePatience = 3 * time.Second
