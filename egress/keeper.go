package egress

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
)

// KeeperConfig configures a Keeper. Proxy and Sealer are required.
type KeeperConfig struct {
	Proxy  *Proxy
	Sealer *Sealer
	Node   boxed.NodeID
	Exits  []ExitRule // who may leave by this node
	// Default is the profile of sandboxes that name none; nil: they have no egress.
	Default  *boxed.EgressProfile
	HostDeny []Pattern
	// Ceiling bounds what owners may allow themselves; nil: any name.
	Ceiling []*Rule
	// Life is how long a sandbox may live at most; 0 is for ever.
	Life time.Duration
	// Renewed is called when a sandbox's grant has changed by itself: a secret or a
	// profile did. It must not call the Keeper. Nil: nobody is told.
	Renewed func(id boxed.ID, grant *boxed.EgressGrant)
	Log     *slog.Logger
	Now     func() time.Time
}

// Keeper makes the policies of this node's sandboxes out of profiles, secrets, and what each
// sandbox asks for, and keeps them up to date. It is what the sandbox package's Egress asks
// for. All methods are safe for concurrent use.
type Keeper struct {
	cfg KeeperConfig
	// secrets by owner/name: replaced as a whole, since they are asked for by what the lock
	// below waits for.
	secrets atomic.Pointer[map[string]*held]

	mu         sync.Mutex
	generation uint64
	hash       string
	profiles   map[string]*boxed.EgressProfile // by owner/name; the operator's have no owner
	boxes      map[boxed.ID]*boxEgress
}

// held is a secret with its value, if this node has it.
type held struct {
	boxed.Secret
	read func() Value // nil: this node has none
}

func (h *held) value() Value {
	if h.read == nil {
		return Value{}
	}
	return h.read()
}

func (h *held) key() string { return h.Owner + "/" + h.Name }

// HeldSecret is a secret, and how its value is read on this node; nil: it has none.
type HeldSecret struct {
	boxed.Secret
	Read func() Value
}

// boxEgress is what is known of one sandbox's egress.
type boxEgress struct {
	sandbox boxed.Sandbox // as it was attached
	admin   bool
	spec    boxed.EgressSpec
	state   boxState
	now     *composed
	err     error // why what is in force is not what it should be
	lost    bool  // its state cannot be read: it stays shut until it is set anew
}

// boxState is what survives a restart, sealed.
type boxState struct {
	Authority *Authority            `json:"authority,omitempty"`
	Tokens    map[string]string     `json:"tokens,omitempty"` // placeholders by owner/name of their secret
	Allowed   []boxed.EgressGranted `json:"allowed,omitempty"`
	Admin     bool                  `json:"admin,omitempty"`
	Canary    string                `json:"canary"`
}

// NewKeeper makes a Keeper.
func NewKeeper(cfg KeeperConfig) *Keeper {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	k := &Keeper{cfg: cfg, profiles: map[string]*boxed.EgressProfile{}, boxes: map[boxed.ID]*boxEgress{}}
	k.secrets.Store(&map[string]*held{})
	k.SetProfiles(nil)
	return k
}

// SetProfiles replaces all profiles but the ready ones, and applies them to what lives.
func (k *Keeper) SetProfiles(list []boxed.EgressProfile) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.profiles = map[string]*boxed.EgressProfile{}
	for _, p := range append(ReadyProfiles(), list...) {
		k.profiles[p.Owner+"/"+p.Name] = &p
	}
	k.generation++
	k.hash = hashOf(slices.Sorted(func(yield func(string) bool) {
		for key, p := range k.profiles {
			if !yield(key + " " + p.Hash) {
				return
			}
		}
	}))
	k.renewLocked()
}

// SetSecrets replaces all secrets, and applies them to what lives. Those that were revoked
// are among them: what a sandbox had of one stays refused.
func (k *Keeper) SetSecrets(list []HeldSecret) {
	secrets := map[string]*held{}
	for _, s := range list {
		h := &held{s.Secret, s.Read}
		if have := secrets[h.key()]; have == nil || h.RevokedAt.IsZero() || !have.RevokedAt.IsZero() {
			secrets[h.key()] = h
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.secrets.Store(&secrets)
	k.renewLocked()
}

// Generation and Hash say which policy is in force, so that drift between nodes shows.
func (k *Keeper) Generation() (uint64, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.generation, k.hash
}

// profileLocked finds an owner's profile, or the operator's, by name. Nil without an error
// is none.
func (k *Keeper) profileLocked(owner, name string) (*boxed.EgressProfile, error) {
	switch name {
	case "":
		for _, key := range []string{owner + "/" + DefaultProfile, "/" + DefaultProfile} {
			if p := k.profiles[key]; p != nil {
				return p, nil
			}
		}
		return k.cfg.Default, nil
	case NoProfile:
		return nil, nil
	}
	for _, key := range []string{owner + "/" + name, "/" + name} {
		if p := k.profiles[key]; p != nil {
			return p, nil
		}
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no egress profile %q; boxedctl egress profile ls shows those there are", name).WithField("egress.profile")
}

// DefaultProfile is the name of the profile of an owner's sandboxes, or of everybody's where
// it is the operator's, that name none.
const DefaultProfile = "default"

// NoProfile is the name of no profile, for who wants none of the default.
const NoProfile = "none"

// secretOf finds a secret that an owner may attach. By its name alone it is their own, or
// one that an administrator shares with everybody; another owner's is OWNER/NAME: nobody has
// others use a secret that they did not mean. What a sandbox has (pinned, placeholders by
// OWNER/NAME) it keeps, revoked or not. Nil is none. Errors: not_found, where one is shared
// that must be named so; conflict, where two are shared with everybody.
func (k *Keeper) secretOf(owner, ref string, pinned map[string]string) (*held, error) {
	cut := strings.LastIndexByte(ref, '/')
	of, name, qualified := ref[:max(cut, 0)], ref[cut+1:], cut >= 0
	var own, kept *held
	var shared, offered []*held
	secrets := *k.secrets.Load()
	for _, key := range slices.Sorted(maps.Keys(secrets)) {
		s := secrets[key]
		mine := s.Owner == owner
		if s.Name != name || qualified && s.Owner != of || !mine && !slices.Contains(s.May, owner) && !slices.Contains(s.May, "*") {
			continue
		}
		meant := mine || qualified || slices.Contains(s.May, "*")
		switch {
		case meant && pinned[key] != "":
			if kept == nil || mine {
				kept = s
			}
		case !s.RevokedAt.IsZero():
		case mine:
			own = s
		case meant:
			shared = append(shared, s)
		default:
			offered = append(offered, s)
		}
	}
	switch {
	case kept != nil:
		return kept, nil
	case own != nil:
		return own, nil
	case len(shared) > 1:
		return nil, boxed.Errorf(boxed.CodeConflict, "%s and %s both share a secret %q with everybody; say whose: %s", shared[0].Owner, shared[1].Owner, name, shared[0].key())
	case len(shared) == 1:
		return shared[0], nil
	case len(offered) > 0:
		return nil, boxed.Errorf(boxed.CodeNotFound, "you have no secret %q; %s has one that you may use as %s", name, offered[0].Owner, offered[0].key())
	}
	return nil, nil
}

// isRevoked reports whether a secret is no more.
func (k *Keeper) isRevoked(owner, name string) bool {
	s := (*k.secrets.Load())[owner+"/"+name]
	return s == nil || !s.RevokedAt.IsZero()
}

// valueOf is the value of a secret as it is now.
func (k *Keeper) valueOf(owner, name string) (Value, bool) {
	s := (*k.secrets.Load())[owner+"/"+name]
	if s == nil || !s.RevokedAt.IsZero() {
		return Value{}, false
	}
	v := s.value()
	return v, !v.Empty()
}

// Wanted reports whether a sandbox that asks for this has egress at all.
func (k *Keeper) Wanted(owner string, spec *boxed.EgressSpec) bool {
	if spec != nil && (len(spec.Allow) > 0 || len(spec.Secrets) > 0 || spec.OnDeny != "") {
		return true
	}
	if spec != nil && spec.Profile != "" {
		return spec.Profile != NoProfile
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p, _ := k.profileLocked(owner, "")
	return p != nil
}

// Homes are the nodes that a sandbox which asks for this must be on: those that its secrets
// are sealed to, where no node uses them for others. Nil is any.
func (k *Keeper) Homes(owner string, spec *boxed.EgressSpec) (nodes []boxed.NodeID) {
	if spec == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	names := make([]string, 0, len(spec.Secrets))
	for _, use := range spec.Secrets {
		names = append(names, use.Name)
	}
	if p, _ := k.profileLocked(owner, spec.Profile); p != nil {
		for _, r := range p.Rules {
			if r.Credential != "" && r.Need != boxed.CredentialOptional {
				names = append(names, r.Credential)
			}
		}
	}
	for _, name := range names {
		s, _ := k.secretOf(owner, name, nil) // an error is Check's to tell
		switch {
		case s == nil || s.HeldBy != "" || len(s.Nodes) == 0:
		case nodes == nil:
			nodes = slices.Clone(s.Nodes)
		default:
			if nodes = slices.DeleteFunc(nodes, func(id boxed.NodeID) bool { return !slices.Contains(s.Nodes, id) }); len(nodes) == 0 {
				return []boxed.NodeID{""} // none has all of them
			}
		}
	}
	return nodes
}

// Check says whether a sandbox could have this, without giving it.
func (k *Keeper) Check(owner string, spec *boxed.EgressSpec) error {
	if spec == nil {
		spec = &boxed.EgressSpec{}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	c := composing{k: k, owner: owner, admin: spec.Admin, spec: spec, tokens: map[string]string{}}
	for _, host := range spec.Allow {
		c.allow = append(c.allow, boxed.EgressGranted{Host: host, Admin: spec.Admin})
	}
	_, err := c.compose()
	return err
}

// Attach lets a sandbox out. Errors: invalid, not_found, forbidden.
func (k *Keeper) Attach(s *boxed.Sandbox, spec *boxed.EgressSpec) (*boxed.EgressGrant, error) {
	if spec == nil {
		spec = &boxed.EgressSpec{}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	b := &boxEgress{sandbox: *s, admin: spec.Admin, spec: *spec}
	b.state = boxState{Tokens: map[string]string{}, Admin: spec.Admin, Canary: "canary-" + strings.ToLower(Placeholder("", 12)) + ".invalid"}
	if old := k.boxes[s.ID]; old != nil && !old.lost { // a change of one that lives
		b.state = old.state
		b.state.Admin, b.state.Allowed, b.state.Tokens = spec.Admin, slices.Clone(old.state.Allowed), maps.Clone(old.state.Tokens)
	}
	if err := k.composeLocked(b, false); err != nil {
		return nil, err
	}
	k.boxes[s.ID] = b
	return k.grantLocked(b), nil
}

// Restore lets a sandbox of an earlier life out again, as its record says.
func (k *Keeper) Restore(s *boxed.Sandbox, g *boxed.EgressGrant) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := &boxEgress{sandbox: *s, spec: g.Spec}
	text, err := k.cfg.Sealer.Open("egress "+string(s.ID), g.State)
	if err == nil {
		err = json.Unmarshal(text, &b.state)
	}
	if err != nil { // it stays shut, and says why
		b.err, b.lost = fmt.Errorf("its egress cannot be read: %w", err), true
		k.boxes[s.ID] = b
		return b.err
	}
	b.admin = b.state.Admin
	k.boxes[s.ID] = b
	was := b.state.Authority
	if err := k.composeLocked(b, true); err != nil {
		b.err = err
		k.cfg.Log.Warn("a sandbox has no egress", "sandbox", s.ID, "err", err)
	} else if was != b.state.Authority && k.cfg.Renewed != nil { // other hosts are intercepted now
		k.cfg.Renewed(s.ID, k.grantLocked(b))
	}
	return nil
}

// composeLocked makes the policy of a sandbox and puts it in force. One that has its grant
// keeps the rules of secrets that were revoked, which then let nothing through.
func (k *Keeper) composeLocked(b *boxEgress, granted bool) error {
	now := k.cfg.Now()
	b.state.Allowed = slices.DeleteFunc(b.state.Allowed, func(a boxed.EgressGranted) bool { return !a.Until.IsZero() && !now.Before(a.Until) })
	var allow []boxed.EgressGranted
	for _, host := range b.spec.Allow {
		allow = append(allow, boxed.EgressGranted{Host: host, Admin: b.admin})
	}
	allow = append(allow, b.state.Allowed...)
	if b.state.Tokens == nil {
		b.state.Tokens = map[string]string{}
	}
	c := composing{k: k, owner: b.sandbox.Owner, admin: b.admin, spec: &b.spec, allow: allow, tokens: b.state.Tokens, granted: granted}
	out, err := c.compose()
	if err != nil {
		return err
	}
	if len(out.hosts) > 0 {
		if a := b.state.Authority; a == nil || !contains(a.Hosts, out.hosts) {
			life := cmp.Or(k.cfg.Life, 10*365*24*time.Hour)
			if b.state.Authority, err = NewAuthority(string(b.sandbox.ID), out.hosts, now, now.Add(life)); err != nil {
				return err
			}
		}
	}
	// EP1: claude-code#81572; what must be denied is, or nothing of it comes into force.
	if canary, err := ParseHost(b.state.Canary); err == nil && out.policy.denies(canary) != nil {
		return boxed.Errorf(boxed.CodeInternal, "the policy lets through what no rule names")
	}
	b.now, b.err = out, nil
	session := Session{Sandbox: b.sandbox.ID, Owner: b.sandbox.Owner, Labels: b.sandbox.Labels, Policy: out.policy, Bindings: out.bindings, Canary: b.state.Canary}
	if len(out.hosts) > 0 {
		session.CA = b.state.Authority
	}
	k.cfg.Proxy.Attach(session)
	return nil
}

func contains(all, some []string) bool {
	return !slices.ContainsFunc(some, func(s string) bool { return !slices.Contains(all, s) })
}

// renewLocked applies what has changed to all that live. What cannot be made any more is
// shut: the profile is gone, say.
func (k *Keeper) renewLocked() {
	for id, b := range k.boxes {
		if b.lost {
			continue
		}
		was := b.seen()
		if err := k.composeLocked(b, true); err != nil {
			b.err = err
			k.cfg.Proxy.Attach(Session{Sandbox: id, Owner: b.sandbox.Owner, Labels: b.sandbox.Labels, Policy: &Policy{Generation: k.generation, hostDeny: k.cfg.HostDeny}})
			k.cfg.Log.Warn("a sandbox's egress is shut", "sandbox", id, "err", err)
			continue
		}
		if was != b.seen() && k.cfg.Renewed != nil {
			k.cfg.Renewed(id, k.grantLocked(b))
		}
	}
	k.renewVisitsLocked()
}

// seen is what programs in the sandbox see of its egress, to find out whether it is another:
// a hash, for it has placeholders.
func (b *boxEgress) seen() string {
	if b.now == nil {
		return ""
	}
	return hashOf([]any{b.now.env, b.now.files, b.state.Authority})
}

// Relabel gives a sandbox its new labels, by which it may be frozen, or no more.
func (k *Keeper) Relabel(id boxed.ID, labels map[string]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.boxes[id]
	if b == nil {
		return
	}
	b.sandbox.Labels = labels
	if s := k.cfg.Proxy.session(id); s != nil {
		s.mu.Lock()
		s.labels = labels
		s.mu.Unlock()
		s.rejudge()
	}
}

// Detach shuts a sandbox. It is idempotent.
func (k *Keeper) Detach(id boxed.ID) {
	k.mu.Lock()
	delete(k.boxes, id)
	k.mu.Unlock()
	k.cfg.Proxy.Detach(id)
}

// State is Status without the rules.
func (k *Keeper) State(id boxed.ID) *boxed.EgressStatus {
	st := k.Status(id)
	st.Rules = nil
	return st
}

// Status is a sandbox's egress.
func (k *Keeper) Status(id boxed.ID) *boxed.EgressStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	st := &boxed.EgressStatus{State: boxed.EgressClosed, Generation: k.generation, Hash: k.hash}
	b := k.boxes[id]
	if b == nil {
		return st
	}
	if b.err != nil {
		st.Reason = b.err.Error()
		return st
	}
	st.State, st.Profile, st.Flags = boxed.EgressOpen, b.now.policy.Profile, b.now.flags
	st.Secrets, st.Untranslated, st.Allowed = b.now.secrets, b.now.untranslated, slices.Clone(b.state.Allowed)
	if s := k.cfg.Proxy.session(id); s != nil && k.cfg.Proxy.isFrozen(s) {
		st.State, st.Reason = boxed.EgressClosed, "frozen: boxedctl egress freezes"
		return st
	}
	for _, r := range b.now.policy.rules {
		st.Rules = append(st.Rules, r.EgressRule)
	}
	for _, r := range b.now.policy.rules {
		if r.Binding != nil && r.Binding.HeldBy == "" {
			if _, ok := r.Binding.value(); !ok {
				st.State, st.Reason = boxed.EgressDegraded, "the secret "+r.Binding.Secret+" has no value on this node, or was revoked"
			}
		}
	}
	return st
}

// maxAllowed is how many hosts are allowed at most since a sandbox was made.
const maxAllowed = 128

// Allow lets a sandbox reach one host more, for so long or (0) as long as it lives.
func (k *Keeper) Allow(id boxed.ID, host string, d time.Duration, admin bool) (*boxed.EgressGrant, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.boxes[id]
	if b == nil || b.lost {
		return nil, boxed.Errorf(boxed.CodeConflict, "the sandbox has no egress; give it one first: boxedctl egress set %s --allow %s", id, host)
	}
	rule, err := allowRule(host)
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%w", err).WithField("host")
	}
	host = rule.Pattern.String()
	if port := rule.Ports[0]; port != 443 { // one form of each, so that it replaces itself
		host = net.JoinHostPort(host, itoa(port))
	}
	old := slices.Clone(b.state.Allowed)
	a := boxed.EgressGranted{Host: host, Admin: admin}
	if d > 0 {
		a.Until = k.cfg.Now().Add(d)
	}
	b.state.Allowed = append(slices.DeleteFunc(slices.Clone(old), func(o boxed.EgressGranted) bool { return o.Host == host }), a)
	if len(b.state.Allowed) > maxAllowed {
		b.state.Allowed = old
		return nil, boxed.Errorf(boxed.CodeQuota, "%d hosts were allowed already since the sandbox was made; write a profile", maxAllowed).With("of", "allowed hosts")
	}
	if err := k.composeLocked(b, true); err != nil {
		b.state.Allowed = old
		return nil, err
	}
	return k.grantLocked(b), nil
}

// Run ends what was allowed for a time, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			k.expire()
		}
	}
}

func (k *Keeper) expire() {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.cfg.Now()
	for _, b := range k.boxes {
		if slices.ContainsFunc(b.state.Allowed, func(a boxed.EgressGranted) bool { return !a.Until.IsZero() && !now.Before(a.Until) }) {
			if err := k.composeLocked(b, true); err != nil {
				k.cfg.Log.Error("end what was allowed for a time", "sandbox", b.sandbox.ID, "err", err)
			}
		}
	}
}

// Policy is what is in force for a sandbox, nil for none.
func (k *Keeper) Policy(id boxed.ID) *Policy { return k.cfg.Proxy.Policy(id) }

// Resolve and Serve are those of the Proxy.
func (k *Keeper) Resolve(id boxed.ID, intent boxed.EgressIntent) (int, []uint16) {
	return k.cfg.Proxy.Resolve(id, intent)
}

// Serve serves one connection of a sandbox.
func (k *Keeper) Serve(ctx context.Context, id boxed.ID, intent boxed.EgressIntent, conn Conn, opened func(error) error) {
	k.cfg.Proxy.Serve(ctx, id, intent, conn, opened)
}
