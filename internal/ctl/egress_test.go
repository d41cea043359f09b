//go:build linux

package ctl

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// boxedctl is not linked with the package that knows the presets.
func TestThePresetsAreThoseThatThereAre(t *testing.T) {
	if diff := cmp.Diff(egress.PresetNames(), presets); diff != "" {
		t.Error(diff)
	}
}

// What profile show and suggest print is applied as it is, whatever is in it.
func TestAPrintedProfileIsReadBack(t *testing.T) {
	no := false
	for _, p := range append(egress.ReadyProfiles(), boxed.EgressProfile{
		Version: 1, Name: "no", Owner: "1234", OnDeny: boxed.DenyAsk, Exit: "abcdefghijklmnop", Deny: []string{"*.evil.example", "10.0.0.1"},
		Rules: []boxed.EgressRule{
			{Host: "yes.example", Ports: []uint16{443}, Mode: boxed.EgressIntercept, Methods: []string{"GET", "NO"}, Paths: []string{"/a,b]/", "/~", "/*/", "/null"}},
			{Host: "*.example.com", Ports: []uint16{8443, 9443}},
			{Host: "192.0.2.1"},
			{Host: "git.example", Ports: []uint16{22}, Raw: true},
			{Host: "ech.example", AllowECH: true},
			{Host: "api.example", Mode: boxed.EgressIntercept, Credential: "true", Need: boxed.CredentialOptional, WebSocket: &no},
		},
	}) {
		text, err := profileYAML(&p)
		if err != nil {
			t.Fatal(err)
		}
		back, err := egress.ParseProfile([]byte(text))
		if err != nil {
			t.Errorf("%v in\n%s", err, text)
			continue
		}
		for i, r := range p.Rules {
			if len(r.Ports) == 1 && r.Ports[0] == 443 {
				p.Rules[i].Ports = nil
			}
		}
		ignored := cmpopts.IgnoreFields(boxed.EgressProfile{}, "Hash", "Ready", "Flags")
		if diff := cmp.Diff(p, *back, ignored, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s of\n%s", diff, text)
		}
	}
}

func TestPatternsOfAskAreThoseOfAllow(t *testing.T) {
	for _, tt := range []struct {
		pattern, host string
		want          bool
	}{
		{"pypi.org", "pypi.org", true},
		{"PyPI.org", "pypi.org", true},
		{"pypi.org:443", "pypi.org", true},
		{"pypi.org", "pypi.org:8443", false},
		{"pypi.org:8443", "pypi.org:8443", true},
		{"pypi.org", "evil-pypi.org", false},
		{"*.pypi.org", "www.pypi.org", true},
		{"*.pypi.org", "pypi.org", false},
		{"*.pypi.org", ".pypi.org", false},
		{"*.pypi.org", "a.b.pypi.org", false},
		{"*.pypi.org", "wwwpypi.org", false},
		{"*.pypi.org:22", "www.pypi.org", false},
		{"*", "anything.example", true},
		{"*", "anything.example:22", false},
		{"*:22", "anything.example:22", true},
		{"", "pypi.org", false},
	} {
		if got := matchesHost(tt.pattern, tt.host); got != tt.want {
			t.Errorf("%q for %q: %v, want %v", tt.pattern, tt.host, got, tt.want)
		}
	}
}

func TestRecordsAreSaidInOneLine(t *testing.T) {
	for want, r := range map[string]boxed.EgressRecord{
		"pypi.org:443  GET /simple/  200  12 B out, 3 MiB in": {
			Host: "pypi.org", Port: 443, Method: "GET", Path: "/simple/", Status: 200, Allowed: true, Reason: boxed.EgressAllowed, Up: 12, Down: 3 << 20,
		},
		"evil.example  not_listed  × 7":               {Host: "evil.example", Reason: boxed.EgressNotListed, Count: 7},
		"a.example:443  sni_mismatch: it says b":      {Host: "a.example", Port: 443, Reason: boxed.EgressSNI, Detail: "it says b"},
		"[2001:db8::1]:443  private_address":          {Address: "2001:db8::1", Port: 443, Reason: boxed.EgressPrivateAddress},
		"-  invalid_name":                             {Reason: boxed.EgressInvalidName},
		"api.example:443  changed  1 KiB out, 0 B in": {Host: "api.example", Port: 443, Allowed: true, End: true, Reason: boxed.EgressChanged, Up: 1 << 10},
	} {
		if got := recordText(&r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The value of a secret is asked for without being shown, and Ctrl-C gives the terminal
// back.
func TestASecretIsTypedUnseen(t *testing.T) {
	endpoint, err := startFake(t.TempDir(), t.Cleanup)
	if err != nil {
		t.Fatal(err)
	}
	tm := onTerminal(t, endpoint, fakeUserKey, "secret", "set", "github")
	tm.sees(`The value of github \(it is not shown\): `)
	tm.typed("ghp_0123456789abcdefghijklmnopqrstuvwxyz\r")
	tm.sees(`Version: +1`)
	tm.ends(0)
	tm.mu.Lock()
	if strings.Contains(tm.out.String(), "ghp_") {
		t.Errorf("it was shown: %q", tm.out.String())
	}
	tm.mu.Unlock()

	tm = onTerminal(t, endpoint, fakeUserKey, "secret", "set", "github")
	tm.sees(`not shown\): `)
	tm.typed("\r")
	tm.sees(`there is no value`)
	tm.ends(exitBoxed)

	tm = onTerminal(t, endpoint, fakeUserKey, "secret", "set", "github")
	tm.sees(`not shown\): `)
	tm.typed(strings.Repeat("x", maxTyped+1) + "\r")
	tm.sees(`a terminal may have cut it off`)
	tm.ends(exitBoxed)

	tm = onTerminal(t, endpoint, fakeUserKey, "secret", "set", "github")
	tm.sees(`not shown\): `)
	tm.typed("half of it\x03")
	tm.sees(`interrupted`)
	tm.ends(exitInterrupted)
}

// asks makes a program of a sandbox ask for a host.
func asks(t *testing.T, n *fakeNode, box, host string) {
	t.Helper()
	ctx := boxed.WithPrincipal(t.Context(), boxed.Principal{Owner: "ada", Role: boxed.RoleUser})
	sb, err := n.Resolve(ctx, box)
	if err == nil {
		_, err = n.CheckEgress(ctx, sb.ID, boxed.EgressQuery{Host: host})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// asking is a fake node with a sandbox of ada's that asks.
func asking(t *testing.T) (n *fakeNode, endpoint string) {
	t.Helper()
	n, endpoint, err := serveFake(t.TempDir(), t.Cleanup)
	if err != nil {
		t.Fatal(err)
	}
	ctx := boxed.WithPrincipal(t.Context(), boxed.Principal{Owner: "ada", Role: boxed.RoleUser})
	if _, err := n.Create(ctx, boxed.Spec{Name: "build", Egress: &boxed.EgressSpec{OnDeny: boxed.DenyAsk}}); err != nil {
		t.Fatal(err)
	}
	return n, endpoint
}

// A person answers, also for what waited before they came.
func TestAPersonAnswersForConnections(t *testing.T) {
	n, endpoint := asking(t)
	asks(t, n, "build", "early.example")
	tm := onTerminal(t, endpoint, fakeUserKey, "egress", "ask")
	tm.sees(`build asks for early.example \[y/N/10m\] `)
	time.Sleep(2 * askSettle) // as long as it takes to read
	tm.typed("what\r")
	tm.sees(`y allows it, n refuses it`)
	tm.sees(`build asks for early.example `)
	tm.typed("10m\r")
	tm.sees(`build  .*allowed.*  early.example  for 10m\r\n`)
	asks(t, n, "build", "second.example")
	tm.sees(`build asks for second.example `)
	time.Sleep(2 * askSettle)
	tm.typed("\r")
	tm.sees(`build  .*refused.*  second.example\r\n`)
	tm.typed("\x04")
	tm.ends(0)
}

// The attack: a program asks for what its owner allows, gives up, and asks for something
// else, so that the answer to the one is given to the other.
func TestAnAnswerIsForWhatWasSeen(t *testing.T) {
	n, endpoint := asking(t)
	tm := onTerminal(t, endpoint, fakeUserKey, "egress", "ask")
	tm.sees(`waiting for connections`)
	asks(t, n, "build", "harmless.example")
	tm.sees(`build asks for harmless.example `)
	asks(t, n, "build", "evil.example")
	n.giveUp("harmless.example")
	tm.sees(`harmless.example no longer waits: nobody answered`)
	tm.sees(`build asks for evil.example `)
	tm.typed("y\r")
	tm.sees(`that came too soon`)
	tm.sees(`build asks for evil.example `)
	time.Sleep(askGuard)
	tm.typed("n\r")
	tm.sees(`build  .*refused.*  evil.example\r\n`)
	tm.typed("\x04")
	tm.ends(0)
}

// Administrators hear of everybody's events, and are asked for their own sandboxes.
func TestNobodyIsAskedForOthersSandboxes(t *testing.T) {
	n, endpoint := asking(t)
	asks(t, n, "build", "hers.example")
	tm := onTerminal(t, endpoint, fakeAdminKey, "egress", "ask")
	tm.sees(`waiting for connections`)
	time.Sleep(3 * askSettle)
	tm.typed("y\r\x04")
	tm.ends(0)
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.egress.open) != 1 {
		t.Error("it was answered")
	}
}

// lobbyOf is a fake node as the lobby needs it.
type lobbyOf struct {
	*fakeNode
	fakeSSH
}

// The lobby has what needs no file and no answer, and writes commands as they are typed
// there.
func TestTheLobbyHasEgress(t *testing.T) {
	n, _ := asking(t)
	run := func(line string) (out string, status int) {
		var stdout, stderr stringWriter
		ctx := boxed.WithPrincipal(context.Background(), boxed.Principal{Owner: "ada", Role: boxed.RoleUser})
		status = Lobby{Service: lobbyOf{fakeNode: n}}.Run(ctx, strings.Fields(line), &stdout, &stderr)
		return string(stdout) + string(stderr), status
	}
	for line, want := range map[string]string{
		"egress show build":             "Egress:",
		"egress check build a.example":  "ssh boxed egress allow build a.example",
		"egress suggest build":          "version: 1",
		"egress allow build b.example":  "build may reach b.example",
		"egress allow --help":           "ssh boxed egress allow SANDBOX HOST",
		"egress suggest build --help":   "egress profile apply takes",
		"egress set build":              "no command \"set\"",
		"egress profile apply /etc/x":   "no command \"profile\"",
		"egress ask":                    "no command \"ask\"",
		"egress freeze":                 "no command \"freeze\"",
		"secret ls":                     "no command \"secret\"",
		"egress show build -o json":     "\"state\": \"open\"",
		"egress suggest build -o name":  "build",
		"egress log build --owner root": "only an admin",
	} {
		if out, _ := run(line); !strings.Contains(out, want) {
			t.Errorf("%s: %q", line, out)
		}
	}
	if out, status := run("egress log build --denied"); status != 0 || !strings.Contains(out, "refused") {
		t.Errorf("%q, %d", out, status)
	}
	if _, status := run("egress check build c.example"); status != lobbyFailed {
		t.Errorf("the status is %d", status)
	}
	a := &app{lobby: inProcess{}}
	for text, want := range map[string]string{
		"boxedctl egress set x":            "boxedctl egress set x",
		"boxedctl egress profile ls lists": "boxedctl egress profile ls lists",
		"boxedctl egress allow x":          "ssh boxed egress allow x",
		"boxedctl egress has no flag":      "ssh boxed egress has no flag",
		"boxedctl ls lists yours":          "ssh boxed ls lists yours",
		"boxedctl keys revoke KEY":         "ssh boxed keys revoke KEY",
		"boxedctl inspect shows":           "boxedctl inspect shows",
		"boxedctl --help lists them":       "ssh boxed --help lists them",
	} {
		if got := a.words(text); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Nothing of the lobby's takes the name of a file, or waits for a person.
func TestTheLobbyTouchesNoFiles(t *testing.T) {
	root := (&app{lobby: inProcess{}, getenv: func(string) string { return "" }}).lobbyCommands()
	var walk func(c *cli.Command)
	walk = func(c *cli.Command) {
		for _, f := range c.Flags {
			head, text := flagHelp(f)
			if strings.Contains(head+text, "FILE") || strings.Contains(text, "file") {
				t.Errorf("%s has the flag %s", c.Name, head)
			}
		}
		if strings.Contains(c.UsageText, "FILE") {
			t.Errorf("%s takes a file: %s", c.Name, c.UsageText)
		}
		for _, sub := range c.Subcommands {
			walk(sub)
		}
	}
	walk(root)
}
