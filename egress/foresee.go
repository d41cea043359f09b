package egress

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Foresee says what would happen to a connection of a sandbox, and to a request where the
// proxy can read it. It resolves the name, and connects to nothing.
func (k *Keeper) Foresee(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	text, port, _, err := hostPort(q.Host)
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "host: %w", err).WithField("host")
	}
	host, err := ParseConfigHost(text)
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "host: %w", err).WithField("host")
	}
	s := k.cfg.Proxy.session(id)
	if s == nil {
		return answer(boxed.EgressNoProfile, "", host, port), nil
	}
	if k.cfg.Proxy.isFrozen(s) {
		return answer(boxed.EgressFrozen, "", host, port), nil
	}
	policy, _, _ := s.now()
	dec := policy.Decide(host, port)
	a := answer(dec.Reason, "", host, port)
	a.Rule = dec.Rule
	if !dec.Allowed() {
		if policy.OnDeny == boxed.DenyAsk && (dec.Reason == boxed.EgressNotListed || dec.Reason == boxed.EgressPort) {
			a.Detail = "the connection would be held, and you asked"
		}
		return a, nil
	}
	a.Mode = dec.Mode()
	no := func(r *refusal) (*boxed.EgressAnswer, error) {
		no := answer(r.Reason, r.Detail, host, port)
		no.Rule, no.Mode, no.Credential = a.Rule, a.Mode, a.Credential
		return no, nil
	}
	rule := dec.Rules[0]
	path, _, _ := strings.Cut(cmp.Or(q.Path, "/"), "?")
	if q.Method != "" && (a.Mode == boxed.EgressIntercept || port == 80) {
		admitted, r := dec.admit(strings.ToUpper(q.Method), path)
		if r != nil {
			return no(r)
		}
		rule, a.Rule = admitted, admitted.String()
	}
	if b := rule.Binding; b != nil {
		a.Credential = b.Secret
		if _, ok := b.value(); !ok && b.HeldBy == "" && rule.Need != boxed.CredentialOptional {
			return no(refuse(boxed.EgressNoCredential, "the secret %s has no value on this node, or was revoked", b.Secret))
		}
		if q.Method != "" && !b.goodFor(strings.ToUpper(q.Method), path, rule) {
			a.Detail = "without the credential: the secret is not for this method and path"
		}
	}
	if to := s.leavesBy(policy, dec); to != "" {
		a.Detail = "by way of the node " + string(to) + ", which judges the address"
		return a, nil
	}
	addrs, r := k.cfg.Proxy.addresses(ctx, k.cfg.Proxy.judge, host, port)
	if r != nil {
		return no(r)
	}
	for _, ap := range addrs {
		a.Addresses = append(a.Addresses, ap.Addr().String())
	}
	return a, nil
}

func answer(reason boxed.EgressReason, detail string, host Host, port uint16) *boxed.EgressAnswer {
	return &boxed.EgressAnswer{Allowed: reason == boxed.EgressAllowed, Reason: reason, Detail: detail, Hint: hintOf(reason, host.String(), port)}
}

// Suggest makes the narrowest profile that would have let through what a sandbox asked for.
func Suggest(s *boxed.Sandbox, records iter.Seq2[boxed.EgressRecord, error]) (*boxed.EgressProfile, error) {
	type key struct {
		host string
		port uint16
	}
	asked := map[key]*boxed.EgressRule{}
	tls := map[key]bool{} // somebody spoke it there
	for rec, err := range records {
		if err != nil {
			continue // a line that cannot be read has nothing to add
		}
		switch rec.Reason {
		case boxed.EgressAllowed, boxed.EgressNotListed, boxed.EgressPort, boxed.EgressMethod, boxed.EgressPath, boxed.EgressNotAnswered:
		default:
			continue // no rule would have helped
		}
		host, err := ParseHost(rec.Host)
		if err != nil || rec.Method != "" && !isMethod(rec.Method) {
			continue
		}
		k := key{host.String(), rec.Port}
		if rec.Entry == boxed.EntryDNS { // what it would have connected to is not known
			k.port = 0
		} else if rec.Port == 0 {
			continue
		}
		r := asked[k]
		if r == nil {
			r = &boxed.EgressRule{Host: k.host, Ports: []uint16{cmp.Or(k.port, 443)}}
			asked[k] = r
		}
		tls[k] = tls[k] || rec.SNI != ""
		if rec.Method != "" {
			if k.port != 80 {
				r.Mode = boxed.EgressIntercept
			}
			if !slices.Contains(r.Methods, rec.Method) {
				r.Methods = append(r.Methods, rec.Method)
			}
		}
	}
	known := map[string]bool{} // hosts with a port
	for k := range asked {
		known[k.host] = known[k.host] || k.port != 0
	}
	p := boxed.EgressProfile{Version: 1, Name: cmp.Or(s.Name, "suggested"), Rules: []boxed.EgressRule{}}
	for k, r := range asked {
		slices.Sort(r.Methods)
		if k.port == 0 && known[k.host] {
			continue
		}
		r.Raw = k.port != 0 && k.port != 80 && k.port != 443 && r.Mode == "" && !tls[k]
		p.Rules = append(p.Rules, *r)
	}
	slices.SortFunc(p.Rules, func(a, b boxed.EgressRule) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), cmp.Compare(a.Ports[0], b.Ports[0]))
	})
	p.Rules = p.Rules[:min(len(p.Rules), maxRules)]
	return CheckProfile(p)
}

// Diff says what a change of a profile widens and narrows, for a person. old is nil for one
// that is new. Where a rule is before or behind a less specific one for the same host, both
// are said: what it lets through, and what the other no longer does.
func Diff(old, now *boxed.EgressProfile) (widened, narrowed []string) {
	if old == nil {
		old = &boxed.EgressProfile{}
	}
	before, after := compiled(old), compiled(now)
	for _, c := range []struct {
		to       *[]string
		from, in []*Rule
	}{{&widened, after, before}, {&narrowed, before, after}} {
		for _, r := range c.from {
			for _, port := range r.Ports {
				text := describe(r, port)
				if !slices.ContainsFunc(c.in, func(o *Rule) bool { return slices.Contains(o.Ports, port) && describe(o, port) == text }) {
					*c.to = append(*c.to, text)
				}
			}
		}
	}
	// An exact rule that comes or goes changes what a wildcard behind it decides.
	for _, c := range []struct {
		to       *[]string
		from, in []*Rule
		text     string
	}{
		{&narrowed, after, before, "%s:%d is no longer of %s"},
		{&widened, before, after, "%s:%d is of %s again"},
	} {
		for _, r := range c.from {
			for _, port := range r.Ports {
				at := func(o *Rule) bool { return o.Pattern == r.Pattern && slices.Contains(o.Ports, port) }
				behind := func(o *Rule) bool {
					return o.Pattern != r.Pattern && includes(o.Pattern, r.Pattern) && slices.Contains(o.Ports, port)
				}
				i := slices.IndexFunc(c.in, behind)
				if i < 0 || slices.ContainsFunc(c.in, at) {
					continue
				}
				if text := fmt.Sprintf(c.text, r.Pattern, port, c.in[i].Pattern); !slices.Contains(*c.to, text) {
					*c.to = append(*c.to, text)
				}
			}
		}
	}
	for _, d := range now.Deny {
		if !slices.Contains(old.Deny, d) {
			narrowed = append(narrowed, "deny "+d)
		}
	}
	for _, d := range old.Deny {
		if !slices.Contains(now.Deny, d) {
			widened = append(widened, "no longer denied: "+d)
		}
	}
	switch asks := now.OnDeny == boxed.DenyAsk; {
	case asks == (old.OnDeny == boxed.DenyAsk):
	case asks:
		widened = append(widened, "on_deny: ask")
	default:
		narrowed = append(narrowed, "on_deny: refuse")
	}
	if old.Exit != now.Exit { // neither more nor less, and another network
		widened = append(widened, "exit: "+cmp.Or(string(now.Exit), "the sandbox's node"))
		if old.Version != 0 {
			narrowed = append(narrowed, "exit: "+cmp.Or(string(old.Exit), "the sandbox's node"))
		}
	}
	slices.Sort(widened)
	slices.Sort(narrowed)
	return widened, narrowed
}

// compiled are the rules of a profile that was checked.
func compiled(p *boxed.EgressProfile) (rules []*Rule) {
	for _, r := range p.Rules {
		if c, err := compileRule(r); err == nil {
			rules = append(rules, c)
		}
	}
	return rules
}

// describe is a rule's part for one port, all of it.
func describe(r *Rule, port uint16) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d %s", r.Pattern, port, r.Mode)
	for _, list := range [][]string{r.Methods, r.Paths} {
		if len(list) > 0 { // whatever their order
			b.WriteString(" " + strings.Join(slices.Sorted(slices.Values(list)), ","))
		}
	}
	if r.WebSocket != nil {
		fmt.Fprintf(&b, " websocket %t", *r.WebSocket)
	}
	if r.Raw {
		b.WriteString(" raw")
	}
	if r.AllowECH {
		b.WriteString(" allow_ech")
	}
	if r.Credential != "" {
		fmt.Fprintf(&b, " credential %s (%s)", r.Credential, cmp.Or(r.Need, boxed.CredentialRequired))
	}
	return b.String()
}
