package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/boxed-mesh/boxed"
)

var stdoutColumns = []string{"mib", "mb_s", "node_rss_before_kib", "node_rss_peak_kib"}

// counter counts and forgets.
type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

// Sizes of an output, in MiB.
const (
	stdoutSize  = 100
	stdoutLarge = 1024
)

// stdout measures how fast a program's output comes to its caller, and what
// the node's memory does meanwhile.
func stdout(ctx context.Context, r *rig, s *sheet) error {
	n, err := r.startNode(ctx, settings{pool: defaultPool})
	if err != nil {
		return err
	}
	defer n.close()
	box, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL})
	if err != nil {
		return err
	}
	d, err := r.startDriver(ctx)
	if err != nil {
		return err
	}
	defer d.close()
	inside, err := d.create(ctx, r.options.image)
	if err != nil {
		return err
	}
	c := r.stock()
	id, err := c.create(ctx)
	if err != nil {
		return err
	}
	defer func() { c.destroy(context.WithoutCancel(ctx), id) }()
	n.pool++
	if err := n.settle(ctx, trialLimit); err != nil {
		return err
	}
	ways := []runs{
		{name: dockerStock, exec: func(ctx context.Context, w io.Writer, args ...string) error { return c.exec(ctx, id, w, args...) }},
		streamed(boxedDriver, inside, d.Exec),
		streamed(boxedStream, box.ID, n.Exec),
	}
	trial := func(i, mib int, way runs, count bool) error {
		values, err := way.output(ctx, mib, n)
		if count {
			s.add(i, way.name, err, values...)
		}
		if err != nil {
			r.say("%s: %v", way.name, err)
		}
		return ctx.Err()
	}
	random := rand.New(rand.NewPCG(7, 8))
	rounds := r.trials(10, 5, 3)
	for round := -1; round < rounds; round++ {
		for _, at := range random.Perm(len(ways)) {
			if err := trial(round, stdoutSize, ways[at], round >= 0); err != nil {
				return err
			}
		}
	}
	if !r.busy {
		for _, at := range random.Perm(len(ways)) {
			if err := trial(0, stdoutLarge, ways[at], true); err != nil {
				return err
			}
		}
	}
	s.summarizeStdout()
	return nil
}

// output is one trial. The node's memory is looked at in those of its own.
func (w runs) output(ctx context.Context, mib int, n *node) ([]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	before, peak := math.NaN(), func() float64 { return math.NaN() }
	if w.name == boxedStream {
		var err error
		if before, peak, err = watchRSS(n.pid()); err != nil {
			return []float64{float64(mib), math.NaN(), math.NaN(), math.NaN()}, err
		}
	}
	var count counter
	from := time.Now()
	err := w.exec(ctx, &count, "head", "-c", strconv.Itoa(mib)+"M", "/dev/zero")
	took := time.Since(from)
	want := int64(mib) * boxed.MiB
	if err == nil && count.n != want {
		err = fmt.Errorf("%d bytes came of %d", count.n, want)
	}
	return []float64{float64(mib), float64(want) / 1e6 / took.Seconds(), before, peak()}, err
}

func (s *sheet) summarizeStdout() {
	for _, system := range s.systems() {
		for _, mib := range []float64{stdoutSize, stdoutLarge} {
			suffix := map[float64]string{stdoutLarge: "_1gib"}[mib]
			where := func(t trial) bool { return s.value(t, "mib") == mib }
			s.summarize(system, "stdout"+suffix+"_mb_s", "MB/s", s.column(system, "mb_s", where))
			peaks, befores := s.column(system, "node_rss_peak_kib", where), s.column(system, "node_rss_before_kib", where)
			for i := range peaks {
				peaks[i] -= befores[i]
			}
			s.summarize(system, "node_rss_growth"+suffix+"_kib", "KiB", peaks)
		}
	}
	s.failures()
}
