package sandbox

import (
	"context"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Driver makes, starts and removes the containers of this node's sandboxes. It
// knows nothing of lifecycles, pools or execs: those are the Manager's, over
// the agent link. sandboxtest.Run is the suite that every driver passes.
//
// All methods are safe for concurrent use, honour ctx, and can be repeated. An
// engine that cannot be reached is CodeNotReady; a container that does not
// exist, or is not one of ours, is CodeNotFound.
type Driver interface {
	// Image finds an image, pulling it if it is absent: one pull per reference
	// however many ask, progress to each. The pull has its own deadline. Errors:
	// CodeImage with an ImageReason.
	Image(ctx context.Context, ref string, progress func(PullProgress)) (Image, error)
	// Create makes the container of box without starting it.
	Create(ctx context.Context, box Box) (containerID string, err error)
	// Start starts it; the agent inside then dials the socket in box.Mount.
	Start(ctx context.Context, containerID string) error
	// Remove ends and removes it, whatever state it is in, and verifies that it
	// is gone. Removing what does not exist is nil.
	Remove(ctx context.Context, containerID string) error
	// Gone waits until no process of a container is left, as the kernel says,
	// without asking the engine. CodeUnavailable: that cannot be seen; only Remove
	// tells.
	Gone(ctx context.Context, containerID string) error
	// Pause freezes every process; Resume thaws them. Both are idempotent.
	Pause(ctx context.Context, containerID string) error
	Resume(ctx context.Context, containerID string) error
	// Limit sets memory, CPUs and loopback buffers of a running container.
	// Tmpfs sizes, processes and open files are fixed at Create.
	Limit(ctx context.Context, containerID string, l boxed.Limits) error
	// Stats reads usage from outside the sandbox. Execs and AgentRSSBytes stay 0.
	Stats(ctx context.Context, containerID string) (boxed.Stats, error)
	// Status looks one container up.
	Status(ctx context.Context, containerID string) (Status, error)
	// List finds all containers that claim to belong to this node's data
	// directory. A claim is a label that anybody may forge: only the container
	// ID and the nonce of a record make it ours.
	List(ctx context.Context) ([]Status, error)
	// Watch calls ended for each container of ours that stops, until ctx ends or
	// the engine's stream of events breaks (an error). Events may be missed:
	// it is a hint, and the Manager's sweep is the truth.
	Watch(ctx context.Context, ended func(containerID string)) error
	// Info describes the engine and the runtimes that really start a container.
	Info(ctx context.Context) (Info, error)
}

// Box is all that a driver needs to make one container.
type Box struct {
	ID      boxed.ID
	Nonce   string // random; comes back in Status, so that a record knows its container
	Image   Image
	Runtime string       // one of Info.Runtimes
	Limits  boxed.Limits // resolved: no zero field
	UID     int          // of user code, and its GID
	// Mount is a directory of this host that is bind-mounted read-only at
	// GuestDir. It holds the agent's socket, and the files passwd, group, hosts
	// and resolv.conf, each also mounted read-only at its place in /etc.
	Mount string
	// Agent is the static agent program on this host, mounted read-only at
	// GuestAgent and run as PID 1.
	Agent string
}

// Paths inside a sandbox.
const (
	GuestDir   = "/run/boxed"    // Box.Mount
	GuestAgent = "/.boxed-agent" // Box.Agent
	SocketName = "agent.sock"    // in Box.Mount
	ToolsName  = "tools"         // in Box.Mount; see boxed.ToolsPath
	GuestHome  = "/home/sandbox" // tmpfs, HOME of user code
	GuestUser  = "sandbox"       // its name in passwd
)

// GuestTmpfs lists the writable places of a sandbox in the order in which they
// are mounted. /dev/shm comes on top, by Limits.ShmBytes.
func GuestTmpfs(l boxed.Limits) []Tmpfs {
	return []Tmpfs{
		{"/workspace", l.WorkspaceBytes, 0o755},
		{GuestHome, l.HomeBytes, 0o755},
		{"/tmp", l.TmpBytes, 0o1777},
		{"/output", l.OutputBytes, 0o755},
	}
}

// Tmpfs is one writable mount, owned by the sandbox's user.
type Tmpfs struct {
	Path  string
	Bytes int64
	Mode  uint32
}

// Inodes bounds the files of a tmpfs: one for each 4 KiB, so that empty files
// (about 1 KiB of kernel memory each) cannot outgrow the size many times over.
func (t Tmpfs) Inodes() int64 { return max(1024, t.Bytes/4096) }

// Image is an image that this host has.
type Image struct {
	Ref    string            // as asked for
	Digest string            // identifies the content on this host, "sha256:…"
	Env    map[string]string // the vetted part of its environment
	// Volumes are paths that the image declares; each becomes a small tmpfs.
	Volumes []string
}

// PullProgress is one step of a pull.
type PullProgress struct {
	Message string
	Current int64 // bytes of all layers
	Total   int64 // 0 while unknown
}

// Status is what the engine knows of a container.
type Status struct {
	ContainerID string
	Sandbox     boxed.ID // as claimed by its label
	Nonce       string   // as claimed by its label
	Running     bool
	Paused      bool
	OOMKilled   bool
	ExitCode    int
	PID         int // of the agent, on the host; 0 when not running
	// Sockets counts its TCP sockets, those in a queue of connections to be
	// accepted and those that are closed but not empty included; 0 where that
	// cannot be seen. One above [MaxSockets] must be ended.
	Sockets   int
	CreatedAt time.Time
	StartedAt time.Time
}

// Info describes an engine.
type Info struct {
	Engine   string   // name and version for people, "docker 20.10.24"
	Arch     string   // amd64 or arm64
	Cgroup   int      // 1 or 2
	Runtimes []string // those that started a container when probed
	Default  string   // the one used when none is asked for; "" if it does not work
	Problems []string // what limps, one line each with its remedy
	// Skipped says why a runtime that the engine knows is not in Runtimes.
	Skipped  map[string]string
	NoFile   int64 // highest open-files limit that the engine can give
	DiskFree int64 // bytes at the engine's data directory
}
