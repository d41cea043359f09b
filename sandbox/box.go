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
	judging bool          // whether it is due is being found out
	missing int           // looks at the engine that did not find its container
	listed  bool          // it was handed out, so the API shows it
	end     backoff       // of an end that fails

	made    boxed.Limits       // what its container was made with
	cancel  context.CancelFunc // ends the make that is under way; nil without one
	created sync.Once          // its owner has been told of it
	rushing *rushing           // nil but between its claim and its first exec

	terminals terminals

	turn sync.Mutex // held by make and by destroy: one at a time
	gone bool       // guarded by turn: no process of it is left
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

// look lets f read the record, which is not copied.
func (b *box) look(f func(*Record)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.rec)
}

// link is the host's side of its agent, or nil.
func (b *box) link() *agent.Host {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.host
}

// linked reports whether the agent is connected.
func (b *box) linked() bool {
	host := b.link()
	return host != nil && host.Linked()
}

func (b *box) shown() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.listed
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

// claim makes a warm sandbox somebody's, in memory; it refuses one that is
// dying. An end that is being written has read the record already, so what
// changed now would be undone by it.
func (b *box) claim(fill func(*Record)) bool {
	if !b.saving.TryLock() {
		return false
	}
	defer b.saving.Unlock()
	next := b.record()
	if next.Ending != "" || !b.linked() {
		return false
	}
	fill(&next)
	b.publish(next)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listed = true
	return true
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

// setFrozen freezes or thaws the container.
func (b *box) setFrozen(ctx context.Context, frozen bool) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if frozen {
		return b.m.cfg.Driver.Pause(ctx, b.record().ContainerID)
	}
	return b.m.cfg.Driver.Resume(ctx, b.record().ContainerID)
}

// view is the sandbox as callers see it.
func (b *box) view() *boxed.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.viewLocked()
}

func (b *box) viewLocked() *boxed.Sandbox {
	s := b.rec.Sandbox
	if !s.State.Ended() {
		s.ActiveAt = b.active
		if b.busy > 0 {
			s.ActiveAt = b.m.cfg.Now()
		}
	}
	if s.State == boxed.StatePending {
		s.QueuePlace = b.m.making.place(b.id)
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	if b.rec.Egress != nil && b.m.cfg.Egress != nil {
		s.Egress = b.m.cfg.Egress.State(b.id)
	}
	return &s
}

// wait returns the sandbox as it is when ok says so.
func (b *box) wait(ctx context.Context, ok func(*Record) bool) (*boxed.Sandbox, error) {
	for {
		b.mu.Lock()
		done, changed, view := ok(&b.rec), b.changed, b.viewLocked()
		b.mu.Unlock()
		if done {
			return view, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
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

// hold finds a running sandbox and uses it until the returned function is
// called.
func (m *Manager) hold(id boxed.ID) (*box, *agent.Host, func(), error) {
	b, err := m.find(id)
	if err != nil {
		return nil, nil, nil, err
	}
	host, done, err := b.use()
	return b, host, done, err
}

// with is hold for as long as f runs.
func (m *Manager) with(id boxed.ID, f func(*box, *agent.Host) error) error {
	b, host, done, err := m.hold(id)
	if err != nil {
		return err
	}
	defer done()
	return f(b, host)
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
	e := boxed.Errorf(boxed.CodeGone, "sandbox %s has ended: %s", r.Sandbox.ID, why).With("reason", string(reason))
	if at := r.Sandbox.EndedAt; !at.IsZero() {
		e.With("ended_at", at)
	}
	return e
}

// backoff puts off what fails: by a second, then by twice as long each time, up
// to a minute. The zero backoff waits for nothing.
type backoff struct {
	failures int
	until    time.Time
	problem  string
}

// failed notes a failure, and reports whether it is another than the last one.
func (o *backoff) failed(now time.Time, err error) (news bool) {
	news = o.problem != err.Error()
	o.problem = err.Error()
	o.until = now.Add(min(time.Second<<min(o.failures, 6), time.Minute))
	o.failures++
	return news
}

// waiting reports whether it is too early for another try.
func (o *backoff) waiting(now time.Time) bool { return now.Before(o.until) }
