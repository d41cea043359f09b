package egress_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// What is said beforehand is what happens.
func TestCheckSaysWhatHappens(t *testing.T) {
	r := newRig(t)
	r.site("api.github.com", nil)
	r.site("api.anthropic.com", nil)
	r.site("read.example.com", nil)
	r.secret(boxed.Secret{Name: "github", Preset: "github"}, realGitHub)
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic", HeldBy: otherNode}, "")
	r.profile(boxed.EgressProfile{Name: "p", Rules: []boxed.EgressRule{
		{Host: "read.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET", "POST"}, Paths: []string{"/a/"}},
	}})
	b := r.box(boxed.EgressSpec{Profile: "p", Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"acme/app"}}, {Name: "anthropic"}}})
	foresee := func(q boxed.EgressQuery) *boxed.EgressAnswer {
		t.Helper()
		a, err := r.keeper.Foresee(t.Context(), b.id, q)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	c := b.client(boxed.EntryHTTP, "h2")
	for _, x := range []struct {
		host, method, path string
		reason             boxed.EgressReason
	}{
		{"read.example.com", "GET", "/a/b", boxed.EgressAllowed},
		{"read.example.com", "POST", "/a/b?c=d", boxed.EgressAllowed},
		{"read.example.com", "GET", "/b", boxed.EgressPath},
		{"read.example.com", "PUT", "/a/", boxed.EgressMethod},
		{"read.example.com", "GET", "/a/../b", boxed.EgressInvalidRequest},
		{"read.example.com", "TRACE", "/a/", boxed.EgressMethod},
		{"api.github.com", "POST", "/graphql", boxed.EgressGraphQL},
		{"api.github.com", "GET", "/repos/acme/app/pulls", boxed.EgressAllowed},
	} {
		said := foresee(boxed.EgressQuery{Host: x.host, Method: x.method, Path: x.path})
		happened := boxed.EgressAllowed
		if a := send(t, c, request(t, x.method, "https://"+x.host+x.path, "")); a.reason != "" {
			happened = a.reason
		}
		if said.Reason != x.reason || happened != x.reason {
			t.Errorf("%s %s%s: it was said to be %s, and was %s; want %s", x.method, x.host, x.path, said.Reason, happened, x.reason)
		}
	}
	if a := foresee(boxed.EgressQuery{Host: "api.anthropic.com"}); !a.Allowed || !strings.Contains(a.Detail, string(otherNode)) || len(a.Addresses) > 0 || r.names.count("api.anthropic.com") > 0 {
		t.Errorf("what its holder connects to: %+v", a)
	}
	r.revoke(rigOwner, "github")
	if a := foresee(boxed.EgressQuery{Host: "api.github.com"}); a.Reason != boxed.EgressNoCredential {
		t.Errorf("with its secret revoked: %+v", a)
	}
	if a := foresee(boxed.EgressQuery{Host: "db.example.com:5432"}); !strings.HasSuffix(a.Hint, "db.example.com:5432") {
		t.Errorf("the hint is %q", a.Hint)
	}
}

// A suggestion is a profile, whatever was asked for, and lets it through.
func TestASuggestionLetsThroughWhatWasAskedFor(t *testing.T) {
	records := []boxed.EgressRecord{
		{Host: "read.example.com", Port: 443, Method: "GET", Allowed: true, Reason: boxed.EgressAllowed, SNI: "read.example.com"},
		{Host: "read.example.com", Port: 443, Method: "TRACE", Reason: boxed.EgressMethod},
		{Host: "read.example.com", Port: 443, Method: "VERSION-CONTROL", Allowed: true, Reason: boxed.EgressAllowed},
		{Host: "db.example.com", Entry: boxed.EntryDNS, Reason: boxed.EgressNotListed},
		{Host: "db.example.com", Port: 5432, Allowed: true, Reason: boxed.EgressAllowed},
		{Host: "tls.example.com", Port: 8443, Allowed: true, Reason: boxed.EgressAllowed, SNI: "tls.example.com"},
		{Host: "looked-up.example.com", Entry: boxed.EntryDNS, Reason: boxed.EgressNotListed},
		{Host: "evil\x00", Port: 443, Reason: boxed.EgressNotListed},
	}
	for i := range 600 {
		records = append(records, boxed.EgressRecord{Host: fmt.Sprintf("x%d.example.net", i), Port: 443, Reason: boxed.EgressNotListed})
	}
	p, err := egress.Suggest(&boxed.Sandbox{Name: "build"}, func(yield func(boxed.EgressRecord, error) bool) {
		for _, rec := range records {
			if !yield(rec, nil) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	rules := map[string]boxed.EgressRule{}
	for _, r := range p.Rules {
		rules[fmt.Sprintf("%s:%d", r.Host, r.Ports[0])] = r
	}
	if r := rules["read.example.com:443"]; r.Mode != boxed.EgressIntercept || !slices.Equal(r.Methods, []string{"GET"}) {
		t.Errorf("%+v", r)
	}
	if r, ok := rules["db.example.com:443"]; ok || !rules["db.example.com:5432"].Raw {
		t.Errorf("%+v %+v", r, rules["db.example.com:5432"])
	}
	if rules["tls.example.com:8443"].Raw || rules["looked-up.example.com:443"].Host == "" || len(p.Rules) != 512 {
		t.Errorf("%d rules, %+v", len(p.Rules), rules["tls.example.com:8443"])
	}
}

// What a change widens and narrows is said, and nothing else is.
func TestAChangeSaysWhatItDoes(t *testing.T) {
	yes := true
	profile := func(rules ...boxed.EgressRule) *boxed.EgressProfile {
		return &boxed.EgressProfile{Version: 1, Name: "p", Rules: rules}
	}
	read := boxed.EgressRule{Host: "a.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET", "POST"}}
	swapped, sockets := read, read
	swapped.Methods, sockets.WebSocket = []string{"POST", "GET"}, &yes
	wide := boxed.EgressRule{Host: "*.example.com"}
	exits, refuses := profile(read), profile(read)
	exits.Exit, refuses.OnDeny = otherNode, boxed.DenyRefuse
	for name, c := range map[string]struct {
		old, now          *boxed.EgressProfile
		widened, narrowed string
	}{
		"nothing":              {profile(read), profile(swapped), "", ""},
		"refuse is as always":  {profile(read), refuses, "", ""},
		"a WebSocket":          {profile(read), profile(sockets), "a.example.com:443 intercept GET,POST websocket true", "a.example.com:443 intercept GET,POST"},
		"an exit":              {profile(read), exits, "exit: " + string(otherNode), "exit: the sandbox's node"},
		"less of a wildcard":   {profile(wide), profile(wide, read), "a.example.com:443 intercept GET,POST", "a.example.com:443 is no longer of *.example.com"},
		"a wildcard's again":   {profile(wide, read), profile(wide), "a.example.com:443 is of *.example.com again", "a.example.com:443 intercept GET,POST"},
		"one that is all anew": {nil, profile(read), "a.example.com:443 intercept GET,POST", ""},
	} {
		widened, narrowed := egress.Diff(c.old, c.now)
		if got := strings.Join(widened, "; "); got != c.widened {
			t.Errorf("%s widens %q, want %q", name, got, c.widened)
		}
		if got := strings.Join(narrowed, "; "); got != c.narrowed {
			t.Errorf("%s narrows %q, want %q", name, got, c.narrowed)
		}
	}
}

// What changes by itself in a sandbox's egress is told: programs have new variables, and its
// record is what a restart finds.
func TestWhatASecretBringsIsRenewed(t *testing.T) {
	renewed := make(chan *boxed.EgressGrant, 8)
	r := newRig(t, func(c *rigConfig) { c.Keeper.Renewed = func(_ boxed.ID, g *boxed.EgressGrant) { renewed <- g } })
	r.site("api.anthropic.com", nil)
	rule := boxed.EgressRule{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", Need: boxed.CredentialOptional}
	b := r.ruled(rule)
	if b.grant.Env["ANTHROPIC_API_KEY"] != "" {
		t.Fatal(b.grant.Env)
	}
	r.profile(boxed.EgressProfile{Name: "unrelated", Rules: []boxed.EgressRule{}})
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	g := <-renewed
	key := g.Env["ANTHROPIC_API_KEY"]
	if key == "" || len(renewed) > 0 {
		t.Fatalf("the grant is %v, and %d more", g.Env, len(renewed))
	}
	// After a restart the placeholder is the one that programs have.
	sb := &boxed.Sandbox{ID: b.id, Owner: rigOwner}
	r.keeper.Detach(b.id)
	if err := r.keeper.Restore(sb, g); err != nil {
		t.Fatal(err)
	}
	b.grant = g
	if a := send(t, b.client(boxed.EntryHTTP, "h2"), request(t, "GET", "https://api.anthropic.com/v1/models", "", "X-Api-Key: "+b.token("ANTHROPIC_API_KEY"))); a.StatusCode != http.StatusOK {
		t.Errorf("%d %s", a.StatusCode, a.reason)
	}
	// One that cannot be read stays shut, and says why, whatever else changes.
	r.keeper.Detach(b.id)
	broken := *g
	broken.State = []byte("broken")
	if err := r.keeper.Restore(sb, &broken); err == nil {
		t.Error("it was read")
	}
	r.profile(boxed.EgressProfile{Name: "unrelated-too", Rules: []boxed.EgressRule{}})
	if st := r.keeper.Status(b.id); st.State != boxed.EgressClosed || !strings.Contains(st.Reason, "cannot be read") {
		t.Errorf("its status is %+v", st)
	}
	b.refusedBy(t, boxed.EntryHTTP, "api.anthropic.com", 443, boxed.EgressNoProfile)
	if _, err := r.keeper.Attach(sb, &g.Spec); err != nil {
		t.Errorf("it cannot be set anew: %v", err)
	}
}

// What is allowed one by one is bounded, and each host is there once.
func TestHostsThatAreAllowedAreBounded(t *testing.T) {
	r := newRig(t)
	b := r.profiled(boxed.EgressProfile{Rules: []boxed.EgressRule{}})
	for _, host := range []string{"A.example.com", "a.example.com:443", " a.example.com."} {
		if _, err := r.keeper.Allow(b.id, host, time.Hour, false); err != nil {
			t.Fatal(err)
		}
	}
	if st := r.keeper.Status(b.id); len(st.Allowed) != 1 {
		t.Errorf("%+v", st.Allowed)
	}
	for i := range 127 {
		if _, err := r.keeper.Allow(b.id, fmt.Sprintf("x%d.example.com:22", i), 0, false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.keeper.Allow(b.id, "more.example.com", 0, false); boxed.CodeOf(err) != boxed.CodeQuota {
		t.Errorf("the 129th: %v", err)
	}
	if _, err := r.keeper.Allow(b.id, "a.example.com", 0, false); err != nil {
		t.Errorf("one that is there: %v", err)
	}
}
