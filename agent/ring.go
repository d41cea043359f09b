package agent

import (
	"cmp"
	"sync/atomic"
)

// ringHistory is how much of what was delivered is kept of an attached exec: a
// client that comes back after its node has gone had got less than the node was
// given. On the way are at most a client's window (512 KiB), what the sockets
// hold and what the node reads at once.
const ringHistory = RingSize

// Sizes of rings. The agent's memory is the sandbox's: hundreds of execs that
// each kept RingSize of two streams would be half of a default sandbox.
const (
	ringFloor  = 16 << 10 // every ring may grow to this
	ringBudget = 24 << 20 // what all rings together may hold beyond their floors
)

// budget is what the rings of one guest may still take.
type budget struct{ left atomic.Int64 }

func newBudget() *budget {
	b := &budget{}
	b.left.Store(ringBudget)
	return b
}

// take reports whether n bytes were there to be taken.
func (b *budget) take(n int) bool {
	if b.left.Add(-int64(n)) < 0 {
		b.left.Add(int64(n))
		return false
	}
	return true
}

// ring keeps the end of one output stream. Offsets count bytes from the
// stream's start. It has no lock of its own: the exec's guards it.
type ring struct {
	budget *budget
	most   int    // bytes that it may grow to; 0 is RingSize
	buf    []byte // byte i of the stream lies at i modulo its length
	end    int64  // bytes ever written
	kept   int    // of them, the last so many are in buf
}

// start is the offset of the oldest byte that is kept.
func (r *ring) start() int64 { return r.end - int64(r.kept) }

// room is how many of n bytes can be written before a byte is lost that was not
// delivered, or was a short while ago.
func (r *ring) room(delivered int64, n int) int {
	if delivered < r.start() {
		return 0
	}
	// Half of what there is, so that there is always room for more.
	keep := max(r.start(), delivered-int64(min(ringHistory, len(r.buf)/2)))
	r.grow(int(r.end-keep) + n)
	return min(n, int(keep+int64(len(r.buf))-r.end))
}

// write appends p, dropping the oldest bytes.
func (r *ring) write(p []byte) {
	r.grow(r.kept + len(p))
	if skip := len(p) - len(r.buf); skip > 0 {
		r.end += int64(skip)
		p = p[skip:]
	}
	at := int(r.end % int64(len(r.buf)))
	n := copy(r.buf[at:], p)
	copy(r.buf, p[n:])
	r.end += int64(len(p))
	r.kept = min(len(r.buf), r.kept+len(p))
}

// read copies what is kept from off on into p.
func (r *ring) read(p []byte, off int64) int {
	if off >= r.end || off < r.start() {
		return 0
	}
	p = p[:min(int64(len(p)), r.end-off)]
	at := int(off % int64(len(r.buf)))
	n := copy(p, r.buf[at:])
	copy(p[n:], r.buf)
	return len(p)
}

// grow makes room to keep n bytes, as far as RingSize and the budget allow.
func (r *ring) grow(n int) {
	size := max(len(r.buf), 4<<10)
	for size < min(n, cmp.Or(r.most, RingSize)) {
		size *= 2
	}
	for size > max(len(r.buf), ringFloor) && !r.budget.take(r.cost(size)) {
		size /= 2
	}
	if size <= len(r.buf) {
		return
	}
	old := make([]byte, r.kept)
	from := r.start()
	r.read(old, from)
	r.buf, r.end, r.kept = make([]byte, size), from, 0
	if len(old) > 0 {
		r.write(old)
	}
}

// cost is what a ring of that size takes of the budget beyond what it has taken.
func (r *ring) cost(size int) int {
	return max(0, size-ringFloor) - max(0, len(r.buf)-ringFloor)
}

// free gives the memory back. Nothing is kept any more.
func (r *ring) free() {
	r.budget.left.Add(int64(max(0, len(r.buf)-ringFloor)))
	r.buf, r.kept = nil, 0
}
