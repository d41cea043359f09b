package egress_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed/egress"
)

// framingWire is a connection on which a client has sent in, in packets of the sizes
// in cuts, over and over.
type framingWire struct {
	net.Conn
	in   []byte
	cuts []byte
	cut  int // the next
	out  bytes.Buffer
}

func (w *framingWire) Read(p []byte) (int, error) {
	if len(w.in) == 0 {
		return 0, io.EOF
	}
	size := len(w.in)
	if len(w.cuts) > 0 {
		size = int(w.cuts[w.cut%len(w.cuts)])%len(w.in) + 1
		w.cut++
	}
	n := copy(p, w.in[:size])
	w.in = w.in[n:]
	return n, nil
}

func (w *framingWire) Write(p []byte) (int, error)      { return w.out.Write(p) }
func (w *framingWire) SetReadDeadline(time.Time) error  { return nil }
func (w *framingWire) SetWriteDeadline(time.Time) error { return nil }

// framingView is what a guard says that it passed.
type framingView struct {
	all    []byte
	bodies []string // one of each request
	raw    string
}

// framingPassed reads from a guard until it ends.
func framingPassed(f *egress.Framing, size int) (v framingView, err error) {
	p := make([]byte, size)
	for {
		of := f.Upcoming()
		n, err := f.Read(p)
		v.all = append(v.all, p[:n]...)
		switch {
		case n == 0:
		case of == "head":
			v.bodies = append(v.bodies, "")
		case of == "data":
			v.bodies[len(v.bodies)-1] += string(p[:n])
		case of == "raw":
			v.raw += string(p[:n])
		}
		if err != nil {
			return v, err
		}
	}
}

// framingHead makes a request's head.
func framingHead(first string, fields ...string) string {
	return strings.Join(append([]string{first}, fields...), "\r\n") + "\r\n\r\n"
}

// framingPost is a chunked request with this body.
func framingPost(body string) string {
	return framingHead("POST / HTTP/1.1", "Host: a", "Transfer-Encoding: chunked") + body
}

const framingGet = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"

type framingCase struct {
	name, sent, why string
	status          int // 0 is 400
}

// framingRefusedHeads names the rows of the catalogue of attacks.
func framingRefusedHeads() []framingCase {
	get := func(fields ...string) string {
		return framingHead("GET / HTTP/1.1", append([]string{"Host: a"}, fields...)...)
	}
	return []framingCase{
		// EF1: OpenShell#663, OpenShell#671, mitmproxy CVE-2021-39214 and CVE-2022-24766.
		{name: "length and chunks", sent: get("Content-Length: 4", "Transfer-Encoding: chunked") + "0\r\n\r\n", why: "both"},
		{name: "chunks and length", sent: get("transfer-encoding: chunked", "content-length: 0") + "0\r\n\r\n", why: "both"},
		{name: "two lengths", sent: get("Content-Length: 4", "Content-Length: 5") + "abcde", why: "more than one Content-Length"},
		{name: "two equal lengths", sent: get("Content-Length: 4", "Content-Length: 4") + "abcd", why: "more than one Content-Length"},
		{name: "a list of lengths", sent: get("Content-Length: 4, 4") + "abcd", why: "plain number"},
		{name: "a signed length", sent: get("Content-Length: +4") + "abcd", why: "plain number"},
		{name: "a negative length", sent: get("Content-Length: -1"), why: "plain number"},
		{name: "a hexadecimal length", sent: get("Content-Length: 0x4") + "abcd", why: "plain number"},
		{name: "no length", sent: get("Content-Length:"), why: "plain number"},
		{name: "a length above 2^62", sent: get("Content-Length: 4611686018427387905"), why: "too large"},
		{name: "a length above 2^64", sent: get("Content-Length: 99999999999999999999"), why: "plain number"},
		{name: "an unknown coding", sent: get("Transfer-Encoding: xchunked"), why: "not chunked"},
		{name: "two codings", sent: get("Transfer-Encoding: gzip, chunked"), why: "not chunked"},
		{name: "two fields of codings", sent: get("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), why: "more than one Transfer-Encoding"},
		{name: "a coding in quotes", sent: get(`Transfer-Encoding: "chunked"`), why: "not chunked"},
		{name: "a coding after a vertical tab", sent: get("Transfer-Encoding: \x0bchunked"), why: "control"},
		{name: "a coding before a space", sent: get("Transfer-Encoding : chunked"), why: "proper name"},
		{name: "a coding in HTTP/1.0", sent: framingHead("POST / HTTP/1.0", "Transfer-Encoding: chunked"), why: "HTTP/1.0"},
		{name: "a body with CONNECT", sent: framingHead("CONNECT a:443 HTTP/1.1", "Host: a:443", "Content-Length: 3") + "abc", why: "CONNECT"},
		{name: "a chunked body with CONNECT", sent: framingHead("CONNECT a:443 HTTP/1.1", "Host: a:443", "Transfer-Encoding: chunked"), why: "CONNECT"},

		{name: "two hosts", sent: get("Host: b"), why: "more than one Host"},
		{name: "two equal hosts", sent: get("host: a"), why: "more than one Host"},
		{name: "no host", sent: "GET / HTTP/1.1\r\n\r\n", why: "no Host"},

		{name: "a folded field", sent: get("A: b", " c"), why: "second line"},
		{name: "a field folded with a tab", sent: get("A: b", "\tc"), why: "second line"},
		{name: "a folded first field", sent: framingHead("GET / HTTP/1.1", " Host: a"), why: "second line"},
		{name: "a bare line feed", sent: "GET / HTTP/1.1\nHost: a\r\n\r\n", why: "carriage return"},
		{name: "a bare line feed at the end", sent: "GET / HTTP/1.1\r\nHost: a\r\n\n", why: "carriage return"},
		{name: "a bare carriage return", sent: get("A: b\rContent-Length: 5"), why: "control"},
		{name: "two carriage returns", sent: get("A: b\r"), why: "control"},
		{name: "a carriage return in the first line", sent: framingHead("GET /\r HTTP/1.1", "Host: a"), why: "first line"},
		{name: "a zero byte", sent: get("A: b\x00c"), why: "control"},
		{name: "a delete", sent: get("A: \x7f"), why: "control"},
		{name: "a space before the colon", sent: get("A : b"), why: "proper name"},
		{name: "no name", sent: get(": b"), why: "proper name"},
		{name: "no colon", sent: get("A"), why: "proper name"},
		{name: "a name that is no token", sent: get("A(b): c"), why: "proper name"},
		{name: "a name that is not ASCII", sent: get("\u0130f: c"), why: "proper name"},
		{name: "201 fields", sent: get(slices.Repeat([]string{"A: b"}, 200)...), why: "200 fields", status: 431},
		{name: "64 KiB", sent: get("A: " + strings.Repeat("b", 64<<10)), why: "64 KiB", status: 431},
		{name: "64 KiB that do not end", sent: strings.Repeat("b", 65<<10), why: "64 KiB", status: 431},

		{name: "a line of its own first", sent: "\r\n" + framingGet, why: "first line"},
		{name: "two spaces", sent: framingHead("GET  / HTTP/1.1", "Host: a"), why: "first line"},
		{name: "a space in the target", sent: framingHead("GET /a b HTTP/1.1", "Host: a"), why: "version"},
		{name: "a tab in the target", sent: framingHead("GET /a\tb HTTP/1.1", "Host: a"), why: "first line"},
		{name: "a space after the version", sent: framingHead("GET / HTTP/1.1 ", "Host: a"), why: "version"},
		{name: "HTTP/0.9", sent: framingHead("GET /"), why: "first line"},
		{name: "HTTP/1.2", sent: framingHead("GET / HTTP/1.2", "Host: a"), why: "version"},
		{name: "a version in small letters", sent: framingHead("GET / http/1.1", "Host: a"), why: "version"},
		{name: "a method that is no token", sent: framingHead("G@T / HTTP/1.1", "Host: a"), why: "method"},
		{name: "no method", sent: framingHead(" / HTTP/1.1", "Host: a"), why: "method"},
		{name: "a long method", sent: framingHead(strings.Repeat("G", 33)+" / HTTP/1.1", "Host: a"), why: "method"},
		{name: "TRACE", sent: framingHead("TRACE / HTTP/1.1", "Host: a"), why: "method", status: 405},
		{name: "TRACK", sent: framingHead("TRACK / HTTP/1.1", "Host: a"), why: "method", status: 405},

		// EF5: golang/go#80416 and OpenShell#1967.
		{name: "an upgrade to HTTP/2", sent: get("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"), why: "websocket"},
		{name: "an upgrade to either", sent: get("Connection: Upgrade", "Upgrade: websocket, h2c"), why: "websocket"},
		{name: "two upgrades", sent: get("Connection: Upgrade", "Upgrade: websocket", "Upgrade: websocket"), why: "more than one Upgrade"},
		{name: "an upgrade to nothing", sent: get("Connection: Upgrade", "Upgrade:"), why: "websocket"},
		{name: "an upgrade of a body", sent: get("Upgrade: websocket", "Content-Length: 3") + "abc", why: "body"},
		{name: "an upgrade by POST", sent: framingHead("POST / HTTP/1.1", "Host: a", "Upgrade: websocket"), why: "GET"},
		{name: "an upgrade in HTTP/1.0", sent: framingHead("GET / HTTP/1.0", "Upgrade: websocket"), why: "HTTP/1.1"},
		// ET12 too.
		{name: "the preface of HTTP/2", sent: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", why: "HTTP/1.1 only"},

		{name: "another expectation", sent: get("Expect: 200-ok"), why: "Expect"},
		{name: "two expectations", sent: get("Expect: 100-continue", "Expect: 100-continue"), why: "Expect"},
	}
}

func TestFramingRefusesHeadsThatCanBeReadInTwoWays(t *testing.T) {
	for _, c := range framingRefusedHeads() {
		for _, before := range []string{"", framingGet, framingPost("3\r\nabc\r\n0\r\n\r\n")} {
			for _, cuts := range []string{"", "\x00", "\x06\x00\x01"} {
				w := &framingWire{in: []byte(before + c.sent + framingGet), cuts: []byte(cuts)}
				f := egress.NewFraming(w)
				v, err := framingPassed(f, 512)
				var refused *egress.FramingError
				if !errors.As(err, &refused) {
					t.Fatalf("%s: %v, passed %q", c.name, err, v.all)
				}
				if string(v.all) != before {
					t.Errorf("%s: passed %q", c.name, v.all[len(before):])
				}
				framingIsRefusal(t, c, w.out.Bytes())
				if _, again := f.Read(make([]byte, 9)); !errors.Is(again, err) {
					t.Errorf("%s: then %v", c.name, again)
				}
				if n, err := f.Write([]byte("more")); n != 0 || err == nil {
					t.Errorf("%s: something was written after the refusal", c.name)
				}
			}
		}
	}
}

// framingIsRefusal checks that an answer, and nothing more, is this case's refusal.
func framingIsRefusal(t *testing.T, c framingCase, answer []byte) {
	t.Helper()
	r := bufio.NewReader(bytes.NewReader(answer))
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Errorf("%s: answered %q: %v", c.name, answer, err)
		return
	}
	defer resp.Body.Close()
	var body struct{ Error, Reason, Hint string }
	if err := json.NewDecoder(resp.Body).Decode(&body); err != nil {
		t.Errorf("%s: answered %q: %v", c.name, answer, err)
	}
	status := c.status
	if status == 0 {
		status = http.StatusBadRequest
	}
	if resp.StatusCode != status || !resp.Close || resp.Header.Get("Content-Type") != "application/json" ||
		resp.Header.Get("X-Egress-Reason") != "invalid_request" ||
		body.Error != "egress_denied" || body.Reason != "invalid_request" || !strings.Contains(body.Hint, c.why) {
		t.Errorf("%s: answered %q, want a %d with %q", c.name, answer, status, c.why)
	}
	if rest, _ := io.ReadAll(r); len(rest) > 0 {
		t.Errorf("%s: and then %q", c.name, rest)
	}
}

// What is wrong with a body is found when its head was passed on; the handler answers.
func TestFramingRefusesBodiesThatCanBeReadInTwoWays(t *testing.T) {
	for _, c := range []framingCase{
		// EF2: golang/go#71988, CVE-2025-22871.
		{name: "a bare line feed after a size", sent: "3\nabc\r\n0\r\n\r\n", why: "carriage return"},
		{name: "a bare line feed in an extension", sent: "3;a\nabc\r\n0\r\n\r\n", why: "carriage return"},
		{name: "a bare carriage return after a size", sent: "3\rabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a bare line feed after a chunk", sent: "3\r\nabc\n0\r\n\r\n", why: "carriage return"},
		{name: "a bare line feed at the end", sent: "0\r\n\n", why: "carriage return"},
		{name: "a longer chunk", sent: "3\r\nabcd\r\n0\r\n\r\n", why: "where its size says"},
		{name: "a shorter chunk", sent: "5\r\nabc\r\n0\r\n\r\n", why: "where its size says"},
		{name: "no size", sent: "\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "an extension of no size", sent: ";a\r\n", why: "hexadecimal"},
		{name: "a signed size", sent: "+3\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a negative size", sent: "-3\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a prefixed size", sent: "0x3\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a size with underscores", sent: "1_0\r\n", why: "hexadecimal"},
		{name: "a space before a size", sent: " 3\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a space after a size", sent: "3 \r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "17 digits", sent: "00000000000000003\r\nabc\r\n0\r\n\r\n", why: "hexadecimal"},
		{name: "a size that is negative in 64 bits", sent: "ffffffffffffffff\r\n", why: "too large"},
		{name: "a long extension", sent: "3;" + strings.Repeat("a", 256) + "\r\nabc\r\n0\r\n\r\n", why: "too long"},
		{name: "an extension that does not end", sent: "3;" + strings.Repeat("a", 5000), why: "too long"},
		{name: "a zero byte in an extension", sent: "3;\x00\r\nabc\r\n0\r\n\r\n", why: "control"},

		{name: "a length in the trailers", sent: "0\r\nContent-Length: 3\r\n\r\n", why: "into the head"},
		{name: "a coding in the trailers", sent: "0\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n", why: "into the head"},
		{name: "a host in the trailers", sent: "0\r\nHost: b\r\n\r\n", why: "into the head"},
		{name: "a credential in the trailers", sent: "0\r\nAuthorization: Bearer x\r\n\r\n", why: "into the head"},
		{name: "a cookie in the trailers", sent: "0\r\nCookie: x\r\n\r\n", why: "into the head"},
		{name: "a folded trailer", sent: "0\r\na: b\r\n c\r\n\r\n", why: "second line"},
		{name: "a request for trailers", sent: "0\r\n" + framingGet, why: "proper name"},
		{name: "a trailer with a zero byte", sent: "0\r\na: \x00\r\n\r\n", why: "control"},
		{name: "8 KiB of trailers", sent: "0\r\na: " + strings.Repeat("b", 8<<10) + "\r\n\r\n", why: "8 KiB", status: 431},
	} {
		for _, cuts := range []string{"", "\x00", "\x06\x00\x01"} {
			w := &framingWire{in: []byte(framingPost(c.sent) + framingGet), cuts: []byte(cuts)}
			v, err := framingPassed(egress.NewFraming(w), 512)
			var refused *egress.FramingError
			if !errors.As(err, &refused) || !strings.Contains(refused.Why, c.why) || refused.Status != max(c.status, 400) {
				t.Errorf("%s: %v, passed %q", c.name, err, v.all)
			}
			if len(v.bodies) != 1 || w.out.Len() > 0 {
				t.Errorf("%s: passed %q, answered %q", c.name, v.all, &w.out)
			}
			req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(v.all)))
			if err != nil {
				t.Fatal(err)
			}
			if body, err := io.ReadAll(req.Body); err == nil {
				t.Errorf("%s: the server takes %q for a whole body", c.name, body)
			}
		}
	}
}

func TestFramingPassesWhatIsFramedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		sent   string
		bodies []string
		raw    string
	}{
		"a request": {sent: framingGet, bodies: []string{""}},
		"all sorts of fields": {
			sent: framingHead("PROPFIND http://a/\xc3\xbc?b=%20 HTTP/1.1", "hOST:a", "A:", "B: \t c \t", "C: \xff\xc3\xbc", "!#$%&'*+-.^_`|~9: d",
				"Expect: 100-Continue", "Content-Length: 0"), bodies: []string{""},
		},
		"200 fields":           {sent: framingHead("GET / HTTP/1.1", append(slices.Repeat([]string{"A: b"}, 199), "Host: a")...), bodies: []string{""}},
		"HTTP/1.0 and no host": {sent: "GET / HTTP/1.0\r\n\r\n", bodies: []string{""}},
		"a body":               {sent: framingHead("POST / HTTP/1.1", "Host: a", "Content-Length:  003 ") + "abc", bodies: []string{"abc"}},
		"chunks": {
			sent:   framingPost("3;a=\"b\"\r\nabc\r\n00A\r\n0123456789\r\n0\r\n\r\n"),
			bodies: []string{"abc0123456789"},
		},
		"no chunk":                    {sent: framingPost("00\r\n\r\n") + framingGet, bodies: []string{"", ""}},
		"trailers":                    {sent: framingPost("1\r\na\r\n0;x\r\nChecksum: b\r\nC:\r\n\r\n") + framingGet, bodies: []string{"a", ""}},
		"a coding in capital letters": {sent: framingHead("PUT / HTTP/1.1", "Host: a", "Transfer-Encoding: Chunked") + "0\r\n\r\n", bodies: []string{""}},
		"a body that looks like a request": {
			sent:   framingHead("POST / HTTP/1.1", "Host: a", fmt.Sprintf("Content-Length: %d", len(framingGet))) + framingGet + framingGet,
			bodies: []string{framingGet, ""},
		},
		"a tunnel":            {sent: framingGet + framingHead("CONNECT a:443 HTTP/1.1", "Host: a:443") + "\x16\x03\x01\n\r\n\r\n\x00", bodies: []string{"", ""}, raw: "\x16\x03\x01\n\r\n\r\n\x00"},
		"an old tunnel":       {sent: framingHead("CONNECT a:443 HTTP/1.0") + "a", bodies: []string{""}, raw: "a"},
		"a tunnel of no body": {sent: framingHead("CONNECT a:443 HTTP/1.1", "Host: a", "Content-Length: 0") + "a", bodies: []string{""}, raw: "a"},
		"a websocket":         {sent: framingHead("GET / HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: WebSocket") + "\x81\x00", bodies: []string{""}, raw: "\x81\x00"},
	} {
		for _, cuts := range []string{"", "\x00", "\x06\x00\x01"} {
			for _, size := range []int{1, 3, 8 << 10} {
				w := &framingWire{in: []byte(c.sent), cuts: []byte(cuts)}
				f := egress.NewFraming(w)
				v, err := framingPassed(f, size)
				if !errors.Is(err, io.EOF) {
					t.Errorf("%s: %v", name, err)
				}
				want := framingView{all: []byte(c.sent), bodies: c.bodies, raw: c.raw}
				if diff := cmp.Diff(want, v, cmp.AllowUnexported(framingView{})); diff != "" {
					t.Errorf("%s:\n%s", name, diff)
				}
				if w.out.Len() > 0 || f.Raw() != (c.raw != "") {
					t.Errorf("%s: raw %t, answered %q", name, f.Raw(), &w.out)
				}
			}
		}
	}
}

func TestFramingSaysWhereARequestWasCutOff(t *testing.T) {
	for sent, want := range map[string]error{
		"":                        io.EOF,
		framingGet:                io.EOF,
		"GET / HT":                io.ErrUnexpectedEOF,
		framingGet + "GET / HT":   io.ErrUnexpectedEOF,
		framingPost("3"):          io.ErrUnexpectedEOF,
		framingPost("3\r\nabc"):   io.ErrUnexpectedEOF,
		framingPost("0\r\na: b"):  io.ErrUnexpectedEOF,
		framingPost("0\r\n"):      io.ErrUnexpectedEOF,
		framingPost("a\r\nabc"):   io.EOF, // the server counts too
		framingPost("a\r\nabc\n"): io.EOF,
	} {
		w := &framingWire{in: []byte(sent)}
		if _, err := framingPassed(egress.NewFraming(w), 512); err != want { // as net/http compares
			t.Errorf("%q: %v, want %v", sent, err, want)
		}
	}
}

func TestFramingGoesOnAfterADeadline(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	f := egress.NewFraming(server)
	p := make([]byte, 512)
	for _, part := range []string{"GET / HT", "TP/1.1\r", "\nHost: a\r\n\r"} {
		_ = f.SetReadDeadline(time.Time{})
		go func() {
			_, _ = io.WriteString(client, part)
			_ = f.SetReadDeadline(time.Unix(1, 0))
		}()
		if n, err := f.Read(p); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("after %q: %d, %v", part, n, err)
		}
	}
	_ = f.SetReadDeadline(time.Time{})
	go io.WriteString(client, "\n")
	if n, err := f.Read(p); string(p[:n]) != framingGet || err != nil {
		t.Fatalf("%q, %v", p[:n], err)
	}
}

// EL4: what is idle holds little.
func TestFramingKeepsNoLargeBuffer(t *testing.T) {
	w := &framingWire{in: []byte(framingHead("GET / HTTP/1.1", "Host: a", "A: "+strings.Repeat("b", 60<<10)))}
	f := egress.NewFraming(w)
	if v, err := framingPassed(f, 4<<10); len(v.bodies) != 1 || !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if f.Holds() > 512 {
		t.Errorf("%d bytes", f.Holds())
	}
}

// framingListener gives out connections behind guards.
type framingListener struct{ net.Listener }

func (l framingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return egress.NewFraming(conn), nil
}

// framingServe runs a server behind the guard and returns how to connect to it.
func framingServe(t *testing.T, s *http.Server) (dial func() *framingClient) {
	t.Helper()
	ignore := goleak.IgnoreCurrent()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.MaxHeaderBytes = 64 << 10
	done := make(chan error)
	go func() { done <- s.Serve(framingListener{l}) }()
	t.Cleanup(func() {
		s.Close()
		<-done
		goleak.VerifyNone(t, ignore)
	})
	return func() *framingClient {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		return &framingClient{Conn: conn, t: t, r: bufio.NewReader(conn)}
	}
}

type framingClient struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func (c *framingClient) send(s string) {
	c.t.Helper()
	if _, err := io.WriteString(c.Conn, s); err != nil {
		c.t.Fatal(err)
	}
}

// answer reads one answer.
func (c *framingClient) answer() (status int, body string) {
	c.t.Helper()
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.StatusCode, string(all)
}

// rest reads to the end.
func (c *framingClient) rest() []byte {
	c.t.Helper()
	all, err := io.ReadAll(c.r)
	if err != nil {
		c.t.Fatalf("after %q: %v", all, err)
	}
	return all
}

// framingEcho answers with what it was sent.
func framingEcho(t *testing.T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		fmt.Fprintf(w, "%s %s", r.URL.Path, body)
	})
}

// EF1, EF3: OpenShell#342. A client sends requests in one packet, and the last of
// them smuggles another; those before it are answered, and it never comes to a
// handler, though the client goes on to send.
func TestFramingJudgesEachPipelinedRequest(t *testing.T) {
	dial := framingServe(t, &http.Server{Handler: framingEcho(t)})
	smuggle := framingHead("POST /d HTTP/1.1", "Host: a", "Content-Length: 6", "Transfer-Encoding: chunked") +
		"0\r\n\r\n" + framingHead("GET /secret HTTP/1.1", "Host: b")
	for _, before := range []struct{ sent, answer string }{
		{"", ""},
		{framingHead("GET /a HTTP/1.1", "Host: a"), "/a "},
		{framingHead("POST /b HTTP/1.1", "Host: a", "Content-Length: 3") + "abc", "/b abc"},
		{strings.Replace(framingPost("3\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n"), "/", "/c", 1), "/c abcd"},
	} {
		c := dial()
		c.send(strings.Repeat(before.sent, 3) + smuggle + strings.Repeat("x", 100_000))
		for range 3 {
			if before.sent == "" {
				break
			}
			if status, body := c.answer(); status != http.StatusOK || body != before.answer {
				t.Errorf("%d %q, want %q", status, body, before.answer)
			}
		}
		framingIsRefusal(t, framingCase{name: before.answer, why: "both"}, c.rest())
	}
}

// The server looks ahead while it answers; the refusal of what it sees there must
// not run into the answer.
func TestFramingRefusesAfterTheAnswerInFlight(t *testing.T) {
	dial := framingServe(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "one, ")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done() // the look ahead ended
		_, _ = io.WriteString(w, "two")
	})})
	c := dial()
	c.send(framingGet + "GET /  HTTP/1.1\r\n\r\n")
	if status, body := c.answer(); status != http.StatusOK || body != "one, two" {
		t.Errorf("%d %q", status, body)
	}
	framingIsRefusal(t, framingCase{why: "version"}, c.rest())
}

// EF7: goproxy#801, goproxy#805. A client sends with its CONNECT, or with the head of
// a websocket, what belongs to the tunnel.
func TestFramingKeepsEarlyBytes(t *testing.T) {
	const early, late = "\x16\x03\x01 early\r\n\r\n", "late"
	for head, yes := range map[string]string{
		framingHead("CONNECT a:443 HTTP/1.1", "Host: a:443"):                                  "HTTP/1.1 200 Connection established\r\n\r\n",
		framingHead("GET / HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: websocket"): "HTTP/1.1 101 Switching Protocols\r\n\r\n",
	} {
		dial := framingServe(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			conn, buffered, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			if f, ok := conn.(*egress.Framing); !ok || !f.Raw() {
				t.Errorf("%T, or not raw", conn)
			}
			_, _ = io.WriteString(conn, yes[:5])
			_, _ = io.WriteString(conn, yes[5:])
			_, _ = io.Copy(conn, io.LimitReader(buffered, int64(len(early+late))))
		})})
		for _, part := range []int{0, 1, len(early)} {
			c := dial()
			c.send(head + early[:part])
			got := make([]byte, len(yes)+part)
			if _, err := io.ReadFull(c.r, got); err != nil || string(got) != yes+early[:part] {
				t.Fatalf("%q, %v", got, err)
			}
			c.send(early[part:] + late)
			if rest := c.rest(); string(rest) != early[part:]+late {
				t.Errorf("%q with %d bytes before: then %q", head, part, rest)
			}
		}
	}
}

// A denied tunnel must not be the way to send what is never judged.
func TestFramingReadsNothingAfterADeniedTurn(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	dial := framingServe(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen = append(seen, r.Method+" "+r.URL.Path)
		mu.Unlock()
		if r.Method == http.MethodConnect {
			w.WriteHeader(http.StatusForbidden)
		}
		_, _ = io.WriteString(w, "no") // 200 to a websocket: no yes either
	})})
	smuggle := framingHead("POST /secret HTTP/1.1", "Host: a", "Content-Length: 3", "Transfer-Encoding: chunked") + "0\r\n\r\n"
	for head, status := range map[string]int{
		framingHead("CONNECT a:443 HTTP/1.1", "Host: a:443"):                                  403,
		framingHead("GET / HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: websocket"): 200,
	} {
		for _, together := range []bool{true, false} {
			c := dial()
			if together {
				c.send(head + smuggle)
			} else {
				c.send(head)
			}
			if got, body := c.answer(); got != status || body != "no" {
				t.Errorf("%d %q", got, body)
			}
			if !together {
				_, _ = io.WriteString(c, smuggle) // may be closed
			}
			if rest := c.rest(); len(rest) > 0 {
				t.Errorf("and then %q", rest)
			}
		}
	}
	for _, s := range seen {
		if strings.Contains(s, "secret") {
			t.Errorf("the server saw %q", seen)
		}
	}
}

// EF17: an upload of unknown length goes through as it comes.
func TestFramingStreamsUploads(t *testing.T) {
	got := make(chan string)
	dial := framingServe(t, &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		p := make([]byte, 64<<10)
		for {
			n, err := r.Body.Read(p)
			if n > 0 {
				got <- string(p[:n])
			}
			if err != nil {
				return
			}
		}
	})})
	c := dial()
	c.send(framingPost(""))
	for _, part := range []string{"a", "bc", strings.Repeat("d", 1000)} {
		c.send(fmt.Sprintf("%x\r\n%s", len(part), part))
		for have := ""; have != part; {
			select {
			case s := <-got:
				have += s
			case <-time.After(10 * time.Second):
				t.Fatalf("%d bytes of a chunk of %d", len(have), len(part))
			}
		}
		c.send("\r\n")
	}
	c.send("0\r\n\r\n")
	if status, _ := c.answer(); status != http.StatusOK {
		t.Error(status)
	}
}

func TestFramingPassesLargeUploads(t *testing.T) {
	dial := framingServe(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n, err)
	})})
	const size = 8 << 20
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	addr := dial().RemoteAddr().String()
	for _, body := range []io.Reader{bytes.NewReader(make([]byte, size)), io.LimitReader(bytes.NewReader(make([]byte, size)), size)} {
		resp, err := client.Post("http://"+addr, "", body)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := fmt.Sprint(size, nil); string(answer) != want {
			t.Errorf("%q, want %q", answer, want)
		}
	}
}

// EL4: a head that does not come ends with the server's own deadlines.
func TestFramingEndsSlowHeads(t *testing.T) {
	dial := framingServe(t, &http.Server{
		Handler: framingEcho(t), ReadHeaderTimeout: 50 * time.Millisecond, IdleTimeout: 50 * time.Millisecond,
	})
	c := dial()
	c.send("GET / HTTP")
	if rest := c.rest(); len(rest) > 0 {
		t.Errorf("%q", rest)
	}
	c = dial()
	c.send(framingGet + "GET / HTTP")
	if status, _ := c.answer(); status != http.StatusOK {
		t.Error(status)
	}
	if rest := c.rest(); len(rest) > 0 {
		t.Errorf("%q", rest)
	}
}

// FuzzFraming compares the guard with another reader of requests: what it passes is
// what it was sent, and means to net/http what it means to the guard.
func FuzzFraming(f *testing.F) {
	for _, c := range framingRefusedHeads() {
		if len(c.sent) < 1<<10 {
			f.Add([]byte(framingGet+c.sent), []byte{5, 0}, 7)
		}
	}
	f.Add([]byte(framingPost("3;a=b\r\nabc\r\n00A\r\n0123456789\r\n0\r\nX: y\r\n\r\n")+framingGet), []byte{}, 512)
	f.Add([]byte(framingHead("POST / HTTP/1.1", "Host: a", "Content-Length: 3")+"abc"+framingGet), []byte{0}, 1)
	f.Add([]byte(framingHead("CONNECT a:443 HTTP/1.1", "Host: a")+"\x16\x03"), []byte{40}, 3)
	f.Fuzz(func(t *testing.T, sent, cuts []byte, size int) {
		if len(sent) > 8<<10 { // net/http has limits of its own
			return
		}
		w := &framingWire{in: slices.Clone(sent), cuts: cuts}
		v, err := framingPassed(egress.NewFraming(w), 1+int(uint(size)%1000))
		if !bytes.HasPrefix(sent, v.all) {
			t.Fatalf("sent %q, passed %q", sent, v.all)
		}
		framingAgrees(t, v, err)
		v2, err2 := framingPassed(egress.NewFraming(&framingWire{in: slices.Clone(sent)}), 4<<10)
		if diff := cmp.Diff(v, v2, cmp.AllowUnexported(framingView{})); diff != "" || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Fatalf("in other packets: %v, %v\n%s", err, err2, diff)
		}
	})
}

// framingAgrees reads with net/http what a guard passed until it ended with err.
func framingAgrees(t *testing.T, v framingView, ended error) {
	r := bufio.NewReader(bytes.NewReader(v.all))
	for i, want := range v.bodies {
		req, err := http.ReadRequest(r)
		var target *url.Error
		if errors.As(err, &target) || (err != nil && strings.HasPrefix(err.Error(), "bad trailer key")) {
			return // no matter of framing: the server refuses and closes
		}
		if err != nil {
			t.Fatalf("request %d of %q: %v", i, v.all, err)
		}
		if req.Method == http.MethodConnect || req.Header.Get("Upgrade") != "" {
			break
		}
		last := i == len(v.bodies)-1
		body, err := io.ReadAll(req.Body)
		if string(body) != want {
			t.Fatalf("body %d of %q: %q, want %q", i, v.all, body, want)
		}
		if err != nil && (!last || ended == nil) {
			t.Fatalf("body %d of %q: %v", i, v.all, err)
		}
		if err != nil {
			return
		}
	}
	rest, _ := io.ReadAll(r)
	if string(rest) != v.raw {
		t.Fatalf("net/http finds %q after the requests, not %q", rest, v.raw)
	}
}
