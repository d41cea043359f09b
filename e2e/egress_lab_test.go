package e2e_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/boxed-mesh/boxed"
)

// internet is all that there is outside of a node's host: a name server and servers under
// any name, with certificates of an authority that the node was told of. The host and it
// are network namespaces; the node sees public addresses and nothing of this machine.
type internet struct {
	t    *testing.T
	host *labHost // the node's
	far  *labHost
	ca   *x509.Certificate
	key  *ecdsa.PrivateKey
	work sync.WaitGroup

	mu      sync.Mutex
	names   map[string][]netip.Addr
	asked   []string // names, as they were asked for
	seen    []seenRequest
	certs   map[string]*tls.Certificate
	handler http.Handler
	servers []*http.Server
	hosts   []*labHost
}

// seenRequest is what reached a server.
type seenRequest struct {
	Method, Host, Path, Query, Proto, SNI string
	Header                                http.Header
	Body                                  string
}

// Addresses of the far host.
var (
	farResolver = netip.MustParseAddr("10.77.0.2")
	farPublic   = netip.MustParseAddr("93.184.215.2")
	farPrivate  = netip.MustParseAddr("10.80.0.2")
)

func newInternet(t *testing.T) *internet {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for networks of its own")
	}
	in := &internet{t: t, names: map[string][]netip.Addr{}, certs: map[string]*tls.Certificate{}}
	in.host, in.far = in.newHost("10.77.0.1"), in.newHost("10.77.0.2")
	for _, a := range []netip.Addr{farPublic, farPrivate, netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("100.64.0.2")} {
		in.ip(in.far, "addr", "add", a.String()+"/32", "dev", "lan0")
	}
	for _, h := range []*labHost{in.host, in.far} {
		in.join(h)
	}
	t.Cleanup(func() {
		for _, s := range in.servers {
			s.Close()
		}
		in.host.tun.Close()
		in.far.tun.Close()
		in.work.Wait()
	})
	in.newCA()
	in.serveDNS()
	in.serveHTTP(443, true)
	in.serveHTTP(80, false)
	return in
}

func (in *internet) ip(h *labHost, args ...string) {
	in.t.Helper()
	if text, err := exec.Command("ip", append([]string{"-n", h.ns}, args...)...).CombinedOutput(); err != nil {
		in.t.Fatalf("ip %v: %v: %s", args, err, text)
	}
}

func (in *internet) newHost(addr string) *labHost {
	in.t.Helper()
	h := &labHost{ns: fmt.Sprintf("bx-%d-%d", os.Getpid(), labNumber()), addr: addr}
	if text, err := exec.Command("ip", "netns", "add", h.ns).CombinedOutput(); err != nil {
		in.t.Fatalf("ip netns add: %v: %s", err, text)
	}
	in.t.Cleanup(func() { exec.Command("ip", "netns", "del", h.ns).Run() })
	var err error
	if h.tun, err = h.openTUN(); err != nil {
		in.t.Fatal(err)
	}
	in.ip(h, "addr", "add", addr+"/24", "dev", "lan0")
	in.ip(h, "link", "set", "lan0", "mtu", "60000", "up")
	in.ip(h, "link", "set", "lo", "up")
	return h
}

// join carries what a host sends: to the host whose address it has, or else to the far one.
func (in *internet) join(h *labHost) {
	in.ip(h, "route", "add", "default", "dev", "lan0")
	in.mu.Lock()
	in.hosts = append(in.hosts, h)
	in.mu.Unlock()
	in.work.Go(func() {
		buf := make([]byte, 128<<10)
		for {
			n, err := h.tun.Read(buf)
			if err != nil {
				return
			}
			if n < 20 || buf[0]>>4 != 4 {
				continue
			}
			to := in.far
			in.mu.Lock()
			for _, other := range in.hosts {
				if other.addr == netip.AddrFrom4([4]byte(buf[16:20])).String() {
					to = other
				}
			}
			in.mu.Unlock()
			to.tun.Write(buf[:n])
		}
	})
}

// another is one more host for a node.
func (in *internet) another(addr string) *labHost {
	in.t.Helper()
	h := in.newHost(addr)
	in.join(h)
	in.t.Cleanup(func() { h.tun.Close() })
	return h
}

func (in *internet) newCA() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		in.t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the authority of a test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		in.t.Fatal(err)
	}
	in.ca, _ = x509.ParseCertificate(der)
	in.key = key
}

// certificate is one of the authority's for a name.
func (in *internet) certificate(name string) (*tls.Certificate, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if c := in.certs[name]; c != nil {
		return c, nil
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, in.ca, &in.key.PublicKey, in.key)
	if err != nil {
		return nil, err
	}
	c := &tls.Certificate{Certificate: [][]byte{der, in.ca.Raw}, PrivateKey: in.key}
	in.certs[name] = c
	return c, nil
}

// listen listens at the far host.
func (in *internet) listen(addr string) net.Listener {
	in.t.Helper()
	var l net.Listener
	err := in.far.inside(func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
	in.t.Cleanup(func() { l.Close() })
	return l
}

func (in *internet) serveHTTP(port int, withTLS bool) {
	l := in.listen(fmt.Sprintf(":%d", port))
	s := &http.Server{Handler: http.HandlerFunc(in.serve)}
	in.servers = append(in.servers, s)
	if !withTLS {
		in.work.Go(func() { s.Serve(l) })
		return
	}
	s.TLSConfig = &tls.Config{
		GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { return in.certificate(h.ServerName) },
	}
	in.work.Go(func() { s.ServeTLS(l, "", "") })
}

// serve notes a request and answers it: with what the test says, or with what it saw.
func (in *internet) serve(w http.ResponseWriter, r *http.Request) {
	seen := seenRequest{Method: r.Method, Host: r.Host, Path: r.URL.EscapedPath(), Query: r.URL.RawQuery, Proto: r.Proto, Header: r.Header.Clone()}
	if r.TLS != nil {
		seen.SNI = r.TLS.ServerName
	}
	in.mu.Lock()
	h := in.handler
	in.mu.Unlock()
	if h == nil {
		body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		seen.Body = string(body)
	}
	in.mu.Lock()
	in.seen = append(in.seen, seen)
	in.mu.Unlock()
	if h != nil {
		h.ServeHTTP(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{"method": seen.Method, "host": seen.Host, "path": seen.Path, "proto": seen.Proto, "body": seen.Body})
}

// handle has requests answered by h.
func (in *internet) handle(h http.Handler) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.handler = h
}

// requests are those that reached a server since the last call.
func (in *internet) requests() []seenRequest {
	in.mu.Lock()
	defer in.mu.Unlock()
	seen := in.seen
	in.seen = nil
	return seen
}

// name gives a name addresses; none is the public one.
func (in *internet) name(name string, addrs ...netip.Addr) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(addrs) == 0 {
		addrs = []netip.Addr{farPublic}
	}
	in.names[name] = addrs
}

func (in *internet) serveDNS() {
	var conn net.PacketConn
	err := in.far.inside(func() (err error) {
		conn, err = net.ListenPacket("udp", "10.77.0.2:53")
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
	in.t.Cleanup(func() { conn.Close() })
	in.work.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply := in.answer(buf[:n]); reply != nil {
				conn.WriteTo(reply, from)
			}
		}
	})
}

func (in *internet) answer(query []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	name := strings.TrimSuffix(strings.ToLower(q.Name.String()), ".")
	in.mu.Lock()
	addrs, known := in.names[name]
	in.asked = append(in.asked, name)
	in.mu.Unlock()
	reply := dnsmessage.Header{ID: head.ID, Response: true, RecursionAvailable: true}
	if !known {
		reply.RCode = dnsmessage.RCodeNameError
	}
	b := dnsmessage.NewBuilder(nil, reply)
	b.StartQuestions()
	b.Question(q)
	b.StartAnswers()
	for _, a := range addrs {
		h := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 0}
		switch {
		case a.Is4() && q.Type == dnsmessage.TypeA:
			b.AResource(h, dnsmessage.AResource{A: a.As4()})
		case a.Is6() && q.Type == dnsmessage.TypeAAAA:
			b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: a.As16()})
		}
	}
	out, err := b.Finish()
	if err != nil {
		return nil
	}
	return out
}

// node starts a node on the host.
func (in *internet) node(args ...string) *node {
	in.t.Helper()
	return in.nodeOn(in.host, args...)
}

// nodeOn starts a node on one of the hosts.
func (in *internet) nodeOn(h *labHost, args ...string) *node {
	in.t.Helper()
	needEngine(in.t)
	n := &node{
		t: in.t, dir: in.t.TempDir(), agent: filepath.Join(bin, "boxed-agent"), log: &safeBuffer{}, host: h, endpoint: "http://127.0.0.1:8080",
	}
	roots := filepath.Join(in.t.TempDir(), "roots.pem")
	if err := os.WriteFile(roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: in.ca.Raw}), 0o644); err != nil {
		in.t.Fatal(err)
	}
	n.args = append([]string{
		"--egress-resolvers", farResolver.String() + ":53", "--egress-roots", roots, "--templates-default-pool", "0", "--ssh-listen", "",
	}, args...)
	n.run()
	return n
}

// egress makes a sandbox that may reach something.
func (n *node) egress(spec boxed.EgressSpec) *boxed.Sandbox {
	n.t.Helper()
	return n.create(boxed.Spec{Egress: &spec})
}
