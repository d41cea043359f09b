package api_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

func TestAttach(t *testing.T) {
	t.Run("resumes by offset, each byte once, and says what is gone", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		e, err := h.client.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		h.fake.attach = ring("0123456789", 3)
		for offset, want := range map[int64]string{0: "(3)3456789", 3: "3456789", 7: "789", 10: ""} {
			var out bytes.Buffer
			st, err := h.client.Attach(t.Context(), sb.ID, e.ID, boxed.AttachRequest{
				StdoutOffset: offset, Stdout: &out, Gap: func(s string, n int64) { fmt.Fprintf(&out, "(%d)", n) },
			})
			if err != nil || st.Reason != boxed.ReasonExited || out.String() != want {
				t.Errorf("%d: %q %v %v", offset, out.String(), st, err)
			}
		}
	})
	t.Run("passes on offsets, stdin and follow", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		e, _ := h.client.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, OpenStdin: true})
		h.fake.attach = func(_ context.Context, req boxed.AttachRequest) (boxed.ExitStatus, error) {
			b, err := io.ReadAll(req.Stdin)
			if req.StdoutOffset != 5 || req.StderrOffset != 6 || !req.NoFollow || string(b) != "in" {
				return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeInternal, "%+v %s %v", req, b, err)
			}
			return boxed.ExitStatus{}, nil
		}
		st, err := h.client.Attach(t.Context(), sb.ID, e.ID, boxed.AttachRequest{
			StdoutOffset: 5, StderrOffset: 6, NoFollow: true, Stdin: strings.NewReader("in"),
		})
		if err != nil || st.Reason != "" {
			t.Error(st, err)
		}
	})
	t.Run("an exec that is not there is a status before the upgrade", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if _, err := h.client.Attach(t.Context(), sb.ID, "aaaaaaaaaaaa", boxed.AttachRequest{}); !errors.Is(err, boxed.CodeNotFound) {
			t.Error(err)
		}
	})
	t.Run("leaving does not end it", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		e, _ := h.client.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := h.client.Attach(ctx, sb.ID, e.ID, boxed.AttachRequest{Stdout: io.Discard}); !errors.Is(err, boxed.CodeDeadline) {
			t.Error(err)
		}
		if got, err := h.client.GetExec(t.Context(), sb.ID, e.ID); err != nil || !got.Running {
			t.Error(got, err)
		}
	})
}

func TestBrokenLinks(t *testing.T) {
	for name, serve := range map[string]func(*websocket.Conn){
		"cut":               func(c *websocket.Conn) { c.CloseNow() },
		"closed normally":   func(c *websocket.Conn) { c.Close(websocket.StatusNormalClosure, "") },
		"not a frame":       func(c *websocket.Conn) { c.Write(context.Background(), websocket.MessageBinary, []byte{0x99}) },
		"text":              func(c *websocket.Conn) { c.Write(context.Background(), websocket.MessageText, []byte("{}")) },
		"exit without JSON": func(c *websocket.Conn) { c.Write(context.Background(), websocket.MessageBinary, []byte{0x14, '{'}) },
		"error without a code": func(c *websocket.Conn) {
			c.Write(context.Background(), websocket.MessageBinary, []byte{0x15, '{', '}'})
		},
		"more than the window": func(c *websocket.Conn) {
			for range 40 {
				c.Write(context.Background(), websocket.MessageBinary, append([]byte{0x10}, make([]byte, 1<<20)...))
			}
		},
	} {
		t.Run(name+" is lost, never an exit code", func(t *testing.T) {
			c := against(t, func(w http.ResponseWriter, r *http.Request) {
				conn, err := websocket.Accept(w, r, nil)
				if err != nil {
					return
				}
				defer conn.CloseNow()
				conn.SetReadLimit(1 << 20)
				conn.Read(context.Background())
				conn.Write(context.Background(), websocket.MessageBinary, frame.Append(nil, frame.Frame{Type: frame.Started, Text: "abcdefghij23"}))
				conn.Write(context.Background(), websocket.MessageBinary, frame.Append(nil, frame.Frame{Type: frame.Stdout, Payload: []byte("some")}))
				serve(conn)
				conn.Read(context.Background())
			})
			var out blockingWriter
			if name == "more than the window" {
				out.slow = 20 * time.Millisecond
			}
			st, err := c.Exec(t.Context(), "x", boxed.ExecRequest{Args: []string{"x"}, Stdout: &out})
			var e *boxed.Error
			if !errors.As(err, &e) || e.Code != boxed.CodeLost || st != (boxed.ExitStatus{}) || e.Detail["exec"] != "abcdefghij23" {
				t.Errorf("%+v %#v", st, err)
			}
			if !strings.HasPrefix(out.String(), "some") {
				t.Errorf("%.10q", out.String())
			}
		})
	}
}
