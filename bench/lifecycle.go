package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/boxed-mesh/boxed"
)

var lifecycleColumns = []string{"create_ms", "exec_ms", "destroy_ms", "total_ms"}

// rest is between any two trials: what the kernel does behind (a network
// namespace that goes, pages that are freed) is over by then.
const rest = 300 * time.Millisecond

// lifecycle takes every system from nothing to the first result of python and
// back, as its caller sees it.
func lifecycle(ctx context.Context, r *rig, s *sheet) error {
	n, err := r.startNode(ctx, settings{pool: defaultPool})
	if err != nil {
		return err
	}
	defer n.close()
	ours, err := r.ours()
	if err != nil {
		return err
	}
	systems := []life{
		r.stock().life(dockerStock), r.hardened().life(dockerHardened), ours.life(dockerOurs),
		n.life(boxedCold, cold(), wantCold), n.life(boxedWarm, boxed.Spec{}, wantWarm),
	}
	before := func() error { return n.settle(ctx, trialLimit) }
	if err := r.rounds(ctx, s, systems, before, r.trials(100, 15, 8), r.count(3, 2, 1)); err != nil {
		return err
	}
	for _, system := range s.systems() {
		for _, part := range []string{"create", "exec", "destroy", "total"} {
			s.summarize(system, part, "ms", s.column(system, part+"_ms", nil))
		}
	}
	s.failures()
	return nil
}

// rounds takes every system once in each round, in an order that is drawn anew,
// after some rounds that do not count.
func (r *rig) rounds(ctx context.Context, s *sheet, systems []life, before func() error, rounds, warmUp int) error {
	random := rand.New(rand.NewPCG(3, 4))
	for round := -warmUp; round < rounds; round++ {
		for _, at := range random.Perm(len(systems)) {
			if err := before(); err != nil {
				return err
			}
			pause(ctx, rest)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			values, err := systems[at].once(ctx)
			if round >= 0 {
				s.add(round, systems[at].name, err, values...)
			}
			if err != nil {
				r.say("%s: %v", systems[at].name, err)
			}
		}
		if (round+1)%10 == 0 {
			r.say("round %d of %d", round+1, rounds)
		}
	}
	return nil
}

// once is one trial: create, exec, destroy and all of it, in milliseconds. What
// was not reached is NaN. Whatever fails, what was made is destroyed.
func (l life) once(ctx context.Context) (values []float64, err error) {
	limited, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	values = []float64{math.NaN(), math.NaN(), math.NaN(), math.NaN()}
	begin := time.Now()
	id, err := l.create(limited)
	values[0] = ms(begin)
	if err == nil {
		from := time.Now()
		err = l.exec(limited, id)
		values[1] = ms(from)
	}
	if id != "" {
		// Also after a Ctrl-C, which has ended limited.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), trialLimit)
		defer cancel()
		from := time.Now()
		err = errors.Join(err, l.destroy(ending, id))
		values[2] = ms(from)
	}
	values[3] = ms(begin)
	return values, err
}
