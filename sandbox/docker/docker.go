package docker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/docker/docker/client"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Labels of our containers. The image's labels are merged into a container's,
// but these win.
const (
	labelInstance = "sh.boxed.instance" // which node and data directory
	labelSandbox  = "sh.boxed.sandbox"
	labelNonce    = "sh.boxed.nonce"
	labelProbe    = "sh.boxed.probe" // on probes of a runtime, instead of the others; its value is the instance
)

// DefaultPullTimeout bounds one pull of an image.
const DefaultPullTimeout = 15 * time.Minute

// Config configures a Driver.
type Config struct {
	NodeID  boxed.NodeID
	DataDir string // of this daemon: with NodeID it says which containers are its own
	// Host is the engine's address, like "unix:///var/run/docker.sock". "" means
	// DOCKER_HOST and its companions, or the engine's default.
	Host string
	// Runtime is the OCI runtime used when none is asked for; "" means the engine's default.
	Runtime string
	// Runtimes limits which of the engine's runtimes are offered; empty means all.
	Runtimes []string
	// AgentPath is the agent program on this host. Probes of a runtime run it with --version.
	AgentPath string
	// ProbeImage is the image in which runtimes are probed; "" or one that is
	// absent means an empty one that is made for it.
	ProbeImage   string
	DockerConfig string        // file with the credentials of registries; "" means ~/.docker/config.json
	PullTimeout  time.Duration // 0 means DefaultPullTimeout
	Log          *slog.Logger  // nil means silence
}

// Driver drives one engine for one node. It is safe for concurrent use and has
// nothing to close but idle connections.
type Driver struct {
	cfg      Config
	log      *slog.Logger
	client   *client.Client
	instance string
	pulls    pulls
	probing  probing

	mu         sync.Mutex
	engine     *engine // what the engine is, once it answered
	probes     *probes // what came of the last probing
	images     map[string]*imageConfig
	containers map[string]*running
}

var _ sandbox.Driver = (*Driver)(nil)

// New makes a Driver. It does not speak to the engine: an engine that is down
// now may be up when it is needed. The error names a wrong setting.
func New(cfg Config) (*Driver, error) {
	if !cfg.NodeID.Valid() {
		return nil, fmt.Errorf("docker driver: %q is not a node ID", cfg.NodeID)
	}
	dir, err := filepath.Abs(cfg.DataDir)
	if err != nil || cfg.DataDir == "" {
		return nil, fmt.Errorf("docker driver: data directory %q: %w", cfg.DataDir, errors.Join(err, os.ErrInvalid))
	}
	if cfg.PullTimeout <= 0 {
		cfg.PullTimeout = DefaultPullTimeout
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	opts := []client.Opt{client.FromEnv, client.WithAPIVersionNegotiation()}
	if cfg.Host != "" {
		opts = append(opts, client.WithHost(cfg.Host))
	}
	c, err := client.NewClientWithOpts(opts...)
	if err != nil {
		return nil, fmt.Errorf("docker driver: engine address: %w", err)
	}
	sum := sha256.Sum256([]byte(dir))
	return &Driver{
		cfg: cfg, log: cfg.Log, client: c,
		instance:   string(cfg.NodeID) + "." + hex.EncodeToString(sum[:4]),
		images:     map[string]*imageConfig{},
		containers: map[string]*running{},
	}, nil
}

// Close drops idle connections to the engine.
func (d *Driver) Close() error { return d.client.Close() }

// Instance is the value of the label by which this node's containers, and no
// other daemon's, are found.
func (d *Driver) Instance() string { return d.instance }

// local reports whether the engine runs on this host: only then are its
// processes and cgroups here to be looked at.
func (d *Driver) local() bool {
	u, err := url.Parse(d.client.DaemonHost())
	return err == nil && u.Scheme == "unix"
}

// engine is what does not change while an engine runs.
type engine struct {
	version      string
	arch         string // amd64 or arm64
	cgroup       int    // 1 or 2
	systemd      bool   // it has systemd make the cgroups
	root         string // its data directory
	runtimes     map[string]bool
	sharesKernel map[string]bool // by runtime: what it runs are processes of this kernel
	runtime      string          // its default
	signature    string          // changes when the runtimes may behave otherwise
	problems     []string
}

// facts is what the engine is, asked once.
func (d *Driver) facts(ctx context.Context) (*engine, error) {
	d.mu.Lock()
	e := d.engine
	d.mu.Unlock()
	if e != nil {
		return e, nil
	}
	return d.askFacts(ctx)
}

func (d *Driver) askFacts(ctx context.Context) (*engine, error) {
	info, err := d.client.Info(ctx)
	if err != nil {
		return nil, d.engineError("ask the engine for its facts", err)
	}
	e := describe(info)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.engine = e
	return e, nil
}
