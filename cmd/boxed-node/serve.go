package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// front serves the API on one listener.
type front struct {
	ln    net.Listener
	cert  *certificate // nil: no TLS
	drain time.Duration
	log   *slog.Logger

	server *http.Server
	// shutdown refuses new requests and returns when those in flight have ended,
	// or have been told to some time after its context has.
	shutdown func(context.Context) error
}

// run serves until stop is closed, and then drains: requests in flight have
// f.drain to end.
func (f *front) run(stop <-chan struct{}) error {
	served := make(chan error, 1)
	go func() {
		if f.cert != nil {
			f.server.TLSConfig = f.cert.config()
			served <- f.server.ServeTLS(f.ln, "", "")
		} else {
			served <- f.server.Serve(f.ln)
		}
	}()
	select {
	case err := <-served:
		return fmt.Errorf("serve the API: %w", err)
	case <-stop:
	}
	ctx, cancel := context.WithTimeout(context.Background(), f.drain)
	defer cancel()
	// New connections are still answered, with "shutting down", while it drains.
	if err := f.shutdown(ctx); err != nil {
		f.log.Warn("requests were cut off", "err", err)
	}
	flush, flushed := context.WithTimeout(context.Background(), flushTime)
	_ = f.server.Shutdown(flush) // answers that have been given and not yet sent
	flushed()
	f.server.Close()
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the API: %w", err)
	}
	return nil
}

// flushTime is for answers that lie in a buffer when the last request has ended.
const flushTime = time.Second
