package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Times of a removal.
const (
	removeTimeout = 60 * time.Second       // of one Remove, however busy the engine is
	removeRetry   = 50 * time.Millisecond  // between looks at a removal that is under way
	removeAgain   = 500 * time.Millisecond // before a removal that failed is tried again
)

// inspectAtOnce is how many containers List looks at together.
const inspectAtOnce = 4

// inspect finds a container of this node. Another's is as absent as none.
func (d *Driver) inspect(ctx context.Context, id string) (container.InspectResponse, error) {
	if !isContainerID(id) { // the engine would take a name, or the start of an ID
		return container.InspectResponse{}, notOurs(id)
	}
	c, err := d.client.ContainerInspect(ctx, id)
	switch {
	case errdefs.IsNotFound(err):
		d.forget(id)
		return c, notOurs(id)
	case err != nil:
		return c, d.engineError("look up container", err)
	case c.Config == nil || c.State == nil || c.Config.Labels[labelInstance] != d.instance:
		return c, notOurs(id)
	}
	return c, nil
}

func isContainerID(id string) bool {
	if len(id) != 64 {
		return false
	}
	for i := range len(id) {
		if c := id[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Start starts a container and looks whether what runs is what was asked for;
// if not it is killed. Starting one that runs is nil. Errors: not_found,
// start_failed (the runtime refused, the agent ended, or the image got in the
// way; the message says which), no_space, not_ready.
func (d *Driver) Start(ctx context.Context, id string) error {
	if _, err := d.inspect(ctx, id); err != nil {
		return err
	}
	if err := d.client.ContainerStart(ctx, id, container.StartOptions{}); err != nil {
		return d.startError(err)
	}
	c, err := d.inspect(ctx, id)
	if err != nil {
		return err
	}
	if err := d.settle(ctx, c); err != nil {
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = d.client.ContainerKill(kill, id, "KILL") // removing it is the caller's undo
		return err
	}
	return nil
}

// settle checks a container that has just been started, and sets what the
// engine cannot set.
func (d *Driver) settle(ctx context.Context, c container.InspectResponse) error {
	e, err := d.facts(ctx)
	if err != nil {
		return err
	}
	if !d.local() || !e.sharesKernel[c.HostConfig.Runtime] {
		return nil // nothing of it can be seen from here
	}
	if err := attest(ctx, c); err != nil {
		return err
	}
	r, err := d.running(ctx, c.ID)
	if err != nil {
		return err
	}
	return r.cgroup.limitLoopback(sandbox.LoopbackBytes(boxed.Limits{MemoryBytes: c.HostConfig.Memory}))
}

// startError: the engine reports all that can go wrong in a runtime as text
// under one status. That text names paths of the host, so it is the cause, for
// logs, and not the message.
func (d *Driver) startError(err error) error {
	err = d.engineError("start container", err)
	var known *boxed.Error
	if errors.As(err, &known) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	message := "the runtime could not start the container; the node's log has its words"
	if text := err.Error(); strings.Contains(text, "mount") || strings.Contains(text, sandbox.GuestAgent) || strings.Contains(text, "/etc/") {
		message = "something in the image is in the way: what it has at /workspace, " + sandbox.GuestHome + ", /tmp, /output, " + sandbox.GuestDir +
			" and /etc/{" + strings.Join(etcFiles, ",") + "} must be directories and files and not links"
	}
	return &boxed.Error{Code: boxed.CodeStartFailed, Message: message, Err: err}
}

// Remove ends and removes a container in whatever state, and returns when the
// engine no longer knows it. Of many at once each returns when it is gone. It
// takes at most a minute.
func (d *Driver) Remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, removeTimeout, boxed.Errorf(boxed.CodeNotReady, "the Docker engine did not remove a container within %v; it is tried again", removeTimeout))
	defer cancel()
	for {
		c, err := d.inspect(ctx, id)
		if errors.Is(err, boxed.CodeNotFound) {
			return nil
		}
		if err != nil {
			return timeoutCause(ctx, err)
		}
		if c.State.Running {
			d.thaw(ctx, c) // a frozen process takes no signal on cgroup v1
		}
		err = d.client.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
		wait := removeRetry
		switch {
		case err == nil, errdefs.IsNotFound(err), errdefs.IsConflict(err): // gone, or somebody else is at it
		case isUnreachable(err):
			return d.engineError("remove container", err)
		default: // a mount that is busy for a moment, a shim that is slow to end
			d.log.WarnContext(ctx, "container removal failed, trying again", "container", id, "error", oneLine(err))
			wait = removeAgain
		}
		if _, err := d.inspect(ctx, id); errors.Is(err, boxed.CodeNotFound) {
			return nil
		}
		select {
		case <-ctx.Done():
			return timeoutCause(ctx, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// timeoutCause is the reason that a context's deadline was set with, if that is
// what ended a call.
func timeoutCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil {
		return fmt.Errorf("remove container: %w", cause)
	}
	return err
}

// Status looks one container up.
func (d *Driver) Status(ctx context.Context, id string) (sandbox.Status, error) {
	c, err := d.inspect(ctx, id)
	if err != nil {
		return sandbox.Status{}, err
	}
	return d.status(c), nil
}

func (d *Driver) status(c container.InspectResponse) sandbox.Status {
	s := sandbox.Status{
		ContainerID: c.ID,
		Sandbox:     boxed.ID(c.Config.Labels[labelSandbox]),
		Nonce:       c.Config.Labels[labelNonce],
		Running:     c.State.Running,
		Paused:      c.State.Paused || d.frozen(c),
		OOMKilled:   c.State.OOMKilled,
		ExitCode:    c.State.ExitCode,
		PID:         c.State.Pid,
		Sockets:     d.sockets(c),
	}
	s.CreatedAt, _ = time.Parse(time.RFC3339Nano, c.Created) // the engine's own form; zero if it ever changes
	if at, err := time.Parse(time.RFC3339Nano, c.State.StartedAt); err == nil && at.Year() > 1 {
		s.StartedAt = at
	}
	return s
}

// sockets counts the TCP sockets of a container's network namespace, if that is
// this kernel's.
func (d *Driver) sockets(c container.InspectResponse) int {
	d.mu.Lock()
	e := d.engine
	d.mu.Unlock()
	if c.State.Pid == 0 || !d.local() || e == nil || !e.sharesKernel[c.HostConfig.Runtime] {
		return 0
	}
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(c.State.Pid) + "/net/sockstat")
	if err != nil {
		return 0 // it has just ended
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "TCP: inuse "); ok {
			count, _, _ := strings.Cut(rest, " ")
			n, _ := strconv.Atoi(count) // the kernel's own number
			return n
		}
	}
	return 0
}

// List finds all containers whose label says that they are this node's.
func (d *Driver) List(ctx context.Context) ([]sandbox.Status, error) {
	found, err := d.client.ContainerList(ctx, container.ListOptions{All: true, Filters: labelFilter(labelInstance, d.instance)})
	if err != nil {
		return nil, d.engineError("list containers", err)
	}
	all := make([]*sandbox.Status, len(found))
	errs := make([]error, len(found))
	slots := make(chan struct{}, inspectAtOnce)
	var wg sync.WaitGroup
	for i := range found {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			s, err := d.Status(ctx, found[i].ID)
			if err == nil {
				all[i] = &s
			} else if !errors.Is(err, boxed.CodeNotFound) { // one that went away meanwhile is no error
				errs[i] = err
			}
		})
	}
	wg.Wait()
	if err := firstOf(errs); err != nil {
		return nil, err
	}
	out := make([]sandbox.Status, 0, len(all))
	for _, s := range all {
		if s != nil {
			out = append(out, *s)
		}
	}
	return out, nil
}

// firstOf: an engine that goes away gives the same error for each container.
func firstOf(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func labelFilter(label, value string) filters.Args {
	return filters.NewArgs(filters.Arg("label", label+"="+value))
}
