package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// Format is the number of the layout that this program reads and writes:
// the key prefixes, and the JSON of what store itself encodes.
const Format = 1

// A store's directory holds LOCK and, for each format that it ever had, one
// directory of Badger files: format-1, format-2, … The highest number is the
// one in use. So a migration works on a copy, its commit is one rename, and
// what was there before stays untouched under its own number.
const formatPrefix = "format-"

// Directories of work in progress, beside those of the formats.
const (
	migratingDir = "migrating"
	salvagingDir = "salvaging"
)

// format is a program's idea of the layout; tests have others.
type format struct {
	current int
	// steps[n] turns a database of format n into one of n+1. It must not depend
	// on other packages: what they mean by a record changes with time.
	steps map[int]func(*badger.DB) error
}

func currentFormat() format {
	return format{current: Format, steps: map[int]func(*badger.DB) error{}}
}

// prepare takes o.Dir and returns the directory of Badger's files in it, in the
// program's own format.
func prepare(o Options, f format) (dir string, lock *Lock, err error) {
	if o.Dir == "" {
		return "", nil, boxed.Errorf(boxed.CodeInvalid, "a store needs a directory, or InMemory")
	}
	// Before anything is written, the lock file included.
	if _, err := found(o.Dir, f.current); err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return "", nil, fmt.Errorf("make the store's directory: %w", err)
	}
	if lock, err = LockDir(o.Dir); err != nil {
		return "", nil, err
	}
	defer func() {
		if err != nil {
			lock.Release()
		}
	}()
	have, err := found(o.Dir, f.current)
	if err != nil {
		return "", nil, err
	}
	dir = formatDir(o.Dir, f.current)
	switch have {
	case 0:
		// A salvage that was killed between its two renames had finished.
		if err = os.Rename(filepath.Join(o.Dir, salvagingDir), dir); errors.Is(err, os.ErrNotExist) {
			err = os.Mkdir(dir, 0o700)
		}
	case f.current:
	default:
		err = migrate(o, f, have)
	}
	return dir, lock, err
}

// found is the highest format in dir, 0 for none.
func found(dir string, current int) (int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("open the store: %w", err)
	}
	highest := 0
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Name(), formatPrefix)
		if n, err := strconv.Atoi(text); ok && err == nil && e.IsDir() {
			highest = max(highest, n)
		}
	}
	if highest > current {
		return 0, boxed.Errorf(boxed.CodeUnavailable,
			"the store in %s has format %d and this program knows up to %d; run the newer program again, or move %s away to go back to what was there before the migration",
			dir, highest, current, formatDir(dir, highest))
	}
	return highest, nil
}

func formatDir(dir string, n int) string { return filepath.Join(dir, formatPrefix+strconv.Itoa(n)) }

// migrate brings a copy of format have to the current one. It leaves the
// original alone, and an interrupted run leaves nothing that counts.
func migrate(o Options, f format, have int) error {
	from, to := formatDir(o.Dir, have), formatDir(o.Dir, f.current)
	if err := checkDamage(from); err != nil {
		return damaged(o.Dir, err)
	}
	work := filepath.Join(o.Dir, migratingDir)
	if err := os.RemoveAll(work); err != nil {
		return fmt.Errorf("migrate the store: %w", err)
	}
	err := copyTree(work, from)
	if err == nil {
		err = runSteps(o, f, have, work)
	}
	if err == nil {
		err = os.Rename(work, to)
	}
	if err == nil {
		err = syncPath(o.Dir)
	}
	if err != nil {
		os.RemoveAll(work)
		return fmt.Errorf("migrate the store from format %d to %d: %w; %s is as it was, so the older program still works", have, f.current, err, from)
	}
	o.Logger.Info("store migrated", "from", have, "to", f.current, "kept", from)
	return nil
}

func runSteps(o Options, f format, have int, work string) (err error) {
	db, err := openBadger(work, o.Logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	for n := have; n < f.current; n++ {
		step := f.steps[n]
		if step == nil {
			return fmt.Errorf("this program has no step from format %d", n)
		}
		if err := step(db); err != nil {
			return fmt.Errorf("step from format %d: %w", n, err)
		}
	}
	return nil
}

// copyTree copies the regular files of a directory tree and syncs them. Holes
// stay holes: Badger's logs are mostly one.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(target, 0o700)
		case d.Type().IsRegular():
			return copyFile(target, path)
		}
		return fmt.Errorf("%s is not a regular file", path)
	})
}

func copyFile(to, from string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	var size int64
	buf := make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(in, buf)
		if !allZero(buf[:n]) {
			if _, err := out.WriteAt(buf[:n], size); err != nil {
				return err
			}
		}
		size += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		} else if err != nil {
			return err
		}
	}
	return errors.Join(out.Truncate(size), out.Sync())
}
