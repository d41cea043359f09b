package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
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
	m.know(records)
	containers, err := m.firstLook(ctx)
	if err != nil {
		return err
	}
	for _, b := range m.alive() {
		m.recoverOne(ctx, b, containers)
	}
	m.removeStrayDirs()
	m.mu.Lock()
	m.recovered = true
	m.mu.Unlock()
	return nil
}

// know takes the records into memory. A uid may have been of many sandboxes, of
// which one may live: ends come first, so that it stays held.
func (m *Manager) know(records []Record) {
	var ended []*box
	defer func() {
		for _, b := range ended {
			b.clearLater() // what an earlier life did not
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	for _, r := range records {
		if r.Sandbox.State.Ended() {
			m.uids.rest(r.UID, r.Sandbox.EndedAt)
			b := newBox(m, r)
			m.boxes[b.id] = b
			ended = append(ended, b)
		}
	}
	for _, r := range records {
		if s := &r.Sandbox; !s.State.Ended() {
			m.uids.hold(r.UID)
			// The clock may have been set back since.
			if s.TTL != boxed.Never && s.ExpiresAt.After(now.Add(s.TTL.D())) {
				r.expire(now, s.TTL)
			}
			b := newBox(m, r)
			m.boxes[b.id], m.living[b.id] = b, b
		}
	}
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
	for _, b := range m.alive() {
		r := b.record()
		if _, ok := found[r.ContainerID]; !ok && r.ContainerID != "" {
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
	b.restoreEgress() // before its agent can hand anything over
	if err := b.listen(true); err != nil {
		m.log.Error("adopt: the agent's socket", "sandbox", b.id, "err", err)
		m.later(func(ctx context.Context) {
			b.destroy(ctx, boxed.EndAgentLost, "its socket could not be made again: "+err.Error(), boxed.StateFailed)
		})
		return
	}
	// The daemon may have gone away between the freezer and the record.
	b.mend(ctx, c.Paused)
	if r := b.record(); r.Pooled {
		m.mu.Lock()
		p := m.adoptLocked(r)
		m.mu.Unlock()
		m.later(func(ctx context.Context) { m.adoptWarm(ctx, b, p) })
		return
	}
	m.later(func(ctx context.Context) { b.endOrphans(ctx) })
}

// adoptLocked gives a warm sandbox of an earlier life its place in the pool of
// its template, or the pool would be filled twice over. It returns nil if there
// is none that it fits. What the pool's image and runtime are now only the engine
// knows; until it has been asked, those of the sandbox count.
func (m *Manager) adoptLocked(r Record) *pool {
	p := m.pools[r.Sandbox.Template]
	if p == nil || len(p.ready)+p.filling >= p.template.Pool {
		return nil
	}
	runtime := cmp.Or(p.template.Runtime, m.cfg.Runtime, r.Sandbox.Runtime)
	if r.Sandbox.Image != p.template.Image || r.Sandbox.Limits != p.template.Limits || r.Sandbox.Runtime != runtime ||
		!strings.HasPrefix(r.Key, HardeningRevision()+"-") {
		return nil
	}
	if p.key == "" {
		p.key, p.runtime = r.Key, runtime
	}
	p.filling++
	return p
}

// adoptWarm takes a warm sandbox back into the pool in which it has a place; nil
// is none.
func (m *Manager) adoptWarm(ctx context.Context, b *box, p *pool) {
	ready, cancel := m.untilStop(ctx, 2*time.Second)
	defer cancel()
	host := b.link()
	linked := host != nil && host.Ready(ready) == nil
	m.mu.Lock()
	defer m.mu.Unlock()
	if p != nil {
		p.filling--
		m.pokeLocked()
		if linked && p.key == b.record().Key {
			p.ready = append(p.ready, b)
			return
		}
	}
	m.endWarmLocked(b, "it fits no pool")
}

// endOrphans kills attached execs whose client did not come back in time. The
// time that it is paused does not count: nobody can come back then.
func (b *box) endOrphans(ctx context.Context) {
	for wait := b.m.orphanGrace; b.runsFor(wait); wait = orphanPause {
		if b.killOrphans(ctx) {
			return
		}
	}
}

// runsFor waits until the sandbox has run for so long at a stretch. It reports
// false if its end comes first, or the Manager's.
func (b *box) runsFor(d time.Duration) bool {
	var passed <-chan time.Time
	for {
		b.mu.Lock()
		state, ending, changed := b.rec.Sandbox.State, b.rec.Ending != "", b.changed
		b.mu.Unlock()
		switch {
		case ending || state.Ended():
			return false
		case state != boxed.StateRunning:
			passed = nil
		case passed == nil:
			passed = time.After(d)
		}
		select {
		case <-passed:
			return true
		case <-changed:
		case <-b.m.stop:
			return false
		}
	}
}

// killOrphans kills attached execs that nobody is attached to, and reports
// whether there is none left.
func (b *box) killOrphans(ctx context.Context) bool {
	host := b.link()
	if host == nil {
		return false
	}
	ctx, cancel := b.m.untilStop(ctx, stepLimit)
	defer cancel()
	execs, err := host.Execs(ctx)
	for _, e := range execs {
		if e.Exit == nil && !e.Detached && e.Attached == 0 {
			err = errors.Join(err, host.Kill(ctx, e.ID, agent.ExitCanceled))
		}
	}
	return err == nil
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
	said := "" // not each second, while an engine is down
	for ctx.Err() == nil {
		began := time.Now()
		err := m.cfg.Driver.Watch(ctx, func(container string) {
			for _, b := range m.alive() {
				if b.record().ContainerID == container {
					m.later(b.judge)
				}
			}
		})
		if text := fmt.Sprint(err); ctx.Err() == nil && (text != said || time.Since(began) > time.Minute) {
			m.log.Warn("the engine's events broke off", "err", err)
			said = text
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
	for _, b := range m.alive() {
		r := b.record()
		if r.ContainerID == "" || r.Ending != "" || !(r.Sandbox.State == boxed.StateRunning || r.Sandbox.State == boxed.StatePaused || r.Pooled) {
			continue
		}
		c, there := byID[r.ContainerID]
		m.compare(b, c, there)
	}
}

// compare does what is to be done where a container is not as its record says.
func (m *Manager) compare(b *box, c Status, there bool) {
	b.mu.Lock()
	if b.missing++; there {
		b.missing = 0
	}
	gone := b.missing >= missingLooks
	b.mu.Unlock()
	fail := func(reason boxed.EndReason, why string) {
		m.later(func(ctx context.Context) { b.destroy(ctx, reason, why, boxed.StateFailed) })
	}
	switch {
	case gone:
		fail(boxed.EndVanished, "its container was removed behind the node's back")
	case !there:
	case c.Sockets > MaxSockets:
		fail(boxed.EndSockets, fmt.Sprintf("it had %d TCP connections; more than %d endanger the host's memory", c.Sockets, MaxSockets))
	case !c.Running:
		if b.turn.TryLock() { // not while it is being started
			b.turn.Unlock()
			m.later(b.judge)
		}
	case c.Paused != (b.record().Sandbox.State == boxed.StatePaused):
		m.later(func(ctx context.Context) { b.mend(ctx, c.Paused) })
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
		// One that its record names is being cleared away already.
		if r := b.record(); r.Nonce == c.Nonce && r.Sandbox.State.Ended() && r.ContainerID == "" {
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
	case err != nil, status.Running:
		return
	case r.Sandbox.State == boxed.StateStarting && !r.Pooled && !r.Sandbox.Warm: // it is being started, perhaps
		return
	}
	reason, why := endOf(status)
	b.destroy(ctx, reason, why, boxed.StateFailed)
}
