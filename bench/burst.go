package main

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

var burstColumns = []string{"round", "first_exec_ms", "total_ms"}

// Names of the systems of a burst.
const (
	burstFull  = "boxed-pool-full"
	burstEmpty = "boxed-pool-empty"
)

// burst has many callers ask at the same moment, once with a warm sandbox for
// each of them and once with none.
func burst(ctx context.Context, r *rig, s *sheet) error {
	callers := r.count(100, 100, 20)
	// Small ones, so that a hundred fit into any machine.
	small := map[string]any{"memory": "128MiB"}
	for _, pool := range []int{callers, 0} {
		n, err := r.startNode(ctx, settings{pool: pool, limits: small, memoryShare: 1, withoutBounds: true})
		if err != nil {
			return err
		}
		name, want := burstFull, wantWarm
		if pool == 0 {
			name, want = burstEmpty, wantCold
		}
		err = r.bursts(ctx, s, n, n.life(name, boxed.Spec{}, want), callers, r.count(3, 1, 1))
		n.close()
		if err != nil {
			return err
		}
	}
	if !r.busy { // where it takes minutes
		if err := r.bursts(ctx, s, nil, r.hardened().life(dockerHardened), callers, 1); err != nil {
			return err
		}
	}
	for _, system := range s.systems() {
		s.summarize(system, "first_exec", "ms", s.column(system, "first_exec_ms", nil))
		s.summarize(system, "total", "ms", s.column(system, "total_ms", nil))
	}
	s.failures()
	return nil
}

// listen follows the node's events until the returned function is called, which
// says how many sandboxes were told a place since.
func (n *node) listen(ctx context.Context) (heard func() int) {
	ctx, stop := context.WithCancel(ctx)
	told, done := map[boxed.ID]bool{}, make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range n.Events(ctx, "") {
			if err != nil {
				return
			}
			if e.Type == boxed.EventQueued && e.QueuePlace > 0 {
				told[e.Sandbox] = true
			}
		}
	}()
	return func() int {
		pause(ctx, time.Second) // an event may come after the answer to its create
		stop()
		<-done
		return len(told)
	}
}

// toldShare adds how many of those who had to wait were told their place: all
// but those that are made at once, two or as many as there are cores.
func (s *sheet) toldShare(told, callers, rounds int) {
	waited := rounds * (callers - max(2, runtime.NumCPU()))
	if waited > 0 {
		s.number(burstEmpty, "told_place_share", "share", waited, min(1, float64(told)/float64(waited)))
	}
}

func (r *rig) bursts(ctx context.Context, s *sheet, n *node, system life, callers, rounds int) error {
	told := 0
	for round := range rounds {
		heard := func() int { return 0 }
		if n != nil {
			if err := n.settle(ctx, 10*time.Minute); err != nil {
				return err
			}
			heard = n.listen(ctx)
		}
		pause(ctx, time.Second)
		release := make(chan struct{})
		var all sync.WaitGroup
		for i := range callers {
			all.Go(func() {
				<-release
				values, err := system.once(ctx)
				s.add(i, system.name, err, float64(round), values[0]+values[1], values[3])
			})
		}
		began := time.Now()
		close(release)
		all.Wait()
		took := time.Since(began)
		told += heard()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.say("%s: %d callers served in %s, %d trials failed so far", system.name, callers, took.Round(time.Millisecond), s.failed())
	}
	if system.name == burstEmpty {
		s.toldShare(told, callers, rounds)
	}
	return nil
}
