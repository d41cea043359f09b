package ctl

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/boxed-mesh/boxed"
)

// interrupts hands the signals that would end boxedctl to whoever is in charge
// at the moment: while a sandbox is made they cancel that, while a program runs
// they are its own, while a sandbox is destroyed they wait.
type interrupts struct {
	ch   chan os.Signal
	done chan struct{}
	wg   sync.WaitGroup

	mu     sync.Mutex
	handle func(os.Signal)
	last   os.Signal
}

// catchInterrupts catches signals until stop. It also keeps a closed pipe from
// ending boxedctl: a sandbox may have to be destroyed first.
func catchInterrupts() *interrupts {
	in := &interrupts{ch: make(chan os.Signal, 8), done: make(chan struct{})}
	for _, s := range endingSignals {
		if !signal.Ignored(s) { // nohup and the like mean it
			signal.Notify(in.ch, s)
		}
	}
	ignorePipe()
	in.wg.Go(func() {
		for {
			select {
			case <-in.done:
				return
			case s := <-in.ch:
				in.mu.Lock()
				in.last = s
				handle := in.handle
				in.mu.Unlock()
				if handle != nil {
					handle(s)
				}
			}
		}
	})
	return in
}

// to gives the signals to f from now on; nil drops them.
func (in *interrupts) to(f func(os.Signal)) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.handle = f
}

// cancelling is a context that ends with the first signal.
func (in *interrupts) cancelling(parent context.Context) (ctx context.Context, release func()) {
	ctx, cancel := context.WithCancel(parent)
	in.to(func(os.Signal) { cancel() })
	return ctx, func() { in.to(nil); cancel() }
}

// status is the exit status of a process that the last signal ended; without
// one, that of INT.
func (in *interrupts) status() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	if s, ok := in.last.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exitInterrupted
}

// err is the end by a signal as an error.
func (in *interrupts) err() error {
	if status := in.status(); status != exitInterrupted {
		return exitStatus(status)
	}
	return boxed.Errorf(boxed.CodeCanceled, "interrupted")
}

// stop returns the signals to what they did before.
func (in *interrupts) stop() {
	signal.Stop(in.ch)
	close(in.done)
	in.wg.Wait()
}
