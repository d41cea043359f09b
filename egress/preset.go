package egress

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// preset is what is known of a kind of credential: where it is used, in which slots, how it
// looks, and where programs look for it.
type preset struct {
	shapes []shape // the first whose prefix the real value has; the last is for all others
	env    func(value string) []string
	// endpoints are the rules for a use of it. hosts are the secret's own, none for the
	// preset's.
	endpoints func(s boxed.Secret, use boxed.SecretUse) []endpoint
	// files by name, for programs that read no variable. May be nil.
	files func(s boxed.Secret, env map[string]string) map[string]string
	repos bool // a use may be limited to repositories
}

// shape is how a placeholder looks: client-side checks pass.
type shape struct {
	prefix string
	length int // of the random part, in letters
}

// endpoint is a rule and the slots of its host.
type endpoint struct {
	rule  boxed.EgressRule
	slots []Slot
}

func fixedEnv(names ...string) func(string) []string {
	return func(string) []string { return names }
}

var (
	bearerSlots = []Slot{{Kind: SlotBearer}}
	// readMethods change nothing.
	readMethods = []string{"GET", "HEAD"}
)

// presets by name.
func presets() map[string]*preset {
	return map[string]*preset{
		"anthropic": {
			shapes: []shape{{"sk-ant-oat01-", 95}, {"sk-ant-api03-", 95}},
			env: func(value string) []string {
				if strings.HasPrefix(value, "sk-ant-oat") {
					return []string{"CLAUDE_CODE_OAUTH_TOKEN"}
				}
				return []string{"ANTHROPIC_API_KEY"}
			},
			endpoints: hostsWith([]string{"api.anthropic.com"}, anthropicPaths(), Slot{Kind: SlotHeader, Name: "X-Api-Key"}, Slot{Kind: SlotBearer}),
		},
		"openai": {
			shapes:    []shape{{"sk-proj-", 156}, {"sk-", 48}},
			env:       fixedEnv("OPENAI_API_KEY"),
			endpoints: hostsWith([]string{"api.openai.com"}, openAIPaths(), bearerSlots...),
		},
		"github": {
			shapes:    []shape{{"github_pat_", 82}, {"gho_", 36}, {"ghs_", 36}, {"ghu_", 36}, {"ghp_", 36}},
			env:       fixedEnv("GH_TOKEN", "GITHUB_TOKEN"),
			endpoints: gitHub, files: gitFiles("GH_TOKEN", "x-access-token", "github.com"), repos: true,
		},
		"gitlab": {
			shapes:    []shape{{"glpat-", 20}},
			env:       fixedEnv("GITLAB_TOKEN"),
			endpoints: gitLab, files: gitFiles("GITLAB_TOKEN", "oauth2", "gitlab.com"), repos: true,
		},
		"npm": {
			shapes:    []shape{{"npm_", 36}},
			env:       fixedEnv("NPM_TOKEN", "NODE_AUTH_TOKEN"),
			endpoints: hostsWith([]string{"registry.npmjs.org"}, nil, bearerSlots...), files: npmFiles,
		},
		"pypi": {
			shapes:    []shape{{"pypi-", 170}},
			env:       fixedEnv("TWINE_PASSWORD", "UV_PUBLISH_TOKEN", "FLIT_PASSWORD", "HATCH_INDEX_AUTH", "POETRY_PYPI_TOKEN_PYPI"),
			endpoints: pypi, files: pipFiles,
		},
		"aws": {
			shapes:    []shape{{"AKIA", 16}},
			env:       fixedEnv("AWS_ACCESS_KEY_ID"),
			endpoints: hostsWith(nil, nil, Slot{Kind: SlotSigV4}),
		},
		"generic": {
			shapes:    []shape{{"", 40}},
			env:       fixedEnv(),
			endpoints: hostsWith(nil, nil, bearerSlots...),
		},
	}
}

// PresetNames are those of secrets.
func PresetNames() []string { return slices.Sorted(maps.Keys(presets())) }

// shapeOf is that of a value.
func (p *preset) shapeOf(value string) shape {
	for _, s := range p.shapes {
		if strings.HasPrefix(value, s.prefix) {
			return s
		}
	}
	return p.shapes[len(p.shapes)-1]
}

// anthropicPaths are what clients of models need: not /v1/files, by which data could be
// kept for somebody.
func anthropicPaths() []string {
	return []string{
		"/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/", "/v1/complete",
		"/api/hello", "/api/claude_cli/", "/api/claude_code/", "/api/oauth/profile", "/api/oauth/account/settings", "/api/oauth/claude_cli/",
	}
}

func openAIPaths() []string {
	return []string{
		"/v1/chat/completions", "/v1/responses", "/v1/responses/", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/",
		"/v1/images/generations", "/v1/audio/", "/v1/moderations",
	}
}

// hostsWith are rules for the secret's hosts, or else for those of the preset.
func hostsWith(own, paths []string, slots ...Slot) func(boxed.Secret, boxed.SecretUse) []endpoint {
	return func(s boxed.Secret, use boxed.SecretUse) (list []endpoint) {
		hosts, paths, slots := own, paths, slots
		if len(s.Hosts) > 0 {
			hosts = s.Hosts
		}
		if len(s.Paths) > 0 {
			paths = s.Paths
		}
		if slot, err := parseSlot(s.Slot); err == nil && s.Slot != "" {
			slots = []Slot{slot}
		}
		methods := s.Methods
		if use.ReadOnly {
			methods = slices.DeleteFunc(slices.Clone(readMethods), func(m string) bool { return len(s.Methods) > 0 && !slices.Contains(s.Methods, m) })
		}
		for _, h := range hosts {
			list = append(list, endpoint{boxed.EgressRule{Host: h, Paths: paths, Methods: methods}, slots})
		}
		return list
	}
}

// pypi takes uploads at one path; an index of one's own has paths of its own.
func pypi(s boxed.Secret, use boxed.SecretUse) []endpoint {
	paths := []string{"/legacy/"}
	if len(s.Hosts) > 0 {
		paths = nil
	}
	return hostsWith([]string{"upload.pypi.org"}, paths, Slot{Kind: SlotBasic, User: "__token__"})(s, use)
}

// parseSlot reads "bearer", "basic", "basic:USER", "header:NAME", "query:NAME" or "sigv4".
func parseSlot(s string) (Slot, error) {
	kind, name, _ := strings.Cut(s, ":")
	slot := Slot{Kind: SlotKind(kind)}
	switch slot.Kind {
	case SlotBearer, SlotSigV4:
		if name != "" {
			return slot, fmt.Errorf("the slot %s has no name", kind)
		}
	case SlotBasic:
		slot.User = name
	case SlotHeader, SlotQuery:
		if name == "" || strings.ContainsFunc(name, func(c rune) bool {
			return !(c == '-' || c == '_' || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z')
		}) {
			return slot, fmt.Errorf("the slot is %s:NAME, as in header:X-Api-Key", kind)
		}
		slot.Name = name
	default:
		return slot, fmt.Errorf("the slot is bearer, basic, basic:USER, header:NAME, query:NAME or sigv4, not %q", s)
	}
	return slot, nil
}

// gitHub has the repositories in the paths of three hosts. GraphQL has them in the body,
// where no rule finds them: it is not among the paths of a limited use.
func gitHub(s boxed.Secret, use boxed.SecretUse) []endpoint {
	basic := []Slot{{Kind: SlotBasic, User: "x-access-token"}, {Kind: SlotBearer}}
	web, api := cmp.Or(first(s.Hosts), "github.com"), "api.github.com"
	raw, uploads := "raw.githubusercontent.com", "uploads.github.com"
	if web != "github.com" { // GitHub Enterprise has all of it on one host
		return gitHosts(web, basic, use, "/api/v3/repos/", "/api/v3/user")
	}
	list := gitHosts(web, basic, use, "", "")
	rest := func(host string, prefix string, methods []string, also ...string) {
		var paths []string
		for _, r := range use.Repos {
			paths = append(paths, prefix+r, prefix+r+"/")
		}
		if len(paths) > 0 {
			paths = append(paths, also...)
		}
		list = append(list, endpoint{boxed.EgressRule{Host: host, Paths: paths, Methods: methods}, bearerSlots})
	}
	var methods []string
	if use.ReadOnly {
		methods = readMethods
	}
	rest(api, "/repos/", methods)
	rest(raw, "/", readMethods)
	if !use.ReadOnly {
		rest(uploads, "/repos/", nil)
	}
	return list
}

// gitHosts are the rules for git over HTTPS to a host, and for what else of it is API.
func gitHosts(host string, slots []Slot, use boxed.SecretUse, api, user string) (list []endpoint) {
	repos := use.Repos
	if len(repos) == 0 {
		if !use.ReadOnly {
			return []endpoint{{boxed.EgressRule{Host: host}, slots}}
		}
		repos = []string{"*/*"}
	}
	var get, post []string
	for _, r := range repos {
		for _, base := range []string{"/" + r, "/" + r + ".git"} {
			if strings.Contains(base, "*.git") { // a segment is a name or a star
				continue
			}
			get = append(get, base, base+"/")
			post = append(post, base+"/git-upload-pack")
			if !use.ReadOnly {
				post = append(post, base+"/git-receive-pack", base+"/info/lfs/objects/batch")
			}
		}
		if api != "" {
			get = append(get, api+r, api+r+"/")
			if !use.ReadOnly {
				post = append(post, api+r, api+r+"/")
			}
		}
	}
	list = append(list, endpoint{boxed.EgressRule{Host: host, Methods: readMethods, Paths: get}, slots})
	methods := []string{"POST"}
	if !use.ReadOnly && api != "" {
		methods = []string{"POST", "PUT", "PATCH", "DELETE"}
	}
	return append(list, endpoint{boxed.EgressRule{Host: host, Methods: methods, Paths: post}, slots})
}

// gitLab has its API beside the repositories; a project is one escaped segment of a path.
func gitLab(s boxed.Secret, use boxed.SecretUse) []endpoint {
	host := cmp.Or(first(s.Hosts), "gitlab.com")
	slots := []Slot{{Kind: SlotBasic, User: "oauth2"}, {Kind: SlotBearer}, {Kind: SlotHeader, Name: "Private-Token"}}
	list := gitHosts(host, slots, use, "", "")
	if len(use.Repos) == 0 && !use.ReadOnly {
		return list
	}
	var paths []string
	for _, r := range use.Repos {
		p := "/api/v4/projects/" + strings.ReplaceAll(r, "/", "%2F")
		paths = append(paths, p, p+"/")
	}
	if len(use.Repos) == 0 {
		paths = []string{"/api/v4/"}
	}
	var methods []string
	if use.ReadOnly {
		methods = readMethods
	}
	return append(list, endpoint{boxed.EgressRule{Host: host, Methods: methods, Paths: paths}, slots})
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// gitFiles makes git use the placeholder for a host, also for URLs of SSH, and gives
// commits an author. Over HTTP/2, the libcurl that Debian 12's git has (7.88.1 on GnuTLS)
// sends garbage in large pushes where socket buffers are as small as a sandbox's.
func gitFiles(variable, user, host string) func(boxed.Secret, map[string]string) map[string]string {
	return func(s boxed.Secret, _ map[string]string) map[string]string {
		host := cmp.Or(first(s.Hosts), host)
		name, mail := "boxed sandbox", "sandbox@boxed.invalid"
		if n, m, ok := strings.Cut(s.Author, "<"); ok {
			name, mail = strings.TrimSpace(n), strings.TrimSuffix(strings.TrimSpace(m), ">")
		}
		return map[string]string{"gitconfig": fmt.Sprintf(`[user]
	name = %[4]s
	email = %[5]s
[credential "https://%[1]s"]
	helper =
	helper = "!f() { test \"$1\" = get && echo username=%[2]s && echo \"password=$%[3]s\"; }; f"
[http "https://%[1]s/"]
	version = HTTP/1.1
[url "https://%[1]s/"]
	insteadOf = git@%[1]s:
	insteadOf = ssh://git@%[1]s/
`, host, user, variable, gitQuote(name), gitQuote(mail))}
	}
}

func gitQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", " ").Replace(s) + `"`
}

// npmFiles name the variable, not the placeholder.
func npmFiles(s boxed.Secret, _ map[string]string) map[string]string {
	var b strings.Builder
	hosts := s.Hosts
	if len(hosts) == 0 {
		hosts = []string{"registry.npmjs.org"}
	} else {
		fmt.Fprintf(&b, "registry=https://%s/\n", hosts[0])
	}
	for _, h := range hosts {
		fmt.Fprintf(&b, "//%s/:_authToken=${NPM_TOKEN}\n", h)
	}
	return map[string]string{"npmrc": b.String()}
}

// pipFiles are for an index of one's own; PyPI's needs no credential to be read.
func pipFiles(s boxed.Secret, env map[string]string) map[string]string {
	if len(s.Hosts) == 0 {
		return nil
	}
	return map[string]string{"pip.conf": fmt.Sprintf("[global]\nindex-url = https://__token__:%s@%s/simple\n", env["TWINE_PASSWORD"], s.Hosts[0])}
}
