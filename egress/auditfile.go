package egress

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// The files of a log. One that is full is named for its first record. The head says
// how far the log has come, so that a tail that was cut off shows; it is one short
// line, which is written over in place and so needs no room on a full disk.
const (
	auditCurrent = "egress.jsonl"
	auditHead    = "egress.head"
	auditName    = "egress-%020d.jsonl"
	auditMark    = "%020d %020d %x %-6s\n" // newest record, first of egress.jsonl, hash of the newest, state

	auditLineMax = 64 << 10 // ours are at most a third of it
	auditSeqMax  = 1 << 62  // a greater number is nobody's
	auditSync    = time.Second
	auditWrongs  = 1000 // of one report
)

type auditHash [sha256.Size]byte

// auditLine is a record that has its place in the chain.
type auditLine struct {
	rec boxed.EgressRecord
	raw []byte // with its newline
	sum auditHash
}

// auditFiles is the writer's side of the files.
type auditFiles struct {
	cfg    AuditConfig
	head   *os.File
	cur    *os.File // nil until there is something to write
	size   int64    // of its whole lines
	first  uint64   // its first record
	seq    uint64   // the newest record that is written,
	hash   auditHash
	marked bool // the head says that the log is open
	torn   bool // cur has more than size bytes
	stale  bool // the head is behind
	dirty  bool // something is not synced
	synced time.Time
}

// openAuditFiles finds the end of the log. wrong is what it found there that no
// orderly end leaves.
func openAuditFiles(cfg AuditConfig) (f *auditFiles, wrong []string, err error) {
	if err := errors.Join(os.MkdirAll(cfg.Dir, 0o700), os.Chmod(cfg.Dir, 0o700)); err != nil {
		return nil, nil, fmt.Errorf("open audit log: %w", err)
	}
	names, err := auditNames(cfg.Dir)
	if err != nil {
		return nil, nil, err
	}
	f = &auditFiles{cfg: cfg}
	defer func(f *auditFiles) {
		if err != nil && f.cur != nil {
			f.cur.Close() // nothing was written
		}
	}(f)
	var last auditEnd
	for _, name := range slices.Backward(names) {
		if last, err = findAuditEnd(filepath.Join(cfg.Dir, name.name)); err != nil {
			return nil, nil, err
		}
		if name.name == auditCurrent {
			if wrong, err = f.reopen(last, wrong); err != nil {
				return nil, nil, err
			}
		}
		if last.lines > 0 {
			break
		}
	}
	f.seq, f.hash = last.seq, last.hash
	mark, err := readAuditMark(cfg.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if last.lines > 0 {
			wrong = append(wrong, auditHead+" was missing")
		}
	case err != nil:
		wrong = append(wrong, auditHead+" could not be read")
	case mark.seq > last.seq:
		// The chain goes on from the head, and not from what is left, so that the gap
		// stays to be seen. A cut by hand and one by a power failure look the same.
		wrong = append(wrong, fmt.Sprintf("records %d to %d are missing", last.seq+1, mark.seq))
	case mark.closed && mark.seq < last.seq:
		wrong = append(wrong, fmt.Sprintf("lines after record %d were added when the log was closed", mark.seq))
	case mark.seq == last.seq && mark.hash != last.hash:
		wrong = append(wrong, fmt.Sprintf("record %d was changed", mark.seq))
	}
	if err == nil && (mark.closed || mark.seq >= last.seq) {
		f.seq, f.hash = mark.seq, mark.hash
	}
	if f.size > 0 && err == nil && mark.current(names) && f.first != mark.first {
		wrong = append(wrong, fmt.Sprintf("%s was begun with record %d, which is missing", auditCurrent, mark.first))
		f.first = mark.first // it must not be taken for a file that was begun later
	} else if f.size == 0 || f.first == 0 {
		f.first = f.seq + 1
	}
	return f, wrong, nil
}

// reopen opens the current file to be appended to, and cuts off the part of a line
// that a crash left. Nobody was told that it was recorded for good.
func (f *auditFiles) reopen(end auditEnd, wrong []string) ([]string, error) {
	var err error
	if f.cur, err = os.OpenFile(filepath.Join(f.cfg.Dir, auditCurrent), os.O_RDWR|os.O_APPEND, 0); err != nil {
		return wrong, fmt.Errorf("open audit log: %w", err)
	}
	f.size, f.first = end.size, end.first
	if end.torn > 0 {
		wrong = append(wrong, fmt.Sprintf("the last line was not whole; its %d bytes were cut off", end.torn))
		f.torn = true
		if err := f.mend(); err != nil {
			return wrong, fmt.Errorf("open audit log: %w", err)
		}
	}
	return wrong, nil
}

// number gives records their places in the chain, after what is written.
func (f *auditFiles) number(recs []boxed.EgressRecord) []auditLine {
	lines := make([]auditLine, 0, len(recs))
	seq, hash := f.seq, f.hash
	for _, rec := range recs {
		rec.Seq, rec.Prev = seq+1, hex.EncodeToString(hash[:])
		raw, err := auditJSON(rec)
		if err != nil { // clean leaves nothing that has no JSON
			f.cfg.Log.Error("encode audit record", "sandbox", rec.Sandbox, "err", err)
			continue
		}
		seq, hash = rec.Seq, sha256.Sum256(raw[:len(raw)-1])
		lines = append(lines, auditLine{rec, raw, hash})
	}
	return lines
}

// append writes lines, with one write for all that go into one file, and says how many
// are on the disk. What is not must be given again, before any others.
func (f *auditFiles) append(lines []auditLine) (n int, err error) {
	if f.stale {
		if err := f.writeMark("open"); err != nil {
			return 0, err
		}
	}
	for n < len(lines) {
		if err := f.ready(len(lines[n].raw)); err != nil {
			return n, err
		}
		var batch []byte
		end := n
		for end < len(lines) && (end == n || f.size+int64(len(batch)+len(lines[end].raw)) <= f.cfg.MaxFile) {
			batch = append(batch, lines[end].raw...)
			end++
		}
		if wrote, err := f.cur.Write(batch); err != nil {
			f.torn = wrote > 0
			return n, errors.Join(err, f.mend())
		}
		f.size += int64(len(batch))
		f.dirty = true
		n = end
		f.seq, f.hash = lines[n-1].rec.Seq, lines[n-1].sum
		if err := f.writeMark("open"); err != nil {
			return n, err
		}
	}
	return n, nil
}

// ready makes the current file one to which a line can be appended.
func (f *auditFiles) ready(line int) error {
	if !f.marked {
		if err := f.writeMark("open"); err != nil {
			return err
		}
		f.marked = true
	}
	if err := f.mend(); err != nil {
		return err
	}
	if f.cur != nil && f.size > 0 && f.size+int64(line) > f.cfg.MaxFile {
		if err := f.sync(time.Now()); err != nil {
			return err
		}
		if f.cur != nil { // it was not moved away
			full := filepath.Join(f.cfg.Dir, fmt.Sprintf(auditName, f.first))
			if err := os.Rename(f.cur.Name(), full); err != nil {
				return err
			}
			f.cur.Close() // it is synced
			f.cur = nil
		}
	}
	if f.cur != nil {
		return nil
	}
	cur, err := os.OpenFile(filepath.Join(f.cfg.Dir, auditCurrent), os.O_RDWR|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f.cur, f.size, f.first = cur, 0, f.seq+1
	f.retain()
	return nil
}

// retain removes the oldest files that are too many, and makes the names durable.
func (f *auditFiles) retain() {
	names, err := auditNames(f.cfg.Dir)
	for i := 0; err == nil && i < len(names)-f.cfg.MaxFiles; i++ {
		err = os.Remove(filepath.Join(f.cfg.Dir, names[i].name))
	}
	d, openErr := os.Open(f.cfg.Dir)
	if openErr == nil {
		openErr = errors.Join(d.Sync(), d.Close())
	}
	if err := errors.Join(err, openErr); err != nil {
		f.cfg.Log.Warn("egress audit cannot remove old files", "dir", f.cfg.Dir, "err", err)
	}
}

// mend cuts off what a failed write left of a batch: it will be written again.
func (f *auditFiles) mend() error {
	if !f.torn {
		return nil
	}
	err := f.cur.Truncate(f.size)
	f.torn = err != nil
	return err
}

func (f *auditFiles) writeMark(state string) (err error) {
	f.stale = true
	if f.head == nil {
		if f.head, err = os.OpenFile(filepath.Join(f.cfg.Dir, auditHead), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			f.head = nil
			return err
		}
	}
	if _, err := f.head.WriteAt(fmt.Appendf(nil, auditMark, f.seq, f.first, f.hash, state), 0); err != nil {
		return err
	}
	f.stale = false
	return nil
}

// syncIn is how long the next fsync may wait; negative if none is due.
func (f *auditFiles) syncIn(now time.Time) time.Duration {
	if !f.dirty {
		return -1
	}
	return max(0, auditSync-now.Sub(f.synced))
}

func (f *auditFiles) syncWhenDue(now time.Time) error {
	if f.syncIn(now) != 0 {
		return nil
	}
	return f.sync(now)
}

// sync makes what is written survive a power failure. It also sees to it that the
// files are still the ones of the directory: what is written to one that was moved
// away would be found by nobody.
func (f *auditFiles) sync(now time.Time) error {
	if f.cur == nil {
		f.dirty = false
		return nil
	}
	if err := errors.Join(f.cur.Sync(), f.head.Sync()); err != nil {
		return err
	}
	f.dirty, f.synced = false, now
	for _, file := range []**os.File{&f.cur, &f.head} {
		ours, err := (*file).Stat()
		if err != nil {
			return err
		}
		if there, err := os.Stat((*file).Name()); err == nil && os.SameFile(ours, there) {
			continue
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f.cfg.Log.Error("a file of the egress audit was moved or removed", "path", (*file).Name())
		(*file).Close() // it is synced
		*file = nil
		f.stale = true
	}
	return nil
}

func (f *auditFiles) close() error {
	var errs []error
	if f.marked || f.stale {
		errs = append(errs, f.mend(), f.writeMark("closed"))
		if f.head != nil {
			errs = append(errs, f.sync(time.Now()))
		}
	}
	if f.cur != nil {
		errs = append(errs, f.cur.Close())
	}
	if f.head != nil {
		errs = append(errs, f.head.Close())
	}
	return errors.Join(errs...)
}

func auditJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // paths have & in them, and people read them
	err := e.Encode(v)
	return b.Bytes(), err
}

func parseAuditLine(line []byte) (rec boxed.EgressRecord, err error) {
	if err := json.Unmarshal(line, &rec); err != nil {
		return boxed.EgressRecord{}, err
	}
	if rec.Seq == 0 || rec.Seq > auditSeqMax {
		return boxed.EgressRecord{}, errors.New("it has no number")
	}
	return rec, nil
}

// auditSeq finds the number of a line as the log writes it, without parsing the rest.
func auditSeq(line []byte) (seq uint64, ok bool) {
	rest, ok := bytes.CutPrefix(line, []byte(`{"seq":`))
	digits, _, comma := bytes.Cut(rest[:min(len(rest), 24)], []byte(","))
	seq, err := strconv.ParseUint(string(digits), 10, 64)
	return seq, ok && comma && err == nil
}

var errAuditLong = errors.New("the line is too long") // longer than any of ours

// auditLines reads lines that need not be ours.
type auditLines struct {
	r    *bufio.Reader
	n    int   // lines read
	size int64 // of them, in bytes
	torn int64 // bytes after the last newline, at io.EOF
}

func newAuditLines(r io.Reader) *auditLines {
	return &auditLines{r: bufio.NewReaderSize(r, auditLineMax)}
}

// next is the next whole line without its newline, until the following call, or an
// error: errAuditLong, after which others may come, or the end.
func (l *auditLines) next() ([]byte, error) {
	line, err := l.r.ReadSlice('\n')
	size, long := int64(len(line)), false
	for errors.Is(err, bufio.ErrBufferFull) {
		long = true
		line, err = l.r.ReadSlice('\n')
		size += int64(len(line))
	}
	if err != nil {
		l.torn = size
		return nil, err
	}
	l.n++
	l.size += size
	if long {
		return nil, errAuditLong
	}
	return line[:len(line)-1], nil
}

// auditEnd is what there is in a file, and at its end.
type auditEnd struct {
	first, seq uint64 // of the first and the last line; 0 where that is no record
	hash       auditHash
	lines      int
	size, torn int64
}

func findAuditEnd(path string) (end auditEnd, err error) {
	f, err := os.Open(path)
	if err != nil {
		return end, fmt.Errorf("open audit log: %w", err)
	}
	defer f.Close()
	lines := newAuditLines(f)
	for {
		line, err := lines.next()
		if err != nil && !errors.Is(err, errAuditLong) {
			end.lines, end.size, end.torn = lines.n, lines.size, lines.torn
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return end, err
		}
		end.hash = sha256.Sum256(line)
		seq, ok := auditSeq(line)
		if !ok || seq > auditSeqMax {
			continue
		}
		if end.seq = seq; lines.n == 1 {
			end.first = seq
		}
	}
}

// auditState is what the head says.
type auditState struct {
	seq, first uint64
	hash       auditHash
	closed     bool
}

// current reports whether first is of the current file: it may have been rotated since.
func (m auditState) current(names []auditFile) bool {
	return !slices.ContainsFunc(names, func(n auditFile) bool { return n.first >= m.first })
}

// readAuditMark reads the head, twice if need be: it is written over in place.
func readAuditMark(dir string) (m auditState, err error) {
	text, err := os.ReadFile(filepath.Join(dir, auditHead))
	for again := 0; err == nil && again < 4; again++ {
		before := text
		if text, err = os.ReadFile(filepath.Join(dir, auditHead)); bytes.Equal(before, text) {
			break
		}
	}
	if err == nil && len(text) == 0 {
		err = fs.ErrNotExist // a full disk left no room for it
	}
	if err != nil {
		return m, fmt.Errorf("read audit head: %w", err)
	}
	var hash []byte
	var state string
	_, err = fmt.Sscanf(string(text), "%d %d %x %s", &m.seq, &m.first, &hash, &state)
	m.closed = state == "closed"
	if copy(m.hash[:], hash); err != nil || m.seq > auditSeqMax || string(text) != fmt.Sprintf(auditMark, m.seq, m.first, m.hash, state) {
		return auditState{}, errors.New("the audit head is no line of ours")
	}
	return m, nil
}

// auditFile is a name, and the first record that is in it by that; 0 of the current.
type auditFile struct {
	name  string
	first uint64
}

// auditNames lists a log's files, oldest first.
func auditNames(dir string) (files []auditFile, err error) {
	entries, err := os.ReadDir(dir) // sorted, and "-" sorts before "."
	if err != nil {
		return nil, fmt.Errorf("list audit log: %w", err)
	}
	for _, e := range entries {
		if e.Name() == auditCurrent {
			files = append(files, auditFile{name: auditCurrent})
			continue
		}
		digits := strings.TrimSuffix(strings.TrimPrefix(e.Name(), "egress-"), ".jsonl")
		if first, err := strconv.ParseUint(digits, 10, 64); err == nil && e.Name() == fmt.Sprintf(auditName, first) {
			files = append(files, auditFile{e.Name(), first})
		}
	}
	return files, nil
}
