package e2e_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// dockerd is an engine of the test's own, which may be stopped and killed. Its
// directories lie on a tmpfs, so that whatever it leaves goes with that.
type dockerd struct {
	engine
	t     *testing.T
	path  string
	dir   string
	cmd   *exec.Cmd
	ended chan error
	log   *safeBuffer
}

// newDockerd starts an engine that has one image, image of the machine's own.
// args are those of dockerd, for its first start.
func newDockerd(t *testing.T, image string, args ...string) *dockerd {
	t.Helper()
	lacks := func(format string, args ...any) {
		t.Helper()
		if os.Getenv("CI") != "" {
			t.Fatalf(format, args...)
		}
		t.Skipf(format, args...)
	}
	path := "/usr/sbin/dockerd"
	if found, err := exec.LookPath("dockerd"); err == nil {
		path = found
	}
	if _, err := os.Stat(path); err != nil {
		lacks("an engine of the test's own needs dockerd: %v", err)
	}
	if os.Geteuid() != 0 {
		lacks("an engine of the test's own needs root; make test has it")
	}
	dir, err := os.MkdirTemp("/tmp", "boxed-engine") // sockets lie in it: the path must be short
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=2g,mode=711"); err != nil {
		os.Remove(dir)
		lacks("mount a tmpfs for an engine: %v", err)
	}
	d := &dockerd{t: t, path: path, dir: dir, engine: engine("unix://" + dir + "/docker.sock"), log: &safeBuffer{}}
	t.Cleanup(d.remove)
	if err := os.WriteFile(filepath.Join(dir, "daemon.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.start(args...)
	copying := exec.Command("bash", "-c", `set -o pipefail; docker save "$1" | docker -H "$2" load`, "-", image, string(d.engine))
	if text, err := copying.CombinedOutput(); err != nil {
		t.Fatalf("copy %s: %v\n%s", image, err, text)
	}
	return d
}

// start starts dockerd and waits until it answers.
func (d *dockerd) start(args ...string) {
	d.t.Helper()
	// A namespace of its own, should it find a containerd that others use too; the machine's own configuration is not read.
	name := filepath.Base(d.dir)
	args = append([]string{
		"--config-file", d.dir + "/daemon.json", "--data-root", d.dir + "/data", "--exec-root", d.dir + "/exec",
		"--pidfile", d.dir + "/pid", "-H", string(d.engine), "--bridge=none", "--iptables=false", "--ip6tables=false", "--log-level", "warn",
		"--containerd-namespace", name, "--containerd-plugins-namespace", name + "-plugins",
	}, args...)
	cmd := exec.Command(d.path, args...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.Stdout, cmd.Stderr = d.log, d.log
	// Its network is its own: an engine without a bridge removes docker0, whoever's that is.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	ended := make(chan error, 1)
	d.cmd, d.ended = cmd, ended
	go func() { ended <- cmd.Wait() }()
	within(d.t, 90*time.Second, "the engine to answer", func() bool {
		select {
		case err := <-ended:
			d.cmd = nil
			d.t.Fatalf("dockerd ended: %v\n%s", err, d.log.tail(3000))
		default:
		}
		_, err := d.docker("version")
		return err == nil
	})
}

// stop ends dockerd with a signal and waits for it.
func (d *dockerd) stop(sig syscall.Signal) {
	d.t.Helper()
	if d.cmd == nil {
		return
	}
	d.cmd.Process.Signal(sig)
	select {
	case <-d.ended:
	case <-time.After(60 * time.Second):
		d.cmd.Process.Kill()
		<-d.ended
		d.t.Errorf("dockerd did not stop\n%s", d.log.tail(3000))
	}
	d.cmd = nil
	// A killed one takes its containerd with it. The next dockerd would take a process of that number for it, also a dead
	// one that nobody has waited for.
	pidfile := filepath.Join(d.dir, "exec/containerd/containerd.pid")
	if pid, err := os.ReadFile(pidfile); err == nil {
		within(d.t, 30*time.Second, "containerd to end", func() bool { return !lives(strings.TrimSpace(string(pid))) })
	}
	os.Remove(pidfile)
	os.Remove(filepath.Join(d.dir, "pid"))
}

// lives reports whether there is such a process, and it is not a dead one that
// nobody has waited for.
func lives(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// remove ends all containers and takes the engine away.
func (d *dockerd) remove() {
	if d.t.Failed() {
		d.t.Logf("dockerd: %s", d.log.tail(4000))
	}
	if d.cmd == nil {
		d.start()
	}
	if ids, err := d.docker("ps", "-aq"); err == nil && ids != "" {
		d.docker(append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
	}
	d.stop(syscall.SIGTERM)
	for pid := range d.shims() { // of containers that a killed engine lost
		d.t.Logf("the engine left process %d", pid)
		syscall.Kill(pid, syscall.SIGKILL)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point, d.dir+"/") {
			syscall.Unmount(point, syscall.MNT_DETACH)
		}
	}
	syscall.Unmount(d.dir, syscall.MNT_DETACH)
	if err := os.Remove(d.dir); err != nil {
		d.t.Error(err)
	}
}

// shims are the processes that watch this engine's containers, with the ID of
// each one's.
func (d *dockerd) shims() map[int]string {
	found := map[int]string{}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		raw, _ := os.ReadFile(path)
		args := strings.Split(string(raw), "\x00")
		if !strings.Contains(args[0], "containerd-shim") || !slices.Contains(args, filepath.Base(d.dir)) {
			continue
		}
		var pid int
		fmt.Sscanf(path, "/proc/%d/", &pid)
		if i := slices.Index(args, "-id"); i > 0 && i+1 < len(args) {
			found[pid] = args[i+1]
		}
	}
	return found
}

// watched are the IDs of the containers that a process watches, whatever the
// engine knows of them.
func (d *dockerd) watched() []string { return slices.Sorted(maps.Values(d.shims())) }
