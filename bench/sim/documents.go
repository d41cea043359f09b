package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
)

// replica is one node's documents: a real store in memory, and real Documents.
type replica struct {
	id    boxed.NodeID
	key   ed25519.PrivateKey
	store *store.Store
	docs  *transport.Documents
	stop  func()
}

// replicas are the documents of a mesh, made with it.
type replicas struct {
	list  []*replica
	ready chan struct{} // closed once mesh is there
	mesh  *mesh
}

func (rs *replicas) exchange(id boxed.NodeID, key ed25519.PrivateKey) (transport.Exchange, error) {
	db, err := store.Open(store.Options{InMemory: true})
	if err != nil {
		return nil, err
	}
	r, number := &replica{id: id, key: key, store: db}, len(rs.list)
	r.docs = transport.NewDocuments(transport.DocumentsConfig{
		Store: db, Clock: db.Clock(), Identity: key,
		Peers: func() (ids []boxed.NodeID) {
			<-rs.ready
			for _, s := range rs.mesh.members[number].Nodes()[1:] {
				if s.State == boxed.NodeAlive {
					ids = append(ids, s.ID)
				}
			}
			return ids
		},
		Send: func(to boxed.NodeID, msg []byte) error {
			<-rs.ready
			return rs.mesh.members[number].Send(to, msg)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.docs.Run(ctx) // its error is always nil
	}()
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
	rs.list = append(rs.list, r)
	return r.docs, nil
}

func (rs *replicas) close() (err error) {
	for _, r := range rs.list {
		r.stop()
		err = errors.Join(err, r.store.Close())
	}
	return err
}

// put writes a document as its node does: an API key of usual length.
func (r *replica) put(key string, send bool) error {
	d := boxed.Document{
		Kind: "key", Key: key, Stamp: r.store.Clock().Next(time.Now()),
		Body: []byte(`{"id":"` + key + `","owner":"someone@example.org","role":"user","sha256":"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08","created_at":"2026-06-01T12:00:00Z"}`),
	}
	d.Sign(r.key)
	if !send {
		_, err := r.store.PutDocument(d)
		return err
	}
	_, err := r.docs.PutDocument(d)
	return err
}

// observeDocuments measures how long it takes until a changed document is on all
// of so many nodes, and what it costs.
func observeDocuments(ctx context.Context, nodes, trials int, log io.Writer) (rows []row, err error) {
	rs := &replicas{ready: make(chan struct{})}
	m, err := newMesh(nodes, transport.PaceLAN, rs.exchange)
	if err != nil {
		return nil, errors.Join(err, rs.close())
	}
	rs.mesh = m
	close(rs.ready)
	defer func() { err = errors.Join(err, m.close(), rs.close()) }()
	within, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if _, err := seen(within, m.began, 20*time.Millisecond, m.allSeeAll); err != nil {
		return nil, err
	}
	if err := sleep(ctx, time.Second); err != nil {
		return nil, err
	}
	var took, bytes []float64
	for trial := range trials {
		r := rs.list[trial%len(rs.list)]
		key, before, from := fmt.Sprintf("key-%d", trial), m.traffic.read(), time.Now()
		if err := r.put(key, true); err != nil {
			return nil, err
		}
		lasted, err := seen(within, from, time.Millisecond, func() bool { return rs.allHave(key) })
		if err != nil {
			return nil, fmt.Errorf("a document is not on all of %d nodes: %w", nodes, err)
		}
		took = append(took, 1000*lasted.Seconds())
		bytes = append(bytes, float64(m.traffic.read().since(before).streamBytes))
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
	fmt.Fprintf(log, "  %d nodes: a document is on all after %.1f ms (p99 %.1f)\n", nodes, quantile(took, 0.5), quantile(took, 0.99))
	return []row{
		spread(sysBoxed, named("document_to_all", "nodes", nodes), "ms", took),
		spread(sysBoxed, named("document_bytes", "nodes", nodes), "B", bytes),
	}, nil
}

func (rs *replicas) allHave(key string) bool {
	for _, r := range rs.list {
		if _, err := r.store.Document("key", key); err != nil {
			return false
		}
	}
	return true
}

// observeDigest measures what a node sends of so many documents in each
// comparison, and how long it takes to make and to compare it.
func observeDigest(documents int, log io.Writer) ([]row, error) {
	rs := &replicas{ready: make(chan struct{})}
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	if _, err := rs.exchange(boxed.NodeIDOf(key.Public().(ed25519.PublicKey)), key); err != nil {
		return nil, err
	}
	defer rs.close()
	r := rs.list[0]
	for i := range documents {
		if err := r.put(fmt.Sprintf("key-%06d", i), false); err != nil {
			return nil, err
		}
	}
	var made, compared []float64
	var digest []byte
	for range 5 {
		from := time.Now()
		digest = r.docs.State()
		made = append(made, 1000*time.Since(from).Seconds())
		from = time.Now()
		r.docs.Compare(digest)
		compared = append(compared, 1000*time.Since(from).Seconds())
	}
	fmt.Fprintf(log, "  %d documents: a digest of %d bytes, made in %.1f ms and compared in %.1f\n", documents, len(digest), quantile(made, 0.5), quantile(compared, 0.5))
	return []row{
		number(sysBoxed, named("digest_bytes", "documents", documents), "B", documents, float64(len(digest))),
		spread(sysBoxed, named("digest_make", "documents", documents), "ms", made),
		spread(sysBoxed, named("digest_compare", "documents", documents), "ms", compared),
	}, nil
}

// documentsPart is all that is measured of documents.
func documentsPart(ctx context.Context, quick bool, log io.Writer) (rows []row, err error) {
	sizes, digests, trials := []int{3, 10, 25}, []int{1000, 10_000}, 30
	if quick {
		sizes, digests, trials = []int{3, 10}, []int{1000}, 5
	}
	for _, n := range sizes {
		more, err := observeDocuments(ctx, n, trials, log)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	for _, n := range digests {
		more, err := observeDigest(n, log)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}
