package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"

	"github.com/boxed-mesh/boxed"
)

// AuditFilter says which records are read. The zero value is all of them.
type AuditFilter struct {
	Sandbox boxed.ID // "": any
	Owner   string   // "": any
	Denied  bool     // only what was not allowed
	After   uint64   // only records with a greater Seq
	// Limit is how many there are at most, the newest; 0 is all, and more than 10,000 is
	// 10,000. What a follower yields later does not count; with a negative Limit it
	// yields nothing else.
	Limit int
}

func (f AuditFilter) match(rec *boxed.EgressRecord) bool {
	return rec.Seq > f.After && (f.Sandbox == "" || rec.Sandbox == f.Sandbox) &&
		(f.Owner == "" || rec.Owner == f.Owner) && !(f.Denied && rec.Allowed)
}

// ErrAuditLine is of a line that is no record. What Verify says of it is more.
var ErrAuditLine = errors.New("audit log")

// Records yields what is on the disk, oldest first. A line that cannot be read is an
// ErrAuditLine in its place, after which the next ones come.
func (a *Audit) Records(filter AuditFilter) iter.Seq2[boxed.EgressRecord, error] {
	return func(yield func(boxed.EgressRecord, error) bool) {
		readAudit(context.Background(), a.cfg.Dir, filter, a.newest(), yield)
	}
}

// Follow is Records, and then what is written from there on, until ctx ends, which is
// the last error, or the log is closed. A reader that is too slow for what is kept in
// memory gets the rest from the files; it misses only what rotation has removed.
func (a *Audit) Follow(ctx context.Context, filter AuditFilter) iter.Seq2[boxed.EgressRecord, error] {
	return func(yield func(boxed.EgressRecord, error) bool) {
		from := a.newest()
		if !readAudit(ctx, a.cfg.Dir, filter, from, yield) {
			return
		}
		filter.Limit = 0
		for over := false; ; {
			recs, upTo, changed, behind := a.since(filter, from)
			if behind {
				filter.After = max(filter.After, from)
				if !readAudit(ctx, a.cfg.Dir, filter, upTo, yield) {
					return
				}
			}
			for _, rec := range recs {
				if !yield(rec, nil) {
					return
				}
			}
			if err := ctx.Err(); err != nil {
				yield(boxed.EgressRecord{}, err)
				return
			}
			if upTo > from {
				from = upTo
				continue
			}
			if over {
				return
			}
			select {
			case <-changed:
			case <-a.ended:
				over = true // once more: its last batch may have come in the same breath
			case <-ctx.Done():
			}
		}
	}
}

func (a *Audit) newest() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.written
}

// since is what memory has after the record from: those that match, the newest of all,
// and a channel that is closed when there are more. behind says to read the files.
func (a *Audit) since(filter AuditFilter, from uint64) (recs []boxed.EgressRecord, upTo uint64, changed <-chan struct{}, behind bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.changed == nil {
		a.changed = make(chan struct{})
	}
	if from < a.tailFrom {
		return nil, a.written, a.changed, true
	}
	for i := range a.tail {
		if rec := &a.tail[i]; rec.Seq > from && filter.match(rec) {
			recs = append(recs, *rec)
		}
	}
	return recs, a.written, a.changed, false
}

// openAuditAll opens the files that may hold records after one, as they are at one
// moment: the log may be rotated meanwhile. The caller closes them.
func openAuditAll(dir string, after uint64) (names []auditFile, files []*os.File, err error) {
	for range 8 {
		all, err := auditNames(dir)
		if err != nil {
			return nil, nil, err
		}
		names = all
		for len(names) > 1 && names[1].first > 0 && names[1].first-1 <= after {
			names = names[1:]
		}
		files = nil
		for _, name := range names {
			var f *os.File
			if f, err = os.Open(filepath.Join(dir, name.name)); err != nil {
				break
			}
			files = append(files, f)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			closeAudit(files)
			return nil, nil, fmt.Errorf("read audit log: %w", err)
		}
		if again, listErr := auditNames(dir); err == nil && listErr == nil && slices.Equal(all, again) {
			return names, files, nil
		}
		closeAudit(files)
	}
	return nil, nil, errors.New("read audit log: its files change all the time")
}

func closeAudit(files []*os.File) {
	for _, f := range files {
		f.Close() // they were only read
	}
}

// errAuditStop ends a scan whose reader has enough.
var errAuditStop = errors.New("enough")

// readAudit yields what matches, up to the record upTo. It reports whether the reader
// wants more.
func readAudit(ctx context.Context, dir string, filter AuditFilter, upTo uint64, yield func(boxed.EgressRecord, error) bool) bool {
	if filter.Limit < 0 {
		return true
	}
	names, files, err := openAuditAll(dir, filter.After)
	defer func() { closeAudit(files) }()
	pass := func(rec boxed.EgressRecord, err error) error {
		if !yield(rec, err) {
			return errAuditStop
		}
		return nil
	}
	type found struct {
		rec boxed.EgressRecord
		err error
	}
	var newest []found // of a limit, which is filled from the newest file on
	for i := 0; err == nil && i < len(files); i++ {
		if filter.Limit == 0 {
			err = scanAudit(ctx, names[i].name, files[i], filter, upTo, pass)
			continue
		}
		want := min(filter.Limit, auditLimit) - len(newest)
		if want == 0 {
			break
		}
		var here []found
		at := len(files) - 1 - i
		err = scanAudit(ctx, names[at].name, files[at], filter, upTo, func(rec boxed.EgressRecord, err error) error {
			if len(here) == want {
				here = here[1:]
			}
			here = append(here, found{rec, err})
			return nil
		})
		newest = append(here, newest...)
	}
	for i := 0; err == nil && i < len(newest); i++ {
		err = pass(newest[i].rec, newest[i].err)
	}
	if err != nil && !errors.Is(err, errAuditStop) {
		yield(boxed.EgressRecord{}, err)
	}
	return err == nil
}

// scanAudit visits what matches in one file, until visit returns an error.
func scanAudit(ctx context.Context, name string, r io.Reader, filter AuditFilter, upTo uint64, visit func(boxed.EgressRecord, error) error) error {
	// Most lines are somebody else's, and need not be parsed to see that.
	var has [][]byte
	for key, value := range map[string]string{`"sandbox":`: string(filter.Sandbox), `"owner":`: filter.Owner} {
		if text, err := auditJSON(value); err == nil && value != "" {
			has = append(has, append([]byte(key), text[:len(text)-1]...))
		}
	}
	lines := newAuditLines(r)
	var at uint64 // the number of the line before
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		line, err := lines.next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil && !errors.Is(err, errAuditLong) {
			return fmt.Errorf("read audit log: %w", err)
		}
		var rec boxed.EgressRecord
		if err == nil {
			if seq, ok := auditSeq(line); ok && (seq <= filter.After || seq > upTo ||
				slices.ContainsFunc(has, func(h []byte) bool { return !bytes.Contains(line, h) })) {
				at = seq
				continue
			}
			rec, err = parseAuditLine(line)
		}
		if err != nil {
			if at >= filter.After {
				if err := visit(rec, fmt.Errorf("%w: %s, line %d: %w", ErrAuditLine, name, lines.n, err)); err != nil {
					return err
				}
			}
			continue
		}
		at = rec.Seq
		cleanAudit(&rec)
		if rec.Seq <= upTo && filter.match(&rec) {
			if err := visit(rec, nil); err != nil {
				return err
			}
		}
	}
}
