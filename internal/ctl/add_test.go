//go:build linux

package ctl

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// otherHost is this machine, reached through a real sshd of the test's own, with
// a prefix, a data directory and a TMPDIR that are the test's.
type otherHost struct {
	where                  string
	port                   int
	identity, stranger     string // keys: one that it lets in, one that it does not
	known                  string
	prefix, data, tmp, bin string
}

// startSSHD starts an sshd on a loopback port, or skips the test where that
// cannot be.
func startSSHD(t *testing.T) *otherHost {
	t.Helper()
	sshd := "/usr/sbin/sshd"
	if p, err := exec.LookPath("sshd"); err == nil {
		sshd = p
	}
	for _, program := range []string{sshd, "ssh", "ssh-keygen"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not installed (apt install openssh-server openssh-client)", program)
		}
	}
	dir := t.TempDir()
	h := &otherHost{
		identity: filepath.Join(dir, "key"), stranger: filepath.Join(dir, "stranger"), known: filepath.Join(dir, "known"),
		prefix: filepath.Join(dir, "prefix"), data: filepath.Join(dir, "data"), tmp: filepath.Join(dir, "tmp"), bin: filepath.Join(dir, "programs"),
	}
	for _, d := range []string{h.tmp, h.bin, filepath.Join(dir, "shim")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	hostKey := filepath.Join(dir, "host")
	for _, file := range []string{hostKey, h.identity, h.stranger} {
		if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen: %v: %s", err, out)
		}
	}
	h.port = freePort(t)
	writeFile(t, h.known, 0o600, fmt.Sprintf("[127.0.0.1]:%d %s", h.port, readFile(t, hostKey+".pub")))
	// Who is not root becomes it by a sudo that only says so: it is the scripts that are tested.
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if os.Getuid() != 0 {
		writeFile(t, filepath.Join(dir, "shim", "sudo"), 0o755, "#!/bin/sh\n[ \"$1\" != -n ] || shift\nexec \"$@\"\n")
		path = filepath.Join(dir, "shim") + ":" + path
	}
	config := filepath.Join(dir, "sshd_config")
	writeFile(t, config, 0o600, fmt.Sprintf("Port %d\nListenAddress 127.0.0.1\nHostKey %s\nAuthorizedKeysFile %s.pub\nPidFile none\nUsePAM no\n"+
		"StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nSetEnv HOME=%s TMPDIR=%s PATH=%s\n",
		h.port, hostKey, h.identity, dir, h.tmp, path))
	if os.Getuid() == 0 { // its services make this directory when they start it
		if err := os.Mkdir("/run/sshd", 0o755); err == nil {
			t.Cleanup(func() { os.Remove("/run/sshd") })
		}
	}
	if out, err := exec.Command(sshd, "-t", "-f", config).CombinedOutput(); err != nil {
		t.Skipf("sshd does not run here: %s", bytes.TrimSpace(out))
	}
	cmd := exec.Command(sshd, "-D", "-e", "-f", config)
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("sshd says:\n%s", log.String())
		}
	})
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	h.where = me.Username + "@127.0.0.1"
	awaitPort(t, h.port)
	return h
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func awaitPort(t *testing.T, port int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			c.Close()
			return
		}
	}
	t.Fatal("sshd does not listen")
}

func writeFile(t *testing.T, path string, mode os.FileMode, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// readFile is a file's text, "" if there is none.
func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(data)
}

func (h *otherHost) options() []string {
	return []string{"UserKnownHostsFile=" + h.known, "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"}
}

func (h *otherHost) ssh(t *testing.T) *sshRemote {
	t.Helper()
	r, err := newSSH(h.where, h.identity, h.port, h.options())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The programs that are installed there. The node makes its key and stays; ctl
// tells what it was asked in PREFIX/ctl.argv.
const (
	scriptedNode = `#!/bin/sh
# build 1
echo "$*" >>"${0%/bin/*}/node.argv"
echo key >"$3/admin.key"
while :; do sleep 0.05; done
`
	scriptedCtl = `#!/bin/sh
here=${0%/bin/*}
echo "$*" >>"$here/ctl.argv"
case "$*" in
"doctor --host -o json") cat "$here/doctor"; grep -q '"ok":true' "$here/doctor" ;;
*" cluster status") cat "$here/cluster" 2>/dev/null || true ;;
*" cluster join "*) cat >"$here/token"; echo mesh000001 | tee "$here/cluster" ;;
*" node") [ -s "$4" ] && echo cccccccccccccccc ;;
*) echo "what is $*" >&2; exit 2 ;;
esac
`
	goodDoctor = `{"ok":true,"checks":[{"name":"disk","title":"room for images","result":"warning","detail":"3 GiB free","remedy":"free some"}]}`
)

func (h *otherHost) addArgs(more ...string) []string {
	args := []string{
		"cluster", "add", h.where, "--port", strconv.Itoa(h.port), "--identity", h.identity, "--prefix", h.prefix, "--data-dir", h.data,
		"--node-binary", filepath.Join(h.bin, "boxed-node"), "--ctl-binary", filepath.Join(h.bin, "boxedctl"), "--background",
	}
	for _, o := range h.options() {
		args = append(args, "--ssh-option", o)
	}
	return append(args, more...)
}

// fakeInCluster is a fake node that is in a cluster, and an app that speaks to it.
func fakeInCluster(t *testing.T) func(args ...string) (status int, stdout, stderr string) {
	t.Helper()
	endpoint, err := startFake(t.TempDir(), t.Cleanup)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(client.Config{Endpoint: endpoint, APIKey: fakeAdminKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.StartCluster(t.Context(), boxed.ClusterRequest{}); err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	return func(args ...string) (int, string, string) {
		var stdout, stderr bytes.Buffer
		a := &app{stdout: &stdout, stderr: &stderr, getenv: func(k string) string {
			return map[string]string{"HOME": home, "BOXED_ENDPOINT": endpoint, "BOXED_API_KEY": fakeAdminKey}[k]
		}}
		status := a.main(args)
		return status, stdout.String(), stderr.String()
	}
}

// A host is made a node over a real ssh; the programs that are copied are scripts.
func TestAHostIsAddedOverSSH(t *testing.T) {
	h := startSSHD(t)
	boxedctl := fakeInCluster(t)
	writeFile(t, filepath.Join(h.bin, "boxed-node"), 0o644, scriptedNode)
	writeFile(t, filepath.Join(h.bin, "boxedctl"), 0o644, scriptedCtl)
	if err := os.Mkdir(h.prefix, 0o755); err != nil {
		t.Fatal(err)
	}
	pid := func() int {
		n, _ := strconv.Atoi(strings.TrimSpace(readFile(t, filepath.Join(h.data, "boxed-node.pid"))))
		return n
	}
	t.Cleanup(func() {
		if p, err := os.FindProcess(pid()); err == nil && pid() > 1 {
			_ = p.Kill()
		}
	})

	// A host that fails its checks gets the programs and no node.
	writeFile(t, filepath.Join(h.prefix, "doctor"), 0o644, `{"ok":false,"checks":[{"name":"node","title":"the node answers","result":"failed"},
		{"name":"engine","title":"the engine answers","result":"failed","detail":"no socket","remedy":"install docker.io"}]}`)
	status, stdout, stderr := boxedctl(h.addArgs()...)
	if status != exitBoxed || !strings.Contains(stderr, "its checks: the engine answers: no socket") || !strings.Contains(stderr, "hint: install docker.io; then repeat this") {
		t.Errorf("without an engine: status %d\n%s%s", status, stdout, stderr)
	}
	if pid() != 0 {
		t.Error("the node was started")
	}

	writeFile(t, filepath.Join(h.prefix, "doctor"), 0o644, goodDoctor)
	status, stdout, stderr = boxedctl(h.addArgs("--advertise", "192.0.2.7:7946")...)
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	wantInOrder(t, stdout, "the host", "Linux, "+runtime.GOARCH, "boxed-node", "is there already", "boxedctl", "is there already",
		"its checks", "1 warnings: room for images: 3 GiB free", "the node starts", "in the background", "the node answers", "cccccccccccccccc", "it has joined mesh000001")
	if got := readFile(t, filepath.Join(h.prefix, "bin", "boxed-node")); got != scriptedNode {
		t.Errorf("boxed-node is now %q", got)
	}
	if info, err := os.Stat(filepath.Join(h.prefix, "bin", "boxedctl")); err != nil || info.Mode() != 0o755 {
		t.Errorf("boxedctl: %v, %v", info, err)
	}
	if got := strings.TrimSpace(readFile(t, filepath.Join(h.prefix, "token"))); got != fakeToken {
		t.Errorf("it joined with %q", got)
	}
	argv := readFile(t, filepath.Join(h.prefix, "ctl.argv"))
	if strings.Contains(argv+stdout+stderr, fakeToken) || !strings.Contains(argv, "cluster join - --advertise=192.0.2.7:7946") {
		t.Errorf("boxedctl was asked there:\n%s", argv)
	}
	if got := readFile(t, filepath.Join(h.prefix, "node.argv")); got != "run --data-dir "+h.data+"\n" {
		t.Errorf("boxed-node was started with %q", got)
	}

	// Again: nothing is left to do.
	first := pid()
	status, stdout, stderr = boxedctl(h.addArgs("-o", "json")...)
	if status != 0 || !strings.Contains(stdout, `"node": "cccccccccccccccc"`) || !strings.Contains(stderr, "it runs already") || !strings.Contains(stderr, "it is in mesh000001 already") {
		t.Errorf("again: status %d\n%s%s", status, stdout, stderr)
	}
	if pid() != first {
		t.Error("the node was started twice")
	}

	// Another build replaces the one that runs.
	writeFile(t, filepath.Join(h.bin, "boxed-node"), 0o644, strings.Replace(scriptedNode, "build 1", "build 2", 1))
	status, stdout, stderr = boxedctl(h.addArgs("-o", "name")...)
	if status != 0 || stdout != "cccccccccccccccc\n" || pid() == first {
		t.Errorf("another build: status %d, process %d then %d\n%s%s", status, first, pid(), stdout, stderr)
	}

	// It is in a cluster of its own.
	writeFile(t, filepath.Join(h.prefix, "cluster"), 0o644, "elsewhere0\n")
	status, _, stderr = boxedctl(h.addArgs()...)
	if status != exitBoxed || !strings.Contains(stderr, "it is in the cluster elsewhere0") || !strings.Contains(stderr, "boxedctl cluster leave") {
		t.Errorf("of another cluster: status %d\n%s", status, stderr)
	}
	wantEmpty(t, h.tmp)
}

func wantInOrder(t *testing.T, text string, words ...string) {
	t.Helper()
	rest := text
	for _, w := range words {
		_, after, ok := strings.Cut(rest, w)
		if !ok {
			t.Errorf("no %q in its place in:\n%s", w, text)
			return
		}
		rest = after
	}
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) || len(left) > 0 {
		t.Errorf("%s has %v (%v)", dir, left, err)
	}
}

func TestAHostThatLetsNobodyIn(t *testing.T) {
	h := startSSHD(t)
	boxedctl := fakeInCluster(t)
	for name, tt := range map[string]struct {
		change func(*otherHost)
		hint   string
	}{
		"a key it does not know": {func(h *otherHost) { h.identity = h.stranger }, "ssh-copy-id"},
		"another host's key":     {func(h *otherHost) { h.known = filepath.Join(h.tmp, "none") }, "compare the key"},
		"nobody listens":         {func(h *otherHost) { h.port = 1 }, "see that this works: ssh"},
	} {
		t.Run(name, func(t *testing.T) {
			other := *h
			tt.change(&other)
			status, stdout, stderr := boxedctl(other.addArgs()...)
			if status != exitBoxed || !strings.Contains(stderr, "boxedctl: "+h.where+": the host: ssh "+h.where+": ") || !strings.Contains(stderr, tt.hint) {
				t.Errorf("status %d\n%s%s", status, stdout, stderr)
			}
		})
	}
	wantEmpty(t, h.prefix)
}

// What is sent is what arrives, or nothing does.
func TestACopyThatBreaksOffLeavesNothing(t *testing.T) {
	h := startSSHD(t)
	to := filepath.Join(h.prefix, "bin", "program")
	root := ""
	if os.Getuid() != 0 {
		root = "sudo -n"
	}
	_, err := h.ssh(t).run(t.Context(), strings.NewReader("half of"), scriptCopy, root, fmt.Sprintf("%064x", 1), to)
	if err == nil || !strings.Contains(err.Error(), "what arrived is not what was sent") {
		t.Errorf("half of a file: %v", err)
	}
	// The person gives up in the middle of it.
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	go func() {
		_, _ = pw.Write([]byte("some"))
		cancel()
		pw.Close()
	}()
	if _, err := h.ssh(t).run(ctx, pr, scriptCopy, root, fmt.Sprintf("%064x", 1), to); err == nil {
		t.Error("it was not interrupted")
	}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if left, _ := os.ReadDir(h.tmp); len(left) == 0 {
			break
		}
	}
	wantEmpty(t, h.tmp)
	wantEmpty(t, filepath.Join(h.prefix, "bin"))
}

// The attack: what names a host, a directory or an address is never read as a
// command by the shell at the other end.
func TestRemoteWordsArriveAsTheyAre(t *testing.T) {
	h := startSSHD(t)
	words := []string{"", " ", "a b", "it's", `"`, "$(touch /tmp/owned)", "`id`", "; reboot", "a\nb", `\`, "*", "~", "-n", "ü"}
	out, err := h.ssh(t).run(t.Context(), nil, `for w; do printf "<%s>" "$w"; done`, words...)
	if want := "<" + strings.Join(words, "><") + ">"; err != nil || out != want {
		t.Errorf("got %q (%v), want %q", out, err, want)
	}
	out, err = h.ssh(t).run(t.Context(), strings.NewReader("from here"), "cat; echo oops >&2; exit 3")
	if out != "from here" || err == nil || err.Error() != "oops" {
		t.Errorf("got %q and %v", out, err)
	}
}
