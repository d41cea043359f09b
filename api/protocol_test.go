package api_test

import (
	"context"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

func TestStreamProtocol(t *testing.T) {
	h := newHarness(t)
	sb := h.add("x")
	path := "/v1/sandboxes/" + string(sb.ID) + "/exec/stream"
	binary := func(f frame.Frame) func(*websocket.Conn) {
		return func(c *websocket.Conn) { h.send(c, f) }
	}
	raw := func(b ...byte) func(*websocket.Conn) {
		return func(c *websocket.Conn) { c.Write(context.Background(), websocket.MessageBinary, b) }
	}
	for name, c := range map[string]struct {
		first, path string
		then        func(*websocket.Conn)
		field       string
	}{
		"request is not JSON":     {`{`, path, nil, ""},
		"request does not fit":    {`{"args":["x"],"bogus":1}`, path, nil, "bogus"},
		"stdin not asked for":     {`{"args":["sleep"]}`, path, binary(frame.Frame{Type: frame.Stdin, Payload: []byte("x")}), ""},
		"close of no stdin":       {`{"args":["sleep"]}`, path, binary(frame.Frame{Type: frame.StdinClose}), ""},
		"a server's frame":        {`{"args":["sleep"]}`, path, binary(frame.Frame{Type: frame.Exit, Payload: []byte("{}")}), ""},
		"credit without a window": {`{"args":["sleep"]}`, path, binary(frame.Frame{Type: frame.Credit, Stream: frame.Stdout, Bytes: 1}), ""},
		"unknown type":            {`{"args":["sleep"]}`, path, raw(0x7f), ""},
		"empty message":           {`{"args":["sleep"]}`, path, raw(), ""},
		"text after the first":    {`{"args":["sleep"]}`, path, func(c *websocket.Conn) { h.sendText(c, "x") }, ""},
		"signal with an escape":   {`{"args":["sleep"]}`, path, raw(4, 0x1b), ""},
		"seventeen signals": {`{"args":["sleep"]}`, path, func(c *websocket.Conn) {
			raw(4, 'A')(c)
			for range 16 {
				raw(4, 'A')(c)
			}
		}, ""},
		"stdin beyond the window": {`{"args":["sleep"],"stdin":true}`, path, func(c *websocket.Conn) {
			for range 2 {
				h.send(c, frame.Frame{Type: frame.Stdin, Payload: make([]byte, 1<<20)})
			}
		}, ""},
		"stdin after its end": {`{"args":["sleep"],"stdin":true}`, path, func(c *websocket.Conn) { raw(2)(c); raw(1, 'x')(c) }, ""},
	} {
		t.Run("refuses: "+name, func(t *testing.T) {
			conn := h.socket(c.path)
			h.sendText(conn, c.first)
			if c.then != nil {
				c.then(conn)
			}
			got, code := frames(conn)
			p := lastError(t, got)
			field, _ := p.Detail["field"].(string)
			if p.Code != boxed.CodeInvalid || code != websocket.StatusPolicyViolation || field != c.field {
				t.Errorf("%+v, closed with %d", p, code)
			}
		})
	}
	t.Run("refuses: a binary first message", func(t *testing.T) {
		conn := h.socket(path)
		raw(1, 2)(conn)
		if got, _ := frames(conn); lastError(t, got).Code != boxed.CodeInvalid {
			t.Error(got)
		}
	})
	t.Run("ends at a message over 1 MiB", func(t *testing.T) {
		conn := h.socket(path)
		h.sendText(conn, `{"args":["sleep"],"stdin":true}`)
		conn.Write(context.Background(), websocket.MessageBinary, make([]byte, 1<<20+2))
		if _, code := frames(conn); code != websocket.StatusMessageTooBig {
			t.Error(code)
		}
	})
	t.Run("a WebSocket that is none", func(t *testing.T) {
		a := h.do("GET", path, "", "Upgrade", "h2c", "Connection", "Upgrade")
		if a.status != 426 {
			t.Error(a.status)
		}
	})
	t.Run("a window that is none", func(t *testing.T) {
		if a := h.do("GET", path+"?window=1", ""); a.status != 400 || a.problem().Detail["field"] != "window" {
			t.Errorf("%s", a.body)
		}
	})
}

func FuzzStream(f *testing.F) {
	f.Add([]byte{1, 'x'}, []byte{5, 0x10, 0, 0, 0, 1})
	f.Add([]byte{2}, []byte{3, 0, 80, 0, 24})
	f.Add([]byte{4, 'T', 'E', 'R', 'M'}, []byte{})
	h := newHarness(f)
	sb := h.add("x")
	path := "/v1/sandboxes/" + string(sb.ID) + "/exec/stream?window=4096"
	f.Fuzz(func(t *testing.T, a, b []byte) {
		h := &harness{fake: h.fake, t: t, http: h.http}
		conn := h.socket(path)
		defer conn.CloseNow()
		h.sendText(conn, `{"args":["cat"],"stdin":true}`)
		for _, m := range [][]byte{a, b, {2}} {
			conn.Write(context.Background(), websocket.MessageBinary, m)
		}
		got, _ := frames(conn)
		for i, f := range got {
			if f.Type.Last() != (i == len(got)-1) {
				t.Fatalf("the end is not last: %v", got)
			}
		}
	})
}
