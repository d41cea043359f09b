package node

import (
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
)

// Usage of owners on other nodes, by which a quota counts over the whole mesh. It
// is gossiped as it changes, so it is some 100 ms old: those who ask many nodes at
// the same time get more than their quota by what all nodes admit in that time.
const (
	usageAge     = 5 * time.Minute // without being told again; of a node that was removed, say
	usageAgain   = time.Minute
	maxUsage     = 65_536 // owners by node
	usageMessage = 'u'
)

// usage is what one owner's living sandboxes hold on one node.
type usage struct {
	Node      boxed.NodeID `cbor:"1,keyasint"`
	Owner     string       `cbor:"2,keyasint"`
	Sandboxes int          `cbor:"3,keyasint"`
	MemoryMiB int64        `cbor:"4,keyasint"`
	AtMS      int64        `cbor:"5,keyasint"`
}

// usages is what other nodes told, and what this one told last.
type usages struct {
	mu     sync.Mutex
	others map[string]map[boxed.NodeID]heardUsage // by owner
	count  int
	told   map[string]usage
	toldAt map[string]time.Time
}

type heardUsage struct {
	usage
	at time.Time // by this node's clock
}

// hear takes what another node told.
func (u *usages) hear(msg []byte, now time.Time, known func(boxed.NodeID) bool) (name string) {
	var v usage
	if len(msg) < 2 || msg[0] != usageMessage || cbor.Unmarshal(msg[1:], &v) != nil || !v.Node.Valid() || keyValidOwner(v.Owner, boxed.RoleUser) != nil ||
		v.Sandboxes < 0 || v.MemoryMiB < 0 || v.MemoryMiB > 1<<30 || v.Sandboxes > 1<<20 ||
		!known(v.Node) || v.AtMS > now.Add(boxed.MaxClockSkew).UnixMilli() {
		return ""
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.others == nil {
		u.others = map[string]map[boxed.NodeID]heardUsage{}
	}
	of := u.others[v.Owner]
	old, had := of[v.Node]
	switch {
	case had && old.usage == v: // it goes round
		return ""
	case had && old.AtMS > v.AtMS && now.Sub(old.at) <= usageAge: // a later word came first
		return ""
	case !had && u.count >= maxUsage:
		u.pruneLocked(now)
		if u.count >= maxUsage {
			return ""
		}
	}
	if of == nil {
		of = map[boxed.NodeID]heardUsage{}
		u.others[v.Owner] = of
	}
	if !had {
		u.count++
	}
	of[v.Node] = heardUsage{v, now}
	return usageName(v.Node, v.Owner)
}

// usageName is under what one node's word about one owner goes round.
func usageName(node boxed.NodeID, owner string) string { return "usage " + string(node) + " " + owner }

func (u *usages) pruneLocked(now time.Time) {
	for owner, of := range u.others {
		for id, h := range of {
			if now.Sub(h.at) > usageAge {
				delete(of, id)
				u.count--
			}
		}
		if len(of) == 0 {
			delete(u.others, owner)
		}
	}
}

// elsewhere is what an owner holds on other nodes, as far as is known.
func (u *usages) elsewhere(owner string, now time.Time) (sum boxed.Capacity) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, h := range u.others[owner] {
		if now.Sub(h.at) <= usageAge {
			sum.Sandboxes = min(sum.Sandboxes+h.Sandboxes, 1<<30)
			sum.MemoryBytes = min(sum.MemoryBytes+h.MemoryMiB*boxed.MiB, 1<<60)
		}
	}
	return sum
}

// news are the messages about owners whose usage has changed here, or
// was told long ago, by owner.
func (u *usages) news(self boxed.NodeID, held map[string]boxed.Capacity, now time.Time) map[string][]byte {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.told == nil {
		u.told, u.toldAt = map[string]usage{}, map[string]time.Time{}
	}
	messages := map[string][]byte{}
	for owner := range u.told {
		if _, still := held[owner]; !still {
			held[owner] = boxed.Capacity{}
		}
	}
	for owner, c := range held {
		v := usage{Node: self, Owner: owner, Sandboxes: c.Sandboxes, MemoryMiB: (c.MemoryBytes + boxed.MiB - 1) / boxed.MiB}
		if u.told[owner] == v && now.Sub(u.toldAt[owner]) < usageAgain {
			continue
		}
		u.told[owner], u.toldAt[owner] = v, now
		if c.Sandboxes == 0 {
			delete(u.told, owner)
			delete(u.toldAt, owner)
		}
		v.AtMS = now.UnixMilli()
		if raw, err := cbor.Marshal(v); err == nil {
			messages[owner] = append([]byte{usageMessage}, raw...)
		}
	}
	return messages
}

// Heard takes a message that another node gossiped, and returns the name under
// which it is passed on; "" if it is not.
func (n *Node) Heard(msg []byte) (name string) {
	return n.usage.hear(msg, n.cfg.Now(), func(id boxed.NodeID) bool {
		m := n.mesh.Load()
		if m == nil || id == n.cfg.ID {
			return false
		}
		_, known := (*m).Node(id)
		return known
	})
}

// tellUsage gossips what owners hold here. All of them: quotas are each node's, and
// grants of a tailnet bound who has no quota.
func (n *Node) tellUsage(mesh Mesh) {
	for owner, msg := range n.usage.news(n.cfg.ID, n.cfg.Manager.UsedByOwner(), n.cfg.Now()) {
		mesh.Broadcast(usageName(n.cfg.ID, owner), msg)
	}
}
