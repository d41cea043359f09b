package node

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Bounds of a list's page.
const (
	defaultPage = 100
	maxPage     = 1000
)

// mine finds a sandbox that the caller may see. What it may not see does not
// exist; neither does, so far, what another node owns.
func (h *host) mine(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	s, err := h.cfg.Manager.Get(id)
	if err != nil {
		return nil, err
	}
	switch {
	case boxed.PrincipalFrom(ctx).MaySee(s.Owner):
		return s, nil
	case !h.cfg.Manager.Recovered(): // as to what is not there
		return nil, errRecovering()
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %s", id)
}

func errRecovering() error {
	return boxed.Errorf(boxed.CodeNotReady, "the node is still recovering its sandboxes; try again in a moment")
}

// Get returns a living sandbox or an end record.
func (h *host) Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) { return h.mine(ctx, id) }

// List returns a page of this host's sandboxes, newest first.
func (h *host) List(ctx context.Context, f boxed.Filter) (boxed.List, error) {
	f, err := checkFilter(ctx, f)
	if err != nil {
		return boxed.List{}, err
	}
	cursor, err := parseCursor(f.Cursor)
	if err != nil {
		return boxed.List{}, err
	}
	after := cursor.after(h.cfg.ID)
	page := boxed.List{Sandboxes: []boxed.Sandbox{}}
	for _, s := range h.cfg.Manager.List() {
		if !matches(&s, f.Owner, f) || (after != "" && position(&s) <= after) {
			continue
		}
		if len(page.Sandboxes) == f.Limit {
			page.Next = cursor.read(h.cfg.ID, position(&page.Sandboxes[f.Limit-1])).String()
			break
		}
		page.Sandboxes = append(page.Sandboxes, s)
	}
	return page, nil
}

// checkFilter fills in whose sandboxes are listed, and how many.
func checkFilter(ctx context.Context, f boxed.Filter) (boxed.Filter, error) {
	who := boxed.PrincipalFrom(ctx)
	switch {
	case f.Owner == "":
		f.Owner = who.Owner
	case f.Owner != who.Owner && !who.Admin():
		return f, boxed.Errorf(boxed.CodeForbidden, "only an admin may list another owner's sandboxes").WithField("owner")
	}
	if f.Limit == 0 {
		f.Limit = defaultPage
	}
	if f.Limit < 1 || f.Limit > maxPage {
		return f, invalid("limit", "%d must be between 1 and %d", f.Limit, maxPage)
	}
	return f, nil
}

func matches(s *boxed.Sandbox, owner string, f boxed.Filter) bool {
	if owner != "*" && s.Owner != owner {
		return false
	}
	if f.Name != "" && s.Name != f.Name {
		return false
	}
	if len(f.States) == 0 && s.State.Ended() || len(f.States) > 0 && !slices.Contains(f.States, s.State) {
		return false
	}
	for key, value := range f.Labels {
		if have, ok := s.Labels[key]; !ok || have != value {
			return false
		}
	}
	return true
}

// position orders sandboxes newest first, as text.
func position(s *boxed.Sandbox) string {
	return fmt.Sprintf("%020d %s", ^uint64(s.CreatedAt.UnixNano()), s.ID)
}

// Resolve finds a sandbox of this host by ID, name or prefix of the ID.
func (h *host) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	if id, err := boxed.ParseID(ref); err == nil {
		return h.mine(ctx, id)
	}
	sb, err := pick(boxed.PrincipalFrom(ctx), ref, h.cfg.Manager.List())
	if boxed.CodeOf(err) == boxed.CodeNotFound && !h.cfg.Manager.Recovered() {
		return nil, errRecovering()
	}
	return sb, err
}

// pick finds what ref means among sandboxes. A caller's own living sandbox of
// that name wins; an admin finds others' by name too.
func pick(who boxed.Principal, ref string, among []boxed.Sandbox) (*boxed.Sandbox, error) {
	var own, others, prefixed []boxed.Sandbox
	for _, s := range among {
		switch {
		case ref == "" || !who.MaySee(s.Owner): // no name is not that of all who have none
		case s.Name == ref && !s.State.Ended() && s.Owner == who.Owner:
			own = append(own, s)
		case s.Name == ref && !s.State.Ended():
			others = append(others, s)
		case len(ref) >= boxed.MinPrefixLen && strings.HasPrefix(s.ID.Random(), ref):
			prefixed = append(prefixed, s)
		}
	}
	// An ended one is what is meant only if no living one is.
	if living := slices.DeleteFunc(slices.Clone(prefixed), func(s boxed.Sandbox) bool { return s.State.Ended() }); len(living) > 0 {
		prefixed = living
	}
	for _, found := range [][]boxed.Sandbox{own, others, prefixed} {
		if len(found) == 1 {
			return &found[0], nil
		}
		if len(found) > 1 {
			var ids []boxed.ID
			for _, s := range found {
				ids = append(ids, s.ID)
			}
			slices.Sort(ids)
			return nil, boxed.Errorf(boxed.CodeConflict, "%q could be %d sandboxes; give more of the ID: %v", ref, len(ids), ids).With("ids", ids)
		}
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %q", ref)
}

// Wait returns when the sandbox is in the state, or has ended.
func (h *host) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	if _, err := h.mine(ctx, id); err != nil {
		return nil, err
	}
	return h.cfg.Manager.Wait(ctx, id, until)
}

// Update changes a living sandbox.
func (h *host) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	s, err := h.mine(ctx, id)
	if err != nil {
		return nil, err
	}
	if u.Labels != nil {
		if err := checkLabels(*u.Labels); err != nil {
			return nil, err
		}
	}
	if u.IdleTimeout != nil {
		idle := *u.IdleTimeout
		if idle == boxed.Never {
			idle = 0
		}
		if err := checkIdle(idle); err != nil {
			return nil, err
		}
		u.IdleTimeout = &idle
	}
	if u.TTL != nil {
		if err := h.checkTTL("ttl", *u.TTL, boxed.PrincipalFrom(ctx)); err != nil {
			return nil, err
		}
	}
	var admit func(sandbox.Admission) error
	if u.Name != nil {
		if err := checkName(*u.Name); err != nil {
			return nil, err
		}
		admit = func(a sandbox.Admission) error { return nameFree(a, s.Owner, *u.Name, id) }
	}
	return h.cfg.Manager.Update(id, u, admit)
}

// Events yields what the caller may see of what happens after the cursor.
func (h *host) Events(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error] {
	who := boxed.PrincipalFrom(ctx)
	return func(yield func(boxed.Event, error) bool) {
		if after == "" {
			after = h.cfg.Events.EventsNow()
		}
		for {
			changed := h.cfg.Events.EventsChanged()
			events, err := h.cfg.Events.EventsAfter(after, 0)
			if err != nil {
				yield(boxed.Event{}, err)
				return
			}
			for _, e := range events {
				after = e.Cursor
				if (who.Admin() || (e.Owner != "" && e.Owner == who.Owner)) && !yield(e, nil) {
					return
				}
			}
			if len(events) > 0 {
				continue
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(boxed.Event{}, ctx.Err())
				return
			}
		}
	}
}
