package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"github.com/docker/docker/api/types/container"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// running is what is known of a container that runs. It holds until the
// container is removed: a cgroup is named after its container.
type running struct {
	cgroup cgroup
	first  *os.File // a pidfd of its first process, or nil; see Gone
}

// running finds a container's cgroup, from memory or from its first process.
func (d *Driver) running(ctx context.Context, id string) (*running, error) {
	d.mu.Lock()
	r := d.containers[id]
	d.mu.Unlock()
	if r != nil {
		return r, nil
	}
	c, err := d.inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	return d.locate(c)
}

func (d *Driver) locate(c container.InspectResponse) (*running, error) {
	if !c.State.Running || c.State.Pid == 0 {
		return nil, boxed.Errorf(boxed.CodeConflict, "the container does not run")
	}
	if !d.local() {
		return nil, errNoCgroup
	}
	own, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	// Before its cgroup is read: a cgroup is named after its container, so that
	// what was opened cannot be another process that got the number.
	first := openProcess(c.State.Pid)
	cg, err := cgroupOf(c, string(own))
	if err != nil {
		if first != nil {
			first.Close()
		}
		return nil, fmt.Errorf("%w: %w", errNoCgroup, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forgetLocked(c.ID)
	r := &running{cgroup: cg, first: first}
	d.containers[c.ID] = r
	return r, nil
}

func cgroupOf(c container.InspectResponse, own string) (cgroup, error) {
	proc, err := os.ReadFile("/proc/" + strconv.Itoa(c.State.Pid) + "/cgroup")
	if err != nil {
		return cgroup{}, err
	}
	return locateCgroup(string(proc), own, c.ID)
}

// errNoCgroup: the container's cgroup is not to be found from here, so the
// engine has to be asked.
var errNoCgroup = errors.New("cgroup not found")

// forget drops what is known of a container.
func (d *Driver) forget(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forgetLocked(id)
}

func (d *Driver) forgetLocked(id string) {
	if r := d.containers[id]; r != nil && r.first != nil {
		r.first.Close()
	}
	delete(d.containers, id)
}

// inCgroup runs do on a container's cgroup, and viaEngine where that cannot be
// reached. A file that is missing because the container ended is the answer
// about that container.
func (d *Driver) inCgroup(ctx context.Context, id string, do func(cgroup) error, viaEngine func() error) error {
	r, err := d.running(ctx, id)
	if err == nil {
		if err = do(r.cgroup); err == nil || !(errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENODEV)) {
			return err
		}
		d.forget(id)
		if _, err = d.running(ctx, id); err == nil { // it still runs: the file is what is missing
			return viaEngine()
		}
	}
	if errors.Is(err, errNoCgroup) {
		return viaEngine()
	}
	return err
}

// Pause freezes every process and returns when all are. Pausing what is paused
// is nil. Errors: not_found, conflict (it does not run), not_ready.
//
// The engine is not told: its own pause takes 16 ms, this 0.2. So the engine
// lists the container as running; Status and Remove know better.
func (d *Driver) Pause(ctx context.Context, id string) error {
	return d.inCgroup(ctx, id, func(c cgroup) error { return c.freeze(true) }, func() error {
		return d.pauseViaEngine(ctx, id, true)
	})
}

// Resume thaws what Pause froze, or somebody's docker pause. Resuming what runs
// is nil.
func (d *Driver) Resume(ctx context.Context, id string) error {
	c, err := d.inspect(ctx, id)
	if err != nil {
		return err
	}
	if c.State.Paused { // by the engine, which must be told, or it refuses to do anything else with it
		return d.pauseViaEngine(ctx, id, false)
	}
	return d.inCgroup(ctx, id, func(c cgroup) error { return c.freeze(false) }, func() error { return nil })
}

func (d *Driver) pauseViaEngine(ctx context.Context, id string, pause bool) error {
	c, err := d.inspect(ctx, id)
	switch {
	case err != nil:
		return err
	case !c.State.Running:
		return boxed.Errorf(boxed.CodeConflict, "the container does not run")
	case c.State.Paused == pause:
		return nil
	case pause:
		return d.engineError("pause container", d.client.ContainerPause(ctx, id))
	}
	return d.engineError("resume container", d.client.ContainerUnpause(ctx, id))
}

// frozen reports whether a container that runs is frozen.
func (d *Driver) frozen(c container.InspectResponse) bool {
	if !c.State.Running {
		return false
	}
	d.mu.Lock()
	r := d.containers[c.ID]
	d.mu.Unlock()
	if r == nil {
		var err error
		if r, err = d.locate(c); err != nil {
			return false
		}
	}
	frozen, err := r.cgroup.isFrozen()
	return err == nil && frozen
}

// thaw lets a container that is about to be removed take its last signal.
func (d *Driver) thaw(ctx context.Context, c container.InspectResponse) {
	if c.State.Paused || d.frozen(c) {
		if err := d.Resume(ctx, c.ID); err != nil {
			d.log.WarnContext(ctx, "container to be removed does not thaw", "container", c.ID, "error", oneLine(err))
		}
	}
}

// Limit sets memory, CPUs and loopback buffers of a running container; zero
// fields of l stay as they are. Errors: conflict (it does not run, or uses more
// memory than that on cgroup v1), not_found, not_ready.
func (d *Driver) Limit(ctx context.Context, id string, l boxed.Limits) error {
	e, err := d.facts(ctx)
	if err != nil {
		return err
	}
	viaEngine := func() error { return d.limitViaEngine(ctx, id, l) }
	return d.inCgroup(ctx, id, func(c cgroup) error {
		if e.systemd {
			// systemd holds limits of its own and writes them again whenever it reloads: it has to know, 20 ms.
			if err := viaEngine(); err != nil {
				return err
			}
		} else if err := setLimits(c, l); err != nil {
			return err
		}
		if l.MemoryBytes == 0 {
			return nil
		}
		return optional(c.limitLoopback(sandbox.LoopbackBytes(l)))
	}, viaEngine)
}

func setLimits(c cgroup, l boxed.Limits) error {
	if l.MemoryBytes > 0 {
		if err := c.setMemory(l.MemoryBytes); err != nil {
			return err
		}
	}
	if l.CPUs > 0 {
		return c.setCPU(nanoCPUs(l))
	}
	return nil
}

func (d *Driver) limitViaEngine(ctx context.Context, id string, l boxed.Limits) error {
	change := container.Resources{Memory: l.MemoryBytes, MemorySwap: l.MemoryBytes, NanoCPUs: nanoCPUs(l)}
	if l.CPUs > 0 { // the least weight is not 0, which would leave it
		change.CPUShares = cpuShares(l)
	}
	_, err := d.client.ContainerUpdate(ctx, id, container.UpdateConfig{Resources: change})
	return d.engineError("change limits", err)
}

// Stats reads usage from the container's cgroup. Errors: not_found, conflict
// (it does not run), unavailable (the engine is on another host).
func (d *Driver) Stats(ctx context.Context, id string) (boxed.Stats, error) {
	var s boxed.Stats
	err := d.inCgroup(ctx, id, func(c cgroup) (err error) {
		s, err = c.stats()
		return err
	}, func() error {
		return boxed.Errorf(boxed.CodeUnavailable, "usage can be read only where the engine runs on this host")
	})
	return s, err
}
