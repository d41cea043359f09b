package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
	daemon "github.com/boxed-mesh/boxed/node"
)

// inProcess is a boxedtest.TB outside of a test: what is fatal there panics here,
// and is an error of local's.
type inProcess struct {
	ctx      context.Context
	cleanups []func()
}

var _ boxedtest.TB = (*inProcess)(nil)

type fatal struct{ error }

func (p *inProcess) Helper()                           {}
func (p *inProcess) Context() context.Context          { return p.ctx }
func (p *inProcess) Cleanup(f func())                  { p.cleanups = append(p.cleanups, f) }
func (p *inProcess) Error(args ...any)                 { p.Fatal(args...) }
func (p *inProcess) Fatal(args ...any)                 { panic(fatal{errors.New(fmt.Sprint(args...))}) }
func (p *inProcess) Fatalf(format string, args ...any) { panic(fatal{fmt.Errorf(format, args...)}) }

// local runs f with a mesh in this process, and ends it.
func local(ctx context.Context, nodes int, change func(int, *daemon.Config), f func(*boxedtest.Cluster) error) (err error) {
	p := &inProcess{ctx: ctx}
	defer func() {
		if v := recover(); v != nil {
			stop, ok := v.(fatal)
			if !ok {
				panic(v)
			}
			err = stop.error
		}
		for i := len(p.cleanups) - 1; i >= 0; i-- {
			p.cleanups[i]()
		}
	}()
	return f(boxedtest.New(p, nodes, change))
}

// heals measures how soon two sides of a partition are one mesh again, after each
// has given up on the other for longer than gossip to the dead goes on.
func heals(ctx context.Context, r *rig, s *sheet) error {
	return local(ctx, 3, func(int, *daemon.Config) {}, func(c *boxedtest.Cluster) error {
		for i := range r.count(5, 3, 1) {
			c.Partition(c.Nodes[:2], c.Nodes[2:])
			c.Eventually("the sides lose each other", func() bool {
				a, _ := c.Nodes[0].Members.Node(c.Nodes[2].ID)
				b, _ := c.Nodes[2].Members.Node(c.Nodes[0].ID)
				return a.State == boxed.NodeSilent && b.State == boxed.NodeSilent
			})
			pause(ctx, time.Duration(r.count(12, 12, 1))*time.Second)
			start := time.Now()
			c.Heal()
			c.WaitMesh(c.Nodes...)
			meshTrial(s, i, ctx.Err(), map[string]float64{"heal": millis(time.Since(start))})
		}
		return ctx.Err()
	})
}

// Of the claims: nodes, how many a second are asked for, and how many warm sandboxes
// each node has: more than are asked for, since making them is another question.
const (
	claimNodes = 20
	claimRate  = 1000
	claimWarm  = 120
)

// claims asks twenty nodes for a thousand sandboxes a second, whoever has answered
// or not, and measures how long each takes. It returns the rate that was kept.
func claims(ctx context.Context, r *rig, s *sheet) (rate float64, err error) {
	const most = 300 // of a node: it is never to hold more
	change := func(_ int, cfg *daemon.Config) {
		cfg.Most = most
		for name, t := range cfg.Templates {
			t.Pool = claimWarm
			cfg.Templates[name] = t
		}
	}
	total := time.Duration(r.count(1400, 1400, 1000)) * time.Millisecond
	err = local(ctx, claimNodes, change, func(c *boxedtest.Cluster) error {
		ann := c.As("ann")
		c.Eventually("the pools are full", func() bool {
			for _, n := range c.Nodes {
				if pools, _, _ := n.Manager.Pools(); len(pools) == 0 || pools[0].Ready < claimWarm {
					return false
				}
			}
			return true
		})
		pause(ctx, 3*time.Second)
		c.WaitMesh(c.Nodes...) // filling the pools took all of the machine
		// In one process, one collector goes through the memory of all nodes and of 2,400
		// guests, for half a second of both cores. No node has that to do.
		runtime.GC()
		defer debug.SetGCPercent(debug.SetGCPercent(400))
		time.AfterFunc(total, c.HoldEngines()) // nor is what they make meanwhile what is asked
		var got collector
		var asking sync.WaitGroup
		start := time.Now()
		over := 0
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 0; time.Since(start) < total && ctx.Err() == nil; <-tick.C {
			for due := int(time.Since(start).Seconds() * claimRate); i < due; i++ {
				by := c.Nodes[i%claimNodes]
				asking.Go(func() {
					began := time.Now()
					_, err := by.Create(ann, boxed.Spec{})
					got.add(time.Since(began), err)
				})
			}
			for _, n := range c.Nodes[i%claimNodes : i%claimNodes+1] {
				if used, _ := n.Manager.Used(); used.Sandboxes > most {
					over++
				}
			}
		}
		asked := time.Since(start)
		asking.Wait()
		rate = float64(len(got.took)) / asked.Seconds()
		for i, ms := range got.took {
			meshTrial(s, i, nil, map[string]float64{"claim": ms})
		}
		if got.bad > 0 {
			return fmt.Errorf("%d of %d claims failed: %w", got.bad, got.bad+len(got.took), got.failed)
		}
		if over > 0 {
			return fmt.Errorf("%d times a node held more than it may", over)
		}
		return ctx.Err()
	})
	return rate, err
}
