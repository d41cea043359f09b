// Package store keeps what a node must not forget: typed records ([Table]),
// signed documents that nodes replicate, and the log of events. It is the only
// user of Badger.
//
// What survives what:
//   - A write that has returned survives the death of the daemon at once, kill
//     -9 included: it lies in a file that the kernel holds.
//   - It survives a power cut after the next [Store.Sync]. Documents are synced
//     by PutDocument itself; other records describe sandboxes, which do not
//     survive a power cut either.
//   - Events are written behind the caller's back, at the latest 20 ms after
//     they were appended; a kill loses what was not written.
//
// A directory that another process holds, that is damaged, or that a newer
// program wrote is refused with an error that says what to do, and is left as
// it was. Start reading at [Open].
package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"github.com/boxed-mesh/boxed"
)

// Options say where a store lives.
type Options struct {
	Dir      string       // made if it is missing, 0700; empty with InMemory
	InMemory bool         // nothing touches the disk, and nothing outlives Close
	Logger   *slog.Logger // nil discards

	// MinEvents and MinEventAge are what the log of events keeps: an event goes
	// when it is neither among the newest MinEvents nor younger than MinEventAge,
	// or when there are more than MaxEvents. 0 means 10,000, 24 h and 1,000,000
	// (about 300 MB on disk).
	MinEvents   int
	MinEventAge time.Duration
	MaxEvents   int

	// Now is the time; nil means time.Now.
	Now func() time.Time
}

// Store is one open database. It is safe for concurrent use.
type Store struct {
	db     *badger.DB
	dir    string // of Badger's files; "" in memory
	lock   *Lock  // nil in memory
	log    *slog.Logger
	now    func() time.Time
	space  spaceGuard
	docs   documents
	events *eventLog

	closeOnce sync.Once
	closeErr  error
}

// MaxRecord bounds the JSON of one record, in bytes. Larger values would leave
// Badger's tree for its value log, which costs a second file per write.
const MaxRecord = valueThreshold - 1<<10

// Badger's sizes, in bytes. A node has some thousand small records, so a small
// memtable is enough; each table of the first level is one memtable.
const (
	memTable       = 8 << 20
	valueThreshold = 1 << 20 // Badger allows 15 % of the memtable and at most 1 MiB
)

// Open opens the store in o.Dir and migrates it if an older program wrote it.
// Errors a person can act on: the directory is held by another process
// (conflict), was written by a newer program (unavailable), is damaged
// (internal; see [Salvage]). The caller closes the store.
func Open(o Options) (*Store, error) { return open(o, currentFormat()) }

func open(o Options, f format) (_ *Store, err error) {
	o = o.withDefaults()
	s := &Store{log: o.Logger, now: o.Now}
	if !o.InMemory {
		if s.dir, s.lock, err = prepare(o, f); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				s.lock.Release()
			}
		}()
		if err := checkDamage(s.dir); err != nil {
			return nil, damaged(o.Dir, err)
		}
		if err := removeUnmade(s.dir); err != nil {
			return nil, fmt.Errorf("open the store: %w", err)
		}
		s.space.dir = s.dir
	}
	if s.db, err = openBadger(s.dir, o.Logger); err != nil {
		return nil, damaged(o.Dir, err)
	}
	defer func() {
		if err != nil {
			s.db.Close()
		}
	}()
	if err := s.docs.load(s); err != nil {
		return nil, fmt.Errorf("read the documents: %w", err)
	}
	if s.events, err = openEvents(s, o); err != nil {
		return nil, fmt.Errorf("read the log of events: %w", err)
	}
	return s, nil
}

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.MinEvents == 0 {
		o.MinEvents = 10_000
	}
	if o.MinEventAge == 0 {
		o.MinEventAge = 24 * time.Hour
	}
	if o.MaxEvents == 0 {
		o.MaxEvents = 1_000_000
	}
	return o
}

// openBadger opens the files in dir, or a database in memory for "".
func openBadger(dir string, log *slog.Logger) (db *badger.DB, err error) {
	// A damaged file makes Badger panic in places; a daemon that starts must
	// give a reason instead.
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("badger: %v", r)
		}
	}()
	return badger.Open(badgerOptions(dir, log))
}

func badgerOptions(dir string, log *slog.Logger) badger.Options {
	return badger.DefaultOptions(dir).
		WithInMemory(dir == "").
		WithLogger(badgerLog{log}).
		WithMetricsEnabled(false).
		WithMemTableSize(memTable).
		WithNumMemtables(2).
		WithValueThreshold(valueThreshold).
		WithValueLogFileSize(1 << 20). // unused but for its header; the least that Badger takes
		WithNumCompactors(2).          // the least that Badger takes
		WithNumLevelZeroTables(3).
		WithNumLevelZeroTablesStall(10).
		// Without compression blocks are read straight from the mapped file, so
		// no cache of ours is needed: the kernel's is there anyway.
		WithCompression(options.None).
		WithBlockCacheSize(0).
		WithIndexCacheSize(0).
		// Tables are verified once at open by checkDamage, which fails where
		// Badger itself would drop a bad table and go on.
		WithChecksumVerificationMode(options.OnBlockRead).
		// Writers of one key are serialized by their owners (the documents' lock,
		// the manager's), so optimistic conflict detection would only cost.
		WithDetectConflicts(false)
}

// Close flushes the events and closes the database. Every use after it is an
// error. It can be called again.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		s.events.close()
		s.closeErr = s.db.Close()
		if s.lock != nil {
			s.closeErr = errors.Join(s.closeErr, s.lock.Release())
		}
	})
	return s.closeErr
}

// Sync returns when all that was written before is on the disk, so that it
// survives a power cut.
func (s *Store) Sync() error {
	if s.dir == "" {
		return nil
	}
	// Badger's own Sync covers the current log only; one that was rotated out
	// and is not a table yet would be missed.
	logs, err := filepath.Glob(filepath.Join(s.dir, "*.mem"))
	if err != nil {
		return err
	}
	for _, path := range append(logs, s.dir) {
		if err := syncPath(path); err != nil && !errors.Is(err, os.ErrNotExist) { // a log that became a table was synced as one
			return fmt.Errorf("sync the store: %w", err)
		}
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Housekeeping intervals.
const (
	pruneEvery = time.Minute
	gcEvery    = 10 * time.Minute
)

// Run prunes events and tombstones and collects garbage until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	prune, gc := time.NewTicker(pruneEvery), time.NewTicker(gcEvery)
	defer prune.Stop()
	defer gc.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-prune.C:
			if err := s.Prune(); err != nil {
				s.log.Warn("prune the store", "err", err)
			}
		case <-gc.C:
			// Values live in the tree, whose compaction reclaims them. What could
			// be left in value logs comes from formats to come or from before.
			if err := s.db.RunValueLogGC(0.5); err != nil && !isNothingToCollect(err) {
				s.log.Warn("collect garbage in the store", "err", err)
			}
		}
	}
}

// Prune drops the events and tombstones that need not be kept any longer. Run
// calls it every minute.
func (s *Store) Prune() error {
	return errors.Join(s.events.prune(), s.docs.prune(s))
}

func isNothingToCollect(err error) bool {
	return errors.Is(err, badger.ErrNoRewrite) || errors.Is(err, badger.ErrRejected) || errors.Is(err, badger.ErrGCInMemoryMode)
}

// wrap gives an error of Badger's the code that callers act on.
func wrap(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, badger.ErrDBClosed), errors.Is(err, badger.ErrBlockedWrites):
		return boxed.Errorf(boxed.CodeNotReady, "%s: the store is closed", doing)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// badgerLog sends Badger's log to slog. Its "info" is our "debug".
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(f string, a ...any)   { l.at(slog.LevelError, f, a) }
func (l badgerLog) Warningf(f string, a ...any) { l.at(slog.LevelWarn, f, a) }
func (l badgerLog) Infof(f string, a ...any)    { l.at(slog.LevelDebug, f, a) }
func (l badgerLog) Debugf(string, ...any)       {}

func (l badgerLog) at(level slog.Level, f string, a []any) {
	if ctx := context.Background(); l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, "badger", "text", strings.TrimSpace(fmt.Sprintf(f, a...)))
	}
}
