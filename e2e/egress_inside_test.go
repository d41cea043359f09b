package e2e_test

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Nothing works from inside when it should not, by whatever way: the sandbox of these tries
// may reach one host, and its image has curl, python and perl.
func TestNothingIsReachedByAnotherWay(t *testing.T) {
	in := newInternet(t)
	in.name("api.acme.example")
	in.name("other.acme.example")
	n := in.node()
	s := n.egress(boxed.EgressSpec{Allow: []string{"api.acme.example"}})
	neighbour := n.create(boxed.Spec{})
	if _, err := n.StartExec(t.Context(), neighbour.ID, boxed.ExecRequest{Args: []string{"python3", "-m", "http.server", "8123"}}); err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{
		"a raw socket":                   `python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)'`,
		"a packet socket":                `python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'`,
		"a hard-coded address":           `curl -sS --noproxy '*' -m 3 --resolve api.acme.example:443:93.184.215.2 https://api.acme.example/`,
		"an address through the proxy":   `curl -sS -k -m 3 https://93.184.215.2/`,
		"an address through SOCKS":       `curl -sS -k -m 3 --noproxy '' -x socks5://127.0.0.1:1080 https://93.184.215.2/`,
		"another name without the proxy": `curl -sS --noproxy '*' -m 3 https://other.acme.example/`,
		"IPv6":                           `curl -sS --noproxy '*' -m 3 'https://[2606:4700:4700::1111]/'`,
		"DNS over UDP elsewhere":         `python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.sendto(b"x" * 20, ("10.77.0.2", 53)); s.recv(512)'`,
		"DNS over TCP elsewhere":         `python3 -c 'import socket; socket.create_connection(("8.8.8.8", 53), 2)'`,
		"the host's service by CONNECT":  `curl -sS -m 3 -p -x http://127.0.0.1:3128 http://127.0.0.1:8080/healthz | grep -q ok`,
		"the host's service by a proxy":  `curl -sSf -m 3 -x http://127.0.0.1:3128 http://127.0.0.1:8080/healthz`,
		"the node's API":                 `curl -sSf -m 3 -x http://127.0.0.1:3128 http://10.77.0.1:8080/healthz`,
		"the metadata service":           `curl -sSf -m 3 -x http://127.0.0.1:3128 http://169.254.169.254/`,
		"the tailnet":                    `curl -sSf -m 3 -x http://127.0.0.1:3128 http://100.64.0.2/`,
		"another sandbox's port":         `curl -sSf -m 3 --noproxy '*' http://127.0.0.1:8123/`,
		"another port of the host":       `curl -sSf -m 3 https://api.acme.example:8443/`,
		"plain HTTP on 443":              `curl -sSf -m 3 -p http://api.acme.example:443/`,
		"another name in the hello":      `openssl s_client -brief -connect api.acme.example:443 -proxy 127.0.0.1:3128 -servername other.acme.example </dev/null 2>&1 | grep -q 'CONNECTION ESTABLISHED'`,
		"no name in the hello":           `openssl s_client -brief -connect api.acme.example:443 -proxy 127.0.0.1:3128 -noservername </dev/null 2>&1 | grep -q 'CONNECTION ESTABLISHED'`,
		"BIND of SOCKS":                  `python3 -c 'import socket; s = socket.create_connection(("127.0.0.1", 1080)); s.sendall(b"\x05\x01\x00"); s.recv(2); s.sendall(b"\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00"); assert s.recv(10)[1] == 0'`,
		"UDP of SOCKS":                   `python3 -c 'import socket; s = socket.create_connection(("127.0.0.1", 1080)); s.sendall(b"\x05\x01\x00"); s.recv(2); s.sendall(b"\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00"); assert s.recv(10)[1] == 0'`,
		"the agent's socket":             `python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/run/boxed/agent.sock")'`,
		"other files for the node":       `touch /run/boxed/bundle.pem /run/boxed/x`,
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			if out, status := n.sh(s.ID, script); status.Code == 0 {
				t.Errorf("it worked: %s", out)
			} else if time.Since(begun) > 5*time.Second { // EN6: OpenShell#387
				t.Errorf("it hung for %v: %s", time.Since(begun), out)
			}
		})
	}
	if got := in.requests(); len(got) != 0 {
		t.Errorf("upstream saw %+v", got)
	}
	in.mu.Lock()
	asked := in.asked
	in.mu.Unlock()
	for _, name := range asked {
		if name != "api.acme.example" {
			t.Errorf("%s was looked up outside", name)
		}
	}
}

// What fails is refused with its reason, and nothing is left open.
func TestEachFaultFailsShut(t *testing.T) {
	in := newInternet(t)
	in.name("nobody.acme.example", farPrivate)
	n := in.node("--egress-open", farPrivate.String()+"/32 444 nobody.acme.example")
	_, err := n.Create(t.Context(), boxed.Spec{Egress: &boxed.EgressSpec{Profile: "claude-code"}})
	if err == nil || !strings.Contains(err.Error(), "boxedctl secret set anthropic") {
		t.Errorf("a required secret that is missing: %v", err)
	}
	if _, err := n.Create(t.Context(), boxed.Spec{Egress: &boxed.EgressSpec{Profile: "no-such"}}); err == nil {
		t.Error("a profile that is not there")
	}
	list, err := n.List(t.Context(), boxed.Filter{})
	if err != nil || len(list.Sandboxes) != 0 {
		t.Errorf("what failed left %+v, %v", list, err)
	}
	s := n.egress(boxed.EgressSpec{Allow: []string{"unknown.acme.example", "nobody.acme.example:444", "nobody.acme.example"}})
	reason := func(url string) string {
		t.Helper()
		out, _ := n.sh(s.ID, `curl -sS -m 20 -o /dev/null -D - -v `+url+` 2>&1 | tr -d '\r' | sed -n 's/^< X-Egress-Reason: //p'`)
		return strings.TrimSpace(out)
	}
	for url, want := range map[string]string{
		"https://unknown.acme.example/":    "no_address",
		"https://nobody.acme.example:444/": "connect_failed",
		"https://nobody.acme.example/":     "private_address",
	} {
		if got := reason(url); got != want {
			t.Errorf("%s: %q, want %s", url, got, want)
		}
	}
	in.ip(in.far, "addr", "del", farResolver.String()+"/24", "dev", "lan0") // the resolver is gone
	if got := reason("https://unknown.acme.example/"); got != "resolve_failed" {
		t.Errorf("without a resolver: %q", got)
	}
}

// A restart of the node leaves a sandbox what it had: its rules, its placeholders, its
// certificates.
func TestEgressOutlivesTheNode(t *testing.T) {
	in := newInternet(t)
	in.name("api.github.com")
	n := in.node()
	n.secret(boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github"}, Value: real})
	s := n.egress(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github"}}})
	use := `echo "$GH_TOKEN"; curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/user`
	before, status := n.sh(s.ID, use)
	if status.Code != 0 || !strings.Contains(before, `"path":"/user"`) {
		t.Fatalf("%+v: %s", status, before)
	}
	n.stop(syscall.SIGKILL)
	n.start()
	var after string
	within(t, 20*time.Second, "the sandbox to be adopted", func() bool {
		_, err := n.Get(t.Context(), s.ID)
		return err == nil
	})
	after, status = n.sh(s.ID, use)
	if after != before {
		t.Errorf("after a restart %+v: %s, before it %s", status, after, before)
	}
	// I18: the authority's key is on the disk, and not in the clear.
	if files, err := grepDir(n.dir, "BEGIN PRIVATE KEY"); err != nil || len(files) != 1 || filepath.Base(files[0]) != "node.key" {
		t.Errorf("a key lies in %v, %v", files, err)
	}
	if files, err := grepDir(n.dir, "R3alT0kenThatMustN0tLeak"); err != nil || len(files) != 0 {
		t.Errorf("the credential lies in %v, %v", files, err)
	}
}

// grepDir are the files below a directory that hold a text.
func grepDir(dir, text string) (found []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // of a sandbox that ends meanwhile
		}
		raw, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(raw), text) {
			found = append(found, path)
		}
		return nil
	})
	return found, err
}

// A connection that nobody has allowed waits for its owner, who is asked by an event.
func TestAnOwnerIsAsked(t *testing.T) {
	in := newInternet(t)
	in.name("api.acme.example")
	in.name("other.acme.example")
	n := in.node()
	s := n.egress(boxed.EgressSpec{OnDeny: boxed.DenyAsk})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	answered := make(chan string, 4)
	go func() {
		for e, err := range n.Events(ctx, boxed.CursorOldest) {
			if err != nil {
				return
			}
			if e.Type == boxed.EventEgressAsk {
				allow := strings.HasPrefix(e.Message, "api.")
				err := n.AnswerEgress(ctx, s.ID, boxed.EgressReply{Question: e.Question, Allow: allow, For: boxed.Duration(time.Minute)})
				answered <- fmt.Sprint(e.Message, " ", allow, " ", err)
			}
		}
	}()
	out, status := n.sh(s.ID, `curl -sS https://api.acme.example/hello`)
	if status.Code != 0 || !strings.Contains(out, `"path":"/hello"`) {
		t.Errorf("what was allowed: %+v: %s", status, out)
	}
	if got := <-answered; got != "api.acme.example true <nil>" {
		t.Error(got)
	}
	out, status = n.sh(s.ID, `curl -sS https://api.acme.example/again; curl -sS -o /dev/null -w '%{http_connect}' https://other.acme.example/`)
	if !strings.Contains(out, `"path":"/again"`) || !strings.Contains(out, "403") {
		t.Errorf("%+v: %s", status, out)
	}
	if got := <-answered; got != "other.acme.example false <nil>" {
		t.Error(got)
	}
}

// A freeze ends what is open, and a policy that narrows what it no longer allows.
func TestLiveConnectionsEndWithTheirRight(t *testing.T) {
	in := newInternet(t)
	in.name("api.acme.example")
	in.handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			w.Write([]byte("tick\n"))
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
		}
	}))
	n := in.node()
	s := n.egress(boxed.EgressSpec{Allow: []string{"api.acme.example"}})
	stream := func(end func()) {
		t.Helper()
		done := make(chan string, 1)
		go func() {
			out, _ := n.sh(s.ID, `curl -sSN -m 30 https://api.acme.example/ | head -c 100000000 | wc -l; echo ended`)
			done <- out
		}()
		within(t, 10*time.Second, "the stream to begin", func() bool { return len(in.requests()) > 0 })
		begun := time.Now()
		end()
		select {
		case out := <-done:
			if took := time.Since(begun); took > 5*time.Second {
				t.Errorf("it ended after %v: %s", took, out)
			}
		case <-time.After(20 * time.Second):
			t.Error("the stream goes on")
		}
	}
	var frozen *boxed.EgressFreeze
	stream(func() {
		var err error
		if frozen, err = n.Freeze(t.Context(), boxed.EgressFreeze{}); err != nil {
			t.Fatal(err)
		}
	})
	if out, _ := n.sh(s.ID, `curl -sS -m 5 -v https://api.acme.example/ 2>&1`); !strings.Contains(out, "X-Egress-Reason: frozen") {
		t.Errorf("while it is frozen: %s", out)
	}
	if err := n.Thaw(t.Context(), frozen.ID); err != nil {
		t.Fatal(err)
	}
	stream(func() {
		if _, err := n.SetEgress(t.Context(), s.ID, boxed.EgressSpec{Allow: []string{"elsewhere.acme.example"}}); err != nil {
			t.Fatal(err)
		}
	})
}
