package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

// catchSignals takes TERM, INT and HUP from the runtime, which would end the
// process, until release is called. What comes before handleSignals looks waits.
func catchSignals() (signals <-chan os.Signal, release func()) {
	ch := make(chan os.Signal, 4)
	signal.Notify(ch, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	return ch, func() { signal.Stop(ch) }
}

// handleSignals runs until done is closed: the first TERM or INT calls stop,
// the second ends the process at once, each HUP calls reload. Sandboxes outlive
// the daemon either way.
func handleSignals(signals <-chan os.Signal, done <-chan struct{}, log *slog.Logger, stop context.CancelFunc, reload func()) {
	stopping := false
	for {
		select {
		case <-done:
			return
		case s := <-signals:
			switch {
			case s == syscall.SIGHUP:
				reload()
			case stopping:
				log.Warn("second signal, exiting at once", "signal", s.String())
				os.Exit(128 + int(s.(syscall.Signal)))
			default:
				stopping = true
				log.Info("stopping", "signal", s.String())
				stop()
			}
		}
	}
}
