package transport

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// ClusterKey is the secret that admits a node to a cluster: 256 random bits. It
// says nothing of who a node is; the node's own key does.
type ClusterKey [32]byte

// clusterKeyPrefix makes a leaked key recognisable.
const clusterKeyPrefix = "boxedcluster_"

var clusterKeyCoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewClusterKey makes a key.
func NewClusterKey() ClusterKey {
	var k ClusterKey
	rand.Read(k[:]) // never fails: crypto/rand ends the program instead
	return k
}

// ParseClusterKey reads what [ClusterKey.Secret] wrote.
func ParseClusterKey(s string) (ClusterKey, error) {
	var k ClusterKey
	text, ok := strings.CutPrefix(strings.TrimSpace(s), clusterKeyPrefix)
	raw, err := clusterKeyCoding.DecodeString(text)
	if !ok || err != nil || len(raw) != len(k) {
		return k, boxed.Errorf(boxed.CodeInvalid, "that is not a cluster key: one starts with %s and has %d characters",
			clusterKeyPrefix, len(clusterKeyPrefix)+clusterKeyCoding.EncodedLen(len(k)))
	}
	copy(k[:], raw)
	return k, nil
}

// Secret is the key as text, for a file of mode 0600 or a join token.
func (k ClusterKey) Secret() string { return clusterKeyPrefix + clusterKeyCoding.EncodeToString(k[:]) }

// ID names the key where the key itself must not be shown.
func (k ClusterKey) ID() string { return fmt.Sprintf("%x", k.derive("id"))[:12] }

// String is its ID, so that no log or message holds the key.
func (k ClusterKey) String() string { return "cluster key " + k.ID() }

// MarshalText writes the secret: it is for the file that keeps it.
func (k ClusterKey) MarshalText() ([]byte, error) { return []byte(k.Secret()), nil }

// UnmarshalText reads what MarshalText wrote.
func (k *ClusterKey) UnmarshalText(text []byte) (err error) {
	*k, err = ParseClusterKey(string(text))
	return err
}

// derive is a key for one purpose, from which nothing can be learnt of the others.
func (k ClusterKey) derive(purpose string) []byte {
	mac := hmac.New(sha256.New, k[:])
	mac.Write([]byte("boxed cluster " + purpose))
	return mac.Sum(nil)
}

// SSHAuthority is the key that certifies the nodes' SSH host keys to clients. Whoever
// has the cluster key has it: it says that a host is of the cluster.
func (k ClusterKey) SSHAuthority() ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(k.derive("ssh host authority"))
}

// SSHHostKey is one that all nodes may share.
func (k ClusterKey) SSHHostKey() ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(k.derive("ssh host key"))
}
