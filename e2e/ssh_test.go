package e2e_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/boxed-mesh/boxed"
)

// sshClient is OpenSSH's ssh with a key of its own.
type sshClient struct {
	t    *testing.T
	dir  string
	port string
	host *labHost // nil: this one
	says string   // its LogLevel; "": ERROR
}

// newSSHClient makes a key, and the authorized_keys file that knows it.
func newSSHClient(t *testing.T) (c *sshClient, authorized string) {
	t.Helper()
	c = &sshClient{t: t, dir: t.TempDir()}
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(c.dir, "key")).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	return c, filepath.Join(c.dir, "key.pub")
}

// startSSH starts a node whose SSH knows the client as the admin key's owner, and
// others, which are OWNER=FILE.
func startSSH(t *testing.T, others ...string) (*node, *sshClient) {
	t.Helper()
	needEngine(t)
	c, authorized := newSSHClient(t)
	address := freeAddress(t)
	_, c.port, _ = net.SplitHostPort(address)
	return startNode(t, "--ssh-listen", address, "--ssh-authorized-keys", strings.Join(append(others, "admin="+authorized), ",")), c
}

func (c *sshClient) command(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	c.t.Cleanup(cancel)
	args = append([]string{
		"-F", "none", "-i", filepath.Join(c.dir, "key"), "-p", c.port, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=" + cmp.Or(c.says, "ERROR"), "-o", "UserKnownHostsFile=" + filepath.Join(c.dir, "known_hosts"),
	}, args...)
	if c.host != nil { // each has a key of its own, at the same address
		return c.host.command(ctx, "ssh", append([]string{"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"}, args...)...)
	}
	return exec.CommandContext(ctx, "ssh", args...)
}

// config is a file in which the node is boxed.
func (c *sshClient) config() string {
	c.t.Helper()
	path := filepath.Join(c.dir, "config")
	text := fmt.Sprintf(`Host boxed
  HostName 127.0.0.1
  Port %s
Host *
  IdentityFile %s/key
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking accept-new
  UserKnownHostsFile %[2]s/known_hosts
  LogLevel ERROR
`, c.port, c.dir)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// onPath is a directory with OpenSSH's programs that know the node as boxed.
func (c *sshClient) onPath() string {
	c.t.Helper()
	dir := filepath.Join(c.dir, "bin")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		c.t.Fatal(err)
	}
	for _, name := range []string{"ssh", "scp", "sftp"} {
		program, err := exec.LookPath(name)
		if err != nil {
			c.t.Fatal(err)
		}
		text := fmt.Sprintf("#!/bin/sh\nexec %s -F %s \"$@\"\n", program, c.config())
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			c.t.Fatal(err)
		}
	}
	return dir
}

// program runs a program that finds c's ssh, scp and sftp on its PATH.
func (c *sshClient) program(stdin, name string, args ...string) (string, error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", `exec "$@"`, "-", name}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "PATH="+c.onPath()+":"+os.Getenv("PATH"), "GIT_CONFIG_GLOBAL=/dev/null", "HOME="+c.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s %q: %w: %s", name, args, err, out)
	}
	return string(out), nil
}

// must is program that works.
func (c *sshClient) must(name string, args ...string) string {
	c.t.Helper()
	out, err := c.program("", name, args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// run runs ssh and returns what it wrote and its status.
func (c *sshClient) run(stdin string, args ...string) (stdout, stderr string, code int) {
	c.t.Helper()
	cmd := c.command(args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	if err := cmd.Run(); cmd.ProcessState == nil {
		c.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// S1, P3, S8: a command over ssh has its own status, streams apart, no terminal,
// and no variable of the client's that decides what is loaded.
func TestACommandOverSSH(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	for _, tc := range []struct {
		name, stdin, command, stdout, stderr string
		code                                 int
	}{
		{"its status", "", "exit 7", "", "", 7},
		{"streams apart", "", "echo out; echo err >&2", "out\n", "err\n", 0},
		{"stdin to its end", "a\nb\n", "wc -l", "2\n", "", 0},
		{"no terminal", "", "test -t 0 || test -t 1 || echo none", "none\n", "", 0},
		{"words of a shell", "", `x='a  b'; echo "$x" | tr a c`, "c  b\n", "", 0},
		{"UTF-8", "", `printf '%s %s' "$LANG" ÄÖ`, "C.UTF-8 ÄÖ", "", 0},
		{"our status is not a program's", "", "exit 255", "", "", 255},
	} {
		if out, errs, code := c.run(tc.stdin, "box@127.0.0.1", tc.command); out != tc.stdout || errs != tc.stderr || code != tc.code {
			t.Errorf("%s: %q, %q, %d", tc.name, out, errs, code)
		}
	}
	out, _, _ := c.run("", "-o", "SetEnv=LC_TIME=de_DE.UTF-8 LD_PRELOAD=/tmp/x.so PATH=/tmp", "box@127.0.0.1", "echo $LC_TIME,$LD_PRELOAD,$PATH")
	if !strings.HasPrefix(out, "de_DE.UTF-8,,") || strings.Contains(out, ",/tmp\n") {
		t.Errorf("got %q", out)
	}
	if out, _, code := c.run("echo one; exit 3\n", "box@127.0.0.1"); out != "one\n" || code != 3 {
		t.Errorf("a shell that reads a pipe: %q, %d", out, code)
	}
}

// P1, P2, S6: a terminal has the client's size, stays when a command in it fails,
// and has one stream.
func TestATerminalOverSSH(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	out, _, code := c.run("false; echo still $((6*7)); exit 5\n", "-tt", "box@127.0.0.1")
	if !strings.Contains(out, "still 42") || code != 5 {
		t.Errorf("%q, %d", out, code)
	}
	out, _, code = c.run("", "-tt", "box@127.0.0.1", "stty size; test -t 2 && echo terminal")
	if out != "24 80\r\nterminal\r\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
}

// The user name is an ID, a prefix of one or a name, of the caller's own; anything
// else is an error with our status that says what to do.
func TestTheUserNameSelectsASandbox(t *testing.T) {
	bob, bobs := newSSHClient(t)
	n, c := startSSH(t, "bob="+bobs)
	bob.port = c.port
	sb := n.create(boxed.Spec{Name: "box"})
	for _, user := range []string{string(sb.ID), string(sb.ID)[:6], "box"} {
		if out, errs, code := c.run("", user+"@127.0.0.1", "hostname; id -un"); code != 0 || out == "" {
			t.Errorf("%s: %q, %q, %d", user, out, errs, code)
		}
	}
	_, unknown, code := c.run("", "nothing@127.0.0.1", "true")
	if code != 255 || !strings.Contains(unknown, "nothing") {
		t.Errorf("%q, %d", unknown, code)
	}
	if _, errs, code := bob.run("", "box@127.0.0.1", "true"); code != 255 || errs != strings.ReplaceAll(unknown, "nothing", "box") {
		t.Errorf("another's sandbox: %q, %d; an unknown one: %q", errs, code, unknown)
	}
	if err := n.Destroy(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := c.run("", string(sb.ID)+"@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "ended") {
		t.Errorf("one that has ended: %q, %d", errs, code)
	}
	stranger, _ := newSSHClient(t)
	stranger.port = c.port
	if _, errs, code := stranger.run("", "box@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "Permission denied") {
		t.Errorf("a stranger: %q, %d", errs, code)
	}
	if err := os.Chmod(bobs, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := bob.run("", "box@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "Permission denied") {
		t.Errorf("keys that anybody can write: %q, %d", errs, code)
	}
}

// A sandbox made for one command is gone after it, and kept if that was asked for.
func TestNewOverSSH(t *testing.T) {
	n, c := startSSH(t)
	living := func() int {
		list, err := n.List(t.Context(), boxed.Filter{})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Sandboxes)
	}
	if out, errs, code := c.run("", "new@127.0.0.1", "echo made; exit 4"); out != "made\n" || code != 4 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	within(t, 10*time.Second, "it to be gone", func() bool { return living() == 0 })
	if _, errs, code := c.run("", "new+keep@127.0.0.1", "true"); code != 0 || living() != 1 {
		t.Errorf("%q, %d, %d live", errs, code, living())
	}
	if _, errs, code := c.run("", "new+no-such-template@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "no-such-template") {
		t.Errorf("%q, %d", errs, code)
	}
}

// S5, S9: -L reaches the sandbox's own loopback, by either address, and nothing
// else, whatever it is called.
func TestPortsOverSSH(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	if _, err := n.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"python3", "-m", "http.server", "8000", "--directory", "/workspace"}}); err != nil {
		t.Fatal(err)
	}
	n.sh(sb.ID, "echo inside > /workspace/page")
	host := freeAddress(t) // of a service of this host that must stay out of reach
	ln, err := net.Listen("tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c.says = "INFO"
	local, localV6, wrong := freeAddress(t), freeAddress(t), freeAddress(t)
	_, hostPort, _ := net.SplitHostPort(host)
	ssh := c.command("-N", "-o", "ExitOnForwardFailure=yes", "-L", local+":localhost:8000", "-L", localV6+":[::1]:"+hostPort, "-L", wrong+":10.0.0.1:80", "box@127.0.0.1")
	var errs safeBuffer
	ssh.Stderr = &errs
	if err := ssh.Start(); err != nil {
		t.Fatal(err)
	}
	defer ssh.Wait()
	defer ssh.Process.Kill()
	within(t, 20*time.Second, "the page", func() bool {
		r, err := http.Get("http://" + local + "/page")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		return string(text) == "inside\n"
	})
	for name, address := range map[string]string{"a service of the host": localV6, "another machine": wrong} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		if b, err := io.ReadAll(conn); len(b) > 0 || os.IsTimeout(err) {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		conn.Close()
	}
	within(t, 10*time.Second, "the refusal to be said", func() bool { return strings.Contains(errs.String(), "own loopback") })
}

// 1 GiB each way, with the node's memory flat.
func TestAGibibyteEachWayOverSSH(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	c.run("", "box@127.0.0.1", "true")
	stop := growth(n.cmd.Process.Pid)
	cmd := c.command("box@127.0.0.1", "head -c 1G /dev/zero")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.Copy(io.Discard, out); got != gib || err != nil {
		t.Errorf("%d bytes came out, %v", got, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	cmd = c.command("box@127.0.0.1", "wc -c")
	cmd.Stdin = io.LimitReader(zeros{}, gib)
	if got, err := cmd.Output(); err != nil || strings.TrimSpace(string(got)) != fmt.Sprint(gib) {
		t.Errorf("%q went in, %v", got, err)
	}
	if grown := stop(); grown[0] > 32<<10 {
		t.Errorf("the node grew by %d KiB", grown[0])
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// S4: a client that is killed leaves no program behind, nor does one that is not heard
// of any more.
func TestASSHClientThatIsGoneLeavesNothing(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		cmd := c.command("box@127.0.0.1", "echo up; sleep 1000")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		cmd.Process.Signal(sig)
		defer cmd.Wait()
		defer cmd.Process.Kill()
	}
	within(t, 30*time.Second, "their programs to end", func() bool {
		execs, err := n.ListExecs(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range execs {
			if e.Running {
				return false
			}
		}
		return true
	})
}

// S4: two hundred at once, and when half of them leave and the others are killed
// nothing of them is left in the node or in the sandboxes.
func TestTwoHundredSSHSessions(t *testing.T) {
	n, c := startSSH(t)
	boxes := []*boxed.Sandbox{n.create(boxed.Spec{Name: "a"}), n.create(boxed.Spec{Name: "b"})}
	c.run("", "a@127.0.0.1", "true")
	descriptors := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := descriptors()
	type session struct {
		cmd *exec.Cmd
		in  io.WriteCloser
	}
	sessions := make([]session, 200)
	var starting errgroup.Group
	starting.SetLimit(8)
	for i := range sessions {
		cmd := c.command(fmt.Sprintf("%c@127.0.0.1", 'a'+i%2), fmt.Sprintf("echo %d; read x; exit 3", i))
		starting.Go(func() error {
			in, err := cmd.StdinPipe()
			if err != nil {
				return err
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				return err
			}
			if err := cmd.Start(); err != nil {
				return err
			}
			sessions[i] = session{cmd, in}
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil || line != fmt.Sprintf("%d\n", i) {
				return fmt.Errorf("session %d: %q, %w", i, line, err)
			}
			return nil
		})
	}
	if err := starting.Wait(); err != nil {
		t.Error(err)
	}
	running := func() (count int) {
		for _, sb := range boxes {
			execs, err := n.ListExecs(t.Context(), sb.ID)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range execs {
				if e.Running {
					count++
				}
			}
		}
		return count
	}
	if got := running(); got != len(sessions) {
		t.Errorf("%d sessions run", got)
	}
	for i, s := range sessions {
		if i%4 < 2 {
			s.cmd.Process.Kill()
		} else {
			io.WriteString(s.in, "\n")
		}
		if s.cmd.Wait(); i%4 >= 2 && s.cmd.ProcessState.ExitCode() != 3 {
			t.Errorf("session %d ended with %d", i, s.cmd.ProcessState.ExitCode())
		}
	}
	within(t, 30*time.Second, "their programs to end", func() bool { return running() == 0 })
	// Give or take the pool, which may still have been filling.
	within(t, 30*time.Second, "the node to be as it was", func() bool { return descriptors() <= before+40 })
}
