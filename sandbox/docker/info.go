package docker

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/docker/docker/api/types/system"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// aliases are names that engines give to the runtime "runc" besides its own.
var aliases = []string{"io.containerd.runc.v2", "io.containerd.runc.v1", "io.containerd.runtime.v1.linux"}

// Info describes the engine and which of its runtimes start a sandbox. The
// engine is asked each time, 5 ms. Its runtimes are tried once, a second each:
// again only when the engine has changed, when [Driver.Probe] is called, or
// every probeAgain while the default one does not work. Errors: not_ready.
func (d *Driver) Info(ctx context.Context) (sandbox.Info, error) {
	e, err := d.askFacts(ctx)
	if err != nil {
		return sandbox.Info{}, err
	}
	p, err := d.probed(ctx, e)
	if err != nil {
		return sandbox.Info{}, err
	}
	info := sandbox.Info{
		Engine: "docker " + e.version, Arch: e.arch, Cgroup: e.cgroup, Skipped: maps.Clone(p.skipped),
		Runtimes: slices.Sorted(maps.Keys(p.works)), NoFile: p.noFile,
		Problems: slices.Concat(e.problems, d.hostProblems(e)),
	}
	if name := d.runtimeOf(e, ""); p.works[name] {
		info.Default = name
	} else if why := p.skipped[name]; why != "" {
		info.Problems = append(info.Problems, "the default runtime "+name+" does not work: "+why)
	} else if !e.runtimes[name] {
		info.Problems = append(info.Problems, "the Docker engine has no runtime "+name+": correct docker.runtime, or add it to the engine's daemon.json")
	}
	if d.local() {
		var fs syscall.Statfs_t
		if syscall.Statfs(e.root, &fs) == nil { // 0 where it cannot be told
			info.DiskFree = int64(fs.Bavail) * fs.Bsize
		}
	}
	return info, nil
}

// hostProblems are those that show on this host and not in the engine.
func (d *Driver) hostProblems(e *engine) []string {
	if !d.local() {
		return []string{"the Docker engine at " + d.client.DaemonHost() + " is on another host, where sandboxes cannot be checked and sockets not be shared: use the one on this host"}
	}
	if e.cgroup == 1 {
		if _, err := os.Stat("/sys/fs/cgroup/memory/memory.kmem.tcp.limit_in_bytes"); err != nil {
			return []string{"this kernel does not bound socket buffers on cgroup v1: boot it with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"}
		}
	}
	return nil
}

// describe takes out of the engine's own description what matters.
func describe(info system.Info) *engine {
	e := &engine{
		version: info.ServerVersion, cgroup: 1, systemd: info.CgroupDriver == "systemd", root: info.DockerRootDir,
		runtime: info.DefaultRuntime, runtimes: map[string]bool{}, sharesKernel: map[string]bool{},
		arch: map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[info.Architecture],
	}
	if e.arch == "" {
		e.arch = info.Architecture
	}
	if info.CgroupVersion == "2" {
		e.cgroup = 2
	}
	definitions := map[string]system.Runtime{}
	for name, r := range info.Runtimes {
		e.runtimes[name] = true
		e.sharesKernel[name] = sharesKernel(name, r.Runtime)
		definitions[name] = r.Runtime
	}
	e.signature = fmt.Sprint(e.version, e.cgroup, e.runtime, definitions) // fmt sorts maps
	e.problems = engineProblems(info)
	return e
}

// sharesKernel reports whether what a runtime starts are processes of this
// kernel. What is not known is taken to bring a kernel of its own, which costs
// speed and checks, but works.
func sharesKernel(name string, r system.Runtime) bool {
	if r.Path == "" {
		_, options := r.Options["BinaryName"]
		return !options && (slices.Contains(aliases, name) || slices.Contains(aliases, r.Type) || name == "runc")
	}
	program := path.Base(r.Path)
	for _, known := range []string{"runc", "crun", "youki"} {
		if strings.HasPrefix(program, known) {
			return true
		}
	}
	return false
}

// engineProblems says what an engine lacks, each with its remedy.
func engineProblems(info system.Info) []string {
	var out []string
	add := func(bad bool, text string) {
		if bad {
			out = append(out, text)
		}
	}
	has := func(option string) bool {
		return slices.ContainsFunc(info.SecurityOptions, func(s string) bool {
			return s == "name="+option || strings.HasPrefix(s, "name="+option+",")
		})
	}
	add(!has("seccomp"), "the Docker engine cannot filter system calls: use a kernel and an engine with seccomp")
	add(has("rootless"), "the Docker engine runs rootless, so sandboxes have no users of their own: use one that runs as root")
	add(!info.MemoryLimit, "memory is not limited: boot the kernel with cgroup_enable=memory")
	add(!info.PidsLimit, "processes are not limited: use a kernel with the pids cgroup controller")
	add(!info.CPUCfsQuota, "CPUs are not limited: use a kernel with CFS bandwidth control")
	add(!info.LiveRestoreEnabled, `sandboxes end when the Docker engine restarts: set "live-restore": true in /etc/docker/daemon.json`)
	add(info.OSType != "linux", "the Docker engine runs "+info.OSType+" containers: use one on Linux")
	return out
}

// limits of a probe: the defaults, which every sandbox that asks for nothing gets.
func probeLimits(noFile int64) boxed.Limits {
	l := boxed.DefaultLimits()
	l.OpenFiles = noFile
	return l
}
