package boxed

import (
	"crypto/ed25519"
	"encoding/binary"
	"encoding/json"
	"sync"
	"time"
)

// Document is one small record that nodes replicate (keys, quotas, templates,
// profiles, …): signed by its author, last writer wins by Stamp.
type Document struct {
	Kind      string            `json:"kind"`
	Key       string            `json:"key"`
	Stamp     Stamp             `json:"stamp"`
	Author    ed25519.PublicKey `json:"author"`
	Tombstone bool              `json:"tombstone,omitempty"`
	// Revoked is grow-only: a revoked document never becomes valid again,
	// whatever the stamps say.
	Revoked   bool            `json:"revoked,omitempty"`
	Body      json.RawMessage `json:"body,omitempty"` // at most MaxDocument bytes
	Signature []byte          `json:"signature"`
}

// MaxDocument bounds the body of a document, in bytes.
const MaxDocument = 64 << 10

// MaxClockSkew is how far ahead of the receiver's clock a stamp may lie before
// its document is held back.
const MaxClockSkew = 60 * time.Second

// Stamp is a hybrid logical clock reading: wall time, then a counter for what
// happens within one millisecond or on clocks that lag.
type Stamp struct {
	WallMS  int64  `json:"wall_ms"`
	Counter uint32 `json:"counter"`
}

// Before orders stamps; equal ones are ordered by the authors' IDs.
func (s Stamp) Before(o Stamp) bool {
	return s.WallMS < o.WallMS || (s.WallMS == o.WallMS && s.Counter < o.Counter)
}

// Sign fills Author and Signature.
func (d *Document) Sign(key ed25519.PrivateKey) {
	d.Author = key.Public().(ed25519.PublicKey)
	d.Signature = ed25519.Sign(key, d.signed())
}

// Verify reports whether the signature is the author's.
func (d *Document) Verify() bool {
	return len(d.Author) == ed25519.PublicKeySize && len(d.Body) <= MaxDocument &&
		ed25519.Verify(d.Author, d.signed(), d.Signature)
}

// Supersedes reports whether d replaces old (nil: nothing is there).
func (d *Document) Supersedes(old *Document) bool {
	switch {
	case old == nil:
		return true
	case d.Revoked != old.Revoked:
		return d.Revoked
	case d.Stamp != old.Stamp:
		return old.Stamp.Before(d.Stamp)
	}
	return string(old.Author) < string(d.Author)
}

// signed is an injective encoding of all fields but the signature.
func (d *Document) signed() []byte {
	b := []byte("boxed document v1\n")
	for _, part := range [][]byte{[]byte(d.Kind), []byte(d.Key), d.Author, d.Body} {
		b = binary.BigEndian.AppendUint64(b, uint64(len(part)))
		b = append(b, part...)
	}
	b = binary.BigEndian.AppendUint64(b, uint64(d.Stamp.WallMS))
	b = binary.BigEndian.AppendUint32(b, d.Stamp.Counter)
	flags := byte(0)
	if d.Tombstone {
		flags |= 1
	}
	if d.Revoked {
		flags |= 2
	}
	return append(b, flags)
}

// Clock makes stamps that never go back. The zero Clock is ready.
type Clock struct {
	mu   sync.Mutex
	last Stamp
}

// Next is a stamp after all that this clock made or saw.
func (c *Clock) Next(now time.Time) Stamp {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ms := now.UnixMilli(); ms > c.last.WallMS {
		c.last = Stamp{WallMS: ms}
	} else {
		c.last.Counter++
	}
	return c.last
}

// Observe takes note of another's stamp, unless it lies more than
// [MaxClockSkew] ahead of now and of all that this clock saw; it reports whether
// it did. So a machine whose clock was set back can still write.
func (c *Clock) Observe(s Stamp, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.WallMS > max(now.Add(MaxClockSkew).UnixMilli(), c.last.WallMS) {
		return false
	}
	if c.last.Before(s) {
		c.last = s
	}
	return true
}

// SetRight forgets stamps that lie more than [MaxClockSkew] ahead of now: those of
// a time when the machine's clock was wrong.
func (c *Clock) SetRight(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last.WallMS > now.Add(MaxClockSkew).UnixMilli() {
		c.last = Stamp{WallMS: now.UnixMilli()}
	}
}
