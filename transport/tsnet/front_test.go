package tsnet_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"tailscale.com/ipn/ipnlocal"
	library "tailscale.com/tsnet"

	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

// serve answers each request with who asks.
func serve(t *testing.T, n *tsnet.Network, l net.Listener) {
	t.Helper()
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := n.WhoIs(r.Context(), r.RemoteAddr)
		fmt.Fprintf(w, "%s %v", id.Node, err)
	})}
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
}

// get asks url over the tailnet, as a machine that is no node may.
func get(t *testing.T, from *tsnet.Network, addr, url string, roots *x509.CertPool) string {
	t.Helper()
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return tsnet.Server(from).Dial(ctx, network, addr)
		},
	}}
	res, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestTheFrontIsHTTPWithoutCertificates(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	aConfig, bConfig := newConfig(t, tailnet, key), newConfig(t, tailnet, key)
	a, b := node(t, aConfig), node(t, bConfig)
	acquainted(t, a, b)
	l, info, err := network(b).ListenFront(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	serve(t, network(b), l)
	ip := strings.TrimSuffix(b.Addr(), ":7946")
	if info.TLS || !slices.Contains(info.Hosts, ip) || !slices.Contains(info.Hosts, bConfig.Hostname) ||
		!slices.Contains(info.Hosts, bConfig.Hostname+"."+tailnettest.Domain) || len(info.Hosts) != 4 {
		t.Errorf("it is %+v", info)
	}
	if got, want := get(t, network(a), ip+":80", "http://"+bConfig.Hostname+"/", nil), aConfig.Hostname+"."+tailnettest.Domain+" <nil>"; got != want {
		t.Errorf("got %q, not %q", got, want)
	}
}

func TestTheFrontHasTLSWhereTheTailnetHasCertificates(t *testing.T) {
	tailnet, key := tailnettest.Start(t, tailnettest.Config{HTTPS: true}), transport.NewClusterKey()
	aConfig, bConfig := newConfig(t, tailnet, key), newConfig(t, tailnet, key)
	a, b := node(t, aConfig), node(t, bConfig)
	acquainted(t, a, b)
	name := bConfig.Hostname + "." + tailnettest.Domain
	pair, roots := certificate(t, name)
	library.TestHooks.LocalBackend(tsnet.Server(network(b))).ForTest().ConfigureCerts(func(string) (*ipnlocal.TLSCertKeyPair, error) { return pair, nil })
	l, info, err := network(b).ListenFront(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	serve(t, network(b), l)
	if !info.TLS || !slices.Contains(info.Hosts, name) {
		t.Errorf("it is %+v", info)
	}
	ip := strings.TrimSuffix(b.Addr(), ":7946")
	if got, want := get(t, network(a), ip+":443", "https://"+name+"/", roots), aConfig.Hostname+"."+tailnettest.Domain+" <nil>"; got != want {
		t.Errorf("got %q, not %q", got, want)
	}
}

func TestAServiceThatTheTailnetDoesNotHaveIsUnsupported(t *testing.T) {
	tailnet := tailnettest.Start(t)
	n := node(t, newConfig(t, tailnet, transport.NewClusterKey()))
	l, _, err := network(n).ListenService(within(t, time.Second), "svc:boxed")
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v, %v", l, err)
	}
}

// certificate is one for a name, and who vouches for it.
func certificate(t *testing.T, name string) (*ipnlocal.TLSCertKeyPair, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &ipnlocal.TLSCertKeyPair{
		CertPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		KeyPEM:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}, roots
}
