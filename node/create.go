package node

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/scheduler"
)

// Create completes and checks the spec, and makes the sandbox on this host if it
// fits.
func (h *host) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return nil, errNobody()
	}
	asked := spec
	if spec.Egress != nil { // what is filled in is for this create
		own := *spec.Egress
		spec.Egress = &own
	}
	if err := checkIdempotencyKey(spec.IdempotencyKey); err != nil {
		return nil, err
	}
	spec, err := h.resolve(spec, who)
	if err != nil {
		return nil, err
	}
	spec.SpecHash = asked.Hash()
	info, engineErr := h.lately(ctx)
	ask := h.askFor(ctx, spec)
	used, _ := h.cfg.Manager.Used()
	state := h.state(info, engineErr, used)
	if r := scheduler.Fits(state, ask); r != nil && spec.IdempotencyKey == "" {
		return nil, r.AsError()
	}
	spec.Runtime = scheduler.RuntimeFor(state, ask)
	sb, err := h.cfg.Manager.Create(ctx, who.Owner, spec, func(a sandbox.Admission) error {
		if spec.IdempotencyKey != "" {
			if id, hash, made := a.Keyed(who.Owner, spec.IdempotencyKey); made {
				return &errMade{id, hash}
			}
		}
		// What it is judged by again when its room is reserved is the same Fits.
		if r := scheduler.Fits(h.state(info, engineErr, a.Used()), ask); r != nil {
			return r.AsError()
		}
		held, elsewhere := a.Owned(who.Owner), h.usage.elsewhere(who.Owner, h.cfg.Now())
		held.Sandboxes += elsewhere.Sandboxes
		held.MemoryBytes += elsewhere.MemoryBytes
		if err := h.withinQuota(held, who, spec.Limits); err != nil {
			return err
		}
		return nameFree(a, who.Owner, spec.Name, "")
	})
	var before *errMade
	if errors.As(err, &before) {
		return h.made(ctx, before, asked)
	}
	return sb, err
}

func errNobody() error {
	return boxed.Errorf(boxed.CodeUnauthenticated, "nobody is known to ask")
}

// askFor is what a resolved spec asks of a node.
func (h *host) askFor(ctx context.Context, spec boxed.Spec) (ask scheduler.Ask) {
	ask = scheduler.Ask{
		Limits: spec.Limits, Runtime: spec.Runtime, Node: spec.Node, Strategy: h.cfg.Strategy,
		Entry: cmp.Or(boxed.HopFrom(ctx), h.cfg.ID),
	}
	if spec.Template == "" {
		// A template's image is on every node that has the template, or will be: to go
		// where it is already would keep a node without sandboxes without them.
		ask.Image = spec.Image
	}
	defer func() { ask.Near = h.homes(ctx, spec, ask.Near) }()
	if p := spec.Placement; p != nil {
		ask.Isolation, ask.Labels = p.Isolation, p.NodeLabels
		for _, id := range p.Near {
			ask.Near = append(ask.Near, id.Node())
		}
		for _, id := range p.Apart {
			ask.Apart = append(ask.Apart, id.Node())
		}
	}
	return ask
}

// homes are the nodes that a spec must be on: near, and those that have its secrets. Where
// no node is both, none fits.
func (h *host) homes(ctx context.Context, spec boxed.Spec, near []boxed.NodeID) []boxed.NodeID {
	if h.cfg.Egress == nil {
		return near
	}
	homes := h.cfg.Egress.Keeper.Homes(boxed.PrincipalFrom(ctx).Owner, spec.Egress)
	switch {
	case homes == nil:
		return near
	case near == nil:
		return homes
	}
	if homes = slices.DeleteFunc(homes, func(id boxed.NodeID) bool { return !slices.Contains(near, id) }); len(homes) == 0 {
		return []boxed.NodeID{""}
	}
	return homes
}

func (h *host) withinQuota(held boxed.Capacity, who boxed.Principal, l boxed.Limits) error {
	q := h.cfg.Quota(who.Owner)
	if who.Sandboxes > 0 && (q.Sandboxes == 0 || who.Sandboxes < q.Sandboxes) {
		q.Sandboxes = who.Sandboxes
	}
	if who.MemoryBytes > 0 && (q.MemoryBytes == 0 || who.MemoryBytes < q.MemoryBytes) {
		q.MemoryBytes = who.MemoryBytes
	}
	switch {
	case q.Sandboxes > 0 && held.Sandboxes >= q.Sandboxes:
		return boxed.Errorf(boxed.CodeQuota, "you have %d sandboxes, as many as you may; destroy one first", held.Sandboxes).
			With("limit", q.Sandboxes)
	case q.MemoryBytes > 0 && held.MemoryBytes+l.MemoryBytes > q.MemoryBytes:
		return boxed.Errorf(boxed.CodeQuota, "your sandboxes hold %d MiB of the %d MiB that they may; destroy one, or ask for less",
			held.MemoryBytes/boxed.MiB, q.MemoryBytes/boxed.MiB).With("limit", q.MemoryBytes).WithField("limits.memory_bytes")
	}
	return nil
}

func nameFree(a sandbox.Admission, owner, name string, but boxed.ID) error {
	if name == "" {
		return nil
	}
	if id := a.Named(owner, name); id != "" && id != but {
		return boxed.Errorf(boxed.CodeConflict, "your sandbox %s already has the name %q", id, name).WithField("name").With("ids", []boxed.ID{id})
	}
	return nil
}

func (h *host) templateNames() []string { return slices.Sorted(maps.Keys(h.cfg.Templates)) }

// resolve completes a spec from its template and the defaults, and refuses what
// this node does not serve, naming the field.
func (h *host) resolve(spec boxed.Spec, who boxed.Principal) (boxed.Spec, error) {
	defaults, env := h.cfg.Defaults, map[string]string{}
	switch {
	case spec.Template != "" && spec.Image != "":
		return spec, boxed.Errorf(boxed.CodeInvalid, "give a template or an image, not both").WithField("image")
	case spec.Image == "":
		if spec.Template == "" {
			spec.Template = boxed.DefaultTemplate
		}
		t, ok := h.cfg.Templates[spec.Template]
		if !ok {
			return spec, boxed.Errorf(boxed.CodeInvalid, "there is no template %q; there are %q", spec.Template, h.templateNames()).WithField("template")
		}
		defaults, env, spec.Image = t.Limits, t.Env, t.Image
		if spec.Runtime == "" {
			spec.Runtime = t.Runtime
		}
	}
	if spec.Dir == "" {
		spec.Dir = boxed.DefaultDir
	}
	if spec.TTL == 0 {
		spec.TTL = h.cfg.TTL
	}
	if spec.IdleTimeout == 0 {
		spec.IdleTimeout = h.cfg.Idle
	}
	if spec.IdleTimeout == boxed.Never {
		spec.IdleTimeout = 0
	}
	asked := spec.Limits
	spec.Limits = asked.Or(defaults).FitTmpfs(asked)
	if err := h.check(&spec, who); err != nil {
		return spec, err
	}
	spec.Env = merged(env, spec.Env)
	return spec, checkRecorded(spec.Env)
}

func merged(base, over map[string]string) map[string]string {
	if len(base) == 0 {
		return over
	}
	env := maps.Clone(base)
	maps.Copy(env, over)
	return env
}
