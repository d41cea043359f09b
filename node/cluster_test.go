package node_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
)

// Case I11, decision 12: a node that was away for longer than tombstones are kept
// does not bring back what was deleted meanwhile, nor forget what was revoked.
func TestANodeThatWasAwayForLongBringsNothingBack(t *testing.T) {
	_, identity, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		away time.Duration
		left []string
	}{
		"a month":     {30 * 24 * time.Hour, []string{"kept", "revoked"}},
		"four months": {120 * 24 * time.Hour, []string{"revoked"}},
	} {
		t.Run(name, func(t *testing.T) {
			db, err := store.Open(store.Options{InMemory: true})
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			for key, revoked := range map[string]bool{"kept": false, "revoked": true} {
				d := boxed.Document{Kind: node.KeyKind, Key: key, Stamp: db.Clock().Next(time.Now()), Revoked: revoked, Body: []byte(`{}`)}
				d.Sign(identity)
				if _, err := db.PutDocument(d); err != nil {
					t.Fatal(err)
				}
			}
			state := node.ClusterState{ID: "c", Keys: []transport.ClusterKey{transport.NewClusterKey()}, Met: time.Now().Add(-tc.away)}
			_, self, err := ed25519.GenerateKey(rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			c, err := node.NewCluster(node.ClusterConfig{Store: db, Clock: db.Clock(), Identity: self, State: state})
			if err != nil {
				t.Fatal(err)
			}
			c.NoteMet(0) // alone it has the only copy
			if docs, err := db.Documents(node.KeyKind); err != nil || len(docs) != 2 {
				t.Fatalf("%d documents are left without company, %v", len(docs), err)
			}
			c.NoteMet(1)
			docs, err := db.Documents(node.KeyKind)
			if err != nil {
				t.Fatal(err)
			}
			var left []string
			for _, d := range docs {
				left = append(left, d.Key)
			}
			if len(left) != len(tc.left) || left[len(left)-1] != "revoked" {
				t.Errorf("left are %v, not %v", left, tc.left)
			}
		})
	}
}
