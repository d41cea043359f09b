package sandbox

import (
	"context"
	"io"
	"sync"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// terminals know who looks at the terminals of one sandbox's execs. Several may
// look at one, and it has one size: that of whoever typed last. The zero value
// is ready.
type terminals struct {
	mu    sync.Mutex
	execs map[string]*terminal
}

type terminal struct {
	viewers int
	typist  *viewer // who typed last; nil while nobody has: then any may size it
}

// viewer is one who follows an exec.
type viewer struct {
	all  *terminals
	exec string
	size boxed.Size // last asked for; guarded by terminals.mu
	set  func(boxed.Size)
}

// join takes a viewer in. set sizes the terminal. leave must be called.
func (t *terminals) join(exec string, set func(boxed.Size)) *viewer {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.execs == nil {
		t.execs = map[string]*terminal{}
	}
	if t.execs[exec] == nil {
		t.execs[exec] = &terminal{}
	}
	t.execs[exec].viewers++
	return &viewer{all: t, exec: exec, set: set}
}

func (v *viewer) leave() {
	v.all.mu.Lock()
	defer v.all.mu.Unlock()
	term := v.all.execs[v.exec]
	if term.typist == v {
		term.typist = nil
	}
	if term.viewers--; term.viewers == 0 {
		delete(v.all.execs, v.exec)
	}
}

// resize is the viewer's window having another size.
func (v *viewer) resize(size boxed.Size) {
	v.all.mu.Lock()
	v.size = size
	term := v.all.execs[v.exec]
	mine := term.typist == nil || term.typist == v
	v.all.mu.Unlock()
	if mine {
		v.set(size)
	}
}

// typed is the viewer having sent input.
func (v *viewer) typed() {
	v.all.mu.Lock()
	term := v.all.execs[v.exec]
	news := term.typist != v
	term.typist = v
	size := v.size
	v.all.mu.Unlock()
	if news && size != (boxed.Size{}) {
		v.set(size)
	}
}

// typing is a viewer's input.
type typing struct {
	io.Reader
	v *viewer
}

func (t typing) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	if n > 0 {
		t.v.typed() // before the program gets it
	}
	return n, err
}

// CloseWithError tells a writer that could learn of it that nobody reads.
func (t typing) CloseWithError(err error) error {
	if c, ok := t.Reader.(interface{ CloseWithError(error) error }); ok {
		return c.CloseWithError(err)
	}
	return nil
}

// watch makes a viewer of whoever follows an exec with a terminal, and its input
// one that is heard.
func (b *box) watch(ctx context.Context, host *agent.Host, exec string, stdin io.Reader) (*viewer, io.Reader) {
	v := b.terminals.join(exec, func(size boxed.Size) {
		if err := host.Resize(ctx, exec, size.Cols, size.Rows); err != nil && ctx.Err() == nil {
			b.m.log.Debug("size a terminal", "sandbox", b.id, "err", err)
		}
	})
	if stdin == nil {
		return v, nil
	}
	return v, typing{stdin, v}
}
