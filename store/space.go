package store

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/boxed-mesh/boxed"
)

// minFree is the room, in bytes, below which the store takes no new records.
// Badger writes through memory maps of files with holes: on a full disk that is
// a SIGBUS and the end of the daemon, not an error. It is room for two logs of
// twice the memtable each, and the tables made of them.
const minFree = 64 << 20

// spaceGuard refuses writes while the disk is nearly full.
type spaceGuard struct {
	dir     string       // "" guards nothing
	checked atomic.Int64 // unix nanoseconds
	full    atomic.Bool
}

// check looks at the disk at most once a second. Its error has CodeNoSpace.
func (g *spaceGuard) check() error {
	if g.dir == "" {
		return nil
	}
	now, last := time.Now().UnixNano(), g.checked.Load()
	if now-last > int64(time.Second) && g.checked.CompareAndSwap(last, now) {
		var fs syscall.Statfs_t
		if err := syscall.Statfs(g.dir, &fs); err == nil {
			g.full.Store(fs.Bavail*uint64(fs.Bsize) < minFree)
		}
	}
	if g.full.Load() {
		return boxed.Errorf(boxed.CodeNoSpace, "the disk of the data directory is nearly full (less than %d MiB free); make room", minFree>>20)
	}
	return nil
}

// update runs fn in a transaction that is on its way to the kernel when update
// returns. Deletes go through on a nearly full disk: what they need is inside
// the guard's margin.
func (s *Store) update(grows bool, fn func(*badger.Txn) error) error {
	if grows {
		if err := s.space.check(); err != nil {
			return err
		}
	}
	err := s.db.Update(fn)
	if errors.Is(err, syscall.ENOSPC) {
		return boxed.Errorf(boxed.CodeNoSpace, "the disk of the data directory is full; make room: %w", err)
	}
	return err
}
