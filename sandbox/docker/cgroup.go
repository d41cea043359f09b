package docker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
)

// cgroup is where a container's cgroup lies in this host's file system. On
// version 1 each controller has a tree of its own; on version 2 there is one,
// and all controllers lead to the same directory. In the hybrid layout the
// controllers are version 1's beside an empty tree of version 2.
type cgroup struct {
	v2   bool
	dirs map[string]string // controller → directory: memory, cpu, cpuacct, pids, freezer; "" is the tree of version 2
}

// controllers are those that are used.
var controllers = []string{"memory", "cpu", "cpuacct", "pids", "freezer"}

// locateCgroup finds a process's cgroup from the texts of its /proc/<pid>/cgroup
// and of this process's /proc/self/mountinfo. The path must contain the
// container's ID: then it is its cgroup and not that of a process which got its
// PID, nor one that others share.
func locateCgroup(procCgroup, mountinfo, containerID string) (cgroup, error) {
	paths := map[string]string{} // controller → path within its tree
	for line := range strings.Lines(procCgroup) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		names, path, ok := strings.Cut(rest, ":")
		if !ok || !strings.Contains(path, containerID) {
			continue
		}
		for name := range strings.SplitSeq(names, ",") {
			paths[name] = path
		}
	}
	cg := cgroup{dirs: map[string]string{}}
	for line := range strings.Lines(mountinfo) {
		m, ok := parseMount(line)
		if !ok || (m.fstype != "cgroup" && m.fstype != "cgroup2") {
			continue
		}
		for name, path := range paths {
			inside, ok := relativeTo(path, m.root)
			if !ok || (name == "") != (m.fstype == "cgroup2") || (name != "" && !contains(m.super, name)) {
				continue
			}
			if _, taken := cg.dirs[name]; !taken {
				cg.dirs[name] = filepath.Join(m.point, inside)
			}
		}
	}
	if _, v1 := cg.dirs["memory"]; v1 {
		return cg, nil
	}
	dir, ok := cg.dirs[""]
	if !ok {
		return cg, fmt.Errorf("no cgroup of container %.12s found", containerID)
	}
	cg.v2 = true
	for _, name := range controllers {
		cg.dirs[name] = dir
	}
	return cg, nil
}

func contains(list []string, s string) bool {
	for _, have := range list {
		if have == s {
			return true
		}
	}
	return false
}

// relativeTo is path below root, where root is "/" or an ancestor.
func relativeTo(path, root string) (string, bool) {
	if root == "/" {
		return path, true
	}
	rest, ok := strings.CutPrefix(path, root)
	return rest, ok && (rest == "" || rest[0] == '/')
}

// write writes one file of a controller.
func (c cgroup) write(controller, file, value string) error {
	dir, ok := c.dirs[controller]
	if !ok {
		return fmt.Errorf("cgroup %s: %w", controller, fs.ErrNotExist)
	}
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY|os.O_TRUNC, 0) // never made: it is the kernel's
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func (c cgroup) read(controller, file string) (string, error) {
	dir, ok := c.dirs[controller]
	if !ok {
		return "", fmt.Errorf("cgroup %s: %w", controller, fs.ErrNotExist)
	}
	raw, err := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(raw)), err
}

// number reads a file of one number; "max" is -1.
func (c cgroup) number(controller, file string) (int64, error) {
	text, err := c.read(controller, file)
	if err != nil || text == "max" {
		return -1, err
	}
	return strconv.ParseInt(text, 10, 64)
}

// keyed reads one value of a file of "key value" lines.
func (c cgroup) keyed(controller, file, key string) (int64, error) {
	text, err := c.read(controller, file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name == key {
			return strconv.ParseInt(value, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, key)
}

// setMemory limits memory, and memory and swap together, to bytes. Version 1
// holds that the second is never below the first, so what grows goes last when
// lowering and first when raising. A version 1 kernel refuses to go below what
// cannot be reclaimed: CodeConflict.
func (c cgroup) setMemory(bytes int64) error {
	value := strconv.FormatInt(bytes, 10)
	if c.v2 {
		return errors.Join(optional(c.write("memory", "memory.swap.max", "0")), c.write("memory", "memory.max", value))
	}
	files := []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}
	now, err := c.number("memory", files[0])
	if err != nil {
		return err
	}
	if bytes > now {
		files[0], files[1] = files[1], files[0]
	}
	for _, file := range files {
		err := c.write("memory", file, value)
		if file == "memory.memsw.limit_in_bytes" {
			err = optional(err) // a kernel without swap accounting
		}
		if errors.Is(err, syscall.EBUSY) {
			return boxed.Errorf(boxed.CodeConflict, "the sandbox uses more memory than the new limit: end something in it first").WithField("limits.memory_bytes")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// optional lets a file that the kernel does not have pass.
func optional(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// cpuPeriod is the span over which CPU time is granted, in µs: the engine's own.
const cpuPeriod = 100_000

// cpuShares is a sandbox's weight against others where there is too little CPU for
// all: in proportion to its cores. With equal weights fifty sandboxes of a tenth
// of a core, all busy, delayed an exec of one with a whole core by 274 ms
// (2 cores); with these by 13.
func cpuShares(l boxed.Limits) int64 { return sharesOf(nanoCPUs(l)) }

func sharesOf(nano int64) int64 { return min(max(2, nano*1024/1e9), 262144) } // the kernel's bounds

// setCPUWeight sets the weight as the engine does.
func (c cgroup) setCPUWeight(nano int64) error {
	shares := sharesOf(nano)
	if !c.v2 {
		return c.write("cpu", "cpu.shares", strconv.FormatInt(shares, 10))
	}
	// runc's conversion: [2, 262144] to [1, 10000].
	return c.write("cpu", "cpu.weight", strconv.FormatInt(1+(shares-2)*9999/262142, 10))
}

// setCPU limits CPU time to cores.
func (c cgroup) setCPU(nano int64) error {
	if err := c.setCPUWeight(nano); err != nil {
		return err
	}
	quota := strconv.FormatInt(max(1000, nano*cpuPeriod/1e9), 10) // the kernel's least is 1 ms
	if c.v2 {
		return c.write("cpu", "cpu.max", quota+" "+strconv.Itoa(cpuPeriod))
	}
	return errors.Join(c.write("cpu", "cpu.cfs_period_us", strconv.Itoa(cpuPeriod)), c.write("cpu", "cpu.cfs_quota_us", quota))
}

// limitLoopback bounds what sockets hold, on version 1, where it is counted
// apart from memory. On version 2 it is memory like any other.
func (c cgroup) limitLoopback(bytes int64) error {
	if c.v2 {
		return nil
	}
	if err := c.write("memory", "memory.kmem.tcp.limit_in_bytes", strconv.FormatInt(bytes, 10)); err != nil {
		return fmt.Errorf("bound loopback buffers: %w", err)
	}
	return nil
}

// freezeTimeout bounds the wait for every process to stop.
const freezeTimeout = 10 * time.Second

// freeze stops or thaws every process and returns when that has happened.
func (c cgroup) freeze(frozen bool) error {
	file, value := "freezer.state", "THAWED"
	switch {
	case c.v2 && frozen:
		file, value = "cgroup.freeze", "1"
	case c.v2:
		file, value = "cgroup.freeze", "0"
	case frozen:
		value = "FROZEN"
	}
	deadline := time.Now().Add(freezeTimeout)
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		// Again each time: on version 1 a process that forks while it is being
		// frozen may be missed, and the state then stays FREEZING.
		if err := c.write("freezer", file, value); err != nil {
			return err
		}
		is, err := c.isFrozen()
		if err != nil || is == frozen {
			return err
		}
		if time.Now().After(deadline) {
			_ = c.write("freezer", file, map[bool]string{true: "0", false: "THAWED"}[c.v2]) // neither here nor there would be worse
			return boxed.Errorf(boxed.CodeNotReady, "the sandbox could not be paused within %v: a process does not stop; try again", freezeTimeout)
		}
		time.Sleep(wait)
	}
}

// isFrozen reports whether every process is stopped.
func (c cgroup) isFrozen() (bool, error) {
	if c.v2 {
		n, err := c.keyed("freezer", "cgroup.events", "frozen")
		return n == 1, err
	}
	state, err := c.read("freezer", "freezer.state")
	return state == "FROZEN", err
}

// stats reads usage. Memory is without the page cache that can be dropped, and
// with the socket buffers that version 1 counts apart.
func (c cgroup) stats() (boxed.Stats, error) {
	s := boxed.Stats{At: time.Now()}
	usage, limit, cache, oom := "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file", "memory.oom_control"
	if c.v2 {
		usage, limit, cache, oom = "memory.current", "memory.max", "inactive_file", "memory.events"
	}
	var errs [6]error
	s.MemoryBytes, errs[0] = c.number("memory", usage)
	s.MemoryLimit, errs[1] = c.number("memory", limit)
	inactive, err := c.keyed("memory", "memory.stat", cache)
	errs[2] = err
	s.MemoryBytes = max(0, s.MemoryBytes-inactive)
	if buffers, err := c.number("memory", "memory.kmem.tcp.usage_in_bytes"); err == nil && !c.v2 {
		s.MemoryBytes += buffers
	}
	s.OOMKills, errs[3] = c.keyed("memory", oom, "oom_kill")
	s.Processes, errs[4] = c.number("pids", "pids.current")
	if c.v2 {
		usec, err := c.keyed("cpu", "cpu.stat", "usage_usec")
		s.CPUSeconds, errs[5] = float64(usec)/1e6, err
	} else {
		nsec, err := c.number("cpuacct", "cpuacct.usage")
		s.CPUSeconds, errs[5] = float64(nsec)/1e9, err
	}
	return s, errors.Join(errs[:]...)
}
