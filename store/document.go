package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// TombstoneAge is how long the tombstone of a deleted document is kept. A node
// that was away for longer takes a full copy before it serves.
const TombstoneAge = 90 * 24 * time.Hour

// documents serializes the writers of documents, and tells readers of changes.
type documents struct {
	clock boxed.Clock

	// writing is held from reading the old document to the end of writing the
	// new one: across I/O, which is what it is for.
	writing sync.Mutex

	mu      sync.Mutex
	changed chan struct{}
}

// storedDocument is a Document whose body keeps its bytes. As raw JSON it would
// be compacted and escaped on its way, and the signature no longer fit.
type storedDocument struct {
	boxed.Document
	Body []byte `json:"body,omitempty"`
}

func (d *documents) load(s *Store) error {
	d.changed = make(chan struct{})
	return s.scan([]byte{documentSpace}, func(item *badger.Item) error {
		doc, err := decodeDocument(item)
		if err == nil {
			d.clock.Observe(doc.Stamp, s.now())
		}
		return err
	})
}

// Clock stamps documents. It has seen the stamps of all that are stored, so it
// goes on from there even if the machine's clock was set back.
func (s *Store) Clock() *boxed.Clock { return &s.docs.clock }

// PutDocument takes d if it is signed by its author and supersedes what is
// there, and syncs it to the disk. It reports whether it took d: an older one is
// no error. Errors: invalid (form or signature), conflict with
// Detail["reason"] "clock_ahead" (the stamp lies more than
// [boxed.MaxClockSkew] ahead; nothing was stored), no_space.
//
// Whether the author may write documents of that kind is the caller's to check.
func (s *Store) PutDocument(d boxed.Document) (bool, error) {
	switch {
	case d.Kind == "" || len(d.Kind) > 64 || !plain(d.Kind) || d.Key == "" || len(d.Key) > 256 || !plain(d.Key):
		return false, boxed.Errorf(boxed.CodeInvalid, "a document needs a kind of at most 64 bytes and a key of at most 256, without control characters")
	case !d.Verify():
		return false, boxed.Errorf(boxed.CodeInvalid, "the signature of %s %q is not its author's, or its body is over %d bytes", d.Kind, d.Key, boxed.MaxDocument)
	case len(d.Body) > 0 && !json.Valid(d.Body):
		return false, boxed.Errorf(boxed.CodeInvalid, "the body of %s %q is not JSON", d.Kind, d.Key)
	}
	s.docs.writing.Lock()
	defer s.docs.writing.Unlock()
	if !s.docs.clock.Observe(d.Stamp, s.now()) {
		return false, boxed.Errorf(boxed.CodeConflict, "%s %q is stamped more than %v ahead of this node's clock; set the clocks", d.Kind, d.Key, boxed.MaxClockSkew).
			With("reason", "clock_ahead")
	}
	old, err := s.Document(d.Kind, d.Key)
	if err != nil && boxed.CodeOf(err) != boxed.CodeNotFound {
		return false, err
	}
	if !s.replaces(d, old) {
		return false, nil
	}
	if err := s.storeDocument(d); err != nil {
		return false, err
	}
	return true, nil
}

// replaces is Supersedes, but that a document which lies ahead of this node's clock
// gives way: it was taken while that was wrong. It never gives back what was
// revoked.
func (s *Store) replaces(d boxed.Document, old *boxed.Document) bool {
	if old != nil && s.Ahead(old) && !s.Ahead(&d) {
		return d.Revoked || !old.Revoked
	}
	return d.Supersedes(old)
}

// Ahead reports whether a document is stamped more than [boxed.MaxClockSkew] ahead
// of this node's clock.
func (s *Store) Ahead(d *boxed.Document) bool {
	return d.Stamp.WallMS > s.now().Add(boxed.MaxClockSkew).UnixMilli()
}

// ReplaceDocument puts d in the place of one of the same author that is stamped
// ahead of this node's clock, whatever their order: that one was written while the
// clock was wrong, and nobody else took it. Errors: conflict (there is none such).
func (s *Store) ReplaceDocument(d boxed.Document) error {
	s.docs.writing.Lock()
	defer s.docs.writing.Unlock()
	old, err := s.Document(d.Kind, d.Key)
	if err != nil {
		return err
	}
	if !d.Verify() || !old.Author.Equal(d.Author) || !s.Ahead(old) {
		return boxed.Errorf(boxed.CodeConflict, "%s %q is not ahead of this node's clock", d.Kind, d.Key)
	}
	return s.storeDocument(d)
}

// storeDocument is called with docs.writing held.
func (s *Store) storeDocument(d boxed.Document) error {
	err := s.Atomically(func(tx *Tx) error {
		return tx.put("document", documentKey(d.Kind, d.Key), storedDocument{d, d.Body})
	})
	if err != nil {
		return err
	}
	if err := s.Sync(); err != nil {
		return err
	}
	s.docs.mu.Lock()
	defer s.docs.mu.Unlock()
	close(s.docs.changed)
	s.docs.changed = make(chan struct{})
	return nil
}

// Document reads one document, which may be a tombstone or revoked. Errors:
// not_found.
func (s *Store) Document(kind, key string) (*boxed.Document, error) {
	var d boxed.Document
	err := s.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get(documentKey(kind, key))
		if err == nil {
			d, err = decodeDocument(item)
		}
		return err
	})
	if errors.Is(err, badger.ErrKeyNotFound) {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no %s %q", kind, key)
	} else if err != nil {
		return nil, wrap(fmt.Sprintf("read %s %q", kind, key), err)
	}
	return &d, nil
}

// Documents reads all of one kind in the order of their keys, tombstones and
// revoked ones too.
func (s *Store) Documents(kind string) ([]boxed.Document, error) {
	all := []boxed.Document{}
	err := s.scan(documentKey(kind, ""), func(item *badger.Item) error {
		d, err := decodeDocument(item)
		all = append(all, d)
		return err
	})
	return all, err
}

// AllDocuments gives every document of every kind to visit, until it fails.
func (s *Store) AllDocuments(visit func(boxed.Document) error) error {
	return s.scan([]byte{documentSpace}, func(item *badger.Item) error {
		d, err := decodeDocument(item)
		if err != nil {
			return err
		}
		return visit(d)
	})
}

// DropDocuments forgets the documents that keep does not want. It is for a node
// that was away for longer than tombstones are kept: what it holds may have been
// deleted elsewhere, and nobody could tell it.
func (s *Store) DropDocuments(keep func(boxed.Document) bool) error {
	s.docs.writing.Lock()
	defer s.docs.writing.Unlock()
	var drop [][]byte
	err := s.scan([]byte{documentSpace}, func(item *badger.Item) error {
		d, err := decodeDocument(item)
		if err == nil && !keep(d) {
			drop = append(drop, item.KeyCopy(nil))
		}
		return err
	})
	for _, key := range drop {
		if err == nil {
			err = s.update(false, func(txn *badger.Txn) error { return txn.Delete(key) })
		}
	}
	return err
}

// DocumentsChanged returns a channel that is closed when a document is stored
// after this call.
func (s *Store) DocumentsChanged() <-chan struct{} {
	s.docs.mu.Lock()
	defer s.docs.mu.Unlock()
	return s.docs.changed
}

// prune drops tombstones past their age. A revocation is never dropped: it must
// beat whatever a node that comes back after years still holds.
func (d *documents) prune(s *Store) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	before := s.now().Add(-TombstoneAge).UnixMilli()
	return s.scan([]byte{documentSpace}, func(item *badger.Item) error {
		doc, err := decodeDocument(item)
		if err != nil || !doc.Tombstone || doc.Revoked || doc.Stamp.WallMS >= before {
			return err
		}
		key := item.KeyCopy(nil)
		return s.update(false, func(txn *badger.Txn) error { return txn.Delete(key) })
	})
}

func documentKey(kind, key string) []byte {
	return append([]byte{documentSpace}, kind+"\x00"+key...)
}

func decodeDocument(item *badger.Item) (boxed.Document, error) {
	var d storedDocument
	err := item.Value(func(b []byte) error { return json.Unmarshal(b, &d) })
	if err != nil {
		return boxed.Document{}, fmt.Errorf("decode the document under %q: %w", item.Key(), err)
	}
	d.Document.Body = d.Body
	return d.Document, nil
}

// plain reports whether s has no control character; a 0 separates keys.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}
