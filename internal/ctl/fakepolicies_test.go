//go:build linux

package ctl

import (
	"context"
	"slices"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

func (n *fakeNode) ListProfiles(context.Context) ([]boxed.EgressProfile, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append(egress.ReadyProfiles(), n.egress.profiles...), nil
}

func (n *fakeNode) GetProfile(_ context.Context, name string) (*boxed.EgressProfile, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.profileLocked(name)
}

func (n *fakeNode) ApplyProfile(_ context.Context, text []byte, dry bool) (*boxed.EgressChange, error) {
	p, err := egress.ParseProfile(text)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	i := slices.IndexFunc(n.egress.profiles, func(old boxed.EgressProfile) bool { return old.Name == p.Name })
	var old *boxed.EgressProfile
	if i >= 0 {
		old = &n.egress.profiles[i]
	}
	change := &boxed.EgressChange{Profile: p, Applied: !dry}
	change.Widened, change.Narrowed = egress.Diff(old, p)
	switch {
	case dry:
	case old != nil:
		n.egress.profiles[i] = *p
	default:
		n.egress.profiles = append(n.egress.profiles, *p)
	}
	return change, nil
}

func (n *fakeNode) DeleteProfile(_ context.Context, name string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	p, err := n.profileLocked(name)
	if err == nil && p.Ready {
		err = boxed.Errorf(boxed.CodeForbidden, "%q is there on every node; apply another under its name to replace it", name).WithField("profile")
	}
	n.egress.profiles = slices.DeleteFunc(n.egress.profiles, func(p boxed.EgressProfile) bool { return p.Name == name })
	return err
}

func (n *fakeNode) ListSecrets(context.Context) ([]boxed.Secret, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.egress.secrets), nil
}

func (n *fakeNode) SetSecret(ctx context.Context, req boxed.SecretRequest) (*boxed.Secret, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := req.Secret
	s.Preset, s.Owner, s.Source = firstOf(s.Preset, "generic"), firstOf(s.Owner, boxed.PrincipalFrom(ctx).Owner), firstOf(s.Source, "value")
	old := n.secretLocked(req.Name)
	if old != nil {
		s.Preset, s.Version = firstOf(req.Preset, old.Preset), old.Version
		if s.Hosts == nil {
			s.Hosts = old.Hosts
		}
	}
	if err := egress.CheckSecret(s); err != nil {
		return nil, err
	}
	if req.Value != "" {
		if err := egress.CheckValue(s.Preset, req.Value); err != nil {
			return nil, err
		}
	}
	s.Version, s.Here, s.Nodes, s.UpdatedAt = s.Version+1, true, []boxed.NodeID{fakeNodeID}, time.Now().UTC()
	if s.All {
		s.Nodes = append(s.Nodes, fakeCellar)
	}
	if s.HeldBy != "" {
		s.Nodes, s.Here = []boxed.NodeID{s.HeldBy}, s.HeldBy == fakeNodeID
	}
	if old != nil {
		*old = s
	} else {
		n.egress.secrets = append(n.egress.secrets, s)
	}
	return &s, nil
}

func (n *fakeNode) RevokeSecret(_ context.Context, name string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.secretLocked(name)
	if s == nil {
		return boxed.Errorf(boxed.CodeNotFound, "there is no secret %q", name).WithField("secret")
	}
	s.RevokedAt = time.Now().UTC()
	return nil
}

func (n *fakeNode) Freeze(ctx context.Context, f boxed.EgressFreeze) (*boxed.EgressFreeze, error) {
	who := boxed.PrincipalFrom(ctx)
	if (f.All || f.Owner != "" && f.Owner != who.Owner) && !who.Admin() {
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin freezes others' sandboxes")
	}
	if !f.All && f.Owner == "" {
		f.Owner = who.Owner
	}
	f.ID, f.By, f.At = boxed.NewToken(10), who.Owner, time.Now().UTC()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.egress.freezes = append(n.egress.freezes, f)
	return &f, nil
}

func (n *fakeNode) Freezes(context.Context) ([]boxed.EgressFreeze, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.egress.freezes), nil
}

func (n *fakeNode) Thaw(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := len(n.egress.freezes)
	n.egress.freezes = slices.DeleteFunc(n.egress.freezes, func(f boxed.EgressFreeze) bool { return f.ID == id })
	if len(n.egress.freezes) == before {
		return boxed.Errorf(boxed.CodeNotFound, "there is no freeze %q", id).WithField("freeze")
	}
	return nil
}
