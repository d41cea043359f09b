package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Names of what is compared.
const (
	dockerStock    = "docker-stock"
	dockerHardened = "docker-hardened"
	dockerOurs     = "docker-ours"
	boxedCold      = "boxed-cold"
	boxedWarm      = "boxed-warm"
	boxedDriver    = "boxed-driver" // below HTTP, in this process
	boxedHTTP      = "boxed-http"   // one JSON call on a kept connection
	boxedStream    = "boxed-stream" // a WebSocket for each exec
	boxedPool      = "boxed"        // with the pool that a node has by default
)

// systemOrder is that of tables and plots.
var systemOrder = []string{
	dockerStock, dockerHardened, dockerOurs, dockerCP, openssh, direct, socat, boxedCold, boxedWarm, boxedDriver, boxedHTTP, boxedStream, boxedPool,
	burstFull, burstEmpty, memoryPooled, memoryUsed, memoryIdle,
}

func bySystem(a, b string) int {
	at := func(name string) int {
		if i := slices.Index(systemOrder, name); i >= 0 {
			return i
		}
		return len(systemOrder)
	}
	return cmp.Or(cmp.Compare(at(a), at(b)), strings.Compare(a, b))
}

// printOK is the program of a first exec, and okOutput what it has to say.
const (
	printOK  = "print('ok')"
	okOutput = "ok\n"
)

func isOK(output string) error {
	if output != okOutput {
		return fmt.Errorf("the output is %q, not %q", output, okOutput)
	}
	return nil
}

// Limits of raw containers are those of a sandbox by default.
func limits() boxed.Limits { return boxed.DefaultLimits() }

// stock is a container as `docker create` makes it, where the engine's default
// network works.
func (r *rig) stock() *raw {
	c := &raw{r: r, config: container.Config{Image: r.imageID, Cmd: []string{"sleep", "infinity"}}}
	switch r.network {
	case networkOwn:
		c.host.NetworkMode = container.NetworkMode(r.ownNetwork())
	case networkNone:
		c.host.NetworkMode = "none"
	}
	return c
}

// hardened is a container as people harden it by hand, with the engine's own
// seccomp profile.
func (r *rig) hardened() *raw {
	pids, no := limits().Processes, false
	return &raw{
		r: r,
		config: container.Config{
			Image: r.imageID, Cmd: []string{"sleep", "infinity"}, User: "65534:65534", WorkingDir: "/workspace",
		},
		host: container.HostConfig{
			NetworkMode: "none", ReadonlyRootfs: true, CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"},
			Tmpfs: map[string]string{
				"/tmp":       "rw,nosuid,nodev,size=64m",
				"/workspace": "rw,nosuid,nodev,size=192m,uid=65534,gid=65534",
				"/run":       "rw,nosuid,nodev,size=16m",
			},
			Resources: container.Resources{
				Memory: limits().MemoryBytes, MemorySwap: limits().MemoryBytes, NanoCPUs: int64(limits().CPUs * 1e9),
				PidsLimit: &pids, OomKillDisable: &no,
			},
		},
	}
}

// oursUID is the user of user code in a container with our settings.
const oursUID = 340_000

// ours is a container with everything that boxed sets, but without its agent: a
// program that sleeps is the first process, and execs go through the engine. The
// smoke test compares it with a real sandbox.
func (r *rig) ours() (*raw, error) {
	seccomp, err := sandbox.Seccomp(runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	mounts, err := r.oursMounts()
	if err != nil {
		return nil, err
	}
	l, no := limits(), false
	pids := l.Processes + sandbox.AgentPIDs
	tmpfs := map[string]string{}
	for _, t := range sandbox.GuestTmpfs(l) {
		tmpfs[t.Path] = oursTmpfs(t, oursUID)
	}
	tmpfs["/dev/shm"] = oursTmpfs(sandbox.Tmpfs{Path: "/dev/shm", Bytes: l.ShmBytes, Mode: 0o1777}, 0)
	var ulimits []*container.Ulimit
	for _, u := range sandbox.Ulimits(l) {
		ulimits = append(ulimits, &container.Ulimit{Name: u.Name, Soft: u.Value, Hard: u.Value})
	}
	return &raw{
		r: r, user: fmt.Sprintf("%d:%d", oursUID, oursUID),
		config: container.Config{
			Image: r.imageID, User: "0:0", Entrypoint: []string{"sleep"}, Cmd: []string{"infinity"}, Env: sandbox.AgentEnv(),
			WorkingDir: "/", Healthcheck: &container.HealthConfig{Test: []string{"NONE"}}, StopSignal: "SIGKILL", NetworkDisabled: true,
		},
		host: container.HostConfig{
			ReadonlyRootfs: true, NetworkMode: "none", IpcMode: "private", CgroupnsMode: "private", UsernsMode: "host",
			CapDrop: []string{"ALL"}, CapAdd: sandbox.Capabilities(),
			SecurityOpt: []string{"no-new-privileges", "seccomp=" + string(seccomp)},
			MaskedPaths: sandbox.MaskedPaths(), ReadonlyPaths: sandbox.ReadonlyPaths(), Sysctls: sandbox.Sysctls(),
			LogConfig:     container.LogConfig{Type: "none"},
			RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
			Init:          &no, ShmSize: l.ShmBytes, Tmpfs: tmpfs, Mounts: mounts,
			Resources: container.Resources{
				Memory: l.MemoryBytes, MemorySwap: l.MemoryBytes, NanoCPUs: int64(l.CPUs * 1e9), CPUShares: int64(l.CPUs * 1024), PidsLimit: &pids,
				OomKillDisable: &no, Ulimits: ulimits,
			},
		},
	}, nil
}

func oursTmpfs(t sandbox.Tmpfs, uid int) string {
	return fmt.Sprintf("rw,nosuid,nodev,exec,size=%d,nr_inodes=%d,mode=%04o,uid=%d,gid=%d", t.Bytes, t.Inodes(), t.Mode, uid, uid)
}

// oursMounts are as many mounts from the host as a sandbox has.
func (r *rig) oursMounts() ([]mount.Mount, error) {
	dir := filepath.Join(r.dir, "etc")
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	bind := func(source, target string) mount.Mount {
		return mount.Mount{
			Type: mount.TypeBind, Source: source, Target: target, ReadOnly: true,
			BindOptions: &mount.BindOptions{Propagation: mount.PropagationRPrivate},
		}
	}
	mounts := []mount.Mount{bind(dir, sandbox.GuestDir), bind(filepath.Join(r.bin, "boxed-agent"), sandbox.GuestAgent)}
	files := map[string]string{
		"passwd":      fmt.Sprintf("root:x:0:0::/:/bin/sh\n%s:x:%d:%d::%s:/bin/bash\n", sandbox.GuestUser, oursUID, oursUID, sandbox.GuestHome),
		"group":       fmt.Sprintf("root:x:0:\n%s:x:%d:\n", sandbox.GuestUser, oursUID),
		"hosts":       "127.0.0.1 localhost\n::1 localhost\n",
		"resolv.conf": "nameserver 127.0.0.1\n",
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(files[name]), 0o644); err != nil {
			return nil, err
		}
		mounts = append(mounts, bind(path, "/etc/"+name))
	}
	return mounts, nil
}

// life is one system's way from nothing to a first result and back. The ID that
// create returns is valid also with an error, if something was made.
type life struct {
	name    string
	create  func(ctx context.Context) (id string, err error)
	exec    func(ctx context.Context, id string) error // the first one, of printOK
	destroy func(ctx context.Context, id string) error
}

// life is that of a raw container.
func (c *raw) life(name string) life {
	return life{name, c.create, func(ctx context.Context, id string) error {
		var out bytes.Buffer
		if err := c.exec(ctx, id, &out, "python3", "-c", printOK); err != nil {
			return err
		}
		return isOK(out.String())
	}, c.destroy}
}

// life is that of a sandbox. A spec that asks for what the pool has not is cold;
// it is an error if one is not as expected.
func (n *node) life(name string, spec boxed.Spec, warm func(bool) error) life {
	return life{
		name: name,
		create: func(ctx context.Context) (string, error) {
			s, err := n.Create(ctx, spec)
			if err != nil {
				return "", err
			}
			return string(s.ID), warm(s.Warm)
		},
		exec: n.printOK,
		destroy: func(ctx context.Context, id string) error {
			return n.Destroy(ctx, boxed.ID(id))
		},
	}
}

func (n *node) printOK(ctx context.Context, id string) error {
	result, err := n.Run(ctx, boxed.ID(id), boxed.ExecRequest{Language: "python", Code: printOK})
	if err != nil {
		return err
	}
	if err := exited(result.ExitStatus); err != nil {
		return fmt.Errorf("%w: %.200s", err, result.Stderr)
	}
	return isOK(string(result.Stdout))
}

// exited is nil for a program that ended well.
func exited(s boxed.ExitStatus) error {
	if s.Reason != boxed.ReasonExited || s.Code != 0 {
		return fmt.Errorf("ended as %s with status %d %s", s.Reason, s.Code, s.Message)
	}
	return nil
}

// cold asks for one process less than the pool's sandboxes have: what is made
// is the same, but not there yet.
func cold() boxed.Spec {
	return boxed.Spec{Limits: boxed.Limits{Processes: limits().Processes - 1}}
}

func wantWarm(warm bool) error {
	if !warm {
		return fmt.Errorf("it did not come out of the pool")
	}
	return nil
}

func wantCold(warm bool) error {
	if warm {
		return fmt.Errorf("it came out of the pool")
	}
	return nil
}

func either(bool) error { return nil }
