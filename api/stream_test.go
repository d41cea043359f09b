package api_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
)

// socket dials a WebSocket of the API by hand.
func (h *harness) socket(path string) *websocket.Conn {
	h.t.Helper()
	conn, _, err := websocket.Dial(context.Background(), h.http.URL+path, &websocket.DialOptions{
		HTTPHeader: http.Header{"Authorization": {"Bearer " + userKey}},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	conn.SetReadLimit(frame.MaxMessage)
	h.t.Cleanup(func() { conn.CloseNow() })
	return conn
}

func (h *harness) sendText(conn *websocket.Conn, text string) {
	h.t.Helper()
	if err := conn.Write(context.Background(), websocket.MessageText, []byte(text)); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) send(conn *websocket.Conn, f frame.Frame) {
	h.t.Helper()
	if err := conn.Write(context.Background(), websocket.MessageBinary, frame.Append(nil, f)); err != nil {
		h.t.Fatal(err)
	}
}

// frames reads to the end of the socket.
func frames(conn *websocket.Conn) (list []frame.Frame, closed websocket.StatusCode) {
	for {
		_, raw, err := conn.Read(context.Background())
		if err != nil {
			return list, websocket.CloseStatus(err)
		}
		f, err := frame.Parse(raw)
		if err != nil {
			panic(err)
		}
		list = append(list, f)
	}
}

func lastError(t *testing.T, list []frame.Frame) problem {
	t.Helper()
	var p problem
	if len(list) == 0 || list[len(list)-1].Type != frame.Error {
		t.Fatalf("no error at the end: %v", list)
	}
	json.Unmarshal(list[len(list)-1].Payload, &p)
	return p
}

// hashed counts and hashes what is written.
type hashed struct {
	hash.Hash
	n int64
}

func newHashed() *hashed { return &hashed{Hash: sha256.New()} }
func (h *hashed) Write(p []byte) (int, error) {
	h.n += int64(len(p))
	return h.Hash.Write(p)
}

func TestExecStream(t *testing.T) {
	t.Run("100 MiB through stdin to stdout arrive as they were", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		const size = 100 << 20
		in, out := newHashed(), newHashed()
		src := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), in)
		st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: src, Stdout: out})
		if err != nil || st.StdoutBytes != size || out.n != size {
			t.Fatal(st, err, out.n)
		}
		if !bytes.Equal(in.Sum(nil), out.Sum(nil)) {
			t.Error("not the same bytes")
		}
	})
	t.Run("1 GiB of output streams with flat memory", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		size := int64(1 << 30)
		if testing.Short() {
			size = 1 << 28
		}
		var peak atomic.Uint64
		var before runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		chunk := make([]byte, 128<<10)
		h.fake.run = func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for n := int64(0); n < size; n += int64(len(chunk)) {
				if _, err := req.Stdout.Write(chunk); err != nil {
					return boxed.ExitStatus{}, err
				}
				if n%(64<<20) == 0 {
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					peak.Store(max(peak.Load(), m.HeapAlloc))
				}
			}
			return boxed.ExitStatus{Reason: boxed.ReasonExited, StdoutBytes: size}, nil
		}
		var got countWriter
		if _, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: &got}); err != nil || int64(got) != size {
			t.Fatal(err, got)
		}
		if grown := int64(peak.Load()) - int64(before.HeapAlloc); grown > 32<<20 {
			t.Errorf("the heap grew by %d MiB", grown>>20)
		}
	})
	t.Run("a character is whole whatever the chunks", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.run = func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for i := range 4 {
				io.WriteString(req.Stdout, "🙂"[i:i+1])
			}
			io.WriteString(req.Stderr, "e\n\nlast line")
			return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
		}
		var out, err2 bytes.Buffer
		if _, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: &out, Stderr: &err2}); err != nil {
			t.Fatal(err)
		}
		if out.String() != "🙂" || err2.String() != "e\n\nlast line" {
			t.Errorf("%q %q", out.String(), err2.String())
		}
	})
	t.Run("returns though its stdin is an open, silent pipe", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		r, w := io.Pipe()
		defer w.Close()
		st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"false"}, Stdin: r})
		if err != nil || st.Code != 1 {
			t.Error(st, err)
		}
	})
	t.Run("returns though nobody reads its stdin to the end", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"false"}, Stdin: rand.NewChaCha8([32]byte{})})
		if err != nil || st.Code != 1 {
			t.Error(st, err)
		}
	})
	t.Run("stdin is closed only by its end, and /dev/null when there is none", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if _, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdout: io.Discard}); err != nil || h.lastCall().(boxed.ExecRequest).Stdin != nil {
			t.Error(err)
		}
		r, w := io.Pipe()
		var out lockedBuffer
		done := make(chan error, 1)
		go func() {
			_, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: r, Stdout: &out})
			done <- err
		}()
		io.WriteString(w, "one")
		eventually(t, "one comes back", func() bool { return out.String() == "one" })
		io.WriteString(w, "two")
		eventually(t, "two comes back", func() bool { return out.String() == "onetwo" })
		w.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("input that breaks off does not look whole", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		r, w := io.Pipe()
		ended := make(chan error, 1)
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			_, err := io.Copy(io.Discard, req.Stdin)
			ended <- err
			return boxed.ExitStatus{}, nil
		}
		go w.CloseWithError(errors.New("disk on fire"))
		_, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: r})
		if err == nil || !strings.Contains(err.Error(), "disk on fire") {
			t.Error(err)
		}
		if err := <-ended; err == nil {
			t.Error("the program saw a clean end of input")
		}
	})
	t.Run("resizes and signals arrive while stdin is stuck", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			if !req.TTY || req.Size != (boxed.Size{Cols: 80, Rows: 24}) {
				return boxed.ExitStatus{}, fmt.Errorf("%+v", req)
			}
			size := <-req.Resize
			name := <-req.Signals
			return boxed.ExitStatus{Reason: boxed.ReasonSignaled, Signal: name, Code: int(size.Cols)}, nil
		}
		resize, signals := make(chan boxed.Size), make(chan string)
		go func() { resize <- boxed.Size{Cols: 132, Rows: 50}; signals <- "INT"; close(resize); close(signals) }()
		st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{
			Args: []string{"x"}, TTY: true, Size: boxed.Size{Cols: 80, Rows: 24}, Stdin: rand.NewChaCha8([32]byte{}),
			Resize: resize, Signals: signals,
		})
		if err != nil || st.Signal != "INT" || st.Code != 132 {
			t.Error(st, err)
		}
	})
	t.Run("a paused reader stops the program, not the link", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.WriteIdle = 150 * time.Millisecond; c.PingInterval = 20 * time.Millisecond })
		sb := h.add("x")
		var written atomic.Int64
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for range 16 << 10 {
				n, err := req.Stdout.Write(make([]byte, 1<<10))
				written.Add(int64(n))
				if err != nil {
					return boxed.ExitStatus{}, err
				}
			}
			return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
		}
		pr, pw := io.Pipe()
		done := make(chan error, 1)
		go func() {
			_, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: pw})
			pw.Close()
			done <- err
		}()
		eventually(t, "it writes", func() bool { return written.Load() > 0 })
		time.Sleep(500 * time.Millisecond) // longer than a reader without a window may take
		if n := written.Load(); n > 2<<20 {
			t.Errorf("%d bytes went ahead of the reader", n)
		}
		if n, err := io.Copy(io.Discard, pr); n != 16<<20 || err != nil {
			t.Error(n, err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("a reader without a window that takes nothing is closed", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.WriteIdle = 100 * time.Millisecond; c.PingInterval = time.Hour })
		sb := h.add("x")
		ended := make(chan error, 1)
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for {
				if _, err := req.Stdout.Write(make([]byte, 64<<10)); err != nil {
					<-ctx.Done()
					ended <- err
					return boxed.ExitStatus{}, err
				}
			}
		}
		conn := h.socket("/v1/sandboxes/" + string(sb.ID) + "/exec/stream")
		h.sendText(conn, `{"args":["x"]}`)
		if err := <-ended; err == nil {
			t.Error("no error")
		}
	})
	t.Run("a client that leaves ends the program, also one that hangs", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.WriteIdle = 50 * time.Millisecond; c.PingInterval = 50 * time.Millisecond })
		sb := h.add("x")
		ended := make(chan struct{}, 3)
		h.fake.run = func(ctx context.Context, _ boxed.ExecRequest) (boxed.ExitStatus, error) {
			<-ctx.Done()
			ended <- struct{}{}
			return boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, nil
		}
		path := "/v1/sandboxes/" + string(sb.ID) + "/exec/stream"
		for _, leave := range []func(*websocket.Conn){
			func(c *websocket.Conn) { c.CloseNow() },
			func(c *websocket.Conn) { c.Close(websocket.StatusNormalClosure, "") },
			func(c *websocket.Conn) {}, // never reads, so never answers a ping
		} {
			conn := h.socket(path)
			h.sendText(conn, `{"args":["x"]}`)
			eventually(t, "it runs", func() bool { return h.called("Exec") > 0 })
			leave(conn)
			<-ended
		}
	})
	t.Run("ends the program with the caller's context", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := h.client.Exec(ctx, sb.ID, boxed.ExecRequest{Args: []string{"sleep"}, Stdout: io.Discard})
		if !errors.Is(err, boxed.CodeDeadline) {
			t.Error(err)
		}
	})
	t.Run("ends with the writer's error", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		r, w := io.Pipe()
		r.CloseWithError(errors.New("nobody listens"))
		_, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"echo", "x"}, Stdout: w})
		if err == nil || !strings.Contains(err.Error(), "nobody listens") {
			t.Error(err)
		}
	})
	t.Run("says once how it ended, and then closes", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		conn := h.socket("/v1/sandboxes/" + string(sb.ID) + "/exec/stream")
		h.sendText(conn, `{"args":["echo","hi"]}`)
		got, code := frames(conn)
		want := []frame.Frame{
			{Type: frame.Started, Text: "abcdefghij23"}, {Type: frame.Stdout, Payload: []byte("hi\n")},
			{Type: frame.Exit, Payload: []byte(`{"reason":"exited","exit_code":0,"stdout_bytes":3,"stderr_bytes":0,"duration_ms":0}`)},
		}
		if diff := cmp.Diff(want, got); diff != "" || code != websocket.StatusNormalClosure {
			t.Error(diff, code)
		}
	})
	t.Run("errors come as frames after the upgrade and as statuses before it", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		_, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"missing"}, Stdout: io.Discard})
		var e *boxed.Error
		if !errors.As(err, &e) || e.Code != boxed.CodeStartFailed || e.Field() != "args" || e.Detail["exec"] != "abcdefghij23" {
			t.Errorf("%#v", err)
		}
		_, err = h.client.Exec(t.Context(), "nobody", boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard})
		if !errors.Is(err, boxed.CodeNotFound) {
			t.Error(err)
		}
		if _, err = h.as("boxed_wrong").Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard}); !errors.Is(err, boxed.CodeUnauthenticated) {
			t.Error(err)
		}
	})
	t.Run("a revoked key ends streams within 5 seconds", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		conn := h.socket("/v1/sandboxes/" + string(sb.ID) + "/exec/stream")
		h.sendText(conn, `{"args":["sleep"]}`)
		eventually(t, "it runs", func() bool { return h.called("Exec") == 1 })
		start := time.Now()
		h.keys.revoke("user")
		got, code := frames(conn)
		if p := lastError(t, got); p.Code != boxed.CodeUnauthenticated || code != websocket.StatusPolicyViolation || time.Since(start) > 5*time.Second {
			t.Error(p, code, time.Since(start))
		}
	})
	t.Run("a revoked key ends a stream whose client and program are stuck", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for {
				if _, err := req.Stdout.Write(make([]byte, 1<<20)); err != nil {
					return boxed.ExitStatus{}, err
				}
			}
		}
		conn := h.socket("/v1/sandboxes/" + string(sb.ID) + "/exec/stream")
		h.sendText(conn, `{"args":["x"]}`)
		eventually(t, "it runs", func() bool { return h.called("Exec") == 1 })
		time.Sleep(100 * time.Millisecond) // until the socket's buffers are full
		start := time.Now()
		h.keys.revoke("user")
		eventually(t, "it is logged as ended", func() bool { return strings.Contains(h.log.String(), "exec/stream") })
		if d := time.Since(start); d > 5*time.Second {
			t.Error(d)
		}
	})
}

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

type countWriter int64

func (c *countWriter) Write(p []byte) (int, error) { *c += countWriter(len(p)); return len(p), nil }

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type blockingWriter struct {
	lockedBuffer
	slow time.Duration
}

func (w *blockingWriter) Write(p []byte) (int, error) {
	time.Sleep(w.slow)
	return w.lockedBuffer.Write(p)
}
