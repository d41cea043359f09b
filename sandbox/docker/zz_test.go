package docker_test

import (
	"os"
	"os/exec"
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
		g := start(t, d, img, func(b *sandbox.Box) { b.Limits.MemoryBytes = 256<<20; b.Limits.OpenFiles = 4096; b.Limits.CPUs=2 })
		g.conn.Write([]byte(`{"uid":234567,"argv":["self","orphan","3000"],"many":10}`+"\n"))
		for range 5 {
		time.Sleep(5*time.Second)
		r, _ := d.CgroupRead(g.id, "memory", "memory.kmem.tcp.usage_in_bytes")
		ss1, _ := os.ReadFile(d.Proc(g.id)+"/net/sockstat")
		s, _ := d.Stats(t.Context(), g.id)
		t.Logf("%s %d %s", r, s.MemoryBytes>>20, ss1)
		}
		d.Remove(t.Context(), g.id)
		for range 5 {
		time.Sleep(2*time.Second)
		ss1, _ := os.ReadFile("/proc/self/net/sockstat")
		t.Logf("after %s", ss1)
		}
	_ = boxed.MiB
	_ = exec.Command
}
