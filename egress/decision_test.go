package egress_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// Few names, so that what is drawn meets.
var (
	drawnHosts    = []string{"a.example.com", "b.example.com", "a.b.example.com", "example.com", "a.example.org", "198.51.100.7", "93.184.216.34"}
	drawnPatterns = append([]string{"*", "*.example.com", "*.b.example.com", "*.example.org"}, drawnHosts...)
	drawnPorts    = []uint16{22, 80, 443, 8443}
)

// drawPolicy draws one that is valid.
func drawPolicy(t *rapid.T) *egress.Policy {
	var rules []boxed.EgressRule
	for range rapid.IntRange(0, 5).Draw(t, "rules") {
		rules = append(rules, boxed.EgressRule{
			Host:  rapid.SampledFrom(drawnPatterns).Draw(t, "host"),
			Ports: rapid.SliceOfNDistinct(rapid.SampledFrom(drawnPorts), 1, 3, rapid.ID).Draw(t, "ports"),
		})
	}
	deny := rapid.SliceOfN(rapid.SampledFrom(drawnPatterns[1:]), 0, 2).Draw(t, "deny")
	hostDeny := rapid.SliceOfN(rapid.SampledFrom(drawnPatterns[1:]), 0, 1).Draw(t, "host deny")
	p, err := egress.NewPolicy(rules, deny, hostDeny)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// EH15: claude-code#87381: a CONNECT that was relayed was allowed where a direct one was
// denied. Here a decision is of the policy and the question, whatever was asked before and by
// whichever entry.
func TestADecisionIsOfThePolicyAndTheQuestionAlone(t *testing.T) {
	r := newRig(t)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		policy := drawPolicy(rt)
		text := rapid.SampledFrom(drawnHosts).Draw(rt, "ask for")
		port := rapid.SampledFrom(drawnPorts).Draw(rt, "port")
		h, err := egress.ParseHost(text)
		if err != nil {
			rt.Fatal(err)
		}
		first := policy.Decide(h, port)
		for _, other := range drawnHosts {
			o, _ := egress.ParseHost(other)
			policy.Decide(o, 443)
			policy.Known(o)
		}
		if again := policy.Decide(h, port); again.Reason != first.Reason || again.Rule != first.Rule {
			rt.Fatalf("asked again it is %+v, and was %+v", again, first)
		}
		n++
		b := &box{r: r, id: boxed.ID(fmt.Sprintf("drawn%05d-%s", n, rigNode))}
		r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: policy})
		defer r.proxy.Detach(b.id)
		want := first.Reason
		if first.Allowed() { // which it is here, and nobody has an address
			want = boxed.EgressNoAddress
			if h.IsAddr() {
				want = boxed.EgressConnectFailed
			}
			if text == "198.51.100.7" {
				want = boxed.EgressPrivateAddress
			}
		}
		for _, entry := range entries {
			conn, refused := b.connect(entry, text, port)
			if refused == nil {
				conn.Close()
				rt.Fatalf("%s to %s:%d was opened", entry, text, port)
			}
			if refused.Reason != want {
				rt.Fatalf("%s to %s:%d was refused for %v, and is to be for %s", entry, text, port, refused, want)
			}
		}
		if h.IsAddr() {
			return
		}
		code, ports := r.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: text, Type: 1})
		if known := policy.Known(h); (code == 0) != known.Allowed() || code == 0 && !slices.Equal(ports, known.Ports) {
			rt.Fatalf("DNS says %d %v of %s, and the policy %+v", code, ports, text, known)
		}
		if code == 0 != slices.Contains(ports, port) && first.Allowed() {
			rt.Fatalf("a connection to %s:%d is allowed, and DNS says %d %v", text, port, code, ports)
		}
	})
}

// The order is the operator's denials, the profile's, exact names, longer wildcards, shorter
// ones, nothing.
func TestTheMostSpecificRuleDecides(t *testing.T) {
	policy, err := egress.NewPolicy([]boxed.EgressRule{
		{Host: "*", Ports: []uint16{80}},
		{Host: "*.example.com", Ports: []uint16{443, 80}},
		{Host: "*.b.example.com", Ports: []uint16{443}},
		{Host: "a.example.com", Ports: []uint16{443}},
		{Host: "no.example.com"},
		{Host: "never.example.com"},
	}, []string{"no.example.com", "*.secret.example.com"}, []string{"never.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		host   string
		port   uint16
		reason boxed.EgressReason
		rule   string
	}{
		{"a.example.com", 443, boxed.EgressAllowed, "a.example.com:443"},
		{"a.example.com", 80, boxed.EgressAllowed, "*.example.com:80,443"}, // the exact rule is silent on port 80
		{"x.b.example.com", 443, boxed.EgressAllowed, "*.b.example.com:443"},
		{"x.example.com", 443, boxed.EgressAllowed, "*.example.com:80,443"},
		{"x.b.example.com", 80, boxed.EgressAllowed, "*:80"},
		{"other.org", 80, boxed.EgressAllowed, "*:80"},
		{"other.org", 443, boxed.EgressPort, ""},
		{"93.184.216.34", 80, boxed.EgressNotListed, ""}, // "*" is of names
		{"no.example.com", 443, boxed.EgressListDenied, "deny no.example.com"},
		{"x.secret.example.com", 80, boxed.EgressListDenied, "deny *.secret.example.com"},
		{"never.example.com", 443, boxed.EgressHostDenied, "deny never.example.com"},
	} {
		d := policy.Decide(host(t, c.host), c.port)
		if d.Reason != c.reason || d.Rule != c.rule {
			t.Errorf("%s:%d is %s by %q, and is to be %s by %q", c.host, c.port, d.Reason, d.Rule, c.reason, c.rule)
		}
	}
	if d := (*egress.Policy)(nil).Decide(host(t, "a.example.com"), 443); d.Reason != boxed.EgressNoProfile {
		t.Errorf("without a policy it is %s", d.Reason)
	}
}

// EP8: OpenShell#2499: the parts of two rules were put together, and allowed a pair that
// neither did.
func TestRulesAreTuplesAndNeverMerged(t *testing.T) {
	policy, err := egress.NewPolicy([]boxed.EgressRule{
		{Host: "api.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET"}, Paths: []string{"/read/"}},
		{Host: "api.example.com", Mode: boxed.EgressIntercept, Methods: []string{"POST"}, Paths: []string{"/write/"}},
		{Host: "one.example.com", Ports: []uint16{22}},
		{Host: "two.example.com", Ports: []uint16{443}},
	}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	d := policy.Decide(host(t, "api.example.com"), 443)
	got := map[string]boxed.EgressReason{}
	for _, method := range []string{"GET", "POST", "PUT"} {
		for _, path := range []string{"/read/x", "/write/x", "/other"} {
			_, reason := d.Request(method, path)
			got[method+" "+path] = reason
		}
	}
	want := map[string]boxed.EgressReason{
		"GET /read/x": boxed.EgressAllowed, "GET /write/x": boxed.EgressPath, "GET /other": boxed.EgressPath,
		"POST /read/x": boxed.EgressPath, "POST /write/x": boxed.EgressAllowed, "POST /other": boxed.EgressPath,
		"PUT /read/x": boxed.EgressMethod, "PUT /write/x": boxed.EgressMethod, "PUT /other": boxed.EgressMethod,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	for text, port := range map[string]uint16{"one.example.com": 443, "two.example.com": 22} {
		if d := policy.Decide(host(t, text), port); d.Allowed() {
			t.Errorf("%s:%d is allowed", text, port)
		}
	}
}

// Whatever the rules are, a decision comes, and a denial of the operator or of the profile
// stands above every rule.
func FuzzPolicy(f *testing.F) {
	f.Add("*\n*.example.com 443,80\nexample.com 22", "*.example.com", "api.example.com", uint16(443))
	f.Add("api.example.com", "api.example.com", "API.example.com.", uint16(443))
	f.Add("10.0.0.1 22", "", "10.0.0.1", uint16(22))
	f.Add("*.example.com intercept", "b.example.com", "a.example.com", uint16(0))
	f.Fuzz(func(t *testing.T, ruleText, denyText, hostText string, port uint16) {
		var rules []boxed.EgressRule
		for line := range strings.Lines(ruleText) {
			rule := boxed.EgressRule{}
			for i, field := range strings.Fields(line) {
				switch {
				case i == 0:
					rule.Host = field
				case field == "intercept":
					rule.Mode = boxed.EgressIntercept
				default:
					for p := range strings.SplitSeq(field, ",") {
						var n uint16
						fmt.Sscan(p, &n)
						rule.Ports = append(rule.Ports, n)
					}
				}
			}
			rules = append(rules, rule)
		}
		h, err := egress.ParseHost(hostText)
		if err != nil {
			return
		}
		denials := strings.Fields(denyText)
		for _, lists := range [][2][]string{{denials, nil}, {nil, denials}} {
			policy, err := egress.NewPolicy(rules, lists[0], lists[1])
			if err != nil {
				return
			}
			d, known := policy.Decide(h, port), policy.Known(h)
			for _, text := range denials {
				p, err := egress.ParsePattern(text)
				if err == nil && p.Match(h) && (d.Allowed() || known.Allowed()) {
					t.Errorf("%s is denied by %s, and allowed by %s", h, text, d.Rule)
				}
			}
			if d.Allowed() != (len(d.Rules) > 0) {
				t.Errorf("the decision is %s with %d rules", d.Reason, len(d.Rules))
			}
			for _, rule := range d.Rules {
				if !rule.Pattern.Match(h) || !slices.Contains(rule.Ports, port) || rule.Mode != d.Mode() {
					t.Errorf("%s:%d is allowed by %s", h, port, rule)
				}
			}
			if d.Allowed() && !known.Allowed() {
				t.Errorf("%s:%d is allowed, and the name is not known", h, port)
			}
		}
	})
}
