package ctl

import (
	"context"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/windows"

	"github.com/boxed-mesh/boxed"
)

// endingSignals are Ctrl-C and the closing of the console.
var endingSignals = []os.Signal{os.Interrupt, syscall.SIGTERM}

// signalName is a signal's name as programs in a sandbox get it.
func signalName(s os.Signal) string {
	if s == os.Interrupt {
		return "INT"
	}
	return "TERM"
}

// ignorePipe does nothing: Windows has no such signal.
func ignorePipe() {}

// watchSize sends f's size to sizes when it has changed, until ctx ends. A
// console tells nobody of a change but a reader of its raw events.
func watchSize(ctx context.Context, f *os.File, sizes chan boxed.Size) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	last := terminalSize(f)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if size := terminalSize(f); size != last {
				last = size
				sendLatest(sizes, size)
			}
		}
	}
}

// enableEscapes makes the console f obey escape sequences, and reports whether
// it does.
func enableEscapes(f any) bool {
	file, ok := f.(*os.File)
	if !ok {
		return false
	}
	var mode uint32
	h := windows.Handle(file.Fd())
	return windows.GetConsoleMode(h, &mode) == nil &&
		windows.SetConsoleMode(h, mode|windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING) == nil
}

// keyIsPublic is always false: permission bits say nothing here.
func keyIsPublic(string) bool { return false }
