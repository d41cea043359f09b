package egress

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Foresee says what would happen to a connection of a sandbox, and to a request where the
// proxy can read it. It resolves the name, and connects to nothing.
func (k *Keeper) Foresee(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	text, port := strings.TrimSpace(q.Host), uint16(443)
	if h, p, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return nil, boxed.Errorf(boxed.CodeInvalid, "host: %.80q has no port between 1 and 65535", q.Host).WithField("host")
		}
		text, port = h, uint16(n)
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
	rule := dec.Rules[0]
	if q.Method != "" && (a.Mode == boxed.EgressIntercept || port == 80) {
		var reason boxed.EgressReason
		if rule, reason = dec.Request(strings.ToUpper(q.Method), cmp.Or(q.Path, "/")); rule == nil {
			no := answer(reason, "", host, port)
			no.Rule, no.Mode = dec.Rule, a.Mode
			return no, nil
		}
		a.Rule = rule.String()
	}
	if rule.Binding != nil {
		a.Credential = rule.Binding.Secret
	}
	if policy.Exit != "" && policy.Exit != k.cfg.Node {
		a.Detail = "by way of the node " + string(policy.Exit) + ", which judges the address"
		return a, nil
	}
	addrs, r := k.cfg.Proxy.addresses(ctx, k.cfg.Proxy.judge, host, port)
	if r != nil {
		no := answer(r.Reason, r.Detail, host, port)
		no.Rule, no.Mode = a.Rule, a.Mode
		return no, nil
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
	for rec, err := range records {
		if err != nil {
			continue // a line that cannot be read has nothing to add
		}
		switch rec.Reason {
		case boxed.EgressAllowed, boxed.EgressNotListed, boxed.EgressPort, boxed.EgressMethod, boxed.EgressPath, boxed.EgressNotAnswered:
		default:
			continue // no rule would have helped
		}
		port := rec.Port
		if rec.Entry == boxed.EntryDNS { // what it would have connected to is not known
			port = 443
		}
		host, err := ParseHost(rec.Host)
		if err != nil || port == 0 {
			continue
		}
		k := key{host.String(), port}
		r := asked[k]
		if r == nil {
			r = &boxed.EgressRule{Host: k.host, Ports: []uint16{port}}
			asked[k] = r
		}
		if rec.Method != "" {
			if port != 80 {
				r.Mode = boxed.EgressIntercept
			}
			if !slices.Contains(r.Methods, rec.Method) {
				r.Methods = append(r.Methods, rec.Method)
			}
		}
	}
	name := cmp.Or(s.Name, "suggested")
	p := boxed.EgressProfile{Version: 1, Name: name, Rules: []boxed.EgressRule{}}
	for k, r := range asked {
		slices.Sort(r.Methods)
		if other := asked[key{k.host, 443}]; r.Ports[0] == 443 && other != r {
			continue
		}
		p.Rules = append(p.Rules, *r)
	}
	slices.SortFunc(p.Rules, func(a, b boxed.EgressRule) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), cmp.Compare(a.Ports[0], b.Ports[0]))
	})
	return CheckProfile(p)
}

// Diff says what a change of a profile widens and narrows, for a person. old is nil for one
// that is new.
func Diff(old, now *boxed.EgressProfile) (widened, narrowed []string) {
	tuples := func(p *boxed.EgressProfile) map[string]bool {
		set := map[string]bool{}
		if p == nil {
			return set
		}
		for _, r := range p.Rules {
			if c, err := compileRule(r); err == nil {
				for _, port := range c.Ports {
					set[describe(c, port)] = true
				}
			}
		}
		return set
	}
	before, after := tuples(old), tuples(now)
	for t := range after {
		if !before[t] {
			widened = append(widened, t)
		}
	}
	for t := range before {
		if !after[t] {
			narrowed = append(narrowed, t)
		}
	}
	var denied []string
	if old != nil {
		denied = old.Deny
	}
	for _, d := range now.Deny {
		if !slices.Contains(denied, d) {
			narrowed = append(narrowed, "deny "+d)
		}
	}
	for _, d := range denied {
		if !slices.Contains(now.Deny, d) {
			widened = append(widened, "no longer denied: "+d)
		}
	}
	if old != nil && old.OnDeny != now.OnDeny {
		to := cmp.Or(now.OnDeny, boxed.DenyRefuse)
		if to == boxed.DenyAsk {
			widened = append(widened, "on_deny: ask")
		} else {
			narrowed = append(narrowed, "on_deny: refuse")
		}
	}
	slices.Sort(widened)
	slices.Sort(narrowed)
	return widened, narrowed
}

// describe is a rule's part for one port, all of it.
func describe(r *Rule, port uint16) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d %s", r.Pattern, port, r.Mode)
	for _, list := range [][]string{r.Methods, r.Paths} {
		if len(list) > 0 {
			b.WriteString(" " + strings.Join(list, ","))
		}
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
