package agent

// ring keeps the end of one output stream. Offsets count bytes from the
// stream's start. It has no lock of its own: the exec's guards it.
type ring struct {
	buf []byte // grows in powers of two up to RingSize
	end int64  // bytes ever written
}

// start is the offset of the oldest byte that is kept.
func (r *ring) start() int64 { return max(0, r.end-int64(len(r.buf))) }

// room is how much may be written before a byte at offset keep or later is lost.
func (r *ring) room(keep int64) int { return int(max(0, keep+RingSize-r.end)) }

// write appends p, which is at most RingSize long, dropping the oldest bytes.
func (r *ring) write(p []byte) {
	r.grow(int(min(RingSize, r.end+int64(len(p)))))
	at := int(r.end % int64(len(r.buf)))
	n := copy(r.buf[at:], p)
	copy(r.buf, p[n:])
	r.end += int64(len(p))
}

// read copies what is kept from off on into p.
func (r *ring) read(p []byte, off int64) int {
	if off >= r.end || len(r.buf) == 0 {
		return 0
	}
	p = p[:min(int64(len(p)), r.end-off)]
	at := int(off % int64(len(r.buf)))
	n := copy(p, r.buf[at:])
	copy(p[n:], r.buf)
	return len(p)
}

// grow makes room to keep n bytes. While the buffer grows nothing has been
// dropped yet, so byte i of the stream is byte i of the buffer.
func (r *ring) grow(n int) {
	size := max(len(r.buf), 4<<10)
	for size < n {
		size *= 2
	}
	if size == len(r.buf) {
		return
	}
	kept := r.buf
	r.buf = make([]byte, size)
	if r.end > 0 && len(kept) > 0 {
		// The old buffer may have wrapped only at its full size, RingSize, and
		// then it does not grow any more.
		copy(r.buf, kept)
	}
}
