package sandbox

import (
	"context"
	"slices"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Update changes a living sandbox. A new ttl counts from now, also at the very
// instant of expiry: whichever of the two decides first, under the record's
// lock, wins, and the other one sees it. Changing settings is no activity.
func (m *Manager) Update(id boxed.ID, u boxed.Update, admit func(Admission) error) (*boxed.Sandbox, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	b.saving.Lock()
	defer b.saving.Unlock()
	undo, err := b.rename(u.Name, admit)
	if err != nil {
		return nil, err
	}
	err = b.updateLocked(func(r *Record) error {
		if err := b.alive(); err != nil {
			return err
		}
		s := &r.Sandbox
		if u.Labels != nil {
			s.Labels = *u.Labels
		}
		if u.IdleTimeout != nil {
			s.IdleTimeout = *u.IdleTimeout
		}
		if u.TTL != nil {
			s.TTL = *u.TTL
			if s.State == boxed.StatePaused {
				r.Left = s.TTL
			} else {
				r.expire(m.cfg.Now(), s.TTL)
			}
		}
		return nil
	})
	if err != nil {
		undo()
		return nil, err
	}
	if u.TTL != nil {
		b.mu.Lock()
		host, paused := b.host, b.rec.Sandbox.State == boxed.StatePaused
		b.mu.Unlock()
		if !paused {
			m.later(func(ctx context.Context) { b.pushLease(ctx, host) })
		}
	}
	m.emit(boxed.EventUpdated, b.view(), nil)
	return b.view(), nil
}

// rename judges a change, and takes the new name in the same breath: until the
// record is durable nobody else may be given it. The caller holds b.saving.
func (b *box) rename(name *string, admit func(Admission) error) (undo func(), err error) {
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	if admit != nil {
		if err := admit(Admission{b.m}); err != nil {
			return nil, err
		}
	}
	if name == nil {
		return func() {}, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.rec.Sandbox.Name
	b.rec.Sandbox.Name = *name
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.rec.Sandbox.Name = old
	}, nil
}

// Pause freezes a sandbox and stops its clocks. Idempotent.
func (m *Manager) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stepLimit) // what waits for the record waits for the engine
	defer cancel()
	did := false
	err = b.update(func(r *Record) error {
		if err := b.alive(); err != nil {
			return err
		}
		switch r.Sandbox.State {
		case boxed.StatePaused:
			return nil
		case boxed.StateRunning:
		default:
			return boxed.Errorf(boxed.CodeConflict, "sandbox %s is not running yet; wait for it", id)
		}
		if err := m.cfg.Driver.Pause(ctx, r.ContainerID); err != nil {
			return err
		}
		now := m.cfg.Now()
		r.Left = boxed.Never
		if !r.Sandbox.ExpiresAt.IsZero() {
			r.Left = max(1, boxed.Duration(r.Sandbox.ExpiresAt.Sub(now)))
		}
		r.Sandbox.State, r.Sandbox.PausedAt, r.Sandbox.ExpiresAt = boxed.StatePaused, now, time.Time{}
		did = true
		return nil
	})
	if err != nil {
		if did { // frozen, and the record does not say so
			b.setFrozen(ctx, m.cfg.Driver.Resume)
		}
		return nil, err
	}
	if did {
		m.emit(boxed.EventPaused, b.view(), nil)
	}
	return b.view(), nil
}

// Resume thaws a sandbox; its clocks go on where they stopped. Idempotent.
func (m *Manager) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	did := false
	err = b.update(func(r *Record) error {
		if err := b.alive(); err != nil {
			return err
		}
		switch r.Sandbox.State {
		case boxed.StateRunning:
			return nil
		case boxed.StatePaused:
		default:
			return boxed.Errorf(boxed.CodeConflict, "sandbox %s is not paused", id)
		}
		if err := m.cfg.Driver.Resume(ctx, r.ContainerID); err != nil {
			return err
		}
		now := m.cfg.Now()
		b.mu.Lock()
		b.active = now
		b.mu.Unlock()
		r.expire(now, r.Left)
		r.Sandbox.State, r.Sandbox.PausedAt, r.Left = boxed.StateRunning, time.Time{}, 0
		did = true
		return nil
	})
	if err != nil {
		if did {
			b.setFrozen(ctx, m.cfg.Driver.Pause)
		}
		return nil, err
	}
	if did {
		b.mu.Lock()
		host := b.host
		b.mu.Unlock()
		m.later(func(ctx context.Context) { b.pushLease(ctx, host) }) // the ttl may have changed in between
		m.emit(boxed.EventResumed, b.view(), nil)
	}
	return b.view(), nil
}

// setFrozen takes a freeze or a thaw back whose record could not be written.
func (b *box) setFrozen(ctx context.Context, set func(context.Context, string) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	if err := set(ctx, b.record().ContainerID); err != nil {
		b.m.log.Error("take a pause or resume back", "sandbox", b.id, "err", err)
	}
}

// sweep ends what is due, by the durable state, every second; finishes ends
// that failed; and forgets old end records.
func (m *Manager) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		m.Sweep()
	}
}

// Sweep does one round of what Run does every second.
func (m *Manager) Sweep() {
	now := m.cfg.Now()
	for _, b := range m.all() {
		if reason, why := b.due(now); reason != "" {
			m.later(func(ctx context.Context) { b.endDue(ctx, reason, why) })
		}
	}
	m.forget(now)
}

// due says whether, and why, a sandbox must end now.
func (b *box) due(now time.Time) (boxed.EndReason, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &b.rec.Sandbox
	switch {
	case s.State.Ended():
		return "", ""
	case b.rec.Ending != "": // an end that failed half-way, or runs: the lock tells
		if b.turn.TryLock() {
			b.turn.Unlock()
			return b.rec.Ending, b.rec.Why
		}
		return "", ""
	case s.State != boxed.StateRunning:
		return "", ""
	case !s.ExpiresAt.IsZero() && !now.Before(s.ExpiresAt):
		return boxed.EndExpired, "its ttl of " + s.TTL.String() + " passed"
	case s.IdleTimeout > 0 && b.busy == 0 && now.Sub(b.active) >= s.IdleTimeout.D():
		return boxed.EndIdle, "idle for " + s.IdleTimeout.String()
	}
	return "", ""
}

// endDue looks again, at what only the agent knows too, and ends the sandbox.
func (b *box) endDue(ctx context.Context, reason boxed.EndReason, why string) {
	// Once decided, an end is not judged again: its agent has been ended too.
	if reason == boxed.EndIdle && b.alive() == nil && b.hasExecs(ctx) {
		b.mu.Lock()
		b.active = b.m.cfg.Now()
		b.mu.Unlock()
		return
	}
	// A renewal may have come between: the record decides, once.
	b.saving.Lock()
	again, _ := b.due(b.m.cfg.Now())
	if again == reason {
		b.mu.Lock()
		if b.rec.Ending == "" {
			b.rec.Ending, b.rec.Why = reason, why
		}
		b.mu.Unlock()
	}
	b.saving.Unlock()
	if again == reason {
		b.destroy(ctx, reason, why, boxed.StateStopped)
	}
}

// hasExecs asks the agent whether anything runs: a detached exec keeps a
// sandbox busy too. An agent that does not answer is no reason to end it.
func (b *box) hasExecs(ctx context.Context) bool {
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
	if host == nil {
		return true
	}
	ctx, cancel := b.m.untilStop(ctx, 10*time.Second)
	defer cancel()
	stats, err := host.Stats(ctx)
	return err != nil || stats.Execs > 0
}

// forget drops end records that are too old or too many. The uids of the young
// ones rest.
func (m *Manager) forget(now time.Time) {
	m.mu.Lock()
	type end struct {
		id boxed.ID
		at time.Time
	}
	var ended []end
	for id, b := range m.boxes {
		r := b.record()
		if r.Sandbox.State.Ended() {
			ended = append(ended, end{id, r.Sandbox.EndedAt})
		}
	}
	slices.SortFunc(ended, func(a, b end) int { return b.at.Compare(a.at) })
	var old []boxed.ID
	for i, e := range ended {
		age := now.Sub(e.at)
		if age > m.cfg.EndedFor || (i >= m.cfg.EndedMost && age > uidRest) {
			old = append(old, e.id)
			delete(m.boxes, e.id)
		}
	}
	m.mu.Unlock()
	for _, id := range old {
		if err := m.cfg.Records.Delete(string(id)); err != nil {
			m.log.Error("delete an end record", "sandbox", id, "err", err)
		}
	}
}
