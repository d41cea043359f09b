package egress_test

import (
	"encoding/base64"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// I15: publish or upload with a foreign token through every ready profile. Whoever is inside
// has a token of their own, and would carry data out through what is allowed.
func TestNoReadyProfileTakesAnUploadWithAForeignToken(t *testing.T) {
	tried := 0
	for _, p := range egress.ReadyProfiles() {
		if slices.Contains(p.Flags, boxed.FlagExfiltration) { // which says of itself what it is
			if p.Name != "open" {
				t.Errorf("%s is flagged", p.Name)
			}
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			tried++
			r := newRig(t)
			r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
			spec := boxed.EgressSpec{Profile: p.Name}
			if p.Name == "github" {
				spec.Repos = []string{"alice/repo"}
			}
			b := r.box(spec)
			var sites []*site
			addrs := map[string]map[uint16]netip.Addr{} // a host has one for each port
			for _, rule := range r.keeper.Status(b.id).Rules {
				port := rule.Ports[0]
				if _, ok := addrs[rule.Host][port]; ok {
					continue
				}
				s := r.site(rule.Host, nil, func(c *siteConfig) { c.Port, c.Plain = port, port == 80 })
				sites = append(sites, s)
				if addrs[rule.Host] == nil {
					addrs[rule.Host] = map[uint16]netip.Addr{}
				}
				addrs[rule.Host][port] = s.addr
				r.names.set(rule.Host, slices.Collect(maps.Values(addrs[rule.Host])))
			}
			if len(sites) == 0 {
				t.Fatal("the profile has no hosts")
			}
			for _, name := range []string{"upload.pypi.org", "uploads.github.com", "gist.github.com", "api.github.com", "ghcr.io", "transfer.sh"} {
				if !slices.ContainsFunc(sites, func(s *site) bool { return s.name == name }) {
					sites = append(sites, r.site(name, nil))
				}
			}
			basic := "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("__token__:pypi-FOREIGN"))
			uploads := []struct {
				method, path, field string
			}{
				{"PUT", "/my-package", "Authorization: Bearer npm_FOREIGN"},
				{"PUT", "/@scope%2fpkg", "Authorization: Bearer npm_FOREIGN"},
				{"POST", "/legacy/", basic},
				{"PUT", "/api/v1/crates/new", "Authorization: cioFOREIGN"},
				{"POST", "/alice/repo.git/git-receive-pack", basic},
				{"POST", "/bob/repo.git/git-upload-pack", basic},
				{"POST", "/alice/repo.git/git-upload-pack", basic},
				{"GET", "/alice/repo.git/info/refs?service=git-receive-pack", basic},
				{"POST", "/repos/alice/repo/issues", "Authorization: token ghp_FOREIGN"},
				{"PUT", "/repos/bob/repo/contents/x", "Authorization: token ghp_FOREIGN"},
				{"POST", "/gists", "Authorization: token ghp_FOREIGN"},
				{"POST", "/graphql", "Authorization: bearer ghp_FOREIGN"},
				{"POST", "/v1/messages", "X-Api-Key: " + foreignKey},
				{"POST", "/v1/messages", "Authorization: Bearer " + foreignKey},
				{"POST", "/v1/files", "X-Api-Key: " + foreignKey},
				{"POST", "/v1/messages?key=FOREIGN", "X-Note: 1"},
				{"GET", "/simple/", "Authorization: Bearer FOREIGN"},
				{"GET", "/simple/", "Cookie: session=FOREIGN"},
				{"GET", "/simple/", "X-Auth-Token: FOREIGN"},
				{"HEAD", "/simple/", basic},
				{"DELETE", "/my-package/-rev/1", "Authorization: Bearer npm_FOREIGN"},
				{"PATCH", "/x", basic},
			}
			clients := map[string]func(*site) string{
				"https://": func(s *site) string { return "https://" + s.name }, "http://": func(s *site) string { return "http://" + s.name },
			}
			for scheme, target := range clients {
				for _, s := range sites {
					c := b.client(boxed.EntryHTTP, "h2")
					if scheme == "http://" {
						c = b.proxied()
					}
					for _, u := range uploads {
						if scheme == "http://" && (u.method == "GET" || u.method == "HEAD") {
							continue // reads of mirrors without TLS: nothing goes there but a name
						}
						a := send(t, c, request(t, u.method, target(s)+u.path, map[bool]string{true: "", false: "stolen"}[u.method == "GET" || u.method == "HEAD"], u.field))
						if a.StatusCode < 400 || a.reason == "" {
							t.Errorf("%s %s%s with %s is %d %s", u.method, target(s), u.path, u.field, a.StatusCode, a.reason)
						}
					}
				}
			}
			for _, s := range sites {
				s.untouched(t)
			}
		})
	}
	if tried < 3 {
		t.Errorf("only %d profiles were tried", tried)
	}
}

// The ready profiles do what they are for.
func TestTheReadyProfilesAreOfUse(t *testing.T) {
	r := newRig(t)
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	for name, asks := range map[string]map[string]boxed.EgressReason{
		"packages": {
			"GET pypi.org/simple/requests/": boxed.EgressAllowed, "GET files.pythonhosted.org/packages/x.whl": boxed.EgressAllowed, "GET registry.npmjs.org/@scope%2fpkg": boxed.EgressAllowed,
			"GET proxy.golang.org/x/@v/list": boxed.EgressAllowed, "GET static.crates.io/x": boxed.EgressAllowed, "HEAD deb.debian.org/debian/": boxed.EgressAllowed,
			"POST pypi.org/simple/": boxed.EgressMethod, "PUT registry.npmjs.org/x": boxed.EgressMethod, "POST upload.pypi.org/legacy/": boxed.EgressNotListed, "GET github.com/x": boxed.EgressNotListed,
		},
		"claude-code": {"POST api.anthropic.com/v1/messages": boxed.EgressAllowed, "POST api.anthropic.com/v1/files": boxed.EgressPath, "GET claude.ai/": boxed.EgressNotListed},
		"github": {
			"GET github.com/alice/repo.git/info/refs": boxed.EgressAllowed, "POST github.com/alice/repo.git/git-upload-pack": boxed.EgressAllowed,
			"POST github.com/alice/repo.git/git-receive-pack": boxed.EgressPath, "GET github.com/bob/repo": boxed.EgressPath, "POST api.github.com/graphql": boxed.EgressMethod,
			"GET raw.githubusercontent.com/alice/repo/main/x": boxed.EgressAllowed,
		},
		"open": {"POST anything.example.org/": boxed.EgressAllowed},
	} {
		spec := boxed.EgressSpec{Profile: name}
		if name == "github" {
			spec.Repos = []string{"alice/repo"}
		}
		b := r.box(spec)
		for what, reason := range asks {
			if got := b.ask(t, what); got != reason {
				t.Errorf("%s: %s is %s, and is to be %s", name, what, got, reason)
			}
		}
		if flagged := slices.Contains(r.keeper.Status(b.id).Flags, boxed.FlagExfiltration); flagged != (name == "open") {
			t.Errorf("%s is flagged: %v", name, flagged)
		}
	}
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "github"}); err == nil {
		t.Error("github without repositories is good")
	}
	if _, err := r.tryBox(rigOwner, boxed.EgressSpec{Profile: "packages", Repos: []string{"a/b"}}); err == nil {
		t.Error("packages with repositories are good")
	}
	// Not even "open" reaches what nobody may.
	b := r.box(boxed.EgressSpec{Profile: "open"})
	r.names.set("meta.example.com", at("169.254.169.254"))
	r.names.set("private.example.com", at("10.0.0.1"))
	b.refusedBy(t, boxed.EntryHTTP, "meta.example.com", 443, boxed.EgressNeverAddress)
	b.refusedBy(t, boxed.EntryHTTP, "private.example.com", 443, boxed.EgressPrivateAddress)
	b.refusedBy(t, boxed.EntryHTTP, "93.184.216.34", 443, boxed.EgressNotListed)
	for i, d := range egress.ReadyProfiles() {
		if _, err := egress.CheckProfile(d); err != nil || !d.Ready || d.Hash == "" {
			t.Errorf("profile %d is %+v, %v", i, d, err)
		}
	}
}
