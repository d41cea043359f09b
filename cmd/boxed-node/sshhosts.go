package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed/transport"
)

// sshHostName is what clients know all nodes of a cluster by.
const sshHostName = "boxed"

// hostCertLife is how long a host's certificate is good; half of it later there is
// another.
const hostCertLife = 30 * 24 * time.Hour

// sshHosts is what a node shows to SSH clients: a key of its own, certified by what all
// nodes of the cluster have.
type sshHosts struct {
	own     ssh.Signer
	alone   ed25519.PrivateKey            // the authority of a node that is in no cluster
	cluster func() []transport.ClusterKey // the one in force first; none: alone
	names   func() []string
	shared  bool // the key is the cluster's
	log     *slog.Logger

	mu    sync.Mutex
	cert  ssh.Signer
	until time.Time // when there shall be another
	by    []byte    // public key of the authority that signed it
	named []string  // the names in it
}

// authority is what certifies host keys.
func (h *sshHosts) authority() ssh.Signer {
	key := h.alone
	if keys := h.cluster(); len(keys) > 0 {
		key = keys[0].SSHAuthority()
	}
	return mustSigner(key)
}

func mustSigner(key ed25519.PrivateKey) ssh.Signer {
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		panic(err) // an Ed25519 key always is one
	}
	return signer
}

// signers are the certified key and the bare one.
func (h *sshHosts) signers() []ssh.Signer {
	own := h.own
	if keys := h.cluster(); h.shared && len(keys) > 0 {
		own = mustSigner(keys[0].SSHHostKey())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	authority, names := h.authority(), h.names()
	current := h.cert != nil && time.Now().Before(h.until) && bytes.Equal(h.by, authority.PublicKey().Marshal()) && slices.Equal(h.named, names) &&
		bytes.Equal(h.cert.PublicKey().(*ssh.Certificate).Key.Marshal(), own.PublicKey().Marshal())
	if !current {
		cert := &ssh.Certificate{
			Key: own.PublicKey(), CertType: ssh.HostCert, KeyId: "boxed node " + names[1], ValidPrincipals: names,
			ValidAfter: uint64(time.Now().Add(-time.Hour).Unix()), ValidBefore: uint64(time.Now().Add(hostCertLife).Unix()),
		}
		err := cert.SignCert(rand.Reader, authority)
		if err == nil {
			h.cert, err = ssh.NewCertSigner(cert, own)
		}
		if err != nil {
			h.log.Error("certify the SSH host key", "err", err)
			return []ssh.Signer{own}
		}
		h.until, h.by, h.named = time.Now().Add(hostCertLife/2), authority.PublicKey().Marshal(), names
	}
	return []ssh.Signer{h.cert, own}
}

// derived is a seed for one purpose, from which nothing can be learnt of the key.
func derived(key ed25519.PrivateKey, purpose string) []byte {
	mac := hmac.New(sha256.New, key.Seed())
	mac.Write([]byte(purpose))
	return mac.Sum(nil)
}

func publicLine(key ssh.PublicKey) string {
	return string(bytes.TrimSpace(ssh.MarshalAuthorizedKey(key)))
}

// sshHostKey is the node's own, made at the first start.
func sshHostKey(path string) (ssh.Signer, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		block, err := ssh.MarshalPrivateKey(key, "")
		if err != nil {
			return nil, err
		}
		text = pem.EncodeToMemory(block)
		if err := writeNew(path, text, 0o600); err != nil {
			return nil, fmt.Errorf("keep the SSH host key that was made: %w", err)
		}
	} else if err != nil {
		return nil, fmt.Errorf("read the SSH host key: %w", err)
	}
	key, err := ssh.ParsePrivateKey(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; move it away and a new one is made", path, err)
	}
	return key, nil
}
