package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/google/go-cmp/cmp"
)

// feed yields events from a channel, then waits for the end of the context.
func feed(events <-chan boxed.Event) func(context.Context, boxed.Cursor) iter.Seq2[boxed.Event, error] {
	return func(ctx context.Context, _ boxed.Cursor) iter.Seq2[boxed.Event, error] {
		return func(yield func(boxed.Event, error) bool) {
			for {
				select {
				case ev, ok := <-events:
					if !ok {
						yield(boxed.Event{}, boxed.Errorf(boxed.CodeCursorExpired, "you were too slow"))
						return
					}
					if !yield(ev, nil) {
						return
					}
				case <-ctx.Done():
					yield(boxed.Event{}, ctx.Err())
					return
				}
			}
		}
	}
}

func event(n int) boxed.Event {
	return boxed.Event{
		Cursor: boxed.Cursor(fmt.Sprint("c", n)), Type: boxed.EventStarted, At: time.Unix(int64(n), 0).UTC(), Node: testNode,
		Message: "line\nbreak\r\n\nid: forged", Status: &boxed.ExitStatus{Reason: boxed.ReasonExited},
	}
}

func TestEvents(t *testing.T) {
	t.Run("arrive as they happen, until the caller stops", func(t *testing.T) {
		h := newHarness(t)
		events := make(chan boxed.Event)
		h.fake.events = feed(events)
		go func() { events <- event(1); events <- event(2); events <- event(3) }()
		n := 0
		for ev, err := range h.client.Events(t.Context(), "c0") {
			if err != nil {
				t.Fatal(err)
			}
			n++
			if diff := cmp.Diff(event(n), ev); diff != "" {
				t.Error(diff)
			}
			if n == 3 {
				break
			}
		}
		if h.lastCall() != boxed.Cursor("c0") {
			t.Error(h.lastCall())
		}
	})
	t.Run("take the cursor from the query or from Last-Event-ID", func(t *testing.T) {
		h := newHarness(t)
		h.fake.events = func(context.Context, boxed.Cursor) iter.Seq2[boxed.Event, error] {
			return func(yield func(boxed.Event, error) bool) { yield(boxed.Event{}, boxed.CodeCursorExpired) }
		}
		for _, c := range []struct{ query, header, want string }{
			{"", "", ""}, {"?after=a", "", "a"}, {"", "b", "b"}, {"?after=a", "b", "a"}, {"?after=", "b", ""}, {"?after=oldest", "", "oldest"},
		} {
			h.do("GET", "/v1/events"+c.query, "", "Last-Event-ID", c.header)
			if got := h.lastCall(); got != boxed.Cursor(c.want) {
				t.Errorf("%+v: %v", c, got)
			}
		}
	})
	t.Run("a cursor that is too old is a status, or the last event", func(t *testing.T) {
		h := newHarness(t)
		events := make(chan boxed.Event)
		close(events)
		h.fake.events = feed(events)
		if a := h.do("GET", "/v1/events", ""); a.status != 410 || a.problem().Code != boxed.CodeCursorExpired {
			t.Errorf("%d %s", a.status, a.body)
		}
		for _, err := range h.client.Events(t.Context(), "x") {
			if !errors.Is(err, boxed.CodeCursorExpired) {
				t.Error(err)
			}
		}
		later := make(chan boxed.Event, 1)
		later <- event(1)
		close(later)
		h.fake.events = feed(later)
		var last error
		n := 0
		for _, err := range h.client.Events(t.Context(), "x") {
			last = err
			n++
		}
		if n != 2 || !errors.Is(last, boxed.CodeCursorExpired) {
			t.Error(n, last)
		}
	})
	t.Run("are kept alive by comments, and an event cannot be forged", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.KeepAlive = 20 * time.Millisecond })
		events := make(chan boxed.Event, 1)
		h.fake.events = feed(events)
		resp, err := h.http.Client().Do(authorized(t, h, "/v1/events"))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
			t.Error(ct)
		}
		lines := bufio.NewScanner(resp.Body)
		comments := 0
		ids := 0
		for lines.Scan() {
			switch line := lines.Text(); {
			case strings.HasPrefix(line, ":"):
				if comments++; comments == 3 {
					ev := event(1)
					ev.Type = "x\nid: forged"
					events <- ev
				}
			case strings.HasPrefix(line, "id:"):
				ids++
				if line != "id: c1" {
					t.Error(line)
				}
			case strings.HasPrefix(line, "data:"):
				if ids != 1 {
					t.Error(ids)
				}
				return
			}
		}
	})
	t.Run("end with the caller's context, and with its key", func(t *testing.T) {
		h := newHarness(t)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			eventually(t, "it follows", func() bool { return h.called("Events") == 1 })
			cancel()
		}()
		for _, err := range h.client.Events(ctx, "") {
			if !errors.Is(err, boxed.CodeCanceled) {
				t.Error(err)
			}
		}
		go func() {
			eventually(t, "it follows", func() bool { return h.called("Events") == 2 })
			h.keys.revoke("user")
		}()
		start := time.Now()
		for _, err := range h.client.Events(t.Context(), "") {
			if !errors.Is(err, boxed.CodeUnauthenticated) {
				t.Error(err)
			}
		}
		if time.Since(start) > 5*time.Second {
			t.Error(time.Since(start))
		}
	})
}
