package egress

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

// Bounds of the audit log.
const (
	auditQueued = 256                    // records of one sandbox that wait for the disk
	auditBatch  = 256                    // records of one write
	auditWindow = 10 * time.Second       // in which equal denials become one record
	auditWait   = 500 * time.Millisecond // for room, before a connection is refused
	auditDrain  = 3 * time.Second        // for what is queued, at the end
	auditTail   = 512                    // newest records in memory, for those who follow; at most twice as many
	auditLimit  = 10_000                 // of AuditFilter.Limit

	// Distinct denials of one sandbox that are kept one by one: so many at once, and so
	// many per second after that. A flood that the disk can take would still rotate
	// everybody else's records away, in hours.
	auditBurst = 256
	auditRate  = 2
	// The same of what was allowed: connections, requests and their ends.
	auditOpenBurst = 8192
	auditOpenRate  = 20

	auditRetry    = 100 * time.Millisecond // after a failed write; doubled up to
	auditRetryMax = 5 * time.Second
)

// AuditConfig is what an audit log needs.
type AuditConfig struct {
	Dir  string // made if it is not there; nobody else may write in it
	Node boxed.NodeID
	// MaxFile is how large a file grows, in bytes (default 16 MiB), and MaxFiles how many
	// are kept, the one that is written included (default 16, at least 2).
	MaxFile  int64
	MaxFiles int
	Now      func() time.Time // default time.Now; only stamps records
	Log      *slog.Logger
}

// Audit is the record of all that sandboxes asked for. One goroutine writes it; what
// is recorded waits in one bounded queue per sandbox, and the queues are served in
// turn, so that no sandbox can keep the records of another off the disk.
type Audit struct {
	cfg   AuditConfig
	wake  chan struct{} // there is something to write
	stop  chan struct{} // closed by Close
	ended chan struct{} // closed when nothing more is written

	// The writer's own.
	files   *auditFiles
	pending []auditLine // numbered, and not on the disk yet
	tries   int         // that failed, in a row
	retry   time.Time   // of the next

	mu       sync.Mutex
	queues   map[boxed.ID]*auditQueue
	ring     []*auditQueue // the same; the first is served next
	begun    bool          // Run or Close was called
	closed   bool          // nothing more is taken
	failed   error         // of the disk; nothing is allowed until a write succeeds
	written  uint64        // the newest record on the disk
	tail     []boxed.EgressRecord
	tailFrom uint64        // all records after it are in tail
	changed  chan struct{} // closed when more is written; nil when nobody waits
}

var _ Recorder = (*Audit)(nil)

// OpenAudit opens the log in cfg.Dir, or starts one, and goes on where it ended: what
// a crash left of a line is cut off, and that, or anything else that is wrong with the
// end of the log, is the first record of the new run. It does not need room on the
// disk. Either [Audit.Run] or [Audit.Close] must follow.
func OpenAudit(cfg AuditConfig) (*Audit, error) {
	if cfg.MaxFile <= 0 {
		cfg.MaxFile = 16 << 20
	}
	if cfg.MaxFiles == 0 {
		cfg.MaxFiles = 16
	}
	cfg.MaxFiles = max(2, cfg.MaxFiles)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	files, wrong, err := openAuditFiles(cfg)
	if err != nil {
		return nil, err
	}
	a := &Audit{
		cfg: cfg, files: files, queues: map[boxed.ID]*auditQueue{}, written: files.seq, tailFrom: files.seq,
		wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
	}
	for _, what := range wrong {
		cfg.Log.Warn("egress audit was damaged", "dir", cfg.Dir, "reason", what)
		a.queueLocked("").push(a.clean(boxed.EgressRecord{Reason: boxed.EgressTruncated, Detail: what}))
	}
	return a, nil
}

// Run writes until ctx ends, and then for a few seconds more what is queued; what comes
// after that is refused, or ignored. It fails if something could not be written. It may
// be called once.
func (a *Audit) Run(ctx context.Context) error {
	if !a.begin() {
		return boxed.Errorf(boxed.CodeConflict, "the audit log was run before")
	}
	defer close(a.ended)
	for {
		var due <-chan time.Time
		if wait := a.step(); wait >= 0 {
			due = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return a.finish()
		case <-a.stop:
			return a.finish()
		case <-a.wake:
		case <-due:
		}
	}
}

// Close ends Run and waits for it, or writes what is queued where Run was not called.
func (a *Audit) Close() error {
	if a.begin() {
		defer close(a.ended)
		return a.finish()
	}
	a.mu.Lock()
	select {
	case <-a.stop:
	default:
		close(a.stop)
	}
	a.mu.Unlock()
	<-a.ended
	return nil
}

func (a *Audit) begin() (first bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	first, a.begun = !a.begun, true
	return first
}

// step writes one batch, and says how long there is nothing to do; negative is until
// somebody wakes the writer.
func (a *Audit) step() time.Duration {
	now := time.Now()
	if wait := a.retry.Sub(now); a.tries > 0 && wait > 0 {
		return wait
	}
	if len(a.pending) == 0 {
		a.pending = a.files.number(a.take(now))
	}
	n, err := a.files.append(a.pending)
	written := a.pending[:n]
	a.pending = a.pending[n:]
	if err == nil {
		err = a.files.syncWhenDue(now)
	}
	wait := a.settle(now, written, err)
	if err == nil {
		if a.tries > 0 {
			a.cfg.Log.Info("egress audit is written again", "dir", a.cfg.Dir)
		}
		a.tries = 0
		return wait
	}
	if a.tries == 0 {
		a.cfg.Log.Error("egress audit cannot be written; no connection is allowed", "dir", a.cfg.Dir, "err", err)
	}
	wait = min(auditRetryMax, auditRetry<<min(a.tries, 10))
	a.tries++
	a.retry = now.Add(wait)
	return wait
}

// settle tells the others how a write went, and says when the next is due.
func (a *Audit) settle(now time.Time, written []auditLine, err error) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed = err
	for _, line := range written {
		if len(a.tail) >= 2*auditTail { // the older half at once, not one by one
			a.tailFrom = a.tail[auditTail-1].Seq
			a.tail = append(make([]boxed.EgressRecord, 0, 2*auditTail), a.tail[auditTail:]...)
		}
		a.tail = append(a.tail, line.rec)
		a.written = line.rec.Seq
	}
	if len(written) > 0 && a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
	wait := a.files.syncIn(now)
	for _, q := range a.ring {
		if err != nil {
			q.makeRoom() // who waits for it is refused
		}
		if due, ok := q.dueIn(now, a.closed); ok && (wait < 0 || due < wait) {
			wait = due
		}
	}
	return wait
}

// take removes the next batch from the queues: one record of each, until there are
// no more or enough.
func (a *Audit) take(now time.Time) (batch []boxed.EgressRecord) {
	a.mu.Lock()
	defer a.mu.Unlock()
	busy := slices.Clone(a.ring)
	var last *auditQueue
	for len(busy) > 0 && len(batch) < auditBatch {
		served := busy[:0]
		for _, q := range busy {
			if len(batch) == auditBatch {
				break
			}
			if rec, ok := q.next(now, a.closed); ok {
				batch = append(batch, rec)
				served, last = append(served, q), q
			}
		}
		busy = served
	}
	next := slices.Index(a.ring, last) + 1
	a.ring = slices.DeleteFunc(slices.Concat(a.ring[next:], a.ring[:next]), func(q *auditQueue) bool {
		if !q.idle(now) {
			return false
		}
		delete(a.queues, q.sandbox)
		return true
	})
	return batch
}

// finish refuses what comes, writes what is there, and closes the files.
func (a *Audit) finish() error {
	a.mu.Lock()
	a.closed = true
	for _, q := range a.ring {
		q.makeRoom()
	}
	a.mu.Unlock()
	a.retry = time.Time{}
	end := time.Now().Add(auditDrain)
	for {
		wait := a.step()
		left := time.Until(end)
		if a.left() == 0 || left <= 0 {
			break
		}
		time.Sleep(min(wait, left))
	}
	err := a.files.close()
	if n := a.left(); n > 0 {
		return boxed.Errorf(boxed.CodeNoSpace, "%d audit records could not be written: %w", n, a.failed)
	}
	return err
}

// left is how many records are not on the disk.
func (a *Audit) left() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.pending)
	for _, q := range a.ring {
		n += len(q.records) + len(q.windows)
	}
	return n
}

// Ready is the error of [Audit.Allow] while the disk refuses, or the log is closed.
func (a *Audit) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unreadyLocked()
}

func (a *Audit) unreadyLocked() error {
	switch {
	case a.closed:
		return auditFull("the audit log is closed", nil)
	case a.failed != nil:
		return auditFull("the audit log cannot be written; look at the disk of the node", a.failed)
	}
	return nil
}

// Allow records a connection that is to be opened, and must be called before it is. Of a
// sandbox that opens very many, those that are more than are kept one by one are counted
// only, and written as one record for 10 s.
// An error says that it must not be opened, for [boxed.EgressAuditFull]: the sandbox's
// queue stays full, the disk refuses, or the log is closed.
func (a *Audit) Allow(rec boxed.EgressRecord) error {
	rec.Allowed, rec.End = true, false
	if rec.Reason == "" {
		rec.Reason = boxed.EgressAllowed
	}
	rec = a.clean(rec)
	var late <-chan time.Time
	for {
		room, err := a.admit(rec)
		if room == nil {
			return err
		}
		if late == nil {
			late = time.After(auditWait)
		}
		select {
		case <-room:
		case <-late:
			return auditFull("its records wait for the disk", nil)
		}
	}
}

// admit queues rec, or returns an error, or what to wait for before it is tried again.
func (a *Audit) admit(rec boxed.EgressRecord) (room <-chan struct{}, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.unreadyLocked(); err != nil {
		return nil, err
	}
	q := a.queueLocked(rec.Sandbox)
	if len(q.records) >= auditQueued {
		if q.room == nil {
			q.room = make(chan struct{})
		}
		return q.room, nil
	}
	if now := time.Now(); q.opens.spend(now) {
		q.push(rec)
	} else {
		q.lose(rec, now)
	}
	a.wakeLocked()
	return nil, nil
}

func auditFull(message string, err error) error {
	e := &boxed.Error{Code: boxed.CodeNotReady, Message: message, Err: err}
	return e.With("reason", string(boxed.EgressAuditFull))
}

// Deny records what was refused. It never blocks. Of a sandbox's denials with one
// reason, entry and host, the first is written at once, and those of the 10 s after it
// as one record, the newest of them with Count. What is more than its queue holds, or
// than is kept one by one, is counted only, and written as one record for each reason.
func (a *Audit) Deny(rec boxed.EgressRecord) {
	rec.Allowed, rec.End = false, false
	rec = a.clean(rec)
	key := auditKey{reason: rec.Reason, entry: rec.Entry, host: rec.Host}
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	q := a.queueLocked(rec.Sandbox)
	if w := q.open[key]; w != nil {
		w.add(rec)
		return
	}
	if len(q.records) >= auditQueued || !q.denials.spend(now) {
		q.lose(rec, now)
	} else {
		q.window(key, now)
		q.push(rec)
	}
	a.wakeLocked()
}

// End records how a connection ended. It never blocks; what its sandbox's queue cannot
// hold is counted, with its bytes.
func (a *Audit) End(rec boxed.EgressRecord) {
	rec.End = true
	rec = a.clean(rec)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	now := time.Now()
	if q := a.queueLocked(rec.Sandbox); len(q.records) < auditQueued && q.opens.spend(now) {
		q.push(rec)
	} else {
		q.lose(rec, now)
	}
	a.wakeLocked()
}

// Verify checks this log.
func (a *Audit) Verify() (AuditReport, error) { return verifyAudit(a.cfg.Dir, a.cfg.MaxFiles) }

// Forget has what is pending of a sandbox written now, and its queue dropped. It does
// not wait for that.
func (a *Audit) Forget(sandbox boxed.ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if q := a.queues[sandbox]; q != nil {
		q.forgotten = true
		a.wakeLocked()
	}
}

func (a *Audit) queueLocked(sandbox boxed.ID) *auditQueue {
	q := a.queues[sandbox]
	if q == nil {
		q = &auditQueue{
			sandbox: sandbox, open: map[auditKey]*auditDenials{},
			denials: auditBudget{burst: auditBurst, rate: auditRate, left: auditBurst},
			opens:   auditBudget{burst: auditOpenBurst, rate: auditOpenRate, left: auditOpenBurst},
		}
		a.queues[sandbox] = q
		a.ring = append(a.ring, q)
	}
	return q
}

func (a *Audit) wakeLocked() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// clean fills in what the log knows, and makes what a sandbox sent fit to be kept and
// shown.
func (a *Audit) clean(rec boxed.EgressRecord) boxed.EgressRecord {
	if rec.At.IsZero() || rec.At.Year() < 0 || rec.At.Year() > 9999 { // others have no JSON
		rec.At = a.cfg.Now()
	}
	rec.At, rec.Node = rec.At.UTC(), a.cfg.Node
	cleanAudit(&rec)
	return rec
}

func cleanAudit(rec *boxed.EgressRecord) {
	rec.Host, rec.SNI = auditText(rec.Host, 253), auditText(rec.SNI, 253)
	rec.Path, rec.Detail = auditText(rec.Path, 512), auditText(rec.Detail, 512)
	rec.Method, rec.Address = auditText(rec.Method, 32), auditText(rec.Address, 64)
	rec.Entry, rec.Reason = auditText(rec.Entry, 32), auditText(rec.Reason, 32)
	rec.Node, rec.Exit, rec.Sandbox = auditText(rec.Node, 64), auditText(rec.Exit, 64), auditText(rec.Sandbox, 64)
	rec.Owner, rec.Rule, rec.Credential = auditText(rec.Owner, 256), auditText(rec.Rule, 320), auditText(rec.Credential, 256)
	if len(rec.Labels) == 0 {
		return
	}
	// An owner may give a sandbox 20 KiB of labels, which is too much for every record.
	labels, room := make(map[string]string, len(rec.Labels)), 2<<10
	for _, k := range slices.Sorted(maps.Keys(rec.Labels)) {
		key, value := auditText(k, 256), auditText(rec.Labels[k], 512)
		if room -= len(key) + len(value); room < 0 {
			break
		}
		labels[key] = value
	}
	rec.Labels = labels
}

// auditText cuts s to limit bytes, without the bytes that are no UTF-8 and with a mark
// in place of what could move a cursor, or turn text around, where it is shown.
func auditText[S ~string](s S, limit int) S {
	plain := func(r rune) bool { return r >= ' ' && r <= '~' }
	if len(s) <= limit && strings.IndexFunc(string(s), func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	text := strings.ToValidUTF8(string(s[:min(len(s), limit)]), "")
	text = strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return utf8.RuneError
	}, text)
	for len(text) > limit {
		_, n := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-n]
	}
	return S(text)
}
