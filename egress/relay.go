package egress

import (
	"context"
	"errors"
	"fmt"
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

// by is the node that a flow's connections are made by; "" is this one.
func (f *flow) by() (to boxed.NodeID, r boxed.EgressRelay) {
	policy, _, _ := f.s.now()
	r = boxed.EgressRelay{Sandbox: f.s.id, Host: f.host.String(), Port: f.port, Generation: f.rec.Generation}
	for _, rule := range f.dec.Rules {
		if b := rule.Binding; b != nil && b.HeldBy != "" {
			r.Secret, r.Repos, r.ReadOnly, r.Placeholder = b.Secret, b.Use.Repos, b.Use.ReadOnly, b.Placeholder
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
		if reason, ok := e.Detail["reason"].(string); ok && reason != "" {
			return nil, refuse(boxed.EgressReason(clip(reason, 40)), "%s: %s", to, clip(e.Message, 300))
		}
	}
	return nil, refuse(away, "%s, %s, does not do it: %s", what, to, clip(err.Error(), 300))
}

// Foreign connects for a sandbox of another node: by a profile that both nodes have, or as
// the holder of a secret. origin is proven, and owner vouched for by it. Errors: forbidden
// with the reason.
func (k *Keeper) Foreign(ctx context.Context, origin boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error) {
	refused := func(rf *refusal) error {
		return boxed.Errorf(boxed.CodeForbidden, "%s", rf.Error()).With("reason", string(rf.Reason))
	}
	if r.Sandbox.Node() != origin {
		return nil, refused(refuse(boxed.EgressInvalidRequest, "the sandbox is not one of the node that asks"))
	}
	host, err := ParseHost(r.Host)
	if err != nil {
		return nil, refused(refuse(boxed.EgressInvalidName, "%v", err))
	}
	s := k.cfg.Proxy.foreignSession(origin, r.Sandbox, owner)
	var private bool
	if r.Secret != "" {
		err = k.heldFor(s, owner, r)
	} else {
		private, err = k.exitFor(s, origin, owner, r)
	}
	if err != nil {
		return nil, refused(s.deny(boxed.EntryHTTP, r.Host, r.Port, asRefusal(err, boxed.EgressExitAway)))
	}
	f, rf := s.open(ctx, boxed.EntryHTTP, host, r.Port)
	if rf != nil {
		return nil, refused(rf)
	}
	f.foreign, f.private = true, private
	conn, rf := f.reach(ctx)
	if rf != nil {
		defer f.close()
		return nil, refused(f.deny(rf))
	}
	if r.Secret != "" {
		return f.serveHeld(conn), nil
	}
	if rf := f.allow(); rf != nil {
		f.close()
		conn.Close()
		return nil, refused(rf)
	}
	c := &foreignConn{Conn: conn}
	c.up.f, c.up.up, c.down.f = f, true, f
	c.done = sync.OnceFunc(func() {
		f.ended(c.up.n.Load(), c.down.n.Load(), nil)
		f.close()
	})
	return c, nil
}

// foreignSession is a session for one call of another node. Its limits are that node's.
func (p *Proxy) foreignSession(origin boxed.NodeID, id boxed.ID, owner string) *session {
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
	ctx, cancel := context.WithCancelCause(context.Background())
	return &session{proxy: p, id: id, owner: owner, limiter: l, ctx: ctx, cancel: cancel, live: map[*flow]bool{}, tokens: newPlaceholders(nil)}
}

// foreignShare is how many sandboxes' worth of connections another node may have here.
const foreignShare = 8

// exitFor gives the session the profile that this node has under the name.
func (k *Keeper) exitFor(s *session, origin boxed.NodeID, owner string, r boxed.EgressRelay) (private bool, err error) {
	i := slices.IndexFunc(k.cfg.Exits, func(e ExitRule) bool {
		return (e.Node == "*" || e.Node == string(origin)) && (e.Profile == "*" || e.Profile == r.Profile)
	})
	if i < 0 {
		return false, refuse(boxed.EgressNotListed, "this node is no exit for %s under the profile %s (egress.exits)", origin, clip(r.Profile, 40))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	profile, err := k.profileLocked(owner, r.Profile)
	if err != nil || profile == nil {
		return false, refuse(boxed.EgressNoProfile, "this node has no profile %s", clip(r.Profile, 40))
	}
	out, err := k.exitPolicyLocked(profile)
	if err != nil {
		return false, refuse(boxed.EgressNoProfile, "%v", err)
	}
	s.policy = out
	return k.cfg.Exits[i].Private, nil
}

// exitPolicyLocked is a profile for bytes that this node only carries: what is to be read,
// its origin reads.
func (k *Keeper) exitPolicyLocked(profile *boxed.EgressProfile) (*Policy, error) {
	rules, err := compileRules(profile.Rules, "profile "+profile.Name)
	if err != nil {
		return nil, err
	}
	for _, r := range rules {
		r.Mode, r.Raw = boxed.EgressTunnel, true
	}
	p := &Policy{Generation: k.generation, Profile: profile.Name, hostDeny: k.cfg.HostDeny, rules: rules}
	for _, d := range profile.Deny {
		pattern, err := ParsePattern(d)
		if err != nil {
			return nil, err
		}
		p.deny = append(p.deny, pattern)
	}
	return p, order(rules)
}

// heldFor gives the session the rules of a secret that this node holds for others.
func (k *Keeper) heldFor(s *session, owner string, r boxed.EgressRelay) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	secret := k.secretOf(owner, r.Secret)
	if secret == nil || secret.HeldBy != k.cfg.Node {
		return refuse(boxed.EgressNoCredential, "this node holds no secret %s for %s", clip(r.Secret, 40), owner)
	}
	p := presets()[secret.Preset]
	if p == nil || len(r.Placeholder) < minScan || checkRepos(r.Repos) != nil {
		return refuse(boxed.EgressInvalidRequest, "the secret cannot be used so")
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
			return err
		}
		c.Binding, c.Slots, c.Source = b, e.slots, "secret "+name
		rules = append(rules, c)
	}
	s.policy = &Policy{Generation: k.generation, hostDeny: k.cfg.HostDeny, rules: rules}
	s.tokens, s.heldHere = newPlaceholders([]*Binding{b}), true
	return order(rules)
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
		f.s.proxy.fronts.h1.serve(newFraming(far), fullDuplex(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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

func (c *foreignConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

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
