package ctl

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// host is the machine that doctor looks at.
type host struct {
	root   string // "/"; tests put files elsewhere
	socket string // of the engine
	data   string // of boxed-node
}

// defaultSocket is where Docker listens.
const defaultSocket = "/var/run/docker.sock"

func newHost(getenv func(string) string) host {
	h := host{root: "/", socket: defaultSocket, data: firstOf(getenv("BOXED_DATA_DIR"), "/var/lib/boxed")}
	if address := firstOf(getenv("BOXED_DOCKER_HOST"), getenv("DOCKER_HOST")); address != "" {
		h.socket = strings.TrimPrefix(address, "unix://")
	}
	return h
}

func (h host) path(p string) string { return filepath.Join(h.root, p) }

// read is the content of a small file, "" if there is none.
func (h host) read(p string) string {
	data, err := os.ReadFile(h.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func (h host) exists(p string) bool {
	_, err := os.Stat(h.path(p))
	return err == nil
}

func hostChecks(ctx context.Context, h host) []check {
	engine, engineChecks := h.engine(ctx)
	return slices.Concat(
		[]check{h.system(), h.kernel(), h.cgroups(), h.seccomp()},
		engineChecks,
		h.disks(engine.DockerRootDir),
		[]check{h.memory(), h.limits(), h.uids(), h.corePattern(), h.clock()},
	)
}

func ok(name, title, detail string) check {
	return check{Name: name, Title: title, Result: resultOK, Detail: detail}
}

func (c check) warn(detail, remedy string) check {
	c.Result, c.Detail, c.Remedy = resultWarning, detail, remedy
	return c
}

func (c check) fail(detail, remedy string) check {
	c.Result, c.Detail, c.Remedy = resultFailed, detail, remedy
	return c
}

func (h host) system() check {
	name := "Linux"
	for line := range strings.Lines(h.read("/etc/os-release")) {
		if v, found := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); found {
			name = strings.Trim(v, `"`)
		}
	}
	c := ok("system", "the system", name+", "+platform())
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return c.fail(name+", "+platform(), "nodes run on amd64 and arm64")
	}
	return c
}

// oldestKernel is that of Debian 11; nothing older is tried.
var oldestKernel = [2]int{5, 10}

func (h host) kernel() check {
	release := h.read("/proc/sys/kernel/osrelease")
	c := ok("kernel", "the kernel", release)
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 {
		return c.warn(firstOf(release, "unknown"), "its version cannot be read")
	}
	if major < oldestKernel[0] || major == oldestKernel[0] && minor < oldestKernel[1] {
		return c.warn(release, fmt.Sprintf("boxed is tried on %d.%d and newer: upgrade", oldestKernel[0], oldestKernel[1]))
	}
	return c
}

// controllers are what the limits of a sandbox need.
var controllers = []string{"memory", "cpu", "pids"}

func (h host) cgroups() check {
	c := ok("cgroups", "cgroups limit memory, processor and processes", "")
	remedy := "boot with cgroup_enable=memory (some small boards leave it out), or enable the controllers of the system's service manager"
	if h.exists("/sys/fs/cgroup/cgroup.controllers") {
		have := strings.Fields(h.read("/sys/fs/cgroup/cgroup.controllers"))
		for _, want := range controllers {
			if !slices.Contains(have, want) {
				return c.fail("v2, without "+want, remedy)
			}
		}
		c.Detail = "v2"
		return c
	}
	for _, want := range append(controllers, "freezer") {
		if !h.exists("/sys/fs/cgroup/" + want) {
			return c.fail("v1, without "+want, remedy)
		}
	}
	c.Detail = "v1"
	if h.exists("/sys/fs/cgroup/unified/cgroup.controllers") {
		return c.warn("v1 and v2 together", "crun refuses this mixture: use runc, or boot with systemd.unified_cgroup_hierarchy=1")
	}
	return c
}

func (h host) seccomp() check {
	c := ok("seccomp", "the kernel filters system calls", "yes")
	if !strings.Contains(h.read("/proc/sys/kernel/seccomp/actions_avail"), "errno") {
		return c.fail("no", "boxed starts nothing without it: use a kernel with CONFIG_SECCOMP_FILTER, as every distribution's is")
	}
	return c
}

// Bounds of a disk's free space, in bytes.
const (
	diskFull = 1 << 30
	diskLow  = 5 << 30
)

func (h host) disks(engineRoot string) []check {
	var out []check
	seen := map[uint64]bool{}
	for _, d := range []struct{ path, what string }{{engineRoot, "images"}, {h.data, "the node's data"}, {"/tmp", "temporary files"}} {
		// What is not there yet will be made on the file system above it.
		p := h.path(d.path)
		for d.path != "" && p != "/" {
			if _, err := os.Stat(p); err == nil {
				break
			}
			p = filepath.Dir(p)
		}
		var st unix.Stat_t
		var fsInfo unix.Statfs_t
		if d.path == "" || unix.Stat(p, &st) != nil || unix.Statfs(p, &fsInfo) != nil || seen[st.Dev] {
			continue
		}
		seen[st.Dev] = true
		free := int64(fsInfo.Bavail) * int64(fsInfo.Bsize)
		c := ok("disk", "room for "+d.what, fmt.Sprintf("%s free at %s", table.Size(free), d.path))
		remedy := "free some: docker image prune; or move the engine's data-root"
		switch {
		case free < diskFull:
			c = c.fail(c.Detail, remedy)
		case free < diskLow:
			c = c.warn(c.Detail, remedy)
		case fsInfo.Files > 0 && fsInfo.Ffree < 10000:
			c = c.warn(fmt.Sprintf("%d inodes free at %s", fsInfo.Ffree, d.path), remedy)
		}
		out = append(out, c)
	}
	return out
}

func (h host) memory() check {
	c := ok("memory", "memory for sandboxes", "")
	available := int64(-1)
	for line := range strings.Lines(h.read("/proc/meminfo")) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == "MemAvailable:" {
			kib, _ := strconv.ParseInt(fields[1], 10, 64)
			available = kib << 10
		}
	}
	one := boxed.DefaultLimits().MemoryBytes
	c.Detail = fmt.Sprintf("%s available, room for %d sandboxes of %s", table.Size(available), available/one, table.Size(one))
	if available < one {
		return c.warn(c.Detail, "end what else uses memory, or give the default template less (limits.memory_bytes)")
	}
	return c
}

// enoughFiles is a descriptor for each of some thousand streams.
const enoughFiles = 16384

func (h host) limits() check {
	var files syscall.Rlimit
	_ = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) // cannot fail for one's own
	c := ok("limits", "limits of this host", fmt.Sprintf("%d open files, %s processes", files.Max, firstOf(h.read("/proc/sys/kernel/pid_max"), "?")))
	if files.Max < enoughFiles {
		return c.warn(c.Detail, fmt.Sprintf("a node started from here could open few files: ulimit -n %d, or use the systemd unit (make install)", enoughFiles))
	}
	if n, err := strconv.Atoi(h.read("/proc/sys/kernel/pid_max")); err == nil && n < 32768 {
		return c.warn(c.Detail, "sysctl kernel.pid_max=4194304")
	}
	return c
}

// uidLow and uidHigh are the default range of the sandboxes' users.
const (
	uidLow  = boxed.DefaultFirstUID
	uidHigh = boxed.DefaultLastUID
)

// uids looks for others who use the range of the sandboxes' users: a process of
// theirs could signal a sandbox's, and share the kernel's quotas with it.
func (h host) uids() check {
	c := ok("uids", "the sandboxes' users are theirs alone", fmt.Sprintf("%d to %d", uidLow, uidHigh))
	remedy := "give boxed-node another range of uids in its configuration, one that is free"
	for line := range strings.Lines(h.read("/etc/subuid")) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if len(fields) < 3 {
			continue
		}
		low, err1 := strconv.Atoi(fields[1])
		count, err2 := strconv.Atoi(fields[2])
		if err1 == nil && err2 == nil && low <= uidHigh && low+count > uidLow {
			return c.warn(fmt.Sprintf("%s may use %d to %d (/etc/subuid)", fields[0], low, low+count-1), remedy)
		}
	}
	for line := range strings.Lines(h.read("/etc/passwd")) {
		fields := strings.Split(line, ":")
		if len(fields) < 3 {
			continue
		}
		if uid, err := strconv.Atoi(fields[2]); err == nil && uid >= uidLow && uid <= uidHigh {
			return c.warn(fmt.Sprintf("%s is uid %d (/etc/passwd)", fields[0], uid), remedy)
		}
	}
	return c
}

// corePattern: a pattern that begins with | starts a program on the host, as
// root, for each program that crashes in a sandbox. Limits do not prevent it.
func (h host) corePattern() check {
	pattern := h.read("/proc/sys/kernel/core_pattern")
	c := ok("core_pattern", "crashes in sandboxes start nothing on the host", firstOf(pattern, "core"))
	if strings.HasPrefix(pattern, "|") {
		return c.warn(pattern+" is run for each crash", "sysctl kernel.core_pattern=core, unless you trust that program with hostile input")
	}
	return c
}

func (h host) clock() check {
	c := ok("clock", "the clock is set by the network", "yes")
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	if err != nil || state == unix.TIME_ERROR || tx.Status&unix.STA_UNSYNC != 0 {
		return c.warn("it is not", "timedatectl set-ntp true; nodes of a mesh must agree on the time to within "+boxed.MaxClockSkew.String())
	}
	return c
}
