package sandbox

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/boxed-mesh/boxed"
)

// maxClearing is how many stopped containers may wait to be cleared away. Each
// holds a directory or two of the engine's; beyond that a destroy waits for its
// own.
const maxClearing = 128

// clearSteps clear away what a destroy put off. A record that has ended and
// still names a container is one of which they are not through.
var clearSteps = []step{
	{"clear container", (*box).stepRemove},
	{"clear directory", (*box).stepDirectory},
	{"cleared", (*box).stepCleared},
}

func (b *box) stepDirectory(context.Context) error { return b.removeDir() }

func (b *box) stepCleared(context.Context) error {
	return b.update(func(r *Record) error {
		r.ContainerID = ""
		return nil
	})
}

// mayClear reports whether clearing away keeps up.
func (m *Manager) mayClear() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.clearing < maxClearing && !m.closed
}

// clearLater clears away what is left of an ended sandbox behind the caller's
// back, a few at a time. The next life of the node does what this one does not.
func (b *box) clearLater() {
	if r := b.record(); !r.Sandbox.State.Ended() || r.ContainerID == "" {
		return
	}
	b.m.mu.Lock()
	b.m.clearing++
	b.m.mu.Unlock()
	b.m.later(func(ctx context.Context) {
		defer func() {
			b.m.mu.Lock()
			b.m.clearing--
			b.m.mu.Unlock()
		}()
		if !b.m.calm(ctx) {
			return
		}
		select {
		case b.m.clearSlots <- struct{}{}:
			defer func() { <-b.m.clearSlots }()
		case <-b.m.stop:
			return
		}
		b.clear(ctx)
	})
}

func (b *box) clear(ctx context.Context) {
	for failed := (backoff{}); ; {
		err := b.clearOnce(ctx)
		if err == nil {
			return
		}
		if failed.failed(b.m.cfg.Now(), err) {
			b.m.log.Error("clear an ended sandbox away", "sandbox", b.id, "err", err)
		}
		select {
		case <-time.After(min(time.Second<<min(failed.failures, 6), time.Minute)):
		case <-b.m.stop:
			return
		}
	}
}

func (b *box) clearOnce(ctx context.Context) error {
	ctx, cancel := b.m.untilStop(ctx, 2*stepLimit)
	defer cancel()
	b.turn.Lock()
	defer b.turn.Unlock()
	for _, s := range clearSteps {
		if err := b.run(ctx, s); err != nil {
			return boxed.Errorf(boxed.CodeOf(err), "%s: %w; it is tried again", s.name, err)
		}
	}
	return nil
}

// How long work that nobody waits for stands back after a claim of a warm
// sandbox, and at most: who has just claimed one is about to use it, and making
// or removing a container takes a core for 100 ms.
const (
	calmAfter = 200 * time.Millisecond
	calmMost  = time.Second
)

// calm waits until no claim was made for a moment, within bounds. It reports
// false if ctx or the Manager ends meanwhile.
func (m *Manager) calm(ctx context.Context) bool {
	deadline := time.Now().Add(calmMost/2 + rand.N(calmMost)) // not all nodes that a rush is spread over at once
	for {
		m.mu.Lock()
		wait := min(time.Until(m.claimed.Add(calmAfter)), time.Until(deadline))
		m.mu.Unlock()
		if wait <= 0 {
			return true
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		case <-m.stop:
			return false
		}
	}
}
