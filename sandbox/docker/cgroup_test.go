package docker_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

const cid = "bdeb97f1c1ae2bf3ff4e81c3fb9d4e4f5f9b86a1dba3f60c4d7f3f3bd7b1a001"

// Layouts of cgroups as hosts have them.
func TestLocatesCgroups(t *testing.T) {
	for name, c := range map[string]struct {
		proc, mounts string
		v2           bool
		dirs         map[string]string // nil: none is found
	}{
		"version 1, as Debian's hybrid": {
			proc: "9:name=systemd:/docker/" + cid + "\n8:pids:/docker/" + cid + "\n6:freezer:/docker/" + cid + "\n4:memory:/docker/" + cid +
				"\n2:cpuacct:/docker/" + cid + "\n1:cpu:/docker/" + cid + "\n0::/docker/" + cid + "\n",
			mounts: `30 24 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
32 30 0:28 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
35 30 0:31 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
36 30 0:32 / /sys/fs/cgroup/systemd rw,relatime - cgroup systemd rw,name=systemd
37 30 0:33 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`,
			dirs: map[string]string{
				"cpu": "/sys/fs/cgroup/cpu/docker/" + cid, "cpuacct": "/sys/fs/cgroup/cpuacct/docker/" + cid,
				"memory": "/sys/fs/cgroup/memory/docker/" + cid, "freezer": "/sys/fs/cgroup/freezer/docker/" + cid,
				"pids": "/sys/fs/cgroup/pids/docker/" + cid, "name=systemd": "/sys/fs/cgroup/systemd/docker/" + cid,
				"": "/sys/fs/cgroup/unified/docker/" + cid,
			},
		},
		"version 1, joint controllers, systemd": {
			proc: "11:memory:/system.slice/docker-" + cid + ".scope\n5:cpu,cpuacct:/system.slice/docker-" + cid + ".scope\n3:freezer:/system.slice/docker-" + cid + ".scope\n",
			mounts: `33 25 0:28 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
34 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
35 25 0:30 / /sys/fs/cgroup/freezer rw,nosuid shared:11 - cgroup cgroup rw,freezer
`,
			dirs: map[string]string{
				"memory":  "/sys/fs/cgroup/memory/system.slice/docker-" + cid + ".scope",
				"cpu":     "/sys/fs/cgroup/cpu,cpuacct/system.slice/docker-" + cid + ".scope",
				"cpuacct": "/sys/fs/cgroup/cpu,cpuacct/system.slice/docker-" + cid + ".scope",
				"freezer": "/sys/fs/cgroup/freezer/system.slice/docker-" + cid + ".scope",
			},
		},
		"version 2, systemd": {
			proc:   "0::/system.slice/docker-" + cid + ".scope\n",
			mounts: "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n",
			v2:     true,
			dirs:   allOf("/sys/fs/cgroup/system.slice/docker-" + cid + ".scope"),
		},
		"version 2 mounted from within": {
			proc:   "0::/host/docker/" + cid + "\n",
			mounts: "30 23 0:26 /host /cg\\040roup rw - cgroup2 cgroup2 rw\n",
			v2:     true,
			dirs:   allOf("/cg roup/docker/" + cid),
		},
		"another process got the PID": {proc: "0::/user.slice/session-1.scope\n", mounts: "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
		"outside of what is mounted":  {proc: "0::/other/docker/" + cid + "\n", mounts: "30 23 0:26 /oth /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
		"nothing is mounted":          {proc: "4:memory:/docker/" + cid + "\n", mounts: "1 1 0:1 / / rw - ext4 /dev/vda rw\n"},
		"empty":                       {},
		"nonsense":                    {proc: "::::\n\n:\nx", mounts: "a b c - \n - \nx"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := docker.LocateCgroup(c.proc, c.mounts, cid)
			if c.dirs == nil {
				if err == nil {
					t.Errorf("found %v", got.Dirs())
				}
				return
			}
			if diff := cmp.Diff(c.dirs, got.Dirs()); err != nil || got.V2() != c.v2 || diff != "" {
				t.Errorf("version 2: %v, %v\n%s", got.V2(), err, diff)
			}
		})
	}
}

func allOf(dir string) map[string]string {
	return map[string]string{"": dir, "memory": dir, "cpu": dir, "cpuacct": dir, "pids": dir, "freezer": dir}
}

// fakeCgroup is a directory with the files that a kernel would have.
func fakeCgroup(t *testing.T, v2 bool, files map[string]string) (docker.Cgroup, func(string) string) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return docker.NewCgroup(dir, v2), func(name string) string {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		return string(raw)
	}
}

func TestWritesVersion2(t *testing.T) {
	c, file := fakeCgroup(t, true, map[string]string{
		"memory.max": "1073741824\n", "memory.swap.max": "max\n", "cpu.max": "max 100000\n", "cpu.weight": "100\n", "memory.current": "5000000\n",
		"memory.stat": "anon 1\ninactive_file 1000000\n", "memory.events": "low 0\noom 3\noom_kill 2\n", "pids.current": "7\n",
		"cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
	})
	for err := range map[error]bool{c.SetMemory(64 << 20): true, c.SetCPU(1_500_000_000): true, c.LimitLoopback(1): true} {
		if err != nil {
			t.Error(err)
		}
	}
	m, swap, quota, weight := file("memory.max"), file("memory.swap.max"), file("cpu.max"), file("cpu.weight")
	if m != "67108864" || swap != "0" || quota != "150000 100000" || weight != "59" {
		t.Errorf("memory %q, swap %q, cpu %q, weight %q", m, swap, quota, weight)
	}
	s, err := c.Stats()
	s.At = s.At.Truncate(0)
	want := boxed.Stats{MemoryBytes: 4000000, MemoryLimit: 64 << 20, CPUSeconds: 1.5, Processes: 7, OOMKills: 2, At: s.At}
	if diff := cmp.Diff(want, s); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
}

func TestWithoutSwapAccounting(t *testing.T) {
	v1, file := fakeCgroup(t, false, map[string]string{"memory.limit_in_bytes": "1073741824\n", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000", "cpu.shares": "1024"})
	if err := v1.SetMemory(64 << 20); err != nil || file("memory.limit_in_bytes") != "67108864" {
		t.Errorf("version 1: %v", err)
	}
	if err := v1.SetCPU(1); err != nil || file("cpu.cfs_quota_us") != "1000" || file("cpu.shares") != "2" {
		t.Errorf("the least share: %v %s %s", err, file("cpu.cfs_quota_us"), file("cpu.shares"))
	}
	if err := v1.LimitLoopback(1); err == nil {
		t.Error("a kernel that cannot bound loopback buffers passes")
	}
	v2, file := fakeCgroup(t, true, map[string]string{"memory.max": "max"})
	if err := v2.SetMemory(64 << 20); err != nil || file("memory.max") != "67108864" {
		t.Errorf("version 2: %v", err)
	}
}

// The freezer of version 2 is there even where no controller is.
func TestFreezesOnVersion2(t *testing.T) {
	var dir string
	for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		candidate := filepath.Join(root, "boxed-test-"+strconv.Itoa(os.Getpid()))
		if os.Mkdir(candidate, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(candidate) })
		if _, err := os.Stat(filepath.Join(candidate, "cgroup.freeze")); err == nil {
			dir = candidate
			break
		}
	}
	if dir == "" {
		t.Skip("no cgroup of version 2 that can be written to (needs root)")
	}
	cmd := exec.Command(guestProgram, "sleep")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	c := docker.NewCgroup(dir, true)
	for range 3 {
		for _, frozen := range []bool{true, true, false, false} {
			err := c.Freeze(frozen)
			is, err2 := c.IsFrozen()
			if err != nil || err2 != nil || is != frozen {
				t.Fatalf("freeze %v: %v, %v, %v", frozen, err, is, err2)
			}
		}
	}
}

// mountinfo as runc leaves it, and what is wrong with the others.
func TestChecksMounts(t *testing.T) {
	const good = `72 48 0:39 / / ro,relatime master:2 - overlay overlay rw
73 72 0:42 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
74 72 0:43 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
77 76 0:46 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=755
88 72 254:0 /x /.boxed-agent ro,relatime - ext4 /dev/vda rw
90 72 0:48 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw,size=8192k
57 73 0:43 /null /proc/keys rw,nosuid - tmpfs tmpfs rw
`
	for name, c := range map[string]struct{ old, with, say string }{
		"as it should be":         {"", "", ""},
		"writable root":           {"/ / ro", "/ / rw", "/ can be written to"},
		"writable bind":           {"/.boxed-agent ro", "/.boxed-agent rw", "/.boxed-agent can be written to"},
		"tmpfs with devices":      {"rw,nosuid,nodev,relatime - tmpfs tmpfs rw,size=8192k", "rw,nosuid - tmpfs tmpfs rw", "/tmp is not the tmpfs"},
		"a disk for a tmpfs":      {"- tmpfs tmpfs rw,size=8192k", "- ext4 /dev/vda rw", "/tmp is not the tmpfs"},
		"mounted elsewhere":       {"/ /tmp rw", "/ /var/tmp rw", "/var/tmp can be written to"},
		"missing":                 {"90 72 0:48 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw,size=8192k\n", "", "/tmp is, or lies behind, a link"},
		"twice":                   {"57 73", "91 72 0:49 / /tmp rw,nosuid,nodev - tmpfs tmpfs rw\n57 73", "/tmp is, or lies behind, a link"},
		"an extra writable mount": {"57 73", "91 72 0:49 / /data rw - ext4 /dev/vda rw\n57 73", "/data can be written to"},
		"no root":                 {"72 48 0:39 / / ro,relatime master:2 - overlay overlay rw\n", "", "root is not a mount"},
		"not a mountinfo":         {"57 73", "nonsense\n57 73", "cannot be read"},
	} {
		text := strings.Replace(good, c.old, c.with, 1)
		if got := docker.CheckMounts(text, docker.Wanted("/tmp", "/.boxed-agent")); (c.say == "") != (got == "") || !strings.Contains(got, c.say) {
			t.Errorf("%s: %q, want %q", name, got, c.say)
		}
	}
}

func TestChecksCredentials(t *testing.T) {
	const good = "Name:\tx\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 \nCapInh:\t0000000000000000\nCapPrm:\t00000000000000e0\nCapEff:\t00000000000000e0\nCapBnd:\t00000000000000e0\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"
	for name, c := range map[string]struct{ old, with, say string }{
		"as it should be":    {"", "", ""},
		"no groups":          {"Groups:\t0 ", "Groups:\t ", ""},
		"fewer capabilities": {"CapPrm:\t00000000000000e0", "CapPrm:\t0000000000000020", ""},
		"another user":       {"Uid:\t0\t0\t0\t0", "Uid:\t4242\t4242\t4242\t4242", "/etc/passwd"},
		"another group":      {"Gid:\t0\t0", "Gid:\t5\t5", "/etc/group"},
		"more groups":        {"Groups:\t0 ", "Groups:\t0 999 ", "groups 0 999"},
		"privileges":         {"NoNewPrivs:\t1", "NoNewPrivs:\t0", "no-new-privileges"},
		"no filter":          {"Seccomp:\t2", "Seccomp:\t0", "seccomp"},
		"a capability":       {"CapBnd:\t00000000000000e0", "CapBnd:\t00000000000000e2", "CapBnd=00000000000000e2"},
		"no such field":      {"CapAmb:\t0000000000000000\n", "", "CapAmb="},
	} {
		if got := docker.CheckCredentials(strings.Replace(good, c.old, c.with, 1)); (c.say == "") != (got == "") || !strings.Contains(got, c.say) {
			t.Errorf("%s: %q, want %q", name, got, c.say)
		}
	}
}

func FuzzReadsProc(f *testing.F) {
	f.Add("0::/docker/"+cid+"\n", "30 23 0:26 / /sys/fs/cgroup\\04 rw - cgroup2 cgroup2 rw\n")
	f.Fuzz(func(_ *testing.T, a, b string) {
		_, _ = docker.LocateCgroup(a, b, cid)
		docker.CheckMounts(b, docker.Wanted("/tmp", "/x"))
		docker.CheckCredentials(a)
	})
}
