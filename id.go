package boxed

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"strings"
)

// Lengths, in characters, of the parts of an identifier.
const (
	nodeIDLen    = 16
	randomIDLen  = 10
	execIDLen    = 12
	MinPrefixLen = 4 // the shortest prefix of an ID's random part that people may type
)

// base32Lower is RFC 4648 base32 in lower case without padding: safe in a DNS
// label, in a path and in a shell.
var base32Lower = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NodeID names a node: 16 base32 characters of the SHA-256 of its Ed25519
// public key. Nobody without the private key can prove to be that node.
type NodeID string

// NodeIDOf derives the ID from a node's public key.
func NodeIDOf(pub ed25519.PublicKey) NodeID {
	sum := sha256.Sum256(pub)
	return NodeID(base32Lower.EncodeToString(sum[:])[:nodeIDLen])
}

// Valid reports whether the ID has the form of a node ID.
func (n NodeID) Valid() bool { return isBase32(string(n), nodeIDLen) }

// ID names a sandbox for all of its life: "<10 random characters>-<node ID>",
// lower-case base32, one DNS label. The owner is in the name, so any node
// routes by reading it.
type ID string

// NewID mints an ID of a sandbox owned by node.
func NewID(node NodeID) ID { return ID(randomBase32(randomIDLen) + "-" + string(node)) }

// ParseID checks the form of s. Its error has code [CodeInvalid].
func ParseID(s string) (ID, error) {
	random, node, ok := strings.Cut(s, "-")
	if !ok || !isBase32(random, randomIDLen) || !NodeID(node).Valid() {
		return "", Errorf(CodeInvalid, "%q is not a sandbox ID", clip(s, 64)).WithField("id")
	}
	return ID(s), nil
}

// Random is the part that people may abbreviate, down to [MinPrefixLen].
func (id ID) Random() string {
	random, _, _ := strings.Cut(string(id), "-")
	return random
}

// Node is the sandbox's owner.
func (id ID) Node() NodeID {
	_, node, _ := strings.Cut(string(id), "-")
	return NodeID(node)
}

// ExecID names one exec of one sandbox: 12 base32 characters.
type ExecID string

// NewExecID mints an exec ID.
func NewExecID() ExecID { return ExecID(randomBase32(execIDLen)) }

// Valid reports whether the ID has the form of an exec ID.
func (e ExecID) Valid() bool { return isBase32(string(e), execIDLen) }

// NewToken returns a random string of n base32 characters (5 bits each).
func NewToken(n int) string { return randomBase32(n) }

func randomBase32(n int) string {
	raw := make([]byte, (n*5+7)/8)
	rand.Read(raw) // never fails: crypto/rand ends the program instead
	return base32Lower.EncodeToString(raw)[:n]
}

func isBase32(s string, n int) bool {
	if len(s) != n {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}

// ValidName reports whether s may be a sandbox's name: [a-z0-9-]{1,40}, not
// starting or ending with a hyphen.
func ValidName(s string) bool {
	if s == "" || len(s) > 40 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
