package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/boxed-mesh/boxed"
)

// recover makes the records and the engine agree after a restart of the daemon,
// of the engine or of the host: what runs is adopted, what was begun is undone,
// what was ending is finished, what is gone is said to be. Containers that no
// record knows by ID or by nonce are somebody else's, whatever their labels say.
func (m *Manager) recover(ctx context.Context) error {
	records, err := m.cfg.Records.All()
	if err != nil {
		return fmt.Errorf("read the sandboxes' records: %w", err)
	}
	m.mu.Lock()
	for _, r := range records {
		b := newBox(m, r)
		m.boxes[b.id] = b
		if r.Sandbox.State.Ended() {
			m.uids.rest(r.UID, r.Sandbox.EndedAt)
		} else {
			m.uids.hold(r.UID)
		}
	}
	m.mu.Unlock()
	containers, err := m.firstLook(ctx)
	if err != nil {
		return err
	}
	for _, b := range m.all() {
		if !b.record().Sandbox.State.Ended() {
			m.recoverOne(ctx, b, containers)
		}
	}
	m.removeStrayDirs()
	m.mu.Lock()
	m.recovered = true
	m.mu.Unlock()
	return nil
}

// firstLook lists the containers, as soon as the engine answers and, after a
// restart of the host, for a while more: an engine that is still loading its
// containers answers with few of them.
func (m *Manager) firstLook(ctx context.Context) (map[string]Status, error) {
	looks := 0
	for {
		found, err := m.cfg.Driver.List(ctx)
		if err == nil {
			byID := map[string]Status{}
			for _, c := range found {
				byID[c.ContainerID] = c
			}
			looks++
			if m.allThere(byID) || looks >= missingLooks {
				return byID, nil
			}
		} else {
			m.log.Warn("the engine does not answer; sandboxes are recovered as soon as it does", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(m.lookPause):
		}
	}
}

// allThere reports whether each living record's container is listed.
func (m *Manager) allThere(found map[string]Status) bool {
	for _, b := range m.all() {
		r := b.record()
		if _, ok := found[r.ContainerID]; !ok && r.ContainerID != "" && !r.Sandbox.State.Ended() {
			return false
		}
	}
	return true
}

// recoverOne decides what becomes of one living record.
func (m *Manager) recoverOne(ctx context.Context, b *box, containers map[string]Status) {
	r := b.record()
	end := func(reason boxed.EndReason, why string, final boxed.State) {
		m.later(func(ctx context.Context) { b.destroy(ctx, reason, why, final) })
	}
	c, there := containers[r.ContainerID]
	claimed := !r.Pooled && (r.Sandbox.State == boxed.StateRunning || r.Sandbox.State == boxed.StatePaused)
	switch {
	case r.Ending != "":
		end(r.Ending, r.Why, boxed.StateStopped)
	case r.Sandbox.State == boxed.StateStopping:
		end(boxed.EndDestroyed, "destroyed as asked", boxed.StateStopped)
	case r.BootID != m.bootID && !c.Running:
		end(boxed.EndHostRestarted, "the host was restarted", boxed.StateFailed)
	case !claimed && !r.Pooled:
		end(boxed.EndInterrupted, "the daemon was restarted while it was being made", boxed.StateFailed)
	case !claimed && (!c.Running || r.Agent != m.cfg.Agent):
		end(boxed.EndDestroyed, "a warm sandbox of an earlier life", boxed.StateStopped)
	case !there || c.Nonce != r.Nonce:
		end(boxed.EndVanished, "its container was removed behind the node's back", boxed.StateFailed)
	case !c.Running:
		reason, why := endOf(c)
		end(reason, why, boxed.StateFailed)
	default:
		m.adopt(ctx, b, c)
	}
}

// endOf says why a container ended by itself.
func endOf(c Status) (boxed.EndReason, string) {
	if c.OOMKilled {
		return boxed.EndOOM, "the memory limit ended its first process"
	}
	return boxed.EndCrashed, fmt.Sprintf("its container ended with exit code %d", c.ExitCode)
}

// adopt takes a running sandbox over. Its clocks go on from the durable state;
// nobody could use it meanwhile, so it is idle from now on at the earliest.
func (m *Manager) adopt(ctx context.Context, b *box, c Status) {
	if err := b.listen(true); err != nil {
		m.log.Error("adopt: the agent's socket", "sandbox", b.id, "err", err)
		m.later(func(ctx context.Context) {
			b.destroy(ctx, boxed.EndAgentLost, "its socket could not be made again: "+err.Error(), boxed.StateFailed)
		})
		return
	}
	r := b.record()
	if paused := r.Sandbox.State == boxed.StatePaused; paused != c.Paused {
		// The daemon went away between the freezer and the record.
		if fix := m.cfg.Driver.Resume; !paused {
			if err := fix(ctx, r.ContainerID); err != nil {
				m.log.Error("adopt: thaw", "sandbox", b.id, "err", err)
			}
		} else if err := m.cfg.Driver.Pause(ctx, r.ContainerID); err != nil {
			m.log.Error("adopt: freeze", "sandbox", b.id, "err", err)
		}
	}
	if r.Pooled {
		// It holds its place from now on, or the pool would be filled twice over.
		m.mu.Lock()
		p := m.pools[r.Sandbox.Template]
		if p != nil && len(p.ready)+p.filling < p.template.Pool {
			p.filling++
		} else {
			p = nil
		}
		m.mu.Unlock()
		m.later(func(ctx context.Context) { m.adoptWarm(ctx, b, p) })
		return
	}
	m.later(func(ctx context.Context) { b.endOrphans(ctx) })
}

// adoptWarm takes a warm sandbox back into the pool in which it has a place; nil
// is none.
func (m *Manager) adoptWarm(ctx context.Context, b *box, p *pool) {
	ready, cancel := m.untilStop(ctx, 2*time.Second)
	defer cancel()
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
	linked := host.Ready(ready) == nil
	r := b.record()
	m.mu.Lock()
	defer m.mu.Unlock()
	if p != nil {
		p.filling--
		m.pokeLocked()
		if p.key == "" {
			p.key = r.Key // until refresh says otherwise
		}
		if linked && p.key == r.Key {
			p.ready = append(p.ready, b)
			return
		}
	}
	m.endWarmLocked(b, "it fits no pool")
}

// endOrphans kills attached execs whose client did not come back in time.
func (b *box) endOrphans(ctx context.Context) {
	b.mu.Lock()
	host, changed := b.host, b.changed
	b.mu.Unlock()
	wait, cancel := context.WithTimeout(ctx, b.m.orphanGrace)
	defer cancel()
	for wait.Err() == nil {
		select {
		case <-wait.Done():
		case <-b.m.stop:
			return
		case <-changed:
			b.mu.Lock()
			changed = b.changed
			ended := b.rec.Sandbox.State.Ended()
			b.mu.Unlock()
			if ended {
				return
			}
		}
	}
	ask, cancelAsk := b.m.untilStop(ctx, stepLimit)
	defer cancelAsk()
	execs, err := host.Execs(ask)
	if err != nil {
		return
	}
	for _, e := range execs {
		if e.Exit == nil && !e.Detached && e.Attached == 0 {
			host.Kill(ask, e.ID, "canceled")
		}
	}
}

// removeStrayDirs removes directories below ours that no living record has.
func (m *Manager) removeStrayDirs() {
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil {
		m.log.Error("look for stray directories", "err", err)
		return
	}
	for _, e := range entries {
		m.mu.Lock()
		b := m.boxes[boxed.ID(e.Name())]
		m.mu.Unlock()
		if _, err := boxed.ParseID(e.Name()); err != nil || (b != nil && !b.record().Sandbox.State.Ended()) {
			continue
		}
		if err := os.RemoveAll(m.cfg.Dir + "/" + e.Name()); err != nil {
			m.log.Error("remove a stray directory", "err", err)
		}
	}
}

// watch hears from the engine of containers that ended.
func (m *Manager) watch(ctx context.Context) {
	for ctx.Err() == nil {
		err := m.cfg.Driver.Watch(ctx, func(container string) {
			for _, b := range m.all() {
				if b.record().ContainerID == container {
					m.later(func(ctx context.Context) { b.judge(ctx) })
				}
			}
		})
		if ctx.Err() == nil {
			m.log.Warn("the engine's events broke off", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// look compares the engine with the records every few seconds.
func (m *Manager) look(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		m.Look(ctx)
	}
}

// Look does one round of what Run does every few seconds.
func (m *Manager) Look(ctx context.Context) {
	found, err := m.cfg.Driver.List(ctx)
	if err != nil {
		return // an engine that does not answer says nothing about sandboxes
	}
	byID := map[string]Status{}
	for _, c := range found {
		byID[c.ContainerID] = c
	}
	m.removeStrays(found)
	for _, b := range m.all() {
		r := b.record()
		if r.ContainerID == "" || r.Ending != "" || !(r.Sandbox.State == boxed.StateRunning || r.Sandbox.State == boxed.StatePaused || r.Pooled) {
			continue
		}
		c, there := byID[r.ContainerID]
		b.mu.Lock()
		if there {
			b.missing = 0
		} else {
			b.missing++
		}
		gone := b.missing >= missingLooks
		b.mu.Unlock()
		switch {
		case gone:
			m.later(func(ctx context.Context) {
				b.destroy(ctx, boxed.EndVanished, "its container was removed behind the node's back", boxed.StateFailed)
			})
		case there && !c.Running && b.turn.TryLock(): // not while it is being started
			b.turn.Unlock()
			m.later(func(ctx context.Context) { b.judge(ctx) })
		}
	}
}

// removeStrays removes containers that an engine finished making after we had
// given up: the record that knows their nonce has ended. Others are not ours.
func (m *Manager) removeStrays(found []Status) {
	for _, c := range found {
		m.mu.Lock()
		b := m.boxes[c.Sandbox]
		m.mu.Unlock()
		if b == nil {
			continue
		}
		if r := b.record(); r.Nonce == c.Nonce && r.Sandbox.State.Ended() {
			m.later(func(ctx context.Context) {
				ctx, cancel := context.WithTimeout(ctx, stepLimit)
				defer cancel()
				if err := m.cfg.Driver.Remove(ctx, c.ContainerID); err != nil {
					m.log.Error("remove a stray container", "sandbox", c.Sandbox, "err", err)
				}
			})
		}
	}
}

// judge ends a sandbox whose container really has ended.
func (b *box) judge(ctx context.Context) {
	r := b.record()
	if r.Ending != "" || r.ContainerID == "" {
		return
	}
	status, err := b.m.cfg.Driver.Status(ctx, r.ContainerID)
	switch {
	case errors.Is(err, boxed.CodeNotFound):
		return // Look counts
	case err != nil, status.Running, r.Sandbox.State == boxed.StateStarting && !r.Pooled:
		return
	}
	reason, why := endOf(status)
	b.destroy(ctx, reason, why, boxed.StateFailed)
}
