package node

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Bounds of a key request, in bytes.
const (
	keyMaxOwner   = 64
	keyMaxComment = 256
)

// CreateKey makes a key; the answer is the only time that its secret is shown.
// Only admins may. Errors: forbidden, invalid, no_space.
func (k *Keys) CreateKey(ctx context.Context, req boxed.KeyRequest) (*boxed.NewKey, error) {
	if !boxed.PrincipalFrom(ctx).Admin() {
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin may make API keys")
	}
	if req.Role == "" {
		req.Role = boxed.RoleUser
	}
	if err := keyValidOwner(req.Owner, req.Role); err != nil {
		return nil, err
	}
	if len(req.Comment) > keyMaxComment || strings.ContainsFunc(req.Comment, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, boxed.Errorf(boxed.CodeInvalid, "a comment is one line of at most %d bytes", keyMaxComment).WithField("comment")
	}
	if req.TTL < 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "a ttl is positive").WithField("ttl")
	}
	now := k.cfg.Now().UTC()
	key := boxed.Key{ID: boxed.NewToken(keyIDLen), Owner: req.Owner, Role: req.Role, Comment: req.Comment, CreatedAt: now}
	if req.TTL != 0 && req.TTL != boxed.Never {
		key.ExpiresAt = now.Add(req.TTL.D())
	}
	secret := NewKeySecret()
	hash := sha256.Sum256([]byte(secret))
	k.writing.Lock()
	defer k.writing.Unlock()
	if err := k.putLocked(keyBody{Hash: hash[:], Key: key}, false); err != nil {
		return nil, fmt.Errorf("store the API key: %w", err)
	}
	return &boxed.NewKey{Key: key, Secret: secret}, nil
}

// ListKeys is every key, newest first, with revoked and expired ones; a user's
// own for those who are no admins. Errors: forbidden.
func (k *Keys) ListKeys(ctx context.Context) ([]boxed.Key, error) {
	switch p := boxed.PrincipalFrom(ctx); {
	case p.Admin():
		return k.list(""), nil
	case p.Owner == "":
		return nil, boxed.Errorf(boxed.CodeForbidden, "only a known owner may list API keys")
	default:
		return k.list(p.Owner), nil
	}
}

// RevokeKey makes a key worthless for ever and ends its streams. Only admins
// may, and their own key is no exception. It is idempotent. Errors: forbidden,
// not_found, conflict (a key of the configuration).
func (k *Keys) RevokeKey(ctx context.Context, keyID string) error {
	if !boxed.PrincipalFrom(ctx).Admin() {
		return boxed.Errorf(boxed.CodeForbidden, "only an admin may revoke API keys")
	}
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.RLock()
	e := k.byID[keyID]
	k.mu.RUnlock()
	switch {
	case e == nil:
		return boxed.Errorf(boxed.CodeNotFound, "there is no API key %q", keyClip(keyID)).WithField("id")
	case e.bootstrap:
		return boxed.Errorf(boxed.CodeConflict, "this API key comes from the node's configuration (api_key or api_key_file); change it there and start the node again").WithField("id")
	case !e.key.RevokedAt.IsZero():
		return nil
	case e.config != "":
		return boxed.Errorf(boxed.CodeConflict, "this API key comes from the configuration of node %s; change it there and start that node again, or remove the node", e.config).WithField("id")
	}
	key := e.key
	key.RevokedAt = k.cfg.Now().UTC()
	if err := k.putLocked(keyBody{Hash: e.hash[:], Key: key}, true); err != nil {
		return fmt.Errorf("revoke the API key: %w", err)
	}
	return nil
}

// Share gives the keys of this node's configuration to the mesh, so that whoever
// holds one is known on every node; and takes back those that the configuration no
// longer has.
func (k *Keys) Share(self boxed.NodeID) error {
	k.writing.Lock()
	defer k.writing.Unlock()
	docs, err := k.cfg.Documents.Documents(KeyKind)
	if err != nil {
		return err
	}
	shared := map[string]bool{}
	for _, d := range docs {
		var body keyBody
		if d.Revoked || d.Tombstone || json.Unmarshal(d.Body, &body) != nil || body.Config != self {
			continue
		}
		k.mu.RLock()
		e := k.byID[body.ID]
		k.mu.RUnlock()
		if e != nil && e.bootstrap {
			shared[body.ID] = true
			continue
		}
		if err := k.buryLocked(body); err != nil {
			return fmt.Errorf("take back an API key of the configuration: %w", err)
		}
	}
	k.mu.RLock()
	var news []keyBody
	for _, e := range k.byID {
		if e.bootstrap && !shared[e.key.ID] {
			body := keyBody{Hash: e.hash[:], Key: e.key, Config: self}
			body.Comment = "from the configuration of node " + string(self)
			news = append(news, body)
		}
	}
	k.mu.RUnlock()
	var errs []error
	for _, body := range news {
		if err := k.putLocked(body, false); err != nil {
			errs = append(errs, fmt.Errorf("share the API key of the configuration: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Unshare takes back the keys of this node's configuration, as it leaves the mesh.
func (k *Keys) Unshare(self boxed.NodeID) error {
	k.writing.Lock()
	defer k.writing.Unlock()
	docs, err := k.cfg.Documents.Documents(KeyKind)
	if err != nil {
		return err
	}
	for _, d := range docs {
		var body keyBody
		if d.Revoked || d.Tombstone || json.Unmarshal(d.Body, &body) != nil || body.Config != self {
			continue
		}
		if err := k.buryLocked(body); err != nil {
			return fmt.Errorf("take back an API key of the configuration: %w", err)
		}
	}
	return nil
}

// buryLocked takes a key back that may be given again: a revocation is for ever.
func (k *Keys) buryLocked(body keyBody) error {
	return k.storeLocked(body, func(d *boxed.Document) { d.Tombstone = true })
}

// putLocked signs and stores a key, and has it in force when it returns.
func (k *Keys) putLocked(body keyBody, revoked bool) error {
	return k.storeLocked(body, func(d *boxed.Document) { d.Revoked = revoked })
}

func (k *Keys) storeLocked(body keyBody, change func(*boxed.Document)) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if err := k.cfg.MayWrite(); err != nil && body.Config == "" {
		return err
	}
	if err := k.cfg.put(KeyKind, body.name(), raw, change); err != nil {
		return err
	}
	return k.reload()
}

// ValidOwner checks the name of an owner.
func ValidOwner(owner string) error { return keyValidOwner(owner, boxed.RoleUser) }

func keyValidOwner(owner string, role boxed.Role) error {
	if owner == "" || len(owner) > keyMaxOwner || owner == "*" || !keyVisible(owner) {
		return boxed.Errorf(boxed.CodeInvalid, "an owner is 1 to %d visible characters, and not \"*\"", keyMaxOwner).WithField("owner")
	}
	if role != boxed.RoleUser && role != boxed.RoleAdmin {
		return boxed.Errorf(boxed.CodeInvalid, "a role is %q or %q", boxed.RoleUser, boxed.RoleAdmin).WithField("role")
	}
	return nil
}

func keyClip(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "…"
	}
	return s
}
