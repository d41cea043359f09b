package sandbox

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Update changes a living sandbox. A new ttl counts from now, also at the very
// instant of expiry: whichever of the two decides first, under the record's
// lock, wins, and the other one sees it. Changing settings is no activity.
func (m *Manager) Update(id boxed.ID, u boxed.Update, admit func(Admission) error) (*boxed.Sandbox, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	if u == (boxed.Update{}) {
		if err := b.alive(); err != nil {
			return nil, err
		}
		return b.view(), nil
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
	if u.Labels != nil && m.cfg.Egress != nil {
		m.cfg.Egress.Relabel(id, *u.Labels)
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

// Pause freezes a sandbox and stops its clocks. Idempotent.
func (m *Manager) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return m.freeze(ctx, id, true)
}

// Resume thaws a sandbox; its clocks go on where they stopped. Idempotent.
func (m *Manager) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return m.freeze(ctx, id, false)
}

// freeze pauses or resumes. Container and record change together or not at all,
// whatever becomes of the caller.
func (m *Manager) freeze(ctx context.Context, id boxed.ID, frozen bool) (*boxed.Sandbox, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, err
	}
	from, to, typ, refusal := boxed.StateRunning, boxed.StatePaused, boxed.EventPaused, "is not running yet; wait for it"
	if !frozen {
		from, to, typ, refusal = to, from, boxed.EventResumed, "is not paused"
	}
	ctx = context.WithoutCancel(ctx)
	b.saving.Lock() // what waits for the record waits for the engine
	defer b.saving.Unlock()
	switch state := b.record().Sandbox.State; {
	case b.alive() != nil:
		return nil, b.alive()
	case state == to:
		return b.view(), nil
	case state != from:
		return nil, boxed.Errorf(boxed.CodeConflict, "sandbox %s %s", id, refusal)
	}
	if err = b.setFrozen(ctx, frozen); err == nil {
		err = b.updateLocked(func(r *Record) error {
			r.freeze(m.cfg.Now(), frozen)
			return b.alive()
		})
	}
	if err != nil {
		// An engine that failed may have done it all the same.
		if back := b.setFrozen(ctx, !frozen); back != nil {
			m.log.Error("take a pause or resume back", "sandbox", b.id, "err", back)
		}
		return nil, err
	}
	if !frozen {
		b.mu.Lock()
		b.active = m.cfg.Now()
		b.mu.Unlock()
		m.later(func(ctx context.Context) { b.pushLease(ctx, b.link()) }) // the ttl may have changed in between
	}
	m.emit(typ, b.view(), nil)
	return b.view(), nil
}

// mend freezes or thaws a container that is not as its record says: the daemon
// went away in between, or the engine failed. It does nothing while the record
// changes.
func (b *box) mend(ctx context.Context, frozen bool) {
	if !b.saving.TryLock() {
		return
	}
	defer b.saving.Unlock()
	want := b.record().Sandbox.State == boxed.StatePaused
	if frozen == want || b.alive() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, mendLimit)
	defer cancel()
	if err := b.setFrozen(ctx, want); err != nil {
		b.m.log.Error("make a container as paused as its record says", "sandbox", b.id, "paused", want, "err", err)
	}
}

// sweep ends what is due, by the durable state, every second; finishes ends
// that failed; and now and then forgets old end records.
func (m *Manager) sweep(ctx context.Context) {
	tick, old := time.NewTicker(sweepEvery), time.NewTicker(forgetEvery)
	defer tick.Stop()
	defer old.Stop()
	m.forget(m.cfg.Now())
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			m.Sweep()
		case <-old.C:
			m.forget(m.cfg.Now())
		}
	}
}

// wakeGrace is how long after the host has slept no deadline ends a sandbox: time
// for whoever opens the laptop to renew what passed while it was shut.
const wakeGrace = 2 * time.Minute

// slept notices that the host has slept since the last look. Deadlines have gone on
// meanwhile, but nothing is ended before a while and an event.
func (m *Manager) slept(now time.Time) {
	asleep := m.cfg.Asleep()
	m.mu.Lock()
	since := asleep - m.asleep
	m.asleep = asleep
	if since >= wakeLeast {
		m.awake = now.Add(wakeGrace)
	}
	m.mu.Unlock()
	if since < wakeLeast {
		return
	}
	m.log.Info("the host has slept", "for", since.Round(time.Second), "grace", wakeGrace)
	m.cfg.Emit(boxed.Event{
		Type: boxed.EventNodeWarn, At: now, Node: m.cfg.Node,
		Message: "the host slept for " + since.Round(time.Second).String() + "; sandboxes whose time has passed end in " + wakeGrace.String() + " unless they are renewed",
	})
}

// wakeLeast is what counts as sleep: less is measuring.
const wakeLeast = 5 * time.Second

// hostAsleep is how long this machine has been suspended since it was started: what
// CLOCK_BOOTTIME counts and CLOCK_MONOTONIC does not.
func hostAsleep() time.Duration {
	var boot, mono unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono) != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return 0
	}
	return time.Duration(boot.Nano() - mono.Nano())
}

// graced reports whether no deadline may end a sandbox now.
func (m *Manager) graced(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return now.Before(m.awake) && m.awake.Sub(now) <= wakeGrace // else the clock was set back
}

// Sweep does one round of what Run does every second.
func (m *Manager) Sweep() {
	now := m.cfg.Now()
	m.slept(now)
	graced := m.graced(now)
	for _, b := range m.alive() {
		b.mu.Lock()
		reason, _ := b.dueLocked(now)
		judge := reason != "" && !b.judging && (!graced || b.rec.Ending != "")
		b.judging = b.judging || judge
		b.mu.Unlock()
		if judge {
			m.later(func(ctx context.Context) {
				b.endDue(ctx)
				b.mu.Lock()
				defer b.mu.Unlock()
				b.judging = false
			})
		}
	}
}

// dueLocked says whether, and why, a sandbox must end now.
func (b *box) dueLocked(now time.Time) (boxed.EndReason, string) {
	s, most := &b.rec.Sandbox, b.m.cfg.PausedMost
	switch {
	case s.State.Ended():
		return "", ""
	case b.rec.Ending != "": // an end that failed half-way, or runs: the lock tells
		if !b.end.waiting(now) && b.turn.TryLock() {
			b.turn.Unlock()
			return b.rec.Ending, b.rec.Why
		}
		return "", ""
	case s.State == boxed.StatePaused && s.TTL != boxed.Never && most > 0 && now.Sub(s.PausedAt) >= most:
		return boxed.EndExpired, "it was paused for " + boxed.Duration(most).String() + ", as long as a ttl may be"
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
// Once decided, an end is not judged again: its agent has been ended too.
func (b *box) endDue(ctx context.Context) {
	b.mu.Lock()
	reason, _ := b.dueLocked(b.m.cfg.Now())
	decided := b.rec.Ending != ""
	b.mu.Unlock()
	if reason == boxed.EndIdle && !decided {
		b.noteExecs(ctx)
	}
	// A renewal may have come between, or a use: the record decides, once.
	b.saving.Lock()
	b.mu.Lock()
	reason, why := b.dueLocked(b.m.cfg.Now())
	if reason != "" && b.rec.Ending == "" {
		b.rec.Ending, b.rec.Why = reason, why
	}
	b.mu.Unlock()
	b.saving.Unlock()
	if reason != "" {
		b.destroy(ctx, reason, why, boxed.StateStopped)
	}
}

// noteExecs asks the agent for execs: a detached one keeps a sandbox busy too,
// until its end. An agent that does not answer is no reason to end it.
func (b *box) noteExecs(ctx context.Context) {
	var execs []agent.ExecInfo
	err := error(agent.ErrClosed)
	if host := b.link(); host != nil {
		ctx, cancel := b.m.untilStop(ctx, askLimit)
		defer cancel()
		execs, err = host.Execs(ctx)
	}
	now := b.m.cfg.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		b.active = now
	}
	for _, e := range execs {
		used := now
		if e.Exit != nil && e.Ended.Before(now) {
			used = e.Ended
		}
		if used.After(b.active) {
			b.active = used
		}
	}
}

// forget drops end records that are too old or too many. Those whose uid rests
// are kept: it follows from them.
func (m *Manager) forget(now time.Time) {
	type end struct {
		id boxed.ID
		at time.Time
	}
	var ended []end
	for _, b := range m.all() {
		b.mu.Lock()
		if s := &b.rec.Sandbox; s.State.Ended() && b.rec.ContainerID == "" { // nothing is left to clear away
			ended = append(ended, end{b.id, s.EndedAt})
		}
		b.mu.Unlock()
	}
	slices.SortFunc(ended, func(a, b end) int { return b.at.Compare(a.at) })
	for i, e := range ended {
		age := now.Sub(e.at)
		if age <= uidRest || (age <= m.cfg.EndedFor && i < m.cfg.EndedMost) {
			continue
		}
		m.mu.Lock()
		delete(m.boxes, e.id)
		m.mu.Unlock()
		if err := m.cfg.Records.Delete(string(e.id)); err != nil {
			m.log.Error("delete an end record", "sandbox", e.id, "err", err)
		}
	}
}
