package egress

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Bounds of a profile.
const (
	maxRules   = 512
	maxPorts   = 16 // of a rule; an agent listens on as many for a name
	maxPaths   = 512
	maxPathLen = 1024 // bytes
)

// Rule is a rule as it is applied.
type Rule struct {
	boxed.EgressRule
	Pattern Pattern
	Binding *Binding // nil: none
	Slots   []Slot   // of Binding, at this host
	Source  string   // where it is from: "profile packages", "secret github", "allow"
	at      int      // among those that it was written with
}

// String names the rule in records and answers.
func (r *Rule) String() string {
	ports := make([]string, len(r.Ports))
	for i, p := range r.Ports {
		ports[i] = strconv.Itoa(int(p))
	}
	text := r.Pattern.String() + ":" + strings.Join(ports, ",")
	if r.Source != "" {
		text = r.Source + " " + text
	}
	return text
}

// Policy is what one sandbox may do: immutable, compiled once, asked often. It knows no
// network.
type Policy struct {
	Generation uint64
	Profile    string
	OnDeny     boxed.OnDeny
	Exit       boxed.NodeID
	hostDeny   []Pattern
	deny       []Pattern
	rules      []*Rule // most specific first
}

// Decision is what a policy says to a host and a port.
type Decision struct {
	Reason boxed.EgressReason // EgressAllowed or why not
	Rules  []*Rule            // of the pair, all with the same mode; none unless allowed
	Ports  []uint16           // that some rule of the host names
	Rule   string             // that decided
}

// Allowed reports whether a connection may be tried.
func (d Decision) Allowed() bool { return d.Reason == boxed.EgressAllowed }

// Mode is that of the rules.
func (d Decision) Mode() boxed.EgressMode { return d.Rules[0].Mode }

// Decide judges a host and a port: host deny, profile deny, exact names, longer wildcards,
// shorter ones, nothing. It is a function of the policy and what is asked, of nothing else,
// whatever way it came in.
func (p *Policy) Decide(host Host, port uint16) Decision {
	if p == nil {
		return Decision{Reason: boxed.EgressNoProfile}
	}
	if d, hit := denied(p.hostDeny, host); hit {
		return Decision{Reason: boxed.EgressHostDenied, Rule: "deny " + d.String()}
	}
	if d, hit := denied(p.deny, host); hit {
		return Decision{Reason: boxed.EgressListDenied, Rule: "deny " + d.String()}
	}
	dec := Decision{Reason: boxed.EgressNotListed}
	for _, r := range p.rules {
		if !r.Pattern.Match(host) {
			continue
		}
		dec.Reason = boxed.EgressPort
		for _, port := range r.Ports {
			if !slices.Contains(dec.Ports, port) {
				dec.Ports = append(dec.Ports, port)
			}
		}
		if !slices.Contains(r.Ports, port) || (len(dec.Rules) > 0 && dec.Rules[0].Pattern != r.Pattern) {
			continue
		}
		dec.Rules = append(dec.Rules, r)
	}
	if len(dec.Rules) > 0 {
		dec.Reason, dec.Rule = boxed.EgressAllowed, dec.Rules[0].String()
	}
	return dec
}

// denies returns an error unless a name that only a rule for any name could have meant is
// refused.
func (p *Policy) denies(canary Host) error {
	d := p.Decide(canary, 443)
	if d.Allowed() && !d.Rules[0].Pattern.Any() {
		return fmt.Errorf("%s is allowed by %s", canary, d.Rule)
	}
	return nil
}

// Known reports whether some rule names the host, and the ports that rules name.
func (p *Policy) Known(host Host) Decision {
	d := p.Decide(host, 0)
	if d.Reason == boxed.EgressPort {
		d.Reason = boxed.EgressAllowed
	}
	return d
}

func denied(list []Pattern, host Host) (Pattern, bool) {
	for _, p := range list {
		if p.Match(host) {
			return p, true
		}
	}
	return Pattern{}, false
}

// Request picks the rule that allows a request that the proxy can read. path is as it was
// sent, escaped. The last reason is that of the rule that came closest.
func (d Decision) Request(method, path string) (*Rule, boxed.EgressReason) {
	reason := boxed.EgressMethod
	for _, r := range d.Rules {
		if len(r.Methods) > 0 && !slices.Contains(r.Methods, method) {
			continue
		}
		if len(r.Paths) == 0 || slices.ContainsFunc(r.Paths, func(p string) bool { return pathMatches(p, path) }) {
			return r, boxed.EgressAllowed
		}
		reason = boxed.EgressPath
	}
	return nil, reason
}

// admit picks the rule for a request that the proxy reads, or says why there is none.
func (d Decision) admit(method, path string) (*Rule, *refusal) {
	switch strings.ToUpper(method) { // HTTP/2 has them too
	case http.MethodConnect: // EF5: a tunnel within, which nobody would judge
		return nil, refuse(boxed.EgressInvalidRequest, "a CONNECT within a connection")
	case http.MethodTrace, "TRACK": // ER2
		return nil, &refusal{Reason: boxed.EgressMethod, Detail: "the method gives back what it was sent, credentials too", Status: http.StatusMethodNotAllowed}
	}
	if d.HasPaths() && !Canonical(path) {
		return nil, refuse(boxed.EgressInvalidRequest, "a path that can be read in several ways, where rules name paths")
	}
	rule, reason := d.Request(method, path)
	if rule != nil {
		return rule, nil
	}
	limited := func(r *Rule) bool { return r.Binding != nil && r.Binding.Limited }
	if isGraphQL(path) && slices.ContainsFunc(d.Rules, limited) {
		reason = boxed.EgressGraphQL
	}
	return nil, &refusal{Reason: reason, Rule: d.Rule}
}

// isGraphQL finds requests whose target is in their body.
func isGraphQL(path string) bool {
	return strings.HasSuffix(strings.TrimSuffix(strings.ToLower(path), "/"), "/graphql")
}

// webSocket reports whether a connection may become one: by default where there is no
// credential.
func (r *Rule) webSocket() bool {
	if r.WebSocket != nil {
		return *r.WebSocket
	}
	return r.Binding == nil
}

// HasPaths reports whether a path decides: then it must be one that is read in one way.
func (d Decision) HasPaths() bool {
	return slices.ContainsFunc(d.Rules, func(r *Rule) bool { return len(r.Paths) > 0 })
}

// pathMatches compares a path with a rule's: one that ends at a "/" is a prefix, and a "*"
// is one whole segment.
func pathMatches(rule, path string) bool {
	if !strings.Contains(rule, "*") {
		return path == rule || strings.HasSuffix(rule, "/") && strings.HasPrefix(path, rule)
	}
	for {
		want, ruleRest, more := strings.Cut(rule, "/")
		have, rest, deeper := strings.Cut(path, "/")
		if want != have && (want != "*" || have == "") {
			return false
		}
		if !more || !deeper {
			return more == deeper
		}
		if rule, path = ruleRest, rest; rule == "" {
			return true // it ended at a "/"
		}
	}
}

// Canonical reports whether every server reads the path in the same way: no dot segments,
// also encoded, no empty ones, no encoded slashes next to dots, no backslashes, no
// parameters on a dot segment. EF10: OpenShell#878, #2699.
func Canonical(path string) bool {
	if !strings.HasPrefix(path, "/") || strings.Contains(path, "//") || strings.ContainsAny(path, "\\\x00") {
		return false
	}
	low := strings.ToLower(path)
	if strings.Contains(low, "%5c") || strings.Contains(low, "%00") || strings.Contains(low, "%25") {
		return false
	}
	// Also as one sees it who decodes slashes, which npm's scoped names have.
	for _, p := range []string{low, strings.ReplaceAll(low, "%2f", "/")} {
		for _, seg := range strings.Split(p, "/") {
			seg, _, _ = strings.Cut(seg, ";")
			switch strings.ReplaceAll(seg, "%2e", ".") {
			case ".", "..":
				return false
			}
		}
	}
	return true
}

// compileRules checks rules and completes them; field names what is wrong.
func compileRules(rules []boxed.EgressRule, source string) ([]*Rule, error) {
	if len(rules) > maxRules {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%d rules, at most %d are allowed", len(rules), maxRules).WithField("rules")
	}
	out := make([]*Rule, 0, len(rules))
	for i, r := range rules {
		c, err := compileRule(r)
		if err != nil {
			return nil, boxed.Errorf(boxed.CodeInvalid, "rules[%d]: %w", i, err).WithField(fmt.Sprintf("rules[%d]", i))
		}
		c.Source, c.at = source, i
		out = append(out, c)
	}
	return out, nil
}

// compileRule checks one rule and fills in its defaults.
func compileRule(r boxed.EgressRule) (*Rule, error) {
	pattern, err := ParsePattern(r.Host)
	if err != nil {
		return nil, err
	}
	r.Host = pattern.String()
	if r.Ports == nil {
		r.Ports = []uint16{443}
	}
	r.Ports = slices.Clone(r.Ports)
	slices.Sort(r.Ports)
	r.Ports = slices.Compact(r.Ports)
	r.Mode = cmp.Or(r.Mode, boxed.EgressTunnel)
	plain := slices.Equal(r.Ports, []uint16{80})
	readable := r.Mode == boxed.EgressIntercept || plain
	switch {
	case len(r.Ports) == 0 || len(r.Ports) > maxPorts || r.Ports[0] == 0:
		return nil, fmt.Errorf("ports are 1 to %d numbers between 1 and 65535", maxPorts)
	case r.Mode != boxed.EgressTunnel && r.Mode != boxed.EgressIntercept:
		return nil, fmt.Errorf("the mode is tunnel or intercept, not %q", r.Mode)
	case r.Mode == boxed.EgressIntercept && (pattern.Any() || pattern.Host().IsAddr()):
		return nil, fmt.Errorf("interception needs a name: its certificate has one")
	case r.Credential != "" && r.Mode != boxed.EgressIntercept:
		return nil, fmt.Errorf("a credential needs mode: intercept")
	case r.Credential != "" && !pattern.Exact():
		return nil, fmt.Errorf("a credential needs an exact host, not %s", pattern)
	case r.Credential != "" && slices.Contains(r.Ports, 80):
		return nil, fmt.Errorf("a credential is only used over TLS, not on port 80")
	case r.Need != "" && r.Need != boxed.CredentialRequired && r.Need != boxed.CredentialOptional:
		return nil, fmt.Errorf("the need of a credential is required or optional, not %q", r.Need)
	case r.Need != "" && r.Credential == "":
		return nil, fmt.Errorf("need is of a credential, and there is none")
	case (len(r.Methods) > 0 || len(r.Paths) > 0) && !readable:
		return nil, fmt.Errorf("methods and paths need mode: intercept, or port 80 alone: a tunnel cannot be read")
	case r.Raw && (!pattern.Exact() || r.Mode == boxed.EgressIntercept || slices.Contains(r.Ports, 443) || slices.Contains(r.Ports, 80)):
		return nil, fmt.Errorf("raw needs an exact host, the mode tunnel, and neither port 80 nor 443")
	case r.AllowECH && r.Mode != boxed.EgressTunnel:
		return nil, fmt.Errorf("allow_ech is for tunnels")
	case r.Methods != nil && len(r.Methods) == 0, r.Paths != nil && len(r.Paths) == 0:
		return nil, fmt.Errorf("an empty list of methods or paths allows nothing; leave it away, or the rule")
	}
	for _, m := range r.Methods {
		if !isMethod(m) {
			return nil, fmt.Errorf("%q is no method that can be allowed; methods are in upper case", m)
		}
	}
	if len(r.Paths) > maxPaths {
		return nil, fmt.Errorf("%d paths, at most %d are allowed", len(r.Paths), maxPaths)
	}
	for _, p := range r.Paths {
		if len(p) > maxPathLen || !Canonical(p) || strings.ContainsAny(p, "?# ") || partStar(p) {
			return nil, fmt.Errorf("%.80q is no path: it begins with /, has no dot segments and no query; one that ends at / is a prefix, and a * is one whole segment", p)
		}
	}
	return &Rule{EgressRule: r, Pattern: pattern}, nil
}

// isMethod reports whether a rule may name the method.
func isMethod(m string) bool {
	return m != "" && len(m) <= framingMethod && !strings.ContainsFunc(m, func(c rune) bool { return c < 'A' || c > 'Z' }) && m != http.MethodTrace && m != http.MethodConnect
}

// partStar reports whether a "*" is a part of a segment.
func partStar(path string) bool {
	return slices.ContainsFunc(strings.Split(path, "/"), func(seg string) bool { return seg != "*" && strings.Contains(seg, "*") })
}

// order puts the most specific rules first, and refuses what contradicts itself.
func order(rules []*Rule) error {
	slices.SortStableFunc(rules, func(a, b *Rule) int { return cmp.Compare(b.Pattern.Rank(), a.Pattern.Rank()) })
	for i, a := range rules {
		for _, b := range rules[i+1:] {
			if a.Pattern != b.Pattern || !slices.ContainsFunc(a.Ports, func(p uint16) bool { return slices.Contains(b.Ports, p) }) {
				continue
			}
			var err *boxed.Error
			switch {
			case a.Mode != b.Mode || a.Raw != b.Raw:
				err = boxed.Errorf(boxed.CodeInvalid, "%s and %s name the same host and port, and want different things done with it", a, b)
			case a.secret() != b.secret() && a.Credential != "" && b.Credential != "" && overlap(a, b):
				err = boxed.Errorf(boxed.CodeInvalid, "%s and %s have different credentials, %q and %q, for the same requests", a, b, a.Credential, b.Credential)
			default:
				continue
			}
			if a.Source == "" { // of one profile
				err = err.WithField(fmt.Sprintf("rules[%d]", max(a.at, b.at)))
			}
			return err
		}
	}
	return nil
}

// secret is which one a rule's credential is.
func (r *Rule) secret() string {
	if r.Binding != nil {
		return r.Binding.key
	}
	return r.Credential
}

// overlap reports whether one request could be of both.
func overlap(a, b *Rule) bool {
	any := func(a, b []string, eq func(x, y string) bool) bool {
		return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(x string) bool {
			return slices.ContainsFunc(b, func(y string) bool { return eq(x, y) })
		})
	}
	return any(a.Methods, b.Methods, func(x, y string) bool { return x == y }) &&
		any(a.Paths, b.Paths, pathsMeet)
}

// pathsMeet reports whether some path is of two rules.
func pathsMeet(a, b string) bool {
	for {
		x, restA, moreA := strings.Cut(a, "/")
		y, restB, moreB := strings.Cut(b, "/")
		switch {
		case x != y && !(x == "*" && y != "") && !(y == "*" && x != ""):
			return false
		case !moreA || !moreB:
			return moreA == moreB
		case restA == "" || restB == "": // one ended at a "/"
			return true
		}
		a, b = restA, restB
	}
}

// hashOf names the content of what a person wrote.
func hashOf(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return "" // strings and numbers can always be encoded
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:8])
}
