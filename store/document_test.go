package store_test

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
)

func author(seed byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed([]byte(strings.Repeat(string(rune('a'+seed%26)), 32)))
}

func document(key string, at time.Time, body string) boxed.Document {
	d := boxed.Document{Kind: "key", Key: key, Stamp: boxed.Stamp{WallMS: at.UnixMilli()}, Body: json.RawMessage(body)}
	d.Sign(author(0))
	return d
}

func TestADocumentKeepsEveryByteOfItsBody(t *testing.T) {
	s := openStore(t, store.Options{Dir: t.TempDir()})
	d := document("k", time.Now(), `{ "html" : "<b>&",  "n":1.50 }`) // encoding/json would rewrite each of these
	if took, err := s.PutDocument(d); !took || err != nil {
		t.Fatal(took, err)
	}
	got, err := s.Document("key", "k")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&d, got); diff != "" {
		t.Error(diff)
	}
	if !got.Verify() {
		t.Error("the signature no longer fits")
	}
	all, err := s.Documents("key")
	if err != nil || len(all) != 1 {
		t.Errorf("%d documents, %v", len(all), err)
	}
	if all, err := s.Documents("ke"); err != nil || len(all) != 0 {
		t.Errorf("another kind has %d documents, %v", len(all), err)
	}
}

func TestDocumentsThatMustNotBeTakenAreNot(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := openStore(t, store.Options{InMemory: true, Now: func() time.Time { return now }})
	put := func(d boxed.Document) (bool, error) { return s.PutDocument(d) }
	forged := document("k", now, `{}`)
	forged.Body = json.RawMessage(`{"role":"admin"}`)
	odd := boxed.Document{Kind: "key", Key: "a\x00b", Body: json.RawMessage(`{}`)}
	odd.Sign(author(0))
	big := document("k", now, `"`+strings.Repeat("x", boxed.MaxDocument)+`"`)
	for name, tc := range map[string]struct {
		doc  boxed.Document
		code boxed.Code
	}{
		"forged":        {forged, boxed.CodeInvalid},
		"unsigned":      {boxed.Document{Kind: "key", Key: "k"}, boxed.CodeInvalid},
		"separator":     {odd, boxed.CodeInvalid},
		"not JSON":      {document("k", now, `{`), boxed.CodeInvalid},
		"too large":     {big, boxed.CodeInvalid},
		"from tomorrow": {document("k", now.Add(61*time.Second), `{}`), boxed.CodeConflict},
	} {
		if took, err := put(tc.doc); took || !errors.Is(err, tc.code) {
			t.Errorf("%s: %v, %v; want %s", name, took, err, tc.code)
		}
	}
	if all, _ := s.Documents("key"); len(all) != 0 {
		t.Errorf("%d documents were taken", len(all))
	}
	if took, err := put(document("k", now.Add(59*time.Second), `{}`)); !took || err != nil {
		t.Errorf("within the skew: %v, %v", took, err)
	}
	if next := s.Clock().Next(now); !(boxed.Stamp{WallMS: now.Add(59 * time.Second).UnixMilli()}).Before(next) {
		t.Errorf("the clock did not observe the document: %+v", next)
	}
	if took, err := put(document("k", now, `{}`)); took || err != nil {
		t.Errorf("an older one: %v, %v", took, err)
	}
}

func TestTombstonesGoAfterNinetyDaysAndRevocationsNever(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := openStore(t, store.Options{InMemory: true, Now: func() time.Time { return now }})
	for _, d := range []boxed.Document{
		{Key: "living"}, {Key: "deleted", Tombstone: true}, {Key: "revoked", Revoked: true}, {Key: "both", Revoked: true, Tombstone: true},
	} {
		d.Kind, d.Stamp = "key", s.Clock().Next(now)
		d.Sign(author(0))
		if _, err := s.PutDocument(d); err != nil {
			t.Fatal(err)
		}
	}
	keys := func() (keys []string) {
		if err := s.Prune(); err != nil {
			t.Fatal(err)
		}
		all, err := s.Documents("key")
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			keys = append(keys, d.Key)
		}
		return keys
	}
	now = now.Add(89 * 24 * time.Hour)
	if diff := cmp.Diff([]string{"both", "deleted", "living", "revoked"}, keys()); diff != "" {
		t.Error(diff)
	}
	now = now.Add(2 * 24 * time.Hour)
	if diff := cmp.Diff([]string{"both", "living", "revoked"}, keys()); diff != "" {
		t.Error(diff)
	}
}

func TestTheClockGoesOnAfterAReopeningWithAClockSetBack(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	s, err := store.Open(store.Options{Dir: dir, Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	d := document("k", now, `{}`)
	if _, err := s.PutDocument(d); err != nil {
		t.Fatal(err)
	}
	s.Close()
	now = now.Add(-30 * time.Second)
	s = openStore(t, store.Options{Dir: dir, Now: func() time.Time { return now }})
	if next := s.Clock().Next(now); !d.Stamp.Before(next) {
		t.Errorf("%+v is not after %+v", next, d.Stamp)
	}
}

func TestThoseWhoWaitHearOfADocument(t *testing.T) {
	s := inMemory(t)
	changed := s.DocumentsChanged()
	if _, err := s.PutDocument(document("k", time.Now(), `{}`)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("nobody was told")
	}
}

// Whatever the order in which documents arrive, nodes end with the same one,
// and a revocation is never undone.
func TestDocumentsConvergeInAnyOrder(t *testing.T) {
	s, round := inMemory(t), 0
	final := func(t *rapid.T, order []boxed.Document) *boxed.Document {
		round++
		key, revoked := fmt.Sprint(round), false
		for _, d := range order {
			signer := d.Author[0]
			d.Key = key
			d.Sign(author(signer))
			if _, err := s.PutDocument(d); err != nil {
				t.Fatal(err)
			}
			revoked = revoked || d.Revoked
			if got, err := s.Document("key", key); err != nil || got.Revoked != revoked {
				t.Fatalf("revoked is %v, want %v (%v)", got.Revoked, revoked, err)
			}
		}
		d, err := s.Document("key", key)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	rapid.Check(t, func(t *rapid.T) {
		now := time.Now().UnixMilli()
		docs := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) boxed.Document {
			return boxed.Document{
				Kind:      "key",
				Stamp:     boxed.Stamp{WallMS: now - rapid.Int64Range(0, 2).Draw(t, "age"), Counter: rapid.Uint32Range(0, 1).Draw(t, "counter")},
				Revoked:   rapid.Bool().Draw(t, "revoked"),
				Tombstone: rapid.Bool().Draw(t, "tombstone"),
				Author:    []byte{rapid.ByteRange(0, 2).Draw(t, "author")}, // which one signs
			}
		}), 1, 6).Draw(t, "documents")
		one, other := final(t, docs), final(t, rapid.Permutation(docs).Draw(t, "order"))
		if one.Stamp != other.Stamp || string(one.Author) != string(other.Author) || one.Revoked != other.Revoked {
			t.Fatalf("%+v\n%+v", one, other)
		}
	})
}
