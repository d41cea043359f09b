//go:build !windows

package ctl

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/boxed-mesh/boxed"
)

// endingSignals end a process that does not know better.
var endingSignals = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// signalName is a signal's name as programs in a sandbox get it.
func signalName(s os.Signal) string {
	switch s {
	case syscall.SIGINT:
		return "INT"
	case syscall.SIGHUP:
		return "HUP"
	case syscall.SIGQUIT:
		return "QUIT"
	}
	return "TERM"
}

// ignorePipe makes writing to a closed pipe an error, on stdout too.
func ignorePipe() { signal.Ignore(syscall.SIGPIPE) }

// watchSize sends f's size to sizes whenever its window changes, until ctx
// ends. A size that nobody took yet is replaced.
func watchSize(ctx context.Context, f *os.File, sizes chan boxed.Size) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	defer signal.Stop(changed)
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			sendLatest(sizes, terminalSize(f))
		}
	}
}

// enableEscapes makes the terminal f obey escape sequences, and reports whether
// it does.
func enableEscapes(any) bool { return true }

// keyIsPublic reports whether others may read the file.
func keyIsPublic(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().Perm()&0o077 != 0
}
