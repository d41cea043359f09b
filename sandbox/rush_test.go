package sandbox_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// Many who claim at once come to their first result a few at a time, and no
// sandbox is ended meanwhile. Who never runs anything holds up nobody.
func TestAFewOfManyClaimsComeToTheirResultAtATime(t *testing.T) {
	const callers = 40
	r := started(t, withPool(callers))
	r.eventually("the pool is full", func() bool { return r.readyOf(boxed.DefaultTemplate) == callers })
	var running, most atomic.Int64
	r.driver.SetProgram("work", func(*sandboxtest.Proc) int {
		n := running.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(10 * time.Millisecond)
		running.Add(-1)
		return 0
	})
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			s := r.create()
			if i%4 == 0 { // claims, and thinks
				return
			}
			if _, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"work"}}); err != nil {
				t.Error(err)
			}
			if err := r.Destroy(t.Context(), s.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// A machine that is slow lets turns pass by.
	if m := most.Load(); m > max(callers/2, int64(sandbox.RushSlots())) {
		t.Errorf("%d first execs at once", m)
	}
}
