package egress_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// names is a Resolver that counts what it is asked. A name may have other addresses each
// time it is asked for.
type names struct {
	mu      sync.Mutex
	answers map[string][][]netip.Addr // the last stays
	asked   map[string]int
}

func newNames() *names { return &names{answers: map[string][][]netip.Addr{}, asked: map[string]int{}} }

func (n *names) Resolve(_ context.Context, name string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked[name]++
	list := n.answers[name]
	if len(list) == 0 {
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	if len(list) > 1 {
		n.answers[name] = list[1:]
	}
	return list[0], nil
}

// set gives a name its addresses, for each time it is asked for.
func (n *names) set(name string, times ...[]netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.answers[name] = times
}

func (n *names) count(name string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked[name]
}

// at are addresses.
func at(list ...string) (addrs []netip.Addr) {
	for _, s := range list {
		addrs = append(addrs, netip.MustParseAddr(s))
	}
	return addrs
}

// world is what there is at public addresses: servers on loopback. These alone may be
// connected to there; every other address is judged as it is.
type world struct {
	mu      sync.Mutex
	servers map[netip.AddrPort]netip.AddrPort // by their public address
	ours    map[netip.AddrPort]bool
	silent  map[netip.AddrPort]bool // nobody answers there, and nobody says so
	dialled []netip.AddrPort
	next    byte
	closers []func()
}

func newWorld() *world {
	return &world{servers: map[netip.AddrPort]netip.AddrPort{}, ours: map[netip.AddrPort]bool{}, silent: map[netip.AddrPort]bool{}}
}

func (w *world) judge(real egress.JudgeFunc) egress.JudgeFunc {
	return func(h egress.Host, ap netip.AddrPort) (boxed.EgressReason, string) {
		w.mu.Lock()
		ours := w.ours[ap]
		w.mu.Unlock()
		if ours {
			return boxed.EgressAllowed, "a server of the test"
		}
		return real(h, ap)
	}
}

func (w *world) dial(ctx context.Context, d *net.Dialer, ap netip.AddrPort) (net.Conn, error) {
	w.mu.Lock()
	w.dialled = append(w.dialled, ap)
	there, ok := w.servers[ap]
	silent := w.silent[ap]
	w.mu.Unlock()
	switch {
	case silent:
		<-ctx.Done()
		return nil, ctx.Err()
	case !ok:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	return d.DialContext(ctx, "tcp", there.String())
}

// dials are those to an address.
func (w *world) dials(addr netip.Addr) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ap := range w.dialled {
		if ap.Addr() == addr {
			n++
		}
	}
	return n
}

// listen opens a server at a public address, which it makes up.
func (w *world) listen(t testing.TB, port uint16) (netip.Addr, net.Listener) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next++
	public := netip.AddrFrom4([4]byte{93, 184, 216, w.next})
	there := l.Addr().(*net.TCPAddr).AddrPort()
	w.servers[netip.AddrPortFrom(public, port)], w.ours[there] = there, true
	w.closers = append(w.closers, func() { l.Close() })
	return public, l
}

func (w *world) close() {
	w.mu.Lock()
	closers := w.closers
	w.mu.Unlock()
	for _, c := range slices.Backward(closers) {
		c()
	}
}

// site is a web server somewhere.
type site struct {
	name string
	addr netip.Addr

	mu    sync.Mutex
	got   []*http.Request // without bodies
	conns int
}

// siteConfig is what a site may have otherwise.
type siteConfig struct {
	Port   uint16
	Plain  bool     // no TLS
	Protos []string // default h2 and http/1.1
	Name   string   // of its certificate, default its own
}

// site opens a web server under a name.
func (r *rig) site(name string, h http.HandlerFunc, changes ...func(*siteConfig)) *site {
	r.t.Helper()
	c := siteConfig{Port: 443, Name: name, Protos: []string{"h2", "http/1.1"}}
	for _, change := range changes {
		change(&c)
	}
	s := &site{name: name}
	var l net.Listener
	s.addr, l = r.world.listen(r.t, c.Port)
	r.names.set(name, []netip.Addr{s.addr})
	server := &http.Server{
		ErrorLog: log.New(io.Discard, "", 0),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			s.mu.Lock()
			s.got = append(s.got, req.Clone(context.Background()))
			s.mu.Unlock()
			if h != nil {
				h(w, req)
			}
		}),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				s.mu.Lock()
				s.conns++
				s.mu.Unlock()
			}
		},
	}
	var done sync.WaitGroup
	done.Go(func() {
		if c.Plain {
			server.Serve(l)
			return
		}
		server.TLSConfig = &tls.Config{Certificates: []tls.Certificate{worldCA().leaf(c.Name)}, NextProtos: c.Protos}
		if !slices.Contains(c.Protos, "h2") {
			server.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){}
		}
		server.ServeTLS(l, "", "")
	})
	r.world.mu.Lock()
	r.world.closers = append(r.world.closers, func() { server.Close(); done.Wait() })
	r.world.mu.Unlock()
	return s
}

func plain(c *siteConfig)   { c.Port, c.Plain = 80, true }
func oldHTTP(c *siteConfig) { c.Protos = []string{"http/1.1"} }

// requests are those that came so far.
func (s *site) requests() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// last is the newest request.
func (s *site) last(t testing.TB) *http.Request {
	t.Helper()
	list := s.requests()
	if len(list) == 0 {
		t.Fatalf("%s got no request", s.name)
	}
	return list[len(list)-1]
}

// untouched fails when a request came to the site.
func (s *site) untouched(t testing.TB) {
	t.Helper()
	for _, r := range s.requests() {
		t.Errorf("%s got %s %s", s.name, r.Method, r.RequestURI)
	}
}

func (s *site) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

// server opens a server of bytes under a name.
func (r *rig) server(name string, port uint16, serve func(net.Conn)) netip.Addr {
	r.t.Helper()
	addr, l := r.world.listen(r.t, port)
	r.names.set(name, []netip.Addr{addr})
	var done sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, conn)
			mu.Unlock()
			done.Go(func() { defer conn.Close(); serve(conn) })
		}
	})
	r.world.mu.Lock()
	defer r.world.mu.Unlock()
	r.world.closers = append(r.world.closers, func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		done.Wait()
	})
	return addr
}

// tlsServer is server within TLS.
func (r *rig) tlsServer(name string, serve func(*tls.Conn), protos ...string) netip.Addr {
	return r.server(name, 443, func(raw net.Conn) {
		conn := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{worldCA().leaf(name)}, NextProtos: protos})
		if conn.Handshake() == nil {
			serve(conn)
		}
	})
}

// echo gives back what it gets.
func echo(conn net.Conn) { io.Copy(conn, conn) }

// testCA signs the world's certificates.
type testCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

var worldCA = sync.OnceValue(func() *testCA {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the world"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	ca := &testCA{key: key, pool: x509.NewCertPool()}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		panic(err)
	}
	ca.pool.AddCert(ca.cert)
	return ca
})

func (ca *testCA) leaf(name string) tls.Certificate {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(999 * time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if addr := net.ParseIP(name); addr != nil {
		template.IPAddresses = []net.IP{addr}
	} else {
		template.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &ca.key.PublicKey, ca.key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: ca.key}
}

// isOf reports whether a certificate is the world's own, and not the proxy's.
func (ca *testCA) isOf(cert *x509.Certificate) bool {
	return bytes.Equal(cert.RawIssuer, ca.cert.RawSubject)
}
