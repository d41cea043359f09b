package node_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha512"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
)

const sshChallenge = "the SSH key of ann on this cluster\n"

func newSSHKeys(t *testing.T, k *keyring) *node.SSHKeys {
	t.Helper()
	keys, err := node.NewSSHKeys(node.KeysConfig{Documents: k.store, Signer: keySigner('a'), Clock: k.store.Clock(), Now: k.now})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func newSSHSigner(t *testing.T) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func publicLine(s ssh.Signer) string {
	return string(bytes.TrimSpace(ssh.MarshalAuthorizedKey(s.PublicKey())))
}

// sshsig signs as `ssh-keygen -Y sign` does; e2e has the real one.
func sshsig(t *testing.T, s ssh.Signer, namespace, message string) string {
	t.Helper()
	sum := sha512.Sum512([]byte(message))
	magic := [6]byte([]byte("SSHSIG"))
	sig, err := s.Sign(rand.Reader, ssh.Marshal(struct {
		Magic                     [6]byte
		Namespace, Reserved, Hash string
		Sum                       []byte
	}{magic, namespace, "", "sha512", sum[:]}))
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "SSH SIGNATURE", Bytes: ssh.Marshal(struct {
		Magic                     [6]byte
		Version                   uint32
		PublicKey                 []byte
		Namespace, Reserved, Hash string
		Signature                 []byte
	}{magic, 1, s.PublicKey().Marshal(), namespace, "", "sha512", ssh.Marshal(sig)})}))
}

// A public key is public: who adds one without the private key, or with a signature for
// something else, would have another's work in his sandboxes.
func TestAnSSHKeyIsProvedToBeOnes(t *testing.T) {
	keys := newSSHKeys(t, newKeyring(t))
	key, other := newSSHSigner(t), newSSHSigner(t)
	ann := keyAs("ann", boxed.RoleUser)
	for name, proof := range map[string]string{
		"none":                 "",
		"nonsense":             "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
		"by another key":       sshsig(t, other, boxed.SSHNamespace, sshChallenge),
		"of another owner":     sshsig(t, key, boxed.SSHNamespace, strings.Replace(sshChallenge, "ann", "bob", 1)),
		"in another namespace": sshsig(t, key, "file", sshChallenge),
		"long":                 strings.Repeat("x", 1<<20),
	} {
		if _, err := keys.Add(ann, boxed.SSHKeyRequest{PublicKey: publicLine(key), Proof: proof}, sshChallenge); boxed.CodeOf(err) != boxed.CodeForbidden {
			t.Errorf("%s: %v", name, err)
		}
	}
	added, err := keys.Add(ann, boxed.SSHKeyRequest{PublicKey: publicLine(key) + " laptop", Proof: sshsig(t, key, boxed.SSHNamespace, sshChallenge)}, sshChallenge)
	if err != nil || added.Owner != "ann" || added.Comment != "laptop" {
		t.Fatalf("%+v, %v", added, err)
	}
	if owner, err := keys.Owner(key.PublicKey()); owner != "ann" || err != nil {
		t.Errorf("%q, %v", owner, err)
	}
	if _, err := keys.Owner(other.PublicKey()); boxed.CodeOf(err) != boxed.CodeUnauthenticated {
		t.Error(err)
	}
	// A second owner is refused, and where two nodes took one each it is nobody's.
	if _, err := keys.Add(keyAdmin, boxed.SSHKeyRequest{PublicKey: publicLine(key), Owner: "bob"}, ""); boxed.CodeOf(err) != boxed.CodeConflict {
		t.Error(err)
	}
	if _, err := keys.Add(ann, boxed.SSHKeyRequest{PublicKey: publicLine(other), Owner: "bob"}, ""); boxed.CodeOf(err) != boxed.CodeForbidden {
		t.Error(err)
	}
}

// Two nodes that took a key for two owners at once agree that it is nobody's.
func TestAnSSHKeyOfTwoOwnersIsNobodys(t *testing.T) {
	here, there := newKeyring(t), newKeyring(t)
	key := newSSHSigner(t)
	for ring, owner := range map[*keyring]string{here: "ann", there: "bob"} {
		if _, err := newSSHKeys(t, ring).Add(keyAdmin, boxed.SSHKeyRequest{PublicKey: publicLine(key), Owner: owner}, ""); err != nil {
			t.Fatal(err)
		}
	}
	docs, err := there.store.Documents(node.SSHKeyKind)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range docs {
		if _, err := here.store.PutDocument(d); err != nil {
			t.Fatal(err)
		}
	}
	keys := newSSHKeys(t, here)
	if owner, err := keys.Owner(key.PublicKey()); boxed.CodeOf(err) != boxed.CodeUnauthenticated || !strings.Contains(err.Error(), "several owners") {
		t.Errorf("%q, %v", owner, err)
	}
	for _, k := range keys.List("bob") {
		if err := keys.Revoke(keyAs("bob", boxed.RoleUser), k.ID); err != nil {
			t.Fatal(err)
		}
	}
	if owner, err := keys.Owner(key.PublicKey()); owner != "ann" || err != nil {
		t.Errorf("once it is one's again: %q, %v", owner, err)
	}
}

// A key expires and is revoked for good; the same public key may be added again. What
// another has is not there.
func TestAnSSHKeyEnds(t *testing.T) {
	ring := newKeyring(t)
	keys := newSSHKeys(t, ring)
	key := newSSHSigner(t)
	add := func(ttl boxed.Duration) *boxed.SSHKey {
		t.Helper()
		k, err := keys.Add(keyAdmin, boxed.SSHKeyRequest{PublicKey: publicLine(key), Owner: "ann", TTL: ttl}, "")
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	valid := func() bool { _, err := keys.Owner(key.PublicKey()); return err == nil }
	add(boxed.Duration(time.Hour))
	ring.sleep(2 * time.Hour)
	if valid() {
		t.Error("it has expired")
	}
	k := add(0)
	if again := add(0); again.ID != k.ID {
		t.Error("added twice it is two")
	}
	if !valid() {
		t.Error("it was added again")
	}
	if err := keys.Revoke(keyAs("bob", boxed.RoleUser), k.ID); boxed.CodeOf(err) != boxed.CodeNotFound || !valid() {
		t.Errorf("bob revokes it: %v", err)
	}
	for range 2 {
		if err := keys.Revoke(keyAs("ann", boxed.RoleUser), k.ID); err != nil || valid() {
			t.Errorf("%v, valid %v", err, valid())
		}
	}
	if add(0); !valid() {
		t.Error("it was added after its revocation")
	}
	if reopened := newSSHKeys(t, ring); len(reopened.List("ann")) != 3 || len(reopened.List("bob")) != 0 {
		t.Errorf("%+v", reopened.List(""))
	}
}

func TestWhatIsNoPublicKey(t *testing.T) {
	keys := newSSHKeys(t, newKeyring(t))
	key := newSSHSigner(t)
	cert := &ssh.Certificate{Key: key.PublicKey(), CertType: ssh.UserCert}
	if err := cert.SignCert(rand.Reader, key); err != nil {
		t.Fatal(err)
	}
	for name, line := range map[string]string{
		"nothing": "", "a word": "hello", "options": `command="x" ` + publicLine(key), "two lines": publicLine(key) + "\n" + publicLine(key),
		"a private key": "-----BEGIN OPENSSH PRIVATE KEY-----", "a certificate": string(bytes.TrimSpace(ssh.MarshalAuthorizedKey(cert))), "long": "ssh-ed25519 " + strings.Repeat("A", 1<<20),
	} {
		if _, err := keys.Add(keyAdmin, boxed.SSHKeyRequest{PublicKey: line, Owner: "ann"}, ""); boxed.CodeOf(err) != boxed.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	for i := range 64 {
		if _, err := keys.Add(keyAs("ann", boxed.RoleUser), proved(t), sshChallenge); err != nil {
			t.Fatal(i, err)
		}
	}
	if _, err := keys.Add(keyAs("ann", boxed.RoleUser), proved(t), sshChallenge); boxed.CodeOf(err) != boxed.CodeQuota {
		t.Errorf("one too many: %v", err)
	}
}

// proved is a request for a new key, with its proof.
func proved(t *testing.T) boxed.SSHKeyRequest {
	key := newSSHSigner(t)
	return boxed.SSHKeyRequest{PublicKey: publicLine(key), Proof: sshsig(t, key, boxed.SSHNamespace, sshChallenge)}
}
