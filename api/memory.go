package api

import (
	"bytes"
	"errors"
	"io"
	"sync"

	"github.com/boxed-mesh/boxed"
)

// freeMemory is what a request may hold whatever others hold, in bytes: enough
// for nearly all of them.
const freeMemory = 64 << 10

// errMemory refuses what is more than the memory that is left for requests.
var errMemory = &boxed.Error{Code: boxed.CodeExhausted, Message: "requests that are under way hold all the memory that " +
	"this node keeps for them; try again in a moment, and send what is large as files, which the node does not hold"}

// memory is what all requests together may hold beyond freeMemory each: bodies,
// input that no program has read yet, collected output. An owner gets at most
// half, so that one who sends much does not stop the others.
type memory struct {
	share int64 // of an owner, bytes

	mu     sync.Mutex
	left   int64
	owners map[string]int64 // what each that holds something holds
}

func newMemory(n int64) *memory {
	return &memory{share: n / 2, left: n, owners: map[string]int64{}}
}

// holding is what one request holds of it. Its methods may be called by several
// goroutines.
type holding struct {
	of    *memory
	owner string

	mu   sync.Mutex
	held int64
	over bool // nothing is held any more
}

// take reports whether n more bytes were to be had.
func (h *holding) take(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over || !h.of.move(h.owner, beyond(h.held+int64(n))-beyond(h.held)) {
		return false
	}
	h.held += int64(n)
	return true
}

// give returns n bytes of what was taken.
func (h *holding) give(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return
	}
	h.of.move(h.owner, beyond(h.held-int64(n))-beyond(h.held))
	h.held -= int64(n)
}

// release returns all, and nothing can be taken any more.
func (h *holding) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of.move(h.owner, -beyond(h.held))
	h.held, h.over = 0, true
}

// beyond is the part of what a request holds that counts.
func beyond(held int64) int64 { return max(0, held-freeMemory) }

func (m *memory) move(owner string, n int64) bool {
	if n == 0 {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > 0 && (n > m.left || m.owners[owner]+n > m.share) {
		return false
	}
	m.left -= n
	if m.owners[owner] += n; m.owners[owner] == 0 {
		delete(m.owners, owner)
	}
	return true
}

// bodyCost is how many bytes are held for each byte of a JSON body: the buffer
// that grows by doubling, and then what is decoded from it.
const bodyCost = 2

var errTooMuch = errors.New("more than the limit")

// readHeld reads at most limit bytes as part of what the call holds. More is
// errTooMuch.
func (c *call) readHeld(r io.Reader, limit int64) ([]byte, error) {
	var b bytes.Buffer
	n, err := b.ReadFrom(&heldReader{io.LimitReader(r, limit+1), &c.held})
	if err == nil && n > limit {
		err = errTooMuch
	}
	return b.Bytes(), err
}

type heldReader struct {
	r io.Reader
	h *holding
}

func (h *heldReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	if !h.h.take(n * bodyCost) {
		return 0, errMemory
	}
	return n, err
}
