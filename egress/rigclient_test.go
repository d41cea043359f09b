package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// entries are the ways to open a connection.
var entries = []boxed.EgressEntry{boxed.EntryHTTP, boxed.EntrySOCKS5, boxed.EntryName}

// everyEntry runs a test by each of them.
func everyEntry(t *testing.T, test func(t *testing.T, entry boxed.EgressEntry)) {
	t.Helper()
	for _, entry := range entries {
		t.Run(string(entry), func(t *testing.T) { test(t, entry) })
	}
}

// sockets are the ends of a connection between a sandbox and its host.
func sockets(t testing.TB) (inside, outside *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

// hand gives the proxy a connection, as the sandbox's agent does, and returns the end that a
// program has.
func (b *box) hand(intent boxed.EgressIntent, opened func(error) error) *net.UnixConn {
	inside, outside := sockets(b.r.t)
	inside.SetDeadline(time.Now().Add(patience))
	b.r.t.Cleanup(func() { inside.Close() })
	b.r.serving.Go(func() {
		defer outside.Close()
		b.r.proxy.Serve(context.Background(), b.id, intent, outside, opened)
	})
	return inside
}

// no is how a program is told that it may not.
type no struct {
	Status int  // of HTTP
	Code   byte // of SOCKS5
	Reason boxed.EgressReason
	Text   string
	Denied egress.Denied
}

func (n *no) Error() string { return fmt.Sprintf("%s (%d/%d): %s", n.Reason, n.Status, n.Code, n.Text) }

// connect opens a connection by an entry.
func (b *box) connect(entry boxed.EgressEntry, host string, port uint16) (net.Conn, *no) {
	b.r.t.Helper()
	switch entry {
	case boxed.EntryHTTP:
		return b.tunnel(net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(int(port))), nil)
	case boxed.EntrySOCKS5:
		return b.socks(host, port)
	}
	return b.dialName(host, port)
}

// tunnel is a CONNECT; early goes with it in one write.
func (b *box) tunnel(authority string, early []byte, fields ...string) (net.Conn, *no) {
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	head := "CONNECT " + authority + " HTTP/1.1\r\nHost: " + authority + "\r\n"
	for _, f := range fields {
		head += f + "\r\n"
	}
	conn.Write(append([]byte(head+"\r\n"), early...)) // a refusal may have come before
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, &no{Text: err.Error()}
	}
	if resp.StatusCode == http.StatusOK {
		return &readConn{conn, r}, nil
	}
	defer conn.Close()
	return nil, refusalOf(resp)
}

// refusalOf is what an answer of the proxy's own says.
func refusalOf(resp *http.Response) *no {
	body, _ := io.ReadAll(resp.Body)
	n := &no{Status: resp.StatusCode, Reason: boxed.EgressReason(resp.Header.Get(egress.ReasonHeader)), Text: string(body)}
	json.Unmarshal(body, &n.Denied)
	return n
}

// readConn is a connection of which a reader holds a part.
type readConn struct {
	*net.UnixConn
	r *bufio.Reader
}

func (c *readConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// socks is a SOCKS5 CONNECT, by name or address.
func (b *box) socks(host string, port uint16) (net.Conn, *no) {
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntrySOCKS5}, nil)
	request := []byte{5, 1, 0, 5, 1, 0}
	if ip := net.ParseIP(host); ip == nil {
		request = append(append(request, 3, byte(len(host))), host...)
	} else if ip.To4() != nil {
		request = append(append(request, 1), ip.To4()...)
	} else {
		request = append(append(request, 4), ip...)
	}
	conn.Write(binary.BigEndian.AppendUint16(request, port))
	reply := make([]byte, 12)
	if _, err := io.ReadFull(conn, reply); err != nil {
		return nil, &no{Text: err.Error()}
	}
	if code := reply[3]; code != 0 {
		conn.Close()
		// Of SOCKS5 only the record knows the reason.
		recs := b.r.records.of(func(r boxed.EgressRecord) bool {
			return isDenied(r) && r.Sandbox == b.id && r.Entry == boxed.EntrySOCKS5 && (r.Port == port || r.Port == 0) && r.Address == ""
		})
		if len(recs) == 0 {
			return nil, &no{Code: code, Text: "nothing is on the record"}
		}
		return nil, &no{Code: code, Reason: recs[len(recs)-1].Reason}
	}
	return conn, nil
}

// dialName is a connection to a synthetic address.
func (b *box) dialName(host string, port uint16) (net.Conn, *no) {
	result := make(chan error, 1)
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryName, Host: host, Port: port}, func(err error) error {
		result <- err
		return nil
	})
	if err := <-result; err != nil {
		conn.Close()
		reason, _, _ := strings.Cut(err.Error(), ":")
		return nil, &no{Reason: boxed.EgressReason(reason), Text: err.Error()}
	}
	return conn, nil
}

// must opens a connection that is allowed.
func (b *box) must(entry boxed.EgressEntry, host string, port uint16) net.Conn {
	b.r.t.Helper()
	conn, refused := b.connect(entry, host, port)
	if refused != nil {
		b.r.t.Fatalf("%s to %s:%d: %v", entry, host, port, refused)
	}
	return conn
}

// refusedBy asks for a connection, and wants it refused for a reason: told to the program and
// on the record.
func (b *box) refusedBy(t testing.TB, entry boxed.EgressEntry, host string, port uint16, reason boxed.EgressReason) *no {
	t.Helper()
	conn, refused := b.connect(entry, host, port)
	if refused == nil {
		conn.Close()
		t.Errorf("%s to %s:%d was opened, and is to be refused for %s", entry, host, port, reason)
		return &no{}
	}
	recorded := b.r.records.of(func(r boxed.EgressRecord) bool {
		return isDenied(r) && r.Sandbox == b.id && r.Entry == entry && r.Reason == reason && (r.Port == port || r.Port == 0)
	})
	if refused.Reason != reason || len(recorded) == 0 {
		t.Errorf("%s to %s:%d was refused for %v, on the record %d times, and is to be for %s", entry, host, port, refused, len(recorded), reason)
	}
	return refused
}

// roots are what programs in the sandbox trust.
func (b *box) roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(worldCA().cert)
	pool.AppendCertsFromPEM(b.grant.Files["ca.pem"])
	return pool
}

// shake makes a connection one of TLS.
func (b *box) shake(conn net.Conn, name string, protos ...string) (*tls.Conn, error) {
	c := tls.Client(conn, &tls.Config{ServerName: name, RootCAs: b.roots(), NextProtos: protos, Time: b.r.clock.now})
	return c, c.Handshake()
}

// secure opens a connection that is allowed, and TLS on it.
func (b *box) secure(entry boxed.EgressEntry, host string, protos ...string) *tls.Conn {
	b.r.t.Helper()
	conn, err := b.shake(b.must(entry, host, 443), host, protos...)
	if err != nil {
		b.r.t.Fatalf("TLS by %s to %s: %v", entry, host, err)
	}
	return conn
}

// client is a client of https by an entry, of one version of HTTP.
func (b *box) client(entry boxed.EgressEntry, proto string) *http.Client {
	tr := &http.Transport{
		DialTLSContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			n, err := strconv.ParseUint(port, 10, 16)
			if err != nil {
				return nil, err
			}
			conn, refused := b.connect(entry, host, uint16(n))
			if refused != nil {
				return nil, refused
			}
			return b.shake(conn, host, proto)
		},
		ForceAttemptHTTP2: proto == "h2", DisableCompression: true,
	}
	return b.clientOf(tr)
}

// proxied is a client that has the sandbox's proxy in its environment.
func (b *box) proxied() *http.Client {
	return b.clientOf(&http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: "127.0.0.1:3128"}),
		TLSClientConfig: &tls.Config{RootCAs: b.roots()}, DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil), nil
		},
	})
}

func (b *box) clientOf(tr *http.Transport) *http.Client {
	b.r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// answer is a whole answer.
type answer struct {
	*http.Response
	body   string
	reason boxed.EgressReason
}

// send sends a request and reads its answer.
func send(t testing.TB, c *http.Client, req *http.Request) answer {
	t.Helper()
	resp, err := c.Do(req)
	if err != nil {
		var refused *no
		if errors.As(err, &refused) {
			return answer{reason: refused.Reason, Response: &http.Response{StatusCode: refused.Status}}
		}
		t.Fatalf("%s %s: %v", req.Method, req.URL, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: read the answer: %v", req.Method, req.URL, err)
	}
	return answer{resp, string(body), boxed.EgressReason(resp.Header.Get(egress.ReasonHeader))}
}

// request is one with fields as "Name: value".
func request(t testing.TB, method, target, body string, fields ...string) *http.Request {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, target, r)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ":")
		if value = strings.TrimSpace(value); strings.EqualFold(name, "host") {
			req.Host = value
		} else {
			req.Header.Add(name, value)
		}
	}
	return req
}

// raw writes bytes and reads one answer of HTTP/1.1 to a method.
func raw(t testing.TB, conn net.Conn, text string) answer {
	t.Helper()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	method, _, _ := strings.Cut(text, " ")
	return readAnswer(t, bufio.NewReader(conn), method)
}

func readAnswer(t testing.TB, r *bufio.Reader, method string) answer {
	t.Helper()
	resp, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("read the answer: %v", err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("read the answer: %v", err)
	}
	return answer{resp, string(bytes.TrimSpace(body)), boxed.EgressReason(resp.Header.Get(egress.ReasonHeader))}
}

// want compares the answer with the proxy's own refusal.
func (a answer) want(t testing.TB, status int, reason boxed.EgressReason) {
	t.Helper()
	if a.StatusCode != status || a.reason != reason {
		t.Errorf("the answer is %d %q %s; it is to be %d %q", a.StatusCode, a.reason, a.body, status, reason)
	}
}
