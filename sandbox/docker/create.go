package docker

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// etcFiles of Box.Mount are mounted at their places in /etc.
var etcFiles = []string{"passwd", "group", "hosts", "resolv.conf"}

// undoTimeout bounds how long a canceled create waits for the engine to finish,
// and then for the removal of what it made.
const undoTimeout = 10 * time.Second

// Create makes the container of box. Repeating it for the same box gives the
// same container. Errors: image (it is not on this host, or out of bounds),
// unavailable (the runtime), conflict (another container has the name),
// no_space, not_ready.
func (d *Driver) Create(ctx context.Context, box sandbox.Box) (string, error) {
	if err := checkBox(box); err != nil {
		return "", err
	}
	e, err := d.facts(ctx)
	if err != nil {
		return "", err
	}
	image, err := d.imageConfig(ctx, box.Image.Digest)
	if err != nil {
		return "", err
	}
	runtime := d.runtimeOf(e, box.Runtime)
	if !e.runtimes[runtime] {
		return "", boxed.Errorf(boxed.CodeUnavailable, "the Docker engine has no runtime %q: it has %s", runtime, strings.Join(slices.Sorted(maps.Keys(e.runtimes)), ", ")).WithField("runtime")
	}
	seccomp, err := sandbox.Seccomp(e.arch)
	if err != nil {
		return "", err
	}
	spec := containerSpec{
		box: box, image: image, instance: d.instance, runtime: runtime, seccomp: string(seccomp),
		sharesKernel: e.sharesKernel[runtime],
	}
	name := containerName(box.ID)
	lingering, cancel := linger(ctx, undoTimeout)
	defer cancel()
	made, err := d.client.ContainerCreate(lingering, spec.config(), spec.hostConfig(), nil, nil, name)
	if errdefs.IsConflict(err) {
		return d.adopt(ctx, name, box)
	}
	if errdefs.IsNotFound(err) {
		d.forgetImage(box.Image.Digest)
		return "", missingImage(box.Image.Ref, err)
	}
	if err == nil && ctx.Err() != nil { // whoever asked has no ID to remove it by
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = d.Remove(undo, made.ID) // the sweep finds what is left
		err = ctx.Err()
	}
	if err != nil {
		return "", d.engineError("create container", err)
	}
	return made.ID, nil
}

// linger gives a context that ends some time after ctx does: the engine
// finishes what it began, and what it made must be known to be undone.
func linger(ctx context.Context, after time.Duration) (context.Context, context.CancelFunc) {
	lingering, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-time.After(after):
			cancel()
		case <-lingering.Done():
		}
	})
	return lingering, func() {
		stop()
		cancel()
	}
}

// adopt finds the container that has the name already: ours from an earlier try
// of the same create, or somebody else's.
func (d *Driver) adopt(ctx context.Context, name string, box sandbox.Box) (string, error) {
	c, err := d.client.ContainerInspect(ctx, name)
	if err != nil {
		return "", d.engineError("look up container "+name, err)
	}
	labels := c.Config.Labels
	if labels[labelInstance] != d.instance || labels[labelSandbox] != string(box.ID) || labels[labelNonce] != box.Nonce {
		return "", boxed.Errorf(boxed.CodeConflict, "another container is named %s: remove it", name)
	}
	return c.ID, nil
}

func containerName(id boxed.ID) string { return "boxed-" + string(id) }

// runtimeOf resolves a runtime's name.
func (d *Driver) runtimeOf(e *engine, name string) string {
	switch {
	case name != "":
		return name
	case d.cfg.Runtime != "":
		return d.cfg.Runtime
	}
	return e.runtime
}

// checkBox refuses what can only be a mistake of the caller's.
func checkBox(box sandbox.Box) error {
	if _, err := boxed.ParseID(string(box.ID)); err != nil {
		return err
	}
	switch l := box.Limits; {
	case box.Nonce == "":
		return fmt.Errorf("create container: box without nonce")
	case box.UID <= 0:
		return fmt.Errorf("create container: uid %d", box.UID)
	case !filepath.IsAbs(box.Mount), !filepath.IsAbs(box.Agent):
		return fmt.Errorf("create container: mount %q and agent %q must be absolute", box.Mount, box.Agent)
	case l.MemoryBytes <= 0, l.CPUs <= 0, l.Processes <= 0, l.OpenFiles <= 0, l.WorkspaceBytes <= 0, l.HomeBytes <= 0,
		l.TmpBytes <= 0, l.OutputBytes <= 0, l.ShmBytes <= 0:
		return boxed.Errorf(boxed.CodeInvalid, "every limit must be above zero").WithField("limits")
	}
	return nil
}

// containerSpec is what a container is made of.
type containerSpec struct {
	box          sandbox.Box
	image        *imageConfig
	instance     string
	runtime      string
	seccomp      string
	sharesKernel bool
}

// config is the portable part. Every field that an image can set is set here:
// the engine fills those that are not from the image.
func (s containerSpec) config() *container.Config {
	return &container.Config{
		Image:       s.box.Image.Digest, // not the name: that may have moved since it was looked up
		Hostname:    sandbox.Hostname(s.box.ID),
		User:        "0:0",
		Entrypoint:  []string{sandbox.GuestAgent},
		Cmd:         []string{},
		Env:         s.env(),
		WorkingDir:  "/",
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
		StopSignal:  "SIGKILL",
		Labels:      s.labels(),
		// With it the engine does not run itself once more for a network that is not there, 140 ms. gVisor then has
		// no loopback, so only for runtimes that leave it to this kernel.
		NetworkDisabled: s.sharesKernel,
	}
}

// env is PID 1's. A name without "=" takes a variable away that the engine or
// the image would set.
func (s containerSpec) env() []string {
	env := sandbox.AgentEnv()
	set := map[string]bool{}
	for _, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		set[name] = true
	}
	for _, name := range append([]string{"PATH", "HOSTNAME", "TERM"}, s.image.envNames...) {
		if !set[name] {
			set[name] = true
			env = append(env, name)
		}
	}
	return env
}

// labels are ours, and the image's emptied: they cannot be taken away, and
// tools that watch the engine act on what labels say.
func (s containerSpec) labels() map[string]string {
	labels := map[string]string{}
	for _, name := range s.image.labelNames {
		labels[name] = ""
	}
	labels[labelInstance] = s.instance
	labels[labelSandbox] = string(s.box.ID)
	labels[labelNonce] = s.box.Nonce
	return labels
}

// hostConfig is the part that hardens.
func (s containerSpec) hostConfig() *container.HostConfig {
	l := s.box.Limits
	no := false
	return &container.HostConfig{
		Runtime:        s.runtime,
		ReadonlyRootfs: true,
		NetworkMode:    "none",
		IpcMode:        "private",
		CgroupnsMode:   "private", // the engine's default is the host's on cgroup v1
		UsernsMode:     "host",    // where the engine remaps users the agent could not open its socket
		CapDrop:        []string{"ALL"},
		CapAdd:         sandbox.Capabilities(),
		SecurityOpt:    []string{"no-new-privileges", "seccomp=" + s.seccomp},
		MaskedPaths:    sandbox.MaskedPaths(),
		ReadonlyPaths:  sandbox.ReadonlyPaths(),
		Sysctls:        s.sysctls(),
		LogConfig:      container.LogConfig{Type: "none"},
		RestartPolicy:  container.RestartPolicy{Name: container.RestartPolicyDisabled},
		AutoRemove:     false, // its exit code and whether it ran out of memory must be there to be read
		Init:           &no,
		ShmSize:        l.ShmBytes,
		Tmpfs:          s.tmpfs(),
		Mounts:         s.mounts(),
		Resources: container.Resources{
			Memory:         l.MemoryBytes,
			MemorySwap:     l.MemoryBytes, // of both together: no swap
			NanoCPUs:       nanoCPUs(l),
			CPUShares:      cpuShares(l),
			PidsLimit:      s.pids(),
			OomKillDisable: &no,
			Ulimits:        s.ulimits(),
		},
	}
}

func nanoCPUs(l boxed.Limits) int64 { return int64(l.CPUs*100+0.5) * 1e7 }

// sysctls: a runtime with a kernel of its own has its own buffers, inside the
// sandbox's memory, and may not know these names.
func (s containerSpec) sysctls() map[string]string {
	if !s.sharesKernel {
		return nil
	}
	return sandbox.Sysctls()
}

// pids is the limit of the container's cgroup. A runtime with a kernel of its
// own runs threads of that kernel in it: with runsc and ptrace 76 when idle and
// 6 for each process of the user's. Running out of them kills the sandbox, so
// there is room; nproc, which that kernel enforces, bounds the user.
func (s containerSpec) pids() *int64 {
	n := s.box.Limits.Processes + sandbox.AgentPIDs
	if !s.sharesKernel {
		n = 8*n + 256
	}
	return &n
}

// gvisorProcess is what one process costs in memory under a kernel of its own,
// in bytes: 2.2 MiB with runsc and ptrace, and half as much again to spare.
const gvisorProcess = 4 * boxed.MiB

func (s containerSpec) ulimits() []*container.Ulimit {
	l := s.box.Limits
	if !s.sharesKernel { // or a fork bomb takes the memory limit, and with it the whole sandbox
		l.Processes = max(16, min(l.Processes, l.MemoryBytes/gvisorProcess))
	}
	var out []*container.Ulimit
	for _, u := range sandbox.Ulimits(l) {
		out = append(out, &container.Ulimit{Name: u.Name, Soft: u.Value, Hard: u.Value})
	}
	return out
}

// tmpfs are the writable places. An image's volume at one of them is that one:
// the engine makes no volume where a tmpfs is.
func (s containerSpec) tmpfs() map[string]string {
	out := map[string]string{}
	for _, t := range sandbox.VolumeTmpfs(s.image.volumes) {
		out[t.Path] = tmpfsOptions(t, s.box.UID)
	}
	for _, t := range sandbox.GuestTmpfs(s.box.Limits) {
		out[t.Path] = tmpfsOptions(t, s.box.UID)
	}
	out[shmPath] = tmpfsOptions(sandbox.Tmpfs{Path: shmPath, Bytes: s.box.Limits.ShmBytes, Mode: 0o1777}, 0)
	return out
}

// shmPath is mounted as one of our own: the engine's has no bound on inodes.
const shmPath = "/dev/shm"

// tmpfsOptions: exec, as the engine's default is noexec and people build programs.
func tmpfsOptions(t sandbox.Tmpfs, uid int) string {
	return fmt.Sprintf("rw,nosuid,nodev,exec,size=%d,nr_inodes=%d,mode=%04o,uid=%d,gid=%d", t.Bytes, t.Inodes(), t.Mode, uid, uid)
}

// mounts are what the host gives, read-only.
func (s containerSpec) mounts() []mount.Mount {
	bind := func(source, target string) mount.Mount {
		return mount.Mount{
			Type: mount.TypeBind, Source: source, Target: target, ReadOnly: true,
			BindOptions: &mount.BindOptions{Propagation: mount.PropagationRPrivate},
		}
	}
	out := []mount.Mount{bind(s.box.Mount, sandbox.GuestDir), bind(s.box.Agent, sandbox.GuestAgent)}
	for _, name := range etcFiles {
		out = append(out, bind(filepath.Join(s.box.Mount, name), "/etc/"+name))
	}
	return out
}
