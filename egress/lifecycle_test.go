package egress_test

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// halfConn is a connection of which one side can end.
type halfConn interface {
	net.Conn
	CloseWrite() error
}

func rawRule(host string) boxed.EgressRule {
	return boxed.EgressRule{Host: host, Ports: []uint16{22}, Raw: true}
}

// EL1: goproxy#451, #583, microsandbox#1180, #1255, konnectivity#270, hive#3872 (300,000
// descriptors): when one side had ended, the other was held for ever, or was cut at once.
// EL2: half-close was known of TCP alone.
func TestTheEndOfOneSideIsPassedOn(t *testing.T) {
	r := newRig(t)
	heard := make(chan string, 8)
	r.server("client-first.example.com", 22, func(conn net.Conn) {
		data, _ := io.ReadAll(conn) // until the client has said its last
		io.WriteString(conn, "heard "+string(data))
	})
	serverFirst := func(conn halfConn) {
		io.WriteString(conn, "bye")
		conn.CloseWrite()
		data, _ := io.ReadAll(conn)
		heard <- string(data)
	}
	r.server("server-first.example.com", 22, func(conn net.Conn) { serverFirst(conn.(*net.TCPConn)) })
	r.tlsServer("client-first.example.org", func(conn *tls.Conn) {
		data, _ := io.ReadAll(conn)
		io.WriteString(conn, "heard "+string(data))
	})
	r.tlsServer("server-first.example.org", func(conn *tls.Conn) { serverFirst(conn) })
	b := r.ruled(rawRule("client-first.example.com"), rawRule("server-first.example.com"), boxed.EgressRule{Host: "*.example.org"})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, domain := range []string{".example.com", ".example.org"} {
			open := func(name string) halfConn {
				if domain == ".example.org" {
					return b.secure(entry, name+domain)
				}
				return b.must(entry, name+domain, 22).(halfConn)
			}
			conn := open("client-first")
			io.WriteString(conn, "last words")
			conn.CloseWrite()
			if got, err := io.ReadAll(conn); string(got) != "heard last words" || err != nil {
				t.Errorf("%s: the client ended, and got %q, %v", domain, got, err)
			}
			conn.Close()
			conn = open("server-first")
			if got, err := io.ReadAll(conn); string(got) != "bye" || err != nil {
				t.Errorf("%s: the server ended, and the client got %q, %v", domain, got, err)
			}
			io.WriteString(conn, "and then some")
			conn.CloseWrite()
			if got := <-heard; got != "and then some" {
				t.Errorf("%s: after its own end the server heard %q", domain, got)
			}
			conn.Close()
		}
	})
	eventually(t, "end of all", func() bool { return r.proxy.LiveFlows(b.id) == 0 })
}

// EL2: a WebSocket's end goes through the TLS that the proxy ends, to the program too.
func TestAServerThatEndsAWebSocketFirst(t *testing.T) {
	r := newRig(t)
	heard := make(chan string, 8)
	handler := func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, strings.ReplaceAll(switched, "\n", "\r\n"))
		conn.(halfConn).CloseWrite()
		data, _ := io.ReadAll(rw)
		heard <- string(data)
	}
	r.site("read.example.com", handler, oldHTTP)
	r.site("page.example.com", handler, plain)
	b := r.ruled(intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"read.example.com", "page.example.com"} {
			conn := halfConn(nil)
			if host == "page.example.com" {
				conn = b.must(entry, host, 80).(halfConn)
			} else {
				conn = b.secure(entry, host, "http/1.1")
			}
			in, resp, err := upgrade(conn, host, "")
			if err != nil || resp.StatusCode != 101 {
				t.Fatalf("%v %v", resp, err)
			}
			conn.SetReadDeadline(time.Now().Add(patience / 4))
			if got, err := io.ReadAll(in); string(got) != "hello" || err != nil {
				t.Errorf("%s: the server ended, and the client got %q, %v", host, got, err)
			}
			io.WriteString(conn, "and then some")
			conn.CloseWrite()
			if got := <-heard; got != "and then some" {
				t.Errorf("%s: after its own end the server heard %q", host, got)
			}
		}
	})
}

// EL1: the side that is left has a while, and no more.
func TestTheSideThatIsLeftHasAWhile(t *testing.T) {
	r := newRig(t, times(func(x *egress.Times) { x.Drain = 100 * time.Millisecond }))
	ended := make(chan bool, 8)
	r.server("deaf.example.com", 22, func(conn net.Conn) { // it never says anything
		io.Copy(io.Discard, conn)
		_, err := conn.Read(make([]byte, 1))
		for err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		// Until the proxy has closed the connection, its own bytes go nowhere but out.
		for conn.SetWriteDeadline(time.Now().Add(patience)); ; time.Sleep(5 * time.Millisecond) {
			if _, err := conn.Write([]byte("x")); err != nil {
				ended <- true
				return
			}
		}
	})
	r.server("mute.example.com", 22, func(conn net.Conn) { conn.(halfConn).CloseWrite(); io.Copy(io.Discard, conn); ended <- true })
	b := r.ruled(rawRule("deaf.example.com"), rawRule("mute.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		begun := time.Now()
		conn := b.must(entry, "deaf.example.com", 22).(halfConn)
		conn.CloseWrite()
		io.ReadAll(conn)
		<-ended
		conn = b.must(entry, "mute.example.com", 22).(halfConn) // and the client says nothing, and stays
		<-ended
		conn.Close()
		if took := time.Since(begun); took < 200*time.Millisecond || took > patience/2 {
			t.Errorf("both took %s, and have 100 ms each", took)
		}
	})
	eventually(t, "end of all", func() bool { return r.proxy.LiveFlows(b.id) == 0 && r.proxy.Places(b.id) == 0 })
}

// EL4: iron-proxy: a head that comes slowly, or never ends, held a connection for ever.
func TestSlowAndLargeHeadsEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, times(func(x *egress.Times) { x.Hello = time.Second }))
	r.site("read.example.com", nil)
	r.site("page.example.com", nil, plain)
	b := r.ruled(intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	large := "X-Large: " + strings.Repeat("x", 70<<10) + "\r\n"
	ends := func(t *testing.T, what string, conn net.Conn) {
		begun := time.Now()
		io.ReadAll(conn)
		if took := time.Since(begun); took > patience/2 {
			t.Errorf("after %s it took %s", what, took)
		}
	}
	for _, l := range legs() {
		t.Run(l.name, func(t *testing.T) {
			var wg sync.WaitGroup
			for what, text := range map[string]string{"nothing": "", "a part": "GET " + l.prefix + "/ HTTP/1.1\r\nHost: "} {
				conn := l.open(b)
				io.WriteString(conn, text)
				wg.Go(func() { ends(t, what, conn) })
			}
			defer wg.Wait()
			if a := raw(t, l.open(b), fmt.Sprintf("GET %s/ HTTP/1.1\r\nHost: %s\r\n%s\r\n", l.prefix, l.host, large)); a.StatusCode != 431 {
				t.Errorf("a head of 70 KiB is %d", a.StatusCode)
			}
		})
	}
	t.Run("CONNECT", func(t *testing.T) {
		if _, refused := b.tunnel("read.example.com:443", nil, strings.TrimSpace(large)); refused == nil || refused.Status != 431 {
			t.Errorf("a head of 70 KiB: %v", refused)
		}
	})
	t.Run("h2", func(t *testing.T) {
		conn := b.secure(boxed.EntryHTTP, "read.example.com", "h2")
		fields := [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "read.example.com"}, {":path", "/"}}
		for i := range 30 {
			fields = append(fields, [2]string{fmt.Sprintf("x-large-%d", i), strings.Repeat("~", 4<<10)})
		}
		if status := rawH2Split(t, conn, fields); status == "200" {
			t.Error("a head of 120 KiB went through")
		}
	})
	t.Run("SOCKS5", func(t *testing.T) {
		var wg sync.WaitGroup
		for _, part := range [][]byte{nil, {5}, {5, 1}, {5, 1, 0, 5, 1, 0, 3, 200, 'x'}} {
			conn := b.hand(boxed.EgressIntent{Entry: boxed.EntrySOCKS5}, nil)
			conn.Write(part)
			wg.Go(func() { ends(t, fmt.Sprintf("% x", part), conn) })
		}
		wg.Wait()
	})
}

// EL5: agent-vault: an upload of more than 60 s was cut. Bytes keep a connection, in either
// direction, for as long as they come.
func TestASlowUploadGoesOn(t *testing.T) {
	t.Parallel()
	r := newRig(t, times(func(x *egress.Times) { x.Hello, x.Idle = time.Second, 1200*time.Millisecond }))
	r.site("read.example.com", func(w http.ResponseWriter, req *http.Request) {
		n, err := io.Copy(io.Discard, req.Body)
		fmt.Fprintf(w, "%d %v", n, err)
	})
	r.server("raw.example.com", 22, echo)
	b := r.ruled(intercepted("read.example.com"), rawRule("raw.example.com"))
	for _, proto := range []string{"http/1.1", "h2"} {
		body, w := io.Pipe()
		go func() {
			for range 12 { // 1.8 s in all
				time.Sleep(150 * time.Millisecond)
				w.Write([]byte("slow"))
			}
			w.Close()
		}()
		req, _ := http.NewRequest("POST", "https://read.example.com/", body)
		if a := send(t, b.client(boxed.EntryHTTP, proto), req); a.body != "48 <nil>" {
			t.Errorf("%s: the upload is answered with %d %q", proto, a.StatusCode, a.body)
		}
	}
	var wg sync.WaitGroup
	for _, entry := range entries {
		conn := b.must(entry, "raw.example.com", 22)
		wg.Go(func() {
			for range 12 {
				io.WriteString(conn, "slow")
				if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
					t.Errorf("%s: %v", entry, err)
				}
				time.Sleep(150 * time.Millisecond)
			}
			begun := time.Now()
			if _, err := io.ReadAll(conn); err != nil || time.Since(begun) > patience/2 {
				t.Errorf("%s: what is idle ended with %v after %s", entry, err, time.Since(begun))
			}
		})
	}
	wg.Wait()
	if rec := r.records.ended(t, boxed.EgressIdle); rec.Host != "raw.example.com" || rec.Up != 48 || rec.Down != 48 {
		t.Errorf("the record is %+v", rec)
	}
}

// EL5: what nothing happens on ends, also where the proxy reads it: a stream that went silent,
// and a body that does not go on.
func TestWhatIsReadAndIdleEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t, times(func(x *egress.Times) { x.Idle = 700 * time.Millisecond }))
	gone := make(chan bool, 16)
	r.site("read.example.com", func(w http.ResponseWriter, req *http.Request) {
		io.WriteString(w, "first")
		w.(http.Flusher).Flush()
		<-req.Context().Done()
		gone <- true
	})
	b := r.ruled(intercepted("read.example.com"))
	readers(t, b, func(t *testing.T, c *http.Client) {
		resp, err := c.Get("https://read.example.com/")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		begun := time.Now()
		if data, err := io.ReadAll(resp.Body); string(data) != "first" || err == nil {
			t.Errorf("the answer is %q, and ended with %v: it was cut off", data, err)
		}
		<-gone
		if took := time.Since(begun); took > patience/2 {
			t.Errorf("it took %s", took)
		}
	})
	r.records.ended(t, boxed.EgressIdle)
}

// A request ends with the program that made it: nobody waits for its answer.
func TestARequestEndsWithItsProgram(t *testing.T) {
	for name, change := range map[string]func(*siteConfig){"from http/1.1": oldHTTP, "from h2": func(*siteConfig) {}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			came, gone := make(chan bool, 1), make(chan bool, 1)
			handler := func(_ http.ResponseWriter, req *http.Request) {
				io.Copy(io.Discard, req.Body)
				came <- true
				<-req.Context().Done()
				gone <- true
			}
			r.site("read.example.com", handler, change)
			r.site("page.example.com", handler, plain)
			b := r.ruled(intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
			for _, l := range legs() {
				for _, body := range []string{"", "x"} {
					conn := l.open(b)
					fmt.Fprintf(conn, "POST %s/ HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", l.prefix, l.host, len(body), body)
					<-came
					conn.Close()
					select {
					case <-gone:
					case <-time.After(patience / 4):
						t.Fatalf("%s: the request goes on", l.name)
					}
				}
			}
			eventually(t, "end of all", func() bool { return r.proxy.LiveFlows(b.id) == 0 })
		})
	}
}

// rawH2Split is rawH2 with a head of several frames.
func rawH2Split(t *testing.T, conn net.Conn, fields [][2]string) string {
	t.Helper()
	w := newH2Writer(conn)
	block := w.block(fields)
	w.headers(1, block[:8<<10], false)
	for rest := block[8<<10:]; len(rest) > 0; {
		n := min(len(rest), 8<<10)
		if w.WriteContinuation(1, n == len(rest), rest[:n]) != nil {
			break
		}
		rest = rest[n:]
	}
	return w.status(1)
}

// EL5: what a tunnel carries arrives whole, in both directions at once.
func TestATunnelCarriesEverything(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	b := r.ruled(rawRule("raw.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		conn := b.must(entry, "raw.example.com", 22).(halfConn)
		data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		go func() { conn.Write(data); conn.CloseWrite() }()
		if got, err := io.ReadAll(conn); !bytes.Equal(got, data) || err != nil {
			t.Errorf("%d bytes of %d came back, %v", len(got), len(data), err)
		}
		conn.Close()
	})
	recs := r.records.of(func(rec boxed.EgressRecord) bool { return rec.End })
	eventually(t, "three ends", func() bool {
		recs = r.records.of(func(rec boxed.EgressRecord) bool { return rec.End })
		return len(recs) == 3
	})
	for _, rec := range recs {
		if rec.Up != 1<<20 || rec.Down != 1<<20 || !rec.Allowed || rec.Reason != boxed.EgressAllowed {
			t.Errorf("the record is %+v", rec)
		}
	}
}
