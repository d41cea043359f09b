package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

var throughputColumns = []string{"concurrency", "window_s", "end_s", "create_ms", "exec_ms", "destroy_ms", "total_ms"}

// stage is one stretch of work at one concurrency.
type stage struct {
	concurrency int
	run         time.Duration // first, and not counted: by then a pool that was full is drained, and all is as it stays
	window      time.Duration
}

// levels are the numbers of callers that may be measured.
var levels = []int{1, 2, 4, 8, 16, 32}

// throughput measures how many sandboxes a second get from create over a first
// exec to destroy, with several callers at once. Whatever a system puts off it
// pays for within the window.
func throughput(ctx context.Context, r *rig, s *sheet) error {
	n, err := r.startNode(ctx, settings{pool: defaultPool, withoutBounds: true})
	if err != nil {
		return err
	}
	defer n.close()
	ours, err := r.ours()
	if err != nil {
		return err
	}
	systems := []life{r.hardened().life(dockerHardened), ours.life(dockerOurs), n.life(boxedPool, boxed.Spec{}, either)}
	chosen, window := levels, 10*time.Second
	if r.busy {
		chosen = []int{2, 8}
	}
	if r.options.quick {
		chosen, window = []int{2, 8}, 3*time.Second
	}
	t := &turnover{r: r, s: s, n: n, best: map[string]stage{}, bestRate: map[string]float64{}}
	random := rand.New(rand.NewPCG(9, 10))
	for _, level := range chosen {
		for _, at := range random.Perm(len(systems)) {
			if err := t.measure(ctx, systems[at], stage{level, window / 4, window}, fmt.Sprintf("_c%d", level)); err != nil {
				return err
			}
		}
	}
	long := time.Duration(r.count(60, 20, 5)) * time.Second
	for _, at := range random.Perm(len(systems)) {
		best := t.best[systems[at].name]
		if best.concurrency == 0 {
			return fmt.Errorf("%s: no trial ended well", systems[at].name)
		}
		if err := t.measure(ctx, systems[at], stage{best.concurrency, window / 2, long}, "_sustained"); err != nil {
			return err
		}
		s.number(systems[at].name, "sustained_concurrency", "callers", 1, float64(best.concurrency))
	}
	s.failures()
	return nil
}

// turnover keeps what the stages found.
type turnover struct {
	r        *rig
	s        *sheet
	n        *node
	trials   int
	best     map[string]stage // by system
	bestRate map[string]float64
}

// measure runs one stage of one system, and adds its rate, times and hits.
func (t *turnover) measure(ctx context.Context, system life, st stage, suffix string) error {
	if err := t.n.settle(ctx, trialLimit); err != nil {
		return err
	}
	before, err := t.n.NodeInfo(ctx)
	if err != nil {
		return err
	}
	ends, totals := t.work(ctx, system, st)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	after, err := t.n.NodeInfo(ctx)
	if err != nil {
		return err
	}
	rate, low, high := rateOf(ends, st.window)
	if rate > t.bestRate[system.name] {
		t.best[system.name], t.bestRate[system.name] = st, rate
	}
	t.r.say("%s with %d callers: %.2f a second", system.name, st.concurrency, rate)
	t.s.rows = append(t.s.rows, row{t.s.experiment, system.name, "rate" + suffix, "1/s", len(ends), rate, math.NaN(), math.NaN(), low, high})
	t.s.summarize(system.name, "total"+suffix, "ms", totals)
	hits := after.WarmHits - before.WarmHits
	claims := hits
	for why, n := range after.WarmMisses {
		claims += n - before.WarmMisses[why]
	}
	if claims > 0 {
		t.s.number(system.name, "pool_hit_share"+suffix, "share", int(claims), float64(hits)/float64(claims))
	}
	return nil
}

// work lets the callers loop, and returns the good trials that ended in the
// window: when, in seconds from its begin, and what they took.
func (t *turnover) work(ctx context.Context, system life, st stage) (ends, totals []float64) {
	var mu sync.Mutex
	var callers sync.WaitGroup
	from := time.Now().Add(st.run)
	to := from.Add(st.window)
	for range st.concurrency {
		callers.Go(func() {
			for ctx.Err() == nil && time.Now().Before(to) {
				values, err := system.once(ctx)
				end := time.Since(from)
				if end < 0 || end >= st.window || ctx.Err() != nil {
					continue
				}
				mu.Lock()
				t.trials++
				t.s.add(t.trials, system.name, err, slices.Concat([]float64{float64(st.concurrency), st.window.Seconds(), end.Seconds()}, values)...)
				if err == nil {
					ends, totals = append(ends, end.Seconds()), append(totals, values[3])
				}
				mu.Unlock()
				if err != nil {
					t.r.say("%s: %v", system.name, err)
					pause(ctx, rest) // a node that refuses everything does so very fast
				}
			}
		})
	}
	callers.Wait()
	return ends, totals
}

// rateOf is how many a second ended in a window, and the interval of that from
// its whole seconds.
func rateOf(ends []float64, window time.Duration) (rate, low, high float64) {
	seconds := make([]float64, int(window.Seconds()))
	for _, end := range ends {
		if i := int(end); i < len(seconds) {
			seconds[i]++
		}
	}
	low, high = bootstrap(seconds, mean)
	return float64(len(ends)) / window.Seconds(), low, high
}
