package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// What leads from a sandbox into its client's machine is shut until the operator opens
// it, and then leads there and nowhere else.
func TestWhatLeadsToTheClientIsShut(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	if _, errs, code := c.run("", "-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:9", "box@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "remote port forwarding failed") {
		t.Errorf("%q, %d", errs, code)
	}
	agent := startSSHAgent(t, c)
	if out, _, code := c.run("", "-o", "IdentityAgent="+agent, "-A", "box@127.0.0.1", "echo [$SSH_AUTH_SOCK]"); out != "[]\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
}

// startSSHAgent starts ssh-agent with the client's key, and returns its socket.
func startSSHAgent(t *testing.T, c *sshClient) string {
	t.Helper()
	socket := filepath.Join(c.dir, "agent")
	agent := exec.Command("ssh-agent", "-D", "-a", socket)
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Process.Kill(); agent.Wait() })
	within(t, 10*time.Second, "the agent", func() bool { _, err := os.Stat(socket); return err == nil })
	add := exec.Command("ssh-add", "-q", filepath.Join(c.dir, "key"))
	add.Env = append(os.Environ(), "SSH_AUTH_SOCK="+socket)
	if out, err := add.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	return socket
}

// S5: -R listens on the sandbox's loopback, by either family, once it says so; what is
// sent arrives whole, both ways.
func TestRemoteForwarding(t *testing.T) {
	n, c := startSSH(t)
	n.args = append(n.args, "--ssh-allow", "remote-forwarding,agent-forwarding")
	n.stop(15)
	n.start()
	sb := n.create(boxed.Spec{Name: "box"})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() { // says what it got, in capitals
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				all, _ := io.ReadAll(conn)
				io.WriteString(conn, strings.ToUpper(string(all)))
			}()
		}
	}()
	const ask = `python3 -c '
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(b"a" * 3000000); s.shutdown(socket.SHUT_WR)
n = 0
while True:
    b = s.recv(65536)
    if not b: break
    assert b == b"A" * len(b); n += len(b)
print(n)' `
	out, errs, code := c.run("", "-o", "ExitOnForwardFailure=yes", "-R", "8123:"+ln.Addr().String(), "-R", "[::1]:8124:"+ln.Addr().String(),
		"box@127.0.0.1", ask+"127.0.0.1 8123; "+ask+"::1 8124")
	if out != "3000000\n3000000\n" || code != 0 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	within(t, 10*time.Second, "the listeners to be gone", func() bool {
		ports, err := n.ListPorts(t.Context(), sb.ID)
		return err == nil && len(ports) == 0
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := n.StartExec(ctx, sb.ID, boxed.ExecRequest{Args: []string{"python3", "-m", "http.server", "8125", "--bind", "127.0.0.1"}}); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "the server", func() bool { ports, _ := n.ListPorts(ctx, sb.ID); return len(ports) == 1 })
	for name, spec := range map[string]string{"a port that is taken": "8125:127.0.0.1:9", "another address": "192.0.2.1:8126:127.0.0.1:9"} {
		if _, errs, code := c.run("", "-o", "ExitOnForwardFailure=yes", "-R", spec, "box@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "forwarding failed") {
			t.Errorf("%s: %q, %d", name, errs, code)
		}
	}

	// The agent's keys are there for as long as the session is.
	agent := startSSHAgent(t, c)
	out, errs, code = c.run("", "-o", "IdentityAgent="+agent, "-A", "box@127.0.0.1", "echo $SSH_AUTH_SOCK; ssh-add -l; ssh-add -l")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if code != 0 || len(lines) != 3 || !strings.Contains(lines[2], "ED25519") {
		t.Fatalf("%q, %q, %d", out, errs, code)
	}
	if out, _ := n.sh(sb.ID, fmt.Sprintf("sleep 0.5; SSH_AUTH_SOCK=%s ssh-add -l 2>&1", lines[0])); strings.Contains(out, "ED25519") {
		t.Errorf("after the session: %q", out)
	}
}

// Sessions are on the stream of events, with what they are and from where.
func TestSSHSessionsAreEvents(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	c.run("", "box@127.0.0.1", "true")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var got []string
	for e, err := range n.Events(ctx, boxed.CursorOldest) {
		if err != nil {
			t.Fatal(err, got)
		}
		if e.Sandbox == sb.ID && (e.Type == boxed.EventSSH || e.Type == boxed.EventSSHEnd) {
			if e.Owner != "admin" || !strings.HasPrefix(e.Message, "a command from 127.0.0.1:") {
				t.Errorf("%+v", e)
			}
			if got = append(got, string(e.Type)); e.Type == boxed.EventSSHEnd {
				break
			}
		}
	}
	if len(got) != 2 {
		t.Errorf("got %v", got)
	}
}
