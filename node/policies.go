package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
	"github.com/boxed-mesh/boxed/transport"
)

// Kinds of the documents that profiles, secrets and freezes are.
const (
	ProfileKind = "egress.profile"
	SecretKind  = "egress.secret"
	FreezeKind  = "egress.freeze"
)

// Bounds of an owner's documents.
const (
	maxProfiles = 64
	maxSecrets  = 64
	maxFreezes  = 64
)

// PoliciesConfig is what Policies need besides the documents.
type PoliciesConfig struct {
	KeysConfig
	Node   boxed.NodeID
	Keeper *egress.Keeper
	// Freeze puts freezes in force on this node.
	Freeze func(which func(id boxed.ID, owner string, labels map[string]string) bool)
	// Nodes are all that are known, with their keys.
	Nodes func() []boxed.NodeSummary
	// Sources are the kinds of values that admins may have this node read; see
	// [CheckSourceKind].
	Sources []string
}

// Policies are profiles, secrets and freezes, in the store's documents, and put in force on
// this node as they come. It is safe for concurrent use.
type Policies struct {
	cfg     PoliciesConfig
	sources sources

	writing sync.Mutex // held across I/O, while a document is made and stored
	loading sync.Mutex // so that what was read later is installed later
	seen    string     // what was installed last

	mu       sync.RWMutex
	profiles []boxed.EgressProfile
	secrets  []secretBody
	freezes  []boxed.EgressFreeze
}

var _ boxed.Policies = (*Policies)(nil)

// secretBody is what the document of a secret says. The value is encrypted once, with a key
// that is sealed to each node that may use it.
type secretBody struct {
	ID string `json:"id"`
	boxed.Secret
	Sealed []byte                  `json:"sealed,omitempty"` // XChaCha20-Poly1305, the nonce first
	Keys   map[boxed.NodeID][]byte `json:"keys,omitempty"`
	own    bool                    // this node wrote it
}

// name is the key of its document. A secret that was revoked is never valid again; one that
// is set anew under its name is another document.
func (b *secretBody) name() string { return b.Owner + "/" + b.Name + "/" + b.ID }

// bound is what the value belongs to.
func (b *secretBody) bound() []byte { return []byte(SecretKind + "\x00" + b.name()) }

// NewPolicies reads the documents.
func NewPolicies(cfg PoliciesConfig) (*Policies, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	p := &Policies{cfg: cfg, sources: sources{allowed: cfg.Sources, log: cfg.Logger, now: cfg.Now}}
	return p, p.reload()
}

// Run takes in what other nodes changed, until ctx ends.
func (p *Policies) Run(ctx context.Context) error {
	for {
		changed := p.cfg.Documents.DocumentsChanged()
		if err := p.reload(); err != nil {
			p.cfg.Logger.Error("read the egress policies", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// Reload reads the documents again after some were dropped.
func (p *Policies) Reload() error { return p.reload() }

// reload reads the documents and puts them in force, if any is another than before.
func (p *Policies) reload() error {
	p.loading.Lock()
	defer p.loading.Unlock()
	var stamp strings.Builder
	kinds := map[string][]boxed.Document{}
	for _, kind := range []string{ProfileKind, SecretKind, FreezeKind} {
		docs, err := p.cfg.Documents.Documents(kind)
		if err != nil {
			return fmt.Errorf("read the %s documents: %w", kind, err)
		}
		for _, d := range docs {
			if p.cfg.Trusted(d.Author) {
				kinds[kind] = append(kinds[kind], d)
				fmt.Fprintf(&stamp, "%s %s %d.%d %x %v %v\n", kind, d.Key, d.Stamp.WallMS, d.Stamp.Counter, d.Author, d.Tombstone, d.Revoked)
			}
		}
	}
	if p.seen == stamp.String() && p.seen != "" {
		return nil
	}
	profiles, secrets, freezes := p.readProfiles(kinds[ProfileKind]), p.readSecrets(kinds[SecretKind]), p.readFreezes(kinds[FreezeKind])
	p.mu.Lock()
	p.profiles, p.secrets, p.freezes = profiles, secrets, freezes
	p.mu.Unlock()
	p.seen = stamp.String()
	p.install()
	return nil
}

// install puts what was read in force. Freezes come first: they shut.
func (p *Policies) install() {
	p.mu.RLock()
	profiles, secrets, freezes := slices.Clone(p.profiles), slices.Clone(p.secrets), slices.Clone(p.freezes)
	p.mu.RUnlock()
	if p.cfg.Freeze != nil {
		if len(freezes) == 0 {
			p.cfg.Freeze(nil)
		} else {
			p.cfg.Freeze(func(_ boxed.ID, owner string, labels map[string]string) bool {
				return slices.ContainsFunc(freezes, func(f boxed.EgressFreeze) bool { return frozen(f, owner, labels) })
			})
		}
	}
	var held []egress.HeldSecret
	var used []string
	for _, s := range secrets {
		h := egress.HeldSecret{Secret: s.Secret}
		if s.RevokedAt.IsZero() {
			h.Read = p.reader(s)
			used = append(used, s.Source)
		}
		held = append(held, h)
	}
	p.sources.settle(used)
	p.cfg.Keeper.SetSecrets(held)
	p.cfg.Keeper.SetProfiles(profiles)
}

// frozen reports whether a freeze is for a sandbox.
func frozen(f boxed.EgressFreeze, owner string, labels map[string]string) bool {
	if !f.All && f.Owner != owner {
		return false
	}
	for k, v := range f.Labels {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

func (p *Policies) readProfiles(docs []boxed.Document) (list []boxed.EgressProfile) {
	for _, d := range docs {
		if d.Tombstone || d.Revoked {
			continue
		}
		var body boxed.EgressProfile
		err := json.Unmarshal(d.Body, &body)
		var profile *boxed.EgressProfile
		if err == nil {
			profile, err = egress.CheckProfile(body)
		}
		if err != nil || profile.Owner+"/"+profile.Name != d.Key {
			p.cfg.Logger.Error("an egress profile cannot be read", "profile", d.Key, "err", err)
			continue
		}
		profile.UpdatedAt = time.UnixMilli(d.Stamp.WallMS).UTC()
		list = append(list, *profile)
	}
	return list
}

func (p *Policies) readSecrets(docs []boxed.Document) (list []secretBody) {
	for _, d := range docs {
		if d.Tombstone {
			continue
		}
		var body secretBody
		if err := json.Unmarshal(d.Body, &body); err != nil || body.name() != d.Key || ValidOwner(body.Owner) != nil || egress.CheckSecret(body.Secret) != nil {
			p.cfg.Logger.Error("a secret cannot be read", "secret", d.Key, "err", err)
			continue
		}
		if d.Revoked && body.RevokedAt.IsZero() {
			body.RevokedAt = time.UnixMilli(d.Stamp.WallMS).UTC()
		}
		body.own = d.Author.Equal(p.cfg.Signer.Public())
		list = append(list, body)
	}
	// Where two nodes made one under the same name, the newer counts.
	slices.SortFunc(list, func(a, b secretBody) int {
		return cmp.Or(a.UpdatedAt.Compare(b.UpdatedAt), strings.Compare(a.ID, b.ID))
	})
	return list
}

func (p *Policies) readFreezes(docs []boxed.Document) (list []boxed.EgressFreeze) {
	for _, d := range docs {
		if d.Tombstone || d.Revoked {
			continue
		}
		var f boxed.EgressFreeze
		if err := json.Unmarshal(d.Body, &f); err != nil || f.ID != d.Key {
			p.cfg.Logger.Error("a freeze cannot be read, and freezes all", "freeze", d.Key, "err", err)
			f = boxed.EgressFreeze{ID: d.Key, All: true}
		}
		list = append(list, f)
	}
	return list
}

// reader is how a secret's value is read on this node; nil: not at all.
func (p *Policies) reader(s secretBody) func() egress.Value {
	if s.Source != "" && s.Source != sourceValue {
		if !s.own || !slices.Contains(s.Nodes, p.cfg.Node) {
			return nil // no node has another read its environment, or run a command
		}
		return p.sources.reader(s.Source)
	}
	key := s.Keys[p.cfg.Node]
	if key == nil {
		return nil
	}
	value, err := p.open(s, key)
	if err != nil {
		p.cfg.Logger.Error("a secret that is sealed to this node cannot be opened", "secret", s.name(), "err", err)
		return nil
	}
	return func() egress.Value { return value }
}

func (p *Policies) open(s secretBody, sealedKey []byte) (egress.Value, error) {
	key, err := transport.Open(p.cfg.Signer, s.bound(), sealedKey)
	if err != nil {
		return egress.Value{}, err
	}
	sealer, err := egress.NewSealer(key)
	if err != nil {
		return egress.Value{}, err
	}
	text, err := sealer.Open(string(s.bound()), s.Sealed)
	return egress.NewValue(string(text)), err
}

// seal encrypts a value for the nodes that may use it.
func (p *Policies) seal(b *secretBody, value string, to []boxed.NodeSummary) error {
	key := make([]byte, chacha20poly1305.KeySize)
	rand.Read(key)
	sealer, err := egress.NewSealer(key)
	if err != nil {
		return err
	}
	b.Sealed, b.Keys, b.Nodes = sealer.Seal(string(b.bound()), []byte(value)), map[boxed.NodeID][]byte{}, nil
	for _, n := range to {
		if b.Keys[n.ID], err = transport.Seal(n.Key, b.bound(), key); err != nil {
			return fmt.Errorf("seal the secret to %s: %w", n.ID, err)
		}
		b.Nodes = append(b.Nodes, n.ID)
	}
	return nil
}

// put stores a document and puts it in force here.
func (p *Policies) put(kind, key string, body any, change func(*boxed.Document)) error {
	raw, err := json.Marshal(body)
	if err == nil {
		err = p.cfg.MayWrite()
	}
	if err != nil {
		return err
	}
	if len(raw) > boxed.MaxDocument {
		return boxed.Errorf(boxed.CodeTooLarge, "%d bytes, at most %d are replicated", len(raw), boxed.MaxDocument)
	}
	if err := p.cfg.put(kind, key, raw, change); err != nil {
		return fmt.Errorf("store it: %w", err)
	}
	return p.reload()
}
