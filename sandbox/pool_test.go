package sandbox_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

func TestAWarmSandboxServesAnyClaim(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	if len(r.List()) != 0 {
		t.Error("a warm sandbox is listed")
	}
	made := r.driver.Calls(sandboxtest.Create)
	s := r.create(func(s *boxed.Spec) {
		s.Name, s.Labels, s.Env = "mine", map[string]string{"a": "b"}, map[string]string{"E": "1"}
		s.Limits.MemoryBytes, s.Limits.CPUs = 600*boxed.MiB, 0.5
		s.Dir, s.Files = "/workspace/deep/er", []boxed.File{{Path: "f", Content: []byte("x")}}
		s.TTL, s.IdleTimeout = boxed.Duration(time.Minute), boxed.Duration(time.Second)
	})
	if !s.Warm || s.WarmMiss != "" || s.Owner != "ann" || s.Name != "mine" || s.State != boxed.StateRunning ||
		s.Limits.MemoryBytes != 600*boxed.MiB || !s.ExpiresAt.Equal(r.now().Add(time.Minute)) {
		t.Errorf("%+v", s)
	}
	if r.driver.Calls(sandboxtest.Limit) != 1 {
		t.Error("the limits were not written")
	}
	out, _ := r.exec(s.ID, "pwd")
	if out != "/workspace/deep/er\n" {
		t.Errorf("pwd: %q", out)
	}
	r.waitWarm(1) // and another takes its place
	if n := r.driver.Calls(sandboxtest.Create); n != made+1 {
		t.Errorf("%d containers made", n-made)
	}
	stats, err := r.Stats(t.Context(), s.ID)
	if err != nil || stats.MemoryLimit != 600*boxed.MiB {
		t.Errorf("%+v, %v", stats, err)
	}
	// One-shot: it is destroyed, never returned.
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.left(1)
	if ready, _ := r.ready(); ready != 1 {
		t.Errorf("%d ready", ready)
	}
}

// L15: one owner of one warm sandbox, under concurrent claims, 100 times.
func TestOneWarmSandboxHasOneClaimer(t *testing.T) {
	r := started(t, withPool(3), func(c *sandbox.Config) { c.LastUID = 265535 })
	for round := range 100 {
		r.waitWarm(3)
		var wg sync.WaitGroup
		ids := make(chan boxed.ID, 5)
		var warm atomic.Int32
		for range 5 {
			wg.Go(func() {
				s, err := r.Create(t.Context(), "ann", r.spec(), anybody)
				if err != nil {
					t.Errorf("round %d: %v", round, err)
					return
				}
				if s.Warm {
					warm.Add(1)
				}
				ids <- s.ID
			})
		}
		wg.Wait()
		close(ids)
		seen := map[boxed.ID]bool{}
		for id := range ids {
			if seen[id] {
				t.Fatalf("round %d: %s has two owners", round, id)
			}
			seen[id] = true
			if err := r.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if warm.Load() < 3 {
			t.Errorf("round %d: %d warm", round, warm.Load())
		}
		r.advance(time.Second)
	}
	_, hits, misses := r.Pools()
	if hits+misses["empty"] != 500 {
		t.Errorf("%d hits, misses %v", hits, misses)
	}
}

// L16: the size is a bound, also over a restart that finds some there.
func TestThePoolNeverHoldsMoreThanItsSize(t *testing.T) {
	var most atomic.Int32
	r := newRig(t, withPool(3))
	r.driver.Fail(sandboxtest.Start, func(context.Context, string) error {
		if n := int32(len(r.driver.Containers())); n > most.Load() {
			most.Store(n)
		}
		return nil
	})
	r.run()
	r.waitWarm(3)
	for range 5 {
		r.restart()
		r.waitWarm(3)
		r.left(3)
	}
	if most.Load() > 3 {
		t.Errorf("%d containers at once", most.Load())
	}
	if n := r.driver.Calls(sandboxtest.Create); n != 3 {
		t.Errorf("%d containers were made for a pool of 3", n)
	}
	// A smaller one ends what is too much.
	r.end()
	withPool(1)(&r.cfg)
	r.run()
	r.left(1)
	// And one that is no longer configured ends all.
	r.end()
	withPool(0)(&r.cfg)
	r.run()
	r.nothingLeft()
}

// L16: a changed image rolls the pool; an old one is never handed out.
func TestAChangedImageRollsThePool(t *testing.T) {
	r := started(t, withPool(2))
	r.waitWarm(2)
	r.driver.SetImage(testImage, "sha256:2")
	r.Refresh(t.Context())
	s := r.create()
	if s.ImageDigest != "sha256:2" {
		t.Errorf("it was given %s", s.ImageDigest)
	}
	r.waitWarm(2)
	r.left(3)
	for _, box := range r.driver.Boxes() {
		if box.Image.Digest != "sha256:2" {
			t.Errorf("%s is left", box.Image.Digest)
		}
	}
}

// A program of another version of the agent is not handed out warm.
func TestAnotherAgentRollsThePool(t *testing.T) {
	r := started(t, withPool(2))
	r.waitWarm(2)
	r.end()
	r.cfg.Agent = "/nonexistent/agent-2"
	r.run()
	r.waitWarm(2)
	r.left(2)
	for _, box := range r.driver.Boxes() {
		if box.Agent != r.cfg.Agent {
			t.Errorf("%s is left", box.Agent)
		}
	}
}

// Decision 9: every miss is counted by reason.
func TestMissesAreCountedByReason(t *testing.T) {
	r := started(t, withPool(1), func(c *sandbox.Config) {
		c.Templates["bare"] = boxed.Template{Name: "bare", Image: "other", Limits: boxed.DefaultLimits()}
	})
	r.driver.SetImage("other", "sha256:9")
	r.waitWarm(1)
	for want, change := range map[string]func(*boxed.Spec){
		"image":    func(s *boxed.Spec) { s.Template, s.Image = "", "other" },
		"template": func(s *boxed.Spec) { s.Template, s.Image = "bare", "other" },
		"limits":   func(s *boxed.Spec) { s.Limits.Processes = 99 },
	} {
		if s := r.create(change); s.Warm || s.WarmMiss != want {
			t.Errorf("want %s: %+v", want, s)
		}
	}
	// Less memory than the pool's tmpfs sizes allow.
	if s := r.create(func(s *boxed.Spec) { s.Limits.MemoryBytes = 256 * boxed.MiB }); s.WarmMiss != "limits" {
		t.Errorf("small memory: %q", s.WarmMiss)
	}
	// The template's image by its own name is warm too.
	if s := r.create(func(s *boxed.Spec) { s.Template = "" }); !s.Warm {
		t.Errorf("by image: %q", s.WarmMiss)
	}
	r.waitWarm(1)
	r.driver.Fail(sandboxtest.Start, func(ctx context.Context, _ string) error { return errors.New("no refill") })
	r.create()
	r.eventually("the refill fails", func() bool { infos, _, _ := r.Pools(); return infos[0].Problem != "" })
	r.driver.Fail(sandboxtest.Start, nil)
	if s := r.create(); s.WarmMiss != "empty" {
		t.Errorf("an empty pool: %q", s.WarmMiss)
	}
	_, hits, misses := r.Pools()
	if hits != 2 || misses["image"] != 1 || misses["template"] != 1 || misses["limits"] != 2 || misses["empty"] != 1 {
		t.Errorf("%d hits, misses %v", hits, misses)
	}
	// A refused create is no miss.
	_, err := r.Create(t.Context(), "ann", r.spec(func(s *boxed.Spec) { s.Template, s.Image = "", "other" }), func(sandbox.Admission) error {
		return boxed.Errorf(boxed.CodeQuota, "no")
	})
	wantCode(t, err, boxed.CodeQuota)
	if _, _, after := r.Pools(); after["image"] != 1 {
		t.Errorf("misses %v", after)
	}
}

// A pool that cannot be filled says why, and is tried again later, not at once.
func TestAPoolThatCannotBeFilledBacksOff(t *testing.T) {
	r := newRig(t, withPool(2))
	r.driver.Fail(sandboxtest.Start, func(context.Context, string) error { return errors.New("no start") })
	r.run()
	r.eventually("it says why", func() bool { infos, _, _ := r.Pools(); return infos[0].Problem != "" && infos[0].Filling == 0 })
	tries := r.driver.Calls(sandboxtest.Start)
	for range 20 {
		r.Refresh(t.Context())
	}
	if n := r.driver.Calls(sandboxtest.Start); n > tries+1 {
		t.Errorf("%d tries at once", n-tries)
	}
	r.nothingLeft()
	r.driver.Fail(sandboxtest.Start, nil)
	r.advance(2 * time.Minute)
	r.Refresh(t.Context())
	r.waitWarm(2)
	if infos, _, _ := r.Pools(); infos[0].Problem != "" {
		t.Errorf("it still says %q", infos[0].Problem)
	}
}

// Warm sandboxes give way to claimed ones, no more of them than is needed.
func TestThePoolKeepsToItsRoom(t *testing.T) {
	var room atomic.Int64
	each := boxed.DefaultLimits().MemoryBytes
	room.Store(2 * each)
	r := started(t, withPool(4), func(c *sandbox.Config) {
		c.PoolRoom = func(used boxed.Capacity) int64 { return room.Load() }
	})
	r.waitWarm(2)
	r.left(2)
	room.Store(each)
	r.Refresh(t.Context())
	r.waitWarm(1)
	r.left(1)
	if _, warm := r.Used(); warm.MemoryBytes != each {
		t.Errorf("warm hold %d", warm.MemoryBytes)
	}
	room.Store(10 * each)
	r.Refresh(t.Context())
	r.waitWarm(4)
}

// A warm sandbox that dies is replaced, and never handed out.
func TestADeadWarmSandboxIsReplaced(t *testing.T) {
	r := started(t, withPool(2))
	r.waitWarm(2)
	r.crashAll()
	s := r.create() // cold or of the refill, but alive
	r.works(s.ID)
	r.waitWarm(2)
	r.left(3)
}

// A crash that nobody has told us of is seen by the link.
func TestAClaimSkipsAWarmSandboxWithoutALink(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	r.driver.SetDown(true) // no events
	r.crashAll()
	r.driver.SetDown(false)
	s := r.create()
	if r.works(s.ID); s.Warm {
		t.Error("it was handed out")
	}
}

// crashAll ends every container, and waits until their links are seen to be gone.
func (r *rig) crashAll() {
	r.t.Helper()
	for _, box := range r.driver.Boxes() {
		r.driver.Crash(box.ID, 1, false)
		r.eventually("the link is gone", func() bool { return !r.Linked(string(box.ID)) })
	}
}

// A stop ends no warm sandbox: the next life takes them back.
func TestWarmSandboxesSurviveARestart(t *testing.T) {
	r := started(t, withPool(2))
	r.waitWarm(2)
	r.restart()
	r.waitWarm(2)
	if s := r.create(); !s.Warm {
		t.Errorf("missed: %s", s.WarmMiss)
	}
}

// L8: a kill at any step of a refill.
func TestAKillDuringARefillLeavesNothing(t *testing.T) {
	for _, point := range append(createSteps[:len(createSteps):len(createSteps)], "put starting") {
		t.Run(point, func(t *testing.T) {
			r := newRig(t, withPool(1))
			r.make()
			killed := r.killAt(func(step string) bool { return step == point })
			r.begin()
			r.eventually("it is killed", killed.Load)
			r.afterKill()
			r.waitWarm(1)
			r.left(1)
		})
	}
}
