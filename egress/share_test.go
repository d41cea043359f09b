package egress_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

const (
	bob     = "bob@example.com"
	carol   = "carol@example.com"
	realCRM = "crm-R3al-k3y-of-b0b-0123456789"
)

// EC5, EC6: OpenShell#2510. Whoever may use a secret uses it where its owner says: a profile of
// their own takes it to no other host, and to no other paths and methods.
func TestASharedSecretGoesWhereItsOwnerSays(t *testing.T) {
	r := newRig(t)
	mine, theirs := r.site("collector.example.com", nil), r.site("api.crm.example.com", nil)
	r.secret(boxed.Secret{
		Name: "crm", Owner: bob, May: []string{rigOwner}, Preset: "generic", Hosts: []string{"api.crm.example.com"},
		Paths: []string{"/v1/contacts/"}, Methods: []string{"GET"}, Env: []string{"CRM_KEY"},
	}, realCRM)
	for name, rule := range map[string]boxed.EgressRule{
		"another host": {Host: "collector.example.com"},
		"another port": {Host: "api.crm.example.com", Ports: []uint16{8443}},
		"a port more":  {Host: "api.crm.example.com", Ports: []uint16{443, 8443}},
	} {
		rule.Mode, rule.Credential = boxed.EgressIntercept, bob+"/crm"
		r.profile(boxed.EgressProfile{Name: "mine", Owner: rigOwner, Rules: []boxed.EgressRule{rule}})
		if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "mine"}); !errors.Is(err, boxed.CodeInvalid) || !strings.Contains(err.Error(), "api.crm.example.com:443") {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.profile(boxed.EgressProfile{Name: "mine", Owner: rigOwner, Rules: []boxed.EgressRule{
		{Host: "api.crm.example.com", Mode: boxed.EgressIntercept, Credential: bob + "/crm"}, intercepted("collector.example.com"),
	}})
	for name, spec := range map[string]boxed.EgressSpec{
		"by a profile": {Profile: "mine"},
		"by both":      {Profile: "mine", Secrets: []boxed.SecretUse{{Name: bob + "/crm", ReadOnly: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			b := r.box(spec)
			key := "Authorization: Bearer " + b.token("CRM_KEY")
			readers(t, b, func(t *testing.T, c *http.Client) {
				const host = "https://api.crm.example.com"
				if a := send(t, c, request(t, "GET", host+"/v1/contacts/7", "", key)); a.StatusCode != 200 || theirs.last(t).Header.Get("Authorization") != "Bearer "+realCRM {
					t.Errorf("where it is good it is %d %s", a.StatusCode, a.reason)
				}
				n := len(theirs.requests())
				send(t, c, request(t, "GET", host+"/v1/export", "", key)).want(t, 403, boxed.EgressPath)
				send(t, c, request(t, "POST", host+"/v1/contacts/7", "{}", key)).want(t, 403, boxed.EgressPath)
				if a := send(t, c, request(t, "GET", host+"/v1/contacts/../export", "", key)); a.StatusCode < 400 {
					t.Errorf("a path that two could read in two ways: %d", a.StatusCode)
				}
				send(t, c, request(t, "GET", "https://collector.example.com/", "", key)).want(t, 403, boxed.EgressMisuse)
				if len(theirs.requests()) != n {
					t.Error("what was refused has left")
				}
			})
		})
	}
	mine.untouched(t)
}

// Nobody has another use a secret that they did not mean: one that is shared is named with its
// owner, unless an administrator shares it with all, and a sandbox keeps what it has.
func TestASecretOfTheSameNameReplacesNone(t *testing.T) {
	r := newRig(t)
	share := func(owner, host, value string) {
		r.secret(boxed.Secret{Name: "deploy", Owner: owner, May: []string{"*"}, Preset: "generic", Hosts: []string{host}, Env: []string{"DEPLOY"}}, value)
	}
	s := r.site("bob.example.com", nil)
	share(carol, "carol.example.com", "carols-0123456789")
	r.revoke(carol, "deploy")
	share(bob, "bob.example.com", realCRM)
	r.secret(boxed.Secret{Name: "gift", Owner: bob, May: []string{rigOwner}, Preset: "anthropic"}, realAnthropic)
	use := func(name string) boxed.EgressSpec { return boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: name}}} }
	b := r.box(use("deploy"))
	works := func() {
		t.Helper()
		a := send(t, b.client(boxed.EntryHTTP, "h2"), request(t, "GET", "https://bob.example.com/", "", "Authorization: Bearer "+b.token("DEPLOY")))
		if a.StatusCode != 200 || s.last(t).Header.Get("Authorization") != "Bearer "+realCRM {
			t.Errorf("it is %d %s", a.StatusCode, a.reason)
		}
	}
	if _, err := r.tryBox(rigOwner, use("gift")); !errors.Is(err, boxed.CodeNotFound) || !strings.Contains(err.Error(), bob+"/gift") {
		t.Errorf("one that somebody shares, by its name alone: %v", err)
	}
	if _, err := r.tryBox(rigOwner, use(bob+"/gift")); err != nil {
		t.Errorf("one that somebody shares: %v", err)
	}
	// With one of each, a name means what it meant.
	r.secret(boxed.Secret{Name: "gift", Preset: "generic", Hosts: []string{"own.example.com"}, Env: []string{"OWN"}}, "own-of-alice-0123456789")
	both, err := r.tryBox(rigOwner, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "aaa@example.com/gift"}, {Name: "gift"}}})
	if err == nil {
		t.Errorf("one that nobody shares: %+v", both)
	}
	if both, err = r.tryBox(rigOwner, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: bob + "/gift"}, {Name: "gift"}}}); err != nil || both.grant.Env["OWN"] == "" || both.grant.Env["ANTHROPIC_API_KEY"] == "" {
		t.Errorf("two of one name: %v", err)
	}
	r.profile(boxed.EgressProfile{Name: "renews", Rules: []boxed.EgressRule{}})
	if st := r.keeper.Status(both.id); st.State != boxed.EgressOpen {
		t.Errorf("two of one name, renewed: %+v", st)
	}
	works()
	share("aaron@example.com", "aaron.example.com", "aarons-0123456789")
	works()
	b.refusedBy(t, boxed.EntryHTTP, "aaron.example.com", 443, boxed.EgressNotListed)
	if _, err := r.tryBox(rigOwner, use("deploy")); !errors.Is(err, boxed.CodeConflict) || !strings.Contains(err.Error(), "aaron@example.com/deploy") {
		t.Errorf("which one is not known: %v", err)
	}
	if got, err := r.tryBox(rigOwner, use(bob+"/deploy")); err != nil || len(got.grant.Spec.Secrets) != 1 {
		t.Errorf("with its owner: %v", err)
	}
	if _, err := r.tryBox(rigOwner, use("dora@example.com/deploy")); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("of somebody who shares none: %v", err)
	}
	// Revoked, it is not replaced by the other one either.
	r.revoke(bob, "deploy")
	b.refusedBy(t, boxed.EntryHTTP, "aaron.example.com", 443, boxed.EgressNotListed)
	send(t, b.client(boxed.EntryHTTP, "h2"), request(t, "GET", "https://bob.example.com/", "", "Authorization: Bearer "+b.token("DEPLOY"))).want(t, 503, boxed.EgressNoCredential)
}

// What a secret is limited to is limited: nothing of it is ignored, and to read only never adds
// methods.
func TestLimitsOfASecretAreKeptOrRefused(t *testing.T) {
	for name, s := range map[string]boxed.Secret{
		"paths of github":       {Preset: "github", Paths: []string{"/repos/acme/"}},
		"methods of github":     {Preset: "github", Methods: []string{"GET"}},
		"a slot of gitlab":      {Preset: "gitlab", Slot: "header:X"},
		"two hosts of a server": {Preset: "gitlab", Hosts: []string{"a.example.com", "b.example.com"}},
	} {
		s.Name, s.Owner = "x", rigOwner
		if err := egress.CheckSecret(s); !errors.Is(err, boxed.CodeInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := newRig(t)
	r.secret(boxed.Secret{Name: "post", Preset: "generic", Hosts: []string{"api.example.com"}, Methods: []string{"POST"}}, realCRM)
	r.secret(boxed.Secret{Name: "both", Preset: "generic", Hosts: []string{"api.example.com"}, Methods: []string{"POST", "GET"}, Env: []string{"BOTH"}}, realCRM)
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "post", ReadOnly: true}}}); !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("nothing is left of it, and it is %v", err)
	}
	r.site("api.example.com", nil)
	b := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "both", ReadOnly: true}}})
	for method, want := range map[string]int{"GET": 200, "HEAD": 403, "POST": 403} {
		if a := send(t, b.client(boxed.EntryHTTP, "h2"), request(t, method, "https://api.example.com/", "", "Authorization: Bearer "+b.token("BOTH"))); a.StatusCode != want {
			t.Errorf("%s is %d %s", method, a.StatusCode, a.reason)
		}
	}
}
