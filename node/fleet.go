package node

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/boxed-mesh/boxed"
)

// settings are what an operator set, in memory and on the disk.
type settings struct {
	mu    sync.Mutex
	store SettingsStore
	now   Settings
}

func (s *settings) load(store SettingsStore) (err error) {
	s.store = store
	if store != nil {
		s.now, err = store.Load()
	}
	return err
}

func (s *settings) get() Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// set puts v in force.
func (s *settings) set(v Settings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.save(v)
}

// change puts v in force if old still is, and reports whether it was.
func (s *settings) change(old, v Settings) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now != old {
		return false, nil
	}
	return true, s.save(v)
}

// save is called with the lock held, across the write too: what is in force is on
// the disk.
func (s *settings) save(v Settings) error {
	if s.store != nil {
		if err := s.store.Save(v); err != nil {
			return fmt.Errorf("keep the node's settings: %w", err)
		}
	}
	s.now = v
	return nil
}

// ListNodes are the nodes that there are.
func (h *host) ListNodes(ctx context.Context) (boxed.NodeList, error) {
	return boxed.NodeList{Nodes: []boxed.NodeSummary{h.summary(ctx)}}, nil
}

// ListNodes are the nodes that there are, this one first.
func (n *Node) ListNodes(ctx context.Context) (boxed.NodeList, error) {
	list := boxed.NodeList{Nodes: []boxed.NodeSummary{n.summary(ctx)}}
	if mesh := n.others(ctx); mesh != nil {
		for i, s := range mesh.Nodes() {
			if i == 0 {
				list.Nodes[0].Address, list.Nodes[0].Since = s.Address, s.Since
				continue
			}
			list.Nodes = append(list.Nodes, s)
		}
	}
	return list, nil
}

// GetNode describes this node.
func (h *host) GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error) {
	if err := h.isMe(ref); err != nil {
		return nil, err
	}
	return h.NodeInfo(ctx)
}

func (h *host) isMe(ref string) error {
	if ref == string(h.cfg.ID) || ref == h.cfg.Name || len(ref) >= boxed.MinPrefixLen && strings.HasPrefix(string(h.cfg.ID), ref) {
		return nil
	}
	return boxed.Errorf(boxed.CodeNotFound, "there is no node %q", ref)
}

// GetNode describes a node, by its own word.
func (n *Node) GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error) {
	api, id, err := n.nodeAt(ctx, ref)
	if err != nil {
		return nil, err
	}
	return api.GetNode(ctx, string(id))
}

// nodeAt finds the node that ref means, and who speaks for it.
func (n *Node) nodeAt(ctx context.Context, ref string) (boxed.API, boxed.NodeID, error) {
	mesh := n.others(ctx)
	if mesh == nil {
		return n.host, n.cfg.ID, n.isMe(ref)
	}
	var exact, named, prefixed []boxed.NodeID
	for _, s := range mesh.Nodes() {
		switch {
		case ref == string(s.ID):
			exact = append(exact, s.ID)
		case ref == s.Name:
			named = append(named, s.ID)
		case len(ref) >= boxed.MinPrefixLen && strings.HasPrefix(string(s.ID), ref):
			prefixed = append(prefixed, s.ID)
		}
	}
	for _, found := range [][]boxed.NodeID{exact, named, prefixed} {
		switch {
		case len(found) == 1 && found[0] == n.cfg.ID:
			return n.host, found[0], nil
		case len(found) == 1:
			return mesh.Peer(found[0]), found[0], nil
		case len(found) > 1:
			return nil, "", boxed.Errorf(boxed.CodeConflict, "%q could be %d nodes; give the ID: %v", ref, len(found), found).With("ids", found)
		}
	}
	return nil, "", boxed.Errorf(boxed.CodeNotFound, "there is no node %q in the mesh", ref)
}

// CordonNode keeps new sandboxes away from this node, or lets them in again.
func (h *host) CordonNode(ctx context.Context, ref string, on bool) (*boxed.NodeInfo, error) {
	who := boxed.PrincipalFrom(ctx)
	if err := h.mayOperate(who, ref); err != nil {
		return nil, err
	}
	set := h.settings.get()
	if set.Cordoned != on || !on && !set.DrainUntil.IsZero() {
		if err := h.settings.set(Settings{Cordoned: on, By: who.Owner, At: h.cfg.Now()}); err != nil {
			return nil, err
		}
		what := "takes new sandboxes again"
		if on {
			what = "takes no new sandboxes"
		}
		h.nodeEvent(boxed.EventNodeCordoned, what+", as "+who.Owner+" asked")
	}
	return h.NodeInfo(ctx)
}

func (h *host) mayOperate(who boxed.Principal, ref string) error {
	if !who.Admin() {
		return boxed.Errorf(boxed.CodeForbidden, "only an administrator's key may do this")
	}
	return h.isMe(ref)
}

func (h *host) nodeEvent(typ boxed.EventType, message string) {
	h.cfg.Events.AppendEvent(boxed.Event{Type: typ, At: h.cfg.Now(), Node: h.cfg.ID, Message: message})
}

// CordonNode keeps new sandboxes away from a node, or lets them in again.
func (n *Node) CordonNode(ctx context.Context, ref string, on bool) (*boxed.NodeInfo, error) {
	api, id, err := n.nodeAt(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer kick(n.wake)
	return api.CordonNode(ctx, string(id), on)
}

// maxDrain bounds how long a drain may wait.
const maxDrain = boxed.Duration(30 * 24 * time.Hour)

// DrainNode empties this node.
func (h *host) DrainNode(ctx context.Context, ref string, within boxed.Duration) (*boxed.NodeInfo, error) {
	who := boxed.PrincipalFrom(ctx)
	if err := h.mayOperate(who, ref); err != nil {
		return nil, err
	}
	if within < 0 || within > maxDrain {
		return nil, invalid("within", "%s must be between 0s and %s", within, maxDrain)
	}
	now := h.cfg.Now()
	if err := h.settings.set(Settings{Cordoned: true, By: who.Owner, At: now, DrainUntil: now.Add(within.D())}); err != nil {
		return nil, err
	}
	h.nodeEvent(boxed.EventNodeCordoned, "is drained within "+within.String()+", as "+who.Owner+" asked")
	return h.NodeInfo(ctx)
}

// DrainNode empties a node.
func (n *Node) DrainNode(ctx context.Context, ref string, within boxed.Duration) (*boxed.NodeInfo, error) {
	api, id, err := n.nodeAt(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer kick(n.wake)
	return api.DrainNode(ctx, string(id), within)
}

// drainStatus says what a drain waits for; nil without one.
func (h *host) drainStatus() *boxed.Drain {
	set := h.settings.get()
	if set.DrainUntil.IsZero() {
		return nil
	}
	d := &boxed.Drain{Since: set.At, Deadline: set.DrainUntil, Waiting: []boxed.ID{}}
	for _, s := range h.cfg.Manager.List() {
		if !s.State.Ended() {
			d.Waiting = append(d.Waiting, s.ID)
		}
	}
	slices.Sort(d.Waiting)
	return d
}

// How often a drain is looked at, and how long after sandboxes that would not end.
const (
	drainEvery = 250 * time.Millisecond
	drainAgain = 5 * time.Second
)

// seeDrains sees drains through, until ctx ends.
func (h *host) seeDrains(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		next := drainEvery
		if err := h.drainDue(ctx); err != nil && ctx.Err() == nil {
			h.cfg.Log.Warn("drain the node", "err", err)
			next = drainAgain
		}
		pause.Reset(next)
	}
}

// drainDue ends what is left when a drain's time is up, and says once when the
// node is empty.
func (h *host) drainDue(ctx context.Context) error {
	set := h.settings.get()
	d := h.drainStatus()
	switch {
	case d == nil || set.Drained:
		return nil
	case len(d.Waiting) == 0 && h.cfg.Manager.Recovered():
		drained := set
		drained.Drained = true
		if changed, err := h.settings.change(set, drained); !changed || err != nil {
			return err
		}
		h.nodeEvent(boxed.EventNodeDrained, "nothing is left on the node")
		return nil
	case h.cfg.Now().Before(d.Deadline):
		return nil
	}
	var ending errgroup.Group
	ending.SetLimit(8)
	for _, id := range d.Waiting {
		ending.Go(func() error {
			if err := h.cfg.Manager.Evict(ctx, id, boxed.EndDrained, "its node was drained"); err != nil {
				return fmt.Errorf("end sandbox %s: %w", id, err)
			}
			return nil
		})
	}
	return ending.Wait()
}

// Explain is a Node's: a host alone places nothing.
func (h *host) Explain(context.Context, boxed.Spec) (*boxed.Explanation, error) {
	return nil, boxed.Errorf(boxed.CodeInternal, "a host does not place")
}

// warm is how many warm sandboxes are ready, by template.
func (h *host) warm() map[string]int {
	pools, _, _ := h.cfg.Manager.Pools()
	ready := map[string]int{}
	for _, p := range pools {
		ready[p.Template] += p.Ready
	}
	return ready
}

// summary is what this node tells of itself.
func (h *host) summary(ctx context.Context) boxed.NodeSummary {
	info, err := h.lately(ctx)
	used, idle := h.cfg.Manager.Used()
	state := h.state(info, err, used)
	s := boxed.NodeSummary{
		ID: h.cfg.ID, Name: h.cfg.Name, Version: h.cfg.Version, State: boxed.NodeAlive, At: h.cfg.Now(),
		Ready: err == nil && h.cfg.Manager.Recovered() && len(info.Runtimes) > 0, Cordoned: state.Cordoned, Draining: state.Draining,
		Place: h.cfg.Place, Labels: h.cfg.Labels(), Arch: state.Arch, Runtimes: append([]string{}, info.Runtimes...), Default: info.Default,
		Total: state.Total, Capacity: state.Usable(), Used: used, Idle: idle, Warm: h.warm(), Load: h.cfg.Load(),
	}
	for ref := range h.cfg.Manager.Images() {
		s.Images = append(s.Images, boxed.ImageHash(ref))
	}
	slices.Sort(s.Images)
	if problems := append(h.problems(info, err), info.Problems...); len(problems) > 0 {
		s.Problem = problems[0]
	}
	return s
}

// load is this machine's of the last minute per core; 0 where it cannot be read.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	v, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return v / float64(runtime.NumCPU())
}

// How often a node looks at itself, and how old what others know may become.
const (
	summaryEvery = 250 * time.Millisecond
	summaryAge   = 10 * time.Second
)

// Run tells the mesh of this node, and sees a drain through, until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	tick := time.NewTicker(summaryEvery)
	defer tick.Stop()
	var drains sync.WaitGroup
	defer drains.Wait()
	drains.Go(func() { n.seeDrains(ctx) }) // apart: it waits for sandboxes to end
	var last boxed.NodeSummary
	for {
		if m := n.mesh.Load(); m != nil {
			now := n.summary(ctx)
			if changed(last, now) {
				if err := (*m).Publish(now); err != nil {
					n.cfg.Log.Error("tell the mesh of this node", "err", err)
				}
				last = now
			}
			n.tellUsage(*m)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-n.changed:
		case <-n.wake:
			last = boxed.NodeSummary{}
		}
	}
}

// changed reports whether others are to be told.
func changed(a, b boxed.NodeSummary) bool {
	if b.At.Sub(a.At) > summaryAge || int(a.Load*4) != int(b.Load*4) {
		return true
	}
	a.At, a.Load, b.At, b.Load = time.Time{}, 0, time.Time{}, 0
	return !reflect.DeepEqual(a, b)
}
