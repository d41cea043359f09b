package node

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// KeyKind is the kind of the documents that API keys are.
const KeyKind = "key"

// Form of an API key: the prefix, so that scanners for leaked secrets find it,
// and 256 random bits.
const (
	keyPrefix       = "boxed_"
	keyRandomLen    = 52 // base32 characters
	keyIDLen        = 12
	keyMinBootstrap = 32 // of a secret that an operator made himself
	keyMaxSecret    = 256
)

// keySweep is how often expired keys end their streams, and how soon at the
// latest a revocation on another node is seen here. A revocation on this node
// is seen at once.
const keySweep = time.Second

// KeysDocuments is what Keys needs of the store.
type KeysDocuments interface {
	PutDocument(boxed.Document) (bool, error)
	Documents(kind string) ([]boxed.Document, error)
	DocumentsChanged() <-chan struct{}
}

// KeysConfig is what Keys need.
type KeysConfig struct {
	Documents KeysDocuments
	Signer    ed25519.PrivateKey // the node's, which signs the keys made here
	Clock     *boxed.Clock       // the store's
	// Trusted reports whether an author's documents may be keys. Nil trusts the
	// Signer alone.
	Trusted func(author ed25519.PublicKey) bool
	// MayWrite refuses keys that other nodes would not take from this one. Nil: none.
	MayWrite func() error
	Now      func() time.Time // nil: time.Now
	Logger   *slog.Logger     // nil discards
}

// Keys are the API keys that this node accepts: those in the store's documents,
// which boxedctl key makes and revokes, and those of the configuration (see
// Bootstrap), which only live in memory. It is safe for concurrent use.
//
// A key is stored as the SHA-256 of its secret. A slow hash exists to make
// guessing a password dear; nobody guesses 256 random bits, and a slow hash on
// every request would only be a way to keep the node busy.
type Keys struct {
	cfg KeysConfig

	// Both are held across I/O: writing while a document is made and stored, and
	// loading so that what was read later is installed later.
	writing, loading sync.Mutex

	mu     sync.RWMutex
	byHash map[[sha256.Size]byte]*keyEntry
	byID   map[string]*keyEntry
}

var _ boxed.Admin = (*Keys)(nil)

// keyEntry is immutable but for ended.
type keyEntry struct {
	key       boxed.Key
	hash      [sha256.Size]byte
	bootstrap bool          // from this node's configuration
	config    boxed.NodeID  // from another's
	ended     chan struct{} // closed when the key is revoked or has expired; the same for all entries of one ID
}

// keyBody is what the document of a key says.
type keyBody struct {
	Hash []byte `json:"hash"` // SHA-256 of the secret
	boxed.Key
	// Config is the node of whose configuration it is, shared with the mesh.
	Config boxed.NodeID `json:"config,omitempty"`
}

// name is the key of its document. Several nodes may have one API key in their
// configurations, and each shares and takes back its own.
func (b *keyBody) name() string {
	if b.Config != "" {
		return b.ID + "@" + string(b.Config)
	}
	return b.ID
}

// NewKeys reads the keys from the documents.
func NewKeys(cfg KeysConfig) (*Keys, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	k := &Keys{cfg: cfg, byHash: map[[sha256.Size]byte]*keyEntry{}, byID: map[string]*keyEntry{}}
	return k, k.reload()
}

// complete checks the configuration, and fills in what it leaves out.
func (cfg *KeysConfig) complete() error {
	if cfg.Documents == nil || len(cfg.Signer) != ed25519.PrivateKeySize || cfg.Clock == nil {
		return errors.New("keys: Documents, Signer and Clock are required")
	}
	if cfg.Trusted == nil {
		own := cfg.Signer.Public().(ed25519.PublicKey)
		cfg.Trusted = func(author ed25519.PublicKey) bool { return own.Equal(author) }
	}
	if cfg.MayWrite == nil {
		cfg.MayWrite = func() error { return nil }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// put signs and stores a document, as change makes it.
func (cfg *KeysConfig) put(kind, key string, body json.RawMessage, change func(*boxed.Document)) error {
	d := boxed.Document{Kind: kind, Key: key, Stamp: cfg.Clock.Next(cfg.Now()), Body: body}
	change(&d)
	d.Sign(cfg.Signer)
	switch took, err := cfg.Documents.PutDocument(d); {
	case err != nil:
		return err
	case !took:
		return boxed.Errorf(boxed.CodeConflict, "another node changed this key at the same time; try again")
	}
	return nil
}

// Run ends the streams of keys that expire, and takes in keys that other nodes
// made or revoked, until ctx ends.
func (k *Keys) Run(ctx context.Context) error {
	tick := time.NewTicker(keySweep)
	defer tick.Stop()
	for {
		changed := k.cfg.Documents.DocumentsChanged()
		if err := k.reload(); err != nil {
			k.cfg.Logger.Error("read the API keys", "err", err)
		}
		for wait := true; wait; {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
				wait = false
			case <-tick.C:
				k.sweep()
			}
		}
	}
}

// Authenticate finds whose key the secret is. It takes about a microsecond,
// however many keys there are. Errors: unauthenticated, with a message that
// does not tell a wrong key from none.
func (k *Keys) Authenticate(_ context.Context, secret string) (boxed.Principal, error) {
	if secret == "" || len(secret) > keyMaxSecret {
		return boxed.Principal{}, keyErrUnknown()
	}
	hash := sha256.Sum256([]byte(secret))
	k.mu.RLock()
	e := k.byHash[hash]
	k.mu.RUnlock()
	// The look-up is by a hash, of which a stranger can choose no bit without
	// trying, so its time tells nothing of a secret; what decides takes the same
	// time always.
	if e == nil || subtle.ConstantTimeCompare(e.hash[:], hash[:]) != 1 {
		return boxed.Principal{}, keyErrUnknown()
	}
	if !e.key.RevokedAt.IsZero() {
		return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated, "this API key was revoked; ask for a new one")
	}
	if e.expired(k.cfg.Now()) {
		return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated, "this API key has expired; ask for a new one")
	}
	return boxed.Principal{Owner: e.key.Owner, Role: e.key.Role, Key: e.key.ID}, nil
}

func keyErrUnknown() error {
	return boxed.Errorf(boxed.CodeUnauthenticated, "no valid API key; send it as `Authorization: Bearer boxed_…`")
}

func (e *keyEntry) expired(now time.Time) bool {
	return !e.key.ExpiresAt.IsZero() && !now.Before(e.key.ExpiresAt)
}

// Watch returns a channel that is closed when the key is revoked or expires, or
// at once if it is not valid now. stop says that the caller no longer looks.
func (k *Keys) Watch(keyID string) (done <-chan struct{}, stop func()) {
	k.mu.RLock()
	e := k.byID[keyID]
	k.mu.RUnlock()
	if e == nil {
		closed := make(chan struct{})
		close(closed)
		return closed, func() {}
	}
	return e.ended, func() {} // all who watch one key share its channel
}

// Bootstrap accepts a secret from the configuration for as long as the node
// runs, and returns its ID, which is the same at each start. Errors: invalid
// (too short to be a secret).
func (k *Keys) Bootstrap(secret, owner string, role boxed.Role) (keyID string, err error) {
	if !strings.HasPrefix(secret, keyPrefix) && len(secret) < keyMinBootstrap ||
		strings.HasPrefix(secret, keyPrefix) && !keyValidSecret(secret) || len(secret) > keyMaxSecret || !keyVisible(secret) {
		return "", boxed.Errorf(boxed.CodeInvalid, "the API key of the configuration is not one; make it with `boxed-node key generate`, or use %d to %d visible characters that nobody can guess", keyMinBootstrap, keyMaxSecret)
	}
	if err := keyValidOwner(owner, role); err != nil {
		return "", err
	}
	hash := sha256.Sum256([]byte(secret))
	// Not the hash that is compared: an ID is shown to everybody who lists keys.
	idHash := sha256.Sum256(append([]byte("boxed key id\n"), hash[:]...))
	e := &keyEntry{
		key: boxed.Key{
			ID: fmt.Sprintf("config-%x", idHash[:4]), Owner: owner, Role: role, Comment: "from the node's configuration", CreatedAt: k.cfg.Now().UTC(),
		},
		hash: hash, bootstrap: true, ended: make(chan struct{}),
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.byHash[hash], k.byID[e.key.ID] = e, e
	return e.key.ID, nil
}

// NewKeySecret makes the secret of an API key.
func NewKeySecret() string { return keyPrefix + boxed.NewToken(keyRandomLen) }

func keyValidSecret(s string) bool {
	random, ok := strings.CutPrefix(s, keyPrefix)
	return ok && len(random) == keyRandomLen && strings.Trim(random, "abcdefghijklmnopqrstuvwxyz234567") == ""
}

func keyVisible(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// Reload reads the keys again after documents were dropped.
func (k *Keys) Reload() error { return k.reload() }

// reload makes the index from the documents.
func (k *Keys) reload() error {
	k.loading.Lock()
	defer k.loading.Unlock()
	docs, err := k.cfg.Documents.Documents(KeyKind)
	if err != nil {
		return fmt.Errorf("read the API keys: %w", err)
	}
	var entries []*keyEntry
	for _, d := range docs {
		if d.Tombstone || !k.cfg.Trusted(d.Author) {
			continue
		}
		var body keyBody
		if err := json.Unmarshal(d.Body, &body); err != nil || len(body.Hash) != sha256.Size || body.name() != d.Key {
			k.cfg.Logger.Error("an API key cannot be read", "key", d.Key, "err", err)
			continue
		}
		if d.Revoked && body.RevokedAt.IsZero() {
			body.RevokedAt = time.UnixMilli(d.Stamp.WallMS).UTC()
		}
		entries = append(entries, &keyEntry{key: body.Key, hash: [sha256.Size]byte(body.Hash), config: body.Config})
	}
	k.install(entries)
	return nil
}

// install replaces what came from documents.
func (k *Keys) install(entries []*keyEntry) {
	now := k.cfg.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.byID
	k.byHash, k.byID = map[[sha256.Size]byte]*keyEntry{}, map[string]*keyEntry{}
	for id, e := range old {
		if e.bootstrap {
			k.byHash[e.hash], k.byID[id] = e, e
		}
	}
	for _, e := range entries {
		before := old[e.key.ID]
		if before != nil && before.bootstrap {
			continue // what others have of this node's own
		}
		if have := k.byID[e.key.ID]; have != nil && have.key.RevokedAt.IsZero() && !e.key.RevokedAt.IsZero() {
			continue // another node's configuration still has it
		}
		if before != nil {
			e.ended = before.ended
		} else {
			e.ended = make(chan struct{})
		}
		k.byHash[e.hash], k.byID[e.key.ID] = e, e
	}
	for id, e := range old {
		if k.byID[id] == nil { // deleted
			e.endLocked()
		}
	}
	k.endLocked(now)
}

// sweep ends the streams of keys that have expired.
func (k *Keys) sweep() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endLocked(k.cfg.Now())
}

func (k *Keys) endLocked(now time.Time) {
	for _, e := range k.byID {
		if !e.key.RevokedAt.IsZero() || e.expired(now) {
			e.endLocked()
		}
	}
}

func (e *keyEntry) endLocked() {
	select {
	case <-e.ended:
	default:
		close(e.ended)
	}
}

// list is every key, newest first.
func (k *Keys) list(owner string) []boxed.Key {
	k.mu.RLock()
	defer k.mu.RUnlock()
	keys := []boxed.Key{}
	for _, e := range k.byID {
		if owner == "" || e.key.Owner == owner {
			keys = append(keys, e.key)
		}
	}
	slices.SortFunc(keys, func(a, b boxed.Key) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return keys
}
