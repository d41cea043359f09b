package store

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// The first byte of a key in Badger says what it is.
const (
	tableSpace    = 't' // tables: name, 0, key
	documentSpace = 'd' // documents: kind, 0, key
	eventSpace    = 'e' // events: their number, 8 bytes big-endian
	metaSpace     = 'm' // of the store itself: name
)

// maxKey bounds the keys of records, in bytes. Badger takes 64 KiB.
const maxKey = 1 << 10

// Table holds records of one type under keys, as JSON. Fields that T gains
// later are zero in old records; one that changes its meaning needs a new name,
// or a migration (see [Format]). A Table is a name, and costs nothing.
type Table[T any] struct {
	s    *Store
	name string
}

// NewTable is the table of that name, which is part of the format. Two types
// under one name are a bug that shows as a decoding error.
func NewTable[T any](s *Store, name string) *Table[T] { return &Table[T]{s: s, name: name} }

// Put writes v under key, replacing what is there. Errors: no_space, too_large.
func (t *Table[T]) Put(key string, v T) error {
	return t.s.Atomically(func(tx *Tx) error { return t.PutIn(tx, key, v) })
}

// Get reads the record under key. Errors: not_found.
func (t *Table[T]) Get(key string) (T, error) {
	var v T
	err := t.s.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get(t.key(key))
		if err != nil {
			return err
		}
		return item.Value(func(b []byte) error { return json.Unmarshal(b, &v) })
	})
	if errors.Is(err, badger.ErrKeyNotFound) {
		return v, boxed.Errorf(boxed.CodeNotFound, "there is no %s %q", t.name, key)
	}
	return v, wrap(fmt.Sprintf("read %s %q", t.name, key), err)
}

// Delete removes the record under key, if there is one.
func (t *Table[T]) Delete(key string) error {
	err := t.s.update(false, func(txn *badger.Txn) error { return txn.Delete(t.key(key)) })
	return wrap(fmt.Sprintf("delete %s %q", t.name, key), err)
}

// All is every record in the order of the keys.
func (t *Table[T]) All() ([]T, error) {
	all := []T{}
	err := t.Each(func(_ string, v T) error {
		all = append(all, v)
		return nil
	})
	return all, err
}

// Each calls fn for every record in the order of the keys, as they were when it
// began, until fn returns an error, which it returns. fn may write to the store.
func (t *Table[T]) Each(fn func(key string, v T) error) error {
	prefix := t.key("")
	return t.s.scan(prefix, func(item *badger.Item) error {
		key := string(item.Key()[len(prefix):])
		var v T
		if err := item.Value(func(b []byte) error { return json.Unmarshal(b, &v) }); err != nil {
			return wrap(fmt.Sprintf("read %s %q", t.name, key), err)
		}
		return fn(key, v)
	})
}

// PutIn is Put as a part of tx.
func (t *Table[T]) PutIn(tx *Tx, key string, v T) error {
	return tx.put(t.name, t.key(key), v)
}

// DeleteIn is Delete as a part of tx.
func (t *Table[T]) DeleteIn(tx *Tx, key string) error {
	return wrap("delete "+t.name, tx.txn.Delete(t.key(key)))
}

func (t *Table[T]) key(key string) []byte {
	return append(append([]byte{tableSpace}, t.name...), "\x00"+key...)
}

// Tx is a group of writes that happen all or not at all.
type Tx struct{ txn *badger.Txn }

// Atomically runs fn and then does its writes, also across tables, unless fn
// fails. They are there after a kill of the daemon, or none of them is. Writes
// of one Tx are limited to about 1 MB in all; more is too_large.
func (s *Store) Atomically(fn func(*Tx) error) error {
	err := s.update(true, func(txn *badger.Txn) error { return fn(&Tx{txn}) })
	if errors.Is(err, badger.ErrTxnTooBig) {
		return boxed.Errorf(boxed.CodeTooLarge, "too much for one transaction: %w", err)
	}
	return wrap("write", err)
}

func (tx *Tx) put(name string, key []byte, v any) error {
	if len(key) > maxKey {
		return boxed.Errorf(boxed.CodeTooLarge, "the key of a %s is longer than %d bytes", name, maxKey)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if len(b) > MaxRecord {
		return boxed.Errorf(boxed.CodeTooLarge, "a %s of %d bytes is over the bound of %d", name, len(b), MaxRecord)
	}
	return tx.txn.Set(key, b)
}

// scan calls fn for each item under prefix in order.
func (s *Store) scan(prefix []byte, fn func(*badger.Item) error) error {
	return wrap("scan", s.db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix})
		defer it.Close()
		for it.Seek(prefix); it.Valid(); it.Next() {
			if err := fn(it.Item()); err != nil {
				return err
			}
		}
		return nil
	}))
}
