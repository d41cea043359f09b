package egress_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// ask says what would become of "METHOD host/path".
func (b *box) ask(t testing.TB, what string) boxed.EgressReason {
	t.Helper()
	method, rest, _ := strings.Cut(what, " ")
	name, path, _ := strings.Cut(rest, "/")
	if len(b.r.names.answers[name]) == 0 {
		b.r.names.set(name, at("93.184.216.34"))
	}
	a, err := b.r.keeper.Foresee(t.Context(), b.id, boxed.EgressQuery{Host: name, Method: method, Path: "/" + path})
	if err != nil {
		t.Fatal(err)
	}
	return a.Reason
}

// A secret of a code host that is limited to repositories reaches these alone, over git and
// the API, and reads if that is what it is for.
func TestASecretForRepositories(t *testing.T) {
	r := newRig(t)
	r.secret(boxed.Secret{Name: "github", Preset: "github"}, realGitHub)
	whole := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github"}}})
	reader := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github", ReadOnly: true}}})
	one := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"alice/repo"}}}})
	oneReader := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"alice/repo"}, ReadOnly: true}}})
	const yes, method, path, graphql = boxed.EgressAllowed, boxed.EgressMethod, boxed.EgressPath, boxed.EgressGraphQL
	for _, c := range []struct {
		what                          string
		whole, reader, one, oneReader boxed.EgressReason
	}{
		{"GET github.com/alice/repo", yes, yes, yes, yes},
		{"GET github.com/alice/repo.git/info/refs", yes, yes, yes, yes},
		{"POST github.com/alice/repo.git/git-upload-pack", yes, yes, yes, yes},
		{"POST github.com/alice/repo/git-upload-pack", yes, yes, yes, yes},
		{"POST github.com/alice/repo.git/git-receive-pack", yes, path, yes, path},
		{"POST github.com/alice/repo.git/info/lfs/objects/batch", yes, path, yes, path},
		{"GET github.com/bob/repo.git/info/refs", yes, yes, path, path},
		{"POST github.com/bob/repo.git/git-upload-pack", yes, yes, path, path},
		{"POST github.com/bob/repo.git/git-receive-pack", yes, path, path, path},
		{"GET github.com/alice/repo-private.git/info/refs", yes, yes, path, path},
		{"GET github.com/alice/repository", yes, yes, path, path},
		{"DELETE github.com/alice/repo", yes, method, method, method},
		{"GET api.github.com/repos/alice/repo/issues", yes, yes, yes, yes},
		{"POST api.github.com/repos/alice/repo/issues", yes, method, yes, method},
		{"DELETE api.github.com/repos/alice/repo", yes, method, yes, method},
		{"GET api.github.com/repos/bob/repo", yes, yes, path, path},
		{"GET api.github.com/user/repos", yes, yes, path, path},
		{"POST api.github.com/gists", yes, method, path, method},
		{"GET raw.githubusercontent.com/alice/repo/main/x", yes, yes, yes, yes},
		{"GET raw.githubusercontent.com/bob/repo/main/x", yes, yes, path, path},
		{"PUT raw.githubusercontent.com/alice/repo/main/x", method, method, method, method},
		{"POST uploads.github.com/repos/alice/repo/releases/1/assets", yes, boxed.EgressNotListed, yes, boxed.EgressNotListed},
		{"POST uploads.github.com/repos/bob/repo/releases/1/assets", yes, boxed.EgressNotListed, path, boxed.EgressNotListed},
		{"GET gist.github.com/x", boxed.EgressNotListed, boxed.EgressNotListed, boxed.EgressNotListed, boxed.EgressNotListed},
	} {
		got := [4]boxed.EgressReason{whole.ask(t, c.what), reader.ask(t, c.what), one.ask(t, c.what), oneReader.ask(t, c.what)}
		if want := [4]boxed.EgressReason{c.whole, c.reader, c.one, c.oneReader}; got != want {
			t.Errorf("%s is %v, and is to be %v", c.what, got, want)
		}
	}
	// GraphQL has its target in the body, where no rule finds it.
	s := r.site("api.github.com", nil)
	for b, reason := range map[*box]boxed.EgressReason{whole: "", reader: graphql, one: graphql, oneReader: graphql} {
		for _, target := range []string{"/graphql", "/graphql/", "/GraphQL"} {
			a := send(t, b.client(boxed.EntryHTTP, "h2"), request(t, "POST", "https://api.github.com"+target, "{}", "Authorization: bearer "+b.token("GH_TOKEN")))
			if a.reason != reason || (a.StatusCode == 200) != (reason == "") {
				t.Errorf("%s is %d %q, and is to be %q", target, a.StatusCode, a.reason, reason)
			}
		}
	}
	if n := len(s.requests()); n != 3 {
		t.Errorf("%d requests left", n)
	}
	for _, repos := range [][]string{{"alice"}, {"alice/"}, {"/repo"}, {"*/*"}, {"alice/../bob"}, {"alice/repo?x"}, {"alice/re po"}, {"alice/%2e%2e"}} {
		if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github", Repos: repos}}}); !errors.Is(err, boxed.CodeInvalid) {
			t.Errorf("%v: %v", repos, err)
		}
	}
}

// EC1: the API of models is for models: not for files that somebody else could read.
func TestASecretForModels(t *testing.T) {
	r := newRig(t)
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	r.secret(boxed.Secret{Name: "openai", Preset: "openai"}, "sk-proj-"+strings.Repeat("r", 40))
	b := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "anthropic"}, {Name: "openai"}}})
	for what, reason := range map[string]boxed.EgressReason{
		"POST api.anthropic.com/v1/messages": boxed.EgressAllowed, "POST api.anthropic.com/v1/messages/count_tokens": boxed.EgressAllowed,
		"GET api.anthropic.com/v1/models": boxed.EgressAllowed, "GET api.anthropic.com/v1/models/claude": boxed.EgressAllowed,
		"POST api.anthropic.com/v1/files": boxed.EgressPath, "GET api.anthropic.com/v1/files/x/content": boxed.EgressPath,
		"POST api.anthropic.com/v1/messages/batches": boxed.EgressPath, "GET api.anthropic.com/v1/organizations/users": boxed.EgressPath,
		"POST api.openai.com/v1/chat/completions": boxed.EgressAllowed, "POST api.openai.com/v1/responses": boxed.EgressAllowed,
		"POST api.openai.com/v1/files": boxed.EgressPath, "POST api.openai.com/v1/uploads": boxed.EgressPath, "POST api.openai.com/v1/fine_tuning/jobs": boxed.EgressPath,
	} {
		if got := b.ask(t, what); got != reason {
			t.Errorf("%s is %s, and is to be %s", what, got, reason)
		}
	}
	for variable, prefix := range map[string]string{"ANTHROPIC_API_KEY": "sk-ant-api03-", "OPENAI_API_KEY": "sk-proj-"} {
		if !strings.HasPrefix(b.token(variable), prefix) {
			t.Errorf("%s is %q", variable, b.token(variable))
		}
	}
}

// A secret is its owner's, and of those that may attach it: nobody else learns that there is
// one.
func TestASecretIsItsOwners(t *testing.T) {
	r := newRig(t)
	const bob, carol = "bob@example.com", "carol@example.com"
	r.secret(boxed.Secret{Name: "private", Preset: "generic", Owner: bob, Hosts: []string{"bob.example.com"}}, "secret-of-bob-0123456789")
	r.secret(boxed.Secret{Name: "shared", Preset: "generic", Owner: bob, Hosts: []string{"shared.example.com"}, May: []string{rigOwner}}, "shared-of-bob-0123456789")
	r.secret(boxed.Secret{Name: "public", Preset: "generic", Owner: bob, Hosts: []string{"public.example.com"}, May: []string{"*"}}, "public-of-bob-0123456789")
	r.profile(boxed.EgressProfile{Name: "needs", Rules: []boxed.EgressRule{{Host: "bob.example.com", Mode: boxed.EgressIntercept, Credential: "private"}}})
	use := func(name string) boxed.EgressSpec { return boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: name}}} }
	var absent string
	for _, c := range []struct {
		owner string
		spec  boxed.EgressSpec
		code  boxed.Code
	}{
		{rigOwner, use("nothing"), boxed.CodeNotFound},
		{rigOwner, use("private"), boxed.CodeNotFound},
		{bob, use("private"), ""},
		{rigOwner, use(bob + "/shared"), ""},
		{carol, use(bob + "/shared"), boxed.CodeNotFound},
		{carol, use("public"), ""},
		{rigOwner, boxed.EgressSpec{Profile: "needs"}, boxed.CodeNotFound},
		{bob, boxed.EgressSpec{Profile: "needs"}, ""},
		{bob, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "private"}, {Name: "private"}}}, boxed.CodeInvalid},
		{bob, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "private", Repos: []string{"a/b"}}}}, boxed.CodeInvalid},
	} {
		_, err := r.tryBox(c.owner, c.spec)
		if c.code == "" && err != nil || c.code != "" && !errors.Is(err, c.code) {
			t.Errorf("%s, %+v: %v", c.owner, c.spec, err)
		}
		if check := r.keeper.Check(c.owner, &c.spec); fmt.Sprint(check) != fmt.Sprint(err) {
			t.Errorf("asked beforehand it is %v, and then %v", check, err)
		}
		if err != nil && len(c.spec.Secrets) == 1 && c.code == boxed.CodeNotFound {
			text := strings.ReplaceAll(err.Error(), c.spec.Secrets[0].Name, "NAME")
			if absent == "" {
				absent = text
			}
			if text != absent {
				t.Errorf("one that is another's is told of with %q, and one that is not there with %q", text, absent)
			}
		}
	}
	// An admin of the cluster has no more of them: a secret is a person's.
	spec := use("private")
	spec.Admin = true
	if _, err := r.tryBox(rigOwner, spec); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("an admin: %v", err)
	}
}

// A rule whose secret is not there shuts, or is a tunnel, as the rule says.
func TestARuleWhoseSecretIsNotThere(t *testing.T) {
	r := newRig(t)
	s := r.site("api.anthropic.com", nil)
	rule := boxed.EgressRule{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", Paths: []string{"/v1/messages"}}
	r.profile(boxed.EgressProfile{Name: "required", Rules: []boxed.EgressRule{rule}})
	rule.Need = boxed.CredentialOptional
	r.profile(boxed.EgressProfile{Name: "optional", Rules: []boxed.EgressRule{rule}})
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "required"}); !errors.Is(err, boxed.CodeNotFound) || !strings.Contains(err.Error(), "boxedctl secret set anthropic") {
		t.Errorf("required: %v", err)
	}
	b := r.box(boxed.EgressSpec{Profile: "optional"})
	if st := r.keeper.Status(b.id); st.State != boxed.EgressOpen || !slices.Equal(st.Untranslated, []string{"anthropic"}) || st.Rules[0].Mode != boxed.EgressTunnel {
		t.Errorf("the status is %+v", st)
	}
	// One can log in from inside: it is the world's own TLS.
	conn := b.secure(boxed.EntryHTTP, "api.anthropic.com")
	if !worldCA().isOf(conn.ConnectionState().PeerCertificates[0]) {
		t.Error("the tunnel is read")
	}
	conn.Close()
	// Once it is there, it is used.
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	b2 := r.box(boxed.EgressSpec{Profile: "optional"})
	if a := send(t, b2.client(boxed.EntryHTTP, "h2"), request(t, "POST", messages, "{}", "X-Api-Key: "+b2.token("ANTHROPIC_API_KEY"))); a.StatusCode != 200 || s.last(t).Header.Get("X-Api-Key") != realAnthropic {
		t.Errorf("%d %s", a.StatusCode, a.reason)
	}
	if st := r.keeper.Status(b2.id); len(st.Untranslated) != 0 || !slices.Equal(st.Secrets, []string{"anthropic"}) {
		t.Errorf("the status is %+v", st)
	}
}

// A sandbox may narrow its profile, and nothing else.
func TestASandboxOnlyNarrowsItsProfile(t *testing.T) {
	r := newRig(t)
	r.profile(boxed.EgressProfile{Name: "wide", Rules: []boxed.EgressRule{
		{Host: "api.example.com", Ports: []uint16{443, 8443}},
		{Host: "*.cdn.example.com"},
		{Host: "*.example.com", Ports: []uint16{80}},
		{Host: "read.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET"}},
	}, Deny: []string{"no.cdn.example.com"}})
	allowed := func(b *box) (list []string) {
		for _, q := range []string{"api.example.com", "api.example.com:8443", "a.cdn.example.com", "b.cdn.example.com", "no.cdn.example.com", "x.example.com:80", "read.example.com", "other.org"} {
			name, _, _ := strings.Cut(q, ":")
			r.names.set(name, at("93.184.216.34"))
			if a, err := r.keeper.Foresee(t.Context(), b.id, boxed.EgressQuery{Host: q}); err == nil && a.Allowed {
				list = append(list, q)
			}
		}
		return list
	}
	for _, c := range []struct {
		only, want []string
	}{
		{nil, []string{"api.example.com", "api.example.com:8443", "a.cdn.example.com", "b.cdn.example.com", "x.example.com:80", "read.example.com"}},
		{[]string{"api.example.com"}, []string{"api.example.com", "api.example.com:8443"}},
		{[]string{"a.cdn.example.com"}, []string{"a.cdn.example.com"}},
		{[]string{"no.cdn.example.com"}, nil},
		{[]string{"*.cdn.example.com"}, []string{"a.cdn.example.com", "b.cdn.example.com"}},
		{[]string{"x.example.com", "read.example.com"}, []string{"x.example.com:80", "read.example.com"}},
	} {
		if diff := cmp.Diff(c.want, allowed(r.box(boxed.EgressSpec{Profile: "wide", Only: c.only}))); diff != "" {
			t.Errorf("only %v (-want +got):\n%s", c.only, diff)
		}
	}
	b := r.box(boxed.EgressSpec{Profile: "wide", Only: []string{"read.example.com"}})
	if got := b.ask(t, "POST read.example.com/"); got != boxed.EgressMethod {
		t.Errorf("narrowed to a host, a POST is %s", got)
	}
	for only, code := range map[string]boxed.Code{
		"other.org": boxed.CodeForbidden, "*.org": boxed.CodeInvalid, "*": boxed.CodeForbidden, "example.com": boxed.CodeForbidden, "a.b.example.com": boxed.CodeForbidden,
		"*.b.example.com": boxed.CodeForbidden, "10.0.0.1": boxed.CodeForbidden, "": boxed.CodeInvalid, "a b": boxed.CodeInvalid,
	} {
		if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "wide", Only: []string{only}}); !errors.Is(err, code) {
			t.Errorf("only %q: %v", only, err)
		}
	}
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Only: []string{"api.example.com"}}); !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("without a profile: %v", err)
	}
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "nothing"}); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("a profile that is not there: %v", err)
	}
	if b := r.box(boxed.EgressSpec{Profile: "wide", Allow: []string{"more.example.org", "no.cdn.example.com"}}); b.ask(t, "GET more.example.org/") != boxed.EgressAllowed || b.ask(t, "GET no.cdn.example.com/") != boxed.EgressListDenied {
		t.Error("what is allowed besides stands above what the profile denies, or not at all")
	}
}

// What owners allow themselves is within what the operator lets them have.
func TestACeilingHoldsOwners(t *testing.T) {
	ceiling, err := egress.ParseCeiling([]string{"*.example.com", "git.example.org:22"})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *rigConfig) { c.Keeper.Ceiling = ceiling })
	r.profile(boxed.EgressProfile{Name: "operators", Rules: []boxed.EgressRule{{Host: "anything.example.net"}}})
	r.profile(boxed.EgressProfile{Name: "own", Owner: rigOwner, Rules: []boxed.EgressRule{{Host: "anything.example.net"}}})
	r.profile(boxed.EgressProfile{Name: "good", Owner: rigOwner, Rules: []boxed.EgressRule{{Host: "*.example.com", Ports: []uint16{80, 443}}}})
	r.secret(boxed.Secret{Name: "inside", Preset: "generic", Hosts: []string{"api.example.com"}}, "secret-0123456789")
	r.secret(boxed.Secret{Name: "beyond", Preset: "generic", Hosts: []string{"api.example.net"}}, "secret-9876543210")
	for _, c := range []struct {
		spec boxed.EgressSpec
		good bool
	}{
		{boxed.EgressSpec{Allow: []string{"api.example.com"}}, true},
		{boxed.EgressSpec{Allow: []string{"api.example.com:80"}}, true},
		{boxed.EgressSpec{Allow: []string{"*.example.com"}}, true},
		{boxed.EgressSpec{Allow: []string{"git.example.org:22"}}, true},
		{boxed.EgressSpec{Allow: []string{"git.example.org"}}, false},
		{boxed.EgressSpec{Allow: []string{"api.example.com:8443"}}, false},
		{boxed.EgressSpec{Allow: []string{"a.b.example.com"}}, false},
		{boxed.EgressSpec{Allow: []string{"example.com"}}, false},
		{boxed.EgressSpec{Allow: []string{"*"}}, false},
		{boxed.EgressSpec{Allow: []string{"93.184.216.34"}}, false},
		{boxed.EgressSpec{Profile: "operators"}, true},
		{boxed.EgressSpec{Profile: "own"}, false},
		{boxed.EgressSpec{Profile: "good"}, true},
		{boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "inside"}}}, true},
		{boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "beyond"}}}, false},
		{boxed.EgressSpec{Allow: []string{"git.example.org"}, Admin: true}, true},
	} {
		if _, err := r.tryBox(rigOwner, c.spec); c.good && err != nil || !c.good && !errors.Is(err, boxed.CodeForbidden) {
			t.Errorf("%+v: %v", c.spec, err)
		}
	}
	b := r.box(boxed.EgressSpec{Allow: []string{"api.example.com"}})
	if _, err := r.keeper.Allow(b.id, "api.example.net", 0, false); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("allowed later: %v", err)
	}
	if got := b.ask(t, "GET api.example.net/"); got != boxed.EgressNotListed {
		t.Errorf("it is %s", got)
	}
}

// A host that is allowed for a time is, for that time.
func TestAHostThatIsAllowedForATime(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	r.names.set("new.example.com", at("93.184.216.34"))
	b := r.box(boxed.EgressSpec{Allow: []string{"api.example.com"}})
	if _, err := r.keeper.Allow(b.id, "new.example.com", time.Hour, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.keeper.Allow(b.id, "ever.example.com:8443", 0, false); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", "*.com", "a b", "new.example.com:0", "new.example.com:x", "http://new.example.com"} {
		if _, err := r.keeper.Allow(b.id, bad, 0, false); !errors.Is(err, boxed.CodeInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := r.keeper.Allow("nobody0000-"+boxed.ID(rigNode), "new.example.com", 0, false); !errors.Is(err, boxed.CodeConflict) {
		t.Errorf("of no sandbox: %v", err)
	}
	if got := b.ask(t, "GET new.example.com/"); got != boxed.EgressAllowed {
		t.Errorf("it is %s", got)
	}
	r.clock.advance(59 * time.Minute)
	r.keeper.Expire()
	if got := b.ask(t, "GET new.example.com/"); got != boxed.EgressAllowed {
		t.Errorf("after 59 minutes it is %s", got)
	}
	r.clock.advance(time.Minute)
	r.keeper.Expire()
	if got := b.ask(t, "GET new.example.com/"); got != boxed.EgressNotListed {
		t.Errorf("after an hour it is %s", got)
	}
	if st := r.keeper.Status(b.id); len(st.Allowed) != 1 || st.Allowed[0].Host != "ever.example.com:8443" {
		t.Errorf("the status is %+v", st)
	}
}

// A node that starts again knows its sandboxes' egress: the same placeholders, the same
// authority, what was allowed since.
func TestASandboxIsLetOutAgainAfterARestart(t *testing.T) {
	r := newRig(t)
	r.site("api.anthropic.com", func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Len", fmt.Sprint(len(req.Header.Get("X-Api-Key"))))
	})
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	b := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "anthropic"}}})
	grant, err := r.keeper.Allow(b.id, "new.example.com", 0, false)
	if err != nil {
		t.Fatal(err)
	}
	key := b.token("ANTHROPIC_API_KEY")
	r.keeper.Detach(b.id)
	if err := r.keeper.Restore(&boxed.Sandbox{ID: b.id, Owner: rigOwner}, grant); err != nil {
		t.Fatal(err)
	}
	if a := send(t, b.client(boxed.EntryHTTP, "h2"), request(t, "POST", messages, "{}", "X-Api-Key: "+key)); a.StatusCode != 200 || a.Header.Get("X-Len") != fmt.Sprint(len(realAnthropic)) {
		t.Errorf("%d %s", a.StatusCode, a.reason)
	}
	if got := b.ask(t, "GET new.example.com/"); got != boxed.EgressAllowed {
		t.Errorf("what was allowed is %s", got)
	}
	changed := *grant
	changed.State = slices.Clone(grant.State)
	changed.State[40] ^= 1
	if err := r.keeper.Restore(&boxed.Sandbox{ID: "other00000-" + boxed.ID(rigNode), Owner: rigOwner}, grant); err == nil {
		t.Error("the grant of one sandbox was taken for another's")
	}
	if err := r.keeper.Restore(&boxed.Sandbox{ID: b.id, Owner: rigOwner}, &changed); err == nil {
		t.Error("a grant that was changed was taken")
	}
	gone := *grant
	gone.Spec.Profile = "gone"
	r.keeper.Detach(b.id)
	if err := r.keeper.Restore(&boxed.Sandbox{ID: b.id, Owner: rigOwner}, &gone); err != nil {
		t.Fatal(err)
	}
	if st := r.keeper.Status(b.id); st.State != boxed.EgressClosed || st.Reason == "" {
		t.Errorf("without its profile the status is %+v", st)
	}
}
