package store_test

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/store"
)

// child, set in the environment, makes the test program a process that holds
// the store in that directory.
const child = "BOXED_STORE_TEST_CHILD"

// TestChild is not a test: it writes records for ever, saying each number after
// its Put has returned, until it is killed.
func TestChild(t *testing.T) {
	dir := os.Getenv(child)
	if dir == "" {
		t.Skip("only as a child process")
	}
	s, err := store.Open(store.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	table := store.NewTable[record](s, "box")
	for i := 0; ; i++ {
		if err := table.Put(fmt.Sprintf("%09d", i), record{Count: i, Name: strings.Repeat("x", i%3000)}); err != nil {
			t.Fatal(err)
		}
		s.AppendEvent(event(i, time.Now()))
		fmt.Println("put", i)
	}
}

func startChild(t *testing.T, dir string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(os.Environ(), child+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd, bufio.NewScanner(out)
}

func TestRecordsSurviveAKillAtOnce(t *testing.T) {
	for _, puts := range []int{1, 50, 12_000} { // the last fills more than one log
		dir := t.TempDir()
		cmd, lines := startChild(t, dir)
		last := -1
		for last+1 < puts && lines.Scan() {
			fmt.Sscanf(lines.Text(), "put %d", &last)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // what it said before it died
			fmt.Sscanf(lines.Text(), "put %d", &last)
		}
		cmd.Wait()

		s := openStore(t, store.Options{Dir: dir})
		all, err := store.NewTable[record](s, "box").All()
		if err != nil {
			t.Fatal(err)
		}
		if last+1 < puts || len(all) < last+1 || len(all) > last+2 {
			t.Errorf("put %d records, found %d", last+1, len(all))
		}
		for i, r := range all {
			if r.Count != i || len(r.Name) != i%3000 {
				t.Fatalf("record %d is %d, %d bytes", i, r.Count, len(r.Name))
			}
		}
		events, _ := readAll(t, s, boxed.CursorOldest, 0)
		for i, m := range events {
			if m != fmt.Sprint(i) {
				t.Fatalf("event %d is %q", i, m)
			}
		}
	}
}

func TestADirectoryInUseNamesItsHolder(t *testing.T) {
	dir := t.TempDir()
	cmd, lines := startChild(t, dir)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "put") {
	}
	_, err := store.Open(store.Options{Dir: dir})
	if !errors.Is(err, boxed.CodeConflict) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (%s)", cmd.Process.Pid, os.Args[0])) {
		t.Errorf("got %v, want a conflict that names process %d", err, cmd.Process.Pid)
	}
	cmd.Process.Kill()
	for lines.Scan() {
	}
	cmd.Wait()
	openStore(t, store.Options{Dir: dir})
}

// filled makes a store with records in tables and in a log that was not closed,
// and returns its directory.
func filled(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	s, err := store.Open(store.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	table := store.NewTable[record](s, "box")
	for i := range 1000 {
		if err := table.Put(fmt.Sprintf("a%03d", i), record{Count: i, Name: strings.Repeat("x", 100)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cmd, lines := startChild(t, dir)
	for lines.Scan() && lines.Text() != "put 500" {
	}
	cmd.Process.Kill()
	for lines.Scan() {
	}
	cmd.Wait()
	return dir
}

// digest is the content of every file below dir, but for the lock's.
func digest(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "LOCK" {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		files[rel] = fmt.Sprintf("%x", sha256.Sum256(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func one(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	return found[0]
}

// flip inverts a byte of a file.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[at] ^= 0xff
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDamageIsAClearErrorAndDestroysNothing(t *testing.T) {
	origin := filled(t)
	sst, log := "format-1/*.sst", "format-1/*.mem"
	size := func(path string) int {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return int(fi.Size())
	}
	for name, harm := range map[string]func(t *testing.T, dir string) string{
		"log, middle":      func(t *testing.T, dir string) string { p := one(t, dir+"/"+log); flip(t, p, 2000); return p },
		"log, first entry": func(t *testing.T, dir string) string { p := one(t, dir+"/"+log); flip(t, p, 30); return p },
		"log, zeroed page": func(t *testing.T, dir string) string {
			p := one(t, dir+"/"+log)
			f, err := os.OpenFile(p, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt(make([]byte, 4096), 8192); err != nil {
				t.Fatal(err)
			}
			return p
		},
		"table, block":  func(t *testing.T, dir string) string { p := one(t, dir+"/"+sst); flip(t, p, 1000); return p },
		"table, index":  func(t *testing.T, dir string) string { p := one(t, dir+"/"+sst); flip(t, p, size(p)-60); return p },
		"table, footer": func(t *testing.T, dir string) string { p := one(t, dir+"/"+sst); flip(t, p, size(p)-2); return p },
		"table, cut": func(t *testing.T, dir string) string {
			p := one(t, dir+"/"+sst)
			if err := os.Truncate(p, int64(size(p)/2)); err != nil {
				t.Fatal(err)
			}
			return p
		},
		"table, empty":     func(t *testing.T, dir string) string { p := one(t, dir+"/"+sst); os.Truncate(p, 0); return p },
		"table, missing":   func(t *testing.T, dir string) string { p := one(t, dir+"/"+sst); os.Remove(p); return p },
		"manifest":         func(t *testing.T, dir string) string { p := dir + "/format-1/MANIFEST"; flip(t, p, 20); return p },
		"manifest, magic":  func(t *testing.T, dir string) string { p := dir + "/format-1/MANIFEST"; flip(t, p, 0); return p },
		"manifest, absent": func(t *testing.T, dir string) string { os.Remove(dir + "/format-1/MANIFEST"); return "MANIFEST" },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(origin)); err != nil {
				t.Fatal(err)
			}
			path := harm(t, dir)
			before := digest(t, dir)
			_, err := store.Open(store.Options{Dir: dir})
			if err == nil {
				t.Fatal("a damaged store was opened")
			}
			for _, want := range []string{path, "is damaged", "boxed-node store salvage", "Nothing was changed"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if diff := cmp.Diff(before, digest(t, dir)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestATornEndIsNoDamage(t *testing.T) {
	origin := filled(t)
	path := one(t, origin+"/format-1/*.mem")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	end := len(strings.TrimRight(string(b), "\x00"))
	for _, cut := range []int{1, 3, 10, 100, 700} { // into the marker, the checksum, the value
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(origin)); err != nil {
			t.Fatal(err)
		}
		torn := append([]byte(nil), b...)
		clear(torn[end-cut:])
		if err := os.WriteFile(one(t, dir+"/format-1/*.mem"), torn, 0o600); err != nil {
			t.Fatal(err)
		}
		s := openStore(t, store.Options{Dir: dir})
		if all, err := store.NewTable[record](s, "box").All(); err != nil || len(all) < 1400 {
			t.Errorf("cut %d: %d records, %v", cut, len(all), err)
		}
	}
}

func TestSalvageKeepsACopyAndWhatCanBeRead(t *testing.T) {
	dir := filled(t)
	flip(t, one(t, dir+"/format-1/*.mem"), 60_000)
	before := digest(t, dir+"/format-1")
	got, err := store.Salvage(store.Options{Dir: dir})
	if err != nil || got.Damage == nil || got.Lost == "" {
		t.Fatalf("%+v, %v", got, err)
	}
	if diff := cmp.Diff(before, digest(t, got.Copy)); diff != "" {
		t.Error(diff)
	}
	s := openStore(t, store.Options{Dir: dir})
	all, err := store.NewTable[record](s, "box").All()
	if err != nil || len(all) <= 1000 || len(all) >= 1500 {
		t.Errorf("%d records, %v", len(all), err)
	}
	s.Close()
	if got, err := store.Salvage(store.Options{Dir: dir}); err != nil || got.Damage != nil {
		t.Errorf("salvage of a sound store: %+v, %v", got, err)
	}
}

func TestANewerFormatIsRefusedUntouched(t *testing.T) {
	dir := filled(t)
	if err := os.Rename(dir+"/format-1", dir+"/format-7"); err != nil {
		t.Fatal(err)
	}
	os.Remove(dir + "/LOCK")
	before := digest(t, dir)
	_, err := store.Open(store.Options{Dir: dir})
	if !errors.Is(err, boxed.CodeUnavailable) || !strings.Contains(err.Error(), "format 7") {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff(before, digest(t, dir)); diff != "" {
		t.Error(diff)
	}
	if _, err := os.Stat(dir + "/LOCK"); err == nil {
		t.Error("a lock file was made")
	}
}

// rename moves every record of a table to another: the kind of thing that a
// migration does.
func rename(from, to string) func(*badger.DB) error {
	return func(db *badger.DB) error {
		return db.Update(func(txn *badger.Txn) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte("t" + from + "\x00")})
			defer it.Close()
			for it.Rewind(); it.Valid(); it.Next() {
				key := it.Item().KeyCopy(nil)
				v, err := it.Item().ValueCopy(nil)
				if err != nil {
					return err
				}
				if err := errors.Join(txn.Set([]byte("t"+to+strings.TrimPrefix(string(key), "t"+from)), v), txn.Delete(key)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func TestAnOlderFormatIsMigratedAfterACopy(t *testing.T) {
	dir := filled(t)
	before := digest(t, dir+"/format-1")
	steps := map[int]func(*badger.DB) error{1: rename("box", "crate"), 2: func(*badger.DB) error { return errors.New("out of luck") }}

	_, err := store.OpenFormat(store.Options{Dir: dir}, 3, steps)
	if err == nil || !strings.Contains(err.Error(), "out of luck") || !strings.Contains(err.Error(), "is as it was") {
		t.Fatalf("a failing step: %v", err)
	}
	if diff := cmp.Diff(before, digest(t, dir+"/format-1")); diff != "" {
		t.Error(diff)
	}
	s, err := store.Open(store.Options{Dir: dir}) // the older program still works
	if err != nil {
		t.Fatal(err)
	}
	all, err := store.NewTable[record](s, "box").All()
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	before = digest(t, dir+"/format-1")

	if err := os.MkdirAll(dir+"/migrating/junk", 0o700); err != nil { // an earlier run was killed
		t.Fatal(err)
	}
	steps[2] = rename("crate", "chest")
	for range 2 { // the second opening finds its own format
		s, err := store.OpenFormat(store.Options{Dir: dir}, 3, steps)
		if err != nil {
			t.Fatal(err)
		}
		moved, err := store.NewTable[record](s, "chest").All()
		if diff := cmp.Diff(all, moved); diff != "" || err != nil {
			t.Error(err, diff)
		}
		if left, err := store.NewTable[record](s, "box").All(); len(left) != 0 || err != nil {
			t.Errorf("%d records are left, %v", len(left), err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(before, digest(t, dir+"/format-1")); diff != "" {
		t.Errorf("the copy from before changed: %s", diff)
	}
	if _, err := store.Open(store.Options{Dir: dir}); !errors.Is(err, boxed.CodeUnavailable) {
		t.Errorf("the older program: got %v, want unavailable", err)
	}
}
