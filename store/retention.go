package store

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"sort"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// pruneBatch is how many events one transaction deletes; it holds no lock.
const pruneBatch = 5000

// prune deletes the events that need not be kept.
func (l *eventLog) prune() error {
	l.mu.Lock()
	first, next := l.first, l.next
	l.mu.Unlock()
	cut, err := l.firstKept(first, next)
	if err != nil || cut <= first {
		return wrap("prune events", err)
	}
	// Readers are told before the events go, so none of them reads a gap.
	l.mu.Lock()
	l.first = cut
	l.mu.Unlock()
	for from := first; from < cut; {
		var keys [][]byte
		err := l.iterate(from, func(n uint64, item *badger.Item) (bool, error) {
			if n < cut {
				keys = append(keys, item.KeyCopy(nil))
			}
			return n < cut && len(keys) < pruneBatch, nil
		})
		if err != nil {
			return wrap("prune events", err)
		}
		if len(keys) == 0 {
			return nil
		}
		if err := l.delete(keys); err != nil {
			return wrap("prune events", err)
		}
		from = numberOf(keys[len(keys)-1]) + 1
	}
	return nil
}

func (l *eventLog) delete(keys [][]byte) error {
	err := l.s.update(false, func(txn *badger.Txn) error {
		for _, key := range keys {
			if err := txn.Delete(key); err != nil {
				return err
			}
		}
		return nil
	})
	if half := len(keys) / 2; half > 0 && errors.Is(err, badger.ErrTxnTooBig) {
		return errors.Join(l.delete(keys[:half]), l.delete(keys[half:]))
	}
	return err
}

// firstKept is the number from which on events stay.
func (l *eventLog) firstKept(first, next uint64) (uint64, error) {
	if next-first <= uint64(l.keep.MinEvents) {
		return first, nil
	}
	cutoff := l.s.now().Add(-l.keep.MinEventAge)
	old := func(n uint64) bool {
		at, ok := l.timeAt(n)
		return ok && at.Before(cutoff)
	}
	over := next-first > uint64(l.keep.MaxEvents)
	if !over && !old(first) {
		return first, nil
	}
	// Numbers have a gap for each kill of the daemon, so the newest MinEvents
	// are counted.
	byCount, err := l.newest(l.keep.MinEvents)
	if err != nil || byCount <= first {
		return first, err
	}
	// Events are in the order of their times, near enough.
	cut := first + uint64(sort.Search(int(byCount-first), func(i int) bool { return !old(first + uint64(i)) }))
	if over {
		cut = max(cut, next-uint64(l.keep.MaxEvents))
	}
	return min(cut, byCount), nil
}

// newest is the number of the oldest of the count newest events, 0 if there are
// fewer.
func (l *eventLog) newest(count int) (number uint64, err error) {
	err = l.s.db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{eventSpace}, Reverse: true})
		defer it.Close()
		for it.Seek([]byte{eventSpace + 1}); it.Valid(); it.Next() {
			if count--; count == 0 {
				number = numberOf(it.Item().Key())
				return nil
			}
		}
		return nil
	})
	return number, err
}

// edges are the numbers of the oldest and the newest event, 0 for none.
func (l *eventLog) edges() (oldest, newest uint64, err error) {
	if newest, err = l.newest(1); err != nil || newest == 0 {
		return 0, 0, err
	}
	err = l.iterate(0, func(n uint64, _ *badger.Item) (bool, error) {
		oldest = n
		return false, nil
	})
	return oldest, newest, err
}

// timeAt is the time of the first event at or after number n.
func (l *eventLog) timeAt(n uint64) (at time.Time, ok bool) {
	err := l.iterate(n, func(_ uint64, item *badger.Item) (bool, error) {
		var e boxed.Event
		err := item.Value(func(b []byte) error { return json.Unmarshal(b, &e) })
		at, ok = e.At, err == nil
		return false, err
	})
	return at, ok && err == nil
}

// iterate calls fn for the stored events from number from on, until it says
// false or fails.
func (l *eventLog) iterate(from uint64, fn func(n uint64, item *badger.Item) (bool, error)) error {
	return l.s.db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{eventSpace}})
		defer it.Close()
		for it.Seek(eventKey(from)); it.Valid(); it.Next() {
			more, err := fn(numberOf(it.Item().Key()), it.Item())
			if !more || err != nil {
				return err
			}
		}
		return nil
	})
}

func eventKey(n uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{eventSpace}, n)
}

func numberOf(key []byte) uint64 { return binary.BigEndian.Uint64(key[1:]) }
