package docker

// Forget drops what the driver remembers of a container, as a restart would.
func (d *Driver) Forget(id string) { d.forget(id) }

// DataDir is where probes make their directories.
func (d *Driver) DataDir() string { return d.cfg.DataDir }

// Numbers are limits as the kernel has them; 0 where it has none.
type Numbers struct{ Swap, Quota, Loopback int64 }

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
