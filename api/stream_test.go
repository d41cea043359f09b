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
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/api/client"
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
		h := newHarness(t, func(c *api.Config) { c.WriteIdle = time.Second; c.PingInterval = 20 * time.Millisecond })
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
		time.Sleep(1500 * time.Millisecond) // longer than a reader without a window may take
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
			{Type: frame.Started, Text: "abcdefghij23"},
			{Type: frame.Stdout, Payload: []byte("hi\n")},
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

// X14: a node that falls silent, frozen or gone without a word, is a lost link,
// and not a call that never ends.
func TestASilentNodeIsALostLink(t *testing.T) {
	quit := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer conn.CloseNow()
		<-quit
	}))
	defer server.Close()
	defer close(quit)
	c, err := client.New(client.Config{Endpoint: server.URL, MaxSilence: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Exec(t.Context(), boxed.NewID(boxed.NodeID("abcdefghijklmnop")), boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard})
	if !errors.Is(err, boxed.CodeLost) {
		t.Errorf("got %v", err)
	}
}
