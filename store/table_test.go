package store_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type record struct {
	Name  string    `json:"name"`
	Count int       `json:"count,omitempty"`
	At    time.Time `json:"at,omitzero"`
}

func openStore(t *testing.T, o store.Options) *store.Store {
	t.Helper()
	s, err := store.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func inMemory(t *testing.T) *store.Store { return openStore(t, store.Options{InMemory: true}) }

func TestATableKeepsRecordsInTheOrderOfKeys(t *testing.T) {
	for name, o := range map[string]store.Options{"memory": {InMemory: true}, "disk": {Dir: t.TempDir()}} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, o)
			table, other := store.NewTable[record](s, "box"), store.NewTable[record](s, "boxes")
			for _, key := range []string{"b", "a", "c/\x00odd", "c"} {
				if err := table.Put(key, record{Name: key}); err != nil {
					t.Fatal(err)
				}
			}
			other.Put("a", record{Name: "not ours"})
			if err := table.Put("b", record{Name: "b", Count: 2}); err != nil {
				t.Fatal(err)
			}
			got, err := table.All()
			want := []record{{Name: "a"}, {Name: "b", Count: 2}, {Name: "c"}, {Name: "c/\x00odd"}}
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v %s", err, diff)
			}
			if got, err := table.Get("b"); err != nil || got.Count != 2 {
				t.Errorf("got %+v, %v", got, err)
			}
			for range 2 {
				if err := table.Delete("b"); err != nil {
					t.Errorf("delete: %v", err)
				}
			}
			if _, err := table.Get("b"); !errors.Is(err, boxed.CodeNotFound) {
				t.Errorf("got %v, want not_found", err)
			}
		})
	}
}

func TestRecordsOutliveAReopening(t *testing.T) {
	dir := t.TempDir()
	for i := range 5 { // more openings than tables of the first level
		s, err := store.Open(store.Options{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		table := store.NewTable[record](s, "box")
		all, err := table.All()
		if err != nil || len(all) != i {
			t.Fatalf("opening %d: %d records, %v", i, len(all), err)
		}
		if err := table.Put(fmt.Sprint(i), record{Count: i}); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAtomicWritesHappenAllOrNotAtAll(t *testing.T) {
	s := inMemory(t)
	living, ended := store.NewTable[record](s, "living"), store.NewTable[record](s, "ended")
	if err := living.Put("x", record{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	move := func(fail error) error {
		return s.Atomically(func(tx *store.Tx) error {
			if err := errors.Join(living.DeleteIn(tx, "x"), ended.PutIn(tx, "x", record{Name: "x"})); err != nil {
				return err
			}
			return fail
		})
	}
	if err := move(errors.New("no")); err == nil {
		t.Fatal("the error was lost")
	}
	if _, err := living.Get("x"); err != nil {
		t.Errorf("half of a failed transaction happened: %v", err)
	}
	if err := move(nil); err != nil {
		t.Fatal(err)
	}
	_, gone := living.Get("x")
	_, there := ended.Get("x")
	if !errors.Is(gone, boxed.CodeNotFound) || there != nil {
		t.Errorf("after the move: %v, %v", gone, there)
	}
}

func TestRecordsOverTheirBoundAreRefused(t *testing.T) {
	s := inMemory(t)
	table := store.NewTable[record](s, "box")
	if err := table.Put("fits", record{Name: strings.Repeat("x", store.MaxRecord-100)}); err != nil {
		t.Errorf("a record within the bound: %v", err)
	}
	if err := table.Put("big", record{Name: strings.Repeat("x", store.MaxRecord)}); !errors.Is(err, boxed.CodeTooLarge) {
		t.Errorf("got %v, want too_large", err)
	}
	if err := table.Put(strings.Repeat("k", 2000), record{}); !errors.Is(err, boxed.CodeTooLarge) {
		t.Errorf("got %v, want too_large", err)
	}
	err := s.Atomically(func(tx *store.Tx) error {
		return errors.Join(table.PutIn(tx, "1", record{Name: strings.Repeat("x", 900<<10)}), table.PutIn(tx, "2", record{Name: strings.Repeat("x", 900<<10)}))
	})
	if !errors.Is(err, boxed.CodeTooLarge) {
		t.Errorf("got %v, want too_large", err)
	}
}

func TestAClosedStoreSaysSo(t *testing.T) {
	s, err := store.Open(store.Options{InMemory: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	table := store.NewTable[record](s, "box")
	if err := table.Put("x", record{}); !errors.Is(err, boxed.CodeNotReady) {
		t.Errorf("put: got %v, want not_ready", err)
	}
	s.AppendEvent(boxed.Event{Type: boxed.EventCreated}) // must not panic or hang
}

// A write to a full disk through a memory map is a SIGBUS: the store must stop
// before.
func TestANearlyFullDiskTakesNoNewRecords(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=100m"); err != nil {
		t.Skip("needs a filesystem of its own:", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := openStore(t, store.Options{Dir: dir + "/store"})
	table := store.NewTable[record](s, "box")
	if err := table.Put("x", record{}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/ballast", make([]byte, 50<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := table.Put("y", record{})
		if errors.Is(err, boxed.CodeNoSpace) {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("put: %v, want no_space", err)
		}
		time.Sleep(50 * time.Millisecond) // it looks once a second
	}
	if err := table.Delete("x"); err != nil {
		t.Errorf("delete: %v", err)
	}
	if err := os.Remove(dir + "/ballast"); err != nil {
		t.Fatal(err)
	}
	for table.Put("y", record{}) != nil {
		if time.Now().After(deadline.Add(10 * time.Second)) {
			t.Fatal("it did not notice that there is room again")
		}
		time.Sleep(50 * time.Millisecond)
	}
}
