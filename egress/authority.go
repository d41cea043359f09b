package egress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Authority signs certificates of the hosts that one sandbox's egress reads. It is good for
// these hosts alone, so that whoever steals it out of a sandbox's record can be nobody else.
type Authority struct {
	Cert []byte `json:"cert"` // DER
	Key  []byte `json:"key"`  // PKCS #8, DER
	// Hosts are those that it may sign for, sorted.
	Hosts []string `json:"hosts"`
}

// clockSkew is how far a sandbox's clock, or one beside it, may be behind.
const clockSkew = time.Hour

// leafLife is how long a certificate of a host is good for.
const leafLife = 24 * time.Hour

// maxLeaves is how many certificates are kept for one sandbox.
const maxLeaves = 256

// NewAuthority makes one for the hosts, good until the end.
func NewAuthority(name string, hosts []string, now, end time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	_, all4, _ := net.ParseCIDR("0.0.0.0/0")
	_, all6, _ := net.ParseCIDR("::/0")
	hosts = slices.Clone(hosts)
	slices.Sort(hosts)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "boxed egress " + name, Organization: []string{"boxed"}},
		NotBefore: now.Add(-clockSkew), NotAfter: end.Add(clockSkew),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: permitted(hosts),
		// A constraint on names alone leaves addresses free.
		ExcludedIPRanges: []*net.IPNet{all4, all6},
		// "." is no host: nothing of these kinds is.
		PermittedEmailAddresses: []string{"invalid.invalid"}, PermittedURIDomains: []string{"invalid.invalid"},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return &Authority{Cert: cert, Key: der, Hosts: hosts}, nil
}

// permitted are the constraints for hosts: a wildcard's is its suffix.
func permitted(hosts []string) []string {
	var names []string
	for _, h := range hosts {
		names = append(names, strings.TrimPrefix(h, "*."))
	}
	return slices.Compact(names)
}

// PEM is the certificate as programs read it.
func (a *Authority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Cert})
}

// authority is an Authority at work.
type authority struct {
	cert *x509.Certificate
	raw  []byte
	key  any
	now  func() time.Time
	err  error

	mu     sync.Mutex
	leaves map[string]*tls.Certificate
}

func newAuthority(a *Authority, now func() time.Time) *authority {
	c := &authority{raw: a.Cert, now: now, leaves: map[string]*tls.Certificate{}}
	if c.cert, c.err = x509.ParseCertificate(a.Cert); c.err == nil {
		c.key, c.err = x509.ParsePKCS8PrivateKey(a.Key)
	}
	return c
}

// leaf is a certificate for one name, with a good part of its life left. ET8: it goes with
// the authority's own.
func (a *authority) leaf(host string) (*tls.Certificate, error) {
	if a.err != nil {
		return nil, a.err
	}
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if have := a.leaves[host]; have != nil && have.Leaf.NotAfter.Sub(now) > leafLife/4 {
		return have, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: commonName(host)}, DNSNames: []string{host},
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(leafLife), BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	cert := &tls.Certificate{Certificate: [][]byte{der, a.raw}, PrivateKey: key, Leaf: leaf}
	if len(a.leaves) >= maxLeaves { // a wildcard has as many names as a program likes to ask for
		clear(a.leaves)
	}
	a.leaves[host] = cert
	return cert, nil
}

// commonName is a host as the subject of a certificate, which has at most 64 bytes.
func commonName(host string) string { return host[:min(len(host), 64)] }
