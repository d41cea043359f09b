package transport_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
)

// replica is one node's documents, with a clock that the test sets.
type replica struct {
	id    boxed.NodeID
	key   ed25519.PrivateKey
	store *store.Store
	docs  *transport.Documents
	mu    sync.Mutex
	off   time.Duration // how wrong the clock is
}

func (r *replica) now() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Now().Add(r.off)
}

func newReplica(t testing.TB) *replica {
	t.Helper()
	r := &replica{key: newIdentity()}
	r.id = idOf(r.key)
	var err error
	if r.store, err = store.Open(store.Options{InMemory: true, Now: r.now}); err != nil {
		t.Fatal(err)
	}
	r.docs = transport.NewDocuments(transport.DocumentsConfig{Store: r.store, Clock: r.store.Clock(), Identity: r.key, Now: r.now})
	return r
}

// tester is a test, or one run of a property.
type tester interface {
	Helper()
	Fatal(args ...any)
}

// put writes a document as its node does.
func (r *replica) put(t tester, key, body string, revoked bool) boxed.Document {
	t.Helper()
	d := boxed.Document{Kind: "key", Key: key, Stamp: r.store.Clock().Next(r.now()), Revoked: revoked, Body: []byte(body)}
	d.Sign(r.key)
	if _, err := r.docs.PutDocument(d); err != nil {
		t.Fatal(err)
	}
	return d
}

// state is what the replica has, for a comparison.
func (r *replica) state(t tester) map[string]string {
	t.Helper()
	state := map[string]string{}
	err := r.store.AllDocuments(func(d boxed.Document) error {
		state[d.Kind+"/"+d.Key] = fmt.Sprintf("%s revoked=%v by %s at %v", d.Body, d.Revoked, boxed.NodeIDOf(d.Author), d.Stamp)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// Case I11, decision 12: any order, loss, duplication and clocks that are wrong by
// up to ten years end in the same state on all nodes once the clocks are right and
// all has been exchanged; what was revoked stays so.
func TestDocumentsConverge(t *testing.T) {
	pool := []*replica{newReplica(t), newReplica(t), newReplica(t)}
	t.Cleanup(func() {
		for _, r := range pool {
			r.store.Close()
		}
	})
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++ // stores are shared by the runs, and the keys are not
		for _, r := range pool {
			r.mu.Lock()
			r.off = rapid.SampledFrom([]time.Duration{0, 0, time.Second, -time.Minute, 10 * 365 * 24 * time.Hour, -10 * 365 * 24 * time.Hour}).Draw(t, "clock")
			r.mu.Unlock()
		}
		var sent []boxed.Document
		revoked := map[string]bool{}
		for i := range rapid.IntRange(1, 12).Draw(t, "steps") {
			r := pool[rapid.IntRange(0, 2).Draw(t, "node")]
			if len(sent) > 0 && rapid.Bool().Draw(t, "deliver") { // out of order, again, or never
				d := sent[rapid.IntRange(0, len(sent)-1).Draw(t, "which")]
				r.docs.Message("", transport.EncodeDocuments(d))
				continue
			}
			key := fmt.Sprintf("%d-%d", run, rapid.IntRange(0, 2).Draw(t, "key"))
			rev := rapid.IntRange(0, 5).Draw(t, "revoke") == 0
			revoked["key/"+key] = revoked["key/"+key] || rev
			sent = append(sent, r.put(t, key, fmt.Sprintf(`"%d"`, i), rev))
		}
		for _, r := range pool { // the clocks are set right
			r.mu.Lock()
			r.off = 0
			r.mu.Unlock()
			if err := r.docs.SetRight(); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			for _, from := range pool {
				for _, to := range pool {
					if from != to {
						to.docs.Message("", transport.Missing(from.docs, to.docs))
					}
				}
			}
		}
		want := pool[0].state(t)
		for i, r := range pool {
			if diff := cmp.Diff(want, r.state(t)); diff != "" {
				t.Fatalf("node %d differs from node 0:\n%s", i, diff)
			}
		}
		for name, is := range revoked {
			if is && !strings.Contains(want[name], "revoked=true") {
				t.Fatalf("%s was revoked, and is %s", name, want[name])
			}
		}
	})
}

// Case I11: what is forged, or stamped in the future, never gets in, and what was
// revoked does not come back by a later stamp.
func TestForgedAndFutureDocumentsAreRefused(t *testing.T) {
	a, b := newReplica(t), newReplica(t)
	defer a.store.Close()
	defer b.store.Close()
	good := a.put(t, "k", `"good"`, false)
	b.docs.Message("", transport.EncodeDocuments(good))

	forged := good
	forged.Body = []byte(`"forged"`)
	forged.Stamp.WallMS++
	posing := forged
	posing.Author = b.key.Public().(ed25519.PublicKey)
	future := boxed.Document{Kind: "key", Key: "k", Stamp: boxed.Stamp{WallMS: time.Now().Add(time.Hour).UnixMilli()}, Body: []byte(`"future"`)}
	future.Sign(a.key)
	b.docs.Message("", transport.EncodeDocuments(forged, posing, future))
	b.docs.Message("", []byte("d not cbor"))
	b.docs.Message("", []byte{})
	b.docs.Message("", nil)
	b.docs.Compare([]byte("no digest"))
	if d, err := b.store.Document("key", "k"); err != nil || string(d.Body) != `"good"` {
		t.Fatalf("got %s, %v", d.Body, err)
	}
	if held := b.docs.Held(); len(held) != 1 || held[0].Author != a.id || held[0].Key != "k" {
		t.Errorf("held back: %+v", held)
	}

	revoked := a.put(t, "k", `"good"`, true)
	b.docs.Message("", transport.EncodeDocuments(revoked))
	later := boxed.Document{Kind: "key", Key: "k", Stamp: a.store.Clock().Next(time.Now()), Body: []byte(`"resurrected"`)}
	later.Sign(a.key)
	b.docs.Message("", transport.EncodeDocuments(later))
	if d, err := b.store.Document("key", "k"); err != nil || !d.Revoked {
		t.Errorf("got %+v, %v", d, err)
	}
}

// A document that was held back is taken once the clock has come so far.
func TestAHeldDocumentIsTakenInTime(t *testing.T) {
	a, b := newReplica(t), newReplica(t)
	defer a.store.Close()
	defer b.store.Close()
	a.off = 2 * time.Minute
	b.docs.Message("", transport.EncodeDocuments(a.put(t, "k", `1`, false)))
	if len(b.docs.Held()) != 1 {
		t.Fatal("it is not held back")
	}
	b.mu.Lock()
	b.off = 2 * time.Minute
	b.mu.Unlock()
	b.docs.RetryHeld()
	if _, err := b.store.Document("key", "k"); err != nil || len(b.docs.Held()) != 0 {
		t.Errorf("got %v, and %v is held", err, b.docs.Held())
	}
}

// Over real gossip: what is put on one node is on all within a second, and what
// was put on both sides of a partition is on both once it has healed.
func TestDocumentsOverGossip(t *testing.T) {
	m := newMesh(t)
	var peers []*peer
	var replicas []*replica
	for range 3 {
		r := newReplica(t)
		t.Cleanup(func() { r.store.Close() })
		var p *peer
		ready := make(chan struct{})
		r.docs = transport.NewDocuments(transport.DocumentsConfig{
			Store: r.store, Clock: r.store.Clock(), Identity: r.key, Now: r.now,
			Peers: func() (ids []boxed.NodeID) {
				<-ready
				for _, s := range p.Nodes()[1:] {
					if s.State == boxed.NodeAlive {
						ids = append(ids, s.ID)
					}
				}
				return ids
			},
			Send: func(id boxed.NodeID, msg []byte) error { <-ready; return p.Send(id, msg) },
		})
		p = m.start(r.key, nil, func(c *transport.MembershipConfig) { c.Exchange = r.docs })
		close(ready)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.docs.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-done })
		peers, replicas = append(peers, p), append(replicas, r)
		r.put(t, "from "+string(r.id), `1`, false) // before it knows anybody
	}
	eventually(t, 20*time.Second, "all see all", allSee(boxed.NodeAlive, peers, peers))
	same := func() bool {
		want := replicas[0].state(t)
		return len(want) > 0 && cmp.Equal(want, replicas[1].state(t)) && cmp.Equal(want, replicas[2].state(t))
	}
	eventually(t, 5*time.Second, "what was there before is everywhere", func() bool { return len(replicas[1].state(t)) == 3 && same() })
	replicas[1].put(t, "new", `1`, false)
	took := eventually(t, time.Second, "what is new is everywhere", func() bool { return len(replicas[0].state(t)) == 4 && same() })
	t.Logf("after %v", took)

	m.hub.Partition([]boxed.NodeID{peers[0].id, peers[1].id}, []boxed.NodeID{peers[2].id})
	replicas[0].put(t, "both", `"a"`, false)
	replicas[2].put(t, "both", `"c"`, false)
	replicas[2].put(t, "new", `1`, true)
	eventually(t, 20*time.Second, "the sides part", allSee(boxed.NodeSilent, peers[2:], peers[:2]))
	m.hub.Heal()
	took = eventually(t, 20*time.Second, "both sides have the same", func() bool {
		d, err := replicas[0].store.Document("key", "new")
		return err == nil && d.Revoked && same()
	})
	t.Logf("after the partition: %v", took)
}

func FuzzMessage(f *testing.F) {
	r := newReplica(f)
	f.Cleanup(func() { r.store.Close() })
	f.Add([]byte("d"))
	f.Add(transport.EncodeDocuments(boxed.Document{Kind: "k", Key: "k"}))
	f.Add(append([]byte("g"), r.docs.State()...))
	f.Fuzz(func(t *testing.T, msg []byte) { r.docs.Message("", msg) })
}
