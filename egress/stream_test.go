package egress_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// ET11: a call of gRPC goes both ways at once over HTTP/2, and its end is in trailers.
func TestACallOfBothWaysWithTrailers(t *testing.T) {
	r := newRig(t)
	r.site("grpc.example.com", func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		w.Header().Set("X-Te", req.Header.Get("Te"))
		w.(http.Flusher).Flush() // before anything was read
		in := bufio.NewReader(req.Body)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				break
			}
			io.WriteString(w, "re: "+line)
			w.(http.Flusher).Flush()
		}
		w.Header().Set("Grpc-Status", "0")
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", "unannounced")
	})
	b := r.ruled(intercepted("grpc.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		body, w := io.Pipe()
		req, _ := http.NewRequest("POST", "https://grpc.example.com/pkg.Service/Call", body)
		req.Header.Set("Te", "trailers")
		resp, err := b.client(entry, "h2").Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.ProtoMajor != 2 || resp.Header.Get("X-Te") != "trailers" {
			t.Errorf("HTTP/%d, TE %q", resp.ProtoMajor, resp.Header.Get("X-Te"))
		}
		out := bufio.NewReader(resp.Body)
		for i := range 5 {
			fmt.Fprintf(w, "message %d\n", i)
			if line, err := out.ReadString('\n'); err != nil || line != fmt.Sprintf("re: message %d\n", i) {
				t.Fatalf("message %d came back as %q, %v", i, line, err)
			}
		}
		w.Close()
		if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
			t.Errorf("at the end came %q, %v", rest, err)
		}
		if diff := cmp.Diff(http.Header{"Grpc-Status": {"0"}, "Grpc-Message": {"unannounced"}}, resp.Trailer); diff != "" {
			t.Errorf("trailers (-want +got):\n%s", diff)
		}
	})
}

// EF17: an upload that is answered while it goes on is neither held back nor cut, whatever
// the versions of HTTP on both sides.
func TestAnUploadIsAnsweredWhileItGoesOn(t *testing.T) {
	destinations(t, func(w http.ResponseWriter, req *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.(http.Flusher).Flush()
		buf := make([]byte, 100)
		for {
			n, err := req.Body.Read(buf)
			w.Write(buf[:n])
			w.(http.Flusher).Flush()
			if err != nil {
				return
			}
		}
	}, func(t *testing.T, b *box, _ *site) {
		readers(t, b, func(t *testing.T, c *http.Client) {
			body, w := io.Pipe()
			defer w.Close()
			req, _ := http.NewRequest("POST", "https://api.example.com/", body)
			got := make(chan *http.Response, 1)
			go func() {
				if resp, err := c.Do(req); err == nil {
					got <- resp
				}
				close(got)
			}()
			io.WriteString(w, "0")
			resp := <-got
			if resp == nil {
				t.Fatal("there is no answer")
			}
			defer resp.Body.Close()
			readSome(t, resp.Body, 1)
			for i := 1; i < 5; i++ {
				fmt.Fprintf(w, "part %d", i)
				if part := readSome(t, resp.Body, 6); part != fmt.Sprintf("part %d", i) {
					t.Fatalf("%q came back", part)
				}
			}
		})
	})
}

// An answer that comes before the request has ended is passed on, and counts what was sent.
func TestAnAnswerBeforeTheEndOfTheRequest(t *testing.T) {
	destinations(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		io.WriteString(w, "too large")
	}, func(t *testing.T, b *box, _ *site) {
		for _, proto := range []string{"http/1.1", "h2"} {
			c := b.client(boxed.EntryHTTP, proto)
			body, w := io.Pipe()
			go func() {
				for {
					if _, err := w.Write(make([]byte, 4096)); err != nil {
						return
					}
				}
			}()
			req, _ := http.NewRequest("POST", "https://api.example.com/", body)
			resp, err := c.Do(req)
			if err == nil {
				if resp.StatusCode != http.StatusRequestEntityTooLarge {
					t.Errorf("%s: the answer is %d", proto, resp.StatusCode)
				}
				resp.Body.Close()
			} else if proto == "h2" {
				t.Errorf("%s: %v", proto, err)
			}
			body.CloseWithError(io.ErrClosedPipe)
		}
	})
}

// ER4: agent-vault#229, OpenSandbox#898, OpenShell#261, pipelock 2.3.0: events were held back
// until a buffer was full.
func TestEventsArriveAsTheyAreSent(t *testing.T) {
	events := make(chan string)
	handler := func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", req.URL.Query().Get("type"))
		w.(http.Flusher).Flush()
		for e := range events {
			if e == "" {
				return
			}
			io.WriteString(w, e)
			w.(http.Flusher).Flush()
		}
	}
	stream := func(t *testing.T, c *http.Client, target string) {
		t.Helper()
		resp, err := c.Get(target) // whose head comes before the first event
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for i := range 3 {
			e := fmt.Sprintf("data: %d\n\n", i)
			events <- e
			if got := readSome(t, resp.Body, len(e)); got != e {
				t.Errorf("event %d is %q", i, got)
			}
		}
		events <- ""
		if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
			t.Errorf("at the end came %q, %v", rest, err)
		}
	}
	destinations(t, handler, func(t *testing.T, b *box, _ *site) {
		readers(t, b, func(t *testing.T, c *http.Client) {
			for _, kind := range []string{"text/event-stream", "application/x-git-upload-pack-result", "text/plain"} {
				stream(t, c, "https://api.example.com/?type="+kind)
			}
		})
	})
	r := newRig(t)
	r.site("page.example.com", handler, plain)
	b := r.ruled(boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	stream(t, b.proxied(), "http://page.example.com/?type=text/event-stream")
}

// webSocket is a server that takes all upgrades, says something at once, and then gives back
// what it gets.
func webSocket(answer string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, strings.ReplaceAll(answer, "\n", "\r\n"))
		io.Copy(conn, rw)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			half.CloseWrite()
		}
	}
}

const switched = "HTTP/1.1 101 Switching Protocols\nConnection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\nSet-Cookie: kept=1\nX-Kept: 1\n\nhello"

// upgrade asks for a WebSocket, with bytes that do not wait for the answer.
func upgrade(conn net.Conn, host, early string) (*bufio.Reader, *http.Response, error) {
	fmt.Fprintf(conn, "GET /socket HTTP/1.1\r\nHost: %s\r\n", host)
	return upgradeRest(conn, early)
}

// upgradeRest is upgrade after the first fields.
func upgradeRest(conn net.Conn, early ...string) (*bufio.Reader, *http.Response, error) {
	io.WriteString(conn, "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"+strings.Join(early, ""))
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, &http.Request{Method: "GET"})
	return in, resp, err
}

// EF6: OpenShell#652, #718, privaxy#29: frames were lost after a 101, or the 101 was made up.
// EF7: goproxy#801, #805: the bytes that came with the answer were.
func TestAWebSocketOpensWhenTheDestinationAgrees(t *testing.T) {
	r := newRig(t)
	r.site("read.example.com", webSocket(switched), oldHTTP)
	r.site("both.example.com", webSocket(switched)) // speaks h2 too
	r.site("page.example.com", webSocket(switched), plain)
	b := r.ruled(intercepted("read.example.com"), intercepted("both.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"read.example.com", "both.example.com", "page.example.com"} {
			t.Run(host, func(t *testing.T) {
				conn := net.Conn(nil)
				if host == "page.example.com" {
					conn = b.must(entry, host, 80)
				} else {
					conn = b.secure(entry, host, "http/1.1")
				}
				in, resp, err := upgrade(conn, host, "\x81\x05early")
				if err != nil || resp.StatusCode != 101 || resp.Header.Get("X-Kept") != "1" || resp.Header.Get("Sec-WebSocket-Accept") == "" {
					t.Fatalf("the answer is %v, %v", resp, err)
				}
				if got := readSome(t, in, 5); got != "hello" {
					t.Errorf("with the answer came %q", got)
				}
				if got := readSome(t, in, 7); got != "\x81\x05early" {
					t.Errorf("what did not wait came back as %q", got)
				}
				for range 3 {
					io.WriteString(conn, "\x82\x7fframe\x00\xff")
					if got := readSome(t, in, 9); got != "\x82\x7fframe\x00\xff" {
						t.Errorf("a frame came back as %q", got)
					}
				}
			})
		}
	})
}

// EF6: an answer that is no 101 is passed on as it is, and one that changes to something
// else opens nothing.
func TestAWebSocketThatTheDestinationDoesNotWant(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		status int
		reason boxed.EgressReason
	}{
		"not found":        {"HTTP/1.1 404 Not Found\nContent-Length: 4\n\nnope", 404, ""},
		"not an upgrade":   {"HTTP/1.1 200 OK\nContent-Length: 4\n\nnope", 200, ""},
		"another protocol": {strings.Replace(switched, "Upgrade: websocket", "Upgrade: h2c", 1), 502, boxed.EgressConnectFailed},
		"no accept":        {strings.Replace(switched, "Sec-WebSocket-Accept", "X-Accept", 1), 502, boxed.EgressConnectFailed},
		"nonsense":         {"SSH-2.0-x\n\n", 502, boxed.EgressConnectFailed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.site("read.example.com", webSocket(c.answer), oldHTTP)
			b := r.ruled(intercepted("read.example.com"))
			conn := b.secure(boxed.EntryHTTP, "read.example.com", "http/1.1")
			in, resp, err := upgrade(conn, "read.example.com", "GET /smuggled HTTP/1.1\r\nHost: read.example.com\r\n\r\n")
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			if reason := resp.Header.Get("X-Egress-Reason"); resp.StatusCode != c.status || reason != string(c.reason) {
				t.Errorf("the answer is %d %q %s", resp.StatusCode, reason, body)
			}
			if rest, _ := io.ReadAll(in); len(rest) > 0 {
				t.Errorf("then came %q", rest)
			}
			if n := len(s.requests()); n != 1 {
				t.Errorf("%d requests came", n)
			}
		})
	}
}

// EL2: half-close was passed on for TCP only. It is for a WebSocket within TLS, too.
func TestTheEndOfOneSideOfAWebSocketIsPassedOn(t *testing.T) {
	r := newRig(t)
	r.site("read.example.com", webSocket(switched), oldHTTP)
	r.site("page.example.com", webSocket(switched), plain)
	b := r.ruled(intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"read.example.com", "page.example.com"} {
			var conn interface {
				net.Conn
				CloseWrite() error
			}
			if host == "page.example.com" {
				conn = b.must(entry, host, 80).(interface {
					net.Conn
					CloseWrite() error
				})
			} else {
				conn = b.secure(entry, host, "http/1.1")
			}
			in, resp, err := upgrade(conn, host, "")
			if err != nil || resp.StatusCode != 101 {
				t.Fatalf("%v %v", resp, err)
			}
			io.WriteString(conn, "last words")
			conn.CloseWrite()
			begun := time.Now()
			rest, err := io.ReadAll(in)
			if string(rest) != "hellolast words" || err != nil || time.Since(begun) > patience/2 {
				t.Errorf("%s: after the end of one side came %q, %v, after %s", host, rest, err, time.Since(begun))
			}
		}
	})
}

// Requests that are made at once, over connections that are made at once.
func TestRequestsAtOnce(t *testing.T) {
	r := newRig(t)
	all := make(chan struct{})
	var waiting atomic.Int32
	r.site("api.example.com", func(w http.ResponseWriter, req *http.Request) {
		if waiting.Add(1) == 8 {
			close(all)
		}
		<-all
		io.Copy(w, req.Body)
	}, oldHTTP)
	b := r.ruled(intercepted("api.example.com"))
	c := b.client(boxed.EntryHTTP, "h2")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			text := fmt.Sprintf("request %d", i)
			if a := send(t, c, request(t, "POST", "https://api.example.com/", text)); a.body != text {
				t.Errorf("%q is answered with %d %q", text, a.StatusCode, a.body)
			}
		})
	}
	wg.Wait()
	if n := len(r.records.of(func(rec boxed.EgressRecord) bool { return isOpened(rec) && rec.Method == "POST" })); n != 8 {
		t.Errorf("%d requests are on the record", n)
	}
}

// A refusal does not wait for the end of what is sent: a program that streams may wait for an
// answer first.
func TestARefusalDoesNotWaitForTheBody(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil)
	rule := intercepted("api.example.com")
	rule.Methods = []string{"GET"}
	b := r.ruled(rule)
	readers(t, b, func(t *testing.T, c *http.Client) {
		for _, length := range []int64{-1, 1 << 30} {
			body, w := io.Pipe()
			req, _ := http.NewRequest("POST", "https://api.example.com/", body)
			req.ContentLength = length
			go io.WriteString(w, "some") // and nothing more
			begun := time.Now()
			resp, err := c.Do(req)
			if err != nil {
				t.Fatalf("%d bytes: %v", length, err)
			}
			if resp.StatusCode != 403 || time.Since(begun) > patience/4 {
				t.Errorf("%d bytes: it is %d after %s", length, resp.StatusCode, time.Since(begun))
			}
			resp.Body.Close()
			w.Close()
		}
	})
	s.untouched(t)
}

// A destination may answer before it has read the request. Whoever sends that on is not still
// reading from a program's connection when the next request is due on it: net/http gives such a
// connection up, and a POST is not sent again (golang/go#46866).
func TestAKeptConnectionGoesOnAfterAnswersThatCameEarly(t *testing.T) {
	for name, change := range map[string]func(*siteConfig){"from http/1.1": oldHTTP, "from h2": func(*siteConfig) {}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, limits(egress.Limits{Requests: -1}))
			r.site("read.example.com", nil, change)
			b := r.ruled(intercepted("read.example.com"))
			conn := b.secure(boxed.EntryHTTP, "read.example.com", "http/1.1")
			in := bufio.NewReader(conn)
			for range 2000 {
				io.WriteString(conn, "POST / HTTP/1.1\r\nHost: read.example.com\r\nContent-Length: 2\r\n\r\n{}")
				if a := readAnswer(t, in, "POST"); a.StatusCode != 200 {
					t.Fatalf("%d %s", a.StatusCode, a.reason)
				}
			}
		})
	}
}
