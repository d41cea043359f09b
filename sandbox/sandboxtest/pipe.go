package sandboxtest

import (
	"io"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// writer is a process's end of an output.
type writer struct {
	*pipe
	proc *Proc
}

func (w *writer) Write(b []byte) (int, error) {
	if w.proc.TTY {
		if _, err := w.pipe.write(w.proc, []byte(strings.ReplaceAll(string(b), "\n", "\r\n"))); err != nil {
			return 0, err
		}
		return len(b), nil
	}
	return w.pipe.write(w.proc, b)
}

// pipe is an agent.Output of the kernel's size.
type pipe struct {
	c *container

	mu       sync.Mutex
	change   *sync.Cond
	buf      []byte
	writers  int
	closed   bool
	deadline time.Time
}

const pipeSize = 64 << 10

func newPipe(c *container) *pipe {
	p := &pipe{c: c}
	p.change = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.writers++
}

func (p *pipe) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.writers--
	p.change.Broadcast()
}

func (p *pipe) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change.Broadcast()
}

func (p *pipe) write(proc *Proc, b []byte) (n int, err error) {
	for len(b) > 0 {
		p.c.gate.wait()
		p.mu.Lock()
		for len(p.buf) == pipeSize && !p.closed && proc.ctx.Err() == nil {
			p.change.Wait()
		}
		if p.closed || proc.ctx.Err() != nil {
			p.mu.Unlock()
			return n, syscall.EPIPE
		}
		some := min(len(b), pipeSize-len(p.buf))
		p.buf = append(p.buf, b[:some]...)
		p.change.Broadcast()
		p.mu.Unlock()
		b, n = b[some:], n+some
	}
	return n, nil
}

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case len(p.buf) > 0:
			n := copy(b, p.buf)
			p.buf = p.buf[:copy(p.buf, p.buf[n:])]
			p.change.Broadcast()
			return n, nil
		case p.closed:
			return 0, io.ErrClosedPipe
		case p.writers == 0:
			return 0, io.EOF
		case !p.deadline.IsZero() && !time.Now().Before(p.deadline):
			return 0, agent.ErrInterrupted
		}
		p.change.Wait()
	}
}

// TryRead implements agent.Output.
func (p *pipe) TryRead(b []byte) (int, error) {
	if p.Pending() == 0 {
		p.mu.Lock()
		open := p.writers > 0
		p.mu.Unlock()
		if open {
			return 0, agent.ErrInterrupted
		}
	}
	return p.Read(b)
}

// Close is the reader's: who writes then learns that nobody reads.
func (p *pipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.change.Broadcast()
	return nil
}

func (p *pipe) Interrupt(afterMS int) {
	d := time.Duration(afterMS) * time.Millisecond
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = time.Now().Add(d)
	p.change.Broadcast()
	if d > 0 {
		time.AfterFunc(d+time.Millisecond, p.wake)
	}
}

func (p *pipe) Pending() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.buf)
}
