package api_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

const (
	execBody   = `{"args":["python3","-c","print(1)"],"env":{"A":"b","C":"d"},"dir":"/workspace","timeout":"30s"}`
	createBody = `{"name":"build","labels":{"team":"x","task":"42"},"image":"python:3.12-slim","env":{"A":"b"},"limits":{"memory_bytes":536870912,"cpus":1},"ttl":"1h"}`
)

// BenchmarkValidate is what the document costs: parse, check, decode.
func BenchmarkValidate(b *testing.B) {
	for name, c := range map[string]struct{ op, body string }{
		"exec":     {"POST /v1/sandboxes/{id}/exec", execBody},
		"create":   {"POST /v1/sandboxes", createBody},
		"exec1MiB": {"POST /v1/sandboxes/{id}/exec", `{"language":"python","code":"` + strings.Repeat("x = 1; ", 150000) + `"}`},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			raw := []byte(c.body)
			for b.Loop() {
				if err := api.CheckBody(c.op, raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkExec is all that the server adds to an exec, without the network and
// with a port that answers at once.
func BenchmarkExec(b *testing.B) {
	f := newFake()
	sb := f.add("bench")
	f.run = func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		req.Started("abcdefghij23")
		io.WriteString(req.Stdout, "hello\n")
		return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
	}
	f.noNotes = true
	s, err := api.New(api.Config{Service: f, Auth: newKeyring(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest("POST", "http://localhost/v1/sandboxes/"+string(sb.ID)+"/exec", strings.NewReader(execBody))
		r.Header.Set("Authorization", "Bearer "+userKey)
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			b.Fatal(w.Body)
		}
	}
}

// BenchmarkRoundTrip is one JSON exec from client to port over loopback TCP.
func BenchmarkRoundTrip(b *testing.B) {
	h := newHarness(b)
	h.fake.noNotes = true
	sb := h.add("bench")
	b.Run("json", func(b *testing.B) {
		for b.Loop() {
			if _, err := h.client.Run(b.Context(), sb.ID, boxed.ExecRequest{Args: []string{"echo", "hi"}}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("websocket", func(b *testing.B) {
		for b.Loop() {
			if _, err := h.client.Exec(b.Context(), sb.ID, boxed.ExecRequest{Args: []string{"echo", "hi"}, Stdout: io.Discard}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("throughput", func(b *testing.B) {
		const size = 1 << 20
		chunk := make([]byte, 32<<10)
		b.SetBytes(size)
		h.fake.run = func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			for range b.N * (size / len(chunk)) {
				if _, err := req.Stdout.Write(chunk); err != nil {
					return boxed.ExitStatus{}, err
				}
			}
			return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
		}
		b.ResetTimer()
		if _, err := h.client.Exec(b.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdout: io.Discard}); err != nil {
			b.Fatal(err)
		}
	})
}
