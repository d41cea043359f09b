package docker_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// hostileAgents are the ways in which an agent that was taken over may speak,
// and whether the daemon can know: who is only slow or silent is not told from
// one that is paused, and must cost nothing.
var hostileAgents = map[string]struct{ breach bool }{
	"pings": {true}, "streams": {true}, "window updates": {true}, "resets": {true},
	"empty frames": {true}, "filled windows": {true}, "noise": {true}, "go away": {}, "a byte a second": {}, "silence": {},
}

// I7: from a real sandbox whose first process is not the agent but floods: the
// daemon grows by at most 16 MiB, an exec elsewhere goes on, the sandbox ends
// failed: agent_protocol. facts.md: without the guard the daemon took 4 GiB.
func TestAHostileAgentEndsItsSandboxAndNothingElse(t *testing.T) {
	needDocker(t)
	r := onRunc() // the daemon's side is the same whatever runs the other
	bringProbe(t, r)
	good := newWorld(t, r)
	neighbour := good.create()
	neighbour.works("its start")
	quiet := neighbour.median(t)
	for how, want := range hostileAgents {
		t.Run(how, func(t *testing.T) {
			if !want.breach {
				t.Parallel() // nothing happens, for long
			}
			image := "boxed-test/hostile-agent:" + label(how)
			importImage(t, image, tree(t, map[string]string{"hostile": how}))
			w := newWorld(t, r, func(c *sandbox.Config) { c.Agent = guestProgram })
			w.image = image
			b := w.create()
			stop := grown()
			if err := syscall.Kill(b.container().PID, syscall.SIGUSR1); err != nil {
				t.Fatal(err)
			}
			// Calls under way are what a flood can answer.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			asked := make(chan error, 1)
			go func() {
				_, err := w.Exec(ctx, b.id, boxed.ExecRequest{Args: []string{"x"}})
				asked <- err
			}()
			beside := neighbour.median(t)
			if want.breach {
				wait, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				end, err := w.Wait(wait, b.id, boxed.StateFailed)
				if err != nil || end.State != boxed.StateFailed || end.Reason != boxed.EndAgentProtocol {
					t.Errorf("it ended %+v, %v", end, err)
				}
			}
			if err := <-asked; err == nil {
				t.Error("an exec in it ended well")
			}
			heap, goroutines := stop()
			t.Logf("the daemon grew by %d KiB and %d goroutines; exec elsewhere %v, quiet %v", heap>>10, goroutines, beside, quiet)
			if heap > 16<<20 || goroutines > 200 {
				t.Errorf("the daemon grew by %d MiB and %d goroutines", heap>>20, goroutines)
			}
			if beside > 10*quiet+time.Second {
				t.Errorf("an exec elsewhere takes %v, quiet %v", beside, quiet)
			}
			if err := w.Destroy(t.Context(), b.id); err != nil && !errors.Is(err, boxed.CodeGone) {
				t.Errorf("destroy: %v", err)
			}
			neighbour.works(how)
		})
	}
}

func label(text string) string {
	out := []byte(text)
	for i, c := range out {
		if c == ' ' {
			out[i] = '-'
		}
	}
	return string(out)
}

// median is the median time of a few quick execs.
func (b *inside) median(t *testing.T) time.Duration {
	t.Helper()
	var all []time.Duration
	for range 9 {
		began := time.Now()
		b.works("nothing")
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// grown samples this process, which is the daemon here, until stopped.
func grown() (stop func() (heap uint64, goroutines int64)) {
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	routines := int64(runtime.NumGoroutine())
	var heap atomic.Uint64
	var most atomic.Int64
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			if now.HeapInuse > before.HeapInuse {
				heap.Store(max(heap.Load(), now.HeapInuse-before.HeapInuse))
			}
			most.Store(max(most.Load(), int64(runtime.NumGoroutine())-routines))
			select {
			case <-done:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	return func() (uint64, int64) {
		close(done)
		<-ended
		return heap.Load(), most.Load()
	}
}
