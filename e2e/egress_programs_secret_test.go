package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Programs log in by the placeholder where they look for a credential by themselves, and the real one is at
// its destination alone.
func TestProgramsUseSecretsThatTheyDoNotHave(t *testing.T) {
	tr := newTrial(t, programsImage)
	tr.token = real
	for name, preset := range map[string]string{"gh": "github", "npm": "npm", "claude": "anthropic"} {
		tr.n.secret(boxed.SecretRequest{Secret: boxed.Secret{Name: name, Preset: preset, Author: "Ada <ada@acme.example>"}, Value: real})
	}
	tr.id = tr.sandbox(programsImage, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "gh"}, {Name: "npm"}, {Name: "claude"}}})
	limited := tr.sandbox(programsImage, boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "gh", Repos: []string{"acme/private"}, ReadOnly: true}}})
	for _, c := range []struct{ name, script, want string }{
		{"git clones", `git clone -q https://github.com/acme/private d && cat d/README`, "the readme"},
		{"git clones over what was SSH", `git clone -q git@github.com:acme/private.git d && git clone -q ssh://git@github.com/acme/private.git e && cat d/README e/README`, "the readme\nthe readme"},
		{"git pushes", `git clone -q https://github.com/acme/private d && cd d && head -c 3000000 /dev/urandom >big && git add . && git commit -qm two && git push -q && git log -1 --format='%an %ae'`, "Ada ada@acme.example"},
		{"git without the helper asks in vain", `GIT_TERMINAL_PROMPT=0 GIT_CONFIG_SYSTEM=/dev/null git clone -q https://github.com/acme/private d || echo refused`, "refused"},
		{"gh api", `gh api repos/acme/private --jq .description`, "of GitHub"},
		{"gh repo view", `gh repo view acme/private`, "the readme"},
		{"npm publish", `echo '{"name":"boxed-new","version":"1.0.0","main":"i.js"}' >package.json; echo 'module.exports = "published"' >i.js; npm publish --cache c 2>&1`, "+ boxed-new@1.0.0"},
		{"npm install of it", `npm install --silent --cache c boxed-new && node -p 'require("boxed-new")'`, "published"},
		{"the Messages API", `curl -sS -H "X-Api-Key: $ANTHROPIC_API_KEY" -d '{}' https://api.anthropic.com/v1/messages`, "event: message_stop"},
		{"the Messages API with a key of one's own", `curl -sS -H "X-Api-Key: sk-ant-api03-0123456789" -d '{}' https://api.anthropic.com/v1/messages`, `"reason":"foreign_credential"`},
		{"the Messages API by its library, streamed", `/opt/pypi/bin/python -c '
import anthropic
with anthropic.Anthropic().messages.stream(model="test", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as s:
    print("|".join(s.text_stream))'`, "hello |of |a |model"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, status := tr.try("proxy", "", c.script)
			if status.Code != 0 || !strings.Contains(out, c.want) {
				t.Errorf("want %q: %+v: %s", c.want, status, out)
			}
			if leaks(out) {
				t.Errorf("the credential is inside: %s", out)
			}
		})
	}
	gh := program{name: "gh", script: `gh api repos/acme/private --jq .description`, want: "of GitHub", proxy: proxyHTTP}
	readDocument(t).row(t, gh)
	for _, way := range []string{"proxy", "none"} {
		t.Run("gh, "+way, func(t *testing.T) { tr.reach(t, way, "api.github.com", gh, gh.entry(way)) })
	}
	author, err := exec.Command("git", "-C", filepath.Join(tr.repos, "acme/private.git"), "-c", "safe.directory=*", "log", "-1", "--format=%an %s", "main").CombinedOutput()
	if err != nil || strings.TrimSpace(string(author)) != "Ada two" {
		t.Errorf("what was pushed is by %q, %v", author, err)
	}
	// GraphQL has the repository in its body: a limited use cannot have it, and says what else there is.
	if out, _ := tr.n.sh(limited, `gh api repos/acme/private --jq .description; gh repo view acme/private`); !strings.HasPrefix(out, "of GitHub\n") || !strings.Contains(out, "403") {
		t.Errorf("a limited gh: %s", out)
	}
	if out, _ := tr.n.sh(limited, `cd $(mktemp -d); git clone -q https://github.com/acme/private d && cd d && git commit -q --allow-empty -m three && git push -q && echo pushed`); strings.Contains(out, "pushed") || !strings.Contains(out, "403") {
		t.Errorf("a push by who may only read: %s", out)
	}
	if out, _ := tr.n.sh(tr.id, `env; cat /run/boxed/*; cat /proc/*/environ 2>/dev/null | tr '\0' '\n'`); leaks(out) {
		t.Error("the credential is inside")
	}
	if leaks(tr.n.log.String()) {
		t.Error("the credential is in the node's log")
	}
}

// SSH goes out by its rule, with and without a proxy.
func TestGitOverSSHGoesOut(t *testing.T) {
	tr := newTrial(t, programsImage)
	key := tr.serveSSH()
	tr.copyIn(key, "key")
	if out, status := tr.n.sh(tr.id, "chmod 600 key; git config --global core.sshCommand 'ssh -i /workspace/key -o StrictHostKeyChecking=accept-new -o BatchMode=yes'"); status.Code != 0 {
		t.Fatal(out)
	}
	push := fmt.Sprintf(`git clone -q ssh://root@git.acme.example%s/acme/app.git d && cd d && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m more && git push -q && cat README`, tr.repos)
	through := readDocument(t).commands(t, "SSH")
	readDocument(t).row(t, program{name: "ssh", section: "SSH", proxy: proxyNone})
	for name, c := range map[string]struct {
		script string
		entry  boxed.EgressEntry
	}{
		"by its name": {push, boxed.EntryName},
		"by SOCKS":    {through[0] + push, boxed.EntrySOCKS5},
		"by CONNECT":  {strings.NewReplacer("-X 5", "-X connect", "1080", "3128").Replace(through[0]) + push, boxed.EntryHTTP},
	} {
		t.Run(name, func(t *testing.T) {
			before := tr.last(t)
			out, status := tr.try("proxy", "", c.script)
			if status.Code != 0 || !strings.Contains(out, "the readme") {
				t.Fatalf("%+v: %s", status, out)
			}
			for _, r := range tr.records(t, "git.acme.example", before) {
				if r.Entry != c.entry || !r.Allowed || r.Port != 22 {
					t.Errorf("it came by %s, allowed %v", r.Entry, r.Allowed)
				}
			}
		})
	}
	out, status := tr.try("proxy", "", `ssh -i /workspace/key -o BatchMode=yes -o StrictHostKeyChecking=accept-new root@other.acme.example true`)
	if status.Code == 0 || !strings.Contains(out, "Could not resolve") {
		t.Errorf("a host that no rule names: %s", out)
	}
}

// serveSSH starts the real server at the far host, and returns the key that it takes.
func (tr *trial) serveSSH() (key string) {
	t := tr.t
	t.Helper()
	const sshd = "/usr/sbin/sshd"
	if _, err := os.Stat(sshd); err != nil {
		t.Skip("there is no sshd on this host")
	}
	dir := t.TempDir()
	for _, name := range []string{"host", "user"} {
		if text, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, name)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	config := write(t, filepath.Join(dir, "config"), fmt.Appendf(nil, "Port 22\nListenAddress %s\nHostKey %s\nAuthorizedKeysFile %s\nPidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n",
		farPublic, filepath.Join(dir, "host"), filepath.Join(dir, "user.pub")))
	os.Mkdir("/run/sshd", 0o755) // its services make it
	cmd := tr.in.far.command(context.Background(), sshd, "-D", "-e", "-f", config)
	var log safeBuffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	within(t, 10*time.Second, "sshd: "+log.String(), func() bool {
		conn, err := tr.in.host.dial(t.Context(), "tcp", farPublic.String()+":22")
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return filepath.Join(dir, "user")
}
