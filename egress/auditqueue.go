package egress

import (
	"time"

	"github.com/boxed-mesh/boxed"
)

// auditQueue is what waits of one sandbox. The Audit's mutex guards it.
type auditQueue struct {
	sandbox   boxed.ID
	records   []boxed.EgressRecord
	windows   []*auditDenials // by their end; denials bounds how many there are
	open      map[auditKey]*auditDenials
	denials   auditBudget // of records that are kept one by one
	opens     auditBudget
	forgotten bool
	room      chan struct{} // closed when there is some; nil when nobody waits
}

// auditBudget is so many at once, and so many per second after that.
type auditBudget struct {
	burst, rate, left float64
	spent             time.Time
}

// has is how many there are.
func (b *auditBudget) has(now time.Time) float64 {
	return min(b.burst, b.left+now.Sub(b.spent).Seconds()*b.rate)
}

// spend takes one, if there is one.
func (b *auditBudget) spend(now time.Time) bool {
	b.left, b.spent = b.has(now), now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}

// auditKey says which denials are equal. lost are those that are only counted.
type auditKey struct {
	reason    boxed.EgressReason
	entry     boxed.EgressEntry
	host      string
	lost, end bool
}

// auditDenials are equal denials of one window.
type auditDenials struct {
	key  auditKey
	rec  boxed.EgressRecord // the newest; Count is 0 while there was none
	ends time.Time
}

func (w *auditDenials) add(rec boxed.EgressRecord) {
	rec.Count = w.rec.Count + max(1, rec.Count)
	rec.Up, rec.Down = rec.Up+w.rec.Up, rec.Down+w.rec.Down
	w.rec = rec
}

func (q *auditQueue) push(rec boxed.EgressRecord) { q.records = append(q.records, rec) }

func (q *auditQueue) window(key auditKey, now time.Time) *auditDenials {
	w := &auditDenials{key: key, ends: now.Add(auditWindow)}
	q.open[key] = w
	q.windows = append(q.windows, w)
	return w
}

// lose counts what is not kept. The reasons are a closed list, so this is bounded.
func (q *auditQueue) lose(rec boxed.EgressRecord, now time.Time) {
	key := auditKey{reason: rec.Reason, lost: true, end: rec.End}
	w := q.open[key]
	if w == nil {
		w = q.window(key, now)
	}
	detail := "more denials than are kept one by one"
	switch {
	case rec.End:
		detail = "more ends of connections than are kept one by one"
	case rec.Allowed:
		detail = "more connections and requests than are kept one by one"
	}
	w.add(boxed.EgressRecord{
		At: rec.At, Node: rec.Node, Sandbox: rec.Sandbox, Owner: rec.Owner, Labels: rec.Labels, Generation: rec.Generation,
		Allowed: rec.Allowed, Reason: rec.Reason, Detail: detail, Up: rec.Up, Down: rec.Down, Count: rec.Count, End: rec.End,
	})
}

// next removes what is to be written next. Counted denials that are due go first: they
// are few, and must not wait behind a queue that is never empty.
func (q *auditQueue) next(now time.Time, all bool) (rec boxed.EgressRecord, ok bool) {
	for len(q.windows) > 0 && !now.Before(q.windows[0].ends) {
		if rec := q.counted(); rec.Count > 0 {
			return rec, true
		}
	}
	if len(q.records) > 0 {
		rec, q.records[0] = q.records[0], rec
		q.records = q.records[1:]
		q.makeRoom()
		return rec, true
	}
	for len(q.windows) > 0 && (all || q.forgotten) {
		if rec := q.counted(); rec.Count > 0 {
			return rec, true
		}
	}
	return rec, false
}

// counted ends the oldest window.
func (q *auditQueue) counted() boxed.EgressRecord {
	w := q.windows[0]
	q.windows[0] = nil
	q.windows = q.windows[1:]
	delete(q.open, w.key)
	return w.rec
}

func (q *auditQueue) makeRoom() {
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
}

func (q *auditQueue) dueIn(now time.Time, all bool) (wait time.Duration, ok bool) {
	switch {
	case len(q.records) > 0 || (len(q.windows) > 0 && (all || q.forgotten)):
		return 0, true
	case len(q.windows) > 0:
		return max(0, q.windows[0].ends.Sub(now)), true
	}
	return 0, false
}

// idle reports whether a new queue would be as good: an end that comes after Forget
// must not leave one for ever.
func (q *auditQueue) idle(now time.Time) bool {
	if len(q.records)+len(q.windows) > 0 {
		return false
	}
	return q.forgotten || q.denials.has(now) >= q.denials.burst && q.opens.has(now) >= q.opens.burst
}
