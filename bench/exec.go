package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"time"

	"github.com/boxed-mesh/boxed"
)

var execColumns = []string{"exec_true_ms", "python_print_ms"}

// pythonArgs is print('ok') as a program of the image, by which all systems can
// be compared; boxed's own way with code is in lifecycle.
var pythonArgs = []string{"python3", "-c", printOK}

// runs is a way to run a program in a sandbox or container that is there
// already, and to have what it writes.
type runs struct {
	name string
	exec func(ctx context.Context, w io.Writer, args ...string) error
	// code runs printOK as the system does it best; nil: as pythonArgs.
	code func(ctx context.Context, w io.Writer) error
}

// execs measures an exec of true, which is all overhead, and one of python,
// which is what people do.
func execs(ctx context.Context, r *rig, s *sheet) error {
	ways, done, err := r.ways(ctx)
	defer done()
	if err != nil {
		return err
	}
	rounds := r.trials(80, 12, 8)
	random := rand.New(rand.NewPCG(5, 6))
	for round := -2; round < rounds; round++ {
		for _, at := range random.Perm(len(ways)) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			pause(ctx, rest)
			for _, t := range ways[at].block(ctx) {
				if round >= 0 {
					s.add(round, ways[at].name, t.err, t.values...)
				}
				if t.err != nil {
					r.say("%s: %v", ways[at].name, t.err)
				}
			}
		}
		if (round+1)%20 == 0 {
			r.say("round %d of %d", round+1, rounds)
		}
	}
	for _, system := range s.systems() {
		s.summarize(system, "exec_true", "ms", s.column(system, "exec_true_ms", nil))
		s.summarize(system, "python_print", "ms", s.column(system, "python_print_ms", nil))
	}
	s.failures()
	return nil
}

// What a system cleans up after its last exec is not to be counted to the next
// system: a block of trials begins after a pause, and with a trial that is not
// counted.
const blockSize = 5

type execTrial struct {
	values []float64
	err    error
}

// block is blockSize trials: all of true, then all of python.
func (w runs) block(ctx context.Context) []execTrial {
	ctx, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	trials := make([]execTrial, blockSize)
	python := w.code
	if python == nil {
		python = func(ctx context.Context, out io.Writer) error { return w.exec(ctx, out, pythonArgs...) }
	}
	for i, program := range []struct {
		run  func(context.Context, io.Writer) error
		want string
	}{
		{func(ctx context.Context, out io.Writer) error { return w.exec(ctx, out, "/bin/true") }, ""},
		{python, "ok\n"},
	} {
		for n := -1; n < blockSize; n++ {
			var out bytes.Buffer
			from := time.Now()
			err := program.run(ctx, &out)
			took := ms(from)
			if err == nil && out.String() != program.want {
				err = fmt.Errorf("it wrote %q", out.String())
			}
			if n < 0 && err == nil {
				continue
			}
			t := &trials[max(0, n)]
			if t.err == nil {
				t.err = err
			}
			for len(t.values) <= i {
				t.values = append(t.values, math.NaN())
			}
			t.values[i] = took
		}
	}
	return trials
}

// ways starts one container or sandbox for each way to run a program. done ends
// them all, also after an error.
func (r *rig) ways(ctx context.Context) (ways []runs, done func(), err error) {
	var closers []func()
	done = func() {
		for _, f := range closers {
			f()
		}
	}
	for name, c := range map[string]*raw{dockerStock: r.stock(), dockerHardened: r.hardened()} {
		id, err := c.create(ctx)
		if err != nil {
			return nil, done, fmt.Errorf("create %s: %w", name, err)
		}
		closers = append(closers, func() { c.destroy(context.WithoutCancel(ctx), id) })
		ways = append(ways, runs{name: name, exec: func(ctx context.Context, w io.Writer, args ...string) error {
			return c.exec(ctx, id, w, args...)
		}})
	}
	d, err := r.startDriver(ctx)
	if err != nil {
		return nil, done, fmt.Errorf("start the driver: %w", err)
	}
	closers = append(closers, d.close)
	inside, err := d.create(ctx, r.options.image)
	if err != nil {
		return nil, done, fmt.Errorf("create at the driver: %w", err)
	}
	ways = append(ways, streamed(boxedDriver, inside, d.Exec))
	n, err := r.startNode(ctx, settings{pool: defaultPool})
	if err != nil {
		return nil, done, err
	}
	closers = append(closers, n.close)
	s, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL})
	if err != nil {
		return nil, done, err
	}
	ways = append(ways, n.calls(s.ID), streamed(boxedStream, s.ID, n.Exec))
	// The refill that the create began is not to be measured.
	n.pool++
	return ways, done, n.settle(ctx, trialLimit)
}

// streamed runs programs by the port's Exec.
func streamed(name string, id boxed.ID, do func(context.Context, boxed.ID, boxed.ExecRequest) (boxed.ExitStatus, error)) runs {
	run := func(ctx context.Context, req boxed.ExecRequest) error {
		status, err := do(ctx, id, req)
		if err != nil {
			return err
		}
		return exited(status)
	}
	return runs{
		name: name,
		exec: func(ctx context.Context, w io.Writer, args ...string) error {
			return run(ctx, boxed.ExecRequest{Args: args, Stdout: w})
		},
		code: func(ctx context.Context, w io.Writer) error {
			return run(ctx, boxed.ExecRequest{Language: "python", Code: printOK, Stdout: w})
		},
	}
}

// calls runs programs by one JSON call each, on a connection that is kept.
func (n *node) calls(id boxed.ID) runs {
	run := func(ctx context.Context, req boxed.ExecRequest, w io.Writer) error {
		result, err := n.Run(ctx, id, req)
		if err != nil {
			return err
		}
		w.Write(result.Stdout)
		return exited(result.ExitStatus)
	}
	return runs{
		name: boxedHTTP,
		exec: func(ctx context.Context, w io.Writer, args ...string) error {
			return run(ctx, boxed.ExecRequest{Args: args}, w)
		},
		code: func(ctx context.Context, w io.Writer) error {
			return run(ctx, boxed.ExecRequest{Language: "python", Code: printOK}, w)
		},
	}
}
