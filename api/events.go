package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// settleTime is how long the stream of events waits for a first item before it
// commits to status 200: a cursor that has expired is known at once.
const settleTime = 100 * time.Millisecond

// maxCursor bounds a cursor, which has a place for each node, as openapi.yaml does.
const maxCursor = 48 << 10

type eventItem struct {
	ev  boxed.Event
	err error
}

// follow reads the port's events in a goroutine of its own, so that comments
// can be sent between them. stop waits for it.
func (c *call) follow(after boxed.Cursor) (items <-chan eventItem, stop func()) {
	ctx, cancel := context.WithCancel(c.ctx)
	out, done := make(chan eventItem), make(chan struct{})
	go func() {
		defer close(done)
		defer close(out)
		for ev, err := range c.s.cfg.Service.Events(ctx, after) {
			select {
			case out <- eventItem{ev, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return out, func() { cancel(); <-done }
}

// events streams events as they happen, and a comment while nothing does.
func (c *call) events() error {
	after := boxed.Cursor(c.v.str("after"))
	if !c.v.has("after") {
		after = boxed.Cursor(c.r.Header.Get("Last-Event-ID"))
	}
	if len(after) > maxCursor {
		return invalidField("Last-Event-ID", "must have at most 49152 characters")
	}
	items, stop := c.follow(after)
	defer stop()
	w := c.writer()
	defer w.rest()
	var buf bytes.Buffer
	tick := time.NewTimer(settleTime)
	defer tick.Stop()
	for {
		buf.Reset()
		select {
		case it, ok := <-items:
			switch {
			case !ok:
				it.err = boxed.Errorf(boxed.CodeNotReady, "the stream of events has ended; go on after the last cursor")
				fallthrough
			case it.err != nil:
				err := c.outcome(it.err)
				if !c.w.wrote {
					return err
				}
				c.code, c.err = boxed.CodeOf(err), err
				writeEvent(&buf, "", "error", problemOf(err, c.id))
				w.Write(buf.Bytes())
				w.flush()
				return nil
			}
			writeEvent(&buf, string(it.ev.Cursor), string(it.ev.Type), it.ev)
		case <-tick.C:
			buf.WriteString(": \n\n")
		}
		if !c.w.wrote {
			c.w.Header().Set("Content-Type", "text/event-stream")
			c.w.Header().Set("X-Accel-Buffering", "no")
			c.w.WriteHeader(http.StatusOK)
		}
		tick.Reset(c.s.cfg.KeepAlive)
		if _, err := w.Write(buf.Bytes()); err != nil {
			return c.endEvents(w, err)
		}
		if err := w.flush(); err != nil {
			return c.endEvents(w, err)
		}
	}
}

// endEvents tells a client that still listens why the server ends the stream.
func (c *call) endEvents(w *idleWriter, err error) error {
	own := ended(c.ctx)
	if own == nil {
		return &boxed.Error{Code: boxed.CodeCanceled, Message: "the client went away", Err: err}
	}
	c.code, c.err = own.Code, own
	var buf bytes.Buffer
	writeEvent(&buf, "", "error", problemOf(own, c.id))
	c.w.Write(buf.Bytes())
	w.ctl.Flush()
	return nil
}

// writeEvent appends one server-sent event. Cursors and types are the port's
// own, but a line break in one would still forge an event.
func writeEvent(b *bytes.Buffer, id, typ string, data any) {
	line := strings.NewReplacer("\n", "", "\r", "", "\x00", "")
	if id != "" {
		b.WriteString("id: " + line.Replace(id) + "\n")
	}
	b.WriteString("event: " + line.Replace(typ) + "\ndata: ")
	raw, _ := json.Marshal(data)
	b.Write(raw)
	b.WriteString("\n\n")
}
