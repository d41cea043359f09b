package client

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
)

// sink writes one output: what the socket's reader puts in, at most a window of
// it, goes to the caller's writer from one goroutine, and what has been written
// is owed to the server as credit.
type sink struct {
	kind frame.Type
	w    io.Writer
	s    *stream
	owed atomic.Int64

	mu     sync.Mutex
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

// put queues an item; it never waits. A server that sends beyond the window
// would otherwise fill the memory.
func (k *sink) put(it item) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held += int64(len(it.data)); k.held > outputWindow || len(k.queue) > 1<<16 {
		return errors.New("the node sent beyond the window")
	}
	k.queue = append(k.queue, it)
	k.wake()
	return nil
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

func (k *sink) next() (it item, ok, done bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.queue) == 0 {
		k.queue = nil
		return it, false, k.closed
	}
	it, k.queue = k.queue[0], k.queue[1:]
	return it, true, false
}

func (k *sink) run() {
	broken := false
	for {
		it, ok, done := k.next()
		switch {
		case done:
			return
		case !ok:
			<-k.ready
			continue
		case it.buf == nil:
			k.s.tellGap(k.kind.String(), it.gap)
			continue
		}
		if !broken {
			if _, err := k.w.Write(it.data); err != nil {
				broken = true
				k.s.fail(&boxed.Error{Code: boxed.CodeCanceled, Message: "write " + k.kind.String() + ": " + err.Error(), Err: err})
			}
		}
		n := int64(len(it.data))
		buffers.Put(it.buf)
		k.mu.Lock()
		k.held -= n
		k.mu.Unlock()
		// In quarters of the window: few frames, and the server never runs dry.
		if k.owed.Add(n) >= outputWindow/4 {
			select {
			case k.s.kick <- struct{}{}:
			default:
			}
		}
	}
}
