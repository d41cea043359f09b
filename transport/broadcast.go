package transport

import (
	"github.com/hashicorp/memberlist"

	"github.com/boxed-mesh/boxed"
)

// Broadcast gossips a short message to all nodes: it may come late, twice or
// never, and fits a datagram. One under the same name that is still on its way
// gives way to it.
func (m *Membership) Broadcast(name string, msg []byte) {
	m.queue.QueueBroadcast(&broadcast{name, append([]byte{messageBroadcast}, msg...)})
}

// count is how many nodes there are, this one too.
func (m *Membership) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 1
	for _, other := range m.nodes {
		if other.State == boxed.NodeAlive {
			n++
		}
	}
	return n
}

// messageBroadcast is the first byte of what Broadcast sends.
const messageBroadcast = 'b'

// broadcast is one message on its way.
type broadcast struct {
	name string
	msg  []byte
}

func (b *broadcast) Invalidates(other memberlist.Broadcast) bool {
	o, ok := other.(*broadcast)
	return ok && o.name == b.name
}

func (b *broadcast) Name() string    { return b.name }
func (b *broadcast) Message() []byte { return b.msg }
func (b *broadcast) Finished()       {}
