package api_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/api/client"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestServer(t *testing.T) {
	t.Run("a panic is a 500 with the request's ID, and the node lives on", func(t *testing.T) {
		h := newHarness(t)
		h.fake.create = func(contextT, boxed.Spec) (*boxed.Sandbox, error) { panic("secret") }
		a := h.do("POST", "/v1/sandboxes", "{}", "X-Request-ID", "abc-1")
		if p := a.problem(); a.status != 500 || p.Code != boxed.CodeInternal || p.RequestID != "abc-1" || strings.Contains(p.Message, "secret") {
			t.Errorf("%d %s", a.status, a.body)
		}
		if a := h.do("GET", "/healthz", ""); a.status != 200 {
			t.Error(a.status)
		}
	})
	t.Run("takes a harmless request ID and mints one otherwise", func(t *testing.T) {
		h := newHarness(t)
		for id, ok := range map[string]bool{"a.b_C-9": true, "": false, strings.Repeat("x", 65): false, "a b": false, "a\x1b[2J": false, "é": false} {
			if strings.ContainsRune(id, 0x1b) {
				continue // Go's client refuses it
			}
			if got := h.do("GET", "/healthz", "", "X-Request-ID", id).header.Get("X-Request-ID"); (got == id) != ok || got == "" {
				t.Errorf("%q became %q", id, got)
			}
		}
	})
	t.Run("says whether it is ready, alive and what it is", func(t *testing.T) {
		var problems []string
		h := newHarness(t, func(c *api.Config) { c.Ready = func(context.Context) []string { return problems } })
		if err := h.client.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		problems = []string{"docker does not answer", "disk"}
		err := h.client.Ready(t.Context())
		var e *boxed.Error
		if !errors.As(err, &e) || e.Code != boxed.CodeNotReady || !strings.Contains(e.Message, "docker") || len(e.Detail["problems"].([]any)) != 2 {
			t.Error(err)
		}
		if v, err := h.client.Version(t.Context()); v != "test" || err != nil {
			t.Error(v, err)
		}
		if a := h.do("GET", "/healthz", "", "Authorization", ""); a.status != 200 {
			t.Error(a.status)
		}
	})
	t.Run("logs one line without secrets, code, paths or names of files", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.do("POST", "/v1/sandboxes/x/exec", `{"language":"python","code":"SECRETCODE","env":{"K":"SECRETENV"}}`, "X-Request-ID", "one")
		h.do("GET", "/v1/sandboxes/"+string(sb.ID)+"/files?path=/SECRETPATH", "", "X-Request-ID", "two")
		h.do("GET", "/v1/SECRETURL", "", "X-Request-ID", "three")
		eventually(t, "three lines", func() bool { return strings.Count(h.log.String(), "msg=request") == 3 })
		log := h.log.String()
		if strings.Contains(log, "SECRET") || strings.Contains(log, userKey) {
			t.Error(log)
		}
		for _, want := range []string{"route=/v1/sandboxes/{id}/exec status=200", "request_id=one", "owner=ada", "key=user", "code=not_found", "addr=127.0.0.1"} {
			if !strings.Contains(log, want) {
				t.Errorf("no %s in\n%s", want, log)
			}
		}
	})
	t.Run("a body that stops arriving ends", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.JSONIdle = 50 * time.Millisecond })
		conn, err := net.Dial("tcp", h.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", userKey)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != 504 {
			t.Error(resp.Status)
		}
	})
	t.Run("headers that are too large are refused", func(t *testing.T) {
		h := newHarness(t)
		if a := h.do("GET", "/healthz", "", "X-Junk", strings.Repeat("x", 100<<10)); a.status != 431 {
			t.Error(a.status)
		}
	})
	t.Run("works on with one connection after a read deadline", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.JSONIdle = 100 * time.Millisecond })
		h.fake.create = func(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
			select { // longer than the deadline of a read
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(300 * time.Millisecond):
				return h.add("x"), nil
			}
		}
		for range 2 {
			if a := h.do("POST", "/v1/sandboxes", "{}"); a.status != 201 {
				t.Errorf("%d %s", a.status, a.body)
			}
		}
	})
}

func TestShutdown(t *testing.T) {
	t.Run("refuses new requests, waits for old ones, ends followers at once", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		release := make(chan struct{})
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			select {
			case <-release:
				return boxed.ExitStatus{Reason: boxed.ReasonExited, Code: 3}, nil
			case <-ctx.Done():
				return boxed.ExitStatus{}, ctx.Err()
			}
		}
		ran, followed, shut := make(chan error, 1), make(chan error, 1), make(chan error, 1)
		go func() {
			st, err := h.client.Exec(context.Background(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard})
			if err == nil && st.Code != 3 {
				err = fmt.Errorf("%+v", st)
			}
			ran <- err
		}()
		go func() {
			for _, err := range h.client.Events(context.Background(), "") {
				followed <- err
			}
		}()
		eventually(t, "both run", func() bool { return h.called("Exec") == 1 && h.called("Events") == 1 })
		go func() { shut <- h.server.Shutdown(context.Background()) }()
		if err := <-followed; !errors.Is(err, boxed.CodeLost) {
			t.Errorf("events: %v", err)
		}
		eventually(t, "new ones are refused", func() bool {
			a := h.do("GET", "/v1/sandboxes", "")
			return a.status == 503 && a.problem().Code == boxed.CodeNotReady && a.header.Get("Retry-After") != ""
		})
		close(release)
		if err := <-ran; err != nil {
			t.Errorf("exec: %v", err)
		}
		if err := <-shut; err != nil {
			t.Error(err)
		}
	})
	t.Run("after the drain time tells streams that the node goes away, and why to the port", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		cause := make(chan error, 2)
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			req.Started("abcdefghij23")
			<-ctx.Done()
			cause <- context.Cause(ctx)
			return boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, nil
		}
		errs := make(chan error, 2)
		go func() {
			_, err := h.client.Exec(context.Background(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard})
			errs <- err
		}()
		go func() {
			_, err := h.client.Run(context.Background(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
			errs <- err
		}()
		eventually(t, "both run", func() bool { return h.called("Exec") == 2 })
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if err := h.server.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		for range 2 {
			err := <-errs
			var e *boxed.Error
			if !errors.As(err, &e) || e.Code != boxed.CodeLost || e.Detail["reason"] != "going_away" {
				t.Errorf("%v", err)
			}
			if err := <-cause; !errors.Is(err, boxed.ErrGoingAway) {
				t.Errorf("cause %v", err)
			}
		}
	})
}

func TestClient(t *testing.T) {
	t.Run("says that no node is there", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		c, err := client.New(client.Config{Endpoint: "http://" + l.Addr().String()})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, get := c.Resolve(t.Context(), "x")
		_, stream := c.Exec(t.Context(), "x", boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard})
		_, post := c.Create(t.Context(), boxed.Spec{})
		for _, err := range []error{get, stream, post} {
			if !errors.Is(err, boxed.CodeNotReady) || !strings.Contains(err.Error(), "no boxed-node answers at http://127.0.0.1") {
				t.Errorf("%v", err)
			}
		}
	})
	t.Run("refuses endpoints and pins that are none", func(t *testing.T) {
		for _, e := range []string{"", "127.0.0.1:8080", "ftp://x", "http://", "http://u:p@x", "http://x?y"} {
			if _, err := client.New(client.Config{Endpoint: e}); !errors.Is(err, boxed.CodeInvalid) {
				t.Errorf("%q: %v", e, err)
			}
		}
		for _, c := range []client.Config{{Fingerprint: "12"}, {CAFile: "/nonexistent"}, {APIKey: "a\nb"}} {
			c.Endpoint = "https://x"
			if _, err := client.New(c); !errors.Is(err, boxed.CodeInvalid) {
				t.Errorf("%+v: %v", c, err)
			}
		}
	})
	t.Run("tells an answer that is not a node's", func(t *testing.T) {
		c := against(t, func(w http.ResponseWriter, r *http.Request) { http.Error(w, "<html>", http.StatusTeapot) })
		if _, err := c.Resolve(t.Context(), "x"); !errors.Is(err, boxed.CodeInternal) || !strings.Contains(err.Error(), "418") {
			t.Error(err)
		}
	})
	t.Run("asks once more for what changes nothing, never for what may", func(t *testing.T) {
		var gets, posts atomic.Int32
		c := against(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "POST" {
				posts.Add(1)
			} else if gets.Add(1) == 2 {
				io.WriteString(w, `{"id":"x"}`)
				return
			}
			conn, _, _ := http.NewResponseController(w).Hijack()
			conn.Close()
		})
		if _, err := c.Resolve(t.Context(), "x"); err != nil {
			t.Error(err)
		}
		if _, err := c.Create(t.Context(), boxed.Spec{}); !errors.Is(err, boxed.CodeLost) || posts.Load() != 1 {
			t.Error(err, posts.Load())
		}
	})
	t.Run("trusts the system, a CA file, or one pinned certificate", func(t *testing.T) {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, `{"version":"v"}`) }))
		s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
		s.StartTLS()
		defer s.Close()
		ca := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(s.Certificate().Raw)
		right := fmt.Sprintf("SHA256:% X", sum)
		for name, c := range map[string]struct {
			cfg client.Config
			ok  bool
		}{
			"system": {client.Config{}, false},
			"CA":     {client.Config{CAFile: ca}, true},
			"pin":    {client.Config{Fingerprint: strings.ReplaceAll(right, " ", ":")}, true},
			"other":  {client.Config{Fingerprint: strings.Repeat("0", 64)}, false},
		} {
			c.cfg.Endpoint = s.URL
			cl, err := client.New(c.cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cl.Version(t.Context()); (err == nil) != c.ok {
				t.Errorf("%s: %v", name, err)
			}
			cl.Close()
		}
	})
	t.Run("ends with its context", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		if _, err := h.client.Run(ctx, sb.ID, boxed.ExecRequest{Args: []string{"sleep"}}); !errors.Is(err, boxed.CodeDeadline) {
			t.Error(err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if _, err := h.client.Get(ctx, sb.ID); !errors.Is(err, boxed.CodeCanceled) {
			t.Error(err)
		}
	})
}
