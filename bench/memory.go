package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// agent_anon_kib is the part of agent_rss_kib that is the agent's own; the rest
// is pages of its program, which all agents of a host share.
var memoryColumns = []string{"agent_rss_kib", "agent_anon_kib", "memcg_kib", "shim_pss_kib"}

// Names of what memory is measured of.
const (
	memoryPooled = "boxed-pooled" // warm, and never used
	memoryUsed   = "boxed-used"   // after execs, and idle since
	memoryIdle   = "boxed-idle"   // one of many that were made and not used
)

// usedExecs is how many execs a used sandbox has had.
const usedExecs = 100

// memory measures what a sandbox costs that does nothing: its agent, what the
// kernel counts against its limit (the agent is in it), and the engine's shim.
func memory(ctx context.Context, r *rig, s *sheet) error {
	pooled := r.count(8, 8, 2)
	n, err := r.startNode(ctx, settings{pool: pooled, withoutBounds: true, memoryShare: 0.8})
	if err != nil {
		return err
	}
	err = r.pooledAndUsed(ctx, s, n)
	n.close()
	if err != nil {
		return err
	}
	if err := r.idle(ctx, s); err != nil {
		return err
	}
	for _, system := range s.systems() {
		for _, name := range memoryColumns {
			s.summarize(system, name, "KiB", s.column(system, name, nil))
		}
	}
	s.failures()
	return nil
}

func (r *rig) pooledAndUsed(ctx context.Context, s *sheet, n *node) error {
	idle := time.Duration(r.count(60, 60, 5)) * time.Second
	pause(ctx, idle/6)
	ids, err := n.containers(ctx)
	if err != nil {
		return err
	}
	r.weigh(ctx, s, memoryPooled, ids)
	used := make([]string, r.count(4, 4, 2))
	for i := range used {
		box, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL})
		if err != nil {
			return err
		}
		used[i] = "boxed-" + string(box.ID)
		for e := range usedExecs {
			if err := n.anyExec(ctx, box.ID, e); err != nil {
				return fmt.Errorf("exec %d: %w", e, err)
			}
		}
	}
	r.say("%d sandboxes have had %d execs each and idle for %s", len(used), usedExecs, idle)
	pause(ctx, idle)
	r.weigh(ctx, s, memoryUsed, used)
	return ctx.Err()
}

// anyExec is one of the things that people do.
func (n *node) anyExec(ctx context.Context, id boxed.ID, e int) error {
	if e%2 == 0 {
		return n.printOK(ctx, string(id))
	}
	var count counter
	status, err := n.Exec(ctx, id, boxed.ExecRequest{Args: []string{"head", "-c", "100000", "/dev/zero"}, Stdout: &count})
	switch {
	case err != nil:
		return err
	case count.n != 100_000:
		return fmt.Errorf("%d bytes came of 100000", count.n)
	}
	return exited(status)
}

// weigh adds a trial for each container.
func (r *rig) weigh(ctx context.Context, s *sheet, system string, containers []string) {
	for i, id := range containers {
		values, err := r.weights(ctx, id)
		s.add(i, system, err, values...)
	}
}

func unweighed() []float64 { return []float64{math.NaN(), math.NaN(), math.NaN(), math.NaN()} }

func (r *rig) weights(ctx context.Context, id string) ([]float64, error) {
	values := unweighed()
	c, err := r.engine.ContainerInspect(ctx, id)
	if err != nil {
		return values, err
	}
	for i, look := range []func(int) (float64, error){rss, anon, memcg, shimPSS} {
		if values[i], err = look(c.State.Pid); err != nil {
			return values, err
		}
	}
	return values, nil
}

// idle makes very many sandboxes that do nothing, looks what the host has less
// of, and runs a program in each.
func (r *rig) idle(ctx context.Context, s *sheet) error {
	many := r.count(300, 300, 20)
	n, err := r.startNode(ctx, settings{limits: map[string]any{"memory": "128MiB"}, withoutBounds: true})
	if err != nil {
		return err
	}
	defer n.close()
	before, err := memAvailable()
	if err != nil {
		return err
	}
	ids, errs := make([]boxed.ID, many), make([]error, many)
	began := time.Now()
	each(many, 4, func(i int) {
		if ctx.Err() != nil {
			return
		}
		box, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL})
		if errs[i] = err; err == nil {
			ids[i] = box.ID
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.number(memoryIdle, "create_all", "s", many, time.Since(began).Seconds())
	r.say("%d sandboxes made in %s", many, time.Since(began).Round(time.Second))
	pause(ctx, 5*time.Second)
	after, err := memAvailable()
	if err != nil {
		return err
	}
	s.number(memoryIdle, "host_kib_per_sandbox", "KiB", many, (before-after)/float64(many))
	r.weighIdle(ctx, s, n, ids, errs)
	return ctx.Err()
}

// weighIdle weighs each and runs a program in it: a sandbox that is there and
// cannot be used is a failed trial.
func (r *rig) weighIdle(ctx context.Context, s *sheet, n *node, ids []boxed.ID, errs []error) {
	var mu sync.Mutex
	var took []float64
	began := time.Now()
	each(len(ids), 2, func(i int) {
		values, err := unweighed(), errs[i]
		if err == nil {
			values, err = r.weights(ctx, "boxed-"+string(ids[i]))
		}
		if err == nil {
			from := time.Now()
			err = n.printOK(ctx, string(ids[i]))
			mu.Lock()
			took = append(took, ms(from))
			mu.Unlock()
		}
		s.add(i, memoryIdle, err, values...)
	})
	s.summarize(memoryIdle, "exec", "ms", took)
	r.say("a program ran in each of %d, in %s, %d failed", len(ids), time.Since(began).Round(time.Second), s.failed())
}
