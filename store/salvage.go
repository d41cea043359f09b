package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Salvaged says what Salvage did.
type Salvaged struct {
	Damage error  // what was wrong; nil: nothing, and nothing was done
	Copy   string // where the damaged files are now
	Lost   string // what was given up, for a person
}

// Salvage makes a damaged store usable again by giving up what cannot be read:
// the rest of a log behind the first unreadable entry. The damaged files are
// kept beside the repaired ones. A store whose manifest or tables are damaged
// cannot be salvaged; the error says so, and nothing is changed. The store must
// not be open.
func Salvage(o Options) (_ Salvaged, err error) {
	o = o.withDefaults()
	dir, lock, err := prepare(o, currentFormat())
	if err != nil {
		return Salvaged{}, err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	damage := checkDamage(dir)
	if damage == nil {
		return Salvaged{}, nil
	}
	var log damagedLog
	if !errors.As(damage, &log) {
		return Salvaged{Damage: damage}, fmt.Errorf("the store in %s cannot be salvaged: %w; put back a copy of the directory, or move it away to start empty", o.Dir, damage)
	}
	work, kept := filepath.Join(o.Dir, salvagingDir), filepath.Join(o.Dir, "damaged-"+o.Now().UTC().Format("20060102T150405Z"))
	if err := errors.Join(os.RemoveAll(work), copyTree(work, dir)); err != nil {
		return Salvaged{}, fmt.Errorf("copy the store: %w", err)
	}
	// Badger cuts the logs; closing makes tables of them.
	db, err := openBadger(work, o.Logger)
	if err != nil {
		return Salvaged{}, fmt.Errorf("open the copy: %w", err)
	}
	if err := db.Close(); err != nil {
		return Salvaged{}, fmt.Errorf("close the copy: %w", err)
	}
	if err := errors.Join(os.Rename(dir, kept), os.Rename(work, dir), syncPath(o.Dir)); err != nil {
		return Salvaged{}, fmt.Errorf("put the copy in place: %w; the damaged files are in %s and the readable ones in %s", err, kept, work)
	}
	return Salvaged{
		Damage: damage, Copy: kept,
		Lost: fmt.Sprintf("what was written after byte %d of %s", log.at, filepath.Base(log.path)),
	}, nil
}
