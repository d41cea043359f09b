package egress_test

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// A tunnel is for TLS: what is something else is not let through, and neither is what says
// nothing.
func TestATunnelIsForTLS(t *testing.T) {
	t.Parallel()
	r := newRig(t, times(func(x *egress.Times) { x.Hello = 700 * time.Millisecond }))
	got := make(chan []byte, 16)
	addr := r.server("tunnel.example.com", 443, func(conn net.Conn) {
		data, _ := io.ReadAll(conn)
		got <- data
	})
	r.server("ssh.example.com", 22, func(conn net.Conn) {
		io.WriteString(conn, "SSH-2.0-test\r\n") // the server speaks first
		echo(conn)
	})
	b := r.ruled(boxed.EgressRule{Host: "tunnel.example.com"}, boxed.EgressRule{Host: "ssh.example.com", Ports: []uint16{22}, Raw: true})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, text := range []string{"SSH-2.0-client\r\n", "GET / HTTP/1.1\r\nHost: tunnel.example.com\r\n\r\n", "\x16\x03\x01\xff\xff", "\x16", ""} {
			conn := b.must(entry, "tunnel.example.com", 443)
			io.WriteString(conn, text)
			if data, _ := io.ReadAll(conn); len(data) > 0 {
				t.Errorf("%q was answered with %q", text, data)
			}
			if rec := r.records.denied(b.id); rec.Reason != boxed.EgressNotTLS {
				t.Errorf("after %q the record is %+v", text, rec)
			}
			if data := <-got; len(data) > 0 {
				t.Errorf("%q left", data)
			}
		}
		conn := b.must(entry, "ssh.example.com", 22)
		if banner := readSome(t, conn, 14); banner != "SSH-2.0-test\r\n" {
			t.Errorf("the banner is %q", banner)
		}
		io.WriteString(conn, "SSH-2.0-client\r\n")
		if back := readSome(t, conn, 16); back != "SSH-2.0-client\r\n" {
			t.Errorf("raw gave back %q", back)
		}
		conn.Close()
	})
	if n := r.world.dials(addr); n != 15 {
		t.Errorf("%d connections", n)
	}
}

func readSome(t testing.TB, r io.Reader, n int) string {
	t.Helper()
	buf := make([]byte, n)
	if _, err := io.ReadFull(r, buf); err != nil {
		t.Fatalf("read: %v", err)
	}
	return string(buf)
}

// A name that is hidden in an encrypted ClientHello is one that nobody has judged.
func TestAnEncryptedClientHelloIsRefusedUnlessARuleAllowsIt(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"tunnel.example.com", "hidden.example.com"} {
		r.server(name, 443, func(conn net.Conn) { io.ReadFull(conn, make([]byte, 100)); io.WriteString(conn, "answer") })
	}
	b := r.ruled(boxed.EgressRule{Host: "tunnel.example.com"}, boxed.EgressRule{Host: "hidden.example.com", AllowECH: true})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		shake := func(host string) {
			conn := b.must(entry, host, 443)
			c := tls.Client(conn, &tls.Config{MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echList(t, host), ServerName: "evil.example.com", RootCAs: b.roots()})
			if c.Handshake() == nil {
				t.Errorf("a server that cannot decrypt it has shaken hands for %s", host)
			}
		}
		shake("tunnel.example.com")
		if rec := r.records.denied(b.id); rec.Reason != boxed.EgressECH || rec.SNI != "tunnel.example.com" {
			t.Errorf("the record is %+v", rec)
		}
		before := len(r.records.of(isOpened))
		shake("hidden.example.com")
		if n := len(r.records.of(isOpened)); n != before+1 {
			t.Errorf("allow_ech: %d tunnels were opened", n-before)
		}
	})
}

// echList is a list of one configuration (draft-ietf-tls-esni, section 4) with a public name.
func echList(t *testing.T, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	be := binary.BigEndian
	var c []byte
	c = append(c, 7)             // config_id
	c = be.AppendUint16(c, 0x20) // DHKEM(X25519, HKDF-SHA256)
	c = be.AppendUint16(c, 32)
	c = append(c, key.PublicKey().Bytes()...)
	c = be.AppendUint16(c, 4)
	c = be.AppendUint16(c, 1)        // HKDF-SHA256
	c = be.AppendUint16(c, 1)        // AES-128-GCM
	c = append(c, 32)                // maximum_name_length
	c = append(c, byte(len(public))) // public_name
	c = append(c, public...)
	c = be.AppendUint16(c, 0) // extensions
	whole := be.AppendUint16(be.AppendUint16(nil, 0xfe0d), uint16(len(c)))
	whole = append(whole, c...)
	return append(be.AppendUint16(nil, uint16(len(whole))), whole...)
}

// A destination whose certificate is not good gets no request, and none is made to look so.
func TestADestinationWithABadCertificateIsRefused(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil, func(c *siteConfig) { c.Name = "other.example.com" })
	b := r.ruled(intercepted("api.example.com"))
	for _, proto := range []string{"h2", "http/1.1"} {
		send(t, b.client(boxed.EntryHTTP, proto), request(t, "GET", "https://api.example.com/", "", "X: y")).want(t, 502, boxed.EgressUpstreamTLS)
	}
	s.untouched(t)
}

// A program that does not trust the sandbox's own authority is told of in the record.
func TestAProgramThatDoesNotTrustTheAuthority(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil)
	b := r.ruled(intercepted("api.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		before := len(r.records.of(func(rec boxed.EgressRecord) bool { return rec.Reason == boxed.EgressRejectedCA }))
		c := tls.Client(b.must(entry, "api.example.com", 443), &tls.Config{ServerName: "api.example.com", RootCAs: worldCA().pool})
		if c.Handshake() == nil {
			t.Error("the handshake went through")
		}
		eventually(t, "record", func() bool {
			return len(r.records.of(func(rec boxed.EgressRecord) bool { return rec.Reason == boxed.EgressRejectedCA })) > before
		})
	})
	s.untouched(t)
}

// protosOf is what the server of a TLS connection chose.
func protosOf(c *tls.Conn) string { return c.ConnectionState().NegotiatedProtocol }

// ET11: iron-proxy#212, centaur#1459, everruns#1114: without ALPN gRPC failed, and a client
// that offers none was given HTTP/2.
func TestTheProtocolIsTheOneThatTheClientWants(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	b := r.ruled(intercepted("api.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, c := range []struct {
			offer []string
			want  string
		}{{nil, ""}, {[]string{"http/1.1"}, "http/1.1"}, {[]string{"h2"}, "h2"}, {[]string{"h2", "http/1.1"}, "h2"}, {[]string{"http/1.1", "h2"}, "h2"}} {
			conn := b.secure(entry, "api.example.com", c.offer...)
			if got := protosOf(conn); got != c.want {
				t.Errorf("of %v, %q was chosen", c.offer, got)
			}
			if c.want == "h2" {
				continue
			}
			if a := raw(t, conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"); a.body != "ok" {
				t.Errorf("of %v: %d %s", c.offer, a.StatusCode, a.body)
			}
		}
	})
	if protos := s.last(t).ProtoMajor; protos != 2 {
		t.Errorf("the destination was spoken to in HTTP/%d", protos)
	}
}

// ET12: mitmproxy#4692, curl#1254: clients try HTTP/2 with the proxy itself.
func TestTheProxyItselfIsHTTP1Only(t *testing.T) {
	r := newRig(t)
	b := r.ruled(boxed.EgressRule{Host: "*", Ports: []uint16{80, 443}})
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	raw(t, conn, http2.ClientPreface).want(t, 400, boxed.EgressInvalidRequest)
	conn = b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	a := raw(t, conn, "GET http://page.example.com/ HTTP/1.1\r\nHost: page.example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n")
	a.want(t, 400, boxed.EgressInvalidRequest)
}

// ET13: microsandbox#542, #534, #834: what came in one flight with the end of the handshake,
// or with the CONNECT itself, was lost.
func TestEarlyBytesAreNotLost(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"tunnel.example.com", "read.example.com"} {
		r.site(name, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }, oldHTTP)
	}
	b := r.ruled(boxed.EgressRule{Host: "tunnel.example.com"}, intercepted("read.example.com"))
	for _, name := range []string{"tunnel.example.com", "read.example.com"} {
		t.Run(name, func(t *testing.T) {
			// A client that does not wait for the answer to its CONNECT.
			recorded := &recordingConn{}
			tls.Client(recorded, &tls.Config{ServerName: name, RootCAs: b.roots()}).Handshake()
			conn, refused := b.tunnel(name+":443", recorded.wrote.Bytes())
			if refused != nil {
				t.Fatal(refused)
			}
			head := readSome(t, conn, 5)
			if head[0] != 22 { // a handshake record
				t.Errorf("the ClientHello was answered with % x", head)
			}
			// A request in the flight that ends the handshake.
			c, err := b.shake(&lateFlusher{Conn: b.must(boxed.EntryHTTP, name, 443)}, name, "http/1.1")
			if err != nil {
				t.Fatal(err)
			}
			if a := raw(t, c, "GET / HTTP/1.1\r\nHost: "+name+"\r\n\r\n"); a.body != "hello" {
				t.Errorf("the answer is %d %q", a.StatusCode, a.body)
			}
		})
	}
}

// recordingConn keeps what is written, and has nobody at its other end.
type recordingConn struct {
	net.Conn
	wrote bytes.Buffer
}

func (c *recordingConn) Write(p []byte) (int, error)      { return c.wrote.Write(p) }
func (c *recordingConn) Read([]byte) (int, error)         { return 0, io.EOF }
func (c *recordingConn) Close() error                     { return nil }
func (c *recordingConn) SetDeadline(time.Time) error      { return nil }
func (c *recordingConn) SetReadDeadline(time.Time) error  { return nil }
func (c *recordingConn) SetWriteDeadline(time.Time) error { return nil }

// lateFlusher sends what is written after the first flight together with the next write, if
// there is one before it is read.
type lateFlusher struct {
	net.Conn
	held   []byte
	writes int
}

func (c *lateFlusher) Write(p []byte) (int, error) {
	c.writes++
	if c.writes == 2 { // what ends the handshake
		c.held = slices.Clone(p)
		return len(p), nil
	}
	if _, err := c.Conn.Write(append(c.held, p...)); err != nil {
		return 0, err
	}
	c.held = nil
	return len(p), nil
}
