package node

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// maxPlaces is how many nodes are asked to take one sandbox.
const maxPlaces = 4

// nameLimit is how long other nodes have to say that they have a name.
const nameLimit = 2 * time.Second

// Create places a sandbox on the best node. It is made there or, when the node
// refuses because what was known of it was old, on another.
func (n *Node) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	mesh := n.others(ctx)
	if mesh == nil {
		defer kick(n.changed)
		return n.host.Create(ctx, spec)
	}
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return nil, errNobody()
	}
	if spec.IdempotencyKey != "" {
		return n.createOnce(ctx, mesh, spec, who)
	}
	return n.place(ctx, mesh, spec, who)
}

// place makes the sandbox on the best node.
func (n *Node) place(ctx context.Context, mesh Mesh, spec boxed.Spec, who boxed.Principal) (*boxed.Sandbox, error) {
	resolved, err := n.resolveAnywhere(mesh, spec, who)
	if err != nil {
		return nil, err
	}
	if err := n.nameFree(ctx, mesh, spec.Name, who.Owner); err != nil {
		return nil, err
	}
	if spec.Node != "" { // its own books say whether it fits; what was told of it may be old
		if _, known := mesh.Node(spec.Node); !known {
			return nil, boxed.Errorf(boxed.CodeNotFound, "there is no node %s", spec.Node).WithField("node")
		}
		return n.createAt(ctx, mesh, spec.Node, spec, n.askFor(ctx, resolved))
	}
	ask := n.askFor(ctx, resolved)
	ask.Exclude = map[boxed.NodeID]error{}
	var refusal error
	for range maxPlaces {
		choice, err := scheduler.Place(n.states(ctx, mesh, resolved, ask), ask)
		if err != nil {
			return nil, err
		}
		sb, err := n.createAt(ctx, mesh, choice.Node, spec, ask)
		if err == nil || !passesOn(err) || ctx.Err() != nil {
			return sb, err
		}
		n.cfg.Log.Info("a node refused a sandbox", "peer", choice.Node, "err", err)
		ask.Exclude[choice.Node], refusal = err, err
	}
	return nil, boxed.Errorf(boxed.CodeExhausted, "%d nodes refused it, one after the other; the last one said: %s", len(ask.Exclude), boxed.AsError(refusal).Message).
		With("nodes", excluded(ask.Exclude))
}

func excluded(refused map[boxed.NodeID]error) (list []scheduler.Rejection) {
	for id, err := range refused {
		list = append(list, scheduler.Rejection{Node: id, Reason: scheduler.Refused, Message: boxed.AsError(err).Message})
	}
	slices.SortFunc(list, func(a, b scheduler.Rejection) int { return strings.Compare(string(a.Node), string(b.Node)) })
	return list
}

// createAt is a create that is pinned to the node that was chosen.
func (n *Node) createAt(ctx context.Context, mesh Mesh, id boxed.NodeID, spec boxed.Spec, ask scheduler.Ask) (*boxed.Sandbox, error) {
	spec.Node = id
	if id == n.cfg.ID {
		defer kick(n.changed)
		return n.host.Create(ctx, spec)
	}
	placed := n.ledger.Placed(id, ask, n.cfg.Now())
	sb, err := mesh.Peer(id).Create(ctx, spec)
	if err != nil {
		if passesOn(err) { // else it may exist
			n.ledger.Withdraw(placed)
		}
		return nil, err
	}
	n.ledger.Admitted(placed, sb.CreatedAt)
	return sb, nil
}

// passesOn reports whether another node may be asked after one refused. Where it
// is not known what became of the request, none is: there would be two.
func passesOn(err error) bool {
	switch boxed.CodeOf(err) {
	case boxed.CodeExhausted, boxed.CodeNotReady, boxed.CodeUnavailable:
		return true
	}
	return false
}

// resolveAnywhere completes a spec as far as this node can: a template that only
// others have is theirs to complete.
func (n *Node) resolveAnywhere(mesh Mesh, spec boxed.Spec, who boxed.Principal) (boxed.Spec, error) {
	if spec.Template != "" && spec.Image == "" {
		if _, here := n.cfg.Templates[spec.Template]; !here && offered(mesh, spec.Template) {
			unknown := spec
			unknown.Template, unknown.Image = "", "of the template "+spec.Template
			resolved, err := n.resolve(unknown, who)
			resolved.Template, resolved.Image = spec.Template, ""
			return resolved, err
		}
	}
	return n.resolve(spec, who)
}

// offered reports whether another node has warm sandboxes of a template, which is
// how others know of it.
func offered(mesh Mesh, template string) bool {
	for _, s := range mesh.Nodes() {
		if _, ok := s.Warm[template]; ok {
			return true
		}
	}
	return false
}

// states is every node as the scheduler sees it: this one by its own books, the
// others by what they last told and what they were given since.
func (n *Node) states(ctx context.Context, mesh Mesh, spec boxed.Spec, ask scheduler.Ask) []scheduler.NodeState {
	info, err := n.lately(ctx)
	used, _ := n.cfg.Manager.Used()
	own := n.state(info, err, used)
	own.Warm, own.Load, own.Images = n.warm()[spec.Template], n.cfg.Load(), n.cfg.Manager.Images()
	others := mesh.Nodes()
	list := append(make([]scheduler.NodeState, 0, 1+len(others)), own)
	now := n.cfg.Now()
	_, here := n.cfg.Templates[spec.Template]
	hash, images := boxed.ImageHash(spec.Image), map[string]bool{spec.Image: true}
	for _, s := range others {
		if s.ID == n.cfg.ID {
			continue
		}
		state := stateOf(&s, spec.Template)
		if slices.Contains(s.Images, hash) {
			state.Images = images
		}
		if _, there := s.Warm[spec.Template]; !here && spec.Template != "" && !there {
			state.Ready, state.Problem = false, fmt.Sprintf("it is not known to have the template %q", spec.Template)
		}
		n.ledger.Apply(&state, ask, s.At, now)
		list = append(list, state)
	}
	if !here && spec.Template != "" {
		list[0].Ready, list[0].Problem = false, fmt.Sprintf("it does not have the template %q", spec.Template)
	}
	return list
}

func stateOf(s *boxed.NodeSummary, template string) scheduler.NodeState {
	state := scheduler.NodeState{
		ID: s.ID, Arch: s.Arch, Runtimes: s.Runtimes, Default: s.Default, Labels: s.Labels, Silent: s.State != boxed.NodeAlive,
		Ready: s.Ready, Problem: s.Problem, Draining: s.Draining, Cordoned: s.Cordoned, Place: s.Place,
		Total: s.Total, Capacity: s.Capacity, Used: s.Used, Load: s.Load, RTT: time.Duration(s.RTT * float64(time.Millisecond)),
	}
	if template != "" {
		state.Warm = s.Warm[template]
	}
	switch s.State {
	case boxed.NodeSilent:
		state.Problem = "does not answer"
	case boxed.NodeStopped:
		state.Problem = "was stopped"
	}
	return state
}

// nameFree finds a name taken, here or on nodes that answer soon. Two that take
// one name at the same time both get it; who then means one of them is asked which.
func (n *Node) nameFree(ctx context.Context, mesh Mesh, name, owner string) error {
	if name == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, nameLimit)
	defer cancel()
	lists, _ := each(ctx, n, mesh, func(api boxed.API) (boxed.List, error) {
		return api.List(ctx, boxed.Filter{Name: name, Owner: owner, Limit: 1})
	})
	if own, err := n.host.List(ctx, boxed.Filter{Name: name, Owner: owner, Limit: 1}); err == nil {
		lists[n.cfg.ID] = own
	}
	for id, list := range lists {
		for _, sb := range list.Sandboxes {
			return boxed.Errorf(boxed.CodeConflict, "your sandbox %s on node %s already has the name %q", sb.ID, id, name).
				WithField("name").With("ids", []boxed.ID{sb.ID})
		}
	}
	return nil
}

// each asks every other node that is not known to be gone at the same time. What
// failed is by node too.
func each[T any](ctx context.Context, n *Node, mesh Mesh, ask func(boxed.API) (T, error)) (map[boxed.NodeID]T, map[boxed.NodeID]error) {
	return eachOf(ctx, n, mesh, func(_ boxed.NodeID, api boxed.API) (T, error) { return ask(api) })
}

// eachOf is each for who must know which node it asks.
func eachOf[T any](ctx context.Context, n *Node, mesh Mesh, ask func(boxed.NodeID, boxed.API) (T, error)) (map[boxed.NodeID]T, map[boxed.NodeID]error) {
	var (
		mu     sync.Mutex
		got    = map[boxed.NodeID]T{}
		failed = map[boxed.NodeID]error{}
		asking sync.WaitGroup
	)
	for _, s := range mesh.Nodes() {
		switch {
		case s.ID == n.cfg.ID:
			continue
		case s.State != boxed.NodeAlive: // it is not waited for; nothing hangs on it
			mu.Lock()
			failed[s.ID] = errSilent(s)
			mu.Unlock()
			continue
		}
		asking.Go(func() {
			answer, err := ask(s.ID, mesh.Peer(s.ID))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed[s.ID] = err
				return
			}
			got[s.ID] = answer
		})
	}
	asking.Wait()
	return got, failed
}

// errSilent says which node does not answer, and since when.
func errSilent(s boxed.NodeSummary) *boxed.Error {
	name := strings.TrimSpace(s.Name + " (" + string(s.ID) + ")")
	state := "does not answer"
	if s.State == boxed.NodeStopped {
		state = "was stopped"
	}
	since := ""
	if !s.Since.IsZero() && s.State != boxed.NodeAlive {
		since = ", since " + s.Since.UTC().Format(time.RFC3339)
	}
	return boxed.Errorf(boxed.CodeNotReady, "node %s %s%s; what runs there goes on, and can be reached when it is back", name, state, since).
		With("node", s.ID).With("since", s.Since)
}

// Explain says where a sandbox would go now, and why not elsewhere.
func (n *Node) Explain(ctx context.Context, spec boxed.Spec) (*boxed.Explanation, error) {
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return nil, errNobody()
	}
	names := map[boxed.NodeID]string{n.cfg.ID: n.cfg.Name}
	mesh := n.others(ctx)
	if mesh == nil {
		mesh = alone{n}
	}
	resolved, err := n.resolveAnywhere(mesh, spec, who)
	if err != nil {
		return nil, err
	}
	for _, s := range mesh.Nodes() {
		names[s.ID] = s.Name
	}
	ask := n.askFor(ctx, resolved)
	choice, err := scheduler.Place(n.states(ctx, mesh, resolved, ask), ask)
	out := &boxed.Explanation{Verdicts: []boxed.Verdict{}}
	if err == nil {
		out.Verdicts = append(out.Verdicts, boxed.Verdict{Node: choice.Node, Name: names[choice.Node], Chosen: true, Fits: true, Message: "it would go there"})
	}
	for _, r := range choice.Rejected() {
		out.Verdicts = append(out.Verdicts, boxed.Verdict{
			Node: r.Node, Name: names[r.Node], Fits: r.Reason == scheduler.OtherBetter, Reason: string(r.Reason), Message: r.Message,
		})
	}
	return out, nil
}

// alone is the mesh of a node that has none.
type alone struct{ n *Node }

func (a alone) Nodes() []boxed.NodeSummary                  { return nil }
func (a alone) Node(boxed.NodeID) (boxed.NodeSummary, bool) { return boxed.NodeSummary{}, false }
func (a alone) Publish(boxed.NodeSummary) error             { return nil }
func (a alone) Broadcast(string, []byte)                    {}
func (a alone) HTTP(boxed.NodeID) http.RoundTripper         { return nil }
func (a alone) Peer(boxed.NodeID) boxed.API                 { return a.n.host }
