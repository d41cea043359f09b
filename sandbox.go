package boxed

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"
)

// State is where a sandbox is in its life.
type State string

// The states. stopped and failed are final; a sandbox in either is an end
// record that is kept for a while.
const (
	StatePending  State = "pending"  // admitted, its room reserved
	StateStarting State = "starting" // claimed from the pool or being made
	StateRunning  State = "running"
	StatePaused   State = "paused"
	StateStopping State = "stopping"
	StateStopped  State = "stopped" // ended as asked: destroyed, expired, idle
	StateFailed   State = "failed"  // ended otherwise
)

// Ended reports whether s is final.
func (s State) Ended() bool { return s == StateStopped || s == StateFailed }

// EndReason says why a sandbox ended. The list is closed.
type EndReason string

// The reasons a sandbox ends.
const (
	EndDestroyed     EndReason = "destroyed"      // somebody asked for it
	EndExpired       EndReason = "expired"        // its ttl passed
	EndIdle          EndReason = "idle"           // idle for idle_timeout
	EndCreateFailed  EndReason = "create_failed"  // a step of create failed; Message says which
	EndInterrupted   EndReason = "interrupted"    // the daemon went away while it was being made
	EndOOM           EndReason = "oom"            // the memory limit killed its first process
	EndCrashed       EndReason = "crashed"        // its container ended by itself
	EndAgentProtocol EndReason = "agent_protocol" // its agent broke the protocol or its bounds
	EndAgentLost     EndReason = "agent_lost"     // its agent stayed away for longer than allowed
	EndHostRestarted EndReason = "host_restarted" // the machine was restarted
	EndVanished      EndReason = "vanished"       // its container was removed by somebody else
	EndSockets       EndReason = "sockets"        // it held more TCP connections than its host can bear
	EndDrained       EndReason = "drained"        // an operator emptied its node
)

// Limits bound what one sandbox uses. Zero means the template's or the node's
// default (the numbers of [DefaultLimits]).
type Limits struct {
	MemoryBytes    int64   `json:"memory_bytes,omitempty"`    // all memory, tmpfs included; no swap
	CPUs           float64 `json:"cpus,omitempty"`            // cores, in steps of 0.01
	Processes      int64   `json:"processes,omitempty"`       // processes and threads of user code
	OpenFiles      int64   `json:"open_files,omitempty"`      // descriptors of each process
	WorkspaceBytes int64   `json:"workspace_bytes,omitempty"` // tmpfs /workspace
	HomeBytes      int64   `json:"home_bytes,omitempty"`      // tmpfs of the home directory
	TmpBytes       int64   `json:"tmp_bytes,omitempty"`       // tmpfs /tmp
	OutputBytes    int64   `json:"output_bytes,omitempty"`    // tmpfs /output
	ShmBytes       int64   `json:"shm_bytes,omitempty"`       // tmpfs /dev/shm
}

// MiB is 2^20 bytes.
const MiB = 1 << 20

// MemoryHeadroom is what tmpfs sizes must leave of MemoryBytes: a tmpfs is
// memory, and filling one that is larger than the limit kills the sandbox.
const MemoryHeadroom = 64 * MiB

// DefaultLimits are the limits of a sandbox that asks for none.
func DefaultLimits() Limits {
	return Limits{
		MemoryBytes: 512 * MiB, CPUs: 1, Processes: 256, OpenFiles: 4096,
		WorkspaceBytes: 192 * MiB, HomeBytes: 64 * MiB, TmpBytes: 64 * MiB, OutputBytes: 64 * MiB, ShmBytes: 32 * MiB,
	}
}

// Or fills the zero fields of l from base.
func (l Limits) Or(base Limits) Limits {
	or := func(v *int64, b int64) {
		if *v == 0 {
			*v = b
		}
	}
	or(&l.MemoryBytes, base.MemoryBytes)
	or(&l.Processes, base.Processes)
	or(&l.OpenFiles, base.OpenFiles)
	or(&l.WorkspaceBytes, base.WorkspaceBytes)
	or(&l.HomeBytes, base.HomeBytes)
	or(&l.TmpBytes, base.TmpBytes)
	or(&l.OutputBytes, base.OutputBytes)
	or(&l.ShmBytes, base.ShmBytes)
	if l.CPUs == 0 {
		l.CPUs = base.CPUs
	}
	return l
}

// TmpfsBytes is the sum of the tmpfs sizes.
func (l Limits) TmpfsBytes() int64 {
	return l.WorkspaceBytes + l.HomeBytes + l.TmpBytes + l.OutputBytes + l.ShmBytes
}

// FitTmpfs shrinks the tmpfs sizes that explicit left at zero, in proportion,
// until all of them fit MemoryBytes less [MemoryHeadroom]: whoever asks for
// 256 MiB of memory and nothing else gets a sandbox, not an error.
func (l Limits) FitTmpfs(explicit Limits) Limits {
	room := l.MemoryBytes - MemoryHeadroom
	if over := l.TmpfsBytes() - room; over <= 0 {
		return l
	}
	sizes := []struct {
		size  *int64
		asked int64
	}{
		{&l.WorkspaceBytes, explicit.WorkspaceBytes},
		{&l.HomeBytes, explicit.HomeBytes},
		{&l.TmpBytes, explicit.TmpBytes},
		{&l.OutputBytes, explicit.OutputBytes},
		{&l.ShmBytes, explicit.ShmBytes},
	}
	var free int64
	for _, s := range sizes {
		if s.asked == 0 {
			free += *s.size
		} else {
			room -= s.asked
		}
	}
	for _, s := range sizes {
		if s.asked == 0 && room > 0 && free > 0 {
			*s.size = max(MiB, int64(float64(*s.size)*float64(room)/float64(free))&^0xfffff)
		}
	}
	return l
}

// File is one file to write before a sandbox is handed over.
type File struct {
	Path    string `json:"path"`           // absolute, or relative to the working directory
	Content []byte `json:"content"`        // base64 in JSON
	Mode    uint32 `json:"mode,omitempty"` // permission bits; 0 means 0644
}

// Workspace says what lies behind /workspace.
type Workspace struct {
	Kind string `json:"kind"` // "memory" is the only kind so far
}

// Bounds of a Spec. api/openapi.yaml says the same.
const (
	MaxLabels     = 64
	MaxLabelKey   = 63 // bytes
	MaxLabelValue = 256
	MaxEnv        = 256       // variables
	MaxEnvBytes   = 256 << 10 // of all names and values
	MaxEnvJSON    = 512 << 10 // of them and the template's as JSON, which a record holds
	MaxFiles      = 256
)

// Spec asks for a sandbox. The zero Spec is valid: the default template.
type Spec struct {
	Name        string            `json:"name,omitempty"`         // see ValidName; unique among the owner's living sandboxes
	Labels      map[string]string `json:"labels,omitempty"`       // at most 64; kept in the record only
	Template    string            `json:"template,omitempty"`     // a name from the configuration; excludes Image
	Image       string            `json:"image,omitempty"`        // any Linux image of the host's architecture
	Env         map[string]string `json:"env,omitempty"`          // of every exec
	Dir         string            `json:"dir,omitempty"`          // working directory of every exec; default /workspace
	Limits      Limits            `json:"limits,omitzero"`        // zero fields: the template's
	TTL         Duration          `json:"ttl,omitempty"`          // from creation; 0 means the default
	IdleTimeout Duration          `json:"idle_timeout,omitempty"` // 0 means none
	Runtime     string            `json:"runtime,omitempty"`      // OCI runtime by name; "" means the node's default
	Files       []File            `json:"files,omitempty"`        // written before the sandbox is running
	Egress      *EgressSpec       `json:"egress,omitempty"`
	Workspace   *Workspace        `json:"workspace,omitempty"`
	Node        NodeID            `json:"node,omitempty"` // pins the sandbox; a pinned create admits and does not schedule
	Placement   *Placement        `json:"placement,omitempty"`
	// IdempotencyKey makes a create that is sent again answer with the sandbox that
	// was made the first time. Each of a caller's keys is good for 24 hours; a UUID of
	// version 7 is best, since nodes that fell silent before it was made cannot know it.
	IdempotencyKey string `json:"idempotency_key,omitempty"`
	// SpecHash is that of the spec as it was asked for. The node fills it in.
	SpecHash string `json:"-"`
}

// Hash tells two specs apart, but for where they are placed and by which key.
func (s Spec) Hash() string {
	s.Node, s.IdempotencyKey = "", ""
	raw, err := json.Marshal(s)
	if err != nil {
		return "" // strings, numbers and bytes can always be encoded
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16])
}

// Placement says which nodes may hold a sandbox. All of it must hold.
type Placement struct {
	NodeLabels map[string]string `json:"node_labels,omitempty"` // the node has all of them
	Isolation  string            `json:"isolation,omitempty"`   // container, gvisor or vm: at least that
	Near       []ID              `json:"near,omitempty"`        // on the node of one of these sandboxes
	Apart      []ID              `json:"apart,omitempty"`       // on the node of none of these
}

// MaxPlacement bounds the sandboxes that a Placement names.
const MaxPlacement = 64

// Defaults of a node's configuration that others name too.
const (
	DefaultTTL       = Duration(time.Hour)      // of a Spec without a TTL
	DefaultMaxTTL    = Duration(24 * time.Hour) // the highest that may be asked for
	DefaultFirstUID  = 200_000                  // users of the host that sandboxes run as, one each
	DefaultLastUID   = 265_535
	DefaultEndedFor  = Duration(24 * time.Hour) // end records are kept for so long,
	DefaultEndedMost = 10_000                   // and so many of them
)

// DefaultDir is the working directory of an exec that names none.
const DefaultDir = "/workspace"

// Sandbox is what can be known of a sandbox: its spec as resolved, and where
// it is in its life.
type Sandbox struct {
	ID          ID                `json:"id"`
	Name        string            `json:"name,omitempty"`
	Owner       string            `json:"owner"`
	Node        NodeID            `json:"node"`
	State       State             `json:"state"`
	Reason      EndReason         `json:"reason,omitempty"`  // why it ended
	Message     string            `json:"message,omitempty"` // the same for a person
	Labels      map[string]string `json:"labels"`
	Template    string            `json:"template,omitempty"`
	Image       string            `json:"image"`
	ImageDigest string            `json:"image_digest,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Dir         string            `json:"dir"`
	Limits      Limits            `json:"limits"`
	Runtime     string            `json:"runtime"`
	TTL         Duration          `json:"ttl"`
	IdleTimeout Duration          `json:"idle_timeout,omitempty"`
	Warm        bool              `json:"warm"` // it came out of the pool
	// IdempotencyKey is the one that it was made under.
	IdempotencyKey string `json:"idempotency_key,omitempty"`
	// QueuePlace is where it stands among those that wait to be made; 1 is the next, 0 none.
	QueuePlace int       `json:"queue_place,omitempty"`
	WarmMiss   string    `json:"warm_miss,omitempty"` // why it did not
	CreatedAt  time.Time `json:"created_at"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	PausedAt   time.Time `json:"paused_at,omitzero"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	ExpiresAt  time.Time `json:"expires_at,omitzero"` // zero: never, or the clock is stopped by a pause
	ActiveAt   time.Time `json:"active_at,omitzero"`  // the last activity that counts against idle_timeout
	// Egress is whether it reaches what it may; nil is nothing. Rules are not listed here.
	Egress *EgressStatus `json:"egress,omitempty"`
}

// Update changes a living sandbox. Nil fields stay.
type Update struct {
	Name        *string            `json:"name,omitempty"`
	Labels      *map[string]string `json:"labels,omitempty"` // replaces all
	TTL         *Duration          `json:"ttl,omitempty"`    // counted from now: this is renew
	IdleTimeout *Duration          `json:"idle_timeout,omitempty"`
}

// Filter selects sandboxes. The zero Filter selects the caller's living ones.
type Filter struct {
	Labels map[string]string // all must match
	States []State           // empty: all that have not ended
	Name   string            // exact
	Owner  string            // admins only: of this owner; "" means one's own, "*" everybody's
	Limit  int               // at most 1000; 0 means 100
	Cursor string            // from List.Next
}

// List is one page of sandboxes, newest first.
type List struct {
	Sandboxes []Sandbox `json:"sandboxes"`
	Next      string    `json:"next,omitempty"` // cursor of the next page; "" at the end
	// Incomplete are nodes that did not answer: what they hold is not in the list.
	Incomplete []NodeID `json:"incomplete,omitempty"`
}

// Stats is what a sandbox uses now.
type Stats struct {
	MemoryBytes   int64     `json:"memory_bytes"`
	MemoryLimit   int64     `json:"memory_limit_bytes"`
	CPUSeconds    float64   `json:"cpu_seconds"`
	Processes     int64     `json:"processes"`
	Execs         int       `json:"execs"`
	OOMKills      int64     `json:"oom_kills"`
	AgentRSSBytes int64     `json:"agent_rss_bytes"`
	At            time.Time `json:"at"`
}
