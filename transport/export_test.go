package transport

import (
	"crypto/ed25519"
	"log/slog"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/hashicorp/memberlist"

	"github.com/boxed-mesh/boxed"
)

// Forged gossips under a name that is not its key's.
type Forged struct{ list *memberlist.Memberlist }

// ForgeMembership begins to gossip as a thief does that has the cluster key: as
// another node, with a summary that it signs by its own key.
func ForgeMembership(t *testing.T, cfg MembershipConfig, as boxed.NodeID) *Forged {
	t.Helper()
	m := &Membership{cfg: cfg, id: as, log: slog.New(slog.DiscardHandler), nodes: map[boxed.NodeID]*member{}, faults: map[string]boxed.MeshFault{}}
	m.cfg.Now, m.cfg.Denied, m.cfg.Changed = time.Now, func(boxed.NodeID) bool { return false }, func(boxed.NodeSummary) {}
	m.queue = &memberlist.TransmitLimitedQueue{NumNodes: m.count, RetransmitMult: 3}
	if err := m.set(boxed.NodeSummary{Name: "thief"}); err != nil {
		t.Fatal(err)
	}
	secret := cfg.Keys()[0].derive("gossip")
	var err error
	if m.ring, err = memberlist.NewKeyring([][]byte{secret}, secret); err != nil {
		t.Fatal(err)
	}
	if m.wire, err = newGossipWire(cfg.Network, m.log, nil); err != nil {
		t.Fatal(err)
	}
	c := m.memberlistConfig()
	c.Alive, c.Merge = nil, nil
	list, err := memberlist.Create(c)
	if err != nil {
		t.Fatal(err)
	}
	return &Forged{list}
}

func (f *Forged) Join(addr string) { f.list.Join([]string{addr}) }
func (f *Forged) Close()           { f.list.Shutdown() }

// EncodeDocuments is a message as another node sends it.
func EncodeDocuments(docs ...boxed.Document) []byte {
	raw, err := cbor.Marshal(docs)
	if err != nil {
		panic(err)
	}
	return append([]byte{messageDocuments}, raw...)
}

// Missing is the message with what to lacks of from's documents.
func Missing(from, to *Documents) []byte {
	for len(from.queue) > 0 {
		<-from.queue
	}
	from.Compare(to.State())
	select {
	case v := <-from.queue:
		if messages := from.messages(v.refs); len(messages) > 0 {
			return messages[0]
		}
	default:
	}
	return nil
}

// RetryHeld tries what is held back now.
func (d *Documents) RetryHeld() { d.retryHeld() }

// DecodeSummary is for fuzzing.
func DecodeSummary(raw []byte) (boxed.NodeSummary, error) { return decodeSummary(raw) }

// EncodeSummary is what a node sends of itself.
func EncodeSummary(s boxed.NodeSummary, key ed25519.PrivateKey) ([]byte, error) {
	return encodeSummary(s, key)
}

// KnownSummaries is what Membership keeps of the summaries that it heard.
type KnownSummaries = knownSummaries

// Read reads a summary that came under a name.
func (p *knownSummaries) Read(name string, raw []byte) (boxed.NodeSummary, error) {
	return p.read(name, raw)
}
