package egress_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// ET8: iron-proxy#97: the leaf was sent without the authority. ET7: a leaf is for one name,
// so that no client takes the connection for another's.
func TestALeafIsForOneNameAndComesWithItsAuthority(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"a.example.com", "b.example.com"} {
		r.site(name, nil)
	}
	b := r.ruled(intercepted("a.example.com"), intercepted("b.example.com"))
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, name := range []string{"a.example.com", "b.example.com"} {
			chain := b.secure(entry, name).ConnectionState().PeerCertificates
			if len(chain) != 2 || !chain[1].IsCA {
				t.Fatalf("%d certificates were sent", len(chain))
			}
			if leaf := chain[0]; len(leaf.DNSNames) != 1 || leaf.DNSNames[0] != name || len(leaf.IPAddresses)+len(leaf.EmailAddresses)+len(leaf.URIs) > 0 || leaf.IsCA {
				t.Errorf("the leaf is for %v %v", leaf.DNSNames, leaf.IPAddresses)
			}
			if chain[0].CheckSignatureFrom(chain[1]) != nil {
				t.Error("the second is not the first one's")
			}
		}
	})
}

// ET10: microsandbox#763: a session lived longer than its leaf. It is made anew while a
// quarter of its life is left.
func TestALeafIsMadeAnewInTime(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", nil)
	b := r.ruled(intercepted("api.example.com"))
	leaf := func() *x509.Certificate {
		return b.secure(boxed.EntryHTTP, "api.example.com").ConnectionState().PeerCertificates[0]
	}
	first := leaf()
	if early := r.clock.now().Sub(first.NotBefore); early < 59*time.Minute {
		t.Errorf("it begins only %s ago, and a clock may be an hour behind", early)
	}
	if life := first.NotAfter.Sub(r.clock.now()); life > 24*time.Hour || life < 23*time.Hour {
		t.Errorf("it lives for %s", life)
	}
	r.clock.advance(egress.LeafLife * 3 / 4 * 9 / 10)
	if !leaf().Equal(first) {
		t.Error("it was made anew with more than a quarter of its life left")
	}
	for range 5 { // days
		r.clock.advance(egress.LeafLife)
		if now := leaf(); now.Equal(first) || now.NotAfter.Sub(r.clock.now()) < egress.LeafLife/4 {
			t.Errorf("a leaf with %s to live was shown", now.NotAfter.Sub(r.clock.now()))
		}
	}
}

// ET14: OpenShell#2162: the authority could not be made, and the proxy fell back to a blind
// tunnel with the placeholder in it.
func TestWithoutAnAuthorityNothingIsIntercepted(t *testing.T) {
	r := newRig(t)
	s := r.site("api.example.com", nil)
	policy, err := egress.NewPolicy([]boxed.EgressRule{intercepted("api.example.com"), {Host: "tunnel.example.com"}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.site("tunnel.example.com", nil)
	for name, ca := range map[string]*egress.Authority{"none": nil, "broken": {Cert: []byte("no certificate"), Key: []byte("no key")}} {
		t.Run(name, func(t *testing.T) {
			b := &box{r: r, id: boxed.ID("noca" + name + "-" + string(rigNode)), grant: &boxed.EgressGrant{}}
			r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: policy, CA: ca})
			everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
				if name == "none" {
					b.refusedBy(t, entry, "api.example.com", 443, boxed.EgressNoCredential)
				} else {
					if _, err := b.shake(b.must(entry, "api.example.com", 443), "api.example.com"); err == nil {
						t.Error("a handshake went through")
					}
					r.records.await(t, "authority that cannot be used", func(rec boxed.EgressRecord) bool {
						return rec.Sandbox == b.id && rec.Entry == entry && rec.Reason == boxed.EgressNoCredential
					})
				}
				if _, err := b.shake(b.must(entry, "tunnel.example.com", 443), "tunnel.example.com"); err != nil {
					t.Errorf("a tunnel needs none: %v", err)
				}
			})
		})
	}
	s.untouched(t)
}

// ET14: a sandbox whose authority is taken away loses what is open.
func TestAConnectionEndsWithItsAuthority(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", nil)
	b := r.ruled(intercepted("api.example.com"))
	conn := b.secure(boxed.EntryHTTP, "api.example.com")
	r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: r.proxy.Policy(b.id)})
	if _, err := io.ReadAll(conn); err == nil {
		t.Log("it was closed in order")
	}
	if _, err := conn.Write([]byte("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n")); err == nil {
		if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Error("the connection goes on")
		}
	}
}

// forge signs a leaf with a stolen authority.
func forge(t *testing.T, a *egress.Authority, change func(*x509.Certificate)) []byte {
	t.Helper()
	ca, err := x509.ParseCertificate(a.Cert)
	if err != nil {
		t.Fatal(err)
	}
	caKey, err := x509.ParsePKCS8PrivateKey(a.Key)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "forged"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	change(leaf)
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// verifiers judge a certificate as programs do: Go's library, and OpenSSL where it is.
func verifiers(t *testing.T, a *egress.Authority) map[string]func(der []byte, host string) error {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(a.PEM())
	list := map[string]func([]byte, string) error{"crypto/x509": func(der []byte, host string) error {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return err
		}
		_, err = cert.Verify(x509.VerifyOptions{Roots: pool, DNSName: host})
		return err
	}}
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Log("there is no openssl here")
		return list
	}
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, a.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	list["openssl"] = func(der []byte, host string) error {
		leaf := filepath.Join(dir, "leaf.pem")
		if err := os.WriteFile(leaf, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			return err
		}
		args := []string{"verify", "-CAfile", ca, "-purpose", "sslserver", "-x509_strict", "-verify_hostname", host}
		if ip := net.ParseIP(strings.Trim(host, "[]")); ip != nil {
			args[len(args)-2], args[len(args)-1] = "-verify_ip", ip.String()
		}
		out, err := exec.Command(openssl, append(args, leaf)...).CombinedOutput()
		if err != nil {
			return &net.ParseError{Type: "certificate", Text: string(out)}
		}
		return nil
	}
	return list
}

// I18: whoever steals a sandbox's authority out of its record can be no address, and no host
// but those whose traffic it reads already.
func TestAStolenAuthorityIsGoodForItsHostsOnly(t *testing.T) {
	a, err := egress.NewAuthority("box", []string{"api.example.com", "*.git.example.com"}, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := x509.ParseCertificate(a.Cert)
	if err != nil {
		t.Fatal(err)
	}
	if !ca.MaxPathLenZero || ca.MaxPathLen != 0 || !ca.PermittedDNSDomainsCritical || len(ca.ExtKeyUsage) != 1 || ca.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth {
		t.Errorf("its constraints are %+v", ca)
	}
	named := func(names ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.DNSNames = names }
	}
	for verifier, verify := range verifiers(t, a) {
		t.Run(verifier, func(t *testing.T) {
			for _, c := range []struct {
				what, host string
				good       bool
				leaf       func(*x509.Certificate)
			}{
				{"its own host", "api.example.com", true, named("api.example.com")},
				{"a host of its wildcard", "a.git.example.com", true, named("a.git.example.com")},
				{"another host", "bank.example.org", false, named("bank.example.org")},
				{"a sibling", "www.example.com", false, named("www.example.com")},
				{"the domain above", "example.com", false, named("example.com")},
				{"its own host and another", "api.example.com", false, named("api.example.com", "bank.example.org")},
				{"a wildcard above", "api.example.com", false, named("*.example.com")},
				{"an address", "93.184.216.34", false, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(93, 184, 216, 34).To4()} }},
				{"an IPv6 address", "2606:2800::1", false, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.ParseIP("2606:2800::1")} }},
				{"its own host and an address", "api.example.com", false, func(c *x509.Certificate) {
					c.DNSNames, c.IPAddresses = []string{"api.example.com"}, []net.IP{net.IPv4(127, 0, 0, 1).To4()}
				}},
				{"a mail address", "api.example.com", false, func(c *x509.Certificate) {
					c.DNSNames, c.EmailAddresses = []string{"api.example.com"}, []string{"root@example.com"}
				}},
				{"a URI", "api.example.com", false, func(c *x509.Certificate) {
					c.DNSNames, c.URIs = []string{"api.example.com"}, []*url.URL{{Scheme: "spiffe", Host: "example.com", Path: "/admin"}}
				}},
				{"a client", "api.example.com", false, func(c *x509.Certificate) {
					c.DNSNames, c.ExtKeyUsage = []string{"api.example.com"}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
				}},
			} {
				if err := verify(forge(t, a, c.leaf), c.host); (err == nil) != c.good {
					t.Errorf("%s: %v", c.what, err)
				}
			}
			leaf, err := a.Leaf("api.example.com", time.Now())
			if err != nil {
				t.Fatal(err)
			}
			if err := verify(leaf.Certificate[0], "api.example.com"); err != nil {
				t.Errorf("the proxy's own leaf: %v", err)
			}
		})
	}
}

// I18: the key of the authority is not in plain in what is kept of a sandbox, nor in what
// programs in it can read. ET15: clawpatrol#193: the certificate was fetched over plain HTTP;
// here it is a file that the host puts there.
func TestTheKeyOfTheAuthorityIsSealed(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	b := r.ruled(intercepted("api.example.com"))
	record, err := json.Marshal(b.grant)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range b.grant.Files {
		if bytes.Contains(text, []byte("PRIVATE")) {
			t.Errorf("the file %s has a key", name)
		}
		record = append(record, text...)
	}
	block, _ := pem.Decode(b.grant.Files["ca.pem"])
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	sealer, _ := egress.NewSealer(make([]byte, 32))
	state, err := sealer.Open("egress "+string(b.id), b.grant.State)
	if err != nil {
		t.Fatal(err)
	}
	var kept struct {
		Authority egress.Authority `json:"authority"`
	}
	if err := json.Unmarshal(state, &kept); err != nil || !bytes.Equal(kept.Authority.Cert, ca.Raw) {
		t.Fatalf("the sealed state has another authority: %v", err)
	}
	whole, _ := json.Marshal(kept.Authority.Key)
	if key := strings.Trim(string(whole), `"`); len(key) < 64 || bytes.Contains(record, []byte(key)) || bytes.Contains(record, kept.Authority.Key) {
		t.Error("the key is in the record in plain")
	}
	if _, err := sealer.Open("egress other-sandbox", b.grant.State); err == nil {
		t.Error("the state of one sandbox was opened as another's")
	}
	other, _ := egress.NewSealer(bytes.Repeat([]byte{1}, 32))
	if _, err := other.Open("egress "+string(b.id), b.grant.State); err == nil {
		t.Error("another node has opened it")
	}
	changed := bytes.Clone(b.grant.State)
	changed[len(changed)-1] ^= 1
	if _, err := sealer.Open("egress "+string(b.id), changed); err == nil {
		t.Error("what was changed was opened")
	}
	for _, cut := range []int{0, 5, 24, 30} {
		if _, err := sealer.Open("egress "+string(b.id), b.grant.State[:cut]); err == nil {
			t.Errorf("%d bytes of it were opened", cut)
		}
	}
}

// Two sandboxes have two authorities: what one trusts, the other does not.
func TestEverySandboxHasItsOwnAuthority(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", nil)
	one, two := r.ruled(intercepted("api.example.com")), r.ruled(intercepted("api.example.com"))
	c := tls.Client(one.must(boxed.EntryHTTP, "api.example.com", 443), &tls.Config{ServerName: "api.example.com", RootCAs: two.roots()})
	if c.Handshake() == nil {
		t.Error("a program in one sandbox trusts the authority of another")
	}
}
