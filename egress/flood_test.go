package egress_test

import (
	"bufio"
	"crypto/tls"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// EL10: CVE-2023-39325 (rapid reset): streams that are reset at once are work all the same.
// CVE-2023-45288: so are heads without an end.
func TestFloodsOfHTTP2End(t *testing.T) {
	r := newRig(t)
	var at1, most atomic.Int64
	release := make(chan struct{})
	var once sync.Once
	r.site("read.example.com", func(_ http.ResponseWriter, req *http.Request) {
		n := at1.Add(1)
		defer at1.Add(-1)
		for {
			m := most.Load()
			if n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		select {
		case <-release:
		case <-req.Context().Done():
		}
	})
	defer once.Do(func() { close(release) })
	b := r.ruled(intercepted("read.example.com"))
	fields := [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "read.example.com"}, {":path", "/"}}
	t.Run("settings", func(t *testing.T) {
		w := newH2Writer(b.secure(boxed.EntryHTTP, "read.example.com", "h2"))
		for {
			frame, err := w.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if s, ok := frame.(*http2.SettingsFrame); ok && !s.IsAck() {
				if n, _ := s.Value(http2.SettingMaxConcurrentStreams); n != 100 {
					t.Errorf("%d streams at once are offered", n)
				}
				return
			}
		}
	})
	t.Run("rapid reset", func(t *testing.T) {
		conn := b.secure(boxed.EntryHTTP, "read.example.com", "h2")
		w := newH2Writer(conn)
		go io.Copy(io.Discard, conn)
		var err error
		for i := range 3_000 {
			id := uint32(2*i + 1)
			w.headers(id, w.block(fields), true)
			if err = w.WriteRSTStream(id, http2.ErrCodeCancel); err != nil {
				break
			}
		}
		if n := most.Load(); n > 200 {
			t.Errorf("%d requests were made at once", n)
		}
		t.Logf("it ended with %v; at most %d requests at once", err, most.Load())
	})
	t.Run("head without end", func(t *testing.T) {
		conn := b.secure(boxed.EntryHTTP, "read.example.com", "h2")
		w := newH2Writer(conn)
		go io.Copy(io.Discard, conn)
		w.headers(1, w.block(fields), false)
		part := w.block([][2]string{{"x-flood", strings.Repeat("~", 8<<10)}})
		var sent int
		for sent < 8<<20 {
			if w.WriteContinuation(1, false, part) != nil {
				break
			}
			sent += len(part)
		}
		if sent >= 8<<20 {
			t.Errorf("%d bytes of a head were taken", sent)
		}
	})
	eventually(t, "end of all", func() bool { return at1.Load() == 0 })
}

// EL11: iron-proxy#217, #219, #221: a request that had failed was sent a second time.
func TestARequestIsSentOnce(t *testing.T) {
	r := newRig(t)
	var came atomic.Int64
	var mu sync.Mutex
	methods := map[string]int{}
	r.tlsServer("flaky.example.com", func(conn *tls.Conn) {
		in := bufio.NewReader(conn)
		for first := true; ; first = false {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			io.Copy(io.Discard, req.Body)
			came.Add(1)
			mu.Lock()
			methods[req.Method+" "+req.Header.Get("Idempotency-Key")]++
			mu.Unlock()
			if !first {
				return // the connection was good once, and fails when it is used again
			}
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	b := r.ruled(intercepted("flaky.example.com"))
	for _, proto := range []string{"http/1.1", "h2"} {
		for _, c := range []struct{ method, key, body string }{
			{"POST", "", "body"}, {"POST", "", ""}, {"POST", "once", "body"}, {"POST", "once", ""}, {"PUT", "", "body"}, {"DELETE", "", ""}, {"PATCH", "once", ""},
		} {
			client := b.client(boxed.EntryHTTP, proto)
			if a := send(t, client, request(t, "GET", "https://flaky.example.com/", "")); a.StatusCode != 200 {
				t.Fatalf("%d %s", a.StatusCode, a.body)
			}
			before := came.Load()
			req := request(t, c.method, "https://flaky.example.com/", c.body)
			if c.key != "" {
				req.Header.Set("Idempotency-Key", c.key)
			}
			req.GetBody = nil
			send(t, client, req).want(t, 502, boxed.EgressConnectFailed)
			if n := came.Load() - before; n != 1 {
				t.Errorf("%s: a %s with the key %q was sent %d times", proto, c.method, c.key, n)
			}
			client.CloseIdleConnections()
		}
	}
}

// EL8: lxd#5635, clawpatrol#150, OpenSandbox#819: memory and goroutines grew with every
// connection that there had been.
func TestTenThousandConnectionsLeaveNothing(t *testing.T) {
	n := 10_000
	if testing.Short() {
		n = 2_000
	}
	r := newRig(t, limits(egress.Limits{Dials: -1, Requests: -1, Connections: -1}))
	r.server("raw.example.com", 22, echo)
	r.names.set("private.example.com", at("10.0.0.1"))
	b := r.ruled(rawRule("raw.example.com"), boxed.EgressRule{Host: "private.example.com"})
	open := func(i int) {
		entry := entries[i%len(entries)]
		if i%4 == 0 {
			if conn, refused := b.connect(entry, "private.example.com", 443); refused == nil {
				conn.Close()
				t.Error("a private address was opened")
			}
			return
		}
		conn, refused := b.connect(entry, "raw.example.com", 22)
		if refused != nil {
			t.Errorf("%v", refused)
			return
		}
		io.WriteString(conn, "x")
		if i%2 == 0 {
			io.ReadFull(conn, make([]byte, 1))
		}
		conn.Close()
	}
	var wg sync.WaitGroup
	work := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range work {
				open(i)
			}
		})
	}
	before := runtime.NumGoroutine()
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	eventually(t, "end of all", func() bool {
		return r.proxy.LiveFlows(b.id) == 0 && r.proxy.Places(b.id) == 0 && runtime.NumGoroutine() <= before+4
	})
}
