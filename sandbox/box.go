package sandbox

import (
	"context"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// box is one sandbox in memory.
type box struct {
	m  *Manager
	id boxed.ID

	saving sync.Mutex // held over a write of the record, so that writes are in order

	mu      sync.Mutex
	rec     Record
	changed chan struct{} // closed and replaced at each change of rec
	host    *agent.Host   // nil before its socket is made and after it is closed
	busy    int           // what keeps it from being idle: execs, tunnels, transfers
	active  time.Time     // when busy was last above zero, or somebody used it
	missing int           // looks at the engine that did not find its container
	listed  bool          // it was handed out, so the API shows it

	made   boxed.Limits       // what its container was made with
	cancel context.CancelFunc // ends the make that is under way; nil without one

	turn sync.Mutex // held by make and by destroy: one at a time
}

func newBox(m *Manager, rec Record) *box {
	return &box{m: m, id: rec.Sandbox.ID, rec: rec, changed: make(chan struct{}), active: m.cfg.Now(), listed: !rec.Pooled, made: rec.Sandbox.Limits}
}

// record is a copy of the present record.
func (b *box) record() Record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec
}

// update changes the record: durable first, then visible. change may refuse.
func (b *box) update(change func(*Record) error) error {
	b.saving.Lock()
	defer b.saving.Unlock()
	return b.updateLocked(change)
}

// updateLocked is update for who holds b.saving.
func (b *box) updateLocked(change func(*Record) error) error {
	next := b.record()
	if err := change(&next); err != nil {
		return err
	}
	if err := b.m.cfg.Records.Put(string(b.id), next); err != nil {
		return boxed.Errorf(boxed.CodeOf(err), "write the sandbox's record: %w", err)
	}
	b.publish(next)
	return nil
}

// publish makes next the record. An end that was decided meanwhile stays.
func (b *box) publish(next Record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if next.Ending == "" {
		next.Ending, next.Why, next.Failed = b.rec.Ending, b.rec.Why, b.rec.Failed
	}
	b.rec = next
	close(b.changed)
	b.changed = make(chan struct{})
}

// view is the sandbox as callers see it.
func (b *box) view() *boxed.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.rec.Sandbox
	if !s.State.Ended() {
		s.ActiveAt = b.active
		if b.busy > 0 {
			s.ActiveAt = b.m.cfg.Now()
		}
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	return &s
}

// wait returns when ok says so.
func (b *box) wait(ctx context.Context, ok func(*Record) bool) error {
	for {
		b.mu.Lock()
		done, changed := ok(&b.rec), b.changed
		b.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// use counts something that keeps the sandbox busy until the returned function
// is called. Errors: gone, conflict.
func (b *box) use() (*agent.Host, func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.usableLocked(); err != nil {
		return nil, nil, err
	}
	if b.host == nil {
		return nil, nil, boxed.Errorf(boxed.CodeNotReady, "the sandbox's agent is not connected yet; try again in a moment")
	}
	b.busy++
	var once sync.Once
	return b.host, func() {
		once.Do(func() {
			b.mu.Lock()
			b.busy--
			b.active = b.m.cfg.Now()
			b.mu.Unlock()
		})
	}, nil
}

func (b *box) usableLocked() error {
	if b.rec.Ending != "" {
		return goneError(&b.rec)
	}
	switch s := &b.rec.Sandbox; s.State {
	case boxed.StateRunning:
		return nil
	case boxed.StatePaused:
		return boxed.Errorf(boxed.CodeConflict, "sandbox %s is paused; resume it first", b.id)
	case boxed.StatePending, boxed.StateStarting:
		return boxed.Errorf(boxed.CodeConflict, "sandbox %s is not running yet; wait for it", b.id)
	default:
		return goneError(&b.rec)
	}
}

// alive refuses changes of what has ended or is about to.
func (b *box) alive() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rec.Ending != "" || b.rec.Sandbox.State.Ended() {
		return goneError(&b.rec)
	}
	return nil
}

// goneError says that, and why, a sandbox has ended.
func goneError(r *Record) error {
	reason, why := r.Sandbox.Reason, r.Sandbox.Message
	if reason == "" {
		reason, why = r.Ending, r.Why
	}
	e := boxed.Errorf(boxed.CodeGone, "sandbox %s has ended: %s", r.Sandbox.ID, why)
	return e.With("reason", string(reason)).With("ended_at", r.Sandbox.EndedAt)
}
