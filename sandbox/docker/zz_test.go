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
	for _, sys := range []string{"4096 32768 131072|4096 16384 131072", "4096 16384 65536|4096 16384 65536", "4096 16384 131072|4096 8192 131072", "4096 16384 131072|4096 4096 131072"} {
		g := start(t, d, img, func(b *sandbox.Box) { b.Limits.MemoryBytes = 256<<20; b.Limits.OpenFiles = 4096; b.Limits.CPUs=2 })
		kind := "tcp"
		out, err := exec.Command("nsenter", "-t", d.Proc(g.id)[6:], "-n", "sysctl", "-w", "net.ipv4.tcp_wmem="+strings.Split(sys,"|")[1], "net.ipv4.tcp_rmem="+strings.Split(sys,"|")[0]).CombinedOutput()
		t.Logf("%s %v", out, err)
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
