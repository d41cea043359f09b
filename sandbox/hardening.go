package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"runtime"
	"sync"

	"github.com/boxed-mesh/boxed"
)

// hardeningVersion is raised when a driver changes how it hardens in a way that
// the data below does not show.
const hardeningVersion = 1

// Capabilities are what PID 1 keeps. User code has none: its uid is not 0, and
// no_new_privs keeps set-uid programs and file capabilities from giving any.
func Capabilities() []string {
	return []string{
		"SETUID", // to become the sandbox's user before each exec
		"SETGID", // the same, and to drop every supplementary group
		"KILL",   // to signal that user's processes, which are another uid's to it
	}
}

// AgentPIDs is added to Limits.Processes for the agent's own threads: a user
// who forks until the limit must not keep PID 1 from making a thread, which
// ends a Go program.
const AgentPIDs = 32

// AgentEnv is the whole environment of PID 1.
func AgentEnv() []string {
	return []string{
		// Two can relay and reap at once; more would only be threads out of AgentPIDs.
		"GOMAXPROCS=2",
		// Its heap is small and short-lived: half the garbage costs it nothing that can be measured.
		"GOGC=50",
		// Nobody reads PID 1's standard error, and a trace of all goroutines takes time to write.
		"GOTRACEBACK=none",
		// The runtime would set it to what the image's /etc/passwd says.
		"HOME=/",
	}
}

// Hostname is what a sandbox calls itself: the part of its ID that people type.
func Hostname(id boxed.ID) string { return id.Random() }

// MaskedPaths are hidden behind an empty file or directory. Engines have lists
// of their own that differ by version; this one replaces them. A path that the
// kernel does not have is skipped.
func MaskedPaths() []string {
	return []string{
		"/proc/acpi",          // firmware tables, and switches on some machines
		"/proc/asound",        // the host's sound devices
		"/proc/interrupts",    // counts give away keystrokes and neighbours
		"/proc/kallsyms",      // addresses of the kernel
		"/proc/kcore",         // the kernel's memory
		"/proc/keys",          // keyrings, which know no namespace
		"/proc/key-users",     // the same, by user
		"/proc/kmsg",          // the kernel's log
		"/proc/latency_stats", // what the host waits for
		"/proc/modules",       // what could be attacked
		"/proc/sched_debug",   // every process of the host
		"/proc/schedstat",     // the host's processors
		"/proc/scsi",          // can detach disks
		"/proc/slabinfo",      // what neighbours allocate
		"/proc/timer_list",    // timers of the host's processes
		"/proc/timer_stats",
		"/proc/vmallocinfo", // addresses of the kernel
		"/proc/pagetypeinfo",
		"/sys/devices/virtual/powercap", // energy counters, a side channel into neighbours
		"/sys/firmware",                 // tables with secrets of the machine
		"/sys/fs/bpf",
		"/sys/fs/pstore", // the kernel's last words
		"/sys/kernel/debug",
		"/sys/kernel/tracing",
		"/sys/kernel/security",
		"/sys/kernel/slab",
		"/sys/module", // parameters, some of them addresses
	}
}

// ReadonlyPaths can be read and not written. All of /proc and /sys belongs to
// the host's root, and user code is another uid; this holds for PID 1 as well.
func ReadonlyPaths() []string {
	return []string{
		"/proc/bus", "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/driver", "/proc/dynamic_debug", "/proc/tty",
		"/proc/sys", "/proc/sysrq-trigger",
	}
}

// Sysctls are set inside the sandbox's own network namespace.
func Sysctls() map[string]string {
	return map[string]string{
		// Minimum, default and highest size of one socket's buffers, in bytes. Cgroup v1 does not charge them to the
		// memory limit, and lets each socket have its minimum beyond LoopbackBytes: with the kernel's sizes (6 MiB) a
		// sandbox of 256 MiB held 1.9 GiB. Small ones stay in the processor's cache, so loopback is faster with them:
		// 5 against 1.8 GB/s.
		"net.ipv4.tcp_rmem": "4096 16384 131072",
		"net.ipv4.tcp_wmem": "4096 8192 131072",
		// Closed connections that are remembered, 250 bytes each that are charged to nobody.
		"net.ipv4.tcp_max_tw_buckets": "4096",
		// Any port may be bound: the agent's DNS and proxy, and whatever a program expects, live on loopback alone.
		"net.ipv4.ip_unprivileged_port_start": "0",
	}
}

// LoopbackBytes is how much socket memory a sandbox may hold where the kernel
// counts it apart (cgroup v1, memory.kmem.tcp): an eighth of its memory, from
// 8 to 64 MiB.
func LoopbackBytes(l boxed.Limits) int64 {
	return min(max(l.MemoryBytes/8, 8*boxed.MiB), 64*boxed.MiB)
}

// MaxSockets is how many TCP sockets a sandbox may have, Status.Sockets. Linux
// charges a connection and what it holds, up to 18 KiB, when it is accepted;
// until then nobody pays, whatever the cgroup's version, and a program that
// accepts nothing can pile up several hundred a second until the whole host has
// no memory left for TCP. No limit of the kernel's holds that, so it is counted.
const MaxSockets = 8192

// Ulimit is one resource limit, soft and hard alike.
type Ulimit struct {
	Name  string // as Docker names it
	Value int64
}

// Ulimits are the resource limits of every process of a sandbox. Those that
// count by user are a sandbox's own, as its uid is. RLIMIT_RSS is not among
// them: the agent marks execs with it.
func Ulimits(l boxed.Limits) []Ulimit {
	return []Ulimit{
		{"core", 0},                       // a dump would go to the host's handler, which runs on the host
		{"nofile", l.OpenFiles},           // by process
		{"nproc", l.Processes},            // by user; the agent is root, which it does not bind
		{"memlock", 64 << 10},             // bytes by process: keys of ssh-agent and gpg fit
		{"msgqueue", 819200},              // bytes by user: the kernel's default
		{"sigpending", l.Processes + 768}, // by user: one each and room for bursts
		{"nice", 0},                       // nobody may raise a priority
		{"rtprio", 0},
	}
}

// Volume bounds. A path that an image declares as a VOLUME becomes a tmpfs, as
// the engine would make a directory on the host's disk past every limit.
const (
	MaxVolumes  = 16
	volumeBytes = 32 * boxed.MiB // of all of them; half of boxed.MemoryHeadroom stays
)

// VolumeTmpfs are the mounts for the volumes of an image, owned by the
// sandbox's user like those of [GuestTmpfs]. What is mounted inside one (the
// agent's directory, where a volume is /run) cannot be moved by that user:
// Linux does not rename mount points.
func VolumeTmpfs(volumes []string) []Tmpfs {
	var out []Tmpfs
	for _, path := range volumes {
		size := volumeBytes / int64(len(volumes)) &^ 0xfff
		out = append(out, Tmpfs{Path: path, Bytes: size, Mode: 0o755})
	}
	return out
}

// HardeningRevision changes whenever anything of this package's hardening does.
// A warm sandbox of another revision is not handed out.
var HardeningRevision = sync.OnceValue(func() string {
	seccomp, _ := Seccomp(runtime.GOARCH) // of an architecture without one: nothing runs there
	limits := boxed.DefaultLimits()
	raw, _ := json.Marshal([]any{
		hardeningVersion, json.RawMessage(seccomp), Capabilities(), AgentPIDs, AgentEnv(), MaskedPaths(),
		ReadonlyPaths(), Sysctls(), Ulimits(limits), LoopbackBytes(limits), GuestTmpfs(limits), volumeBytes,
	}) // plain data always encodes
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:6])
})
