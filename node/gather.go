package node

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// How long other nodes have to answer.
const (
	listLimit    = 3 * time.Second // a list; who does not is named in it
	resolveLimit = 3 * time.Second
	followPause  = 250 * time.Millisecond // between tries to follow a node's events; it grows
	followRest   = 5 * time.Second        // up to this
)

// List returns a page of the sandboxes of all nodes, newest first. Nodes that do
// not answer are named, and are read from where they were left when they do.
func (n *Node) List(ctx context.Context, f boxed.Filter) (boxed.List, error) {
	mesh := n.others(ctx)
	if mesh == nil {
		return n.host.List(ctx, f)
	}
	f, err := checkFilter(ctx, f)
	if err != nil {
		return boxed.List{}, err
	}
	cursor, err := parseCursor(f.Cursor)
	if err != nil {
		return boxed.List{}, err
	}
	own, err := n.host.List(ctx, f)
	if err != nil {
		return boxed.List{}, err
	}
	limited, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	// Each node looks up its own place in the cursor.
	lists, failed := each(limited, n, mesh, func(api boxed.API) (boxed.List, error) { return api.List(limited, f) })
	if err := ctx.Err(); err != nil {
		return boxed.List{}, err
	}
	for id, err := range failed {
		n.cfg.Log.Warn("a node does not list its sandboxes", "peer", id, "err", err)
	}
	lists[n.cfg.ID] = own
	page := merge(lists, f.Limit, cursor)
	page.Incomplete = slices.Sorted(maps.Keys(failed))
	return page, nil
}

// merge makes one page of the pages of many nodes.
func merge(lists map[boxed.NodeID]boxed.List, limit int, cursor places) boxed.List {
	type item struct {
		at   string
		from boxed.NodeID
		boxed.Sandbox
	}
	var all []item
	more := false
	for id, list := range lists {
		more = more || list.Next != ""
		for _, s := range list.Sandboxes {
			if s.ID.Node() == id { // a node speaks for its own
				all = append(all, item{position(&s), id, s})
			}
		}
	}
	slices.SortFunc(all, func(a, b item) int { return strings.Compare(a.at, b.at) })
	more = more || len(all) > limit
	page := boxed.List{Sandboxes: []boxed.Sandbox{}}
	last := map[boxed.NodeID]string{}
	for _, it := range all[:min(limit, len(all))] {
		page.Sandboxes = append(page.Sandboxes, it.Sandbox)
		last[it.from] = it.at
	}
	if more && len(all) > 0 {
		next := places{at: maps.Clone(cursor.at)}
		end := all[min(limit, len(all))-1].at
		for id := range lists {
			// What a node has before the page's end is in the page, so all that
			// answered are read up to there, unless a node was read further before.
			if end > next.at[id] {
				next.at[id] = end
			}
		}
		page.Next = next.String()
	}
	return page
}

// Resolve finds a sandbox by ID, name or prefix of the ID, on all nodes.
func (n *Node) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	if id, err := boxed.ParseID(ref); err == nil {
		return n.Get(ctx, id)
	}
	mesh := n.others(ctx)
	if mesh == nil {
		return n.host.Resolve(ctx, ref)
	}
	limited, cancel := context.WithTimeout(ctx, resolveLimit)
	defer cancel()
	var mu sync.Mutex
	var candidates []boxed.Sandbox
	var ids []boxed.ID // of ambiguous answers
	take := func(of boxed.NodeID, sb *boxed.Sandbox, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil && sb.ID.Node() == of {
			candidates = append(candidates, *sb)
		}
		for _, id := range idsOf(err) {
			if id.Node() == of {
				ids = append(ids, id)
			}
		}
	}
	_, failed := eachOf(limited, n, mesh, func(id boxed.NodeID, api boxed.API) (struct{}, error) {
		sb, err := api.Resolve(limited, ref)
		take(id, sb, err)
		if code := boxed.CodeOf(err); code == boxed.CodeNotFound || code == boxed.CodeConflict {
			return struct{}{}, nil
		}
		return struct{}{}, err
	})
	sb, err := n.host.Resolve(ctx, ref)
	take(n.cfg.ID, sb, err)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(ids) > 0 {
		for _, c := range candidates {
			ids = append(ids, c.ID)
		}
		slices.Sort(ids)
		return nil, boxed.Errorf(boxed.CodeConflict, "%q could be %d sandboxes; give more of the ID: %v", ref, len(ids), ids).With("ids", ids)
	}
	sb, err = pick(boxed.PrincipalFrom(ctx), ref, candidates)
	if boxed.CodeOf(err) == boxed.CodeNotFound && len(failed) > 0 {
		away := slices.Sorted(maps.Keys(failed))
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %q on the nodes that answer; no answer from %v", ref, away).With("incomplete", away)
	}
	return sb, err
}

// idsOf are the candidates that an ambiguous answer names: IDs where it comes from
// this process, and strings where it comes over HTTP.
func idsOf(err error) (ids []boxed.ID) {
	var e *boxed.Error
	if !errors.As(err, &e) || e.Code != boxed.CodeConflict {
		return nil
	}
	switch list := e.Detail["ids"].(type) {
	case []boxed.ID:
		return list
	case []any:
		for _, v := range list {
			if s, ok := v.(string); ok {
				ids = append(ids, boxed.ID(s))
			}
		}
	}
	return ids
}

// followed is an event of one node, by that node's own cursor.
type followed struct {
	from  boxed.NodeID
	event boxed.Event
	err   error
}

// Events yields what happens on all nodes. The cursor has a place for each. A
// node that falls silent is followed again from its place when it is back, so
// nothing of it is lost or comes twice.
func (n *Node) Events(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error] {
	mesh := n.others(ctx)
	if mesh == nil {
		return n.host.Events(ctx, after)
	}
	return func(yield func(boxed.Event, error) bool) {
		cursor, start, err := parseEventCursor(n.cfg.ID, after)
		if err != nil {
			yield(boxed.Event{}, err)
			return
		}
		fresh := cursor.at == nil // the stream begins here, and does not go on
		if fresh && after == "" {
			cursor.start = n.cfg.Now().UnixMilli()
		}
		ctx, cancel := context.WithCancel(ctx)
		items := make(chan followed)
		var following sync.WaitGroup
		defer following.Wait()
		defer cancel()
		follow := func(id boxed.NodeID, api boxed.API, joined bool) {
			f := follower{id: id, api: api, after: boxed.Cursor(cursor.after(id)), own: id == n.cfg.ID, out: items}
			switch {
			case f.after != "":
			case joined || start == boxed.CursorOldest: // it joined while we watch: all of it is new
				f.after = boxed.CursorOldest
			case fresh: // from now on, and if that breaks off from when the stream began
				f.since = time.UnixMilli(cursor.start).Add(-eventSlack)
			default: // nothing of it was yielded yet
				f.after, f.since = boxed.CursorOldest, time.UnixMilli(cursor.start).Add(-eventSlack)
			}
			following.Go(func() { f.run(ctx) })
		}
		known := map[boxed.NodeID]bool{n.cfg.ID: true}
		follow(n.cfg.ID, n.host, false)
		look := time.NewTicker(time.Second)
		defer look.Stop()
		first := true
		for {
			for _, s := range mesh.Nodes() {
				if !known[s.ID] {
					known[s.ID] = true
					follow(s.ID, mesh.Peer(s.ID), !first)
				}
			}
			first = false
			select {
			case <-ctx.Done():
				yield(boxed.Event{}, ctx.Err())
				return
			case <-look.C:
			case it := <-items:
				if it.err != nil {
					yield(boxed.Event{}, it.err)
					return
				}
				cursor = cursor.read(it.from, string(it.event.Cursor))
				it.event.Cursor = boxed.Cursor(cursor.String())
				if !yield(it.event, nil) {
					return
				}
			}
		}
	}
}

// parseEventCursor reads a cursor of the mesh; start is where nodes begin that are
// not in it.
func parseEventCursor(own boxed.NodeID, after boxed.Cursor) (cursor places, start boxed.Cursor, err error) {
	if after == "" || after == boxed.CursorOldest {
		return places{}, after, nil
	}
	if cursor, err = parsePlaces("after", string(after)); err != nil {
		// One of this node from before it had company.
		return places{at: map[boxed.NodeID]string{own: string(after)}}, "", nil
	}
	return cursor, "", nil
}

// eventSlack is by how much nodes' clocks may differ for a stream that begins now.
const eventSlack = 5 * time.Second

// follower passes on one node's events.
type follower struct {
	id    boxed.NodeID
	api   boxed.API
	after boxed.Cursor // "": from now on
	since time.Time    // what is older is not for this stream; zero: all is
	own   bool
	out   chan<- followed
}

// run goes on until ctx ends. This node's own errors are the caller's; another's are
// waited out, but for a cursor that has expired.
func (f *follower) run(ctx context.Context) {
	for pause := followPause; ctx.Err() == nil; pause = min(2*pause, followRest) {
		yielded, err := f.follow(ctx)
		if yielded {
			pause = followPause
		}
		if err != nil && (f.own || boxed.CodeOf(err) == boxed.CodeCursorExpired || boxed.CodeOf(err) == boxed.CodeInvalid) {
			f.send(ctx, followed{from: f.id, err: err})
			return
		}
		if f.after == "" { // whatever happened since the stream began
			f.after = boxed.CursorOldest
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// follow returns when the node's stream has broken off.
func (f *follower) follow(ctx context.Context) (yielded bool, _ error) {
	for e, err := range f.api.Events(ctx, f.after) {
		if err != nil || ctx.Err() != nil {
			return yielded, err
		}
		f.after, yielded = e.Cursor, true
		if e.At.Before(f.since) || !f.own && (e.Node != f.id || e.Sandbox != "" && e.Sandbox.Node() != f.id) {
			continue // it speaks for its own; what it sees of other nodes this node sees itself
		}
		if !f.send(ctx, followed{from: f.id, event: e}) {
			break
		}
	}
	return yielded, nil
}

func (f *follower) send(ctx context.Context, v followed) bool {
	select {
	case f.out <- v:
		return true
	case <-ctx.Done():
		return false
	}
}
