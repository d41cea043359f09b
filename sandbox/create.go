package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Admission is what is known when a create is judged. It is valid only while
// the function that got it runs; that function must not call the Manager.
type Admission struct{ m *Manager }

// Used is what claimed sandboxes have reserved.
func (a Admission) Used() boxed.Capacity {
	used, _ := a.m.usedLocked()
	return used
}

// Owned is the same of one owner.
func (a Admission) Owned(owner string) (sum boxed.Capacity) {
	a.each(func(s *boxed.Sandbox) {
		if s.Owner == owner {
			sum.MemoryBytes += s.Limits.MemoryBytes
			sum.CPUs += s.Limits.CPUs
			sum.Sandboxes++
		}
	})
	return sum
}

// Named finds an owner's living sandbox by name.
func (a Admission) Named(owner, name string) (id boxed.ID) {
	a.each(func(s *boxed.Sandbox) {
		if s.Owner == owner && s.Name == name {
			id = s.ID
		}
	})
	return id
}

// Keyed finds an owner's sandbox by the idempotency key that it was made under,
// also one that has ended, but not one that never came to be; and the hash of its
// spec.
func (a Admission) Keyed(owner, key string) (id boxed.ID, hash string, ok bool) {
	for _, b := range a.m.boxes {
		r := b.record()
		if s := &r.Sandbox; s.Owner == owner && s.IdempotencyKey == key && s.Reason != boxed.EndCreateFailed && s.Reason != boxed.EndInterrupted &&
			r.Ending != boxed.EndCreateFailed {
			return s.ID, r.SpecHash, true
		}
	}
	return "", "", false
}

// Keyed is the same outside of an admission.
func (m *Manager) Keyed(owner, key string) (boxed.ID, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id, _, ok := Admission{m}.Keyed(owner, key)
	return id, ok
}

// each shows f all claimed sandboxes that live, to read.
func (a Admission) each(f func(*boxed.Sandbox)) {
	for _, b := range a.m.living {
		b.look(func(r *Record) {
			if !r.Pooled && !r.Sandbox.State.Ended() {
				f(&r.Sandbox)
			}
		})
	}
}

// Create makes a sandbox from a resolved spec (limits, ttl, directory and image
// are set) and returns when it is running. admit judges it under the Manager's
// lock, once before an image is pulled and once when its room is reserved.
func (m *Manager) Create(ctx context.Context, owner string, spec boxed.Spec, admit func(Admission) error) (*boxed.Sandbox, error) {
	if err := m.check(admit); err != nil {
		return nil, err
	}
	b, miss, err := m.claim(owner, spec, admit)
	if err != nil {
		return nil, err
	}
	if b != nil {
		b.begin(ctx)
		if err = b.hand(ctx, spec); err != nil && b.died() { // which is no fault of the caller's
			b, miss = nil, missDied
		}
	}
	if b == nil {
		b, err = m.cold(ctx, owner, spec, miss, admit)
	}
	if err != nil {
		return nil, err
	}
	return b.view(), nil
}

// check judges a create without reserving anything.
func (m *Manager) check(admit func(Admission) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return errStopping()
	case !m.recovered:
		return errRecovering()
	}
	return admit(Admission{m})
}

func errStopping() error { return boxed.Errorf(boxed.CodeNotReady, "the node is stopping") }

// cold makes a sandbox that the pool does not have.
func (m *Manager) cold(ctx context.Context, owner string, spec boxed.Spec, miss string, admit func(Admission) error) (*box, error) {
	image, err := m.image(ctx, owner, spec.Image)
	if err != nil {
		return nil, err
	}
	runtime, err := m.runtime(ctx, spec.Runtime)
	if err != nil {
		return nil, err
	}
	rec := m.newRecord(image, runtime, spec.Limits)
	rec.Sandbox.WarmMiss = miss
	rec.fill(m.cfg.Now(), owner, spec)
	b, err := m.register(rec, admit)
	if err != nil {
		return nil, err
	}
	if err := b.makeQueued(ctx, image); err != nil {
		return nil, err
	}
	return b, b.hand(ctx, spec)
}

// makeQueued is make for somebody who waits, when it is their turn.
func (b *box) makeQueued(ctx context.Context, image Image) error {
	turn, cancel := context.WithCancel(ctx)
	defer cancel()
	b.mu.Lock()
	b.cancel = cancel // a destroy does not wait for the turn
	b.mu.Unlock()
	err := b.m.making.enter(turn, b.id, func(place int) {
		b.announce()
		b.m.emit(boxed.EventQueued, b.view(), func(e *boxed.Event) { e.QueuePlace = place })
	})
	if err != nil {
		return b.undo(ctx, "queue", err)
	}
	defer func() {
		b.m.making.leave()
		b.m.poke()
	}()
	return b.make(ctx, image)
}

// register judges again, now that the image is there, and reserves.
func (m *Manager) register(rec Record, admit func(Admission) error) (*box, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed { // while the image was pulled
		return nil, errStopping()
	}
	if err := admit(Admission{m}); err != nil {
		return nil, err
	}
	b, err := m.registerLocked(rec)
	if err == nil {
		m.misses[rec.Sandbox.WarmMiss]++
	}
	return b, err
}

// runtime is the OCI runtime to use for one asked for by name.
func (m *Manager) runtime(ctx context.Context, name string) (string, error) {
	if name == "" {
		name = m.cfg.Runtime
	}
	info, err := m.cfg.Driver.Info(ctx)
	if err != nil {
		return "", err
	}
	if name == "" {
		name = info.Default
	}
	for _, have := range info.Runtimes {
		if have == name {
			return name, nil
		}
	}
	if name == "" {
		return "", boxed.Errorf(boxed.CodeNotReady, "no OCI runtime of this node can start a container; see boxedctl doctor")
	}
	e := boxed.Errorf(boxed.CodeUnavailable, "this node has no runtime %q; it has %s", name, strings.Join(info.Runtimes, ", "))
	if why := info.Skipped[name]; why != "" {
		e = boxed.Errorf(boxed.CodeUnavailable, "the runtime %q does not work on this node: %s", name, why)
	}
	return "", e.WithField("runtime")
}

// newRecord is a record of a sandbox that nobody has claimed yet.
func (m *Manager) newRecord(image Image, runtime string, limits boxed.Limits) Record {
	id := boxed.NewID(m.cfg.Node)
	return Record{
		Sandbox: boxed.Sandbox{
			ID: id, Node: m.cfg.Node, State: boxed.StatePending, Image: image.Ref, ImageDigest: image.Digest,
			Dir: boxed.DefaultDir, Limits: limits, Runtime: runtime, CreatedAt: m.cfg.Now(),
		},
		Nonce: boxed.NewToken(26), Secret: boxed.NewToken(52), Agent: m.cfg.Agent, BootID: m.bootID,
		Key: poolKey(image, runtime, limits), ImageEnv: image.Env,
	}
}

// fill writes what a claim decides into a record.
func (r *Record) fill(now time.Time, owner string, spec boxed.Spec) {
	s := &r.Sandbox
	s.Owner, s.Name, s.Labels, s.Template = owner, spec.Name, spec.Labels, spec.Template
	s.Env, s.Dir, s.Limits = spec.Env, spec.Dir, spec.Limits
	s.TTL, s.IdleTimeout, s.CreatedAt = spec.TTL, spec.IdleTimeout, now
	if s.IdempotencyKey = spec.IdempotencyKey; s.IdempotencyKey != "" {
		r.SpecHash = spec.SpecHash
	}
	r.Pooled = false
}

// registerLocked gives the record a uid and makes the sandbox known.
func (m *Manager) registerLocked(rec Record) (*box, error) {
	uid, err := m.uids.take(m.cfg.Now())
	if err != nil {
		return nil, err
	}
	rec.UID = uid
	b := newBox(m, rec)
	m.boxes[b.id], m.living[b.id] = b, b
	return b, nil
}

// step is one step of create or destroy. Each can be repeated.
type step struct {
	name string
	do   func(b *box, ctx context.Context) error
}

// createSteps make a sandbox whose image is there. What one leaves behind, the
// steps of destroy remove, whichever was the last one done.
func createSteps(image Image) []step {
	return []step{
		{"record", (*box).stepRecord},
		{"mount", (*box).stepMount},
		{"socket", func(b *box, _ context.Context) error { return b.listen(false) }},
		{"container", func(b *box, ctx context.Context) error { return b.stepContainer(ctx, image) }},
		{"start", (*box).stepStart},
		{"link", (*box).stepLink},
		{"canary", (*box).stepCanary},
	}
}

// make runs the steps of create, and undoes them if one fails or ctx ends.
func (b *box) make(ctx context.Context, image Image) error {
	name, err := b.makeInTurn(ctx, image)
	if err != nil {
		return b.undo(ctx, name, err)
	}
	return nil
}

// makeInTurn returns the step that failed. A destroy cancels it, and waits.
func (b *box) makeInTurn(ctx context.Context, image Image) (string, error) {
	b.turn.Lock()
	defer b.turn.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b.mu.Lock()
	b.cancel = cancel
	b.mu.Unlock()
	for _, s := range createSteps(image) {
		if err := b.alive(); err != nil {
			return s.name, err
		}
		if err := b.run(ctx, s); err != nil {
			return s.name, err
		}
	}
	return "", nil
}

func (b *box) run(ctx context.Context, s step) error {
	if err := b.m.cfg.Step(b.id, s.name); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	return s.do(b, ctx)
}

// undo ends a sandbox that could not be made, and says why.
func (b *box) undo(ctx context.Context, stepName string, err error) error {
	reason := boxed.EndCreateFailed
	why := fmt.Sprintf("step %q of create failed: %v", stepName, err)
	b.m.log.Warn("create failed", "sandbox", b.id, "step", stepName, "err", err)
	if b.record().Sandbox.Warm { // it ran before: it may have died of itself
		b.judge(context.WithoutCancel(ctx))
	}
	if ended := b.alive(); ended != nil { // meanwhile: that is why the step failed
		if err = ended; b.died() { // gone is what somebody has made to be
			err = boxed.Errorf(boxed.CodeInternal, "create: %s: it ended by itself: %s", stepName, b.record().Why)
		}
	}
	if derr := b.destroy(context.WithoutCancel(ctx), reason, why, boxed.StateFailed); derr != nil {
		b.m.log.Error("undo of create", "sandbox", b.id, "err", derr)
	}
	var e *boxed.Error
	if errors.As(err, &e) {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return boxed.Errorf(boxed.CodeInternal, "create: %s: %w", stepName, err)
}

func (b *box) stepRecord(context.Context) error {
	err := b.update(func(r *Record) error {
		r.Sandbox.State = boxed.StateStarting
		return b.alive()
	})
	if err == nil && !b.record().Pooled {
		b.announce()
	}
	return err
}

// announce tells the owner of a sandbox, once.
func (b *box) announce() {
	b.created.Do(func() { b.m.emit(boxed.EventCreated, b.view(), nil) })
}

// died reports whether it ended by itself.
func (b *box) died() bool {
	switch b.record().Ending {
	case boxed.EndCrashed, boxed.EndOOM, boxed.EndSockets, boxed.EndAgentLost, boxed.EndAgentProtocol, boxed.EndVanished:
		return true
	}
	return false
}

func (b *box) dir() string { return filepath.Join(b.m.cfg.Dir, string(b.id)) }

func (b *box) stepMount(context.Context) error {
	return makeMount(b.dir(), b.id, b.record().UID, b.m.cfg.Tools)
}

// listen makes the socket and waits for nobody.
func (b *box) listen(known bool) error {
	r := b.record()
	var egress agent.EgressFunc
	if b.m.cfg.Egress != nil {
		egress = b.serveEgress
	}
	host, err := agent.Listen(agent.HostConfig{
		Egress: egress,
		Dir:    b.dir(), Socket: SocketName, Secret: r.Secret, Known: known,
		Config: b.m.agentConfig(&r),
		Away:   boxed.ErrGoingAway,
		Budget: b.m.streams,
		Broken: func(err error) {
			b.m.later(func(ctx context.Context) {
				b.destroy(ctx, boxed.EndAgentProtocol, err.Error(), boxed.StateFailed)
			})
		},
		Log: b.m.log.With("sandbox", b.id),
	})
	if err != nil {
		return err
	}
	if err := b.setHost(host); err != nil {
		host.Close()
		return err
	}
	return nil
}

// agentConfig is what an agent is told of its sandbox.
func (m *Manager) agentConfig(r *Record) agent.Config {
	c := agent.Config{UID: r.UID, Home: GuestHome, LeaseMS: r.lease().Milliseconds()}
	if r.Egress != nil {
		ports := egressPorts
		c.Egress = &ports
	}
	if t := m.cfg.Templates[r.Sandbox.Template]; r.Pooled && t.Warm != boxed.WarmNone {
		// What whoever claims it is most likely to do first.
		likely := *r
		likely.Sandbox.Env = t.Env
		c.Ready = &agent.ReadyConfig{Language: cmp.Or(t.Warm, boxed.WarmPython), Env: environment(&likely, boxed.ExecRequest{}), Dir: r.Sandbox.Dir}
	}
	return c
}

// setHost keeps the link, unless there is nobody any more who would close it.
func (b *box) setHost(host *agent.Host) error {
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.rec.Ending != "":
		return goneError(&b.rec)
	case b.m.closed:
		return errStopping()
	}
	b.host = host
	return nil
}

// lease is how long the agent goes on without a host; 0 means for ever.
func (r *Record) lease() time.Duration {
	switch {
	case r.Pooled:
		return pooledLease
	case r.Sandbox.TTL == boxed.Never:
		return 0
	}
	return r.Sandbox.TTL.D() + leaseGrace
}

func (b *box) stepContainer(ctx context.Context, image Image) error {
	r := b.record()
	container, err := b.m.cfg.Driver.Create(ctx, Box{
		ID: b.id, Nonce: r.Nonce, Image: image, Runtime: r.Sandbox.Runtime, Limits: r.Sandbox.Limits,
		UID: r.UID, Mount: b.dir(), Agent: r.Agent,
	})
	if err != nil {
		return err
	}
	return b.update(func(r *Record) error {
		r.ContainerID = container
		return nil
	})
}

func (b *box) stepStart(ctx context.Context) error {
	return b.m.cfg.Driver.Start(ctx, b.record().ContainerID)
}

func (b *box) stepLink(ctx context.Context) error {
	host := b.link()
	if host == nil { // the node is stopping
		return agent.ErrClosed
	}
	for {
		look, cancel := context.WithTimeout(ctx, linkLook)
		err := host.Ready(look)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		// One whose first process ended at once will not connect: no need to wait.
		status, serr := b.m.cfg.Driver.Status(context.WithoutCancel(ctx), b.record().ContainerID)
		if serr == nil && !status.Running {
			_, why := endOf(status)
			return fmt.Errorf("the agent did not connect: %s", why)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the agent did not connect: %w", errors.Join(ctx.Err(), serr))
		}
	}
}

// closeHost ends the agent link of this host's side.
func (b *box) closeHost() {
	b.mu.Lock()
	host := b.host
	b.host = nil
	b.mu.Unlock()
	if host != nil {
		host.Close()
	}
}

// removeDir removes the mounted directory.
func (b *box) removeDir() error {
	if err := os.RemoveAll(b.dir()); err != nil {
		return fmt.Errorf("remove the sandbox's directory: %w", err)
	}
	return nil
}
