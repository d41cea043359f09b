package e2e_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tailscale.com/tsnet"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

// as is the node as another owner, who has a key of their own.
func (n *node) as(owner string) *node {
	n.t.Helper()
	made, errs, code := n.ctl("key", "create", "--owner", owner, "-o", "json")
	if code != 0 {
		n.t.Fatal(errs)
	}
	var key boxed.NewKey
	if err := json.Unmarshal([]byte(made), &key); err != nil {
		n.t.Fatalf("%v in %s", err, made)
	}
	other := *n
	other.key = key.Secret
	return &other
}

// Whoever adds a key proves to have it; who has it comes in as its owner, until it is
// revoked, and then no longer: sessions that run end too.
func TestSSHKeysOfOwners(t *testing.T) {
	n, c := startSSH(t)
	ada, bob := n.as("ada"), n.as("bob")
	hers, file := newSSHClient(t)
	hers.port = c.port
	if _, errs, code := hers.run("", "new@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "Permission denied") {
		t.Fatalf("before: %q, %d", errs, code)
	}
	// Bob has the public half, as everybody may.
	copied := write(t, filepath.Join(t.TempDir(), "copied.pub"), mustRead(t, file))
	if _, errs, code := bob.ctl("ssh-key", "add", copied); code == 0 || !strings.Contains(errs, "did not sign") {
		t.Errorf("another's key: %q, %d", errs, code)
	}
	if _, err := dialed(t, bob).AddSSHKey(t.Context(), boxed.SSHKeyRequest{PublicKey: string(mustRead(t, file))}); boxed.CodeOf(err) != boxed.CodeForbidden {
		t.Errorf("without a proof: %v", err)
	}
	id, errs, code := ada.ctl("ssh-key", "add", file, "-o", "name")
	if code != 0 {
		t.Fatal(errs)
	}
	if again, _, _ := ada.ctl("ssh-key", "add", file, "-o", "name"); again != id {
		t.Errorf("added twice it is %q and %q", id, again)
	}
	if _, errs, code := n.ctl("ssh-key", "add", file, "--owner", "bob"); code == 0 || !strings.Contains(errs, "another owner has this key") {
		t.Errorf("for a second owner: %q, %d", errs, code)
	}
	box, errs, code := ada.ctl("create", "--name", "hers")
	if code != 0 {
		t.Fatal(errs)
	}
	if out, errs, code := hers.run("", "hers@127.0.0.1", "echo in"); out != "in\n" || code != 0 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if _, _, code := c.run("", "hers@127.0.0.1", "true"); code != 255 {
		t.Error("it is found by name by another owner")
	}
	if out, _, _ := bob.ctl("ssh-key", "ls", "-o", "name"); out != "" {
		t.Errorf("bob sees %q", out)
	}
	live := hers.command("hers@127.0.0.1", "sleep 1000")
	if err := live.Start(); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "it to run", func() bool {
		execs, _ := n.ListExecs(t.Context(), boxed.ID(strings.TrimSpace(box)))
		return len(execs) > 1
	})
	if _, errs, code := bob.ctl("ssh-key", "revoke", strings.TrimSpace(id)); code == 0 || !strings.Contains(errs, "no SSH key") {
		t.Errorf("bob revokes it: %q, %d", errs, code)
	}
	if _, errs, code := ada.ctl("ssh-key", "revoke", strings.TrimSpace(id)); code != 0 {
		t.Fatal(errs)
	}
	if _, errs, code := hers.run("", "hers@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "Permission denied") {
		t.Errorf("revoked: %q, %d", errs, code)
	}
	ended := make(chan error, 1)
	go func() { ended <- live.Wait() }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		live.Process.Kill()
		t.Error("the session of a revoked key goes on")
	}
	if _, errs, code := ada.ctl("ssh-key", "add", file); code != 0 {
		t.Errorf("added again: %s", errs)
	}
	if _, errs, code := hers.run("", "hers@127.0.0.1", "true"); code != 0 {
		t.Errorf("added again: %q, %d", errs, code)
	}
	for text, want := range map[string]string{
		string(mustRead(t, strings.TrimSuffix(file, ".pub"))): "private key",
		"ssh-ed25519 AAAA":                         "no public key",
		`command="x" ` + string(mustRead(t, file)): "no options",
		"hello": "no public key",
	} {
		if _, errs, code := n.ctl("ssh-key", "add", write(t, filepath.Join(t.TempDir(), "key"), []byte(text))); code == 0 || !strings.Contains(errs, want) {
			t.Errorf("%.20q: %q, %d", text, errs, code)
		}
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Certificates that an operator's authority signs: the principal is the owner, and
// what they do not allow is not allowed.
func TestSSHUserCertificates(t *testing.T) {
	c, _ := newSSHClient(t)
	ca, stranger := filepath.Join(c.dir, "ca"), filepath.Join(c.dir, "stranger")
	for _, key := range []string{ca, stranger} {
		c.must("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	}
	needEngine(t)
	address := freeAddress(t)
	_, c.port, _ = net.SplitHostPort(address)
	n := startNode(t, "--ssh-listen", address, "--ssh-user-ca-keys", ca+".pub")
	if _, errs, code := n.as("ada").ctl("create", "--name", "hers"); code != 0 {
		t.Fatal(errs)
	}
	for name, tc := range map[string]struct {
		by   string
		args []string
		ok   bool
	}{
		"as it should be":        {ca, []string{"-n", "ada", "-V", "+1h"}, true},
		"by another authority":   {stranger, []string{"-n", "ada", "-V", "+1h"}, false},
		"for another owner":      {ca, []string{"-n", "bob", "-V", "+1h"}, false},
		"for two":                {ca, []string{"-n", "ada,bob", "-V", "+1h"}, false},
		"for all":                {ca, []string{"-V", "+1h"}, false},
		"expired":                {ca, []string{"-n", "ada", "-V", "-2h:-1h"}, false},
		"of a host":              {ca, []string{"-h", "-n", "ada", "-V", "+1h"}, false},
		"with a command":         {ca, []string{"-n", "ada", "-V", "+1h", "-O", "force-command=true"}, false},
		"from elsewhere":         {ca, []string{"-n", "ada", "-V", "+1h", "-O", "source-address=192.0.2.0/24"}, false},
		"from here":              {ca, []string{"-n", "ada", "-V", "+1h", "-O", "source-address=192.0.2.1,127.0.0.0/8"}, true},
		"with what nobody knows": {ca, []string{"-n", "ada", "-V", "+1h", "-O", "critical:x@example.com=1"}, false},
	} {
		os.Remove(filepath.Join(c.dir, "key-cert.pub"))
		c.must("ssh-keygen", append(append([]string{"-q", "-s", tc.by, "-I", "test"}, tc.args...), filepath.Join(c.dir, "key.pub"))...)
		out, errs, code := c.run("", "hers@127.0.0.1", "echo in")
		if tc.ok && (out != "in\n" || code != 0) || !tc.ok && code != 255 {
			t.Errorf("%s: %q, %q, %d", name, out, errs, code)
		}
	}
	os.Remove(filepath.Join(c.dir, "key-cert.pub"))
	c.must("ssh-keygen", "-q", "-s", ca, "-I", "test", "-n", "ada", "-V", "+1h", "-O", "clear", filepath.Join(c.dir, "key.pub"))
	if out, errs, code := c.run("", "hers@127.0.0.1", "echo in"); out != "in\n" || code != 0 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if out, errs, _ := c.run("", "-tt", "hers@127.0.0.1", "true"); !strings.Contains(errs, "PTY allocation request failed") {
		t.Errorf("a terminal that the certificate does not allow: %q, %q", out, errs)
	}
	c.says = "INFO"
	if _, errs, code := c.run("", "-W", "127.0.0.1:80", "hers@127.0.0.1"); code == 0 || !strings.Contains(errs, "does not allow forwarding") {
		t.Errorf("forwarding that the certificate does not allow: %q, %d", errs, code)
	}
}

// boxedctl ssh needs an API key and nothing else; ssh-config lets every other program
// do the same. Both know the hosts by their authority.
func TestSSHThroughTheAPI(t *testing.T) {
	n := startNode(t, "--ssh-listen", "")
	n.create(boxed.Spec{Name: "box"})
	out, errs, code := n.ctlIn(strings.NewReader("in\n"), "ssh", "box", "cat; echo err >&2; exit 7")
	if out != "in\n" || errs != "err\n" || code != 7 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if out, errs, code := n.ctl("ssh", "new", "-T", "echo $((6*7))"); out != "42\n" || code != 0 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if _, errs, code := n.as("ada").ctl("ssh", "box", "true"); code != 255 || !strings.Contains(errs, `boxed: `) {
		t.Errorf("another's: %q, %d", errs, code)
	}
	nobody := *n
	nobody.key = "boxed_nobody"
	if _, errs, code := nobody.ctl("ssh", "box", "true"); code != 255 || !strings.Contains(errs, "API key") {
		t.Errorf("without a key: %q, %d", errs, code)
	}

	text, errs, code := n.ctl("ssh-config")
	if code != 0 || !strings.Contains(text, "Host boxed *.boxed\n") || strings.Contains(text, n.key) {
		t.Fatalf("%q, %q, %d", text, errs, code)
	}
	config := write(t, filepath.Join(n.dir, "ssh_config"), []byte(text+"  BatchMode yes\n  IdentityFile none\n"))
	run := func(name string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, append([]string{"-F", config}, args...)...)
		cmd.Env = n.env()
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %q: %v: %s", name, args, err, out)
		}
		return string(out)
	}
	if out := run("ssh", "box@boxed", "echo in"); out != "in\n" {
		t.Errorf("%q", out)
	}
	run("scp", "-q", config, "box@boxed:config")
	if out := run("ssh", "box@n0.boxed", "wc -l < config"); strings.TrimSpace(out) == "0" {
		t.Errorf("%q", out)
	}
	for range 2 {
		if _, errs, code := n.ctl("ssh-config", "--install"); code != 0 {
			t.Fatal(errs)
		}
	}
	installed := string(mustRead(t, filepath.Join(n.dir, "home", ".ssh", "config")))
	if installed != "Include boxed.conf\n" || string(mustRead(t, filepath.Join(n.dir, "home", ".ssh", "boxed.conf"))) != text {
		t.Errorf("%q", installed)
	}

	// A host that is another is refused.
	known, err := filepath.Glob(filepath.Join(n.dir, "home", ".config", "boxed", "ssh_known_hosts.*"))
	if err != nil || len(known) != 1 {
		t.Fatal(known, err)
	}
	line := strings.Fields(strings.Split(string(mustRead(t, known[0])), "\n")[1])
	if line[0] != "@cert-authority" || line[1] != "boxed" {
		t.Errorf("%q", line)
	}
}

// A machine of the tailnet needs no key: who it is the tailnet says. One that the
// policy does not let in by that is asked for one.
func TestSSHOverATailnet(t *testing.T) {
	needEngine(t)
	tailnet := tailnettest.Start(t)
	n := startNode(t, "--mesh-network", "tailnet", "--tailnet-control-url", tailnet.ControlURL, "--ssh-listen", "", "--name", "one")
	n.stop(15)
	n.environ = tailnettest.Env()
	n.start()

	laptop := &tsnet.Server{Dir: t.TempDir(), Hostname: "laptop", ControlURL: tailnet.ControlURL, Ephemeral: true, Logf: func(string, ...any) {}}
	t.Cleanup(func() { laptop.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := laptop.Up(ctx); err != nil {
		t.Fatal(err)
	}
	relay, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { relay.Close() })
	go func() {
		for {
			conn, err := relay.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				there, err := laptop.Dial(ctx, "tcp", "boxed-one:22")
				if err != nil {
					return
				}
				defer there.Close()
				go func() { io.Copy(there, conn); there.Close() }()
				io.Copy(conn, there)
			}()
		}
	}()
	c, _ := newSSHClient(t)
	_, c.port, _ = net.SplitHostPort(relay.Addr().String())
	within(t, 60*time.Second, "ssh on the tailnet", func() bool {
		out, _, code := c.run("", "new@127.0.0.1", "echo in")
		return out == "in\n" && code == 0
	})
	if err := tailnet.Share("laptop"); err != nil {
		t.Fatal(err)
	}
	within(t, 30*time.Second, "a machine of another tailnet to be refused", func() bool {
		_, errs, code := c.run("", "new@127.0.0.1", "true")
		return code == 255 && strings.Contains(errs, "Permission denied")
	})
}

// dialed is a client of a node, as its owner.
func dialed(t *testing.T, n *node) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{Endpoint: n.endpoint, APIKey: n.key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
