package egress

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// composed is a policy, and what it is made of.
type composed struct {
	policy       *Policy
	bindings     []*Binding
	env          map[string]string // of the secrets
	files        map[string]string
	hosts        []string // that are intercepted
	secrets      []string
	untranslated []string
	flags        []string
}

// composing makes the policy of one sandbox.
type composing struct {
	k      *Keeper
	owner  string
	admin  bool
	spec   *boxed.EgressSpec
	allow  []boxed.EgressGranted // spec's, and those that were allowed since
	tokens map[string]string
	// granted: the sandbox has its secrets already.
	granted bool
	out     *composed
	rules   []*Rule
	byKey   map[string]*Binding // by OWNER/NAME
}

// compose is called with the Keeper's lock held.
func (c *composing) compose() (*composed, error) {
	c.out = &composed{env: map[string]string{}, files: map[string]string{}}
	c.byKey = map[string]*Binding{}
	profile, err := c.k.profileLocked(c.owner, c.spec.Profile)
	if err != nil {
		return nil, err
	}
	pol := &Policy{Generation: c.k.generation, OnDeny: c.spec.OnDeny, hostDeny: c.k.cfg.HostDeny}
	c.out.policy = pol
	for _, use := range c.spec.Secrets {
		if err := c.attach(use); err != nil {
			return nil, err
		}
	}
	if profile != nil {
		pol.Profile, pol.Exit = profile.Name, profile.Exit
		pol.OnDeny = cmp.Or(c.spec.OnDeny, profile.OnDeny)
		c.out.flags = flagsOf(profile)
		if err := c.take(profile); err != nil {
			return nil, err
		}
		for _, d := range profile.Deny {
			p, err := ParsePattern(d)
			if err != nil {
				return nil, boxed.Errorf(boxed.CodeInvalid, "deny: %w", err)
			}
			pol.deny = append(pol.deny, p)
		}
	} else if len(c.spec.Only) > 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "egress.only narrows a profile, and there is none").WithField("egress.only")
	}
	for i, a := range c.allow {
		if err := c.permit(a.Host, a.Admin); err != nil {
			return nil, boxed.Errorf(boxed.CodeInvalid, "egress.allow: %w", err).WithField(fmt.Sprintf("egress.allow[%d]", i))
		}
	}
	if err := order(c.rules); err != nil {
		return nil, err
	}
	pol.rules = c.rules
	for _, r := range c.rules {
		if r.Mode == boxed.EgressIntercept && !slices.Contains(c.out.hosts, r.Pattern.String()) {
			c.out.hosts = append(c.out.hosts, r.Pattern.String())
		}
	}
	slices.Sort(c.out.hosts)
	return c.out, nil
}

// flagsOf is what to know of a profile.
func flagsOf(p *boxed.EgressProfile) []string {
	for _, r := range p.Rules {
		if r.Host == "*" {
			return []string{boxed.FlagExfiltration}
		}
	}
	return nil
}

// attach adds the rules of a secret that the sandbox asks for.
func (c *composing) attach(use boxed.SecretUse) error {
	field := "egress.secrets"
	s, err := c.k.secretOf(c.owner, use.Name, c.tokens)
	if err != nil {
		return err
	}
	if s == nil || !s.RevokedAt.IsZero() && !c.granted {
		return boxed.Errorf(boxed.CodeNotFound, "there is no secret %q that you may attach; boxedctl secret ls shows yours", use.Name).WithField(field)
	}
	if c.byKey[s.key()] != nil {
		return boxed.Errorf(boxed.CodeInvalid, "the secret %q is attached twice", use.Name).WithField(field)
	}
	p := presets()[s.Preset]
	switch {
	case p == nil:
		return boxed.Errorf(boxed.CodeUnavailable, "the secret %q is of the preset %q, which this release does not know", use.Name, s.Preset).WithField(field)
	case len(use.Repos) > 0 && !p.repos:
		return boxed.Errorf(boxed.CodeInvalid, "repositories limit secrets of code hosts, and %q is of the preset %s", use.Name, s.Preset).WithField(field)
	}
	if err := checkRepos(use.Repos); err != nil {
		return err.WithField(field)
	}
	b, err := c.bind(s, p, use)
	if err != nil {
		return boxed.Errorf(boxed.CodeInvalid, "the secret %q: %w", s.Name, err).WithField(field)
	}
	for _, end := range b.ends {
		if err := c.within(end); err != nil {
			return err
		}
		c.rules = append(c.rules, end)
	}
	return nil
}

// checkRepos judges names of repositories.
func checkRepos(repos []string) *boxed.Error {
	for _, r := range repos {
		if owner, name, ok := strings.Cut(r, "/"); !ok || owner == "" || name == "" || !Canonical("/"+r) || strings.ContainsAny(r, "*?#% ") {
			return boxed.Errorf(boxed.CodeInvalid, "%.80q is no repository; it is OWNER/NAME", r)
		}
	}
	return nil
}

// bind gives a secret its placeholder in this sandbox, and programs the places where they
// look for it.
func (c *composing) bind(s *held, p *preset, use boxed.SecretUse) (*Binding, error) {
	if b := c.byKey[s.key()]; b != nil {
		return b, nil
	}
	token := c.tokens[s.key()]
	if token == "" {
		sh := p.shapeOf(s.value().Reveal())
		token = Placeholder(sh.prefix, sh.length)
		c.tokens[s.key()] = token
	}
	owner, name := s.Owner, s.Name
	b := &Binding{
		Secret: s.Name, key: s.key(), Placeholder: token, Limited: use.Repos != nil || use.ReadOnly, Use: use,
		value: func() (Value, bool) { return c.k.valueOf(owner, name) }, gone: func() bool { return c.k.isRevoked(owner, name) },
	}
	for _, e := range p.endpoints(s.Secret, use) {
		rule := e.rule
		rule.Mode, rule.Credential = boxed.EgressIntercept, s.Name
		end, err := compileRule(rule)
		if err != nil {
			return nil, err
		}
		end.Binding, end.Slots, end.Source = b, e.slots, "secret "+s.Name
		b.ends = append(b.ends, end)
	}
	if s.HeldBy != "" && s.HeldBy != c.k.cfg.Node {
		b.HeldBy = s.HeldBy
	}
	c.byKey[s.key()] = b
	c.out.bindings = append(c.out.bindings, b)
	shown := s.Name
	if s.Owner != c.owner {
		shown = s.key()
	}
	c.out.secrets = append(c.out.secrets, shown)
	env := s.Env
	if len(env) == 0 {
		env = p.env(s.value().Reveal())
	}
	for _, name := range env {
		c.out.env[name] = token
	}
	if s.Preset == "aws" { // what it signs with is of no use to anybody
		c.out.env["AWS_SECRET_ACCESS_KEY"] = token
	}
	if p.files != nil {
		for name, text := range p.files(s.Secret, c.out.env) {
			c.out.files[name] += text
		}
	}
	return b, nil
}

// take adds the rules of the profile: those that the sandbox narrows it to, and but for
// tunnels to a host that a secret is for.
func (c *composing) take(profile *boxed.EgressProfile) error {
	written := profile.Rules
	if profile.Ready && profile.Name == gitHubProfile {
		if len(c.spec.Repos) == 0 {
			return boxed.Errorf(boxed.CodeInvalid, "the profile github is for named repositories: --repo OWNER/NAME").WithField("egress.repos")
		}
		if err := checkRepos(c.spec.Repos); err != nil {
			return err.WithField("egress.repos")
		}
		for _, e := range gitHub(boxed.Secret{}, boxed.SecretUse{Repos: c.spec.Repos, ReadOnly: true}) {
			e.rule.Mode = boxed.EgressIntercept
			written = append(written, e.rule)
		}
	} else if len(c.spec.Repos) > 0 {
		return boxed.Errorf(boxed.CodeInvalid, "repositories are for the profile github, or for a secret").WithField("egress.repos")
	}
	rules, err := compileRules(written, "profile "+profile.Name)
	if err != nil {
		return err
	}
	if rules, err = narrow(rules, c.spec.Only); err != nil {
		return err
	}
	for _, r := range rules {
		if profile.Owner != "" || profile.Ready {
			if err := c.within(r); err != nil {
				return err
			}
		}
		if r.Mode == boxed.EgressTunnel { // but where a secret is for it
			if r.Ports = slices.DeleteFunc(r.Ports, func(p uint16) bool { return c.intercepted(r.Pattern, p) }); len(r.Ports) == 0 {
				continue
			}
		}
		if r.Credential != "" {
			if err := c.credential(r); err != nil {
				return err
			}
		}
		c.rules = append(c.rules, r)
	}
	return nil
}

// credential binds the secret that a profile's rule names.
func (c *composing) credential(r *Rule) error {
	s, err := c.k.secretOf(c.owner, r.Credential, c.tokens)
	if err != nil {
		return err
	}
	if s != nil && !s.RevokedAt.IsZero() && !c.granted {
		s = nil
	}
	if s == nil || s.value().Empty() && !c.granted && (s.HeldBy == "" || s.HeldBy == c.k.cfg.Node) {
		if r.Need == boxed.CredentialOptional {
			c.out.untranslated = append(c.out.untranslated, r.Credential)
			// An ordinary tunnel: one can log in from inside.
			r.Mode, r.Credential, r.Need, r.Methods, r.Paths = boxed.EgressTunnel, "", "", nil, nil
			return nil
		}
		return boxed.Errorf(boxed.CodeNotFound, "the rule %s needs the secret %q, and there is none that you may attach and that this node can use; set it: boxedctl secret set %s", r, r.Credential, r.Credential).WithField("egress.profile")
	}
	p := presets()[s.Preset]
	if p == nil {
		return boxed.Errorf(boxed.CodeUnavailable, "the secret %q is of the preset %q, which this release does not know", s.Name, s.Preset)
	}
	if r.Binding, err = c.bind(s, p, boxed.SecretUse{Name: r.Credential}); err != nil {
		return boxed.Errorf(boxed.CodeInvalid, "the secret %q: %w", s.Name, err).WithField("egress.profile")
	}
	// EC5, EC6: a profile does not carry a secret to hosts that it is not for.
	for _, end := range r.Binding.ends {
		if end.Pattern == r.Pattern && !slices.ContainsFunc(r.Ports, func(p uint16) bool { return !slices.Contains(end.Ports, p) }) {
			r.Slots = end.Slots
			return nil
		}
	}
	return boxed.Errorf(boxed.CodeInvalid, "the rule %s names the secret %q, which is for %s", r, s.Name, endsOf(r.Binding)).WithField("egress.profile")
}

// endsOf are the hosts of a binding, for a person.
func endsOf(b *Binding) string {
	var list []string
	for _, end := range b.ends {
		for _, port := range end.Ports {
			if at := fmt.Sprintf("%s:%d", end.Pattern, port); !slices.Contains(list, at) {
				list = append(list, at)
			}
		}
	}
	return strings.Join(list, ", ")
}

// intercepted reports whether a secret's rule has a port of a host.
func (c *composing) intercepted(p Pattern, port uint16) bool {
	return slices.ContainsFunc(c.rules, func(r *Rule) bool {
		return r.Mode == boxed.EgressIntercept && r.Pattern == p && slices.Contains(r.Ports, port)
	})
}

// permit adds a rule for "host" or "host:port", unless there is one already.
func (c *composing) permit(text string, admin bool) error {
	rule, err := allowRule(text)
	if err != nil {
		return err
	}
	if !admin {
		if err := c.k.bound(rule); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(c.rules, func(r *Rule) bool {
		return r.Pattern == rule.Pattern && slices.Contains(r.Ports, rule.Ports[0])
	}) {
		return nil
	}
	if rule.Pattern.Any() {
		c.out.flags = []string{boxed.FlagExfiltration}
	}
	c.rules = append(c.rules, rule)
	return nil
}

// hostPort reads "host" or "host:port"; an address of IPv6 with a port is in brackets. The
// port is 443 unless it is given.
func hostPort(text string) (host string, port uint16, given bool, err error) {
	host = strings.TrimSpace(text)
	h, p, err := net.SplitHostPort(host)
	if err != nil {
		return host, 443, false, nil // no port; the host is still to be judged
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 {
		return "", 0, false, fmt.Errorf("%.80q has no port between 1 and 65535", text)
	}
	return h, uint16(n), true, nil
}

// allowRule reads "host", "*.suffix", "host:port".
func allowRule(text string) (*Rule, error) {
	host, port, _, err := hostPort(text)
	if err != nil {
		return nil, err
	}
	rule := boxed.EgressRule{Host: host, Ports: []uint16{port}}
	// What speaks on another port is mostly no TLS: a database, SSH.
	rule.Raw = port != 443 && port != 80 && !strings.Contains(host, "*")
	r, err := compileRule(rule)
	if err != nil {
		return nil, err
	}
	r.Source = "allow"
	return r, nil
}

// within holds a rule to what the operator lets owners have.
func (c *composing) within(r *Rule) error {
	if c.admin {
		return nil
	}
	return c.k.bound(r)
}

// bound is within for an owner.
func (k *Keeper) bound(r *Rule) error {
	if k.cfg.Ceiling == nil {
		return nil
	}
	for _, port := range r.Ports {
		if !slices.ContainsFunc(k.cfg.Ceiling, func(top *Rule) bool {
			return slices.Contains(top.Ports, port) && includes(top.Pattern, r.Pattern)
		}) {
			return boxed.Errorf(boxed.CodeForbidden, "%s:%d is beyond what this node's operator allows (egress.ceiling)", r.Pattern, port).WithField("egress")
		}
	}
	return nil
}

// includes reports whether all that b matches is matched by a.
func includes(a, b Pattern) bool {
	switch {
	case a == b:
		return true
	case a.Any():
		return !(b.Exact() && b.Host().IsAddr())
	case b.Exact():
		return a.Match(b.Host())
	}
	return false
}

// narrow keeps of rules what is for these hosts; none is all of it.
func narrow(rules []*Rule, only []string) ([]*Rule, error) {
	if len(only) == 0 {
		return rules, nil
	}
	var out []*Rule
	for i, text := range only {
		p, err := ParsePattern(text)
		if err != nil {
			return nil, boxed.Errorf(boxed.CodeInvalid, "egress.only: %w", err).WithField(fmt.Sprintf("egress.only[%d]", i))
		}
		best := -1
		for _, r := range rules {
			if includes(r.Pattern, p) {
				best = max(best, r.Pattern.Rank())
			}
		}
		if best < 0 {
			return nil, boxed.Errorf(boxed.CodeForbidden, "egress.only: the profile does not allow %s: a sandbox may only narrow it", p).WithField(fmt.Sprintf("egress.only[%d]", i))
		}
		for _, r := range rules {
			switch {
			case includes(r.Pattern, p) && r.Pattern.Rank() == best:
				one := *r
				one.Pattern, one.Host = p, p.String()
				out = append(out, &one)
			case includes(p, r.Pattern): // what the profile says of one of these stays said
				out = append(out, r)
			}
		}
	}
	return out, nil
}
