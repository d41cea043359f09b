package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Lifetimes of a certificate that the node makes for itself. Clients pin it, so
// a short life would only break pins.
const (
	certLife  = 10 * 365 * 24 * time.Hour
	certSpare = 30 * 24 * time.Hour // it is made anew when less is left
)

// certCheck is how often a handshake looks whether the files have changed.
const certCheck = 5 * time.Second

// certificate serves a key pair from two files, which may be replaced while it
// runs.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger
	now               func() time.Time

	mu      sync.Mutex
	pair    *tls.Certificate
	stamp   string // of the files that pair was read from
	checked time.Time
}

// openCertificate reads or makes the certificate that c asks for; nil for none.
func openCertificate(c *Config, log *slog.Logger, now func() time.Time) (*certificate, error) {
	if !c.TLS.Enabled() {
		return nil, nil
	}
	cert := &certificate{certFile: c.TLS.CertFile, keyFile: c.TLS.KeyFile, log: log, now: now}
	if c.TLS.Auto {
		cert.certFile, cert.keyFile = c.path("tls", "cert.pem"), c.path("tls", "key.pem")
		if err := ensureCertificate(cert.certFile, cert.keyFile, c.hostNames(), now()); err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
	}
	if err := cert.reload(); err != nil {
		return nil, err
	}
	return cert, nil
}

// config is for a listener. HTTP/2 is offered by net/http.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get}
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	pair, due := c.pair, c.now().Sub(c.checked) >= certCheck
	if due {
		c.checked = c.now()
	}
	c.mu.Unlock()
	if due {
		if err := c.reload(); err != nil {
			c.log.Error("keep the old certificate", "err", err)
			return pair, nil
		}
		c.mu.Lock()
		pair = c.pair
		c.mu.Unlock()
	}
	return pair, nil
}

// reload reads the files if they have changed. What was there before stays in
// use if they cannot be read: whoever replaces two files does so one by one.
func (c *certificate) reload() error {
	stamp, err := fileStamp(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("read the certificate: %w", err)
	}
	c.mu.Lock()
	same := stamp == c.stamp
	c.mu.Unlock()
	if same {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("read the certificate: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stamp != "" {
		c.log.Info("certificate read again", "path", c.certFile, "fingerprint", fingerprint(pair.Certificate[0]))
	}
	c.pair, c.stamp, c.checked = &pair, stamp, c.now()
	return nil
}

// fingerprint of the certificate in use, as clients pin it.
func (c *certificate) fingerprint() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fingerprint(c.pair.Certificate[0])
}

// fingerprint is the SHA-256 of a certificate in hex, as `openssl x509
// -fingerprint -sha256` has it but for the colons.
func fingerprint(der []byte) string { return fmt.Sprintf("%x", sha256.Sum256(der)) }

// fileStamp changes when one of the files does.
func fileStamp(paths ...string) (stamp string, err error) {
	for _, path := range paths {
		fi, err := os.Stat(path)
		if err != nil {
			return "", err
		}
		stamp += fmt.Sprintf("%d %d;", fi.Size(), fi.ModTime().UnixNano())
	}
	return stamp, nil
}

// ensureCertificate makes a self-signed certificate for names, unless there is
// one that is good for a while.
func ensureCertificate(certFile, keyFile string, names []string, now time.Time) error {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	switch {
	case err == nil && pair.Leaf.NotAfter.Sub(now) > certSpare:
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w; move %s away to have a new one made", err, filepath.Dir(certFile))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := selfSigned(key, names, now)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(certFile), 0o700); err != nil {
		return err
	}
	return errors.Join(
		writeNew(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600),
		writeNew(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
}

func selfSigned(key *ecdsa.PrivateKey, names []string, now time.Time) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "boxed-node"},
		NotBefore:    now.Add(-time.Hour), // a client's clock may be behind
		NotAfter:     now.Add(certLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		// A leaf, not an authority: whoever trusts it trusts this node and nothing else.
		BasicConstraintsValid: true,
	}
	for _, name := range names {
		if addr, err := netip.ParseAddr(name); err == nil {
			template.IPAddresses = append(template.IPAddresses, addr.AsSlice())
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	return x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
}
