package sandbox

import (
	"math/rand/v2"
	"time"

	"github.com/boxed-mesh/boxed"
)

// uidPool gives each sandbox a uid of its own: quotas that the kernel counts by
// user (processes, inotify instances, pending signals, keyrings, pipe pages)
// are then per sandbox. What is in use, and what rests, follows from the
// records, so it survives a restart.
type uidPool struct {
	first, last int
	next        int
	taken       map[int]time.Time // zero: in use; else when it may be used again
}

func newUIDPool(first, last int) uidPool {
	return uidPool{first: first, last: last, next: first + rand.IntN(last-first+1), taken: map[int]time.Time{}}
}

// take finds a free uid.
func (p *uidPool) take(now time.Time) (int, error) {
	for range p.last - p.first + 1 {
		uid := p.next
		if p.next++; p.next > p.last {
			p.next = p.first
		}
		rested, known := p.taken[uid]
		if !known || (!rested.IsZero() && now.After(rested)) {
			p.taken[uid] = time.Time{}
			return uid, nil
		}
	}
	return 0, boxed.Errorf(boxed.CodeExhausted, "all %d uids of sandboxes are in use or rest for an hour; widen uid_range", p.last-p.first+1)
}

// hold marks a uid as in use.
func (p *uidPool) hold(uid int) { p.taken[uid] = time.Time{} }

// rest marks a uid as resting since ended, or for longer if it does already: it
// may have been of several sandboxes one after the other.
func (p *uidPool) rest(uid int, ended time.Time) {
	if until := ended.Add(uidRest); until.After(p.taken[uid]) {
		p.taken[uid] = until
	}
}
