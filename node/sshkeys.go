package node

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
)

// SSHKeyKind is the kind of the documents that SSH keys are.
const SSHKeyKind = "ssh.key"

// Bounds of SSH keys.
const (
	maxPublicKey = 16 << 10 // bytes of one
	maxSSHKeys   = 64       // that an owner may have, but for admins
)

// SSHKeys are the public keys of owners, in the store's documents. It is safe for
// concurrent use.
type SSHKeys struct {
	cfg KeysConfig

	writing sync.Mutex // held across I/O, while a document is made and stored
	loading sync.Mutex // so that what was read later is installed later

	mu    sync.RWMutex
	all   []boxed.SSHKey            // newest first
	byKey map[string][]boxed.SSHKey // by the key's bytes; those that are not revoked
}

// NewSSHKeys reads the keys from the documents.
func NewSSHKeys(cfg KeysConfig) (*SSHKeys, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	k := &SSHKeys{cfg: cfg}
	return k, k.reload()
}

// Run takes in keys that other nodes added or revoked, until ctx ends.
func (k *SSHKeys) Run(ctx context.Context) error {
	for {
		changed := k.cfg.Documents.DocumentsChanged()
		if err := k.reload(); err != nil {
			k.cfg.Logger.Error("read the SSH keys", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// Owner is whose key it is. A key that two owners have is nobody's. Errors:
// unauthenticated.
func (k *SSHKeys) Owner(key ssh.PublicKey) (string, error) {
	now, owner := k.cfg.Now(), ""
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, e := range k.byKey[string(key.Marshal())] {
		switch {
		case !e.ExpiresAt.IsZero() && !now.Before(e.ExpiresAt):
		case owner != "" && owner != e.Owner:
			return "", boxed.Errorf(boxed.CodeUnauthenticated, "the key %s is that of several owners; leave it to one", e.Fingerprint)
		default:
			owner = e.Owner
		}
	}
	if owner == "" {
		return "", boxed.Errorf(boxed.CodeUnauthenticated, "the key %s is not known", ssh.FingerprintSHA256(key))
	}
	return owner, nil
}

// Add adds a key for the caller; for another owner, and without a proof, only admins
// may. challenge is what a proof signs. Errors: invalid, forbidden, conflict, quota.
func (k *SSHKeys) Add(ctx context.Context, req boxed.SSHKeyRequest, challenge string) (*boxed.SSHKey, error) {
	who := boxed.PrincipalFrom(ctx)
	owner := cmp.Or(req.Owner, who.Owner)
	switch {
	case who.Owner == "":
		return nil, boxed.Errorf(boxed.CodeForbidden, "only a known owner may add SSH keys")
	case owner != who.Owner && !who.Admin():
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin may add another owner's SSH key").WithField("owner")
	case len(req.Comment) > keyMaxComment || strings.ContainsFunc(req.Comment, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return nil, boxed.Errorf(boxed.CodeInvalid, "a comment is one line of at most %d bytes", keyMaxComment).WithField("comment")
	case req.TTL < 0:
		return nil, boxed.Errorf(boxed.CodeInvalid, "a ttl is positive").WithField("ttl")
	}
	if err := ValidOwner(owner); err != nil {
		return nil, err
	}
	public, comment, err := parsePublicKey(req.PublicKey)
	if err != nil {
		return nil, err
	}
	if !who.Admin() {
		if err := proves(public, req.Proof, challenge); err != nil {
			return nil, boxed.Errorf(boxed.CodeForbidden, "there is no proof that this key is yours: %w; boxedctl ssh-key add makes one", err).WithField("proof")
		}
	}
	now := k.cfg.Now().UTC()
	key := boxed.SSHKey{
		ID: boxed.NewToken(keyIDLen), Owner: owner, Comment: cmp.Or(req.Comment, comment), CreatedAt: now,
		PublicKey: string(bytes.TrimSpace(ssh.MarshalAuthorizedKey(public))), Fingerprint: ssh.FingerprintSHA256(public),
	}
	if req.TTL != 0 && req.TTL != boxed.Never {
		key.ExpiresAt = now.Add(req.TTL.D())
	}
	k.writing.Lock()
	defer k.writing.Unlock()
	if have, err := k.had(public, key, who); have != nil || err != nil {
		return have, err
	}
	if err := k.putLocked(key, false); err != nil {
		return nil, err
	}
	return &key, nil
}

// had is the key if its owner has it already.
func (k *SSHKeys) had(public ssh.PublicKey, key boxed.SSHKey, who boxed.Principal) (*boxed.SSHKey, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, e := range k.byKey[string(public.Marshal())] {
		switch {
		case !e.ExpiresAt.IsZero() && !key.CreatedAt.Before(e.ExpiresAt):
		case e.Owner != key.Owner:
			return nil, boxed.Errorf(boxed.CodeConflict, "another owner has this key: it can be one owner's only").WithField("public_key")
		case e.ExpiresAt.Equal(key.ExpiresAt):
			return &e, nil
		}
	}
	n := 0
	for _, e := range k.all {
		if e.Owner == key.Owner && e.RevokedAt.IsZero() {
			n++
		}
	}
	if n >= maxSSHKeys && !who.Admin() {
		return nil, boxed.Errorf(boxed.CodeQuota, "%s has %d SSH keys already; revoke one", key.Owner, n)
	}
	return nil, nil
}

// parsePublicKey reads a line of an authorized_keys file.
func parsePublicKey(line string) (ssh.PublicKey, string, error) {
	invalid := func(format string, args ...any) error {
		return boxed.Errorf(boxed.CodeInvalid, format, args...).WithField("public_key")
	}
	line = strings.TrimSpace(line)
	switch {
	case len(line) > maxPublicKey || strings.ContainsAny(line, "\n\r\x00"):
		return nil, "", invalid("a public key is one line, as in id_ed25519.pub, of at most %d bytes", maxPublicKey)
	case strings.Contains(line, "PRIVATE KEY"):
		return nil, "", invalid("that is a private key; what is asked for is the public one, as in id_ed25519.pub")
	}
	key, comment, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		return nil, "", invalid("that is no public key; it looks like: ssh-ed25519 AAAA… name")
	}
	if len(options) > 0 {
		return nil, "", invalid("a key has no options here, not %q", options[0])
	}
	if _, ok := key.(*ssh.Certificate); ok {
		return nil, "", invalid("that is a certificate; add the key that signs certificates to ssh.user_ca_keys instead")
	}
	if len(comment) > keyMaxComment || strings.ContainsFunc(comment, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		comment = ""
	}
	return key, comment, nil
}

// List is an owner's keys, or everybody's for "".
func (k *SSHKeys) List(owner string) []boxed.SSHKey {
	k.mu.RLock()
	defer k.mu.RUnlock()
	list := []boxed.SSHKey{}
	for _, e := range k.all {
		if owner == "" || e.Owner == owner {
			list = append(list, e)
		}
	}
	return list
}

// Revoke makes a key worthless for ever; its owner and admins may. Errors: not_found.
func (k *SSHKeys) Revoke(ctx context.Context, id string) error {
	who := boxed.PrincipalFrom(ctx)
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.RLock()
	i := slices.IndexFunc(k.all, func(e boxed.SSHKey) bool { return e.ID == id && (e.Owner == who.Owner || who.Admin()) })
	var key boxed.SSHKey
	if i >= 0 {
		key = k.all[i]
	}
	k.mu.RUnlock()
	if i < 0 {
		return boxed.Errorf(boxed.CodeNotFound, "there is no SSH key %q", keyClip(id)).WithField("id")
	}
	if !key.RevokedAt.IsZero() {
		return nil
	}
	key.RevokedAt = k.cfg.Now().UTC()
	return k.putLocked(key, true)
}

func (k *SSHKeys) putLocked(key boxed.SSHKey, revoked bool) error {
	raw, err := json.Marshal(key)
	if err == nil {
		err = k.cfg.MayWrite()
	}
	if err != nil {
		return err
	}
	if err := k.cfg.put(SSHKeyKind, key.ID, raw, func(d *boxed.Document) { d.Revoked = revoked }); err != nil {
		return fmt.Errorf("store the SSH key: %w", err)
	}
	return k.reload()
}

// Reload reads the keys again after documents were dropped.
func (k *SSHKeys) Reload() error { return k.reload() }

func (k *SSHKeys) reload() error {
	k.loading.Lock()
	defer k.loading.Unlock()
	docs, err := k.cfg.Documents.Documents(SSHKeyKind)
	if err != nil {
		return fmt.Errorf("read the SSH keys: %w", err)
	}
	var all []boxed.SSHKey
	byKey := map[string][]boxed.SSHKey{}
	for _, d := range docs {
		if d.Tombstone || !k.cfg.Trusted(d.Author) {
			continue
		}
		var e boxed.SSHKey
		err := json.Unmarshal(d.Body, &e)
		public, _, parseErr := parsePublicKey(e.PublicKey)
		if err = errors.Join(err, parseErr); err != nil || e.ID != d.Key || ValidOwner(e.Owner) != nil {
			k.cfg.Logger.Error("an SSH key cannot be read", "key", d.Key, "err", err)
			continue
		}
		if d.Revoked && e.RevokedAt.IsZero() {
			e.RevokedAt = time.UnixMilli(d.Stamp.WallMS).UTC()
		}
		if all = append(all, e); !d.Revoked {
			byKey[string(public.Marshal())] = append(byKey[string(public.Marshal())], e)
		}
	}
	slices.SortFunc(all, func(a, b boxed.SSHKey) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all, k.byKey = all, byKey
	return nil
}

// sshsig is the magic of signatures that OpenSSH makes of files.
const sshsig = "SSHSIG"

// proves checks an SSHSIG signature of the challenge by the key
// (openssh-portable/PROTOCOL.sshsig).
func proves(key ssh.PublicKey, proof, challenge string) error {
	if len(proof) > maxPublicKey {
		return errors.New("a signature is not so long")
	}
	block, _ := pem.Decode([]byte(proof))
	if block == nil || block.Type != "SSH SIGNATURE" {
		return errors.New("there is no signature")
	}
	var sig struct {
		Magic     [len(sshsig)]byte
		Version   uint32
		PublicKey []byte
		Namespace string
		Reserved  string
		Hash      string
		Signature []byte
	}
	if err := ssh.Unmarshal(block.Bytes, &sig); err != nil || string(sig.Magic[:]) != sshsig || sig.Version != 1 {
		return errors.New("the signature is malformed")
	}
	if !bytes.Equal(sig.PublicKey, key.Marshal()) {
		return errors.New("the signature is by another key")
	}
	if sig.Namespace != boxed.SSHNamespace {
		return fmt.Errorf("the signature's namespace is %q and not %q", keyClip(sig.Namespace), boxed.SSHNamespace)
	}
	var sum []byte
	switch sig.Hash {
	case "sha512":
		h := sha512.Sum512([]byte(challenge))
		sum = h[:]
	case "sha256":
		h := sha256.Sum256([]byte(challenge))
		sum = h[:]
	default:
		return errors.New("the signature's hash is neither sha512 nor sha256")
	}
	var inner ssh.Signature
	if err := ssh.Unmarshal(sig.Signature, &inner); err != nil {
		return errors.New("the signature is malformed")
	}
	if inner.Format == ssh.KeyAlgoRSA {
		return errors.New("the signature is by SHA-1")
	}
	signed := ssh.Marshal(struct {
		Magic                     [len(sshsig)]byte
		Namespace, Reserved, Hash string
		Sum                       []byte
	}{[len(sshsig)]byte([]byte(sshsig)), sig.Namespace, sig.Reserved, sig.Hash, sum})
	if err := key.Verify(signed, &inner); err != nil {
		return errors.New("the signature does not fit: it is of another owner or cluster")
	}
	return nil
}
