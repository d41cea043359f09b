package egress_test

import (
	"crypto/tls"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

func intercepted(host string) boxed.EgressRule {
	return boxed.EgressRule{Host: host, Mode: boxed.EgressIntercept}
}

// ET1: httpjail#57, #58: a Host header that was not the target was routed by it, behind a
// CDN. The target alone is what leaves.
func TestAHostThatIsNotTheTargetGoesNowhere(t *testing.T) {
	r := newRig(t)
	page := r.site("page.example.com", nil, plain)
	evil := r.site("evil.example.com", nil, plain)
	b := r.ruled(boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	// Of an absolute target Host is no part (RFC 9112, 3.2.2).
	conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
	if a := raw(t, conn, "GET http://page.example.com/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n"); a.StatusCode == 200 {
		if got := page.last(t).Host; got != "page.example.com" {
			t.Errorf("the Host that left is %q", got)
		}
	} else {
		a.want(t, 421, boxed.EgressHost)
	}
	for _, entry := range []boxed.EgressEntry{boxed.EntrySOCKS5, boxed.EntryName, boxed.EntryHTTP} {
		for _, head := range []string{
			"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n", "GET http://evil.example.com/ HTTP/1.1\r\nHost: page.example.com\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: page.example.com:8080\r\n\r\n", "GET / HTTP/1.1\r\nHost:\r\n\r\n", "GET / HTTP/1.0\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: page.example.com.evil.example.com\r\n\r\n", "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
		} {
			raw(t, b.must(entry, "page.example.com", 80), head).want(t, 421, boxed.EgressHost)
		}
	}
	evil.untouched(t)
}

// ET2: microsandbox#709: behind a shared front, the host of the connection was judged and
// the host of the request was served. ET7: sniproxy#329: HTTP/2 clients send host B on the
// connection of host A. It holds for every request of a connection that is kept.
func TestEveryRequestIsForTheHostOfItsConnection(t *testing.T) {
	r := newRig(t)
	good := r.site("good.example.com", nil)
	evil := r.site("evil.example.com", nil)
	b := r.ruled(intercepted("good.example.com"), intercepted("evil.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		t.Run("http/1.1", func(t *testing.T) {
			conn := b.secure(entry, "good.example.com", "http/1.1")
			for range 3 {
				if a := raw(t, conn, "GET / HTTP/1.1\r\nHost: good.example.com\r\n\r\n"); a.StatusCode != 200 {
					t.Fatalf("the answer is %d %s", a.StatusCode, a.body)
				}
			}
			raw(t, conn, "GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n").want(t, 421, boxed.EgressHost)
		})
		t.Run("h2", func(t *testing.T) {
			c := b.client(entry, "h2")
			for range 2 {
				if a := send(t, c, request(t, "GET", "https://good.example.com/", "")); a.StatusCode != 200 || a.ProtoMajor != 2 {
					t.Fatalf("the answer is %d, HTTP/%d", a.StatusCode, a.ProtoMajor)
				}
				send(t, c, request(t, "GET", "https://good.example.com/", "", "Host: evil.example.com")).want(t, 421, boxed.EgressHost)
			}
			if a := send(t, c, request(t, "GET", "https://good.example.com/", "", "Host: GOOD.example.com:443")); a.StatusCode != 200 {
				t.Errorf("its own name with the default port is %d", a.StatusCode)
			}
		})
	})
	evil.untouched(t)
	for _, req := range good.requests() {
		if req.Host != "good.example.com" {
			t.Errorf("a request for %q left", req.Host)
		}
	}
}

// ET2: in HTTP/2 a request may name its host twice, as :authority and as host.
func TestARequestOfHTTP2ThatNamesTwoHosts(t *testing.T) {
	r := newRig(t)
	good := r.site("good.example.com", nil)
	b := r.ruled(intercepted("good.example.com"))
	conn := b.secure(boxed.EntryHTTP, "good.example.com", "h2")
	status := rawH2(t, conn, [][2]string{
		{":method", "GET"}, {":scheme", "https"}, {":authority", "good.example.com"}, {":path", "/"}, {"host", "evil.example.com"},
	})
	if status == "200" {
		for _, req := range good.requests() {
			if req.Host != "good.example.com" || req.Header.Get("Host") != "" {
				t.Errorf("%q %q left", req.Host, req.Header.Get("Host"))
			}
		}
	} else if status != "" && !strings.HasPrefix(status, "4") {
		t.Errorf("the status is %q", status)
	}
}

// ET3: microsandbox#986: the CONNECT was judged, and the ClientHello within named another.
func TestTheClientHelloNamesWhatWasAskedFor(t *testing.T) {
	r := newRig(t)
	tunnel := r.site("tunnel.example.com", nil)
	read := r.site("read.example.com", nil)
	evil := r.site("evil.example.com", nil)
	b := r.ruled(boxed.EgressRule{Host: "tunnel.example.com"}, intercepted("read.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"tunnel.example.com", "read.example.com"} {
			for _, sni := range []string{"evil.example.com", "sub." + host, "example.com"} {
				if _, err := b.shake(b.must(entry, host, 443), sni); err == nil {
					t.Errorf("a handshake for %s on a connection to %s went through", sni, host)
				}
				r.records.await(t, sni+" for "+host, func(rec boxed.EgressRecord) bool {
					return isDenied(rec) && rec.Entry == entry && rec.Reason == boxed.EgressSNI && rec.SNI == sni && rec.Host == host
				})
			}
			if _, err := b.shake(b.must(entry, strings.ToUpper(host), 443), host); err != nil {
				t.Errorf("the same name in capitals: %v", err)
			}
		}
	})
	for _, s := range []*site{tunnel, read, evil} {
		s.untouched(t)
	}
}

// ET4: clawpatrol#782: a name that no rule had fell through to a blind tunnel.
func TestATunnelNeedsARuleByName(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil)
	b := r.ruled(intercepted("read.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b.refusedBy(t, entry, "api.example.com", 443, boxed.EgressNotListed)
		b.refusedBy(t, entry, s.addr.String(), 443, boxed.EgressNotListed) // nor by the address of the name
	})
	if n := r.world.dials(s.addr); n != 0 {
		t.Errorf("%d connections were made", n)
	}
}

// ET5: clawpatrol#611, pipelock: TLS without a name was not looked into.
func TestTLSWithoutANameIsRefused(t *testing.T) {
	r := newRig(t)
	r.site("tunnel.example.com", nil)
	r.site("read.example.com", nil)
	b := r.ruled(boxed.EgressRule{Host: "tunnel.example.com"}, intercepted("read.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"tunnel.example.com", "read.example.com"} {
			c := tls.Client(b.must(entry, host, 443), &tls.Config{InsecureSkipVerify: true})
			if c.Handshake() == nil {
				t.Errorf("a handshake without a name went through to %s", host)
			}
			r.records.await(t, "ClientHello without a name for "+host, func(rec boxed.EgressRecord) bool {
				return isDenied(rec) && rec.Entry == entry && rec.Reason == boxed.EgressNoSNI && rec.Host == host
			})
		}
	})
}

// ET5: of an address there is no name, and a rule may have one.
func TestAnAddressNeedsNoNameInTheClientHello(t *testing.T) {
	r := newRig(t)
	addr, l := r.world.listen(t, 443)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{worldCA().leaf(addr.String())}}).Handshake()
			}()
		}
	}()
	b := r.ruled(boxed.EgressRule{Host: addr.String()})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		if _, err := b.shake(b.must(entry, addr.String(), 443), addr.String()); err != nil {
			t.Error(err)
		}
		if _, err := b.shake(b.must(entry, addr.String(), 443), "evil.example.com"); err == nil {
			t.Error("a name on a connection to an address went through")
		}
	})
}
