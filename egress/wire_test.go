package egress_test

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// readers are the clients of a host whose TLS the proxy reads.
func readers(t *testing.T, b *box, test func(t *testing.T, c *http.Client)) {
	t.Helper()
	for _, entry := range entries {
		for _, proto := range []string{"http/1.1", "h2"} {
			t.Run(string(entry)+" "+proto, func(t *testing.T) { test(t, b.client(entry, proto)) })
		}
	}
}

// destinations are servers of both versions of HTTP.
func destinations(t *testing.T, h http.HandlerFunc, test func(t *testing.T, b *box, s *site)) {
	t.Helper()
	for name, change := range map[string]func(*siteConfig){"from http/1.1": oldHTTP, "from h2": func(*siteConfig) {}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.site("api.example.com", h, change)
			test(t, r.ruled(intercepted("api.example.com")), s)
		})
	}
}

// EF8: OpenShell !44 (30 s stalls with gh), #610: the end of an answer was found by the end
// of its connection. EF9: goproxy#755, #749, #770, #742: an answer of HTTP/2 was passed on
// with a status line of its own, one without a body with chunks, one without a length at all.
func TestAnswersOfEveryShapeArriveWhole(t *testing.T) {
	shapes := map[string]struct {
		status int
		body   string
		write  http.HandlerFunc
	}{
		"/length": {200, "hello", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "5")
			io.WriteString(w, "hello")
		}},
		"/chunks": {200, "hello", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "hel")
			w.(http.Flusher).Flush()
			io.WriteString(w, "lo")
		}},
		"/empty":   {200, "", func(http.ResponseWriter, *http.Request) {}},
		"/nothing": {204, "", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }},
		"/same":    {304, "", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("ETag", `"1"`); w.WriteHeader(304) }},
		"/moved":   {302, "", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Location", "/x"); w.WriteHeader(302) }},
		"/gone":    {404, "no", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404); io.WriteString(w, "no") }},
		"/failed":  {500, "bad", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500); io.WriteString(w, "bad") }},
		"/unheard": {799, "odd", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(799); io.WriteString(w, "odd") }},
		"/early": {200, "late", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(103)
			w.WriteHeader(100)
			io.WriteString(w, "late")
		}},
		"/many": {200, strings.Repeat("x", 300_000), func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat("x", 300_000)) }},
		"/nochunks": {200, "whole", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/x")
			io.WriteString(w, "whole")
		}},
	}
	destinations(t, func(w http.ResponseWriter, r *http.Request) { shapes[r.URL.Path].write(w, r) }, func(t *testing.T, b *box, _ *site) {
		readers(t, b, func(t *testing.T, c *http.Client) {
			for path, want := range shapes {
				for _, method := range []string{"GET", "HEAD", "GET"} {
					a := send(t, c, request(t, method, "https://api.example.com"+path, ""))
					body := want.body
					if method == "HEAD" {
						body = ""
					}
					if a.StatusCode != want.status || a.body != body || a.ProtoMajor == 1 && a.Proto != "HTTP/1.1" {
						t.Errorf("%s %s: %d, %d bytes, %s", method, path, a.StatusCode, len(a.body), a.Proto)
					}
				}
			}
		})
	})
}

// EF9: what the wire says is what HTTP/1.1 says, byte for byte.
func TestTheStatusLineIsOfTheClientsVersion(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/same" {
			w.WriteHeader(304)
			return
		}
		io.WriteString(w, "ok")
	})
	b := r.ruled(intercepted("api.example.com"))
	for path, want := range map[string]string{"/": "HTTP/1.1 200 OK\r\n", "/same": "HTTP/1.1 304 Not Modified\r\n"} {
		conn := b.secure(boxed.EntryHTTP, "api.example.com", "http/1.1")
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n", path)
		all, err := io.ReadAll(conn)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(all), want) || path == "/same" && strings.Contains(strings.ToLower(string(all)), "transfer-encoding") {
			t.Errorf("%s: %q", path, all)
		}
	}
}

// EF12: microsandbox#784, #768: bodies were taken for text, and broke where a chunk ended
// within a character.
func TestBodiesAreBytes(t *testing.T) {
	body := make([]byte, 100_007)
	rand.Read(body)
	copy(body, "HTTP/1.1 200 OK\r\n\r\n\xff\xfe\x00é\xc3")
	destinations(t, func(w http.ResponseWriter, r *http.Request) {
		got, err := io.ReadAll(r.Body)
		sum := sha256.Sum256(got)
		w.Header().Set("X-Got", hex.EncodeToString(sum[:]))
		if err == nil {
			w.Write(got)
		}
	}, func(t *testing.T, b *box, _ *site) {
		sum := sha256.Sum256(body)
		readers(t, b, func(t *testing.T, c *http.Client) {
			for _, reader := range []io.Reader{bytes.NewReader(body), struct{ io.Reader }{bytes.NewReader(body)}} {
				req, _ := http.NewRequest("POST", "https://api.example.com/", reader)
				a := send(t, c, req)
				if a.Header.Get("X-Got") != hex.EncodeToString(sum[:]) || a.body != string(body) {
					t.Errorf("%d bytes came back changed", len(a.body))
				}
			}
		})
	})
}

// EF15: agent-vault#195: the default port stayed in Host, which signatures are made of.
func TestHostIsWithoutTheDefaultPort(t *testing.T) {
	r := newRig(t)
	read := r.site("read.example.com", nil)
	page := r.site("page.example.com", nil, plain)
	odd := r.site("odd.example.com", nil, func(c *siteConfig) { c.Port = 8443 })
	b := r.ruled(
		intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}},
		boxed.EgressRule{Host: "odd.example.com", Ports: []uint16{8443}, Mode: boxed.EgressIntercept},
	)
	readers(t, b, func(t *testing.T, c *http.Client) {
		for s, hosts := range map[*site][2][]string{
			read: {{"https://read.example.com/", "https://read.example.com:443/"}, {"read.example.com", "READ.example.com", "read.example.com:443", "read.example.com."}},
			odd:  {{"https://odd.example.com:8443/"}, {"odd.example.com:8443"}},
		} {
			for _, target := range hosts[0] {
				for _, h := range hosts[1] {
					if a := send(t, c, request(t, "GET", target, "", "Host: "+h)); a.StatusCode != 200 {
						t.Fatalf("%s with Host %s is %d %s", target, h, a.StatusCode, a.body)
					}
					if got, want := s.last(t).Host, strings.TrimPrefix(strings.TrimSuffix(hosts[0][0], "/"), "https://"); got != want {
						t.Errorf("Host is %q, and is to be %q", got, want)
					}
				}
			}
			if s == odd {
				send(t, c, request(t, "GET", "https://odd.example.com:8443/", "", "Host: odd.example.com")).want(t, 421, boxed.EgressHost)
			}
		}
	})
	for _, target := range []string{"http://page.example.com", "http://page.example.com:80/", "http://PAGE.example.com./x?y"} {
		if a := raw(t, b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil), "GET "+target+" HTTP/1.1\r\nHost: x\r\n\r\n"); a.StatusCode != 200 {
			t.Errorf("%s is %d %s", target, a.StatusCode, a.body)
		} else if got := page.last(t).Host; got != "page.example.com" {
			t.Errorf("Host is %q", got)
		}
	}
}

// EF16: iron-proxy#15, #21, goproxy#720: Content-Length was lost, and pushes failed. EF17:
// agent-vault: bodies of unknown length were read whole, and cut at a limit.
func TestTheLengthOfABodyStaysWhatItIs(t *testing.T) {
	destinations(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d %d %v", r.ContentLength, n, r.TransferEncoding)
	}, func(t *testing.T, b *box, s *site) {
		readers(t, b, func(t *testing.T, c *http.Client) {
			for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
				for _, n := range []int{0, 1, 70_000} {
					body := bytes.Repeat([]byte("x"), n)
					known, _ := http.NewRequest(method, "https://api.example.com/", bytes.NewReader(body))
					a := send(t, c, known)
					if want := fmt.Sprintf("%d %d []", n, n); a.body != want && !(n == 0 && strings.HasPrefix(a.body, "-1 0")) {
						t.Errorf("%s of %d bytes arrived as %q", method, n, a.body)
					}
					unknown, _ := http.NewRequest(method, "https://api.example.com/", struct{ io.Reader }{bytes.NewReader(body)})
					if a := send(t, c, unknown); !strings.HasPrefix(a.body, fmt.Sprintf("-1 %d ", n)) && n > 0 {
						t.Errorf("%s of a body of unknown length, %d bytes, arrived as %q", method, n, a.body)
					}
				}
			}
			if a := send(t, c, request(t, "GET", "https://api.example.com/", "")); a.body != "0 0 []" {
				t.Errorf("a GET arrived as %q", a.body)
			}
		})
	})
}

// EF16: so is that of an answer, and its other fields.
func TestTheFieldsOfAnAnswerStayWhatTheyAre(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h["Date"], h["Content-Type"] = nil, nil
		h.Set("Content-Length", "3")
		h["X-Two"] = []string{"a", "b"}
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Keep-Alive", "timeout=5")
		h.Set("Proxy-Authenticate", "Basic")
		h.Set("Content-Encoding", "gzip")
		io.WriteString(w, "abc")
	}, oldHTTP)
	b := r.ruled(intercepted("api.example.com"))
	readers(t, b, func(t *testing.T, c *http.Client) {
		a := send(t, c, request(t, "GET", "https://api.example.com/", ""))
		want := http.Header{"Content-Length": {"3"}, "X-Two": {"a", "b"}, "Content-Encoding": {"gzip"}}
		if diff := cmp.Diff(want, a.Header); diff != "" {
			t.Errorf("header (-want +got):\n%s", diff)
		}
	})
}

// EF14: golang/go#81319: the fields of an interim answer were passed on, also those of the
// connection alone. None is passed on but 100.
func TestInterimAnswersAreNotPassedOn(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.Header().Set("Set-Cookie", "a=b")
		w.WriteHeader(103)
		w.Header().Del("Link")
		w.Header().Del("Set-Cookie")
		io.Copy(io.Discard, req.Body)
		io.WriteString(w, "ok")
	}, oldHTTP)
	b := r.ruled(intercepted("api.example.com"))
	conn := b.secure(boxed.EntryHTTP, "api.example.com", "http/1.1")
	io.WriteString(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
	in := bufio.NewReader(conn)
	if a := readAnswer(t, in, "GET"); a.StatusCode != 200 || a.Header.Get("Link") != "" || a.Header.Get("Set-Cookie") != "" {
		t.Errorf("the first answer is %d %v", a.StatusCode, a.Header)
	}
	io.WriteString(conn, "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
	line, err := in.ReadString('\n')
	if err != nil || line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatalf("a body that waits to be asked for is answered with %q, %v", line, err)
	}
	in.ReadString('\n')
	io.WriteString(conn, "hi")
	if a := readAnswer(t, in, "POST"); a.StatusCode != 200 || a.body != "ok" {
		t.Errorf("the answer is %d %q", a.StatusCode, a.body)
	}
}

// EF10: OpenShell#878, #2699: "/public/../secret" and its like were let through by a rule for
// "/public/". EF11: boundary, iron-proxy#156, OpenShell#1073: an escaped slash was decoded, and
// the package of npm, or the object, was another one.
func TestWhatIsJudgedIsWhatLeaves(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil)
	b := r.ruled(boxed.EgressRule{Host: "api.example.com", Mode: boxed.EgressIntercept, Paths: []string{"/public/", "/exact", "/star/*/end", "/@scope%2fpkg"}})
	free := r.ruled(intercepted("api.example.com"))
	send1 := func(t *testing.T, b *box, proto, target string) answer {
		if proto == "h2" {
			conn := b.secure(boxed.EntryHTTP, "api.example.com", "h2")
			status := rawH2(t, conn, [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "api.example.com"}, {":path", target}})
			var n int
			fmt.Sscan(status, &n)
			return answer{Response: &http.Response{StatusCode: n}}
		}
		return raw(t, b.secure(boxed.EntryHTTP, "api.example.com", "http/1.1"), "GET "+target+" HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
	}
	for _, proto := range []string{"http/1.1", "h2"} {
		t.Run(proto, func(t *testing.T) {
			for _, target := range []string{
				"/public/../secret", "/public/./x", "/public/%2e%2e/secret", "/public/%2E%2E/secret", "/public/.%2e/secret", "/public/..;x/secret",
				"/public/;/../secret", "//public/x", "/public//x", "/public/..%2fsecret", "/public/%2e%2e%2fsecret", "/public/a/..", "/public/%5c..%5csecret",
				"/public/..\\secret", "/public/%252e%252e/secret", "/public/%00", "/../public/x", "/./public/x",
			} {
				if a := send1(t, b, proto, target); a.StatusCode != 400 {
					t.Errorf("%s is %d %s", target, a.StatusCode, a.reason)
				}
			}
			for _, target := range []string{"/secret", "/publicx", "/public", "/exact/", "/exact/x", "/PUBLIC/x", "/star/end", "/star/a/b/end", "/star//end", "/@scope/pkg", "/%70ublic/x"} {
				if a := send1(t, b, proto, target); a.StatusCode != 403 && a.StatusCode != 400 {
					t.Errorf("%s is %d %s", target, a.StatusCode, a.reason)
				}
			}
			s.untouched(t)
			for _, target := range []string{
				"/public/", "/public/a%20b", "/public/a%2Fb", "/public/a%2fb?x=/../&y=%2e%2e", "/exact", "/exact?q", "/star/any/end", "/@scope%2fpkg",
				"/public/a;b=c", "/public/...", "/public/.hidden", "/public/a+b,c:d@e~f!g$h&i'j(k)*", "/public/%C3%A9", "/public/x?", "/public/x?a=b?c",
			} {
				if a := send1(t, b, proto, target); a.StatusCode != 200 {
					t.Errorf("%s is %d %s", target, a.StatusCode, a.reason)
				} else if got := s.last(t).RequestURI; got != target {
					t.Errorf("%s left as %s", target, got)
				}
			}
			for _, target := range []string{"/a/../b", "//x//y", "/a%2F..%2Fb", "/%2e%2e/", "/a//b?c=d"} { // where no path decides
				if a := send1(t, free, proto, target); a.StatusCode != 200 {
					t.Errorf("%s is %d %s", target, a.StatusCode, a.reason)
				} else if got := s.last(t).RequestURI; got != target {
					t.Errorf("%s left as %s", target, got)
				}
			}
			s.mu.Lock()
			s.got = nil
			s.mu.Unlock()
		})
	}
}

// EF11: what a rule's path matches is what is written.
func TestAPathOfARuleIsAPrefixAWholeOrHasSegmentsThatAreAny(t *testing.T) {
	for _, c := range []struct {
		rule, path string
		want       bool
	}{
		{"/a", "/a", true},
		{"/a", "/a/", false},
		{"/a", "/ab", false},
		{"/a/", "/a/", true},
		{"/a/", "/a/b/c", true},
		{"/a/", "/a", false},
		{"/", "/anything", true},
		{"/*/b", "/a/b", true},
		{"/*/b", "/a/b/", false},
		{"/*/b", "/a/c/b", false},
		{"/*/b", "//b", false},
		{"/*/", "/a/", true},
		{"/*/", "/a/b", true},
		{"/*/", "/a", false},
		{"/*/*", "/a/b", true},
		{"/*/*", "/a", false},
		{"/*/*", "/a/", false},
		{"/*", "/", false},
		{"/*", "/a", true},
		{"/*", "/a/b", false},
	} {
		if got := egress.PathMatches(c.rule, c.path); got != c.want {
			t.Errorf("the rule %s matches %s: %v", c.rule, c.path, got)
		}
	}
}
