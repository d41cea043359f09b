package sandbox

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// hand prepares a made sandbox for its owner and makes it running.
func (b *box) hand(ctx context.Context, spec boxed.Spec) error {
	if err := ctx.Err(); err != nil {
		return b.undo(ctx, "prepare", err)
	}
	if err := b.prepare(ctx, spec); err != nil {
		return b.undo(ctx, "prepare", err)
	}
	if err := b.openEgress(ctx, spec.Egress); err != nil {
		return b.undo(ctx, "egress", err)
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
	b.announce()
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
	if err := host.Configure(ctx, b.m.agentConfig(&r)); err != nil && !errors.Is(err, agent.ErrClosed) {
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
	host := b.link()
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
		case boxed.CodeInvalid, boxed.CodeForbidden, boxed.CodeNotFound, boxed.CodeConflict:
			return boxed.Errorf(boxed.CodeInvalid, "%s: %s", field, e.Message).WithField(field)
		case boxed.CodeNoSpace:
			return e.WithField(field)
		}
	}
	return err
}
