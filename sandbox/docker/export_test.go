package docker

import (
	"context"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/system"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Forget drops what the driver remembers of a container, as a restart would.
func (d *Driver) Forget(id string) { d.forget(id) }

// LimitViaEngine changes limits as on hosts where systemd keeps them.
func (d *Driver) LimitViaEngine(ctx context.Context, id string, l boxed.Limits) error {
	return d.limitViaEngine(ctx, id, l)
}

// PauseViaEngine pauses or resumes as on hosts where the cgroup is out of reach.
func (d *Driver) PauseViaEngine(ctx context.Context, id string, pause bool) error {
	return d.pauseViaEngine(ctx, id, pause)
}

// DataDir is where probes make their directories.
func (d *Driver) DataDir() string { return d.cfg.DataDir }

// Numbers are limits as the kernel has them; 0 where it has none.
type Numbers struct{ Swap, Quota, Loopback, LoopbackPeak int64 }

// CgroupNumbers reads a running container's limits.
func (d *Driver) CgroupNumbers(id string) Numbers {
	c := d.containers[id].cgroup
	var n Numbers
	if c.v2 {
		quota, _ := c.read("cpu", "cpu.max")
		n.Quota = numberBefore(quota)
		n.Swap, _ = c.number("memory", "memory.swap.max")
		return n
	}
	n.Swap, _ = c.number("memory", "memory.memsw.limit_in_bytes")
	n.Quota, _ = c.number("cpu", "cpu.cfs_quota_us")
	n.Loopback, _ = c.number("memory", "memory.kmem.tcp.limit_in_bytes")
	n.LoopbackPeak, _ = c.number("memory", "memory.kmem.tcp.max_usage_in_bytes")
	return n
}

func numberBefore(s string) (n int64) {
	for i := 0; i < len(s) && s[i] >= '0' && s[i] <= '9'; i++ {
		n = n*10 + int64(s[i]-'0')
	}
	return n
}

// Waiting is how many wait for the pull of a reference.
func (d *Driver) Waiting(ref string) int {
	d.pulls.mu.Lock()
	defer d.pulls.mu.Unlock()
	if p := d.pulls.active[ref]; p != nil {
		return p.waiters
	}
	return 0
}

// Cgroup is a container's cgroup.
type Cgroup = cgroup

// LocateCgroup, CheckMounts and CheckCredentials read texts of /proc.
var (
	LocateCgroup     = locateCgroup
	CheckMounts      = checkMounts
	CheckCredentials = checkCredentials
	PullReason       = pullReason
	OneLine          = oneLine
)

// NewCgroup is one of version 2 in dir, or of version 1 with every controller there.
func NewCgroup(dir string, v2 bool) Cgroup {
	c := cgroup{v2: v2, dirs: map[string]string{"": dir}}
	for _, name := range controllers {
		c.dirs[name] = dir
	}
	return c
}

// V2 and Dirs show what was found.
func (c cgroup) V2() bool                { return c.v2 }
func (c cgroup) Dirs() map[string]string { return c.dirs }

// The rest are the operations on it.
func (c cgroup) SetMemory(bytes int64) error     { return c.setMemory(bytes) }
func (c cgroup) SetCPU(nano int64) error         { return c.setCPU(nano) }
func (c cgroup) LimitLoopback(bytes int64) error { return c.limitLoopback(bytes) }
func (c cgroup) Freeze(frozen bool) error        { return c.freeze(frozen) }
func (c cgroup) IsFrozen() (bool, error)         { return c.isFrozen() }
func (c cgroup) Stats() (boxed.Stats, error)     { return c.stats() }

// Describe is what is taken out of the engine's own description.
func Describe(info system.Info) (arch string, cgroup int, systemd bool, sharesKernel map[string]bool, problems []string) {
	e := describe(info)
	return e.arch, e.cgroup, e.systemd, e.sharesKernel, e.problems
}

// SpecOf is the container that a box becomes under a runtime.
func SpecOf(box sandbox.Box, sharesKernel bool, envNames, labelNames, volumes []string) (*container.Config, *container.HostConfig) {
	s := containerSpec{
		box: box, image: &imageConfig{envNames: envNames, labelNames: labelNames, volumes: volumes}, instance: "i",
		runtime: "r", seccomp: "{}", sharesKernel: sharesKernel,
	}
	return s.config(), s.hostConfig()
}

// Wanted are mounts to be checked for: a tmpfs and a bind.
func Wanted(tmpfs, bind string) map[string]mount.Type {
	return map[string]mount.Type{tmpfs: mount.TypeTmpfs, bind: mount.TypeBind}
}
