package main

import (
	"crypto/ed25519"
	"crypto/tls"
	"io"
	"io/fs"
	"log/slog"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// What the tests, which are in package main_test, see of the rest.

type AgentDir = agentDir

func (d agentDir) Install(program []byte) (string, error) { return d.install(program) }

func (d agentDir) Prune(current string, inUse func(string) bool) error {
	return d.prune(current, inUse)
}

func AgentProgram(path string, bin fs.FS) ([]byte, error) { return agentProgram(path, bin) }

func AdminKey(c *Config) (string, bool, error) { return adminKey(c) }

func Identity(path string) (ed25519.PrivateKey, error) { return identity(path) }

func (c *Config) HostNames() []string { return c.hostNames() }

func Reference() string { return reference() }

func ParseSize(s string) (int64, error) {
	v, err := parseSize(s)
	return int64(v), err
}

func FormatSize(n int64) string { return size(n).String() }

// OpenCertificate opens a certificate with a clock.
func OpenCertificate(c *Config, now func() time.Time) (config *tls.Config, fingerprint func() string, err error) {
	cert, err := openCertificate(c, slog.New(slog.DiscardHandler), now)
	if err != nil || cert == nil {
		return nil, nil, err
	}
	return cert.config(), cert.fingerprint, nil
}

func Fingerprint(der []byte) string { return fingerprint(der) }

// NewLogger is a node's log in one format, at the level of errors.
func NewLogger(format string, w io.Writer) *slog.Logger {
	c := &Config{}
	c.Log.Format = format
	return newLogger(c, w, nil)
}

// Caller is who is at the other end of a tailnet connection.
type Caller = caller

// PrincipalOf is who a caller is, with these roles of tags.
func PrincipalOf(tags map[string]string, users bool, who Caller) (boxed.Principal, error) {
	return (&TailnetConfig{Tags: tags, Users: users}).principal(who)
}

// NewToken makes a join token.
func NewToken(cluster string, seeds []string) string {
	return joinToken{Cluster: cluster, Key: transport.NewClusterKey(), Seeds: seeds}.String()
}

// ParseToken reads one.
func ParseToken(text string) error {
	_, err := parseToken(text)
	return err
}

func Power(dir string) string { return power(dir) }

func Blocked(s *boxed.ClusterStatus, tagged []string) []string { return blocked(s, tagged) }
