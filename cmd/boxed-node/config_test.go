package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

var update = flag.Bool("update", false, "write the documents that are made from code")

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(main.Main(context.Background(), append([]string{"boxed-node"}, os.Args[1:]...), os.Environ(), os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m)
}

// file writes a file below a new directory and returns its path.
func file(t *testing.T, name, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// invoke runs one command in the process and returns what it wrote.
func invoke(environ []string, args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = main.Main(context.Background(), append([]string{"boxed-node"}, args...), environ, &out, &errs)
	return status, out.String(), errs.String()
}

func TestAFlagWinsOverTheEnvironmentOverTheFileOverTheDefault(t *testing.T) {
	path := file(t, "boxed.yaml", `
ttl:
  default: 2h
  highest: 48h
docker:
  pull_timeout: 20m
log: {level: warn}
hosts: [a.example, b.example]
`, 0o600)
	environ := []string{"BOXED_CONFIG=" + path, "BOXED_TTL_DEFAULT=3h", "BOXED_LOG_LEVEL=error", "BOXED_DOCKER_RUNTIME=", "BOXED_HOSTS=c.example, d.example"}
	status, out, errs := invoke(environ, "--log-level", "info", "config", "print", "--log-level=debug", "-o", "json")
	if status != 0 {
		t.Fatal(status, errs)
	}
	var list []struct {
		Setting, Origin string
		Value           any
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatal(err)
	}
	got := map[string]any{}
	for _, s := range list {
		got[s.Setting] = []any{s.Value, s.Origin}
	}
	for setting, want := range map[string][]any{
		"ttl.default":           {"3h", "BOXED_TTL_DEFAULT"},
		"ttl.highest":           {"2d", path + ":4"},
		"docker.pull_timeout":   {"20m", path + ":6"},
		"docker.runtime":        {"", "default"},
		"log.level":             {"debug", "--log-level"},
		"hosts":                 {[]any{"c.example", "d.example"}, "BOXED_HOSTS"},
		"listen":                {"127.0.0.1:8080", "default"},
		"pool.memory_share":     {0.25, "default"},
		"limits.default.memory": {"512MiB", "default"},
	} {
		if setting == "ttl.highest" {
			want[0] = "48h"
		}
		if diff := cmp.Diff(any(want), got[setting]); diff != "" {
			t.Errorf("%s: %s", setting, diff)
		}
	}
}

func TestTheFileSetsTemplatesAndQuotas(t *testing.T) {
	path := file(t, "boxed.yaml", `
templates:
  default:
    pool: 2
  data-science:
    image: example.org/ds:1
    pool: 1
    limits:
      memory: 2GiB
      cpus: 1.5
    env:
      PYTHONUNBUFFERED: 1
      GREETING: "hello, world"
quotas:
  sandboxes: 10
  owners:
    alice@example.org: {sandboxes: 50, memory: 64GiB}
trusted_proxies:
  - 10.0.0.0/8
  - "::1"
`, 0o600)
	l, err := main.Load(main.Sources{File: path})
	if err != nil {
		t.Fatal(err)
	}
	list := l.TemplateList()
	if d := list["default"]; d.Image != "boxed/default:latest" || d.Pool != 2 || d.Limits.MemoryBytes != 512<<20 {
		t.Errorf("the default template is %+v", d)
	}
	ds := list["data-science"]
	if ds.Name != "data-science" || ds.Limits.MemoryBytes != 2<<30 || ds.Limits.CPUs != 1.5 || ds.Limits.Processes != 256 {
		t.Errorf("the template is %+v", ds)
	}
	if diff := cmp.Diff(map[string]string{"PYTHONUNBUFFERED": "1", "GREETING": "hello, world"}, ds.Env); diff != "" {
		t.Error(diff)
	}
	if q := l.Quotas.Of("alice@example.org"); q.Sandboxes != 50 || q.MemoryBytes != 64<<30 {
		t.Errorf("alice's quota is %+v", q)
	}
	if q := l.Quotas.Of("bob"); q.Sandboxes != 10 || q.MemoryBytes != 0 {
		t.Errorf("bob's quota is %+v", q)
	}
	if got := l.TrustedProxies; len(got) != 2 || got[0].String() != "10.0.0.0/8" || got[1].String() != "::1/128" {
		t.Errorf("the proxies are %v", got)
	}
}

func TestEveryMistakeIsReportedAtOnceWithItsPlace(t *testing.T) {
	path := file(t, "boxed.yaml", `listen: 127.0.0.1:8080
docker:
  pull_timout: 5m
listen: 127.0.0.1:9090
tls:
  cert_file: /nowhere/cert.pem
templates:
  Bad_Name: {image: x}
  py:
    limits: {memory: 64MiB}
ttl:
  default: 1 hour
  highest:
quotas: 5
pool: {refill: [1, 2]}
uid_range: &anchor {first: 10}
`, 0o600)
	environ := []string{"BOXED_CONFIG=" + path, "BOXED_LOG_FORMAT=xml", "BOXED_CAPACITY_RESERVE=NaN"}
	status, _, errs := invoke(environ, "config", "check", "--drain", "-5s")
	if status != 2 {
		t.Errorf("the status is %d", status)
	}
	for _, want := range []string{
		path + ":3: docker.pull_timout: there is no such setting; did you mean docker.pull_timeout?",
		path + ":4: listen: it is set twice, first in line 1",
		path + ":8: templates.Bad_Name: a template's name is [a-z0-9-]{1,40}",
		path + `:12: ttl.default: "1 hour" is not a duration`,
		path + ":13: ttl.highest: it has no value",
		path + ":14: quotas: it takes settings of its own",
		path + ":15: pool.refill: it takes a whole number, not a list",
		path + ":16: uid_range: it takes settings of its own",
		`BOXED_LOG_FORMAT: log.format: "xml" is neither text nor json`,
		`BOXED_CAPACITY_RESERVE: capacity.reserve: "NaN" is not a number`,
		`--drain: drain: "-5s" is not a duration`,
		"tls.key_file: tls.cert_file is set, so its key must be too",
		"templates.py.image: a template needs an image",
		"templates.py.limits.memory: it is at least 128MiB",
	} {
		if !strings.Contains(errs, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if t.Failed() {
		t.Log(errs)
	}
}

func TestAFileThatIsNoYAMLNamesTheLine(t *testing.T) {
	for content, want := range map[string]string{
		"listen: \"abc\nttl: x":     "boxed.yaml:1: ",
		"a: b: c":                   "boxed.yaml:1: ",
		"- a\n- b":                  "it takes settings of its own",
		"listen: 1\n---\nlisten: 2": "a second document",
		"listen: *x":                "boxed.yaml:1: ",
		"<<: {listen: 1}":           "merge keys are not supported",
		"templates: {a: {image: [x": "boxed.yaml:1: ",
	} {
		_, err := main.Load(main.Sources{File: file(t, "boxed.yaml", content, 0o600)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", content, err, want)
		}
	}
	for _, fine := range []string{"", "# nothing\n", "---\n", "docker:\n  # host: x\n", "{}\n"} {
		if _, err := main.Load(main.Sources{File: file(t, "boxed.yaml", fine, 0o600)}); err != nil {
			t.Errorf("%q: %v", fine, err)
		}
	}
	if _, err := main.Load(main.Sources{File: "/nowhere/boxed.yaml"}); err == nil || !strings.Contains(err.Error(), "/nowhere/boxed.yaml") {
		t.Errorf("a missing file: %v", err)
	}
}

func FuzzTheFileIsReadWithoutPanic(f *testing.F) {
	f.Add("listen: x\ntemplates:\n  a: {image: b}\n")
	f.Add("quotas: {owners: {a.b: {memory: 1GiB}}}\nhosts: [a, *b, &c d]\n? [a]\n: b\n")
	path := filepath.Join(f.TempDir(), "boxed.yaml")
	f.Fuzz(func(t *testing.T, content string) {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		main.Load(main.Sources{File: path})
	})
}

// A node must not be open by accident.
func TestAListenerThatOthersCanReachNeedsAKeyAndTLS(t *testing.T) {
	cert, key := selfSigned(t, "example.org")
	withKey := "BOXED_API_KEY_FILE=" + file(t, "admin.key", "boxed_"+strings.Repeat("a", 52)+"\n", 0o600)
	noKey, noTLS := "there is no API key", "there is no TLS"
	for name, tc := range map[string]struct {
		listen  string
		environ []string
		says    []string // nothing: it may start
	}{
		"loopback":                      {"127.0.0.1:8080", nil, nil},
		"all of 127/8":                  {"127.9.9.9:8080", nil, nil},
		"loopback by name":              {"localhost:8080", nil, nil},
		"IPv6 loopback":                 {"[::1]:8080", nil, nil},
		"mapped loopback":               {"[::ffff:127.0.0.1]:8080", nil, nil},
		"everything":                    {"0.0.0.0:8080", nil, []string{noKey, noTLS}},
		"everything, by no host":        {":8080", nil, []string{noKey, noTLS}},
		"everything, IPv6":              {"[::]:8080", nil, []string{noKey, noTLS}},
		"a private address":             {"10.0.0.1:8080", nil, []string{noKey, noTLS}},
		"a name":                        {"node1.example.org:8080", nil, []string{noKey, noTLS}},
		"a name like the loopback's":    {"127.0.0.1.example.org:8080", nil, []string{noKey, noTLS}},
		"with a key":                    {"0.0.0.0:8080", []string{withKey}, []string{noTLS}},
		"with a made certificate":       {"0.0.0.0:8080", []string{"BOXED_TLS_AUTO=true"}, []string{noKey}},
		"with a key and a made one":     {"0.0.0.0:8080", []string{withKey, "BOXED_TLS_AUTO=true"}, nil},
		"with a key and own files":      {"0.0.0.0:8080", []string{withKey, "BOXED_TLS_CERT_FILE=" + cert, "BOXED_TLS_KEY_FILE=" + key}, nil},
		"with a secret in the variable": {"0.0.0.0:8080", []string{"BOXED_API_KEY=x", "BOXED_TLS_AUTO=true"}, nil},
		"in the open, on purpose":       {"0.0.0.0:8080", []string{"BOXED_INSECURE_LISTEN=true"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := main.Load(main.Sources{Environ: append(tc.environ, "BOXED_LISTEN="+tc.listen, "BOXED_DATA_DIR="+t.TempDir())})
			text := ""
			if err != nil {
				text = err.Error()
			}
			for _, problem := range []string{noKey, noTLS} {
				want := false
				for _, s := range tc.says {
					want = want || s == problem
				}
				if strings.Contains(text, problem) != want {
					t.Errorf("says %q: %v, want %v", problem, !want, want)
				}
			}
			if (err == nil) != (len(tc.says) == 0) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTheServedHostNamesAreAClosedSet(t *testing.T) {
	c := main.Default()
	c.Hosts = []string{"box.example.org"}
	if diff := cmp.Diff([]string{"127.0.0.1", "::1", "box.example.org", "localhost"}, c.HostNames()); diff != "" {
		t.Error(diff)
	}
	c.Listen = "192.0.2.7:443"
	if got := c.HostNames(); !contains(got, "192.0.2.7") || len(got) != 5 {
		t.Errorf("got %v", got)
	}
	c.Listen = ":443"
	name, _ := os.Hostname()
	if got := c.HostNames(); !contains(got, name) || contains(got, "0.0.0.0") || contains(got, "::") || contains(got, "") {
		t.Errorf("got %v", got)
	}
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

func TestSecretsAreNotPrinted(t *testing.T) {
	secret := "boxed_" + strings.Repeat("q", 52)
	for _, args := range [][]string{{"config", "print"}, {"config", "print", "-o", "json"}, {"config", "print", "--listen", "nonsense"}} {
		_, out, errs := invoke([]string{"BOXED_API_KEY=" + secret}, args...)
		if strings.Contains(out+errs, "qqqq") || !strings.Contains(out, "(set)") {
			t.Errorf("%v: %s%s", args, out, errs)
		}
	}
}

func TestWrongCommandLinesAreRefused(t *testing.T) {
	for _, args := range [][]string{{"rum"}, {"config"}, {"config", "chek"}, {"run", "fast"}, {"--no-such-flag"}, {"version", "-o", "xml"}, {"run", "--listen"}} {
		status, out, errs := invoke(nil, args...)
		if status != 2 || out != "" || !strings.HasPrefix(errs, "boxed-node: ") {
			t.Errorf("%v: status %d, %q, %q", args, status, out, errs)
		}
	}
}

func TestMistypedVariablesAreNoticed(t *testing.T) {
	_, _, errs := invoke([]string{"BOXED_LISTN=x", "BOXED_ENDPOINT=http://x", "BOXED_CONTEXT=y"}, "config", "check")
	if !strings.Contains(errs, "BOXED_LISTN") || strings.Contains(errs, "BOXED_ENDPOINT") || strings.Contains(errs, "BOXED_CONTEXT") {
		t.Error(errs)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "1048576": 1 << 20, "512MiB": 512 << 20, "1.5GiB": 3 << 29, "64 KiB": 64 << 10, "2TiB": 2 << 40} {
		got, err := main.ParseSize(text)
		if err != nil || got != want {
			t.Errorf("%q is %d, %v", text, got, err)
		}
		if back, err := main.ParseSize(main.FormatSize(want)); err != nil || back != want {
			t.Errorf("%d is written %q, which is %d, %v", want, main.FormatSize(want), back, err)
		}
	}
	for _, bad := range []string{"", "MiB", "-1", "512MB", "512m", "1e30", "0.3", "inf", "1 2"} {
		if got, err := main.ParseSize(bad); err == nil {
			t.Errorf("%q is %d", bad, got)
		}
	}
}

func TestReferenceIsUpToDate(t *testing.T) {
	const path = "../../docs/configuration.md"
	want := main.Reference()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is out of date: make docs", path)
	}
}

// A sandbox's record holds the variables of its template.
func TestATemplatesEnvironmentIsBounded(t *testing.T) {
	_, err := main.Load(main.Sources{File: file(t, "boxed.yaml",
		"templates: {py: {image: x, env: {A: "+strings.Repeat("x", boxed.MaxEnvJSON/2)+"}}}", 0o600)})
	if err == nil || !strings.Contains(err.Error(), "templates.py.env: it has ") {
		t.Errorf("got %.200v", err)
	}
}
