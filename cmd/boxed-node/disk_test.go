package main_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/boxed-mesh/boxed"
	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

// selfSigned writes a certificate for name and its key to a new directory.
func selfSigned(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, certFile, keyFile, name)
	return certFile, keyFile
}

func writePair(t *testing.T, certFile, keyFile, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func served(t *testing.T, c *tls.Config) string {
	t.Helper()
	cert, err := c.GetCertificate(&tls.ClientHelloInfo{})
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return leaf.Subject.CommonName
}

func TestACertificateIsReadAgainWhenItChanges(t *testing.T) {
	c, now := main.Default(), time.Now()
	c.TLS.CertFile, c.TLS.KeyFile = selfSigned(t, "one")
	config, _, err := main.OpenCertificate(c, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	if got := served(t, config); got != "one" {
		t.Errorf("it serves %s", got)
	}
	writePair(t, c.TLS.CertFile, c.TLS.KeyFile, "two")
	if got := served(t, config); got != "one" {
		t.Errorf("it looks at each handshake, and serves %s", got)
	}
	now = now.Add(6 * time.Second)
	if got := served(t, config); got != "two" {
		t.Errorf("after a change it serves %s", got)
	}

	// A half-done replacement, and one that went wrong, leave the old in use.
	now = now.Add(6 * time.Second)
	other, _ := selfSigned(t, "three")
	text, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.TLS.CertFile, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := served(t, config); got != "two" {
		t.Errorf("with another's key it serves %s", got)
	}
	now = now.Add(6 * time.Second)
	os.Remove(c.TLS.KeyFile)
	if got := served(t, config); got != "two" {
		t.Errorf("without its key it serves %s", got)
	}
	now = now.Add(6 * time.Second)
	writePair(t, c.TLS.CertFile, c.TLS.KeyFile, "four")
	if got := served(t, config); got != "four" {
		t.Errorf("after the repair it serves %s", got)
	}
}

func TestAMadeCertificateIsKeptAndCanBePinned(t *testing.T) {
	c, now := main.Default(), time.Now()
	c.DataDir, c.TLS.Auto, c.Hosts = t.TempDir(), true, []string{"box.example.org"}
	open := func() (*tls.Config, string) {
		config, fingerprint, err := main.OpenCertificate(c, func() time.Time { return now })
		if err != nil {
			t.Fatal(err)
		}
		return config, fingerprint()
	}
	config, first := open()
	if _, again := open(); first != again {
		t.Error("a restart made another certificate")
	}
	if fi, err := os.Stat(filepath.Join(c.DataDir, "tls", "key.pem")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", fi, err)
	}

	ln, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler()}
	ended := make(chan error)
	go func() { ended <- server.Serve(ln) }()
	defer func() { server.Close(); <-ended }()
	text, err := os.ReadFile(filepath.Join(c.DataDir, "tls", "cert.pem"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	for _, name := range []string{"box.example.org", "localhost", "127.0.0.1"} {
		conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: roots, ServerName: name})
		if err != nil {
			t.Errorf("as %s: %v", name, err)
			continue
		}
		if got := conn.ConnectionState().PeerCertificates[0]; got.IsCA || main.Fingerprint(got.Raw) != first {
			t.Errorf("as %s it serves %s, CA %v", name, main.Fingerprint(got.Raw), got.IsCA)
		}
		conn.Close()
	}

	now = now.Add(10*365*24*time.Hour - 20*24*time.Hour)
	if _, renewed := open(); renewed == first {
		t.Error("it was not made anew before it expires")
	}
}

func TestTheFirstStartMakesAKeyThatOnlyItsOwnerReads(t *testing.T) {
	c := main.Default()
	c.DataDir = t.TempDir()
	secret, made, err := main.AdminKey(c)
	if err != nil || !made || !regexp.MustCompile(`^boxed_[a-z2-7]{52}$`).MatchString(secret) {
		t.Fatalf("%q, %v, %v", secret, made, err)
	}
	if fi, err := os.Stat(filepath.Join(c.DataDir, "admin.key")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	if again, made, err := main.AdminKey(c); err != nil || made || again != secret {
		t.Errorf("the second start: %q, %v, %v", again, made, err)
	}
	c.APIKeyFile = file(t, "my.key", "  mine\n", 0o600)
	if got, _, err := main.AdminKey(c); err != nil || got != "mine" {
		t.Errorf("a file of one's own: %q, %v", got, err)
	}
	c.APIKey = "wins"
	if got, _, err := main.AdminKey(c); err != nil || got != "wins" {
		t.Errorf("a key in the configuration: %q, %v", got, err)
	}
}

func TestTheIdentityIsMadeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.key")
	first, err := main.Identity(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	if again, err := main.Identity(path); err != nil || !first.Equal(again) {
		t.Errorf("another start, another node: %v", err)
	}
	for _, broken := range []string{"", "junk", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"} {
		if err := os.WriteFile(path, []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := main.Identity(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", broken, err)
		}
		if left, _ := os.ReadFile(path); string(left) != broken {
			t.Error("it was overwritten")
		}
	}
}

func TestTheAgentIsInstalledByItsHash(t *testing.T) {
	dir := main.AgentDir(filepath.Join(t.TempDir(), "agent"))
	one, err := dir.Install([]byte("agent one"))
	if err != nil {
		t.Fatal(err)
	}
	check := func(path, want string) {
		t.Helper()
		text, err := os.ReadFile(path)
		fi, statErr := os.Stat(path)
		if err := errors.Join(err, statErr); err != nil || string(text) != want || fi.Mode().Perm() != 0o755 {
			t.Errorf("%s: %q, %v, %v", path, text, fi, err)
		}
		for p := filepath.Dir(path); strings.HasPrefix(p, string(dir)); p = filepath.Dir(p) {
			if fi, err := os.Stat(p); err != nil || fi.Mode().Perm() != 0o711 {
				t.Errorf("%s: %v, %v", p, fi, err)
			}
		}
	}
	check(one, "agent one")
	inode := func(path string) os.FileInfo {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return fi
	}
	before := inode(one)
	if again, err := dir.Install([]byte("agent one")); err != nil || again != one || !os.SameFile(before, inode(one)) {
		t.Errorf("the same agent again: %s, %v", again, err)
	}
	if err := os.WriteFile(one, []byte("tampered"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Install([]byte("agent one")); err != nil {
		t.Fatal(err)
	}
	check(one, "agent one")
	if err := os.Chmod(one, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Install([]byte("agent one")); err != nil {
		t.Fatal(err)
	}
	check(one, "agent one")

	two, _ := dir.Install([]byte("agent two"))
	three, _ := dir.Install([]byte("agent three"))
	if err := dir.Prune(three, func(path string) bool { return path == one }); err != nil {
		t.Fatal(err)
	}
	check(one, "agent one")
	check(three, "agent three")
	if _, err := os.Stat(filepath.Dir(two)); err == nil {
		t.Error("an agent that nobody uses stayed")
	}
}

func TestAProgramWithoutAnAgentSaysHowToBuildOne(t *testing.T) {
	bin := fstest.MapFS{"bin/README": {}}
	if _, err := main.AgentProgram("", bin); boxed.CodeOf(err) != boxed.CodeUnavailable || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
	bin["bin/boxed-agent-"+runtime.GOARCH] = &fstest.MapFile{Data: []byte("embedded")}
	if b, err := main.AgentProgram("", bin); err != nil || string(b) != "embedded" {
		t.Errorf("got %q, %v", b, err)
	}
	if b, err := main.AgentProgram(file(t, "agent", "mine", 0o755), bin); err != nil || string(b) != "mine" {
		t.Errorf("got %q, %v", b, err)
	}
}
