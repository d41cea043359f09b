package main_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asProgram, set in the environment, makes the test program boxed-node.
const asProgram = "BOXED_NODE_TEST_PROGRAM"

// noEngine is where no engine answers.
const noEngine = "unix:///nowhere/docker.sock"

// started is a boxed-node that runs.
type started struct {
	cmd     *exec.Cmd
	address string
	log     *bufio.Scanner
	fields  map[string]string // of its "node started"
}

// start runs a node on a free port and waits until it says that it has started.
func start(t *testing.T, dir string, environ []string, args ...string) *started {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{"run", "--data-dir", dir, "--listen", "127.0.0.1:0", "--agent", os.Args[0], "--docker-host", noEngine}, args...)...)
	cmd.Env = append(append(os.Environ(), asProgram+"=1"), environ...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		io.Copy(io.Discard, stderr)
		cmd.Wait()
	})
	s := &started{cmd: cmd, log: bufio.NewScanner(stderr), fields: map[string]string{}}
	s.await(t, `msg="node started"`)
	for _, m := range regexp.MustCompile(`(\w+)=(\S+)`).FindAllStringSubmatch(s.log.Text(), -1) {
		s.fields[m[1]] = m[2]
	}
	s.address = s.fields["listen"]
	return s
}

// await reads the log up to a line with text.
func (s *started) await(t *testing.T, text string) {
	t.Helper()
	var lines []string
	for s.log.Scan() {
		lines = append(lines, s.log.Text())
		if strings.Contains(s.log.Text(), text) {
			return
		}
	}
	t.Fatalf("it did not say %q:\n%s", text, strings.Join(lines, "\n"))
}

// wait returns the exit status.
func (s *started) wait() int {
	for s.log.Scan() {
	}
	s.cmd.Wait()
	return s.cmd.ProcessState.ExitCode()
}

func TestANodeStartsAnswersAndStops(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	told := func(want string) {
		t.Helper()
		b := make([]byte, 100)
		socket.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := socket.Read(b); err != nil || string(b[:n]) != want {
			t.Errorf("told %q, %v; want %q", b[:n], err, want)
		}
	}
	n := start(t, dir, []string{"NOTIFY_SOCKET=" + socket.LocalAddr().String()})
	told("READY=1")
	get := func(path, key string) (int, string) {
		t.Helper()
		req, err := http.NewRequest("GET", "http://"+n.address+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	defer http.DefaultClient.CloseIdleConnections()
	if status, body := get("/healthz", ""); status != 200 {
		t.Errorf("healthz: %d %s", status, body)
	}
	// An engine that is down does not end the daemon.
	if status, body := get("/readyz", ""); status != 503 || !strings.Contains(body, `"not_ready"`) || !strings.Contains(body, "/nowhere/docker.sock") {
		t.Errorf("readyz: %d %s", status, body)
	}
	key, err := os.ReadFile(filepath.Join(dir, "admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	if status, body := get("/v1/node", strings.TrimSpace(string(key))); status != 200 || !strings.Contains(body, n.fields["node"]) {
		t.Errorf("node: %d %s", status, body)
	}
	if status, body := get("/v1/node", "wrong"); status != 401 {
		t.Errorf("node with a wrong key: %d %s", status, body)
	}

	// Another on the same directory names this one.
	status, _, errs := invoke(nil, "--data-dir", dir, "--agent", os.Args[0], "--listen", "127.0.0.1:0")
	if status != 1 || !strings.Contains(errs, fmt.Sprintf("process %d", n.cmd.Process.Pid)) {
		t.Errorf("a second node: status %d, %s", status, errs)
	}
	// Another on the same port says so.
	status, _, errs = invoke(nil, "--data-dir", t.TempDir(), "--agent", os.Args[0], "--listen", n.address)
	if status != 1 || !strings.Contains(errs, n.address+" is in use") {
		t.Errorf("the same port: status %d, %s", status, errs)
	}

	n.cmd.Process.Signal(syscall.SIGTERM)
	told("STOPPING=1")
	if status := n.wait(); status != 0 {
		t.Errorf("it ended with status %d", status)
	}
	again := start(t, dir, nil)
	if again.fields["node"] == "" || again.fields["node"] != n.fields["node"] {
		t.Errorf("it was node %q and is %q", n.fields["node"], again.fields["node"])
	}
	again.cmd.Process.Kill()
	again.wait()
	start(t, dir, nil) // a kill leaves no lock
}

func TestANodeServesTLSAndReadsItAgain(t *testing.T) {
	cert, key := selfSigned(t, "one")
	n := start(t, t.TempDir(), nil, "--tls-cert-file", cert, "--tls-key-file", key)
	name := func() string {
		conn, err := tls.Dial("tcp", n.address, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := name(); got != "one" {
		t.Errorf("it serves %s", got)
	}
	writePair(t, cert, key, "two")
	n.cmd.Process.Signal(syscall.SIGHUP)
	n.await(t, "certificate read again")
	if got := name(); got != "two" {
		t.Errorf("after HUP it serves %s", got)
	}
	n.cmd.Process.Signal(syscall.SIGINT)
	if status := n.wait(); status != 0 {
		t.Errorf("it ended with status %d", status)
	}
}

func TestAReloadSaysWhatNeedsARestart(t *testing.T) {
	config := file(t, "boxed.yaml", "log: {level: info}\npool: {refill: 2}\n", 0o600)
	n := start(t, t.TempDir(), nil, "--config", config)
	if err := os.WriteFile(config, []byte("log: {level: debug}\npool: {refill: 3}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.cmd.Process.Signal(syscall.SIGHUP)
	n.await(t, "setting=pool.refill")
	if err := os.WriteFile(config, []byte("nonsense: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.cmd.Process.Signal(syscall.SIGHUP)
	n.await(t, "there is no such setting")
}

func TestAnUnusableDataDirectoryIsRefused(t *testing.T) {
	open := t.TempDir()
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{open: "chmod o-w", file(t, "file", "", 0o600): "not a directory"} {
		status, _, errs := invoke(nil, "--data-dir", dir, "--agent", os.Args[0], "--listen", "127.0.0.1:0")
		if status == 0 || !strings.Contains(errs, want) {
			t.Errorf("%s: status %d, %s", dir, status, errs)
		}
	}
}

func TestAWeakKeyIsRefusedWithItsPlace(t *testing.T) {
	path := file(t, "admin.key", "hunter2\n", 0o600)
	status, _, errs := invoke(nil, "--data-dir", t.TempDir(), "--agent", os.Args[0], "--listen", "127.0.0.1:0", "--api-key-file", path)
	if status != 1 || !strings.Contains(errs, path) || !strings.Contains(errs, "boxed-node key generate") || strings.Contains(errs, "hunter2") {
		t.Errorf("status %d, %s", status, errs)
	}
}
