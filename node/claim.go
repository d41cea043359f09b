package node

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Times of idempotency keys.
const (
	claimLife   = 30 * time.Second // without being renewed
	claimRenew  = 10 * time.Second
	claimLimit  = 3 * time.Second // for other nodes to answer
	keyKept     = 24 * time.Hour  // as end records are
	maxClaims   = 100_000         // creates under way that a node knows of
	maxIdempKey = 128             // bytes
)

// claims are the creates with an idempotency key that are under way somewhere: who
// makes one tells all nodes first. So of two that are asked for the same at the
// same time at least one is told to wait, and no sandbox is made twice.
type claims struct {
	mu  sync.Mutex
	now func() time.Time
	by  map[claimed]claim
}

type claimed struct{ owner, key string }

type claim struct {
	node  boxed.NodeID
	until time.Time
}

// take is a claim by a node. With renew the node's own claim is no obstacle.
func (c *claims) take(what claimed, by boxed.NodeID, renew bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if old, ok := c.by[what]; ok && !(renew && old.node == by) && now.Before(old.until) {
		return errInProgress(old.node)
	}
	if len(c.by) >= maxClaims {
		for k, v := range c.by {
			if now.After(v.until) {
				delete(c.by, k)
			}
		}
		if len(c.by) >= maxClaims {
			return boxed.Errorf(boxed.CodeNotReady, "too many creates with an idempotency key are under way; try again in a moment")
		}
	}
	if c.by == nil {
		c.by = map[claimed]claim{}
	}
	c.by[what] = claim{by, now.Add(claimLife)}
	return nil
}

func (c *claims) release(what claimed, by boxed.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by[what].node == by {
		delete(c.by, what)
	}
}

func errInProgress(by boxed.NodeID) *boxed.Error {
	return boxed.Errorf(boxed.CodeNotReady, "a create with this idempotency key is under way, by node %s; try again in a moment", by).With("reason", "in_progress")
}

// errMade is the admission's answer to a create that was made before.
type errMade struct {
	id   boxed.ID
	hash string
}

func (e *errMade) Error() string { return "it was made before: " + string(e.id) }

// made is the sandbox of an earlier create with the same key.
func (h *host) made(ctx context.Context, e *errMade, spec boxed.Spec) (*boxed.Sandbox, error) {
	if e.hash != spec.Hash() {
		return nil, boxed.Errorf(boxed.CodeConflict, "the idempotency key was used for another create, of the sandbox %s; use a new one", e.id).
			WithField("idempotency_key").With("ids", []boxed.ID{e.id})
	}
	return h.cfg.Manager.Wait(ctx, e.id, boxed.StateRunning)
}

func checkIdempotencyKey(key string) error {
	if len(key) > maxIdempKey || !keyVisible(key) {
		return invalid("idempotency_key", "it is at most %d visible characters", maxIdempKey)
	}
	return nil
}

// Claim tells this host that another node makes a sandbox under an idempotency key
// of the caller's, or that it no longer does. The sandbox is one that was made
// here under that key before. Errors: not_ready (another makes it now).
func (h *host) Claim(ctx context.Context, key string, done bool) (*boxed.Sandbox, error) {
	by, owner := boxed.HopFrom(ctx), boxed.PrincipalFrom(ctx).Owner
	if by == "" || owner == "" {
		return nil, boxed.Errorf(boxed.CodeForbidden, "nodes ask each other this")
	}
	what := claimed{owner, key}
	if done {
		h.claims.release(what, by)
		return nil, nil
	}
	if !h.cfg.Manager.Recovered() {
		return nil, errRecovering()
	}
	if id, ok := h.cfg.Manager.Keyed(owner, key); ok {
		return h.cfg.Manager.Get(id)
	}
	return nil, h.claims.take(what, by, true)
}

// Claim is a host's.
func (n *Node) Claim(ctx context.Context, key string, done bool) (*boxed.Sandbox, error) {
	return n.host.Claim(ctx, key, done)
}

// createOnce makes a sandbox under an idempotency key, or finds the one that was
// made under it, on whatever node. While a node is silent that may know, it makes
// none: it would be the second.
func (n *Node) createOnce(ctx context.Context, mesh Mesh, spec boxed.Spec, who boxed.Principal) (*boxed.Sandbox, error) {
	if err := checkIdempotencyKey(spec.IdempotencyKey); err != nil {
		return nil, err
	}
	what := claimed{who.Owner, spec.IdempotencyKey}
	if err := n.claims.take(what, n.cfg.ID, false); err != nil {
		return nil, err
	}
	defer n.claims.release(what, n.cfg.ID)
	if id, ok := n.cfg.Manager.Keyed(who.Owner, spec.IdempotencyKey); ok {
		return n.host.Create(ctx, pinned(spec, id.Node()))
	}
	for _, s := range mesh.Nodes() {
		if s.State != boxed.NodeAlive && mayKnow(s, spec.IdempotencyKey, n.cfg.Now()) {
			e := errSilent(s)
			e.Message = "it is not known whether this idempotency key was used: " + e.Message + "; or use a new key to make a second sandbox"
			return nil, e
		}
	}
	found, err := n.claimAll(ctx, mesh, spec.IdempotencyKey)
	renewing, stop := context.WithCancel(ctx)
	var renewer sync.WaitGroup
	defer func() {
		stop()
		renewer.Wait()
		n.tellAll(ctx, mesh, spec.IdempotencyKey)
	}()
	switch {
	case err != nil:
		return nil, err
	case found != nil: // its node compares the spec, and waits for it
		return mesh.Peer(found.ID.Node()).Create(ctx, pinned(spec, found.ID.Node()))
	}
	renewer.Go(func() { n.renew(renewing, mesh, what) })
	return n.place(ctx, mesh, spec, who)
}

func pinned(spec boxed.Spec, to boxed.NodeID) boxed.Spec {
	spec.Node = to
	return spec
}

// claimAll tells all nodes that are there, and finds the sandbox if one has it.
func (n *Node) claimAll(ctx context.Context, mesh Mesh, key string) (*boxed.Sandbox, error) {
	limited, cancel := context.WithTimeout(ctx, claimLimit)
	defer cancel()
	got, failed := each(limited, n, mesh, func(api boxed.API) (*boxed.Sandbox, error) { return api.Claim(limited, key, false) })
	for id, sb := range got {
		if sb != nil && sb.ID.Node() == id { // a node speaks for its own
			return sb, nil
		}
	}
	for id, err := range failed {
		if s, _ := mesh.Node(id); s.State != boxed.NodeAlive && !mayKnow(s, key, n.cfg.Now()) {
			continue
		}
		var e *boxed.Error
		if errors.As(err, &e) && e.Detail["reason"] == "in_progress" {
			return nil, e
		}
		return nil, boxed.Errorf(boxed.CodeNotReady, "node %s does not say whether this idempotency key was used; try again: %w", id, err).With("node", id)
	}
	return nil, nil
}

// tellAll says that the create is over, also when its caller is gone.
func (n *Node) tellAll(ctx context.Context, mesh Mesh, key string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimLimit)
	defer cancel()
	each(ctx, n, mesh, func(api boxed.API) (*boxed.Sandbox, error) { return api.Claim(ctx, key, true) })
}

func (n *Node) renew(ctx context.Context, mesh Mesh, what claimed) {
	tick := time.NewTicker(claimRenew)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = n.claims.take(what, n.cfg.ID, true)
			limited, cancel := context.WithTimeout(ctx, claimLimit)
			each(limited, n, mesh, func(api boxed.API) (*boxed.Sandbox, error) { return api.Claim(limited, what.key, false) })
			cancel()
		}
	}
}

// mayKnow reports whether a node that is away may have made a sandbox under a key:
// not if it has been away for longer than keys are kept, and not if the key says
// that it is younger (a UUID of version 7 begins with the time that it was made).
func mayKnow(s boxed.NodeSummary, key string, now time.Time) bool {
	if now.Sub(s.Since) > keyKept {
		return false
	}
	made, ok := uuidTime(key)
	return !ok || made.Before(s.Since.Add(boxed.MaxClockSkew))
}

// uuidTime is when a UUID of version 7 was made (RFC 9562).
func uuidTime(key string) (time.Time, bool) {
	parts := strings.Split(key, "-")
	if len(key) != 36 || len(parts) != 5 || !slices.Equal([]int{len(parts[0]), len(parts[1]), len(parts[2]), len(parts[3]), len(parts[4])}, []int{8, 4, 4, 4, 12}) || parts[2][0] != '7' {
		return time.Time{}, false
	}
	raw, err := hex.DecodeString(strings.Join(parts, ""))
	if err != nil {
		return time.Time{}, false
	}
	var ms int64
	for _, b := range raw[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms), true
}
