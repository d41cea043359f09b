package docker_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// place is what the guest's "stat" says of a mounted directory.
type place struct {
	Bytes, Inodes, Mode, UID, GID   uint64
	NoSuid, NoDev, NoExec, ReadOnly bool
}

func (g *guest) stat(path string) place {
	g.t.Helper()
	var p place
	if out := g.user("stat", path); json.Unmarshal([]byte(out), &p) != nil {
		g.t.Fatalf("stat %s: %s", path, out)
	}
	return p
}

// hostPID is the guest's first process as this host sees it.
func (g *guest) hostPID() int {
	g.t.Helper()
	s, err := g.d.Status(g.t.Context(), g.id)
	if err != nil {
		g.t.Fatal(err)
	}
	return s.PID
}

// procFile reads a file of the first process's /proc directory, on the host.
func (g *guest) procFile(name string) string {
	g.t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(g.hostPID()), name))
	if err != nil {
		g.t.Fatal(err)
	}
	return string(raw)
}

func statusFields(status string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		out[name] = strings.Join(strings.Fields(value), " ")
	}
	return out
}

// Case I1: what the agent holds, and that user code holds nothing.
func TestPrivilegesInside(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))

	const kept = "00000000000000e0" // KILL, SETGID, SETUID
	agent := statusFields(g.procFile("status"))
	want := map[string]string{
		"Uid": "0 0 0 0", "Gid": "0 0 0 0", "CapInh": "0000000000000000", "CapPrm": kept, "CapEff": kept, "CapBnd": kept,
		"CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
	}
	for name, value := range want {
		if agent[name] != value {
			t.Errorf("PID 1: %s = %s, want %s", name, agent[name], value)
		}
	}
	if agent["Groups"] != "" && agent["Groups"] != "0" {
		t.Errorf("PID 1 is in groups %s", agent["Groups"])
	}

	user := statusFields(g.user("cat", "/proc/self/status"))
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if user[set] != "0000000000000000" {
			t.Errorf("user code: %s = %s", set, user[set])
		}
	}
	if user["NoNewPrivs"] != "1" || user["Seccomp"] != "2" {
		t.Errorf("user code: NoNewPrivs %s, Seccomp %s", user["NoNewPrivs"], user["Seccomp"])
	}
	for _, call := range []string{"setuid:0", "setgid:0"} {
		if got := g.user("call", call); got != "EPERM" {
			t.Errorf("%s: %s", call, got)
		}
	}
	for _, file := range []string{"/proc/1/environ", "/proc/1/mem", "/proc/1/maps"} {
		if got := g.user("cat", file); got != "EACCES" {
			t.Errorf("read %s: %s", file, got)
		}
	}
}

// Case I5: PID 1's environment is ours, whatever the image and the engine add.
func TestEnvironmentOfTheFirstProcess(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	got := strings.Split(strings.TrimSuffix(g.procFile("environ"), "\x00"), "\x00")
	want := sandbox.AgentEnv()
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestWritablePlacesAreBounded(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	for _, m := range sandbox.GuestTmpfs(g.box.Limits) {
		got := g.stat(m.Path)
		want := place{
			Bytes: uint64(m.Bytes), Inodes: uint64(m.Inodes()), Mode: uint64(m.Mode), UID: uint64(g.box.UID), GID: uint64(g.box.UID),
			NoSuid: true, NoDev: true,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", m.Path, diff)
		}
		if got := g.user("fill", m.Path); got != fmt.Sprint(m.Bytes, " ENOSPC") {
			t.Errorf("fill %s: %s, want %d", m.Path, got, m.Bytes)
		}
	}
	if got := g.stat("/dev/shm"); got.Bytes != uint64(g.box.Limits.ShmBytes) || got.Inodes != 1024 || got.Mode != 0o1777 || !got.NoSuid || !got.NoDev {
		t.Errorf("/dev/shm: %+v", got)
	}
	out := g.user("files", "/output")
	if n, errno, _ := strings.Cut(out, " "); errno != "ENOSPC" || len(n) > 4 || n < "1000" {
		t.Errorf("files in a tmpfs of 4 MiB: %s", out)
	}
}

func TestNothingElseCanBeWritten(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	places := []string{"/", "/etc", "/run", "/run/boxed", "/home", "/dev", "/dev/mqueue", "/proc", "/proc/sys/kernel", "/sys", "/sys/fs/cgroup", "/sys/fs/cgroup/memory"}
	for _, uid := range []int{g.box.UID, 0} { // PID 1's uid without its mounts' protection would be the host's root
		out := g.run(uid, append([]string{"self", "write"}, places...)...).Out
		for line := range strings.Lines(out) {
			dir, errno, _ := strings.Cut(strings.TrimSpace(line), " ")
			own := dir == "/dev" || dir == "/dev/mqueue" || dir == "/sys/fs/cgroup" // memory of the sandbox's, to root
			if errno == "" && !(own && uid == 0) && dir != "/dev/mqueue" {
				t.Errorf("uid %d can write to %s", uid, dir)
			}
		}
	}
}

func TestOnlyLoopback(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	got := g.user("links")
	if !strings.HasPrefix(got, "lo true [127.0.0.1/8") || strings.Contains(got, "\n") {
		t.Errorf("interfaces: %q", got)
	}
	for _, addr := range []string{"127.0.0.1:53", "127.64.255.9:22"} { // facts.md: what the egress entry needs
		if got := g.user("listen", addr, addr); got != "ok" {
			t.Errorf("listen on %s: %s", addr, got)
		}
	}
	if got := g.user("listen", "0.0.0.0:8000", "127.77.3.4:8000"); got != "ok" {
		t.Errorf("synthetic address: %s", got)
	}
	if got := g.user("listen", "127.0.0.1:80", "10.1.2.3:80"); got != "dial ENETUNREACH" {
		t.Errorf("outside: %s", got)
	}
}

// Case I4: sockets, processes, descriptors and memory have their bounds.
func TestLimitsInForce(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	l := g.box.Limits

	limits := g.user("cat", "/proc/self/limits")
	for name, value := range map[string]int64{
		"Max open files": l.OpenFiles, "Max processes": l.Processes, "Max core file size": 0, "Max locked memory": 64 << 10,
		"Max pending signals": l.Processes + 768, "Max msgqueue size": 819200,
	} {
		for line := range strings.Lines(limits) {
			rest, ok := strings.CutPrefix(line, name)
			if v := strings.Fields(rest); ok && (v[0] != fmt.Sprint(value) || v[1] != fmt.Sprint(value)) {
				t.Errorf("%s: %v, want %d", name, v, value)
			}
		}
	}
	if !strings.Contains(limits, "Max resident set          unlimited            unlimited") {
		t.Errorf("RLIMIT_RSS is not free for the agent's marks:\n%s", limits)
	}
	// nproc counts the user's; the probe itself has some threads.
	if n, errno, _ := strings.Cut(g.user("forks"), " "); errno != "EAGAIN" || len(n) != 2 || n > fmt.Sprint(l.Processes) {
		t.Errorf("forks: %s %s", n, errno)
	}
	s, err := d.Stats(t.Context(), g.id)
	if err != nil || s.MemoryLimit != l.MemoryBytes || s.MemoryBytes <= 0 || s.Processes < 1 || s.CPUSeconds <= 0 {
		t.Errorf("stats: %+v, %v", s, err)
	}
	if got := g.user("eat", fmt.Sprint(l.MemoryBytes)); got != "killed" {
		t.Errorf("eating all memory: %q", got)
	}
	if s, err := d.Stats(t.Context(), g.id); err != nil || s.OOMKills != 1 {
		t.Errorf("after the memory ran out: %+v, %v", s, err)
	}
}

// facts.md: unbounded, 256 MiB of memory held 1.9 GiB of loopback buffers on cgroup v1.
func TestLoopbackBuffersAreBounded(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	for _, kind := range []string{"tcp", "udp"} {
		out := g.user("hoard", kind)
		var n, pieces int64
		if _, err := fmt.Sscanf(out, "hoarded %d %d", &n, &pieces); err != nil || pieces == 0 {
			t.Fatalf("%s: %s, %v", kind, out, err)
		}
		if most := 2 * sandbox.LoopbackBytes(g.box.Limits); kind == "tcp" && n > most {
			t.Errorf("held %d MiB in TCP buffers, want at most %d", n>>20, most>>20)
		}
		if used := g.d.CgroupNumbers(g.id).LoopbackPeak; used > 2*sandbox.LoopbackBytes(g.box.Limits) {
			t.Errorf("the kernel counted %d MiB for %s", used>>20, kind)
		}
	}
}

// Case I4: the kernel charges a connection when it is accepted. What is not, and
// has no descriptor either, must be seen from outside.
func TestCountsSocketsThatNobodyPaysFor(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	g.send(map[string]any{"uid": g.box.UID, "argv": []string{"self", "orphan", "500"}, "back": true})
	eventually(t, "its sockets are counted", func() bool {
		s, err := d.Status(t.Context(), g.id)
		return err == nil && s.Sockets >= 500 && s.Sockets < sandbox.MaxSockets
	})
	// And their size stays what the sysctls say.
	for call, want := range map[string]string{"bufsize:7": "ok 8192", "bufsize:8": "ok 16384", "bufsize:18": "ENOPROTOOPT"} {
		if got := g.user("call", call); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", call, got, want)
		}
	}
}

func TestHiddenAndReadOnlyPaths(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	for _, path := range sandbox.MaskedPaths() {
		if _, err := os.Stat(path); err != nil {
			continue // this kernel does not have it
		}
		info, _ := os.Stat(path)
		if info.IsDir() {
			if got := g.user("ls", path); got != "0" {
				t.Errorf("%s: %s entries", path, got)
			}
		} else if got := g.user("cat", path); got != "" && got != "EACCES" {
			t.Errorf("%s: %.60q", path, got)
		}
	}
	for _, path := range sandbox.ReadonlyPaths() {
		if _, err := os.Stat(path); err != nil {
			continue
		}
		if !strings.Contains(g.procFile("mountinfo"), " "+path+" ro,") {
			t.Errorf("%s can be written to", path)
		}
	}
}

func TestIdentityInside(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	if got := g.user("host"); got != g.box.ID.Random() {
		t.Errorf("hostname %q", got)
	}
	for _, name := range []string{"passwd", "group", "hosts", "resolv.conf"} {
		want, err := os.ReadFile(filepath.Join(g.box.Mount, name))
		if got := g.user("cat", "/etc/"+name); err != nil || got+"\n" != string(want) {
			t.Errorf("/etc/%s: %q, %v", name, got, err)
		}
	}
	if got := g.user("cat", "/proc/self/cgroup"); strings.Contains(got, g.id) {
		t.Errorf("the cgroup namespace is the host's: %s", got)
	}
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", g.hostPID(), ns))
		if err != nil || ours == theirs {
			t.Errorf("%s namespace: %s, %v", ns, theirs, err)
		}
	}
}

// The engine's own view agrees: nothing that other tools act upon is left to the image.
func TestContainerAsTheEngineSeesIt(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	c, err := engineClient.ContainerInspect(t.Context(), g.id)
	if err != nil {
		t.Fatal(err)
	}
	h := c.HostConfig
	if h.Privileged || !h.ReadonlyRootfs || h.NetworkMode != "none" || !c.Config.NetworkDisabled || h.IpcMode != "private" ||
		h.CgroupnsMode != "private" || h.PidMode != "" || h.UTSMode != "" || h.AutoRemove || h.RestartPolicy.Name != "no" ||
		h.LogConfig.Type != "none" || h.Memory != g.box.Limits.MemoryBytes || h.MemorySwap != h.Memory ||
		*h.PidsLimit != g.box.Limits.Processes+sandbox.AgentPIDs || len(h.Devices) != 0 || h.PublishAllPorts {
		t.Errorf("%+v", h)
	}
	if c.Name != "/boxed-"+string(g.box.ID) || c.Config.User != "0:0" || c.Config.WorkingDir != "/" {
		t.Errorf("%s %+v", c.Name, c.Config)
	}
}

func TestRefusesALimitOfZero(t *testing.T) {
	d := newDriver(t)
	box, _ := newBox(t, empty(t, d))
	box.Limits.WorkspaceBytes = 0
	if _, err := d.Create(t.Context(), box); boxed.CodeOf(err) != boxed.CodeInvalid {
		t.Errorf("a limit of zero: %v", err)
	}
}
