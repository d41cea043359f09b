package transport

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// maxFaults bounds those that are kept, and faultAge how long.
const (
	maxFaults = 64
	faultAge  = 5 * time.Minute
)

// Fault notes what is wrong with a peer.
func (m *Membership) Fault(peer string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, known := m.faults[peer]
	if !known && len(m.faults) >= maxFaults {
		m.pruneFaults()
	}
	if !known && len(m.faults) >= maxFaults {
		return
	}
	f := boxed.MeshFault{At: m.cfg.Now(), Peer: peer, Message: clip(strings.TrimSpace(flatten(err)), 300)}
	m.faults[peer] = f
	if !known || old.Message != f.Message {
		m.log.Warn("a node of the mesh cannot be reached", "peer", peer, "err", f.Message)
	}
}

// flatten is an error on one line; memberlist joins several with line breaks.
func flatten(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

func (m *Membership) clearFault(peer string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.faults, peer)
}

// Faults are those of the last minutes, by peer.
func (m *Membership) Faults() []boxed.MeshFault {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pruneFaults()
	list := slices.AppendSeq([]boxed.MeshFault{}, maps.Values(m.faults))
	slices.SortFunc(list, func(a, b boxed.MeshFault) int { return strings.Compare(a.Peer, b.Peer) })
	return list
}

// pruneFaults is called with the lock held.
func (m *Membership) pruneFaults() {
	maps.DeleteFunc(m.faults, func(peer string, f boxed.MeshFault) bool {
		return m.cfg.Now().Sub(f.At) > faultAge || m.cfg.Denied(boxed.NodeID(peer))
	})
}

// plainJoin is memberlist's error without what it puts in front of ours.
func plainJoin(err error, addr string) string {
	text := flatten(err)
	if _, ours, ok := strings.Cut(text, "failed to join "+addr+": "); ok {
		return ours
	}
	return text
}
