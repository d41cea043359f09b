package node

import (
	"context"
	"maps"
	"slices"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/scheduler"
)

// Create completes and checks the spec, places the sandbox, and makes it here.
func (n *Node) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return nil, boxed.Errorf(boxed.CodeUnauthenticated, "nobody is known to ask")
	}
	spec, err := n.resolve(spec, who)
	if err != nil {
		return nil, err
	}
	info, engineErr := n.lately(ctx)
	ask := scheduler.Ask{Limits: spec.Limits, Runtime: spec.Runtime, Node: spec.Node}
	used, _ := n.cfg.Manager.Used()
	// The choice among nodes, of which there is one. What it is judged by again
	// when its room is reserved is the same Fits.
	if _, _, err := scheduler.Place([]scheduler.NodeState{n.state(info, engineErr, used)}, ask); err != nil {
		return nil, err
	}
	return n.cfg.Manager.Create(ctx, who.Owner, spec, func(a sandbox.Admission) error {
		if r := scheduler.Fits(n.state(info, engineErr, a.Used()), ask); r != nil {
			return r.AsError()
		}
		if err := n.withinQuota(a.Owned(who.Owner), who.Owner, spec.Limits); err != nil {
			return err
		}
		return nameFree(a, who.Owner, spec.Name, "")
	})
}

func (n *Node) withinQuota(held boxed.Capacity, owner string, l boxed.Limits) error {
	q := n.cfg.Quota(owner)
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

func (n *Node) templateNames() []string { return slices.Sorted(maps.Keys(n.cfg.Templates)) }

// resolve completes a spec from its template and the defaults, and refuses what
// this node does not serve, naming the field.
func (n *Node) resolve(spec boxed.Spec, who boxed.Principal) (boxed.Spec, error) {
	defaults, env := n.cfg.Defaults, map[string]string{}
	switch {
	case spec.Template != "" && spec.Image != "":
		return spec, boxed.Errorf(boxed.CodeInvalid, "give a template or an image, not both").WithField("image")
	case spec.Image == "":
		if spec.Template == "" {
			spec.Template = boxed.DefaultTemplate
		}
		t, ok := n.cfg.Templates[spec.Template]
		if !ok {
			return spec, boxed.Errorf(boxed.CodeInvalid, "there is no template %q; there are %q", spec.Template, n.templateNames()).WithField("template")
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
		spec.TTL = n.cfg.TTL
	}
	if spec.IdleTimeout == 0 {
		spec.IdleTimeout = n.cfg.Idle
	}
	if spec.IdleTimeout == boxed.Never {
		spec.IdleTimeout = 0
	}
	asked := spec.Limits
	spec.Limits = asked.Or(defaults).FitTmpfs(asked)
	if err := n.check(spec, who); err != nil {
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
