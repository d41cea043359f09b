package sandbox_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// withTemplate adds a template with a pool.
func withTemplate(name, image, runtime string, pool int) func(*sandbox.Config) {
	return func(c *sandbox.Config) {
		c.Templates[name] = boxed.Template{Name: name, Image: image, Runtime: runtime, Limits: boxed.DefaultLimits(), Pool: pool}
	}
}

// untilDone is a fault that hangs for as long as its caller waits.
func untilDone(ctx context.Context, _ string) error {
	<-ctx.Done()
	return ctx.Err()
}

func (r *rig) readyOf(template string) int {
	infos, _, _ := r.Pools()
	for _, p := range infos {
		if p.Template == template {
			return p.Ready
		}
	}
	return 0
}

// The pull of one template's image may take a quarter of an hour.
func TestAPullHoldsNoOtherPoolUp(t *testing.T) {
	r := newRig(t, withPool(1), withTemplate("a-slow-one", "slow", "", 1))
	r.driver.Fail(sandboxtest.Image, func(ctx context.Context, ref string) error {
		if ref == "slow" {
			return untilDone(ctx, ref)
		}
		return nil
	})
	r.run()
	r.eventually("the other pool is full", func() bool { return r.readyOf(boxed.DefaultTemplate) == 1 })
	if s := r.create(); !s.Warm {
		t.Errorf("missed: %s", s.WarmMiss)
	}
	r.eventually("it is filled again", func() bool { return r.readyOf(boxed.DefaultTemplate) == 1 })
}

func TestAnImageThatCannotBeHadIsNotAskedForAllTheTime(t *testing.T) {
	r := newRig(t, withPool(1))
	r.driver.Fail(sandboxtest.Image, func(context.Context, string) error { return errors.New("no route") })
	r.run()
	r.eventually("it says why", func() bool { infos, _, _ := r.Pools(); return infos[0].Problem == "no route" })
	tries := r.driver.Calls(sandboxtest.Image)
	for range 20 {
		r.Refresh(t.Context())
	}
	if n := r.driver.Calls(sandboxtest.Image); n != tries {
		t.Errorf("%d more tries", n-tries)
	}
	r.driver.Fail(sandboxtest.Image, nil)
	r.advance(time.Minute)
	r.Refresh(t.Context())
	r.waitWarm(1)
	if infos, _, _ := r.Pools(); infos[0].Problem != "" {
		t.Errorf("it still says %q", infos[0].Problem)
	}
}

// Who names an image and no runtime wants the node's runtime, not that of a
// template which happens to have the image.
func TestAClaimByImageHeedsTheRuntime(t *testing.T) {
	byImage := func(s *boxed.Spec) { s.Template = "" }
	r := started(t, withTemplate("a-safer-one", testImage, sandboxtest.Runtime, 1))
	r.waitWarm(1)
	if s := r.create(byImage); s.Warm || s.WarmMiss != "runtime" {
		t.Errorf("warm %t, miss %q", s.Warm, s.WarmMiss)
	}
	if s := r.create(byImage, func(s *boxed.Spec) { s.Runtime = sandboxtest.Runtime }); !s.Warm {
		t.Errorf("miss %q", s.WarmMiss)
	}
	// Another template with the image fits.
	r.end()
	withTemplate("plain", testImage, "", 1)(&r.cfg)
	r.run()
	r.waitWarm(2)
	if s := r.create(byImage); !s.Warm {
		t.Errorf("miss %q", s.WarmMiss)
	}
}

// That a sandbox of the pool dies is not its claimer's affair.
func TestAWarmSandboxThatDiesAtItsClaimIsReplaced(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	r.driver.Fail(sandboxtest.Limit, func(_ context.Context, container string) error {
		r.driver.Crash(r.driver.Boxes()[container].ID, 1, false)
		return errors.New("it does not run")
	})
	s := r.create(func(s *boxed.Spec) { s.Limits.MemoryBytes *= 2 })
	if s.Warm || s.WarmMiss != "died" {
		t.Errorf("warm %t, miss %q", s.Warm, s.WarmMiss)
	}
	r.works(s.ID)
	if _, _, misses := r.Pools(); misses["died"] != 1 {
		t.Errorf("misses %v", misses)
	}
}

func TestAClaimerThatHasLeftGetsNoSandbox(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := r.Create(ctx, "ann", r.spec(), func(sandbox.Admission) error { cancel(); return nil })
	wantCode(t, err, boxed.CodeCanceled)
	r.waitWarm(1)
	r.left(1)
}

// Nobody is told of a sandbox that a crash of the daemon would forget.
func TestWhatIsNotDurableIsNotAnnounced(t *testing.T) {
	for name, pool := range map[string]int{"warm": 1, "cold": 0} {
		t.Run(name, func(t *testing.T) {
			r := started(t, withPool(pool))
			r.waitWarm(pool)
			r.records.Fail(func(string, sandbox.Record) error { return errors.New("boom") })
			if _, err := r.tryCreate(); err == nil {
				t.Fatal("it was made")
			}
			r.records.Fail(nil)
			r.advance(time.Minute)
			r.Sweep()
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, e := range r.events {
				if e.Type == boxed.EventCreated {
					t.Error("it was announced")
				}
			}
		})
	}
}

// The engine may be slow to say what the image is now; what is there serves.
func TestWarmSandboxesServeAtOnceAfterARestart(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	r.end()
	r.driver.Fail(sandboxtest.Image, untilDone)
	r.run()
	r.waitWarm(1)
	if s := r.create(); !s.Warm {
		t.Errorf("missed: %s", s.WarmMiss)
	}
}

// But not what the configuration would no longer make.
func TestWarmSandboxesOfAnotherConfigurationAreNotAdopted(t *testing.T) {
	for name, change := range map[string]func(*boxed.Template){
		"image":  func(t *boxed.Template) { t.Image = "other" },
		"limits": func(t *boxed.Template) { t.Limits.Processes++ },
	} {
		t.Run(name, func(t *testing.T) {
			r := started(t, withPool(1))
			r.waitWarm(1)
			r.end()
			r.driver.Fail(sandboxtest.Image, untilDone)
			tpl := r.cfg.Templates[boxed.DefaultTemplate]
			change(&tpl)
			r.cfg.Templates = map[string]boxed.Template{boxed.DefaultTemplate: tpl}
			r.run()
			r.nothingLeft()
		})
	}
}

// An image may take long to come, and until then a create reserves nothing.
func TestCreatesThatWaitForImagesAreBounded(t *testing.T) {
	r := newRig(t)
	r.make()
	r.SetPullPatience(20 * time.Millisecond)
	r.begin()
	r.eventually("it has recovered", r.Recovered)
	r.driver.Fail(sandboxtest.Image, untilDone)
	ctx, cancel := context.WithCancel(t.Context())
	begun, ended := 0, make(chan error, 64)
	begin := func(owner, image string) {
		before := r.driver.Calls(sandboxtest.Image)
		begun++
		go func() {
			_, err := r.Create(ctx, owner, r.spec(func(s *boxed.Spec) { s.Template, s.Image = "", image }), anybody)
			ended <- err
		}()
		r.eventually("it waits", func() bool { return r.driver.Calls(sandboxtest.Image) > before })
	}
	refused := func(owner, image string) error {
		_, err := r.Create(ctx, owner, r.spec(func(s *boxed.Spec) { s.Template, s.Image = "", image }), anybody)
		return err
	}
	for _, image := range []string{"a", "b", "c", "d", "a"} { // one twice: that is one pull
		begin("ann", image)
	}
	wantCode(t, refused("ann", "e"), boxed.CodeQuota, "wait")
	for _, owner := range []string{"bob", "cid", "dot"} {
		for _, image := range []string{"a", "b", "c", "d"} {
			begin(owner, image)
		}
	}
	wantCode(t, refused("eve", "a"), boxed.CodeNotReady, "try again")
	cancel()
	for range begun {
		wantCode(t, <-ended, boxed.CodeCanceled)
	}
	r.driver.Fail(sandboxtest.Image, nil)
	r.create()
}

// A sandbox that dies while it is claimed is its claimer's or nobody's, and its
// claimer gets another one.
func TestAClaimAgainstADeath(t *testing.T) {
	r := started(t, withPool(1), func(c *sandbox.Config) { c.LastUID = 265535 })
	for range 20 {
		r.waitWarm(1)
		warm := r.driver.Boxes()
		var wg sync.WaitGroup
		for _, box := range warm {
			wg.Go(func() { r.driver.Crash(box.ID, 1, false) })
		}
		s, err := r.tryCreate()
		wg.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		r.advance(time.Minute)
	}
	all, err := r.records.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range all {
		if rec.Pooled != (rec.Sandbox.Owner == "") || rec.Pooled && rec.Sandbox.Warm {
			t.Errorf("%+v", rec)
		}
	}
}
