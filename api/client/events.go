package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"

	"github.com/boxed-mesh/boxed"
)

// maxEvent bounds one line of the stream of events, in bytes.
const maxEvent = 1 << 20

// Events yields what happens after the cursor. It does not reconnect: when the
// connection ends, so does the sequence, with an error; go on after the last
// event's cursor.
func (c *Client) Events(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error] {
	return func(yield func(boxed.Event, error) bool) {
		q := url.Values{}
		if after != "" {
			q.Set("after", string(after))
		}
		h := http.Header{"Accept": {"text/event-stream"}}
		resp, err := c.request(ctx, http.MethodGet, "/v1/events", q, h, nil)
		if err != nil {
			yield(boxed.Event{}, err)
			return
		}
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(make([]byte, 0, 8<<10), maxEvent)
		var typ string
		for lines.Scan() {
			field, value, _ := bytes.Cut(lines.Bytes(), []byte(": "))
			switch string(field) {
			case "event":
				typ = string(value)
			case "data":
				ev, err := decodeEvent(typ, value)
				if !yield(ev, err) || err != nil {
					return
				}
			}
		}
		if ctx.Err() != nil {
			yield(boxed.Event{}, contextError(ctx))
			return
		}
		yield(boxed.Event{}, &boxed.Error{Code: boxed.CodeLost, Message: "the stream of events broke off", Err: lines.Err()})
	}
}

func decodeEvent(typ string, data []byte) (ev boxed.Event, err error) {
	if typ == "error" {
		var p problem
		if json.Unmarshal(data, &p) == nil && p.Code != "" {
			return ev, p.err()
		}
		return ev, boxed.Errorf(boxed.CodeLost, "the stream of events broke off")
	}
	if err := json.Unmarshal(data, &ev); err != nil {
		return boxed.Event{}, &boxed.Error{Code: boxed.CodeInternal, Message: "the node sent an event that cannot be read", Err: err}
	}
	return ev, nil
}
