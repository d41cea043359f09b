package egress_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// EL7: smokescreen#284, E2B#1832: one sandbox could have any number of tunnels.
func TestConnectionsAtOnceAreBounded(t *testing.T) {
	r := newRig(t, limits(egress.Limits{Connections: 3}))
	r.server("raw.example.com", 22, echo)
	b, other := r.ruled(rawRule("raw.example.com")), r.ruled(rawRule("raw.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		var open []net.Conn
		for range 3 {
			open = append(open, b.must(entry, "raw.example.com", 22))
		}
		refused := b.refusedBy(t, entry, "raw.example.com", 22, boxed.EgressTooMany)
		if entry == boxed.EntryHTTP && refused.Status != 429 || entry == boxed.EntrySOCKS5 && refused.Code != 1 {
			t.Errorf("it was told %v", refused)
		}
		other.must(entry, "raw.example.com", 22).Close() // whose limits are its own
		open[0].Close()
		eventually(t, "place", func() bool { return r.proxy.Places(b.id) < 3 })
		b.must(entry, "raw.example.com", 22).Close()
		for _, c := range open {
			c.Close()
		}
		eventually(t, "end of all", func() bool { return r.proxy.Places(b.id)+r.proxy.Places(other.id) == 0 })
	})
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	defer conn.Close()
	for range 3 {
		defer b.must(boxed.EntryHTTP, "raw.example.com", 22).Close()
	}
	if a := raw(t, conn, "CONNECT raw.example.com:22 HTTP/1.1\r\nHost: raw.example.com:22\r\n\r\n"); a.Header.Get("Retry-After") == "" {
		t.Errorf("nothing says when to try again: %v", a.Header)
	}
}

// EL7: nor any number a second. Requests and queries are counted by themselves.
func TestWhatIsAskedForPerSecondIsBounded(t *testing.T) {
	slow := newRig(t, limits(egress.Limits{Dials: 0.001, Queries: 0.001}))
	slow.site("read.example.com", nil)
	r := newRig(t, limits(egress.Limits{Requests: 0.001}))
	r.site("read.example.com", nil)
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b := slow.ruled(intercepted("read.example.com"))
		b.must(entry, "read.example.com", 443).Close() // one may always come
		refused := b.refusedBy(t, entry, "read.example.com", 443, boxed.EgressTooFast)
		if entry == boxed.EntryHTTP && refused.Status != 429 {
			t.Errorf("it was told %v", refused)
		}
	})
	for _, proto := range []string{"http/1.1", "h2"} {
		b := r.ruled(intercepted("read.example.com"))
		c := b.client(boxed.EntryHTTP, proto)
		if a := send(t, c, request(t, "GET", "https://read.example.com/", "")); a.StatusCode != 200 {
			t.Fatalf("%s: the answer is %d %s", proto, a.StatusCode, a.reason)
		}
		send(t, c, request(t, "GET", "https://read.example.com/", "")).want(t, 429, boxed.EgressTooFast)
	}
	b := slow.ruled(intercepted("read.example.com"))
	for i := range 3 {
		code, _ := slow.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "read.example.com", Type: 1})
		if want := map[bool]int{true: 5}[i > 0]; code != want {
			t.Errorf("query %d has code %d", i, code)
		}
	}
}

// Bytes out of a sandbox are bounded, in a tunnel and in what is read. ER5: agent-vault#227:
// an answer that was cut off looked whole, and was recorded as 200.
func TestBytesAreBounded(t *testing.T) {
	const most = 64 << 10
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		t.Run("up, tunnel", func(t *testing.T) {
			r := newRig(t, limits(egress.Limits{UpTotal: most}))
			got := make(chan int64, 1)
			r.server("raw.example.com", 22, func(conn net.Conn) { n, _ := io.Copy(io.Discard, conn); got <- n })
			b := r.ruled(rawRule("raw.example.com"))
			conn := b.must(entry, "raw.example.com", 22)
			conn.Write(make([]byte, 4*most))
			if n := <-got; n > most {
				t.Errorf("%d bytes left", n)
			}
			if rec := r.records.ended(t, boxed.EgressTooMuch); rec.Up > most {
				t.Errorf("the record is %+v", rec)
			}
		})
		t.Run("down, tunnel", func(t *testing.T) {
			r := newRig(t, limits(egress.Limits{DownTotal: most}))
			r.server("raw.example.com", 22, func(conn net.Conn) { conn.Write(make([]byte, 4*most)); io.Copy(io.Discard, conn) })
			b := r.ruled(rawRule("raw.example.com"))
			if got, _ := io.ReadAll(b.must(entry, "raw.example.com", 22)); len(got) > most {
				t.Errorf("%d bytes came", len(got))
			}
			r.records.ended(t, boxed.EgressTooMuch)
		})
		for _, proto := range []string{"http/1.1", "h2"} {
			t.Run("up, "+proto, func(t *testing.T) {
				r := newRig(t, limits(egress.Limits{UpTotal: most}))
				var got atomic.Int64
				r.site("read.example.com", func(_ http.ResponseWriter, req *http.Request) {
					n, _ := io.Copy(io.Discard, req.Body)
					got.Add(n)
				})
				b := r.ruled(intercepted("read.example.com"))
				req, _ := http.NewRequest("POST", "https://read.example.com/", bytes.NewReader(make([]byte, 4*most)))
				resp, err := b.client(entry, proto).Do(req)
				if err == nil {
					if resp.StatusCode != 429 {
						t.Errorf("the answer is %d", resp.StatusCode)
					}
					resp.Body.Close()
				}
				r.records.ended(t, boxed.EgressTooMuch)
				if n := got.Load(); n > most {
					t.Errorf("%d bytes left", n)
				}
			})
			t.Run("down, "+proto, func(t *testing.T) {
				r := newRig(t, limits(egress.Limits{DownTotal: most}))
				r.site("read.example.com", func(w http.ResponseWriter, req *http.Request) {
					if req.URL.Path == "/known" {
						w.Header().Set("Content-Length", fmt.Sprint(4*most))
					}
					w.Write(make([]byte, 4*most))
				})
				b := r.ruled(intercepted("read.example.com"))
				for _, path := range []string{"/known", "/unknown"} {
					resp, err := b.client(entry, proto).Get("https://read.example.com" + path)
					if err != nil {
						t.Fatal(err)
					}
					defer resp.Body.Close()
					if data, err := io.ReadAll(resp.Body); err == nil || len(data) > most {
						t.Errorf("%s: %d bytes came, and seem whole", path, len(data))
					}
				}
				recs := r.records.of(func(rec boxed.EgressRecord) bool { return rec.End && rec.Reason == boxed.EgressTooMuch })
				eventually(t, "both records", func() bool {
					recs = r.records.of(func(rec boxed.EgressRecord) bool { return rec.End && rec.Reason == boxed.EgressTooMuch })
					return len(recs) == 2
				})
			})
		}
	})
}

// ER5: an answer that the destination cuts off is cut off for the program too, and is
// recorded as what it is.
func TestAnAnswerThatIsCutOffIsNotTakenForWhole(t *testing.T) {
	r := newRig(t)
	r.tlsServer("cut.example.com", func(conn *tls.Conn) {
		http.ReadRequest(bufio.NewReader(conn))
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
	})
	r.tlsServer("short.example.com", func(conn *tls.Conn) {
		http.ReadRequest(bufio.NewReader(conn))
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
	})
	b := r.ruled(intercepted("cut.example.com"), intercepted("short.example.com"))
	readers(t, b, func(t *testing.T, c *http.Client) {
		for _, name := range []string{"cut", "short"} {
			resp, err := c.Get("https://" + name + ".example.com/")
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil || string(data) != "hello" {
				t.Errorf("%s: %q came, and seems whole", name, data)
			}
		}
	})
	want := 2 * 2 * len(entries)
	eventually(t, "record of each", func() bool {
		return len(r.records.of(func(rec boxed.EgressRecord) bool { return rec.End && rec.Reason == boxed.EgressTruncated })) == want
	})
	if recs := r.records.of(func(rec boxed.EgressRecord) bool { return rec.End }); len(recs) != want {
		t.Errorf("%d ends are on the record, of %d requests", len(recs), want)
	}
}

// A rate slows bytes down, and loses none.
func TestARateSlowsDown(t *testing.T) {
	r := newRig(t, limits(egress.Limits{UpRate: 1 << 20}))
	r.server("raw.example.com", 22, echo)
	b := r.ruled(rawRule("raw.example.com"))
	conn := b.must(boxed.EntryHTTP, "raw.example.com", 22)
	begun := time.Now()
	data := make([]byte, 512<<10) // the first 256 KiB pass at once
	go conn.Write(data)
	if _, err := io.ReadFull(conn, make([]byte, len(data))); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < 200*time.Millisecond {
		t.Errorf("512 KiB at 1 MiB/s took %s", took)
	}
}

// EL9: smokescreen: a place was lost whenever a connection failed.
func TestEveryPlaceIsGivenBack(t *testing.T) {
	r := newRig(t, limits(egress.Limits{Connections: 4}), times(func(x *egress.Times) { x.Hello = 2 * time.Second }))
	r.site("read.example.com", nil)
	r.site("tunnel.example.com", nil)
	page := r.site("page.example.com", nil, plain)
	r.names.set("dead.example.com", at("93.184.216.200"))
	r.names.set("private.example.com", at("10.0.0.1"))
	b := r.ruled(
		intercepted("read.example.com"), boxed.EgressRule{Host: "tunnel.example.com"}, boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}},
		boxed.EgressRule{Host: "dead.example.com"}, boxed.EgressRule{Host: "private.example.com"}, boxed.EgressRule{Host: "gone.example.com"},
	)
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for range 6 {
			b.refusedBy(t, entry, "dead.example.com", 443, boxed.EgressConnectFailed)
			b.refusedBy(t, entry, "private.example.com", 443, boxed.EgressPrivateAddress)
			b.refusedBy(t, entry, "gone.example.com", 443, boxed.EgressNoAddress)
			b.refusedBy(t, entry, "other.example.com", 443, boxed.EgressNotListed)
			for _, name := range []string{"read.example.com", "tunnel.example.com"} {
				conn := b.must(entry, name, 443)
				io.WriteString(conn, "no TLS at all")
				conn.Close()
				b.shake(b.must(entry, name, 443), "evil.example.com")
				b.must(entry, name, 443).Close()
			}
			eventually(t, "place", func() bool { return r.proxy.Places(b.id) == 0 })
		}
	})
	for range 8 { // one connection to the proxy, many hosts
		send(t, b.proxied(), request(t, "GET", "http://page.example.com/", ""))
		send(t, b.proxied(), request(t, "GET", "http://dead.example.com/", ""))
	}
	eventually(t, "place", func() bool { return r.proxy.Places(b.id) <= 8 })
	r.proxy.Detach(b.id)
	if n := len(page.requests()); n == 0 {
		t.Error("no page was asked for")
	}
}

// atOnce has a program send requests on one connection of HTTP/2 to a host that holds them:
// three times as many as may be at once, of which the others are refused.
func atOnce(t *testing.T, connections, most int, changes ...func(*siteConfig)) (*box, *site) {
	t.Helper()
	r := newRig(t, limits(egress.Limits{Connections: connections}))
	release := make(chan struct{})
	s := r.site("read.example.com", func(_ http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/slow" {
			<-release
		}
	}, changes...)
	b := r.ruled(intercepted("read.example.com"))
	c := b.client(boxed.EntryHTTP, "h2")
	fine := func(a answer) {
		t.Helper()
		if a.StatusCode != 200 {
			t.Errorf("%d %s", a.StatusCode, a.reason)
		}
	}
	fine(send(t, c, request(t, "GET", "https://read.example.com/", ""))) // which makes the one connection
	answers := make(chan answer)
	asked := 3 * most
	for range asked {
		go func() { answers <- send(t, c, request(t, "GET", "https://read.example.com/slow", "")) }()
	}
	for range asked - most {
		(<-answers).want(t, 429, boxed.EgressTooMany)
	}
	close(release)
	for range most {
		fine(<-answers)
	}
	fine(send(t, c, request(t, "GET", "https://read.example.com/", "")))
	c.CloseIdleConnections()
	return b, s
}

// One connection of a program may have many requests at once, and a destination that does not
// take them all on one connection needs more: those count too.
func TestConnectionsToADestinationAreBounded(t *testing.T) {
	const most = 4
	b, s := atOnce(t, most, most, oldHTTP)
	if n := s.connections(); n > most {
		t.Errorf("there were %d connections", n)
	}
	eventually(t, "end of all", func() bool { return b.r.proxy.Places(b.id) == 0 })
}

// Requests at once are bounded, however few connections they share: each holds memory.
func TestRequestsAtOnceAreBounded(t *testing.T) {
	const connections = 4
	atOnce(t, connections, 2*connections)
}

// One connection to the proxy asks for pages of many hosts, and keeps a few.
func TestOneConnectionAsksForPagesOfManyHosts(t *testing.T) {
	r := newRig(t)
	var rules []boxed.EgressRule
	for i := range egress.MaxPlainHosts + 5 {
		name := fmt.Sprintf("page%d.example.com", i)
		r.site(name, func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, req.Host) }, plain)
		rules = append(rules, boxed.EgressRule{Host: name, Ports: []uint16{80}})
	}
	b := r.ruled(rules...)
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	in := bufio.NewReader(conn)
	for range 2 {
		for _, rule := range rules {
			fmt.Fprintf(conn, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", rule.Host)
			if a := readAnswer(t, in, "GET"); a.body != rule.Host {
				t.Errorf("%s is answered with %d %q", rule.Host, a.StatusCode, a.body)
			}
		}
	}
	if n := r.proxy.Places(b.id); n > egress.MaxPlainHosts {
		t.Errorf("%d places are taken", n)
	}
	conn.Close()
	eventually(t, "end of all", func() bool { return r.proxy.Places(b.id) == 0 && r.proxy.LiveFlows(b.id) == 0 })
}
