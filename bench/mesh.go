package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// Milliseconds but where the name says otherwise. A trial fills what it measured.
var meshColumns = []string{
	"converge", "detect", "heal", "frozen", "get_direct", "get_hop", "exec_direct", "exec_hop", "mb_s_direct", "mb_s_hop", "place_1000", "claim",
}

// boxedMesh is the one system here.
const boxedMesh = boxedPool

// meshTrial is a trial of which only some columns were measured.
func meshTrial(s *sheet, i int, err error, measured map[string]float64) {
	s.addSome(i, boxedMesh, err, measured)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// mesh measures what many hosts cost, and how soon they know of each other: three
// processes on the loopback, and what needs more in this process.
func mesh(ctx context.Context, r *rig, s *sheet) error {
	nodes, err := r.startMesh(ctx, 3)
	defer func() {
		for _, n := range nodes {
			n.close()
		}
	}()
	if err != nil {
		return err
	}
	for i := range r.count(4, 3, 1) {
		if err := r.comeAndGo(ctx, s, i, nodes); err != nil {
			return err
		}
	}
	growth, err := r.hop(ctx, s, nodes)
	if err != nil {
		return err
	}
	calledDead, err := r.overloaded(ctx, nodes)
	if err != nil {
		return err
	}
	placements(r, s)
	if err := heals(ctx, r, s); err != nil {
		return err
	}
	rate, err := claims(ctx, r, s)
	if err != nil {
		return err
	}
	for _, name := range []string{"converge", "detect", "heal", "frozen", "place_1000", "claim"} {
		s.summarize(boxedMesh, name, "ms", s.column(boxedMesh, name, nil))
	}
	for _, name := range []string{"get_direct", "get_hop", "exec_direct", "exec_hop"} {
		s.summarize(boxedMesh, name, "ms", s.column(boxedMesh, name, nil))
	}
	for _, name := range []string{"mb_s_direct", "mb_s_hop"} {
		s.summarize(boxedMesh, name, "MB/s", s.column(boxedMesh, name, nil))
	}
	extra := func(call string) float64 {
		return median(s.column(boxedMesh, call+"_hop", nil)) - median(s.column(boxedMesh, call+"_direct", nil))
	}
	n := len(s.column(boxedMesh, "get_hop", nil))
	s.number(boxedMesh, "hop_extra", "ms", n, extra("get"))
	s.number(boxedMesh, "hop_extra_exec", "ms", n, extra("exec"))
	s.number(boxedMesh, "hop_rss_growth_1gib_kib", "KiB", 1, growth)
	s.number(boxedMesh, "called_dead_busy", "ms", 1, millis(calledDead))
	s.number(boxedMesh, "claims_s", "1/s", len(s.column(boxedMesh, "claim", nil)), rate)
	s.failures()
	return nil
}

// startMesh starts nodes that are one cluster.
func (r *rig) startMesh(ctx context.Context, count int) (nodes []*node, err error) {
	for i := range count {
		n, err := r.startNode(ctx, settings{pool: 1, withoutBounds: true, number: i})
		if err != nil {
			return nodes, err
		}
		nodes = append(nodes, n)
	}
	if _, err := nodes[0].StartCluster(ctx, boxed.ClusterRequest{}); err != nil {
		return nodes, err
	}
	token, err := nodes[0].ClusterToken(ctx)
	if err != nil {
		return nodes, err
	}
	for _, n := range nodes[1:] {
		if _, err := n.StartCluster(ctx, boxed.ClusterRequest{Token: token}); err != nil {
			return nodes, err
		}
	}
	_, err = see(ctx, boxed.NodeAlive, nodes, nodes)
	return nodes, err
}

// see waits until nodes see others in a state, and returns how long it took.
func see(ctx context.Context, state boxed.NodeState, seen, by []*node) (time.Duration, error) {
	start := time.Now()
	err := until(ctx, time.Minute, fmt.Sprintf("nodes to be seen as %s", state), func() (bool, error) {
		for _, b := range by {
			list, err := b.ListNodes(ctx)
			if err != nil {
				return false, nil // it is starting
			}
			for _, s := range seen {
				if i := slices.IndexFunc(list.Nodes, func(n boxed.NodeSummary) bool { return n.ID == s.nodeID }); i < 0 || list.Nodes[i].State != state {
					return false, nil
				}
			}
		}
		return true, nil
	})
	return time.Since(start), err
}

// comeAndGo is one trial of a node that is killed, started, frozen and thawed.
func (r *rig) comeAndGo(ctx context.Context, s *sheet, i int, nodes []*node) error {
	last, others := nodes[len(nodes)-1], nodes[:len(nodes)-1]
	last.kill()
	detect, err := see(ctx, boxed.NodeSilent, []*node{last}, others)
	if err != nil {
		return err
	}
	start := time.Now()
	starting := make(chan error, 1)
	go func() { starting <- last.start(ctx) }()
	_, err = see(ctx, boxed.NodeAlive, []*node{last}, others)
	converge := time.Since(start)
	if err := <-starting; err != nil {
		return err
	}
	if err != nil {
		return err
	}
	if _, err := see(ctx, boxed.NodeAlive, nodes, nodes); err != nil {
		return err
	}
	last.cmd.Process.Signal(syscall.SIGSTOP)
	_, err = see(ctx, boxed.NodeSilent, []*node{last}, others)
	pause(ctx, 5*time.Second)
	last.cmd.Process.Signal(syscall.SIGCONT)
	if err != nil {
		return err
	}
	frozen, err := see(ctx, boxed.NodeAlive, nodes, nodes)
	meshTrial(s, i, err, map[string]float64{"detect": millis(detect), "converge": millis(converge), "frozen": millis(frozen)})
	return nil
}

// hop measures the same calls at the owner of a sandbox and through another node,
// in turn, and how much the other one's memory grows for 1 GiB.
func (r *rig) hop(ctx context.Context, s *sheet, nodes []*node) (growth float64, err error) {
	box, err := nodes[0].Create(ctx, boxed.Spec{Node: nodes[0].nodeID})
	if err != nil {
		return 0, err
	}
	call := func(n *node, what string) (float64, error) {
		start := time.Now()
		if what == "get" {
			_, err = n.Get(ctx, box.ID)
			return millis(time.Since(start)), err
		}
		res, err := n.Run(ctx, box.ID, boxed.ExecRequest{Args: []string{"true"}})
		took := millis(time.Since(start))
		if err == nil && res.Code != 0 {
			err = fmt.Errorf("true ended with %d", res.Code)
		}
		return took, err
	}
	for i := range r.count(400, 200, 20) {
		for _, what := range []string{"get", "exec"} {
			measured := map[string]float64{}
			var failed error
			for name, n := range map[string]*node{"direct": nodes[0], "hop": nodes[1]} {
				took, err := call(n, what)
				measured[what+"_"+name] = took
				if err != nil {
					failed = err
				}
			}
			meshTrial(s, i, failed, measured)
		}
	}
	stream := func(n *node) (float64, error) {
		var count counter
		start := time.Now()
		status, err := n.Exec(ctx, box.ID, boxed.ExecRequest{Args: []string{"head", "-c", fmt.Sprint(gib), "/dev/zero"}, Stdout: &count})
		if err == nil {
			err = exited(status)
		}
		if err == nil && count.n != gib {
			err = fmt.Errorf("%d bytes came of %d", count.n, gib)
		}
		return float64(count.n) / 1e6 / time.Since(start).Seconds(), err
	}
	before, err := rss(nodes[1].pid())
	if err != nil {
		return 0, err
	}
	for i := range r.count(7, 5, 1) {
		direct, errDirect := stream(nodes[0])
		through, err := stream(nodes[1])
		if err == nil {
			err = errDirect
		}
		meshTrial(s, i, err, map[string]float64{"mb_s_direct": direct, "mb_s_hop": through})
		if i == 0 {
			after, err := rss(nodes[1].pid())
			if err != nil {
				return 0, err
			}
			growth = max(0, after-before)
		}
	}
	return growth, nodes[0].Destroy(ctx, box.ID)
}

const gib = 1 << 30

// overloaded computes on twice as many processes as there are cores, and returns
// the longest time for which a node that lives was called dead.
func (r *rig) overloaded(ctx context.Context, nodes []*node) (longest time.Duration, err error) {
	load, err := startLoad(2 * runtime.NumCPU())
	if err != nil {
		return 0, err
	}
	defer load.stop()
	dead := map[[2]string]time.Time{}
	for end := time.Now().Add(time.Duration(r.count(40, 30, 5)) * time.Second); time.Now().Before(end) && ctx.Err() == nil; pause(ctx, 50*time.Millisecond) {
		for _, n := range nodes {
			list, err := n.ListNodes(ctx)
			if err != nil {
				return 0, err
			}
			for _, other := range list.Nodes[1:] {
				pair := [2]string{string(n.nodeID), string(other.ID)}
				switch since, was := dead[pair]; {
				case other.State == boxed.NodeAlive:
					delete(dead, pair)
				case !was:
					dead[pair] = time.Now()
				default:
					longest = max(longest, time.Since(since))
				}
			}
		}
	}
	return longest, ctx.Err()
}

// placements measures the choice among a thousand nodes of which a third has no
// room.
func placements(r *rig, s *sheet) {
	nodes := make([]scheduler.NodeState, 1000)
	for i := range nodes {
		nodes[i] = scheduler.NodeState{
			ID: boxed.NodeID(fmt.Sprintf("%016d", i*7919%1000)), Arch: "amd64", Runtimes: []string{"runc", "runsc"}, Default: "runc", Ready: true,
			Total: boxed.Capacity{MemoryBytes: 64 << 30, CPUs: 16}, Policy: scheduler.DefaultPolicy(), Load: float64(i%23) / 10,
			Used: boxed.Capacity{MemoryBytes: int64(i%100) * 640 << 20, CPUs: float64(i % 40)}, Warm: i % 5, Labels: map[string]string{"zone": fmt.Sprint(i % 3)},
		}
	}
	ask := scheduler.Ask{Limits: boxed.DefaultLimits(), Entry: nodes[500].ID}
	for i := range r.count(200, 200, 20) {
		start := time.Now()
		_, err := scheduler.Place(nodes, ask)
		meshTrial(s, i, err, map[string]float64{"place_1000": float64(time.Since(start).Nanoseconds()) / 1e6})
	}
}

// collector gathers durations of many goroutines.
type collector struct {
	mu     sync.Mutex
	took   []float64
	failed error
	bad    int
}

func (c *collector) add(d time.Duration, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.bad++
		c.failed = err
		return
	}
	c.took = append(c.took, millis(d))
}
