package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/api/client"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is a server over a fake, and a client of it.
type harness struct {
	*fake
	t      testing.TB
	keys   *keyring
	server *api.Server
	http   *httptest.Server
	client *client.Client
	log    *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newHarness(t testing.TB, change ...func(*api.Config)) *harness {
	t.Helper()
	h := &harness{fake: newFake(), t: t, keys: newKeyring(), log: &logBuffer{}}
	cfg := api.Config{
		Service: h.fake, Admin: h.fake, Auth: h.keys, Version: "test",
		Logger: slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, c := range change {
		c(&cfg)
	}
	var err error
	if h.server, err = api.New(cfg); err != nil {
		t.Fatal(err)
	}
	h.http = httptest.NewUnstartedServer(h.server)
	h.http.Config = h.server.HTTPServer()
	h.http.Start()
	h.client = h.as(userKey)
	t.Cleanup(func() {
		h.client.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if err := h.server.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		h.http.CloseClientConnections()
		h.http.Close()
	})
	return h
}

func (h *harness) as(key string) *client.Client {
	c, err := client.New(client.Config{Endpoint: h.http.URL, APIKey: key})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(c.Close)
	return c
}

type contextT = context.Context

type answer struct {
	status int
	header http.Header
	body   []byte
}

type problem struct {
	Code      boxed.Code     `json:"code"`
	Message   string         `json:"message"`
	Detail    map[string]any `json:"detail"`
	RequestID string         `json:"request_id"`
}

func (a answer) problem() (p problem) {
	json.Unmarshal(a.body, &p)
	return p
}

// do sends a raw request as the user. Headers come in pairs.
func (h *harness) do(method, path, body string, headers ...string) answer {
	h.t.Helper()
	req, err := http.NewRequest(method, h.http.URL+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+userKey)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		switch headers[i] {
		case "Host":
			req.Host = headers[i+1]
		default:
			req.Header.Del(headers[i])
			if headers[i+1] != "" {
				req.Header.Set(headers[i], headers[i+1])
			}
		}
	}
	resp, err := h.http.Client().Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, _ := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, raw}
}

// eventually waits for a condition, at most 10 seconds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// against is a client of a handler that is no node.
func against(t *testing.T, f http.HandlerFunc) *client.Client {
	t.Helper()
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	c, err := client.New(client.Config{Endpoint: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}
