package e2e_test

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// real is a credential that must be nowhere but at its destination.
const real = "ghp_R3alT0kenThatMustN0tLeak0123456789ab"

// leaks looks for the credential in any of its forms.
func leaks(text string) bool {
	for _, form := range []string{real, base64.StdEncoding.EncodeToString([]byte(real)), hex.EncodeToString([]byte(real)), url.QueryEscape(real)} {
		if strings.Contains(text, form) {
			return true
		}
	}
	return strings.Contains(text, "R3alT0kenThatMustN0tLeak")
}

func (n *node) secret(r boxed.SecretRequest) {
	n.t.Helper()
	if _, err := n.SetSecret(n.t.Context(), r); err != nil {
		n.t.Fatal(err)
	}
}

func TestACredentialIsSwappedOnTheWireAndNeverInside(t *testing.T) {
	in := newInternet(t)
	for _, name := range []string{"api.github.com", "github.com", "raw.githubusercontent.com", "uploads.github.com", "evil.example.com"} {
		in.name(name)
	}
	n := in.node()
	n.secret(boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github"}, Value: real})
	s := n.egress(boxed.EgressSpec{Allow: []string{"evil.example.com"}, Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"acme/app"}, ReadOnly: true}}})

	out, status := n.sh(s.ID, `env; curl -sS -i -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app`)
	if status.Code != 0 || !strings.Contains(out, `"path":"/repos/acme/app"`) || !strings.Contains(out, "GH_TOKEN=ghp_") {
		t.Fatalf("%+v: %s", status, out)
	}
	if leaks(out) {
		t.Errorf("the credential is inside: %s", out)
	}
	if out, _ := n.sh(s.ID, `cat /proc/*/environ /proc/*/cmdline /run/boxed/* 2>/dev/null; grep -rsa R3alT0ken /etc /run /tmp /workspace /output /dev/shm "$HOME"`); leaks(out) {
		t.Errorf("the credential is in a file or a process inside: %.500s", out)
	}
	got := in.requests()
	if len(got) != 1 || got[0].Header.Get("Authorization") != "token "+real {
		t.Fatalf("upstream saw %+v", got)
	}
	for name, c := range map[string]struct{ script, reason string }{
		"another repository":     {`curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/other`, "path"},
		"a write":                {`curl -sS -X POST -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app/issues`, "method"},
		"graphql":                {`curl -sS -X POST -H "Authorization: token $GH_TOKEN" -d '{}' https://api.github.com/graphql`, "graphql"},
		"a foreign token":        {`curl -sS -H "Authorization: token ghp_0123456789abcdefghijklmnopqrstuvwxyz" https://api.github.com/repos/acme/app`, "foreign_credential"},
		"a foreign query token":  {`curl -sS "https://api.github.com/repos/acme/app?access_token=abcdefghijkl"`, "foreign_credential"},
		"a cookie":               {`curl -sS -H "Cookie: session=abcdefgh" https://api.github.com/repos/acme/app`, "foreign_credential"},
		"the placeholder aside":  {`curl -sS "https://api.github.com/repos/acme/app?q=$GH_TOKEN"`, "placeholder_misuse"},
		"another host's request": {`curl -sS -H "Host: evil.example.com" https://api.github.com/repos/acme/app`, "host_mismatch"},
		"a dot segment":          {`curl -sS --path-as-is https://api.github.com/repos/acme/app/../other`, "invalid_request"},
	} {
		t.Run(name, func(t *testing.T) {
			out, _ := n.sh(s.ID, c.script)
			if !strings.Contains(out, `"reason":"`+c.reason+`"`) {
				t.Errorf("want %s: %s", c.reason, out)
			}
			if got := in.requests(); len(got) != 0 {
				t.Errorf("upstream saw %+v", got)
			}
		})
	}
	// A rotation does not touch the sandbox.
	n.secret(boxed.SecretRequest{Secret: boxed.Secret{Name: "github"}, Value: "ghp_AnotherRealOne0123456789abcdefghijkl"})
	n.sh(s.ID, `curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app`)
	if got := in.requests(); len(got) != 1 || got[0].Header.Get("Authorization") != "token ghp_AnotherRealOne0123456789abcdefghijkl" {
		t.Errorf("after a rotation upstream saw %+v", got)
	}
	// Nor does it go on when the secret is revoked.
	if err := n.RevokeSecret(t.Context(), "github"); err != nil {
		t.Fatal(err)
	}
	if out, _ := n.sh(s.ID, `curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app`); strings.Contains(out, `"path"`) {
		t.Errorf("after the revocation: %s", out)
	}
	if got := in.requests(); len(got) != 0 {
		t.Errorf("after the revocation upstream saw %+v", got)
	}
	if leaks(n.log.String()) {
		t.Error("the credential is in the node's log")
	}
	if files, err := grepDir(n.dir, "R3alT0kenThatMustN0tLeak"); err != nil || len(files) != 0 {
		t.Errorf("the credential lies in %v, %v", files, err)
	}
	for rec, err := range n.EgressLog(t.Context(), boxed.EgressFilter{Sandbox: s.ID, Limit: 1000}) {
		if err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprintf("%+v", rec); leaks(text) || strings.Contains(text, "ghp_") {
			t.Errorf("the audit log has a credential or a placeholder: %s", text)
		}
	}
}
