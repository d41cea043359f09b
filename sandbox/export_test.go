package sandbox

import (
	"context"
	"runtime"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Abandon is what a kill of the daemon does to the links: the kernel closes
// them. Nothing is cleaned up.
func (m *Manager) Abandon() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	boxes := m.alive()
	for _, b := range boxes {
		b.mu.Lock()
		host := b.host
		b.host = nil
		b.mu.Unlock()
		if host != nil {
			go host.Close() // it waits for callers that the kill has stopped
		}
	}
}

// SetBootID pretends that the machine is in another run.
func (m *Manager) SetBootID(id string) { m.bootID = id }

// SetOrphanGrace shortens how long an attached exec waits for its client after
// a restart.
func (m *Manager) SetOrphanGrace(d time.Duration) { m.orphanGrace = d }

// SetLookPause shortens the time between looks at the engine while recovering.
func (m *Manager) SetLookPause(d time.Duration) { m.lookPause = d }

// UIDsInUse is how many uids are neither free nor resting.
func (m *Manager) UIDsInUse() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, until := range m.uids.taken {
		if until.IsZero() {
			n++
		}
	}
	return n
}

// Refresh is what Run does every few seconds for the pools.
func (m *Manager) Refresh(ctx context.Context) {
	for _, p := range m.pools {
		if p.template.Pool > 0 {
			m.refreshPool(ctx, p)
		}
	}
	m.poke()
}

// UID is the uid of a sandbox.
func (m *Manager) UID(id string) int {
	for _, b := range m.all() {
		if string(b.id) == id {
			return b.record().UID
		}
	}
	return 0
}

// Forget is what Run does every minute for end records.
func (m *Manager) Forget() { m.forget(m.cfg.Now()) }

// SetPullPatience shortens how long a create waits for others' images.
func (m *Manager) SetPullPatience(d time.Duration) { m.pulls.patience = d }

// UIDRests reports whether a uid rests.
func (m *Manager) UIDRests(uid int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.uids.taken[uid].IsZero()
}

// Living is how many have not ended, as all that is done often sees it.
func (m *Manager) Living() int { return len(m.alive()) }

// StepRecord is the first step of create, at a time of the test's choice.
func (m *Manager) StepRecord(id boxed.ID) error {
	b, err := m.find(id)
	if err != nil {
		return err
	}
	return b.stepRecord(context.Background())
}

// Judged reports whether a sweep has done with a sandbox.
func (m *Manager) Judged(id boxed.ID) bool {
	b, err := m.find(id)
	if err != nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.judging
}

// Numbers that tests follow.
const (
	MissingLooks = missingLooks
	UIDRest      = uidRest
	MaxClearing  = maxClearing
)

// Linked reports whether the agent of a sandbox is connected, as far as is known.
func (m *Manager) Linked(id string) bool {
	for _, b := range m.all() {
		if string(b.id) == id {
			return b.linked()
		}
	}
	return false
}

// Clearing is of how many ended sandboxes something is left.
func (m *Manager) Clearing() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.clearing
}

// RushSlots is how many sandboxes come to their first result at once.
func RushSlots() int { return rushEach * runtime.NumCPU() }
