package main_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// The agent under test is the real program, as PID 1 of namespaces that the
// test made, with the capabilities that a sandbox leaves it: everything of a
// container but the image.

const testUID = 231000

var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "boxed-agent")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "boxed-agent")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the agent: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

const setup = `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/boxed /run/bin
cp "$1" /run/bin/boxed-agent
mount --bind "$2" /run/boxed
sysctl -qw net.ipv4.ip_unprivileged_port_start=0 2>/dev/null || echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start
mount -t tmpfs -o mode=1777,size=64m,nr_inodes=20000 tmpfs /tmp
ip link set lo up 2>/dev/null || true
exec prlimit --nproc=256:256 setpriv --bounding-set=-all,+setuid,+setgid,+kill --inh-caps=-all --no-new-privs --clear-groups /run/bin/boxed-agent`

// sandbox is a running agent and its host side.
type sandbox struct {
	*agent.Host
	dir    string
	secret string
	broken chan error
	egress agent.EgressFunc
	config agent.Config // besides what all have
}

func start(t testing.TB) *sandbox {
	t.Helper()
	return startWith(t, agent.Config{}, nil)
}

func startWith(t testing.TB, config agent.Config, egress agent.EgressFunc) *sandbox {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the agent is PID 1 of namespaces that the test makes")
	}
	s := &sandbox{dir: t.TempDir(), secret: "s3cret", broken: make(chan error, 1), egress: egress, config: config}
	s.config.UID, s.config.Home = testUID, "/tmp"
	s.listen(t, false)
	cmd := exec.Command("unshare", "--pid", "--mount", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c", setup, "sh", program, s.dir)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		s.Close()
		if t.Failed() {
			t.Logf("agent: %s", log.String())
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *sandbox) listen(t testing.TB, known bool) {
	t.Helper()
	host, err := agent.Listen(agent.HostConfig{
		Egress: s.egress,
		Dir:    s.dir, Socket: "agent.sock", Secret: s.secret, Known: known,
		Config: s.config,
		Broken: func(err error) { s.broken <- err },
		Log:    slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Host = host
}

var execs atomic.Int64

// command is a request that runs a shell script.
func command(argv ...string) agent.ExecStart {
	a := agent.ExecStart{ID: fmt.Sprintf("exec%d", execs.Add(1)), Dir: "/tmp", Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp"}}
	for _, arg := range argv {
		a.Argv = append(a.Argv, []byte(arg))
	}
	return a
}

func script(s string) agent.ExecStart { return command("sh", "-c", s) }

// run runs a request to its end within 30 s.
func (s *sandbox) run(t *testing.T, a agent.ExecStart, stdin string) (stdout, stderr string, exit agent.Exit) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	streams := agent.Streams{Stdout: &out, Stderr: &errs}
	if stdin != "" {
		a.Stdin = true
		streams.Stdin = strings.NewReader(stdin)
	}
	exit, err := s.Exec(ctx, a, streams)
	if err != nil {
		t.Fatalf("exec: %v", err)
	}
	return out.String(), errs.String(), exit
}
