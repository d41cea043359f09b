package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Relay connects by way of another node, as the owner of a sandbox.
type Relay func(ctx context.Context, to boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error)

// ExitRule lets the sandboxes of a node leave by this one, under a profile. This node's
// private openings are not for them unless it says so.
type ExitRule struct {
	Node    string // "*": any node of the cluster
	Profile string // "*": any
	Private bool
}

// ParseExit reads "NODE PROFILE" or "NODE PROFILE private".
func ParseExit(s string) (ExitRule, error) {
	f := strings.Fields(s)
	if len(f) < 2 || len(f) > 3 || len(f) == 3 && f[2] != "private" {
		return ExitRule{}, fmt.Errorf("%.80q is not like \"NODE PROFILE\", with \"private\" behind it if what egress.open has is for them too", s)
	}
	return ExitRule{Node: f[0], Profile: f[1], Private: len(f) == 3}, nil
}

// leavesBy is the node by which connections leave, "" for this one: the holder of a secret,
// or the exit of the profile.
func (s *session) leavesBy(policy *Policy, d Decision) boxed.NodeID {
	for _, rule := range d.Rules {
		if rule.Binding != nil && rule.Binding.HeldBy != "" {
			return rule.Binding.HeldBy
		}
	}
	if policy == nil || policy.Exit == s.proxy.cfg.Node {
		return ""
	}
	return policy.Exit
}

// by is the node that a flow's connections are made by; "" is this one.
func (f *flow) by() (to boxed.NodeID, r boxed.EgressRelay) {
	policy, _, _ := f.s.now()
	r = boxed.EgressRelay{Sandbox: f.s.id, Host: f.host.String(), Port: f.port, Generation: f.rec.Generation}
	for _, rule := range f.dec.Rules {
		if b := rule.Binding; b != nil && b.HeldBy != "" {
			r.Secret, r.Repos, r.ReadOnly, r.Placeholder = b.key, b.Use.Repos, b.Use.ReadOnly, b.Placeholder
			return b.HeldBy, r
		}
	}
	if policy == nil || policy.Exit == f.s.proxy.cfg.Node {
		return "", r
	}
	r.Profile = policy.Profile
	return policy.Exit, r
}

// held reports whether the requests of a flow are made by the holder of a secret.
func (f *flow) held() bool {
	_, r := f.by()
	return r.Secret != ""
}

// through connects by way of another node. There is no other way: one that is away is an
// error.
func (f *flow) through(ctx context.Context, to boxed.NodeID, r boxed.EgressRelay) (net.Conn, *refusal) {
	away, what := boxed.EgressExitAway, "the exit"
	if r.Secret != "" {
		away, what = boxed.EgressHolderAway, "the holder of the secret "+r.Secret
	}
	if f.s.proxy.cfg.Relay == nil {
		return nil, refuse(away, "this node is in no cluster, and %s is %s", what, to)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*f.s.proxy.cfg.Times.Dial)
	defer cancel()
	_, owner, _ := f.s.who()
	conn, err := f.s.proxy.cfg.Relay(ctx, to, owner, r)
	if err == nil {
		return conn, nil
	}
	var e *boxed.Error
	if errors.As(err, &e) {
		// A reason of a later release, or of nobody's, is not one for the record.
		if reason, ok := e.Detail["reason"].(string); ok && boxed.EgressReason(reason).Known() {
			return nil, refuse(boxed.EgressReason(reason), "%s: %s", to, clip(e.Message, 300))
		}
	}
	return nil, refuse(away, "%s, %s, does not do it: %s", what, to, clip(err.Error(), 300))
}

// Foreign connects for a sandbox of another node: by a profile that both nodes have, or as
// the holder of a secret. origin is proven, and owner vouched for by it. Errors: forbidden
// with the reason.
func (k *Keeper) Foreign(ctx context.Context, origin boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error) {
	s := k.cfg.Proxy.visit(origin, r.Sandbox, owner)
	conn, rf := k.receive(ctx, s, origin, r)
	if rf != nil {
		k.cfg.Proxy.leave(s)
		return nil, boxed.Errorf(boxed.CodeForbidden, "%s", rf.Error()).With("reason", string(rf.Reason))
	}
	return conn, nil
}

// receive opens the connection of a visit.
func (k *Keeper) receive(ctx context.Context, s *session, origin boxed.NodeID, r boxed.EgressRelay) (net.Conn, *refusal) {
	// Each call may be for another sandbox, and so is not held to what one may have recorded.
	if !s.limiter.visits.Allow() {
		return nil, refuse(boxed.EgressTooFast, "more than %d connections per second of one node", visitRate)
	}
	if r.Sandbox.Node() != origin {
		return nil, refuse(boxed.EgressInvalidRequest, "the sandbox is not one of the node that asks")
	}
	host, err := ParseHost(r.Host)
	if err != nil {
		return nil, refuse(boxed.EgressInvalidName, "%v", err)
	}
	private, err := k.allowVisit(s, origin, r)
	if err != nil {
		rf := asRefusal(err, boxed.EgressExitAway)
		if s.limiter.strays.Allow() {
			s.deny(boxed.EntryHTTP, r.Host, r.Port, rf)
		}
		return nil, rf
	}
	f, rf := s.open(ctx, boxed.EntryHTTP, host, r.Port)
	if rf != nil {
		return nil, rf
	}
	f.foreign, f.private = true, private
	f.closed = func() { s.proxy.leave(s) }
	conn, rf := f.reach(ctx)
	if rf != nil {
		defer f.close()
		return nil, f.deny(rf)
	}
	if r.Secret != "" {
		return f.serveHeld(conn), nil
	}
	if rf := f.allow(); rf != nil {
		f.close()
		conn.Close()
		return nil, rf
	}
	c := &foreignConn{Conn: conn}
	c.up.f, c.up.up, c.down.f = f, true, f
	stop := context.AfterFunc(f.ctx, func() { conn.Close() })
	c.done = sync.OnceFunc(func() {
		stop()
		f.ended(c.up.n.Load(), c.down.n.Load(), nil)
		f.close()
	})
	return c, nil
}

// visit is a session for one connection of another node's sandbox, which ends by leave. Its
// limits are that node's.
func (p *Proxy) visit(origin boxed.NodeID, id boxed.ID, owner string) *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.foreign[origin]
	if l == nil {
		if p.foreign == nil {
			p.foreign = map[boxed.NodeID]*limiter{}
		}
		limits := p.cfg.Limits
		limits.UpTotal, limits.DownTotal = 0, 0 // of sandboxes, and counted there
		limits.Connections *= foreignShare
		l = newLimiter(limits)
		p.foreign[origin] = l
	}
	s := p.newSession(id, owner, l)
	p.visits[s] = true
	return s
}

// leave ends a visit. It is idempotent.
func (p *Proxy) leave(s *session) {
	p.mu.Lock()
	delete(p.visits, s)
	p.mu.Unlock()
	s.cancel(nil)
}

// visitRate is how many connections per second another node may ask for.
const visitRate = 500

// foreignShare is how many sandboxes' worth of connections another node may have here.
const foreignShare = 8

// allowVisit gives a visit its policy, and says whether the operator's openings are for it.
func (k *Keeper) allowVisit(s *session, origin boxed.NodeID, r boxed.EgressRelay) (private bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.Secret != "" {
		s.heldHere = true
		s.remake = func() (*Policy, []*Binding, error) { return k.holdLocked(s.owner, r) }
		return false, s.remade()
	}
	s.remake = func() (policy *Policy, _ []*Binding, err error) {
		policy, private, err = k.exitLocked(origin, s.owner, r.Profile)
		return policy, nil, err
	}
	err = s.remade()
	return private, err
}

// remade puts the policy of a visit in force as it is now: nothing, where there is none.
func (s *session) remade() error {
	policy, bindings, err := s.remake()
	s.mu.Lock()
	s.policy, s.tokens = policy, newPlaceholders(bindings)
	s.mu.Unlock()
	return err
}

// renewVisitsLocked ends what other nodes' sandboxes have open and may not have any more.
func (k *Keeper) renewVisitsLocked() {
	k.cfg.Proxy.mu.Lock()
	visits := slices.Collect(maps.Keys(k.cfg.Proxy.visits))
	k.cfg.Proxy.mu.Unlock()
	for _, s := range visits {
		if s.remake != nil { // or it has no policy yet
			s.remade()
			s.rejudge()
		}
	}
}

// exitLocked is the profile that this node has under the name, for bytes that it only
// carries: what is to be read, the sandbox's node reads. A name in the configuration is the
// operator's profile: an owner's own under that name is another one.
func (k *Keeper) exitLocked(origin boxed.NodeID, owner, name string) (p *Policy, private bool, err error) {
	no := func(format string, args ...any) (*Policy, bool, error) {
		return nil, false, refuse(boxed.EgressNoProfile, format, args...)
	}
	if !slices.ContainsFunc(k.cfg.Exits, func(e ExitRule) bool {
		return (e.Node == "*" || e.Node == string(origin)) && (e.Profile == "*" || e.Profile == name || strings.HasSuffix(e.Profile, "/"+name))
	}) {
		return nil, false, refuse(boxed.EgressNotListed, "this node is no exit for %s under the profile %s (egress.exits)", origin, clip(name, 40))
	}
	profile, err := k.profileLocked(owner, name)
	if err != nil || profile == nil {
		return no("this node has no profile %s", clip(name, 40))
	}
	written := profile.Name
	if profile.Owner != "" {
		written = profile.Owner + "/" + profile.Name
	}
	i := slices.IndexFunc(k.cfg.Exits, func(e ExitRule) bool {
		return (e.Node == "*" || e.Node == string(origin)) && (e.Profile == "*" || e.Profile == written)
	})
	if i < 0 {
		return nil, false, refuse(boxed.EgressNotListed, "this node is no exit for %s under the profile %s (egress.exits)", origin, clip(written, 160))
	}
	private = k.cfg.Exits[i].Private && (profile.Owner == "" || k.cfg.Exits[i].Profile == written)
	rules, err := compileRules(profile.Rules, "profile "+profile.Name)
	if err != nil {
		return no("%v", err)
	}
	if profile.Owner != "" {
		for _, r := range rules {
			if err := k.bound(r); err != nil {
				return no("%v", err)
			}
		}
	}
	for _, r := range rules {
		r.Mode, r.Raw = boxed.EgressTunnel, true
	}
	p = &Policy{Generation: k.generation, Profile: profile.Name, hostDeny: k.cfg.HostDeny, rules: rules}
	for _, d := range profile.Deny {
		pattern, err := ParsePattern(d)
		if err != nil {
			return no("%v", err)
		}
		p.deny = append(p.deny, pattern)
	}
	if err := order(rules); err != nil {
		return no("%v", err)
	}
	return p, private, nil
}

// holdLocked are the rules of a secret that this node holds for others.
func (k *Keeper) holdLocked(owner string, r boxed.EgressRelay) (*Policy, []*Binding, error) {
	secret, err := k.secretOf(owner, r.Secret, nil)
	if err != nil || secret == nil || secret.HeldBy != k.cfg.Node {
		return nil, nil, refuse(boxed.EgressNoCredential, "this node holds no secret %s for %s", clip(r.Secret, 40), owner)
	}
	p := presets()[secret.Preset]
	if p == nil || len(r.Placeholder) < minScan || checkRepos(r.Repos) != nil {
		return nil, nil, refuse(boxed.EgressInvalidRequest, "the secret cannot be used so")
	}
	use := boxed.SecretUse{Name: r.Secret, Repos: r.Repos, ReadOnly: r.ReadOnly}
	name, of := secret.Name, secret.Owner
	b := &Binding{
		Secret: name, Placeholder: r.Placeholder, Limited: len(r.Repos) > 0 || r.ReadOnly, Use: use,
		value: func() (Value, bool) { return k.valueOf(of, name) },
	}
	var rules []*Rule
	for _, e := range p.endpoints(secret.Secret, use) {
		rule := e.rule
		rule.Mode, rule.Credential = boxed.EgressIntercept, name
		c, err := compileRule(rule)
		if err != nil {
			return nil, nil, err
		}
		c.Binding, c.Slots, c.Source = b, e.slots, "secret "+name
		rules = append(rules, c)
	}
	b.ends = slices.Clone(rules)
	if err := order(rules); err != nil {
		return nil, nil, err
	}
	return &Policy{Generation: k.generation, hostDeny: k.cfg.HostDeny, rules: rules}, []*Binding{b}, nil
}

// serveHeld serves the requests that the origin passes on, and swaps the credential.
func (f *flow) serveHeld(first net.Conn) net.Conn {
	near, far := net.Pipe()
	go func() {
		defer f.close()
		defer far.Close()
		stop := context.AfterFunc(f.ctx, func() { far.Close() })
		defer stop()
		up := newUpstream(f, "https", first)
		defer up.close()
		f.s.proxy.fronts.h1.serve(newFraming(far, f.misframed), fullDuplex(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			(&forwarding{f: f, w: w, in: r, transport: up, scheme: "https"}).serve()
		})))
	}()
	return near
}

// foreignConn is a connection for another node's sandbox; its end is recorded.
type foreignConn struct {
	net.Conn
	up, down counter
	done     func() // once: it may be closed while it is read
}

func (c *foreignConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if lerr := c.down.pass(n); lerr != nil {
		return 0, lerr
	}
	return n, err
}

func (c *foreignConn) Write(p []byte) (int, error) {
	if err := c.up.pass(len(p)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *foreignConn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *foreignConn) Close() error {
	err := c.Conn.Close()
	c.done()
	return err
}

// heldUpstream makes requests by way of the holder, over connections to it.
func newHeldUpstream(f *flow, first net.Conn) *upstream {
	u := &upstream{f: f, first: first}
	u.transport = &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return u.dial(ctx) },
		DisableCompression: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: 90 * time.Second,
		ResponseHeaderTimeout: f.s.proxy.cfg.Times.Answer, MaxResponseHeaderBytes: maxAnswerHead,
	}
	return u
}
