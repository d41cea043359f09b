package docker_test

import (
	"os"
	"strings"
	"testing"
	"time"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed"
)

func avail() string {
	b, _ := os.ReadFile("/proc/meminfo")
	for l := range strings.Lines(string(b)) { if strings.HasPrefix(l, "MemAvailable") { return strings.TrimSpace(l) } }
	return ""
}

func TestZZ(t *testing.T) {
	d := newDriver(t)
	img := empty(t, d)
	for _, kind := range []string{"tcp", "udp", } {
		g := start(t, d, img, func(b *sandbox.Box) { b.Limits.MemoryBytes = 256<<20; b.Limits.OpenFiles = 4096; b.Limits.CPUs=2 })
		a := avail()
		ss0, _ := os.ReadFile("/proc/self/net/sockstat")
		g.conn.Write([]byte(`{"uid":234567,"argv":["self","hoard","`+kind+`","stay"],"many":25}`+"\n"))
		time.Sleep(15*time.Second)
		s, _ := d.Stats(t.Context(), g.id)
		r, _ := d.CgroupRead(g.id, "memory", "memory.kmem.tcp.usage_in_bytes")
		ss1, _ := os.ReadFile(d.Proc(g.id)+"/net/sockstat")
		t.Logf("%s: %s -> %s; cgroup %d MiB, tcpmem %s\n%s\n%s", kind, a, avail(), s.MemoryBytes>>20, r, ss0, ss1)
		d.Remove(t.Context(), g.id)
		time.Sleep(time.Second)
	}
	_ = boxed.MiB
}
