package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// node is a boxed-node of this program's, and a client of it.
type node struct {
	*client.Client
	r        *rig
	dir      string
	log      string
	args     []string
	endpoint string
	cmd      *exec.Cmd
	ended    chan error
	nodeID   boxed.NodeID
	host     *netHost // nil: this one
	pool     int      // warm sandboxes when it rests
}

// settings is what differs among the experiments; what it leaves open is the
// node's default.
type settings struct {
	pool          int // of the default template
	limits        map[string]any
	memoryShare   float64 // of the pool; 0: the default
	withoutBounds bool    // promise more than there is, as the engine does
	number        int     // of a node of a mesh: it has users and a port of its own
	ssh           string  // address of the SSH front door; "": none
	authorized    string  // file of keys that it knows
	host          *netHost
	egress        map[string]any // its section of the configuration
}

// defaultPool is the pool of a node that was told nothing.
const defaultPool = 4

// config is the node's configuration file. JSON is YAML.
func (s settings) config(image, mesh string) []byte {
	template := map[string]any{"image": image, "pool": s.pool}
	if s.limits != nil {
		template["limits"] = s.limits
	}
	capacity, pool := map[string]any{}, map[string]any{}
	if s.withoutBounds {
		capacity["cpu_overcommit"], capacity["memory_overcommit"] = 1000, 16
	}
	if s.memoryShare > 0 {
		pool["memory_share"] = s.memoryShare
	}
	door := map[string]any{"listen": s.ssh}
	if s.authorized != "" {
		door["authorized_keys"] = map[string]any{"admin": s.authorized}
	}
	all := map[string]any{
		"log": map[string]any{"level": "warn"},
		// Apart from those of a node that runs here already: what the kernel counts by user must be this node's.
		"uid_range": map[string]any{"first": 310_000 + 20_000*s.number, "last": 329_999 + 20_000*s.number},
		"name":      fmt.Sprintf("n%d", s.number),
		"mesh":      map[string]any{"listen": mesh},
		"ssh":       door,
		"capacity":  capacity,
		"pool":      pool,
		"templates": map[string]any{boxed.DefaultTemplate: template},
	}
	if s.egress != nil {
		all["egress"] = s.egress
	}
	text, _ := json.MarshalIndent(all, "", "  ") // plain data always encodes
	return text
}

// startNode starts a node and returns when it is ready and its pool full.
func (r *rig) startNode(ctx context.Context, s settings) (_ *node, err error) {
	dir, err := r.newDir()
	if err != nil {
		return nil, err
	}
	n := &node{r: r, dir: filepath.Join(dir, "data"), log: filepath.Join(dir, "log"), pool: s.pool, host: s.host}
	config := filepath.Join(dir, "node.yaml")
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	mesh, err := freeAddress()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(config, s.config(r.options.image, mesh), 0o600); err != nil {
		return nil, err
	}
	n.args = []string{
		"run", "--config", config, "--listen", address, "--data-dir", n.dir, "--agent", filepath.Join(r.bin, "boxed-agent"),
	}
	n.endpoint = "http://" + address
	return n, n.start(ctx)
}

// start starts the process and returns when the node is ready and its pool full.
func (n *node) start(ctx context.Context) error {
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	argv := append([]string{filepath.Join(n.r.bin, "boxed-node")}, n.args...)
	if n.host != nil {
		argv = n.host.argv(argv[0], argv[1:]...)
	}
	n.cmd = exec.Command(argv[0], argv[1:]...)
	n.cmd.Stdout, n.cmd.Stderr = log, log
	// Its own group: a Ctrl-C is for this program, which ends the node when it has tidied up.
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := n.cmd.Start(); err != nil {
		return fmt.Errorf("start boxed-node: %w", err)
	}
	n.ended = make(chan error, 1)
	cmd, ended := n.cmd, n.ended
	go func() { ended <- cmd.Wait() }()
	if err := n.connect(ctx, n.endpoint); err != nil {
		n.close()
		return err
	}
	return nil
}

// kill ends the process as kill -9 does.
func (n *node) kill() {
	n.cmd.Process.Kill()
	err := <-n.ended
	n.ended <- err
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func (n *node) connect(ctx context.Context, endpoint string) error {
	web, cfg := http.DefaultClient, client.Config{Endpoint: endpoint}
	if n.host != nil {
		cfg.DialContext = n.host.dial
		web = &http.Client{Transport: &http.Transport{DialContext: n.host.dial, DisableKeepAlives: true}}
	}
	answer := "" // the last one
	err := until(ctx, 2*time.Minute, "boxed-node to be ready", func() (bool, error) {
		select {
		case err := <-n.ended:
			n.ended <- err
			return false, fmt.Errorf("boxed-node ended: %v", err)
		default:
		}
		resp, err := web.Get(endpoint + "/readyz")
		if err != nil {
			answer = err.Error()
			return false, nil
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		answer = string(text)
		return resp.StatusCode == http.StatusOK, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %s\n%s", err, answer, n.tail())
	}
	key, err := os.ReadFile(filepath.Join(n.dir, "admin.key"))
	if err != nil {
		return err
	}
	cfg.APIKey = strings.TrimSpace(string(key))
	if n.Client, err = client.New(cfg); err != nil {
		return err
	}
	info, err := n.NodeInfo(ctx)
	if err != nil {
		return err
	}
	n.nodeID = info.ID
	return n.settle(ctx, 10*time.Minute)
}

// tail is the end of the node's log.
func (n *node) tail() string {
	text, _ := os.ReadFile(n.log)
	return string(text[max(0, len(text)-4000):])
}

// settle waits until nothing of earlier work goes on: the pool is full, nothing
// is being made, and the engine has no container of the node's but the pool's.
// Without it one trial would pay for another.
func (n *node) settle(ctx context.Context, limit time.Duration) error {
	problem := ""
	err := until(ctx, limit, "the node to rest", func() (bool, error) {
		info, err := n.NodeInfo(ctx)
		if err != nil {
			return false, err
		}
		for _, p := range info.Pool {
			if p.Ready != p.Size || p.Filling != 0 {
				problem = fmt.Sprintf("the pool has %d of %d: %s", p.Ready, p.Size, p.Problem)
				return false, nil
			}
		}
		ids, err := n.containers(ctx)
		problem = fmt.Sprintf("%d containers for a pool of %d", len(ids), n.pool)
		return len(ids) == n.pool, err
	})
	if err != nil && problem != "" {
		err = fmt.Errorf("%w (%s)", err, problem)
	}
	return err
}

// containers are the IDs of the node's containers, whatever state they are in.
func (n *node) containers(ctx context.Context) (ids []string, err error) {
	return n.labelled(ctx, "sh.boxed.instance")
}

func (n *node) labelled(ctx context.Context, label string) (ids []string, err error) {
	list, err := n.r.engine.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", label))})
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		if n.nodeID != "" && strings.HasPrefix(c.Labels[label], string(n.nodeID)+".") {
			ids = append(ids, c.ID)
		}
	}
	return ids, nil
}

// PID is the node's process.
func (n *node) pid() int { return n.cmd.Process.Pid }

// close ends the node and all of its sandboxes. It works also after ctx has
// ended.
func (n *node) close() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupLimit)
	defer cancel()
	if n.Client != nil {
		n.Close()
	}
	n.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-n.ended:
	case <-time.After(time.Minute):
		n.r.say("boxed-node did not stop within a minute; it is killed")
		n.cmd.Process.Kill()
		<-n.ended
	}
	// Sandboxes outlive their node. Those of a node that never answered are known by its directories.
	ids, err := n.containers(ctx)
	probes, errProbes := n.labelled(ctx, "sh.boxed.probe")
	ids = append(ids, probes...)
	entries, _ := os.ReadDir(filepath.Join(n.dir, "sandboxes"))
	for _, e := range entries {
		ids = append(ids, "boxed-"+e.Name())
	}
	if err := errors.Join(err, errProbes, n.r.remove(ctx, ids)); err != nil {
		n.r.say("remove the node's containers: %v", err)
	}
	os.RemoveAll(filepath.Dir(n.dir))
}
