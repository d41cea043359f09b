package sandbox

import (
	"context"
	"sync"
	"time"
)

// When many warm sandboxes are claimed at once, a few of them come to their first
// result at a time, in the order of the claims: all together they would do so
// after the time that all need, and none before. Who ends one meanwhile waits,
// since an engine that hears of an end takes a core for 20 ms.
const (
	rushEach  = 2                      // sandboxes at a time, of each core
	rushClaim = 20 * time.Millisecond  // from a claim to the first exec
	rushExec  = 100 * time.Millisecond // that the first exec may take
)

// rushing is the turn of one sandbox.
type rushing struct {
	done  func()
	timer *time.Timer // calls done
}

// begin waits for the turn of a sandbox that was claimed.
func (b *box) begin(ctx context.Context) {
	if b.m.rush.enter(ctx, b.id, func(int) {}) != nil {
		return // hand sees that the caller has gone
	}
	b.m.mu.Lock()
	b.m.claimed = time.Now()
	b.m.mu.Unlock()
	done := sync.OnceFunc(b.m.rush.leave)
	b.mu.Lock()
	b.rushing = &rushing{done, time.AfterFunc(rushClaim, done)}
	b.mu.Unlock()
}

// firstExec gives a sandbox more time whose first exec has come in time, and
// returns what is to be called at its end.
func (b *box) firstExec() (ended func()) {
	b.mu.Lock()
	r := b.rushing
	b.rushing = nil
	b.mu.Unlock()
	if r == nil {
		return func() {}
	}
	if r.timer.Stop() {
		r.timer.Reset(rushExec)
	}
	return func() {
		r.timer.Stop()
		r.done()
	}
}

// afterRush waits until nobody waits for a turn, for at most calmMost.
func (m *Manager) afterRush(ctx context.Context) {
	for end := time.Now().Add(calmMost); m.rush.busy() && time.Now().Before(end); {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return
		case <-m.stop:
			return
		}
	}
}
