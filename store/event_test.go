package store_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
)

func event(i int, at time.Time) boxed.Event {
	return boxed.Event{Type: boxed.EventExec, At: at, Message: fmt.Sprint(i)}
}

// readAll pages through the log from a cursor.
func readAll(t *testing.T, s *store.Store, from boxed.Cursor, page int) (messages []string, last boxed.Cursor) {
	t.Helper()
	for last = from; ; {
		events, err := s.EventsAfter(last, page)
		if err != nil {
			t.Fatal(err)
		}
		if len(events) == 0 {
			return messages, last
		}
		for _, e := range events {
			messages = append(messages, e.Message)
		}
		last = events[len(events)-1].Cursor
	}
}

func wantRun(t *testing.T, got []string, from, to int) {
	t.Helper()
	if len(got) != to-from {
		t.Fatalf("got %d events, want %d", len(got), to-from)
	}
	for i, m := range got {
		if m != fmt.Sprint(from+i) {
			t.Fatalf("event %d is %q, want %d", i, m, from+i)
		}
	}
}

func TestEventsAreReadInOrderFromMemoryAndDisk(t *testing.T) {
	dir := t.TempDir()
	s, err := store.Open(store.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	const n = 10_000 // more than what is kept in memory
	var middle boxed.Cursor
	for i := range n {
		if e := s.AppendEvent(event(i, time.Now())); i == 1234 {
			middle = e.Cursor
		}
	}
	got, last := readAll(t, s, boxed.CursorOldest, 333)
	wantRun(t, got, 0, n)
	if last != s.EventsNow() {
		t.Errorf("the last cursor is %s, now is %s", last, s.EventsNow())
	}
	got, _ = readAll(t, s, middle, 0)
	wantRun(t, got, 1235, n)
	if events, err := s.EventsAfter("", 0); err != nil || len(events) != 0 {
		t.Errorf("after now: %d events, %v", len(events), err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = openStore(t, store.Options{Dir: dir})
	s.AppendEvent(event(n, time.Now()))
	got, _ = readAll(t, s, middle, 0)
	wantRun(t, got, 1235, n+1)
}

func TestForeignAndOldCursorsAreExpired(t *testing.T) {
	now := time.Now()
	s := openStore(t, store.Options{InMemory: true, MinEvents: 100, Now: func() time.Time { return now }})
	var cursors []boxed.Cursor
	for i := range 500 {
		cursors = append(cursors, s.AppendEvent(event(i, now)).Cursor)
	}
	now = now.Add(23 * time.Hour)
	waitWritten(t, s)
	if err := s.Prune(); err != nil {
		t.Fatal(err)
	}
	got, _ := readAll(t, s, boxed.CursorOldest, 0)
	wantRun(t, got, 0, 500) // younger than 24 h

	now = now.Add(2 * time.Hour)
	for i := range 50 {
		s.AppendEvent(event(500+i, now))
	}
	waitWritten(t, s)
	if err := s.Prune(); err != nil {
		t.Fatal(err)
	}
	got, _ = readAll(t, s, boxed.CursorOldest, 0)
	wantRun(t, got, 450, 550) // the newest 100

	other := inMemory(t)
	for _, bad := range []boxed.Cursor{cursors[0], cursors[448], other.AppendEvent(boxed.Event{}).Cursor, "junk", "a.b.c", boxed.Cursor(string(cursors[0][:9]) + "zzzz")} {
		if _, err := s.EventsAfter(bad, 0); !errors.Is(err, boxed.CodeCursorExpired) {
			t.Errorf("cursor %q: got %v, want cursor_expired", bad, err)
		}
	}
	got, _ = readAll(t, s, cursors[449], 0) // missed nothing
	wantRun(t, got, 450, 550)
}

func TestTheLogHasAHardBound(t *testing.T) {
	s := openStore(t, store.Options{InMemory: true, MinEvents: 100, MaxEvents: 1000})
	for i := range 3000 {
		s.AppendEvent(event(i, time.Now()))
	}
	waitWritten(t, s)
	if err := s.Prune(); err != nil {
		t.Fatal(err)
	}
	got, _ := readAll(t, s, boxed.CursorOldest, 0)
	wantRun(t, got, 2000, 3000)
}

// waitWritten waits until what was appended is in Badger.
func waitWritten(t *testing.T, s *store.Store) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !s.EventsWritten() {
		if time.Now().After(deadline) {
			t.Fatal("the events were not written")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestFollowersMissNothing(t *testing.T) {
	s := openStore(t, store.Options{Dir: t.TempDir()})
	const writers, each = 4, 5000
	now := s.EventsNow()
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for i := range each {
				s.AppendEvent(event(i, time.Now()))
			}
		})
	}
	seen := map[boxed.Cursor]bool{}
	deadline := time.After(30 * time.Second)
	for cursor := now; len(seen) < writers*each; {
		changed := s.EventsChanged()
		events, err := s.EventsAfter(cursor, 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			seen[e.Cursor] = true
			cursor = e.Cursor
		}
		if len(events) == 0 {
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("saw %d events", len(seen))
			}
		}
	}
	wg.Wait()
}

func BenchmarkAppendEvent(b *testing.B) {
	s, err := store.Open(store.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	status := &boxed.ExitStatus{Reason: boxed.ReasonExited}
	e := boxed.Event{Type: boxed.EventExecEnd, At: time.Now(), Node: "aaaaaaaaaaaaaaaa", Sandbox: "aaaaaaaaaa-aaaaaaaaaaaaaaaa", Owner: "alice", Exec: "aaaaaaaaaaaa", Status: status}
	b.ReportAllocs()
	for b.Loop() {
		s.AppendEvent(e)
	}
}

func BenchmarkPut(b *testing.B) {
	s, err := store.Open(store.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	table := store.NewTable[boxed.Sandbox](s, "sandbox")
	v := boxed.Sandbox{ID: "aaaaaaaaaa-aaaaaaaaaaaaaaaa", Owner: "alice", Labels: map[string]string{"a": "b"}, Image: "boxed/default:latest", CreatedAt: time.Now()}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if i++; i > 1000 {
			i = 0
		}
		if err := table.Put(fmt.Sprint(i), v); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSync(b *testing.B) {
	s, err := store.Open(store.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	table := store.NewTable[record](s, "box")
	for b.Loop() {
		if err := errors.Join(table.Put("x", record{Name: "x"}), s.Sync()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	fill, err := store.Open(store.Options{Dir: dir})
	if err != nil {
		b.Fatal(err)
	}
	for i := range 10_000 {
		fill.AppendEvent(event(i, time.Now()))
	}
	if err := fill.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s, err := store.Open(store.Options{Dir: dir})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.Close()
		b.StartTimer()
	}
}
