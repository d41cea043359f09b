package node

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// caller is who asks, if anybody is known to.
func caller(ctx context.Context) (boxed.Principal, error) {
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return who, errNobody()
	}
	return who, nil
}

// ownedName reads a name of the caller's, or for admins OWNER/NAME.
func ownedName(who boxed.Principal, name string) (owner, bare string) {
	if owner, bare, ok := strings.Cut(name, "/"); ok && who.Admin() {
		return owner, bare
	}
	return who.Owner, name
}

// ListProfiles are those that the caller may name, and every one for admins.
func (p *Policies) ListProfiles(ctx context.Context) ([]boxed.EgressProfile, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	list := egress.ReadyProfiles()
	p.mu.RLock()
	for _, e := range p.profiles {
		if e.Owner == "" || e.Owner == who.Owner || who.Admin() {
			list = append(list, e)
		}
	}
	p.mu.RUnlock()
	slices.SortFunc(list, func(a, b boxed.EgressProfile) int {
		return cmp.Or(strings.Compare(a.Owner, b.Owner), strings.Compare(a.Name, b.Name))
	})
	return list, nil
}

// GetProfile finds the caller's own, the operator's, or a ready one.
func (p *Policies) GetProfile(ctx context.Context, name string) (*boxed.EgressProfile, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	if e := p.profile(ownedName(who, name)); e != nil {
		return e, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no egress profile %q", keyClip(name)).WithField("profile")
}

// profile finds an owner's, the operator's, or a ready one.
func (p *Policies) profile(owner, name string) *boxed.EgressProfile {
	p.mu.RLock()
	list := append(egress.ReadyProfiles(), p.profiles...)
	p.mu.RUnlock()
	var found *boxed.EgressProfile
	for i := range list {
		if e := &list[i]; e.Name == name && (e.Owner == owner || e.Owner == "" && (found == nil || found.Owner == "")) {
			found = e
		}
	}
	return found
}

// ApplyProfile takes a profile as a person writes it. Errors: invalid, forbidden, quota.
func (p *Policies) ApplyProfile(ctx context.Context, text []byte, dry bool) (*boxed.EgressChange, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	profile, err := egress.ParseProfile(text)
	if err != nil {
		return nil, err
	}
	switch {
	case profile.Owner != "" && profile.Owner != who.Owner && !who.Admin():
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin applies another owner's profile").WithField("owner")
	case profile.Owner == "" && !who.Admin():
		profile.Owner = who.Owner
	}
	if profile.Owner != "" {
		if err := ValidOwner(profile.Owner); err != nil {
			return nil, err
		}
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	var old *boxed.EgressProfile
	count := 0
	p.mu.RLock()
	for i := range p.profiles {
		if e := p.profiles[i]; e.Owner == profile.Owner {
			if count++; e.Name == profile.Name {
				old = &e
			}
		}
	}
	p.mu.RUnlock()
	if old == nil && count >= maxProfiles && !who.Admin() {
		return nil, boxed.Errorf(boxed.CodeQuota, "you have %d egress profiles already; delete one: boxedctl egress profile rm", count).With("of", "egress profiles")
	}
	if old == nil { // it takes the place of the operator's, or of a ready one
		old = p.profile(profile.Owner, profile.Name)
	}
	change := &boxed.EgressChange{Profile: profile}
	change.Widened, change.Narrowed = egress.Diff(old, profile)
	if dry {
		return change, nil
	}
	if err := p.put(ProfileKind, profile.Owner+"/"+profile.Name, profile, func(*boxed.Document) {}); err != nil {
		return nil, err
	}
	change.Applied = true
	p.cfg.Logger.Info("egress profile applied", "profile", profile.Name, "owner", profile.Owner, "by", who.Owner, "widened", change.Widened, "narrowed", change.Narrowed)
	return change, nil
}

// DeleteProfile deletes the caller's own profile, or for admins the operator's.
func (p *Policies) DeleteProfile(ctx context.Context, name string) error {
	who, err := caller(ctx)
	if err != nil {
		return err
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	found := p.profile(ownedName(who, name))
	switch {
	case found == nil:
		return boxed.Errorf(boxed.CodeNotFound, "there is no egress profile %q", keyClip(name)).WithField("profile")
	case found.Ready:
		return boxed.Errorf(boxed.CodeForbidden, "%q is there on every node; apply another under its name to replace it", keyClip(name)).WithField("profile")
	case found.Owner == "" && !who.Admin():
		return boxed.Errorf(boxed.CodeForbidden, "%q is the operator's", keyClip(name)).WithField("profile")
	}
	return p.put(ProfileKind, found.Owner+"/"+found.Name, struct{}{}, func(d *boxed.Document) { d.Tombstone = true })
}

// ListSecrets are the caller's own and those that the caller may attach.
func (p *Policies) ListSecrets(ctx context.Context) ([]boxed.Secret, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	list := []boxed.Secret{}
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, s := range p.secrets {
		own := s.Owner == who.Owner || who.Admin()
		if !own && (!slices.Contains(s.May, who.Owner) && !slices.Contains(s.May, "*") || !s.RevokedAt.IsZero()) {
			continue
		}
		shown := p.shown(s)
		if !own { // who else may is not theirs to know
			shown.May, shown.Source = nil, ""
		}
		list = append(list, shown)
	}
	slices.SortFunc(list, func(a, b boxed.Secret) int {
		return cmp.Or(strings.Compare(a.Owner, b.Owner), strings.Compare(a.Name, b.Name), a.CreatedAt.Compare(b.CreatedAt))
	})
	return list, nil
}

// shown is a secret as the caller sees it.
func (p *Policies) shown(s secretBody) boxed.Secret {
	out := s.Secret
	out.Here = out.RevokedAt.IsZero() && slices.Contains(s.Nodes, p.cfg.Node)
	return out
}

// SetSecret sets a secret or rotates it. Errors: invalid, forbidden, quota.
func (p *Policies) SetSecret(ctx context.Context, req boxed.SecretRequest) (*boxed.Secret, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	req.Owner = cmp.Or(req.Owner, who.Owner)
	if err := p.mayset(who, req); err != nil {
		return nil, err
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	old, count := p.secret(req.Owner, req.Name)
	body := secretBody{Secret: req.Secret}
	now := p.cfg.Now().UTC()
	switch {
	case old != nil:
		body = *old
		replaceSecret(&body.Secret, req.Secret)
	case count >= maxSecrets && !who.Admin():
		return nil, boxed.Errorf(boxed.CodeQuota, "%s has %d secrets already; revoke one: boxedctl secret revoke", req.Owner, count).With("of", "secrets")
	case req.Value == "" && req.Source == "":
		return nil, boxed.Errorf(boxed.CodeInvalid, "value: there is none, and the secret is new").WithField("value")
	default:
		body.ID, body.CreatedAt, body.Source = boxed.NewToken(10), now, cmp.Or(req.Source, sourceValue)
		body.Preset = cmp.Or(body.Preset, "generic")
	}
	body.Version, body.UpdatedAt, body.Here = body.Version+1, now, false
	if err := egress.CheckSecret(body.Secret); err != nil {
		return nil, err
	}
	if req.Value != "" {
		if err := egress.CheckValue(body.Preset, req.Value); err != nil {
			return nil, err
		}
	}
	if err := p.fill(&body, req); err != nil {
		return nil, err
	}
	if err := p.put(SecretKind, body.name(), body, func(*boxed.Document) {}); err != nil {
		return nil, err
	}
	p.cfg.Logger.Info("secret set", "secret", body.Name, "owner", body.Owner, "by", who.Owner, "preset", body.Preset, "version", body.Version)
	shown := p.shown(body)
	return &shown, nil
}

// mayset judges who sets a secret, and how.
func (p *Policies) mayset(who boxed.Principal, req boxed.SecretRequest) error {
	switch {
	case !boxed.ValidName(req.Name):
		return invalid("name", "a name is 1 to 40 of a-z, 0-9 and -")
	case req.Owner != who.Owner && !who.Admin():
		return boxed.Errorf(boxed.CodeForbidden, "only an admin sets another owner's secret").WithField("owner")
	case req.Source != "" && !who.Admin():
		return boxed.Errorf(boxed.CodeForbidden, "source: only an admin has a node read its own environment or run a command").WithField("source")
	case req.Source != "" && !strings.HasPrefix(req.Source, "env:") && !strings.HasPrefix(req.Source, "command:"):
		return invalid("source", "it is env:NAME or command:…")
	case req.Source != "" && !p.sources.may(req.Source):
		kind, _, _ := strings.Cut(req.Source, ":")
		return boxed.Errorf(boxed.CodeForbidden, "source: this node reads no secrets by %s; its operator allows it with egress.sources: [%s]", kind, kind).WithField("source")
	case req.Source != "" && (req.Value != "" || req.All || req.HeldBy != ""):
		return invalid("source", "it is read on this node, which excludes a value, all and held_by")
	case req.All && req.HeldBy != "":
		return invalid("held_by", "it is held by one node, or sealed to all")
	}
	if err := ValidOwner(req.Owner); err != nil {
		return err
	}
	for _, o := range req.May {
		if o == "*" && !who.Admin() { // whose name then stands for it with everybody
			return boxed.Errorf(boxed.CodeForbidden, "may: only an admin shares a secret with everybody; name owners").WithField("may")
		}
		if o != "*" && ValidOwner(o) != nil {
			return invalid("may", "%.80q is no owner", o)
		}
	}
	return nil
}

// replaceSecret changes what a request names.
func replaceSecret(s *boxed.Secret, req boxed.Secret) {
	if req.Preset != "" {
		s.Preset = req.Preset
	}
	for _, f := range []struct{ have, want *[]string }{
		{&s.Hosts, &req.Hosts},
		{&s.Paths, &req.Paths},
		{&s.Methods, &req.Methods},
		{&s.Env, &req.Env},
		{&s.May, &req.May},
	} {
		if *f.want != nil {
			*f.have = *f.want
		}
	}
	s.Slot, s.Author = cmp.Or(req.Slot, s.Slot), cmp.Or(req.Author, s.Author)
	if req.All {
		s.All, s.HeldBy = true, ""
	}
	if req.HeldBy != "" {
		s.All, s.HeldBy = false, req.HeldBy
	}
	if req.Source != "" {
		s.Source = req.Source
	}
}

// fill gives the secret its value, sealed to the nodes that may use it.
func (p *Policies) fill(b *secretBody, req boxed.SecretRequest) error {
	if b.Source != sourceValue && req.Value == "" {
		b.Sealed, b.Keys, b.Nodes = nil, nil, []boxed.NodeID{p.cfg.Node}
		return nil
	}
	value := req.Value
	if value == "" { // the rest changes, and who has it may too
		if !req.All && req.HeldBy == "" {
			return nil
		}
		read := p.reader(*b)
		if read == nil {
			return boxed.Errorf(boxed.CodeInvalid, "value: this node does not have the secret, so it cannot give it to others; give the value").WithField("value")
		}
		value = read().Reveal()
	}
	b.Source = sourceValue
	to, err := p.recipients(b)
	if err != nil {
		return err
	}
	return p.seal(b, value, to)
}

// recipients are the nodes that a secret is sealed to.
func (p *Policies) recipients(b *secretBody) ([]boxed.NodeSummary, error) {
	me := boxed.NodeSummary{ID: p.cfg.Node, Key: p.cfg.Signer.Public().(ed25519.PublicKey)}
	var others []boxed.NodeSummary
	if p.cfg.Nodes != nil {
		for _, n := range p.cfg.Nodes() {
			if n.ID != me.ID && len(n.Key) == ed25519.PublicKeySize {
				others = append(others, n)
			}
		}
	}
	switch {
	case b.All:
		return append(others, me), nil
	case b.HeldBy != "":
		for _, n := range append(others, me) {
			if n.ID == b.HeldBy || n.Name == string(b.HeldBy) {
				b.HeldBy = n.ID
				return []boxed.NodeSummary{n}, nil
			}
		}
		return nil, boxed.Errorf(boxed.CodeInvalid, "held_by: no node %q is known, or its key is not yet", keyClip(string(b.HeldBy))).WithField("held_by")
	}
	return []boxed.NodeSummary{me}, nil
}

// secret finds an owner's that is not revoked, and counts those there are.
func (p *Policies) secret(owner, name string) (found *secretBody, count int) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for i := range p.secrets {
		if s := p.secrets[i]; s.Owner == owner && s.RevokedAt.IsZero() {
			if count++; s.Name == name {
				found = &s
			}
		}
	}
	return found, count
}

// RevokeSecret makes the caller's own secret worthless for ever.
func (p *Policies) RevokeSecret(ctx context.Context, name string) error {
	who, err := caller(ctx)
	if err != nil {
		return err
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	owner, bare := ownedName(who, name)
	s, _ := p.secret(owner, bare)
	if s == nil {
		return boxed.Errorf(boxed.CodeNotFound, "there is no secret %q", keyClip(name)).WithField("secret")
	}
	s.RevokedAt, s.Sealed, s.Keys, s.Nodes = p.cfg.Now().UTC(), nil, nil, nil
	p.cfg.Logger.Info("secret revoked", "secret", s.Name, "owner", s.Owner, "by", who.Owner)
	return p.put(SecretKind, s.name(), s, func(d *boxed.Document) { d.Revoked = true })
}

// Freeze shuts the egress of sandboxes on all nodes. Errors: forbidden, quota.
func (p *Policies) Freeze(ctx context.Context, f boxed.EgressFreeze) (*boxed.EgressFreeze, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	if (f.All || f.Owner != "" && f.Owner != who.Owner) && !who.Admin() {
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin freezes others' sandboxes")
	}
	if err := checkLabels(f.Labels); err != nil {
		return nil, err
	}
	if f.Owner == "" && !f.All {
		f.Owner = who.Owner
		if who.Admin() && len(f.Labels) > 0 { // of whomever
			f.All, f.Owner = true, ""
		}
	}
	f.ID, f.By, f.At = boxed.NewToken(10), who.Owner, p.cfg.Now().UTC()
	p.writing.Lock()
	defer p.writing.Unlock()
	n := 0
	p.mu.RLock()
	for _, have := range p.freezes {
		if have.By == who.Owner {
			n++
		}
	}
	p.mu.RUnlock()
	if n >= maxFreezes && !who.Admin() { // who has many keeps no admin from one more
		return nil, boxed.Errorf(boxed.CodeQuota, "%s has %d freezes already; thaw one: boxedctl egress thaw", who.Owner, n).With("of", "freezes")
	}
	p.cfg.Logger.Warn("egress frozen", "freeze", f.ID, "by", who.Owner, "owner", f.Owner, "all", f.All)
	return &f, p.put(FreezeKind, f.ID, f, func(*boxed.Document) {})
}

// Freezes are those that the caller may thaw.
func (p *Policies) Freezes(ctx context.Context) ([]boxed.EgressFreeze, error) {
	who, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	list := []boxed.EgressFreeze{}
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, f := range p.freezes {
		if maythaw(who, f) {
			list = append(list, f)
		}
	}
	return list, nil
}

// maythaw: what an admin froze, an admin thaws.
func maythaw(who boxed.Principal, f boxed.EgressFreeze) bool {
	return who.Admin() || !f.All && f.Owner == who.Owner && f.By == who.Owner
}

// Thaw opens what was frozen.
func (p *Policies) Thaw(ctx context.Context, id string) error {
	who, err := caller(ctx)
	if err != nil {
		return err
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	p.mu.RLock()
	i := slices.IndexFunc(p.freezes, func(f boxed.EgressFreeze) bool { return f.ID == id && maythaw(who, f) })
	p.mu.RUnlock()
	if i < 0 {
		return boxed.Errorf(boxed.CodeNotFound, "there is no freeze %q", keyClip(id)).WithField("freeze")
	}
	return p.put(FreezeKind, id, struct{}{}, func(d *boxed.Document) { d.Tombstone = true })
}
