package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/proxy"

	"github.com/boxed-mesh/boxed"
)

// write makes a file with what is in it, and returns its path.
func write(t *testing.T, path string, content []byte) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// noise is n bytes that do not compress.
func noise(t *testing.T, n int64) []byte {
	t.Helper()
	b, err := io.ReadAll(random(1, n))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func same(t *testing.T, path string, want []byte) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes of %d, %v", path, len(got), len(want), err)
	}
}

// S2: scp by SFTP and by its own protocol, of files and trees, with their modes and
// times, both ways and between two sandboxes.
func TestSCP(t *testing.T) {
	n, c := startSSH(t)
	a, b := n.create(boxed.Spec{Name: "a"}), n.create(boxed.Spec{Name: "b"})
	content := noise(t, 3<<20)
	file := write(t, filepath.Join(c.dir, "tree", "a file – é"), content)
	write(t, filepath.Join(c.dir, "tree", "sub", "empty"), nil)
	stamp := time.Date(2020, 5, 17, 1, 2, 3, 0, time.UTC)
	if err := os.Chtimes(file, stamp, stamp); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o750); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string][]string{"SFTP": {}, "legacy": {"-O"}} {
		t.Run(name, func(t *testing.T) {
			scp := func(args ...string) { c.must("scp", append(mode, args...)...) }
			scp("-r", "-p", filepath.Join(c.dir, "tree"), "a@boxed:"+name)
			if out, errs := n.sh(a.ID, fmt.Sprintf(`cd %s; stat -c '%%a %%Y %%s %%U %%n' 'a file – é'; ls sub`, name)); out != fmt.Sprintf("750 %d %d sandbox a file – é\nempty\n", stamp.Unix(), len(content)) {
				t.Errorf("%q, %+v", out, errs)
			}
			scp("-r", "a@boxed:"+name, filepath.Join(c.dir, name))
			same(t, filepath.Join(c.dir, name, "a file – é"), content)
			scp("-3", "-r", "a@boxed:"+name, "b@boxed:copy-"+name)
			n.sh(b.ID, fmt.Sprintf("mv 'copy-%s/a file – é' there-%[1]s", name))
			scp("b@boxed:there-"+name, filepath.Join(c.dir, "there"))
			same(t, filepath.Join(c.dir, "there"), content)
			if out, err := c.program("", "scp", append(mode, "a@boxed:nothing", c.dir)...); err == nil || !strings.Contains(strings.ToLower(out), "no such file") {
				t.Errorf("what is not there: %q, %v", out, err)
			}
		})
	}
}

// S2, S11: sftp has the sandbox's files with its user's rights, in the directory that
// a command starts in; a transfer that broke off is resumed.
func TestSFTP(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	content := noise(t, 2<<20)
	file := write(t, filepath.Join(c.dir, "file"), content)
	sftp := func(batch string) string {
		t.Helper()
		out, err := c.program(strings.ReplaceAll(batch, "DIR", c.dir), "sftp", "-b", "-", "box@boxed")
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	out := sftp(`pwd
put DIR/file
mkdir d
rename file d/f
ln -s d/f link
ln d/f hard
chmod 600 d/f
ls -l d
get link DIR/through-link
df -h
`)
	if !strings.Contains(out, "/workspace") || !strings.Contains(out, "-rw-------") {
		t.Error(out)
	}
	same(t, filepath.Join(c.dir, "through-link"), content)
	if out, _ := n.sh(sb.ID, "readlink link; stat -c '%h %U' d/f; sha256sum < hard | head -c 8"); !strings.HasPrefix(out, "d/f\n2 sandbox\n") {
		t.Errorf("%q", out)
	}

	half := write(t, filepath.Join(c.dir, "half"), content[:700_001])
	n.sh(sb.ID, "head -c 1234567 d/f > up")
	sftp("reget d/f DIR/half\nreput DIR/file up\nget up DIR/up\n")
	same(t, half, content)
	same(t, filepath.Join(c.dir, "up"), content)
	same(t, file, content)

	mark := write(t, filepath.Join(t.TempDir(), "of-the-host"), []byte("host"))
	for batch, want := range map[string]string{
		"get " + mark + " " + c.dir + "/x":               "not found",
		"get ../../../../.." + mark + " " + c.dir + "/x": "not found",
		"put " + file + " /etc/file":                     "/etc/file",
		"get /etc/shadow " + c.dir + "/x":                "ermission denied",
		"put " + file + " /run/boxed/file":               "/run/boxed/file",
		"get /run/boxed/agent.sock " + c.dir + "/x":      "agent.sock",
		"get /proc/1/environ " + c.dir + "/x":            "ermission denied",
		"put " + file + " no/such/directory":             "no/such/directory",
		"ls /no-such":                                    "not found",
		"rm -r /usr":                                     "",
	} {
		if out, err := c.program(batch+"\n", "sftp", "-b", "-", "box@boxed"); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %q, %v", batch, out, err)
		}
	}
	if _, errs, code := c.run("", "-s", "box@127.0.0.1", "netconf"); code != 255 || !strings.Contains(errs, "subsystem request failed") {
		t.Errorf("another subsystem: %q, %d", errs, code)
	}
}

// rsync of 10,000 files, and what is gone is taken away.
func TestRsyncTenThousandFiles(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box", Limits: boxed.Limits{MemoryBytes: 1 << 30}})
	tree := filepath.Join(c.dir, "tree")
	for i := range 10_000 {
		write(t, filepath.Join(tree, strconv.Itoa(i%100), strconv.Itoa(i)), []byte(strconv.Itoa(i)))
	}
	c.must("rsync", "-a", "--delete", tree+"/", "box@boxed:tree/")
	for i := range 100 {
		if err := os.Remove(filepath.Join(tree, strconv.Itoa(i), strconv.Itoa(i+5000))); err != nil {
			t.Fatal(err)
		}
	}
	out := c.must("rsync", "-a", "--delete", "--stats", tree+"/", "box@boxed:tree/")
	if !strings.Contains(out, "Number of deleted files: 100") || !strings.Contains(out, "Number of regular files transferred: 0") {
		t.Error(out)
	}
	if out, _ := n.sh(sb.ID, "find tree -type f | wc -l; cat tree/42/4242"); out != "9900\n4242" {
		t.Errorf("%q", out)
	}
	n.sh(sb.ID, "echo new > tree/new; rm tree/1/1")
	c.must("rsync", "-a", "--delete", "box@boxed:tree/", tree+"/")
	same(t, filepath.Join(tree, "new"), []byte("new\n"))
	if _, err := os.Stat(filepath.Join(tree, "1", "1")); err == nil {
		t.Error("what is gone in the sandbox is there")
	}
}

// git clones from and pushes to a repository in a sandbox: 1 GiB.
func TestGitOverSSH(t *testing.T) {
	n, c := startSSH(t)
	const size = 1 << 30
	sb := n.create(boxed.Spec{Name: "box", Limits: boxed.Limits{MemoryBytes: 4 << 30, WorkspaceBytes: 3 << 30, CPUs: 2}})
	n.sh(sb.ID, "git init -q --bare repo.git; git init -q small; cd small; git -c user.name=x -c user.email=x@example.com commit -q --allow-empty -m small")
	work := filepath.Join(c.dir, "work")
	c.must("git", "init", "-q", work)
	file, err := os.Create(filepath.Join(work, "big"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(file, random(2, size)); err != nil {
		t.Fatal(err)
	}
	file.Close()
	git := func(args ...string) {
		t.Helper()
		c.must("git", append([]string{"-C", work, "-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "core.compression=0", "-c", "core.bigFileThreshold=1m"}, args...)...)
	}
	git("add", "big")
	git("commit", "-q", "-m", "big")
	stop := growth(n.cmd.Process.Pid)
	git("push", "-q", "box@boxed:repo.git", "HEAD:refs/heads/main")
	if grown := stop(); grown[0] > 32<<10 {
		t.Errorf("the node grew by %d KiB", grown[0])
	}
	os.RemoveAll(filepath.Join(work))
	if out, errs := n.sh(sb.ID, "git -C repo.git cat-file -s main:big"); strings.TrimSpace(out) != strconv.Itoa(size) {
		t.Errorf("%q, %+v", out, errs)
	}
	c.must("git", "clone", "-q", "box@boxed:small", filepath.Join(c.dir, "clone"))
}

// One connection for fifty sessions, as ControlMaster makes it, and several that wait
// for what others do.
func TestControlMaster(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	control := []string{"-o", "ControlPath=" + filepath.Join(c.dir, "control"), "box@127.0.0.1"}
	master := c.command(append([]string{"-M", "-N"}, control...)...)
	if err := master.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { master.Process.Kill(); master.Wait() }()
	within(t, 10*time.Second, "the master", func() bool { _, _, code := c.run("", append([]string{"-O", "check"}, control...)...); return code == 0 })
	ended := make(chan error, 50)
	for i := range cap(ended) {
		cmd := c.command(append(control, fmt.Sprintf("touch here.%d; until [ -e go ]; do sleep 0.2; done; echo %[1]d", i))...)
		go func() {
			out, err := cmd.Output()
			if exit := new(exec.ExitError); errors.As(err, &exit) {
				err = fmt.Errorf("%w: %s", err, exit.Stderr)
			}
			if err == nil && strings.TrimSpace(string(out)) != strconv.Itoa(i) {
				err = fmt.Errorf("%q", out)
			}
			ended <- err
		}()
	}
	within(t, 30*time.Second, "all of them to run", func() bool {
		out, _ := n.sh(sb.ID, "ls | grep -c here")
		return strings.TrimSpace(out) == strconv.Itoa(cap(ended))
	})
	n.sh(sb.ID, "touch go")
	for range cap(ended) {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// S2: what an editor does that works over SSH: a shell without a terminal that is fed
// a script, a server that it leaves behind, and its port through a SOCKS proxy.
func TestAnEditorConnects(t *testing.T) {
	n, c := startSSH(t)
	sb := n.create(boxed.Spec{Name: "box"})
	socks := freeAddress(t)
	_, socksPort, _ := net.SplitHostPort(socks)
	cmd := c.command("-T", "-D", socksPort, "-o", "ConnectTimeout=15", "box@127.0.0.1", "bash", "--login", "--noprofile", "--norc")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out safeBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	io.WriteString(in, `uname -sm; mkdir -p ~/.editor-server && cd ~/.editor-server && echo served > page
nohup python3 -u -m http.server 8123 --bind 127.0.0.1 > log 2>&1 &
echo "pid==$!=="; until grep -q Serving log; do sleep 0.1; done; echo "listening==8123=="
`)
	within(t, 20*time.Second, "the server", func() bool { return strings.Contains(out.String(), "listening==8123==") })
	dialer, err := proxy.SOCKS5("tcp", socks, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := dialer.Dial("tcp", "127.0.0.1:8123")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /page HTTP/1.0\r\n\r\n")
	if page, err := io.ReadAll(conn); !strings.HasSuffix(string(page), "served\n") {
		t.Errorf("%q, %v", page, err)
	}
	conn.Close()
	c.must("scp", "-q", write(t, filepath.Join(c.dir, "extension"), noise(t, 1<<20)), "box@boxed:.editor-extension")
	if out, _ := n.sh(sb.ID, "stat -c %s .editor-extension"); out != "1048576\n" {
		t.Errorf("%q", out)
	}
}

// ssh -J by way of another machine's sshd.
func TestAJumpHost(t *testing.T) {
	n, c := startSSH(t)
	n.create(boxed.Spec{Name: "box"})
	port := startSSHD(t, c.dir, filepath.Join(c.dir, "key.pub"))
	if out := c.must("ssh", "-J", "root@127.0.0.1:"+port, "box@boxed", "echo jumped"); out != "jumped\n" {
		t.Errorf("%q", out)
	}
}

// startSSHD starts OpenSSH's server, and returns its port.
func startSSHD(t *testing.T, dir, authorized string) (port string) {
	t.Helper()
	const sshd = "/usr/sbin/sshd"
	if _, err := os.Stat(sshd); err != nil || os.Getuid() != 0 {
		if os.Getenv("CI") != "" { // there make test has installed it, and is root
			t.Fatal("OpenSSH's server does not run here")
		}
		t.Skip("OpenSSH's server is not installed, or this is not root; make test installs it")
	}
	address := freeAddress(t)
	_, port, _ = net.SplitHostPort(address)
	key := filepath.Join(dir, "sshd_key")
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	config := write(t, filepath.Join(dir, "sshd_config"), fmt.Appendf(nil, "Port %s\nListenAddress 127.0.0.1\nHostKey %s\nAuthorizedKeysFile %s\nPidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n", port, key, authorized))
	os.Mkdir("/run/sshd", 0o755) // its services make it
	cmd := exec.Command(sshd, "-D", "-e", "-f", config)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	within(t, 10*time.Second, "sshd", func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return port
}
