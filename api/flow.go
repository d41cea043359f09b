package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
)

// pipe is a client's stdin on its way to the program: at most limit bytes, put
// in by the socket's reader, which never waits, and taken out by the port.
type pipe struct {
	limit int
	held  *holding
	taken func(n int) // returns credit to the client

	mu    sync.Mutex
	buf   bytes.Buffer
	eof   bool
	err   error
	owed  int           // taken and not yet returned
	ready chan struct{} // capacity 1: something has changed

	refused chan struct{} // capacity 1: the port reads no more
}

// pipeCost is how many bytes are held for each that waits: the buffer grows by
// doubling.
const pipeCost = 2

// creditSize is how much input is taken before the client gets credit for it:
// few frames, and a client that sends less than the window never runs dry.
const creditSize = 64 << 10

func newPipe(limit int, held *holding, taken func(int)) *pipe {
	return &pipe{limit: limit, held: held, taken: taken, ready: make(chan struct{}, 1), refused: make(chan struct{}, 1)}
}

func (p *pipe) changed() {
	select {
	case p.ready <- struct{}{}:
	default:
	}
}

// push adds bytes. More than the window allows is the client's mistake.
func (p *pipe) push(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil:
		return nil // nobody reads any more; the exec is ending
	case p.eof:
		return errors.New("stdin after stdin-close")
	case p.buf.Len()+p.owed+len(b) > p.limit:
		return errors.New("stdin beyond the window; wait for credit")
	case !p.held.take(pipeCost * len(b)):
		return errMemory
	}
	p.buf.Write(b)
	p.changed()
	return nil
}

func (p *pipe) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eof = true
	p.changed()
}

// CloseWithError says that the port reads no more; the client is told.
func (p *pipe) CloseWithError(err error) error {
	p.fail(err)
	select {
	case p.refused <- struct{}{}:
	default:
	}
	return nil
}

// fail ends reads with err.
func (p *pipe) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	p.held.give(pipeCost * p.buf.Len())
	p.buf = bytes.Buffer{}
	p.changed()
}

// Read waits for bytes, the client's end of input, or the stream's end.
func (p *pipe) Read(b []byte) (int, error) {
	for {
		n, err, wait := p.tryRead(b)
		if !wait {
			return n, err
		}
		<-p.ready
	}
}

func (p *pipe) tryRead(b []byte) (n int, err error, wait bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil:
		p.changed() // for whoever else reads
		return 0, p.err, false
	case len(b) == 0:
		return 0, nil, false
	case p.buf.Len() > 0:
		n, _ = p.buf.Read(b)
		p.held.give(pipeCost * n)
		if p.owed += n; p.owed >= creditSize && !p.eof {
			p.taken(p.owed)
			p.owed = 0
		}
		return n, nil, false
	case p.eof:
		p.changed()
		return 0, io.EOF, false
	}
	return 0, nil, true
}

// window is how many bytes of one output the client still has room for.
type window struct {
	mu    sync.Mutex
	room  int64
	ready chan struct{} // capacity 1
}

func newWindow(n int64) *window { return &window{room: n, ready: make(chan struct{}, 1)} }

func (w *window) add(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.room = min(w.room+n, 1<<40) // a client that returns too much only hurts itself
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// take waits for room and takes at most n of it.
func (w *window) take(ctx context.Context, n int) (int, error) {
	for {
		w.mu.Lock()
		got := min(int64(n), w.room)
		w.room -= got
		w.mu.Unlock()
		if got > 0 {
			return int(got), nil
		}
		select {
		case <-w.ready:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}
