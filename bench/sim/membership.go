package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// crowd is one mesh that is measured.
type crowd struct {
	nodes   int
	pace    transport.Pace
	publish time.Duration // between summaries of one node, in the window with them
	window  time.Duration
	changes int // trials
	kills   int
}

// crowds are the meshes that are measured. A hundred nodes and more publish less
// often than they do in earnest: this process would be busy with signatures, and
// no picture of many machines. Over a WAN ten seconds is more than gossip has room
// for from some ten nodes on, and takes few of them to compute: what the model says
// of overload is held against that.
func crowds(quick bool) (list []crowd) {
	const lan, wan = transport.PaceLAN, transport.PaceWAN
	if quick {
		return []crowd{{3, lan, 2 * time.Second, 2 * time.Second, 3, 1}, {10, lan, 2 * time.Second, 3 * time.Second, 3, 1}}
	}
	for nodes, publish := range map[int]time.Duration{3: summaryAge, 10: summaryAge, 25: summaryAge, 50: summaryAge, 100: 2 * summaryAge, 200: 6 * summaryAge} {
		list = append(list, crowd{nodes, lan, publish, 20 * time.Second, 10, min(3, nodes-2)})
	}
	slices.SortFunc(list, func(a, b crowd) int { return a.nodes - b.nodes })
	return append(list,
		crowd{50, lan, 2 * time.Second, 20 * time.Second, 0, 0},
		crowd{50, wan, summaryAge, 60 * time.Second, 5, 1},
		crowd{100, wan, summaryAge, 60 * time.Second, 5, 1},
		crowd{200, wan, summaryAge, 60 * time.Second, 5, 1})
}

// observed is what one mesh showed.
type observed struct {
	crowd
	joined  float64   // seconds until all saw all
	changed []float64 // seconds until all knew of a change
	killed  []float64 // seconds until all knew of a death
	quiet   rate      // without summaries
	told    rate      // with summaries
	ages    []float64 // of views, in seconds, with summaries
	cpu     float64   // the highest share in a window
}

// rate is of one node, per second.
type rate struct{ datagrams, datagramBytes, streams, streamBytes float64 }

func (r rate) bytes() float64 { return r.datagramBytes + r.streamBytes }

func (m *mesh) rateOver(s sent, window time.Duration) rate {
	per := window.Seconds() * float64(len(m.living()))
	return rate{float64(s.datagrams) / per, float64(s.datagramBytes) / per, float64(s.streams) / per, float64(s.streamBytes) / per}
}

// observe measures one mesh.
func observe(ctx context.Context, c crowd, log io.Writer) (o observed, err error) {
	o.crowd = c
	m, err := newMesh(c.nodes, c.pace, nil)
	if err != nil {
		return o, err
	}
	defer m.close()
	patience := 2 * time.Minute
	if c.pace == transport.PaceWAN {
		patience *= 2
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cpu := startBusy()
	took, err := seen(within, m.began, 20*time.Millisecond, m.allSeeAll)
	if err != nil {
		o.cpu = cpu.share()
		return o, fmt.Errorf("%d nodes do not find each other: %w", c.nodes, err)
	}
	o.joined = took.Seconds()
	fmt.Fprintf(log, "  %d nodes, pace %s: all saw all after %.2f s\n", c.nodes, c.pace, o.joined)
	if err := sleep(ctx, min(c.window/3, 5*time.Second)); err != nil { // what joining has left in the queues
		return o, err
	}
	for _, step := range []func(context.Context, *mesh) error{o.stayQuiet, o.change, o.keepTelling, o.kill} {
		if err := step(ctx, m); err != nil {
			return o, err
		}
	}
	fmt.Fprintf(log, "    %.0f B/s per node quiet, %.0f B/s publishing every %v; views %.2f s old (p99 %.2f); processors %.0f %% busy\n",
		o.quiet.bytes(), o.told.bytes(), c.publish, quantile(o.ages, 0.5), quantile(o.ages, 0.99), 100*o.cpu)
	return o, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// stayQuiet counts what nodes send that have nothing to tell.
func (o *observed) stayQuiet(ctx context.Context, m *mesh) error {
	if o.changes == 0 { // this mesh is there for what comes after
		return nil
	}
	before, cpu := m.traffic.read(), startBusy()
	if err := sleep(ctx, o.window); err != nil {
		return err
	}
	o.quiet = m.rateOver(m.traffic.read().since(before), time.Since(cpu.at))
	o.cpu = max(o.cpu, cpu.share())
	return nil
}

// change has one node tell of itself, and waits until all know.
func (o *observed) change(ctx context.Context, m *mesh) error {
	for trial := range o.changes {
		who := m.members[rand.IntN(len(m.members))]
		s := who.summary
		s.Load = float64(trial+1) / 4 // gossip carries hundredths
		from := time.Now()
		if err := who.Publish(s); err != nil {
			return err
		}
		within, cancel := context.WithTimeout(ctx, time.Minute)
		took, err := seen(within, from, 2*time.Millisecond, func() bool {
			return m.allSee(who, func(got boxed.NodeSummary) bool { return got.Load == s.Load })
		})
		cancel()
		if err != nil {
			return fmt.Errorf("a change is not known to all of %d: %w", o.nodes, err)
		}
		o.changed = append(o.changed, took.Seconds())
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// keepTelling has every node tell of itself again and again, as nodes do, and
// looks at how old what others know is, once all have told.
func (o *observed) keepTelling(ctx context.Context, m *mesh) error {
	began := time.Now()
	from := began.Add(o.publish + 2*time.Second)
	end := from.Add(o.window)
	gap := o.publish / time.Duration(len(m.members))
	var before sent
	var cpu busy
	next := from
	for i := 0; time.Now().Before(end); {
		for ; time.Since(began) > time.Duration(i)*gap; i++ {
			p := m.members[i%len(m.members)]
			if err := p.Publish(p.summary); err != nil {
				return err
			}
		}
		if now := time.Now(); now.After(next) {
			if cpu.at.IsZero() {
				before, cpu = m.traffic.read(), startBusy()
			}
			o.look(m, now)
			next = next.Add(500 * time.Millisecond)
		}
		if err := sleep(ctx, max(time.Millisecond, min(gap, 20*time.Millisecond))); err != nil {
			return err
		}
	}
	o.told = m.rateOver(m.traffic.read().since(before), time.Since(cpu.at))
	o.cpu = max(o.cpu, cpu.share())
	return nil
}

// look asks some nodes how old what they know of some others is.
func (o *observed) look(m *mesh, now time.Time) {
	for range 500 {
		a, b := m.members[rand.IntN(len(m.members))], m.members[rand.IntN(len(m.members))]
		if s, ok := a.Node(b.id); ok && a != b {
			o.ages = append(o.ages, now.Sub(s.At).Seconds())
		}
	}
}

// kill ends nodes one by one.
func (o *observed) kill(ctx context.Context, m *mesh) error {
	for range o.kills {
		living := m.living()
		who := living[1+rand.IntN(len(living)-1)] // the first is everybody's seed
		who.kill()
		from := time.Now()
		within, cancel := context.WithTimeout(ctx, 5*time.Minute)
		took, err := seen(within, from, 10*time.Millisecond, func() bool {
			return m.allSee(who, func(s boxed.NodeSummary) bool { return s.State != boxed.NodeAlive })
		})
		cancel()
		if err != nil {
			return fmt.Errorf("a death is not known to all of %d: %w", o.nodes, err)
		}
		o.killed = append(o.killed, took.Seconds())
		if err := sleep(ctx, time.Second); err != nil {
			return err
		}
	}
	return nil
}

func (o observed) rows() (rows []row) {
	under := func(what string, more ...any) string {
		return named(what, append([]any{"nodes", o.nodes, "pace", o.pace}, more...)...)
	}
	if o.changes > 0 {
		rows = append(rows,
			number(sysBoxed, under("join_all"), "s", 1, o.joined),
			spread(sysBoxed, under("change_to_all"), "s", o.changed),
			spread(sysBoxed, under("death_to_all"), "s", o.killed))
	}
	publish := []any{"publish", o.publish.Seconds()}
	for _, w := range []struct {
		name string
		rate rate
		more []any
	}{{"quiet", o.quiet, nil}, {"telling", o.told, publish}} {
		if w.name == "quiet" && o.changes == 0 {
			continue
		}
		rows = append(rows,
			number(sysBoxed, under(w.name+"_datagrams", w.more...), "1/s", o.nodes, w.rate.datagrams),
			number(sysBoxed, under(w.name+"_datagram_bytes", w.more...), "B/s", o.nodes, w.rate.datagramBytes),
			number(sysBoxed, under(w.name+"_streams", w.more...), "1/s", o.nodes, w.rate.streams),
			number(sysBoxed, under(w.name+"_stream_bytes", w.more...), "B/s", o.nodes, w.rate.streamBytes))
	}
	return append(rows,
		spread(sysBoxed, under("view_age", publish...), "s", o.ages),
		number(sysBoxed, under("busy", publish...), "share", 1, o.cpu))
}

// membershipPart is all that is measured of membership, or those of the meshes
// that are asked for beside what was measured before.
func membershipPart(ctx context.Context, o options, before []row, log io.Writer) (rows []row, err error) {
	for _, c := range crowds(o.quick) {
		name := fmt.Sprintf("%d/%s", c.nodes, c.pace)
		if o.meshes != "" && !slices.Contains(strings.Split(o.meshes, ","), name) {
			for _, r := range before {
				if r.Part == "membership" && c.owns(r.Metric) {
					rows = append(rows, r)
				}
			}
			continue
		}
		more, err := c.measure(ctx, log)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// owns reports whether a metric is of this mesh: two may differ in the news only.
func (c crowd) owns(metric string) bool {
	of, news, told := strings.Cut(metric, " publish=")
	return strings.HasSuffix(of, named("", "nodes", c.nodes, "pace", c.pace)) && (told && news == fmt.Sprint(c.publish.Seconds()) || !told && c.changes > 0)
}

// measure observes a mesh, twice if it does not come to rest. Hundreds of nodes on
// a few processors that are busy with something else call each other silent all
// the time, and that says nothing of a mesh: then there is a row that says so.
func (c crowd) measure(ctx context.Context, log io.Writer) ([]row, error) {
	for try := 1; ; try++ {
		o, err := observe(ctx, c, log)
		if err == nil {
			return o.rows(), nil
		}
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return nil, err
		}
		fmt.Fprintf(log, "  %d nodes, pace %s: %v\n", c.nodes, c.pace, err)
		if try == 2 {
			name := named("gave_up", "nodes", c.nodes, "pace", c.pace, "publish", c.publish.Seconds())
			return []row{number(sysBoxed, name, "times", try, float64(try))}, nil
		}
	}
}
