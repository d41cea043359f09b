package e2e_test

import (
	"encoding/json"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// A revoked key ends its live streams within 5 s, and what it started attached.
func TestRevokedKeysStreamsEnd(t *testing.T) {
	n := startNode(t)
	made, errs, code := n.ctl("key", "create", "--owner", "alice", "-o", "json")
	if code != 0 {
		t.Fatal(errs)
	}
	var key boxed.NewKey
	if err := json.Unmarshal([]byte(made), &key); err != nil {
		t.Fatalf("%v in %s", err, made)
	}
	alice := *n
	alice.key = key.Secret
	id, errs, code := alice.ctl("create", "--name", "hers")
	if code != 0 {
		t.Fatal(errs)
	}
	// She sees hers, and not what others have.
	other := n.create(boxed.Spec{})
	if out, _, code := alice.ctl("exec", string(other.ID), "true"); code == 0 {
		t.Errorf("another owner's sandbox was entered: %s", out)
	}
	follow := exec.Command(filepath.Join(bin, "boxedctl"), "exec", strings.TrimSpace(id), "sleep", "1000")
	follow.Env = alice.env()
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- follow.Wait() }()
	within(t, 10*time.Second, "the program to run", func() bool {
		out, _, _ := n.ctl("ps", strings.TrimSpace(id))
		return strings.Contains(out, "sleep 1000")
	})
	if _, errs, code := n.ctl("key", "revoke", key.ID); code != 0 {
		t.Fatal(errs)
	}
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		follow.Process.Kill()
		t.Error("the stream of a revoked key still lives after 5 s")
	}
	if _, errs, code := alice.ctl("ls"); code == 0 || !strings.Contains(errs, "key") {
		t.Errorf("the key still works: %q", errs)
	}
}

// TLS with a generated certificate: refused without its pin, used with it.
func TestGeneratedCertificateIsPinned(t *testing.T) {
	n := startNode(t)
	n.stop(syscall.SIGTERM)
	address := freeAddress(t)
	node := exec.Command(filepath.Join(bin, "boxed-node"), "run", "--listen", address, "--data-dir", n.dir, "--agent", n.agent, "--tls-auto")
	log := &safeBuffer{}
	node.Stdout, node.Stderr = log, log
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		node.Process.Signal(syscall.SIGTERM)
		node.Wait()
	})
	var pin string
	within(t, 30*time.Second, "the fingerprint", func() bool {
		m := regexp.MustCompile(`fingerprint=(\S+)`).FindStringSubmatch(log.String())
		if m != nil {
			pin = m[1]
		}
		return m != nil
	})
	n.endpoint = "https://" + address
	if _, errs, code := n.ctl("ls"); code == 0 {
		t.Errorf("an unknown certificate was taken: %q", errs)
	}
	within(t, 30*time.Second, "the node", func() bool {
		out, _, code := n.ctl("--pin", pin, "run", "-c", "print(1)")
		return code == 0 && out == "1\n"
	})
	n.endpoint = "http://" + address
}

// Decision: a web page cannot reach a node through a browser.
func TestForeignOriginsAreRefused(t *testing.T) {
	n := startNode(t)
	for name, change := range map[string]func(*http.Request){
		"origin": func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") },
		"null":   func(r *http.Request) { r.Header.Set("Origin", "null") },
		"site":   func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") },
		"host":   func(r *http.Request) { r.Host = "evil.example" },
	} {
		req, err := http.NewRequest(http.MethodGet, n.endpoint+"/v1/sandboxes", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+n.key)
		change(req)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode < 400 {
			t.Errorf("%s: %d", name, resp.StatusCode)
		}
	}
}
