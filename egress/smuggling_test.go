package egress_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// leg is a way by which the proxy reads requests of HTTP/1.1.
type leg struct {
	name   string
	open   func(b *box) net.Conn
	prefix string // of targets
	host   string
}

// legs are all of them.
func legs() []leg {
	list := []leg{{"absolute", func(b *box) net.Conn { return b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil) }, "http://page.example.com", "page.example.com"}}
	for _, entry := range entries {
		list = append(list,
			leg{"plain by " + string(entry), func(b *box) net.Conn { return b.must(entry, "page.example.com", 80) }, "", "page.example.com"},
			leg{"intercepted by " + string(entry), func(b *box) net.Conn { return b.secure(entry, "read.example.com", "http/1.1") }, "", "read.example.com"})
	}
	return list
}

// legged has a page, a host whose TLS is read, and a sandbox that may have both.
func legged(t *testing.T, h http.HandlerFunc) (b *box, page, read *site) {
	t.Helper()
	r := newRig(t)
	page, read = r.site("page.example.com", h, plain), r.site("read.example.com", h, oldHTTP)
	return r.ruled(boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}}, intercepted("read.example.com")), page, read
}

// EF1: OpenShell#663, #671, mitmproxy CVE-2021-39214, CVE-2022-24766: a request whose length
// was given twice was two requests to the server behind. EF2: golang CVE-2025-22871: so was
// one with a bare line feed after a chunk's size.
func TestRequestsThatCanBeReadInTwoWaysGoNowhere(t *testing.T) {
	b, page, read := legged(t, nil)
	recorded := 0
	for _, l := range legs() {
		t.Run(l.name, func(t *testing.T) {
			for _, c := range []struct{ what, fields, body string }{
				{"a length and chunks", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"},
				{"chunks and a length", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"},
				{"two lengths", "Content-Length: 5\r\nContent-Length: 6\r\n", "hello"},
				{"two equal lengths", "Content-Length: 5\r\nContent-Length: 5\r\n", "hello"},
				{"a list of lengths", "Content-Length: 5, 5\r\n", "hello"},
				{"a signed length", "Content-Length: +5\r\n", "hello"},
				{"a hexadecimal length", "Content-Length: 0x5\r\n", "hello"},
				{"two codings", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "0\r\n\r\n"},
				{"a coding with a tab", "Transfer-Encoding:\tchunked, gzip\r\n", "0\r\n\r\n"},
				{"a coding that is none", "Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"},
				{"a name with a space", "Content-Length : 5\r\n", "hello"},
				{"a folded field", "X: a\r\n Content-Length: 5\r\n", "hello"},
				{"a bare line feed", "X: a\nContent-Length: 5\r\n", "hello"},
				{"a bare carriage return", "X: a\rContent-Length: 5\r\n", "hello"},
			} {
				conn := l.open(b)
				text := fmt.Sprintf("POST %s/ HTTP/1.1\r\nHost: %s\r\n%s\r\n%s", l.prefix, l.host, c.fields, c.body)
				a := raw(t, conn, text)
				if a.StatusCode != 400 || a.reason != boxed.EgressInvalidRequest {
					t.Errorf("%s: %d %q", c.what, a.StatusCode, a.reason)
				}
				// Everything that was asked for is on the record.
				if recs := b.r.records.of(func(rec boxed.EgressRecord) bool {
					return isDenied(rec) && rec.Sandbox == b.id && rec.Reason == boxed.EgressInvalidRequest && rec.Detail != ""
				}); len(recs) <= recorded {
					t.Errorf("%s: nothing is on the record", c.what)
				} else {
					recorded = len(recs)
				}
			}
			// In a body, the answer is of whoever reads it: nothing after it is a request.
			for _, body := range []string{"5\nhello\r\n0\r\n\r\n", "5\r\nhello\n0\r\n\r\n", "5\r\nhello\r\n0\n\r\n", "5;\nx\r\nhello\r\n0\r\n\r\n", "+5\r\nhello\r\n0\r\n\r\n", "5\r\nhelloX\r\n0\r\n\r\n"} {
				conn := l.open(b)
				fmt.Fprintf(conn, "POST %s/body HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n%sGET %s/smuggled HTTP/1.1\r\nHost: %s\r\n\r\n", l.prefix, l.host, body, l.prefix, l.host)
				r := bufio.NewReader(conn)
				for {
					resp, err := http.ReadResponse(r, nil)
					if err != nil {
						break
					}
					io.Copy(io.Discard, resp.Body)
					if resp.StatusCode == 200 {
						continue // a server that does not look at the body may have been quicker
					}
				}
			}
		})
	}
	for _, s := range []*site{page, read} {
		for _, req := range s.requests() {
			if req.URL.Path != "/body" {
				t.Errorf("%s got %s %s", s.name, req.Method, req.RequestURI)
			}
		}
	}
}

// A target may say another host than it has: "http:http://other/" has neither host nor path to
// who judges it, and a server reads it as the other's. RFC 9112, 3.2.2.
func TestATargetIsAPath(t *testing.T) {
	b, page, read := legged(t, nil)
	for _, l := range legs() {
		t.Run(l.name, func(t *testing.T) {
			scheme := map[bool]string{true: "http", false: "https"}[l.host == "page.example.com"]
			for _, target := range []string{scheme + ":" + scheme + "://other.example.com/x?data", scheme + ":" + scheme + "://" + l.host + "/x", scheme + ":x", "x", "*"} {
				for _, upgrade := range []string{"", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"} {
					conn := l.open(b)
					if a := raw(t, conn, fmt.Sprintf("GET %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", target, l.host, upgrade)); a.StatusCode != 400 {
						t.Errorf("%s is %d %s", target, a.StatusCode, a.reason)
					}
					conn.Close()
				}
			}
		})
	}
	page.untouched(t)
	read.untouched(t)
}

// EF3: OpenShell#342: what was read beyond the first request was passed on unjudged.
func TestAPipelinedRequestIsJudgedByItself(t *testing.T) {
	r := newRig(t)
	page := r.site("page.example.com", nil, plain)
	read := r.site("read.example.com", nil, oldHTTP)
	b := r.ruled(
		boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}, Methods: []string{"GET"}},
		boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET"}},
	)
	for _, l := range legs() {
		t.Run(l.name, func(t *testing.T) {
			conn := l.open(b)
			head := func(method, target string) string {
				return fmt.Sprintf("%s %s%s HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n\r\n", method, l.prefix, target, l.host)
			}
			io.WriteString(conn, head("GET", "/first")+head("DELETE", "/second")+head("GET", "/third"))
			in := bufio.NewReader(conn)
			if a := readAnswer(t, in, "GET"); a.StatusCode != 200 {
				t.Errorf("the first is %d %s", a.StatusCode, a.body)
			}
			readAnswer(t, in, "DELETE").want(t, 403, boxed.EgressMethod)
		})
	}
	for _, s := range []*site{page, read} {
		for _, req := range s.requests() {
			if req.Method != "GET" {
				t.Errorf("%s %s left", req.Method, req.RequestURI)
			}
		}
	}
}

// EF5: golang/go#80416, OpenShell#1967: an upgrade to HTTP/2 opened a pipe that nobody
// judges.
func TestNoUpgradeOpensAPipe(t *testing.T) {
	b, page, read := legged(t, nil)
	for _, l := range legs() {
		t.Run(l.name, func(t *testing.T) {
			for _, fields := range []string{
				"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
				"Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n", "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
				"Connection: Upgrade\r\nUpgrade: spdy/3.1\r\n", "Connection: Upgrade\r\nUpgrade: tcp\r\n", "Upgrade: websocket\r\nUpgrade: h2c\r\n",
			} {
				a := raw(t, l.open(b), fmt.Sprintf("GET %s/ HTTP/1.1\r\nHost: %s\r\n%s\r\n", l.prefix, l.host, fields))
				a.want(t, 400, boxed.EgressInvalidRequest)
			}
			raw(t, l.open(b), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").want(t, 400, boxed.EgressInvalidRequest)
			// HTTP2-Settings without an upgrade is nobody's business behind.
			a := raw(t, l.open(b), fmt.Sprintf("GET %s/settings HTTP/1.1\r\nHost: %s\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n", l.prefix, l.host))
			if a.StatusCode != 200 {
				t.Errorf("a request with HTTP2-Settings is %d %s", a.StatusCode, a.body)
			}
		})
	}
	for _, s := range []*site{page, read} {
		for _, req := range s.requests() {
			if req.URL.Path != "/settings" || req.Header.Get("Http2-Settings") != "" || req.Header.Get("Upgrade") != "" {
				t.Errorf("%s got %s %v", s.name, req.RequestURI, req.Header)
			}
		}
	}
}

// EF5: a CONNECT within what the proxy reads would be a tunnel that nobody judges.
func TestNoCONNECTWithinAConnection(t *testing.T) {
	b, page, read := legged(t, nil)
	for _, l := range legs()[1:] {
		t.Run(l.name, func(t *testing.T) {
			for _, target := range []string{l.host + ":443", l.host + ":80", l.host, "other.example.com:443"} {
				a := raw(t, l.open(b), fmt.Sprintf("CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target))
				if a.StatusCode < 400 {
					t.Errorf("CONNECT %s is %d", target, a.StatusCode)
				}
			}
		})
	}
	t.Run("h2", func(t *testing.T) {
		for _, authority := range []string{"read.example.com", "read.example.com:443"} {
			conn := b.secure(boxed.EntryHTTP, "read.example.com", "h2")
			if status := rawH2(t, conn, [][2]string{{":method", "CONNECT"}, {":authority", authority}}); strings.HasPrefix(status, "2") {
				t.Errorf("CONNECT %s is %s", authority, status)
			}
		}
	})
	page.untouched(t)
	read.untouched(t)
}

// ER2: srt: TRACE gives back what it got, the credential that was put in too.
func TestMethodsThatGiveBackWhatTheyGot(t *testing.T) {
	b, page, read := legged(t, nil)
	for _, method := range []string{"TRACE", "TRACK", "trace", "Track"} {
		for _, l := range legs() {
			if a := raw(t, l.open(b), fmt.Sprintf("%s %s/ HTTP/1.1\r\nHost: %s\r\n\r\n", method, l.prefix, l.host)); a.StatusCode != 405 {
				t.Errorf("%s: %s is %d", l.name, method, a.StatusCode)
			}
		}
		conn := b.secure(boxed.EntryHTTP, "read.example.com", "h2")
		if status := rawH2(t, conn, [][2]string{{":method", method}, {":scheme", "https"}, {":authority", "read.example.com"}, {":path", "/"}}); status != "405" && status != "" {
			t.Errorf("h2: %s is %q", method, status)
		}
	}
	page.untouched(t)
	read.untouched(t)
}

// EP10: pipelock X-Pipelock-Agent, permitio docs#640: a header by which a client says who it
// is was believed. Nothing here reads one, and none is passed on.
func TestHeadersOfIdentityAreTakenOut(t *testing.T) {
	b, page, read := legged(t, nil)
	identity := []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via", "Proxy-Connection", "Keep-Alive"}
	for _, l := range legs() {
		text := fmt.Sprintf("GET %s/ HTTP/1.1\r\nHost: %s\r\nConnection: keep-alive, X-Private\r\nX-Private: 1\r\nX-Kept: 1\r\n", l.prefix, l.host)
		for _, name := range identity {
			text += name + ": 127.0.0.1\r\n"
		}
		if a := raw(t, l.open(b), text+"\r\n"); a.StatusCode != 200 {
			t.Errorf("%s: %d %s", l.name, a.StatusCode, a.body)
		}
	}
	for _, s := range []*site{page, read} {
		for _, req := range s.requests() {
			for _, name := range append(identity, "X-Private", "Connection") {
				if v := req.Header.Get(name); v != "" {
					t.Errorf("%s got %s: %s", s.name, name, v)
				}
			}
			if req.Header.Get("X-Kept") != "1" {
				t.Errorf("%s got %v", s.name, req.Header)
			}
		}
	}
}
