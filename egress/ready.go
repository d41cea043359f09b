package egress

import "github.com/boxed-mesh/boxed"

// gitHubProfile reads repositories that the sandbox names.
const gitHubProfile = "github"

// ReadyProfiles are there on every node, safe as they are.
func ReadyProfiles() []boxed.EgressProfile {
	list := []boxed.EgressProfile{
		{Name: "packages", Rules: packageRules()},
		{Name: "claude-code", Rules: []boxed.EgressRule{
			{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", Paths: anthropicPaths()},
		}},
		{Name: gitHubProfile, Rules: []boxed.EgressRule{}}, // the sandbox names the repositories
		{Name: "open", Rules: []boxed.EgressRule{{Host: "*", Ports: []uint16{80, 443}}}},
	}
	for i := range list {
		p := &list[i]
		p.Version, p.Ready, p.Flags = 1, true, flagsOf(p)
		p.Hash = hashOf(p.Rules)
	}
	return list
}

// packageRules read the registries of packages, and nothing goes there: no credential, no
// method that changes something, no host that takes uploads.
func packageRules() (rules []boxed.EgressRule) {
	for _, host := range []string{
		"pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "proxy.golang.org", "sum.golang.org",
		"index.crates.io", "static.crates.io", "crates.io", "deb.debian.org", "security.debian.org",
	} {
		rules = append(rules, boxed.EgressRule{Host: host, Mode: boxed.EgressIntercept, Methods: readMethods})
	}
	for _, host := range []string{"deb.debian.org", "security.debian.org"} {
		rules = append(rules, boxed.EgressRule{Host: host, Ports: []uint16{80}, Methods: readMethods})
	}
	return rules
}
