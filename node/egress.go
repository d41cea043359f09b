package node

import (
	"context"
	"errors"
	"iter"
	"slices"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// EgressConfig is what a node needs to let sandboxes out.
type EgressConfig struct {
	Keeper *egress.Keeper
	Audit  *egress.Audit
	Asks   *Asks
}

func errNoEgress() error {
	return boxed.Errorf(boxed.CodeUnavailable, "egress: this node gives sandboxes no way out").WithField("egress")
}

// checkEgress judges what a spec wants to reach, and says in it who asks.
func (h *host) checkEgress(spec *boxed.Spec, who boxed.Principal) error {
	if spec.Egress == nil {
		if h.cfg.Egress == nil || !who.Admin() || !h.cfg.Egress.Keeper.Wanted(who.Owner, nil) {
			return nil
		}
		spec.Egress = &boxed.EgressSpec{} // it has the default, to which an admin is not held
	}
	if h.cfg.Egress == nil {
		return errNoEgress()
	}
	spec.Egress.Admin = who.Admin()
	return h.cfg.Egress.Keeper.Check(who.Owner, spec.Egress)
}

// leaves finds a sandbox that the caller may see, on a node that lets sandboxes out.
func (h *host) leaves(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	s, err := h.mine(ctx, id)
	if err != nil {
		return nil, err
	}
	if h.cfg.Egress == nil {
		return nil, errNoEgress()
	}
	return s, nil
}

// GetEgress says what a sandbox may reach.
func (h *host) GetEgress(ctx context.Context, id boxed.ID) (*boxed.EgressStatus, error) {
	if _, err := h.leaves(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Egress.Keeper.Status(id), nil
}

// SetEgress changes what a sandbox may reach.
func (h *host) SetEgress(ctx context.Context, id boxed.ID, spec boxed.EgressSpec) (*boxed.EgressStatus, error) {
	if _, err := h.leaves(ctx, id); err != nil {
		return nil, err
	}
	spec.Admin = boxed.PrincipalFrom(ctx).Admin()
	if err := h.cfg.Manager.SetEgress(ctx, id, &spec); err != nil {
		return nil, err
	}
	return h.cfg.Egress.Keeper.Status(id), nil
}

// AllowEgress lets a sandbox reach one host more.
func (h *host) AllowEgress(ctx context.Context, id boxed.ID, a boxed.EgressAllowance) (*boxed.EgressStatus, error) {
	s, err := h.leaves(ctx, id)
	if err != nil {
		return nil, err
	}
	if a.For < 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "for: a time is positive").WithField("for")
	}
	if s.Egress == nil { // it had none so far: let it out, to nothing
		if _, err := h.SetEgress(ctx, id, boxed.EgressSpec{Profile: egress.NoProfile, OnDeny: boxed.DenyRefuse}); err != nil {
			return nil, err
		}
	}
	if err := h.cfg.Manager.AllowEgress(ctx, id, a.Host, a.For.D(), boxed.PrincipalFrom(ctx).Admin()); err != nil {
		return nil, err
	}
	return h.cfg.Egress.Keeper.Status(id), nil
}

// CheckEgress says what would happen to a connection.
func (h *host) CheckEgress(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	if _, err := h.leaves(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Egress.Keeper.Foresee(ctx, id, q)
}

// SuggestEgress is a profile of what the sandbox asked for.
func (h *host) SuggestEgress(ctx context.Context, id boxed.ID) (*boxed.EgressProfile, error) {
	s, err := h.leaves(ctx, id)
	if err != nil {
		return nil, err
	}
	return egress.Suggest(s, h.cfg.Egress.Audit.Records(egress.AuditFilter{Sandbox: id}))
}

// AnswerEgress answers a question about a connection that waits.
func (h *host) AnswerEgress(ctx context.Context, id boxed.ID, r boxed.EgressReply) error {
	if _, err := h.leaves(ctx, id); err != nil {
		return err
	}
	q, err := h.cfg.Egress.Asks.take(id, r.Question)
	if err != nil {
		return err
	}
	if r.Allow {
		if _, err := h.AllowEgress(ctx, id, boxed.EgressAllowance{Host: q.name(), For: r.For}); err != nil {
			return err // the question stays: this was no answer
		}
	}
	q.answer(r.Allow)
	return nil
}

// EgressLog yields audit records of this node that the caller may see.
func (h *host) EgressLog(ctx context.Context, f boxed.EgressFilter) iter.Seq2[boxed.EgressRecord, error] {
	return func(yield func(boxed.EgressRecord, error) bool) {
		filter, err := h.auditFilter(ctx, f)
		if err != nil {
			yield(boxed.EgressRecord{}, err)
			return
		}
		records := h.cfg.Egress.Audit.Records(filter)
		if f.Follow {
			records = h.cfg.Egress.Audit.Follow(ctx, filter)
		}
		for rec, err := range records {
			if errors.Is(err, egress.ErrAuditLine) {
				continue // whose it was nobody knows; audit verify says where it is
			}
			if !yield(rec, err) {
				return
			}
		}
	}
}

func (h *host) auditFilter(ctx context.Context, f boxed.EgressFilter) (egress.AuditFilter, error) {
	who := boxed.PrincipalFrom(ctx)
	filter := egress.AuditFilter{Sandbox: f.Sandbox, Owner: who.Owner, Denied: f.Denied, After: f.After, Limit: f.Limit}
	if filter.Limit <= 0 {
		filter.Limit = defaultPage
	}
	switch {
	case h.cfg.Egress == nil:
		return filter, errNoEgress()
	case who.Owner == "":
		return filter, errNobody()
	case f.Owner != "" && f.Owner != who.Owner && !who.Admin():
		return filter, boxed.Errorf(boxed.CodeForbidden, "only an admin reads another owner's audit records").WithField("owner")
	case f.Owner == "*", f.Owner == "" && f.Sandbox != "" && who.Admin():
		filter.Owner = ""
	case f.Owner != "":
		filter.Owner = f.Owner
	}
	return filter, nil
}

// GetEgress says what a sandbox may reach.
func (n *Node) GetEgress(ctx context.Context, id boxed.ID) (*boxed.EgressStatus, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.EgressStatus, error) { return a.GetEgress(ctx, id) })
}

// SetEgress changes what a sandbox may reach.
func (n *Node) SetEgress(ctx context.Context, id boxed.ID, spec boxed.EgressSpec) (*boxed.EgressStatus, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.EgressStatus, error) { return a.SetEgress(ctx, id, spec) })
}

// AllowEgress lets a sandbox reach one host more.
func (n *Node) AllowEgress(ctx context.Context, id boxed.ID, more boxed.EgressAllowance) (*boxed.EgressStatus, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.EgressStatus, error) { return a.AllowEgress(ctx, id, more) })
}

// CheckEgress says what would happen to a connection.
func (n *Node) CheckEgress(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.EgressAnswer, error) { return a.CheckEgress(ctx, id, q) })
}

// SuggestEgress is a profile of what the sandbox asked for.
func (n *Node) SuggestEgress(ctx context.Context, id boxed.ID) (*boxed.EgressProfile, error) {
	return on(ctx, n, id, func(a boxed.API) (*boxed.EgressProfile, error) { return a.SuggestEgress(ctx, id) })
}

// AnswerEgress answers a question about a connection that waits.
func (n *Node) AnswerEgress(ctx context.Context, id boxed.ID, r boxed.EgressReply) error {
	return n.do(ctx, id, func(a boxed.API) error { return a.AnswerEgress(ctx, id, r) })
}

// EgressLog yields audit records: of a sandbox's node, or of this one.
func (n *Node) EgressLog(ctx context.Context, f boxed.EgressFilter) iter.Seq2[boxed.EgressRecord, error] {
	if f.Sandbox == "" {
		return n.host.EgressLog(ctx, f)
	}
	a, err := n.at(ctx, f.Sandbox)
	if err != nil {
		return func(yield func(boxed.EgressRecord, error) bool) { yield(boxed.EgressRecord{}, err) }
	}
	return a.EgressLog(ctx, f)
}

// VerifyAudit checks this node's audit log.
func (h *host) VerifyAudit(ctx context.Context) (*boxed.AuditReport, error) {
	switch {
	case h.cfg.Egress == nil:
		return nil, errNoEgress()
	case !boxed.PrincipalFrom(ctx).Admin():
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an admin checks the audit log")
	}
	report, err := h.cfg.Egress.Audit.Verify()
	return &report, err
}

// MeshNodes are this node, first, and all others that are known.
func (n *Node) MeshNodes() []boxed.NodeSummary {
	if m := n.others(context.Background()); m != nil {
		return slices.Clone(m.Nodes())
	}
	return nil
}
