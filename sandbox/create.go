package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
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

func (a Admission) each(f func(*boxed.Sandbox)) {
	for _, b := range a.m.boxes {
		if r := b.record(); !r.Pooled && !r.Sandbox.State.Ended() {
			f(&r.Sandbox)
		}
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
		m.emit(boxed.EventCreated, b.view(), nil)
		err = b.hand(ctx, spec)
	} else {
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
		return boxed.Errorf(boxed.CodeNotReady, "the node is stopping")
	case !m.recovered:
		return boxed.Errorf(boxed.CodeNotReady, "the node is still recovering its sandboxes; try again in a moment")
	}
	return admit(Admission{m})
}

// cold makes a sandbox that the pool does not have.
func (m *Manager) cold(ctx context.Context, owner string, spec boxed.Spec, miss string, admit func(Admission) error) (*box, error) {
	image, err := m.cfg.Driver.Image(ctx, spec.Image, m.pullEvents(owner, spec.Image))
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
	m.emit(boxed.EventCreated, b.view(), nil)
	if err := b.make(ctx, image); err != nil {
		return nil, err
	}
	return b, b.hand(ctx, spec)
}

// register judges again, now that the image is there, and reserves.
func (m *Manager) register(rec Record, admit func(Admission) error) (*box, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed { // while the image was pulled
		return nil, boxed.Errorf(boxed.CodeNotReady, "the node is stopping")
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

// pullEvents tells the owner how a pull goes on.
func (m *Manager) pullEvents(owner, ref string) func(PullProgress) {
	return func(p PullProgress) {
		message := ref + ": " + p.Message
		if p.Total > 0 {
			message = fmt.Sprintf("%s (%d of %d MiB)", message, p.Current/boxed.MiB, p.Total/boxed.MiB)
		}
		m.emit(boxed.EventImage, &boxed.Sandbox{Owner: owner, Message: message}, nil)
	}
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
	m.boxes[b.id] = b
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
	if ended := b.alive(); ended != nil { // somebody ended it meanwhile: that is why the step failed
		err = ended
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
	return b.update(func(r *Record) error {
		r.Sandbox.State = boxed.StateStarting
		return nil
	})
}

func (b *box) dir() string { return filepath.Join(b.m.cfg.Dir, string(b.id)) }

func (b *box) stepMount(context.Context) error {
	return makeMount(b.dir(), b.id, b.record().UID)
}

// listen makes the socket and waits for nobody.
func (b *box) listen(known bool) error {
	r := b.record()
	host, err := agent.Listen(agent.HostConfig{
		Dir: b.dir(), Socket: SocketName, Secret: r.Secret, Known: known,
		Config: agent.Config{UID: r.UID, Home: GuestHome, LeaseMS: r.lease().Milliseconds()},
		Away:   boxed.ErrGoingAway,
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
	b.mu.Lock()
	b.host = host
	b.mu.Unlock()
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
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
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

// hand prepares a made sandbox for its owner and makes it running.
func (b *box) hand(ctx context.Context, spec boxed.Spec) error {
	if err := b.prepare(ctx, spec); err != nil {
		return b.undo(ctx, "prepare", err)
	}
	err := b.update(func(r *Record) error {
		if err := b.alive(); err != nil {
			return err
		}
		now := b.m.cfg.Now()
		r.Sandbox.State, r.Sandbox.StartedAt = boxed.StateRunning, now
		r.expire(now, r.Sandbox.TTL)
		return nil
	})
	if err != nil {
		return b.undo(ctx, "running", err)
	}
	b.mu.Lock()
	b.active = b.m.cfg.Now()
	host, r := b.host, b.rec
	b.mu.Unlock()
	if r.Sandbox.Warm {
		// The agent's dead man's switch is set behind the caller's back: it
		// matters in an hour.
		b.m.later(func(ctx context.Context) { b.pushLease(ctx, host) })
	}
	b.m.emit(boxed.EventStarted, b.view(), nil)
	return nil
}

// pushLease tells the agent how long it may go on without a host.
func (b *box) pushLease(ctx context.Context, host *agent.Host) {
	if host == nil {
		return
	}
	r := b.record()
	ctx, cancel := b.m.untilStop(ctx, 5*time.Second)
	defer cancel()
	config := agent.Config{UID: r.UID, Home: GuestHome, LeaseMS: r.lease().Milliseconds()}
	if err := host.Configure(ctx, config); err != nil && !errors.Is(err, agent.ErrClosed) {
		b.m.log.Warn("set the agent's lease", "sandbox", b.id, "err", err)
	}
}

// prepare sets limits that differ from the pool's, makes the working directory
// and writes the spec's files.
func (b *box) prepare(ctx context.Context, spec boxed.Spec) error {
	r := b.record()
	changed := r.Sandbox.Limits != b.made
	if r.Sandbox.Warm && (changed || spec.Dir != boxed.DefaultDir || len(spec.Files) > 0) {
		// From here on it is used: a crash must not find it in the pool.
		if err := b.stepRecord(ctx); err != nil {
			return err
		}
	}
	if changed {
		if err := b.m.cfg.Driver.Limit(ctx, r.ContainerID, r.Sandbox.Limits); err != nil {
			return err
		}
	}
	if spec.Dir == boxed.DefaultDir && len(spec.Files) == 0 {
		return nil
	}
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
	if host == nil {
		return agent.ErrClosed
	}
	if spec.Dir != boxed.DefaultDir {
		if err := host.Mkdir(ctx, spec.Dir, true); err != nil {
			return asInvalid(b.linkError(err), "dir")
		}
	}
	for i, f := range spec.Files {
		p := f.Path
		if !path.IsAbs(p) {
			p = path.Join(spec.Dir, p)
		}
		w := agent.Write{Path: p, Mode: f.Mode, Parents: true}
		if _, err := host.Write(ctx, w, strings.NewReader(string(f.Content))); err != nil {
			return asInvalid(b.linkError(err), fmt.Sprintf("files[%d].path", i))
		}
	}
	return nil
}

// asInvalid turns what a request could have avoided into an error that names
// the field.
func asInvalid(err error, field string) error {
	var e *boxed.Error
	if errors.As(err, &e) {
		switch e.Code {
		case boxed.CodeForbidden, boxed.CodeNotFound, boxed.CodeConflict:
			return boxed.Errorf(boxed.CodeInvalid, "%s: %s", field, e.Message).WithField(field)
		case boxed.CodeNoSpace:
			return e.WithField(field)
		}
	}
	return err
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
