package client

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
)

// sink writes one output. Whoever reads the socket writes what it has read, if
// nobody else does: to wake another goroutine would cost as much as the rest. What
// comes meanwhile waits, at most a window of it, for the sink's own goroutine. What
// has been written is owed to the server as credit.
type sink struct {
	kind   frame.Type
	w      io.Writer
	s      *stream
	owed   atomic.Int64
	broken bool // w has failed; whoever is busy knows

	mu     sync.Mutex
	busy   bool // somebody writes
	queue  []item
	held   int64 // bytes in queue and in the write that runs
	closed bool
	ready  chan struct{} // capacity 1
}

type item struct {
	data []byte
	buf  *[]byte // where data lies; goes back to the pool
	gap  int64   // instead of data: so many bytes are lost here
}

func newSink(kind frame.Type, w io.Writer, s *stream) *sink {
	if w == nil {
		w = io.Discard
	}
	return &sink{kind: kind, w: w, s: s, ready: make(chan struct{}, 1)}
}

// put takes an item in; it never waits. If mine, the caller is to write it, and
// then free the sink. A server that sends beyond the window would otherwise fill
// the memory.
func (k *sink) put(it item) (mine bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held += int64(len(it.data)); k.held > outputWindow || len(k.queue) > 1<<16 {
		return false, errors.New("the node sent beyond the window")
	}
	if !k.busy && len(k.queue) == 0 {
		k.busy = true
		return true, nil
	}
	k.queue = append(k.queue, it)
	k.wake()
	return false, nil
}

// free says that the caller no longer writes.
func (k *sink) free() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy = false
	if len(k.queue) > 0 || k.closed {
		k.wake()
	}
}

func (k *sink) wake() {
	select {
	case k.ready <- struct{}{}:
	default:
	}
}

// finish lets run return, after what is queued has been written if keep.
func (k *sink) finish(keep bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if !keep {
		k.queue = nil
	}
	k.wake()
}

// next takes the next item out, to be written by the caller.
func (k *sink) next() (it item, ok, done bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.busy:
		return it, false, false
	case len(k.queue) == 0:
		k.queue = nil
		return it, false, k.closed
	}
	it, k.queue, k.busy = k.queue[0], k.queue[1:], true
	return it, true, false
}

// run writes what waits.
func (k *sink) run() {
	for {
		it, ok, done := k.next()
		switch {
		case done:
			return
		case !ok:
			<-k.ready
		default:
			k.write(it)
			k.free()
		}
	}
}

// write writes an item, by whoever made the sink busy.
func (k *sink) write(it item) {
	if it.buf == nil {
		k.s.tellGap(k.kind.String(), it.gap)
		return
	}
	if !k.broken {
		if _, err := k.w.Write(it.data); err != nil {
			k.broken = true
			k.s.fail(&boxed.Error{Code: boxed.CodeCanceled, Message: "write " + k.kind.String() + ": " + err.Error(), Err: err})
		}
	}
	n := int64(len(it.data))
	buffers.Put(it.buf)
	k.mu.Lock()
	k.held -= n
	k.mu.Unlock()
	// In halves of the window: few frames, and the server does not run dry.
	if k.owed.Add(n) >= outputWindow/2 {
		select {
		case k.s.kick <- struct{}{}:
		default:
		}
	}
}
