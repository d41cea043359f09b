package main

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
	"github.com/boxed-mesh/boxed/scheduler"
	"github.com/boxed-mesh/boxed/transport"
)

// Config is every setting of boxed-node. What a setting is called, and what it
// means, is in settings.go; the values are ready to use once Validate has
// nothing to say.
type Config struct {
	Listen         string
	DataDir        string
	APIKey         string // wins over APIKeyFile
	APIKeyFile     string // "": see KeyPath
	TLS            TLSConfig
	InsecureListen bool
	Hosts          []string
	TrustedProxies []netip.Prefix
	Drain          boxed.Duration
	Log            LogConfig

	Name    string // "": the host's
	Place   string
	PlaceBy string
	Labels  map[string]string
	Mesh    MeshConfig
	Tailnet TailnetConfig
	SSH     SSHConfig
	Egress  EgressConfig

	Agent     string // path; "": the embedded one
	Docker    DockerConfig
	UIDs      UIDRange
	Limits    LimitsConfig
	TTL       TTLConfig
	Idle      boxed.Duration // 0: none
	Pool      PoolConfig
	Templates map[string]*boxed.Template
	Capacity  CapacityConfig
	Quotas    QuotaConfig
	Events    EventsConfig
	Ended     KeepConfig
}

// TLSConfig says with which certificate the API is served, if with any.
type TLSConfig struct {
	CertFile string
	KeyFile  string
	Auto     bool // make a certificate and keep it in the data directory
}

// Enabled reports whether the listener speaks TLS.
func (t TLSConfig) Enabled() bool { return t.Auto || t.CertFile != "" }

// LogConfig says what is logged and how.
type LogConfig struct {
	Level  slog.Level
	Format string // text or json
}

// MeshConfig is how nodes reach each other. It matters once the node is in a
// cluster.
type MeshConfig struct {
	Network   string // tcp or tailnet
	Vouch     []string
	Listen    string
	Advertise string // "": found out
	Seeds     []string
	TokenFile string
	Pace      string
	Control   []string
}

// TailnetConfig is the node's own machine on a tailnet. It is there where the mesh
// goes over the tailnet.
type TailnetConfig struct {
	Hostname    string // "": boxed-<name>
	AuthKey     string
	AuthKeyFile string
	ControlURL  string // "": Tailscale's
	Tag         string
	API         bool              // serve the API on the tailnet too
	Users       bool              // every login of the tailnet is a user
	Tags        map[string]string // roles of machines by their tag
}

// defaultSSHListen is where the SSH front door is unless the configuration says.
const defaultSSHListen = "127.0.0.1:2222"

// SSHConfig is the SSH front door.
type SSHConfig struct {
	Listen         string
	AuthorizedKeys map[string]string // files, by owner
	UserCAKeys     string            // file of keys that sign user certificates
	SharedHostKey  bool
	Record         bool
	AcceptEnv      []string
	Allow          []string
	IdleTimeout    boxed.Duration // 0: never
}

// DockerConfig reaches the engine.
type DockerConfig struct {
	Host        string // "": DOCKER_HOST, or the engine's default
	Runtime     string // "": the engine's default
	Runtimes    []string
	PullTimeout boxed.Duration
	ConfigFile  string // credentials of registries; "": ~/.docker/config.json
}

// UIDRange are the users of this host that sandboxes run as, one each.
type UIDRange struct{ First, Last int }

// LimitsConfig bounds sandboxes. A zero field of Highest is no bound but the
// node's capacity.
type LimitsConfig struct{ Default, Highest boxed.Limits }

// TTLConfig bounds how long sandboxes live.
type TTLConfig struct{ Default, Highest boxed.Duration }

// PoolConfig bounds all warm sandboxes together. How many there are of each
// template is with the template.
type PoolConfig struct {
	Refill      int     // made at the same time
	MemoryShare float64 // of the memory that is free
}

// CapacityConfig is how much of the machine is promised to sandboxes.
type CapacityConfig struct {
	MemoryOvercommit float64
	CPUOvercommit    float64
	Reserve          float64
	Sandboxes        int // 0: as many as fit
}

// Quota bounds what one owner's living sandboxes hold. Zero is no bound.
type Quota struct {
	Sandboxes   int
	MemoryBytes int64
}

// QuotaConfig is the quota of every owner, and of some by name.
type QuotaConfig struct {
	Quota
	Owners map[string]*Quota
}

// Of is the owner's quota.
func (q QuotaConfig) Of(owner string) Quota {
	if own := q.Owners[owner]; own != nil {
		return *own
	}
	return q.Quota
}

// KeepConfig says how long records of the past are kept.
type KeepConfig struct {
	Count int
	Age   boxed.Duration
}

// EventsConfig says which events are kept: those that are among the newest
// Count or younger than Age, but never more than Most.
type EventsConfig struct {
	KeepConfig
	Most int
}

// Default is the configuration of a node that was told nothing.
func Default() *Config {
	return &Config{
		Listen:  "127.0.0.1:8080",
		DataDir: "/var/lib/boxed",
		Drain:   boxed.Duration(10 * time.Second),
		Log:     LogConfig{Level: slog.LevelInfo, Format: "text"},
		Place:   string(boxed.PlaceAny),
		PlaceBy: string(scheduler.Spread),
		SSH:     SSHConfig{Listen: defaultSSHListen, IdleTimeout: boxed.Duration(12 * time.Hour), AuthorizedKeys: map[string]string{}},
		Tailnet: TailnetConfig{Tag: "tag:boxed", API: true, Users: true, Tags: map[string]string{}},
		Mesh:    MeshConfig{Network: networkTCP, Listen: fmt.Sprintf(":%d", transport.DefaultPort), Pace: string(transport.PaceLAN)},
		Egress:  EgressConfig{Limits: egress.Limits{}.Defaults()},
		Docker:  DockerConfig{PullTimeout: boxed.Duration(docker.DefaultPullTimeout)},
		UIDs:    UIDRange{First: boxed.DefaultFirstUID, Last: boxed.DefaultLastUID},
		Limits: LimitsConfig{
			Default: boxed.DefaultLimits(),
			Highest: boxed.Limits{Processes: 4096, OpenFiles: 1 << 20},
		},
		TTL:  TTLConfig{Default: boxed.DefaultTTL, Highest: boxed.DefaultMaxTTL},
		Pool: PoolConfig{Refill: sandbox.DefaultRefill, MemoryShare: 0.25},
		Templates: map[string]*boxed.Template{
			boxed.DefaultTemplate: {Image: "boxed/default:latest", Pool: 4},
		},
		Capacity: CapacityConfig{MemoryOvercommit: 1, CPUOvercommit: 4, Reserve: 0.10},
		Quotas:   QuotaConfig{Owners: map[string]*Quota{}},
		Events:   EventsConfig{KeepConfig{Count: 10_000, Age: boxed.Duration(24 * time.Hour)}, 1_000_000},
		Ended:    KeepConfig{Count: boxed.DefaultEndedMost, Age: boxed.DefaultEndedFor},
	}
}

// KeyPath is the file that the API key is read from, and written to where there
// is none.
func (c *Config) KeyPath() string {
	if c.APIKeyFile != "" {
		return c.APIKeyFile
	}
	return c.path("admin.key")
}

// path is a path in the data directory.
func (c *Config) path(elem ...string) string {
	return filepath.Join(append([]string{c.DataDir}, elem...)...)
}

// TemplateList is the templates as the node takes them, with the node's default
// limits where they have none.
func (c *Config) TemplateList() map[string]boxed.Template {
	list := map[string]boxed.Template{}
	for name, t := range c.Templates {
		resolved := *t
		resolved.Name = name
		// Sizes of tmpfs that the template leaves open give way to its memory.
		resolved.Limits = t.Limits.Or(c.Limits.Default).FitTmpfs(t.Limits)
		list[name] = resolved
	}
	return list
}

// policy is the capacity as the scheduler takes it.
func (c *Config) policy() scheduler.Policy {
	return scheduler.Policy{MemoryOvercommit: c.Capacity.MemoryOvercommit, CPUOvercommit: c.Capacity.CPUOvercommit, Reserve: c.Capacity.Reserve}
}

// Problem is one mistake in the configuration.
type Problem struct {
	Setting string // its path, like "tls.cert_file"; "" if it is about none
	Where   string // file:line, a variable or a flag; "" if it is a default
	Message string
}

// String is one line.
func (p Problem) String() string {
	var parts []string
	for _, s := range []string{p.Where, p.Setting, p.Message} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, ": ")
}

// Problems is every mistake, as an error.
type Problems []Problem

// Error has one line for each.
func (ps Problems) Error() string {
	var b strings.Builder
	if len(ps) == 1 {
		b.WriteString("a mistake in the configuration:")
	} else {
		b.WriteString(num(len(ps)) + " mistakes in the configuration:")
	}
	for _, p := range ps {
		b.WriteString("\n  " + p.String())
	}
	return b.String()
}
