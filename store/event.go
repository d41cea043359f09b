package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// Sizes of the log of events.
const (
	eventTail    = 2048                  // newest events kept in memory, at least; at most twice as many (about 2 MB)
	eventPending = eventTail             // of them not written yet; an append waits while there are more
	eventFlush   = 20 * time.Millisecond // how long events are gathered for one transaction
	eventBatch   = 1024                  // events of one transaction, at about 250 bytes each
	eventPage    = 1000                  // EventsAfter's limit for 0
)

// eventLog numbers events, keeps the newest in memory for the readers that
// follow, and writes them behind the callers' backs, in batches: an append is a
// few microseconds, so that it may stand in the path of an exec.
//
// A kill of the daemon loses what was not written yet. Their numbers are not
// given again: a log goes on eventPending beyond the last that was written.
type eventLog struct {
	s     *Store
	epoch string // random; other stores' cursors have another
	keep  Options
	wake  chan struct{} // there is something to write
	done  chan struct{} // the writer has returned

	mu      sync.Mutex
	wrote   sync.Cond     // written moved, or closed
	next    uint64        // number of the next event
	first   uint64        // number of the oldest that is kept
	written uint64        // all before it were handed to Badger
	tail    []boxed.Event // the newest; their numbers run up to next without a gap
	changed chan struct{} // nil when nobody waits
	closed  bool
}

func openEvents(s *Store, o Options) (*eventLog, error) {
	l := &eventLog{s: s, keep: o, wake: make(chan struct{}, 1), done: make(chan struct{}), next: 1, first: 1}
	l.wrote.L = &l.mu
	oldest, newest, err := l.edges()
	if err != nil {
		return nil, err
	}
	if newest > 0 {
		l.first, l.next = oldest, newest+1+eventPending
	}
	l.written = l.next
	if err := l.loadEpoch(newest == 0); err != nil {
		return nil, err
	}
	go l.write()
	return l, nil
}

// loadEpoch reads the epoch, or makes one if there is none or a fresh one is
// due: where nothing is stored, nothing says which numbers were given before.
func (l *eventLog) loadEpoch(fresh bool) error {
	key := append([]byte{metaSpace}, "event-epoch"...)
	return l.s.db.Update(func(txn *badger.Txn) error {
		item, err := txn.Get(key)
		if errors.Is(err, badger.ErrKeyNotFound) || (err == nil && fresh) {
			l.epoch = boxed.NewToken(8)
			return txn.Set(key, []byte(l.epoch))
		} else if err != nil {
			return err
		}
		b, err := item.ValueCopy(nil)
		l.epoch = string(b)
		return err
	})
}

// AppendEvent gives e its cursor and puts it in the log. It does not fail: an
// event that cannot be written, because the disk is full, is logged as lost and
// is still there for those who follow.
func (s *Store) AppendEvent(e boxed.Event) boxed.Event {
	l := s.events
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.next-l.written >= eventPending && !l.closed {
		l.wrote.Wait()
	}
	e.Cursor = l.cursor(l.next)
	if len(l.tail) >= 2*eventTail { // the older half at once, not one by one
		l.tail = append(make([]boxed.Event, 0, 2*eventTail), l.tail[eventTail:]...)
	}
	l.tail = append(l.tail, e)
	l.next++
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
	if !l.closed {
		l.wakeLocked()
	}
	return e
}

func (l *eventLog) wakeLocked() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// EventsNow is the cursor of the newest event: what comes after it is new.
func (s *Store) EventsNow() boxed.Cursor {
	l := s.events
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cursor(l.next - 1)
}

// EventsChanged returns a channel that is closed when an event is appended
// after this call. To follow: take the channel, read, and wait on it only if
// there was nothing to read.
func (s *Store) EventsChanged() <-chan struct{} {
	l := s.events
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed
}

// EventsAfter is up to limit (0: 1000) events after the cursor, oldest first.
// Fewer than limit does not say that there are no more; none does. "" is now,
// so it returns none: follow from [Store.EventsNow]. Errors: cursor_expired, for
// a cursor whose next event is no longer kept, or that another node or an
// earlier data directory made.
func (s *Store) EventsAfter(after boxed.Cursor, limit int) ([]boxed.Event, error) {
	l := s.events
	if limit <= 0 {
		limit = eventPage
	}
	l.mu.Lock()
	from, err := l.parseLocked(after)
	l.mu.Unlock()
	var old []boxed.Event
	for err == nil {
		l.mu.Lock()
		written := l.written
		recent, ok := l.tailLocked(from, limit)
		l.mu.Unlock()
		if ok {
			return recent, nil
		}
		if old, err = l.read(from, written, limit); len(old) > 0 {
			break
		}
		from = written // there was only a gap
	}
	if err == nil { // what was asked for may have been pruned while it was read
		l.mu.Lock()
		_, err = l.parseLocked(after)
		l.mu.Unlock()
	}
	if err != nil {
		return nil, err
	}
	return old, nil
}

// tailLocked is up to limit events from number from on, if they are in memory.
func (l *eventLog) tailLocked(from uint64, limit int) ([]boxed.Event, bool) {
	start := l.next - uint64(len(l.tail))
	if from < start {
		return nil, false
	}
	i := min(len(l.tail), int(from-start))
	return append([]boxed.Event{}, l.tail[i:min(len(l.tail), i+limit)]...), true
}

// read loads written events with numbers in [from, before).
func (l *eventLog) read(from, before uint64, limit int) (events []boxed.Event, err error) {
	err = l.iterate(from, func(n uint64, item *badger.Item) (bool, error) {
		if n >= before {
			return false, nil
		}
		var e boxed.Event
		if err := item.Value(func(b []byte) error { return json.Unmarshal(b, &e) }); err != nil {
			return false, fmt.Errorf("decode event %d: %w", n, err)
		}
		e.Cursor = l.cursor(n)
		events = append(events, e)
		return len(events) < limit, nil
	})
	return events, wrap("read events", err)
}

// cursor is opaque to callers: the epoch, and the event's number.
func (l *eventLog) cursor(n uint64) boxed.Cursor {
	return boxed.Cursor(l.epoch + "." + strconv.FormatUint(n, 36))
}

// parseLocked is the number of the first event after c.
func (l *eventLog) parseLocked(c boxed.Cursor) (uint64, error) {
	switch c {
	case "":
		return l.next, nil
	case boxed.CursorOldest:
		return l.first, nil
	}
	epoch, text, _ := strings.Cut(string(c), ".")
	n, err := strconv.ParseUint(text, 36, 64)
	if err != nil || epoch != l.epoch || n+1 < l.first || n >= l.next {
		return 0, boxed.Errorf(boxed.CodeCursorExpired, "events after this cursor are no longer kept; start again from %q, or list the sandboxes and follow from now", boxed.CursorOldest)
	}
	return n + 1, nil
}

// write hands pending events to Badger until the log is closed.
func (l *eventLog) write() {
	defer close(l.done)
	var complained time.Time
	for range l.wake {
		for {
			l.mu.Lock()
			from := l.written
			batch, _ := l.tailLocked(from, eventBatch) // what is pending is in the tail
			l.mu.Unlock()
			if len(batch) == 0 {
				break
			}
			err := l.put(from, batch)
			if err != nil && time.Since(complained) > time.Minute {
				complained = time.Now()
				l.s.log.Error("events lost", "err", err, "count", len(batch))
			}
			l.mu.Lock()
			l.written += uint64(len(batch)) // numbers have no gap while a log is open
			l.wrote.Broadcast()
			l.mu.Unlock()
		}
		time.Sleep(eventFlush) // a lone event is written at once, a stream of them in batches
	}
}

func (l *eventLog) put(from uint64, batch []boxed.Event) error {
	err := l.s.update(true, func(txn *badger.Txn) error {
		for i, e := range batch {
			e.Cursor = "" // it is in the key
			b, err := json.Marshal(e)
			if err != nil {
				return err
			}
			if err := txn.Set(eventKey(from+uint64(i)), b); err != nil {
				return err
			}
		}
		return nil
	})
	if half := len(batch) / 2; half > 0 && errors.Is(err, badger.ErrTxnTooBig) {
		return errors.Join(l.put(from, batch[:half]), l.put(from+uint64(half), batch[half:]))
	}
	return err
}

// close writes what is pending. Appends after it are lost.
func (l *eventLog) close() {
	l.mu.Lock()
	l.closed = true
	l.wrote.Broadcast()
	l.wakeLocked() // the last round may have begun before the last append
	close(l.wake)
	l.mu.Unlock()
	<-l.done
}
