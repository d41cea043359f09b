package sandbox

import (
	"context"
	"errors"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Destroy ends a sandbox and returns when no process of it is left: what it held
// is free, and its end record is written. The engine clears the stopped container
// away behind that. It is idempotent, and concurrent calls wait for one another.
func (m *Manager) Destroy(ctx context.Context, id boxed.ID) error {
	b, err := m.find(id)
	if err != nil {
		return err
	}
	return b.destroy(ctx, boxed.EndDestroyed, "destroyed as asked", boxed.StateStopped)
}

// Evict is Destroy for a reason of the node's.
func (m *Manager) Evict(ctx context.Context, id boxed.ID, reason boxed.EndReason, why string) error {
	b, err := m.find(id)
	if err != nil {
		return err
	}
	return b.destroy(ctx, reason, why, boxed.StateStopped)
}

// destroySteps remove what createSteps left, all of it or a part. Once the
// agent's exit has taken every process with it, remove and directory are put off:
// the engine takes 50 ms and more for what nobody waits for.
var destroySteps = []step{
	{"stopping", (*box).stepStopping},
	{"end", (*box).stepEnd},
	{"remove", unlessGone((*box).stepRemove)},
	{"unlink", func(b *box, _ context.Context) error { b.shutEgress(); b.closeHost(); return nil }},
	{"directory", unlessGone((*box).stepDirectory)},
	{"ended", (*box).stepEnded},
}

func unlessGone(do func(*box, context.Context) error) func(*box, context.Context) error {
	return func(b *box, ctx context.Context) error {
		if b.gone {
			return nil
		}
		return do(b, ctx)
	}
}

// destroy ends the sandbox for a reason. The first reason stays. If a step
// fails the sandbox is stopping, and the sweep tries again.
func (b *box) destroy(ctx context.Context, reason boxed.EndReason, why string, final boxed.State) error {
	b.mu.Lock()
	if b.rec.Ending == "" {
		// Refused from here on: what is asked for after its end was decided is gone.
		b.rec.Ending, b.rec.Why, b.rec.Failed = reason, why, final == boxed.StateFailed
	}
	if b.cancel != nil {
		b.cancel()
	}
	b.mu.Unlock()
	// Half an end is worse than none: the caller's leaving stops nothing.
	ctx = context.WithoutCancel(ctx)
	b.turn.Lock()
	defer b.turn.Unlock()
	if b.record().Sandbox.State.Ended() {
		return nil
	}
	defer b.clearLater()
	for _, s := range destroySteps {
		if err := b.run(ctx, s); err != nil {
			b.removeNow(ctx)
			err = boxed.Errorf(boxed.CodeOf(err), "destroy: %s: %w; it is tried again", s.name, err)
			b.mu.Lock()
			news := b.end.failed(b.m.cfg.Now(), err)
			b.mu.Unlock()
			if news {
				b.m.log.Error("destroy", "sandbox", b.id, "step", s.name, "err", err)
			}
			return err
		}
	}
	return nil
}

// removeNow removes what was put off, if the end cannot be written: what fills a
// disk must not wait for room on it.
func (b *box) removeNow(ctx context.Context) {
	if !b.gone {
		return
	}
	b.gone = false
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if err := b.stepRemove(ctx); err != nil {
		b.m.log.Error("remove the container of a sandbox whose end cannot be written", "sandbox", b.id, "err", err)
	}
}

// stepStopping says that the end has begun. A record that cannot be written
// must not keep what fills the disk alive: then the end is decided in memory.
// What only a living sandbox needs leaves the record, which makes room in it.
func (b *box) stepStopping(context.Context) error {
	b.saving.Lock()
	defer b.saving.Unlock()
	next := b.record()
	first := next.Sandbox.State != boxed.StateStopping
	next.Sandbox.State, next.Sandbox.Env, next.ImageEnv, next.Egress = boxed.StateStopping, nil, nil, nil
	if err := b.m.cfg.Records.Put(string(b.id), next); err != nil && first {
		b.m.log.Error("write that a sandbox is ending", "sandbox", b.id, "err", err)
	}
	b.publish(next)
	return nil
}

// stepEnd asks the agent to exit, which takes every process with it in
// milliseconds: sooner than the engine would. That it did is the kernel's word
// and not the agent's.
func (b *box) stepEnd(ctx context.Context) error {
	b.mu.Lock()
	host := b.host
	paused := !b.rec.Sandbox.PausedAt.IsZero()
	b.mu.Unlock()
	if host == nil || paused || b.died() || !host.Linked() { // there is nobody to ask
		return nil
	}
	b.firstExec()() // there will be none
	b.m.afterRush(ctx)
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	if err := host.End(ctx); err != nil && !errors.Is(err, agent.ErrClosed) && ctx.Err() == nil {
		b.m.log.Warn("end the agent", "sandbox", b.id, "err", err)
		return nil
	}
	b.gone = b.m.mayClear() && b.m.cfg.Driver.Gone(ctx, b.record().ContainerID) == nil
	return nil
}

// stepRemove removes the container. One whose ID never got into the record is
// found by its nonce.
func (b *box) stepRemove(ctx context.Context) error {
	r := b.record()
	if r.ContainerID == "" {
		found, err := b.m.cfg.Driver.List(ctx)
		if err != nil {
			return err
		}
		for _, c := range found {
			if c.Nonce == r.Nonce && c.Sandbox == b.id {
				r.ContainerID = c.ContainerID
			}
		}
	}
	if r.ContainerID == "" {
		return nil
	}
	return b.m.cfg.Driver.Remove(ctx, r.ContainerID)
}

// stepEnded writes the end record.
func (b *box) stepEnded(context.Context) error {
	now := b.m.cfg.Now()
	err := b.update(func(r *Record) error {
		s := &r.Sandbox
		s.State = boxed.StateStopped
		if r.Failed {
			s.State = boxed.StateFailed
		}
		s.Reason, s.Message, s.EndedAt = r.Ending, r.Why, now
		r.Secret = ""
		if !b.gone { // else it is still to be cleared away
			r.ContainerID = ""
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.m.mu.Lock()
	delete(b.m.living, b.id)
	b.m.uids.rest(b.record().UID, now)
	b.m.mu.Unlock()
	if s := b.view(); !b.record().Pooled {
		typ := boxed.EventStopped
		if s.State == boxed.StateFailed {
			typ = boxed.EventFailed
		}
		b.m.emit(typ, s, nil)
	}
	b.m.poke()
	return nil
}
