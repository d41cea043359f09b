package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/memnet"
)

// mesh is real memberships in this process, over a network in memory.
type mesh struct {
	hub     *memnet.Hub
	key     transport.ClusterKey
	pace    transport.Pace
	traffic traffic
	members []*member
	began   time.Time // when all were there and began to look for each other
}

type member struct {
	*transport.Membership
	id      boxed.NodeID
	key     ed25519.PrivateKey
	summary boxed.NodeSummary
	network *memnet.Network
	stop    func() // ends it, and returns when all of it has ended
	dead    bool
}

// exchanges makes a node's Exchange before there is a Membership for it.
type exchanges func(id boxed.NodeID, key ed25519.PrivateKey) (transport.Exchange, error)

// newMesh starts so many nodes. The first is the seed of all others.
func newMesh(count int, pace transport.Pace, exchange exchanges) (*mesh, error) {
	m := &mesh{hub: memnet.NewHub(), key: transport.NewClusterKey(), pace: pace}
	for i := range count {
		if err := m.add(i, exchange); err != nil {
			return nil, errors.Join(err, m.close())
		}
	}
	m.began = time.Now()
	for _, p := range m.members {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.Run(ctx) // its error is always nil
		}()
		p.stop = sync.OnceFunc(func() { cancel(); <-done; p.network.Close() })
	}
	return m, nil
}

func (m *mesh) add(i int, exchange exchanges) error {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	p := &member{key: key, id: boxed.NodeIDOf(key.Public().(ed25519.PublicKey)), summary: ordinarySummary(i)}
	p.network = m.hub.Join(p.id)
	cfg := transport.MembershipConfig{
		Network: counted{p.network, &m.traffic}, Cluster: "simulation", Identity: key, Pace: m.pace,
		Keys: func() []transport.ClusterKey { return []transport.ClusterKey{m.key} },
	}
	if i > 0 {
		seed := []string{m.members[0].network.Addr()}
		cfg.Seeds = func(context.Context) []string { return seed }
	}
	if exchange != nil {
		if cfg.Exchange, err = exchange(p.id, key); err != nil {
			return err
		}
	}
	if p.Membership, err = transport.NewMembership(cfg, p.summary); err != nil {
		return err
	}
	m.members = append(m.members, p)
	return nil
}

// ordinarySummary is as long as those of real nodes are.
func ordinarySummary(i int) boxed.NodeSummary {
	of := func(mem int64, cpus float64, sandboxes int) boxed.Capacity {
		return boxed.Capacity{MemoryBytes: mem * gib, CPUs: cpus, Sandboxes: sandboxes}
	}
	return boxed.NodeSummary{
		Name: fmt.Sprintf("host-%04d.rack-%02d", i, i%40), Version: "0.4.0", Ready: true, Place: boxed.PlaceAny,
		Labels: map[string]string{"zone": "eu-1a", "disk": "ssd"}, Arch: "amd64", Runtimes: []string{"runc", "runsc"}, Default: "runc",
		Total: of(64, 16, 0), Capacity: of(57, 57.6, 0), Used: of(int64(20+i%30), 21.25, 31), Idle: of(2, 4, 4),
		Warm: map[string]int{"default": 4}, Load: 0.37,
	}
}

// living are the nodes that were not killed.
func (m *mesh) living() (list []*member) {
	for _, p := range m.members {
		if !p.dead {
			list = append(list, p)
		}
	}
	return list
}

// kill ends a node as a power cut does. What is left of it in this process ends
// with the mesh.
func (p *member) kill() {
	p.dead = true
	p.network.Close()
}

func (m *mesh) close() error {
	var ending sync.WaitGroup
	for _, p := range m.members {
		if p.stop == nil { // it was never started
			p.network.Close()
			continue
		}
		// A goodbye to hundreds that leave too takes long, and says nothing: the
		// network goes first.
		p.network.Close()
		ending.Go(p.stop)
	}
	ending.Wait()
	return nil
}

// seen waits until ok, which is asked often, and says how long that took since from.
func seen(ctx context.Context, from time.Time, every time.Duration, ok func() bool) (time.Duration, error) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("after %v: %w", time.Since(from).Round(time.Millisecond), ctx.Err())
		case <-tick.C:
		}
	}
	return time.Since(from), nil
}

// allSeeAll reports whether every living node sees every other one alive.
func (m *mesh) allSeeAll() bool {
	living := m.living()
	for _, p := range living {
		alive := 0
		for _, s := range p.Nodes() {
			if s.State == boxed.NodeAlive {
				alive++
			}
		}
		if alive != len(living) {
			return false
		}
	}
	return true
}

// allSee reports whether every living node but the one sees it so.
func (m *mesh) allSee(who *member, ok func(boxed.NodeSummary) bool) bool {
	for _, p := range m.living() {
		if p == who {
			continue
		}
		if s, known := p.Node(who.id); !known || !ok(s) {
			return false
		}
	}
	return true
}

// busy measures which part of the machine's processors this process used.
type busy struct {
	at  time.Time
	cpu time.Duration
}

func startBusy() busy { return busy{time.Now(), cpuTime()} }

func (b busy) share() float64 {
	return (cpuTime() - b.cpu).Seconds() / time.Since(b.at).Seconds() / float64(runtime.GOMAXPROCS(0))
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
