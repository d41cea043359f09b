package e2e_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/boxed-mesh/boxed"
)

// Each way in which SSH says no, with OpenSSH's own clients: testdata/ssh.
func TestWhatSSHRefuses(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	bob := n.as("bob")
	hers, errs, code := bob.ctl("create", "--name", "hers")
	if code != 0 {
		t.Fatal(errs)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/ssh",
		Setup: func(e *testscript.Env) error {
			e.Setenv("PATH", c.onPath()+string(filepath.ListSeparator)+os.Getenv("PATH"))
			e.Setenv("HERS", strings.TrimSpace(hers))
			return nil
		},
	})
}

// The lobby has the commands that are about sandboxes and keys, for a person and for a
// program, and nothing that is about the host.
func TestTheLobby(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box", TTL: boxed.Duration(time.Hour)})
	lobby := func(words ...string) string {
		t.Helper()
		out, errs, code := c.run("", append([]string{"boxed@127.0.0.1"}, words...)...)
		if code != 0 {
			t.Fatalf("%q: %q, %d", words, errs, code)
		}
		return out
	}
	if out := lobby("ls"); !strings.Contains(out, "box") {
		t.Error(out)
	}
	var list struct{ Sandboxes []boxed.Sandbox }
	if out := lobby("ls", "-o", "json"); json.Unmarshal([]byte(out), &list) != nil || len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != sb.ID {
		t.Error(out)
	}
	if out, _, _ := c.run("", "admin@127.0.0.1", "whoami", "-o", "name"); out != "admin\n" { // the owner's own name
		t.Error(out)
	}
	for words, want := range map[string]string{
		"help": "ssh boxed COMMAND", "nodes": "alive", "top": "MEMORY", "keys": "FINGERPRINT", "whoami": "user", "renew box --ttl 2h": "119m", "": "ssh boxed COMMAND",
	} {
		if out := lobby(strings.Fields(words)...); !strings.Contains(out, want) {
			t.Errorf("%s: %q", words, out)
		}
	}
	id := strings.TrimSpace(lobby("new", "--name", "made"))
	if out := lobby("rm", id); out != id+"\n" && out != "" {
		t.Error(out)
	}
	if sb, err := n.Get(t.Context(), boxed.ID(id)); err != nil || !sb.State.Ended() {
		t.Errorf("%+v, %v", sb, err)
	}

	// A sandbox that would end with its shell is kept.
	term := c.terminal("new")
	term.wait("to keep it: ssh boxed keep ")
	rest := term.text()[strings.Index(term.text(), "ssh boxed keep ")+len("ssh boxed keep "):]
	kept := strings.Fields(rest)[0]
	lobby("keep", kept)
	term.say("exit", "")
	term.end()
	if left, err := n.Resolve(t.Context(), kept); err != nil || left.State != boxed.StateRunning || left.IdleTimeout != 0 {
		t.Errorf("%+v, %v", left, err)
	}

	// A person chooses, comes back, and leaves.
	term = c.terminal("boxed")
	term.wait("boxed> ")
	term.say("whoami", "Owner:")
	term.say("7", "there is no number 7")
	term.say("frob", "no command")
	term.say("box", "/workspace$ ")
	term.say("echo in$((1+1)); exit", "in2")
	term.say("exit", "")
	if code := term.end(); code != 0 {
		t.Errorf("its status is %d", code)
	}
}
