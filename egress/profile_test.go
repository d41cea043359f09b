package egress_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

const wholeProfile = `# what builds need
version: 1
name: builds
rules:
  - host: api.example.com
  - host: "*.cdn.example.com"
    ports: [443, 8443]
  - host: git.example.com
    ports: [22]
    raw: true
  - host: packages.example.com
    mode: intercept
    methods: [GET, HEAD]
    paths: [/simple/, /exact, /*/x]
  - host: api.anthropic.com
    mode: intercept
    credential: anthropic
    need: optional
    websocket: true
  - host: hidden.example.com
    allow_ech: true
  - host: Bücher.example
  - host: page.example.com
    ports: [80]
    methods: [GET]
deny: ["*.tracker.example.com"]
on_deny: ask
`

func TestAProfileIsWhatIsWritten(t *testing.T) {
	yes := true
	want := &boxed.EgressProfile{
		Version: 1, Name: "builds", OnDeny: boxed.DenyAsk, Deny: []string{"*.tracker.example.com"},
		Rules: []boxed.EgressRule{
			{Host: "api.example.com"},
			{Host: "*.cdn.example.com", Ports: []uint16{443, 8443}},
			{Host: "git.example.com", Ports: []uint16{22}, Raw: true},
			{Host: "packages.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET", "HEAD"}, Paths: []string{"/simple/", "/exact", "/*/x"}},
			{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", Need: boxed.CredentialOptional, WebSocket: &yes},
			{Host: "hidden.example.com", AllowECH: true},
			{Host: "Bücher.example"},
			{Host: "page.example.com", Ports: []uint16{80}, Methods: []string{"GET"}},
		},
	}
	got, err := egress.ParseProfile([]byte(wholeProfile))
	if err != nil {
		t.Fatal(err)
	}
	want.Hash = got.Hash
	if diff := cmp.Diff(want, got); diff != "" || got.Hash == "" {
		t.Errorf("the profile (-want +got):\n%s", diff)
	}
	// The same as JSON, which the API takes.
	text, _ := json.Marshal(map[string]any{"version": 1, "name": "builds", "rules": want.Rules, "deny": want.Deny, "on_deny": want.OnDeny})
	again, err := egress.ParseProfile(text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, again); diff != "" {
		t.Errorf("as JSON (-YAML +JSON):\n%s", diff)
	}
	other, err := egress.ParseProfile([]byte(strings.Replace(wholeProfile, "8443", "9443", 1)))
	if err != nil || other.Hash == got.Hash {
		t.Errorf("another profile has the hash %s too, %v", other.Hash, err)
	}
}

// EP2: bounty-challenge#8721, pipelock v0.3.1, agent-vault#146: an empty list meant all, and
// an absent one something else.
func TestAnEmptyListOfRulesDeniesAndAnAbsentOneIsAMistake(t *testing.T) {
	p, err := egress.ParseProfile([]byte("version: 1\nname: shut\nrules: []\n"))
	if err != nil || p.Rules == nil || len(p.Rules) != 0 {
		t.Fatalf("an empty list is %+v, %v", p, err)
	}
	r := newRig(t)
	b := r.profiled(boxed.EgressProfile{Rules: []boxed.EgressRule{}})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b.refusedBy(t, entry, "api.example.com", 443, boxed.EgressNotListed)
	})
	for _, text := range []string{"version: 1\nname: shut\n", "version: 1\nname: shut\nrules:\n", "version: 1\nname: shut\nrules: null\n", `{"version":1,"name":"shut"}`, `{"version":1,"name":"shut","rules":null}`} {
		if _, err := egress.ParseProfile([]byte(text)); !errors.Is(err, boxed.CodeInvalid) || !strings.Contains(err.Error(), "rules") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := egress.CheckProfile(boxed.EgressProfile{Version: 1, Name: "shut"}); !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("without rules: %v", err)
	}
}

// A mistake in a profile is an error, and names the line.
func TestAMistakeInAProfileNamesItsLine(t *testing.T) {
	const head = "version: 1\nname: p\nrules:\n"
	for name, c := range map[string]struct {
		text string
		line int // 0: of the whole
		says string
	}{
		"unknown field":             {head + "- host: a.example.com\nfoo: 1\n", 5, "foo"},
		"unknown field of a rule":   {head + "- host: a.example.com\n  prots: [1]\n", 5, "prots"},
		"a field of the node":       {head + "- host: a.example.com\nready: true\n", 5, "ready"},
		"a duplicate field":         {head + "- host: a.example.com\nname: q\n", 5, "name"},
		"a duplicate of a rule":     {head + "- host: a.example.com\n  ports: [1]\n  ports: [2]\n", 6, "ports"},
		"an anchor":                 {head + "- &a\n  host: a.example.com\n", 4, "anchor"},
		"an alias":                  {head + "- host: a.example.com\n  ports: &p [1]\n- host: b.example.com\n  ports: *p\n", 5, "anchor"},
		"a merge":                   {head + "- <<: {host: a.example.com}\n", 4, ""},
		"a second document":         {head + "- host: a.example.com\n---\nversion: 1\n", 0, "document"},
		"not a list":                {head + "  host: a.example.com\n", 4, ""},
		"a text for a number":       {head + "- host: a.example.com\n  ports: [https]\n", 5, ""},
		"a port too large":          {head + "- host: a.example.com\n  ports: [65536]\n", 5, ""},
		"a negative port":           {head + "- host: a.example.com\n  ports: [-1]\n", 5, ""},
		"no YAML":                   {head + "- host: [a\n", 0, ""},
		"a tab":                     {head + "\t- host: a.example.com\n", 4, ""},
		"a bad host":                {head + "- host: a.example.com\n- host: a..b\n", 5, "rules[1]"},
		"a wildcard of strangers":   {head + "- host: '*.com'\n", 4, "public suffix"},
		"a wildcard of a suffix":    {head + "- host: '*.github.io'\n", 4, "public suffix"},
		"a wildcard in the middle":  {head + "- host: a.*.example.com\n", 4, "pattern"},
		"port 0":                    {head + "- host: a.example.com\n  ports: [0]\n", 4, "ports"},
		"no ports":                  {head + "- host: a.example.com\n  ports: []\n", 4, "ports"},
		"a mode that is none":       {head + "- host: a.example.com\n  mode: open\n", 4, "mode"},
		"paths of a tunnel":         {head + "- host: a.example.com\n  paths: [/a]\n", 4, "intercept"},
		"methods of a tunnel":       {head + "- host: a.example.com\n  methods: [GET]\n", 4, "intercept"},
		"no paths":                  {head + "- host: a.example.com\n  mode: intercept\n  paths: []\n", 4, "empty list"},
		"no methods":                {head + "- host: a.example.com\n  mode: intercept\n  methods: []\n", 4, "empty list"},
		"a method in lower case":    {head + "- host: a.example.com\n  mode: intercept\n  methods: [get]\n", 4, "upper case"},
		"TRACE":                     {head + "- host: a.example.com\n  mode: intercept\n  methods: [TRACE]\n", 4, "TRACE"},
		"CONNECT":                   {head + "- host: a.example.com\n  mode: intercept\n  methods: [CONNECT]\n", 4, "CONNECT"},
		"a path with dots":          {head + "- host: a.example.com\n  mode: intercept\n  paths: [/a/../b]\n", 4, "path"},
		"a path with a query":       {head + "- host: a.example.com\n  mode: intercept\n  paths: ['/a?b']\n", 4, "path"},
		"a path with a part star":   {head + "- host: a.example.com\n  mode: intercept\n  paths: ['/a*']\n", 4, "path"},
		"a relative path":           {head + "- host: a.example.com\n  mode: intercept\n  paths: [a]\n", 4, "path"},
		"a credential of a tunnel":  {head + "- host: a.example.com\n  credential: c\n", 4, "intercept"},
		"a credential of many":      {head + "- host: '*.example.com'\n  mode: intercept\n  credential: c\n", 4, "exact"},
		"a credential on port 80":   {head + "- host: a.example.com\n  mode: intercept\n  ports: [80, 443]\n  credential: c\n", 4, "TLS"},
		"need without a credential": {head + "- host: a.example.com\n  need: optional\n", 4, "need"},
		"a need that is none":       {head + "- host: a.example.com\n  mode: intercept\n  credential: c\n  need: maybe\n", 4, "need"},
		"interception of an IP":     {head + "- host: 93.184.216.34\n  mode: intercept\n", 4, "name"},
		"interception of all":       {head + "- host: '*'\n  mode: intercept\n", 4, "name"},
		"raw on 443":                {head + "- host: a.example.com\n  raw: true\n", 4, "raw"},
		"raw on 80":                 {head + "- host: a.example.com\n  ports: [80]\n  raw: true\n", 4, "raw"},
		"raw of many":               {head + "- host: '*.example.com'\n  ports: [22]\n  raw: true\n", 4, "raw"},
		"ECH where it is read":      {head + "- host: a.example.com\n  mode: intercept\n  allow_ech: true\n", 4, "allow_ech"},
		"two modes for one host":    {head + "- host: b.example.com\n- host: a.example.com\n- host: A.example.com.\n  mode: intercept\n", 6, "same host"},
		"two credentials":           {head + "- {host: a.example.com, mode: intercept, credential: c, paths: [/a/]}\n- {host: a.example.com, mode: intercept, credential: d, paths: [/a/b]}\n", 5, "different credentials"},
		"a bad denial":              {head + "- host: a.example.com\ndeny:\n- b.example.com\n- '*.com'\n", 7, "deny[1]"},
		"an empty list of denials":  {head + "- host: a.example.com\ndeny: []\n", 5, "deny"},
		"on_deny that is none":      {head + "- host: a.example.com\non_deny: allow\n", 5, "on_deny"},
		"another version":           {"version: 2\nname: p\nrules: []\n", 1, "version"},
		"no version":                {"name: p\nrules: []\n", 0, "version"},
		"a bad name":                {"version: 1\nname: P p\nrules: []\n", 2, "name"},
		"the name of none":          {"version: 1\nname: none\nrules: []\n", 2, "name"},
		"a list":                    {"- a\n", 0, ""},
		"a number":                  {"1", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := egress.ParseProfile([]byte(c.text))
			if !errors.Is(err, boxed.CodeInvalid) {
				t.Fatalf("it is %+v, %v", p, err)
			}
			if c.line > 0 && !strings.Contains(err.Error(), fmt.Sprintf("line %d", c.line)) {
				t.Errorf("it does not name line %d: %v", c.line, err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("it does not say %q: %v", c.says, err)
			}
		})
	}
	for _, text := range []string{"", "\n", "# nothing\n", "null"} {
		if _, err := egress.ParseProfile([]byte(text)); !errors.Is(err, boxed.CodeInvalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := egress.ParseProfile([]byte(head + strings.Repeat("#", boxed.MaxDocument))); !errors.Is(err, boxed.CodeTooLarge) {
		t.Errorf("a large one: %v", err)
	}
	// The parser's time is quadratic in it.
	for _, deep := range []string{"[", "{", "{a: ", "- ", "a:\n- ["} {
		if _, err := egress.ParseProfile([]byte(strings.Repeat(deep, 4000))); !errors.Is(err, boxed.CodeInvalid) || !strings.Contains(err.Error(), "deep") {
			t.Errorf("nested %q: %v", deep, err)
		}
	}
	many := head + strings.Repeat("- host: a.example.com\n", 513)
	if _, err := egress.ParseProfile([]byte(many)); !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("513 rules: %v", err)
	}
}

// Two credentials for one host are good where no request could be of both.
func TestCredentialsThatDoNotOverlap(t *testing.T) {
	rule := func(credential string, methods, paths []string) boxed.EgressRule {
		return boxed.EgressRule{Host: "a.example.com", Mode: boxed.EgressIntercept, Credential: credential, Methods: methods, Paths: paths}
	}
	for _, c := range []struct {
		a, b boxed.EgressRule
		good bool
	}{
		{rule("c", nil, []string{"/a/"}), rule("d", nil, []string{"/b/"}), true},
		{rule("c", []string{"GET"}, nil), rule("d", []string{"POST"}, nil), true},
		{rule("c", nil, []string{"/a"}), rule("d", nil, []string{"/a/"}), true},
		{rule("c", nil, nil), rule("c", nil, []string{"/a/"}), true},
		{rule("c", nil, nil), rule("", nil, []string{"/a/"}), true},
		{rule("c", nil, nil), rule("d", nil, []string{"/b/"}), false},
		{rule("c", nil, []string{"/a/"}), rule("d", nil, []string{"/a/b/"}), false},
		{rule("c", nil, []string{"/a/b"}), rule("d", nil, []string{"/a/"}), false},
		{rule("c", nil, []string{"/*/x"}), rule("d", nil, []string{"/a/x"}), false},
		{rule("c", nil, []string{"/*/x"}), rule("d", nil, []string{"/a/*"}), false},
		{rule("c", nil, []string{"/*/x/"}), rule("d", nil, []string{"/a/*/y"}), false},
		{rule("c", []string{"GET"}, []string{"/a/"}), rule("d", []string{"GET", "POST"}, []string{"/a/"}), false},
	} {
		_, err := egress.CheckProfile(boxed.EgressProfile{Version: 1, Name: "p", Rules: []boxed.EgressRule{c.a, c.b}})
		if (err == nil) != c.good {
			t.Errorf("%v %v and %v %v: %v", c.a.Methods, c.a.Paths, c.b.Methods, c.b.Paths, err)
		}
	}
}

// Whatever the text, there is a profile or an error, and a profile is one that stays: checked
// again it is the same, and it can be applied.
func FuzzProfile(f *testing.F) {
	f.Add([]byte(wholeProfile))
	f.Add([]byte(`{"version":1,"name":"a","rules":[{"host":"*","ports":[80,443]}]}`))
	f.Add([]byte("version: 1\nname: a\nrules: [{host: a.b, mode: intercept, methods: [GET], paths: [/]}]\n"))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("? {a: b}\n: !!binary x\n<<: *x"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := egress.ParseProfile(text)
		if err != nil {
			if !errors.Is(err, boxed.CodeInvalid) && !errors.Is(err, boxed.CodeTooLarge) {
				t.Errorf("the error is %v", err)
			}
			return
		}
		again, err := egress.CheckProfile(*p)
		if err != nil {
			t.Fatalf("what was good is not: %v", err)
		}
		if diff := cmp.Diff(p, again); diff != "" {
			t.Errorf("checked again it is another (-first +again):\n%s", diff)
		}
		raw, err := json.Marshal(map[string]any{"version": p.Version, "name": p.Name, "owner": p.Owner, "rules": p.Rules, "deny": p.Deny, "on_deny": p.OnDeny, "exit": p.Exit})
		if err != nil {
			t.Fatal(err)
		}
		if p.Deny == nil {
			raw = []byte(strings.Replace(string(raw), `"deny":null,`, "", 1))
		}
		if written, err := egress.ParseProfile(raw); err != nil || written.Hash != p.Hash {
			t.Errorf("written and read again it is %v, %v", written, err)
		}
		if _, err := egress.NewPolicy(p.Rules, p.Deny, nil); err != nil {
			t.Errorf("it cannot be applied: %v", err)
		}
	})
}
