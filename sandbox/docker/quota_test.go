package docker_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// quotas are what the kernel counts by user.
var quotas = []string{"inotify", "watches", "processes", "signals", "timers", "queues", "flight", "pipes", "memlock"}

// I3: what the kernel counts by user is a sandbox's own. facts.md: under one uid
// one took all inotify instances, message queues, processes, pending signals and
// descriptors in flight of the others, and shrank their pipes.
func TestQuotasByUserAreNotShared(t *testing.T) {
	onEveryKernel(t, func(t *testing.T, r *oci) {
		if !r.shares {
			t.Skip("gVisor's kernel counts within one sandbox only; of the host's it uses what its own user, root, may")
		}
		bringProbe(t, r)
		w := newWorld(t, r, func(c *sandbox.Config) {
			template := c.Templates[boxed.DefaultTemplate]
			template.Pool = 1
			c.Templates = map[string]boxed.Template{boxed.DefaultTemplate: template}
		})
		isWarm := func() bool { infos, _, _ := w.Pools(); return infos[0].Ready == 1 }
		eventually(t, "the pool is full", isWarm)
		greedy := w.create()
		eventually(t, "the pool is full", isWarm)
		victim := w.create()
		eventually(t, "the pool is full", isWarm)
		had := map[string]int{}
		for _, kind := range quotas {
			had[kind] = victim.takes(kind)
			if had[kind] == 0 {
				t.Errorf("there are no %s at all", kind)
			}
		}
		// Processes last: without any, nothing else can be begun.
		order := []string{"inotify", "watches", "timers", "signals", "queues", "flight", "pipes", "memlock", "processes"}
		for _, kind := range order {
			if kind == "watches" { // inotify's instances are gone by now; a watch takes one
				continue
			}
			j := greedy.begin("exhaust", kind, "stay")
			if !j.says(t, "\n") || (kind != "signals" && j.count() == 0) { // timers have taken the signals
				t.Errorf("%s: %q", kind, j.out.String())
			}
		}
		warm := w.create()
		if info, err := w.Get(warm.id); err != nil || !info.Warm {
			t.Errorf("this one was not warm: %+v, %v", info, err)
		}
		for name, b := range map[string]*inside{"a neighbour": victim, "a warm one": warm} {
			for _, kind := range quotas {
				// A probe is a process of some threads itself, sometimes one more.
				if got := b.takes(kind); got != had[kind] && !(kind == "processes" && got > had[kind]-8) {
					t.Errorf("%s has %d %s left, of %d", name, got, kind, had[kind])
				}
			}
		}
		t.Logf("of each: %v", had)
		for call, want := range map[string]string{"add_key": "ENOSYS", "request_key": "ENOSYS", "keyctl:0": "ENOSYS"} { // keyrings
			if got := victim.probe("call", call); !r.refuses(got, want) {
				t.Errorf("%s: %s", call, got)
			}
		}
	})
}

// takes is how many of a kind a sandbox can have.
func (b *inside) takes(kind string) int {
	b.w.t.Helper()
	out := b.probe("exhaust", kind)
	n, err := strconv.Atoi(out)
	if err != nil {
		b.w.t.Fatalf("%s: %q", kind, out)
	}
	return n
}

// count is the number that an exhausting job has said.
func (j *job) count() int {
	n, _ := strconv.Atoi(strings.TrimSpace(j.out.String())) // 0 is what a test objects to
	return n
}
