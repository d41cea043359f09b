package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sync/errgroup"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
	"github.com/boxed-mesh/boxed/scheduler"
	"github.com/boxed-mesh/boxed/store"
)

// runner is a part that runs for as long as the node does.
type runner interface {
	Run(ctx context.Context) error
}

// daemon is the node with all of its parts joined.
type daemon struct {
	cfg      *Loaded
	log      *slog.Logger
	store    *store.Store
	identity ed25519.PrivateKey
	id       boxed.NodeID
	agent    string // path of the program
	tools    string // beside it; "": none
	front    *front
	ssh      *sshDoor
	egress   *egressParts
	parts    []runner
	close    []func() error // of what was opened, in that order
}

// newDaemon opens and joins the parts in the order in which they need each
// other. Nothing of a daemon that failed to start stays open.
func newDaemon(ctx context.Context, cfg *Loaded, log *slog.Logger) (_ *daemon, err error) {
	d := &daemon{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if err := d.openDisk(); err != nil {
		return nil, err
	}
	mesh, err := d.newMesh()
	if err != nil {
		return nil, err
	}
	keys, err := openKeys(cfg, d.store, mesh.cluster, d.identity, log)
	if err != nil {
		return nil, err
	}
	sshKeys, err := node.NewSSHKeys(keysConfig(d.store, mesh.cluster, d.identity, node.SSHKeyKind, log))
	if err != nil {
		return nil, err
	}
	cert, err := openCertificate(cfg.Config, log, time.Now)
	if err != nil {
		return nil, err
	}
	// The address first: whoever has it is not disturbed by what comes now.
	ln, err := listen(ctx, cfg.Listen)
	if err != nil {
		return nil, err
	}
	d.close = append(d.close, func() error { ln.Close(); return nil }) // closed already where it served
	engine, err := docker.New(docker.Config{
		NodeID: d.id, DataDir: cfg.DataDir, AgentPath: d.agent, ProbeImage: cfg.Templates[boxed.DefaultTemplate].Image,
		Host: cfg.Docker.Host, Runtime: cfg.Docker.Runtime, Runtimes: cfg.Docker.Runtimes,
		PullTimeout: cfg.Docker.PullTimeout.D(), DockerConfig: cfg.Docker.ConfigFile, Log: log,
	})
	if err != nil {
		return nil, err
	}
	d.close = append(d.close, engine.Close)
	driver := hookedDriver(cfg.DataDir, engine)
	if d.egress, err = d.openEgress(); err != nil {
		return nil, err
	}
	manager, err := d.newManager(driver)
	if err != nil {
		return nil, err
	}
	d.egress.renewed = manager.RenewEgress
	n, err := d.newNode(manager, driver)
	if err != nil {
		return nil, err
	}
	mesh.node = n
	d.egress.relay = n.Relay
	d.egress.own.peers = mesh.addresses
	policies, err := node.NewPolicies(node.PoliciesConfig{
		KeysConfig: keysConfig(d.store, mesh.cluster, d.identity, node.ProfileKind, log),
		Node:       d.id, Keeper: d.egress.keeper, Freeze: d.egress.proxy.Freeze, Nodes: n.MeshNodes,
		Sources: cfg.Egress.Sources,
	})
	if err != nil {
		return nil, err
	}
	if err := d.openSSH(ctx, n, sshKeys, mesh); err != nil {
		return nil, err
	}
	server, err := api.New(api.Config{
		Service: n, Admin: keys, SSH: d.ssh, Policies: policies, Cluster: mesh, Owner: n.Owner, Vouched: mesh.vouch.Verify, Auth: keys, Logger: log, Version: versionText(), Ready: n.Ready,
		Hosts: cfg.hostNames(), TrustedProxies: cfg.TrustedProxies,
	})
	if err != nil {
		return nil, err
	}
	mesh.keys, mesh.sshKeys, mesh.policies, mesh.server, mesh.ssh = keys, sshKeys, policies, server, d.ssh
	if err := mesh.openTailnet(ctx); err != nil {
		return nil, err
	}
	d.parts = []runner{d.store, d.egress.audit, d.egress.keeper, keys, sshKeys, policies, manager, n, mesh.cluster, mesh}
	d.front = &front{
		ln: ln, cert: cert, drain: cfg.Drain.D(), log: log, server: server.HTTPServer(),
		shutdown: func(ctx context.Context) error {
			n.Drain()
			return d.shutDoors(ctx, server)
		},
	}
	d.announce()
	return d, nil
}

// shutDoors ends what came in at the API and over SSH, at the same time.
func (d *daemon) shutDoors(ctx context.Context, server *api.Server) error {
	var doors errgroup.Group
	doors.Go(func() error { return server.Shutdown(ctx) })
	doors.Go(func() error { return d.ssh.server.Shutdown(ctx) })
	return doors.Wait()
}

// openDisk takes the data directory and opens what lies in it.
func (d *daemon) openDisk() error {
	if err := prepareDataDir(d.cfg.DataDir, d.log); err != nil {
		return err
	}
	lock, err := store.LockDir(d.cfg.DataDir)
	if err != nil {
		return err
	}
	d.close = append(d.close, lock.Release)
	d.store, err = store.Open(store.Options{
		Dir: d.cfg.path("store"), Logger: d.log,
		MinEvents: d.cfg.Events.Count, MinEventAge: d.cfg.Events.Age.D(), MaxEvents: d.cfg.Events.Most,
	})
	if err != nil {
		return err
	}
	d.close = append(d.close, d.store.Close)
	if d.identity, err = identity(d.cfg.path("node.key")); err != nil {
		return err
	}
	d.id = boxed.NodeIDOf(d.identity.Public().(ed25519.PublicKey))
	program, err := agentProgram(d.cfg.Agent, embedded)
	if err != nil {
		return err
	}
	tools, err := toolsProgram(d.cfg.Agent, embedded)
	if err != nil {
		return err
	}
	agents := agentDir(d.cfg.path("agent"))
	if d.agent, err = agents.install(program); err != nil {
		return err
	}
	d.tools, err = agents.installTools(d.agent, tools)
	return err
}

// sandboxTable is the name of the table of sandboxes, and a part of the store's
// format.
const sandboxTable = "sandbox"

func (d *daemon) newManager(driver sandbox.Driver) (*sandbox.Manager, error) {
	records := store.NewTable[sandbox.Record](d.store, sandboxTable)
	all, err := records.All()
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, r := range all {
		used[r.Agent] = used[r.Agent] || !r.Sandbox.State.Ended()
	}
	if err := agentDir(d.cfg.path("agent")).prune(d.agent, func(path string) bool { return used[path] }); err != nil {
		d.log.Warn("prune agents", "err", err)
	}
	machine, err := node.Machine()
	if err != nil {
		return nil, err
	}
	pausedMost := d.cfg.TTL.Highest.D()
	if d.cfg.TTL.Highest == boxed.Never {
		pausedMost = 0
	}
	usable := scheduler.NodeState{Total: machine, Policy: d.cfg.policy()}.Usable().MemoryBytes
	return sandbox.New(hooked(d.cfg.DataDir, sandbox.Config{
		Node: d.id, Dir: d.cfg.path("sandboxes"), Agent: d.agent, Tools: d.tools, Driver: driver, Records: records,
		Templates: d.cfg.TemplateList(), Runtime: d.cfg.Docker.Runtime,
		FirstUID: d.cfg.UIDs.First, LastUID: d.cfg.UIDs.Last, Refill: d.cfg.Pool.Refill, Egress: d.egress.keeper,
		PoolRoom: func(used boxed.Capacity) int64 {
			return int64(float64(max(0, usable-used.MemoryBytes)) * d.cfg.Pool.MemoryShare)
		},
		Emit:     func(e boxed.Event) { d.store.AppendEvent(e) },
		EndedFor: d.cfg.Ended.Age.D(), EndedMost: d.cfg.Ended.Count, PausedMost: pausedMost, Log: d.log,
	}))
}

func (d *daemon) newNode(manager *sandbox.Manager, driver sandbox.Driver) (*node.Node, error) {
	name := d.cfg.Name
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("find the host's name: %w", err)
		}
		name, _, _ = strings.Cut(host, ".")
	}
	return node.New(node.Config{
		ID: d.id, Name: name, Version: versionText(), Manager: manager, Driver: driver, Events: d.store,
		Templates: d.cfg.TemplateList(), Defaults: d.cfg.Limits.Default, Highest: d.cfg.Limits.Highest,
		TTL: d.cfg.TTL.Default, MaxTTL: d.cfg.TTL.Highest, Idle: d.cfg.Idle,
		Quota:  func(owner string) node.Quota { return node.Quota(d.cfg.Quotas.Of(owner)) },
		Policy: d.cfg.policy(), Most: d.cfg.Capacity.Sandboxes, Log: d.log,
		Egress: &node.EgressConfig{Keeper: d.egress.keeper, Audit: d.egress.audit, Asks: d.egress.asks},
		Place:  boxed.PlaceRule(d.cfg.Place), Labels: d.cfg.liveLabels, Strategy: scheduler.Strategy(d.cfg.PlaceBy),
		Settings: nodeSettings{store.NewTable[node.Settings](d.store, "node")},
	})
}

// announce says where the node can be found, and as what.
func (d *daemon) announce() {
	cert := d.front.cert
	attrs := []any{
		"node", d.id, "listen", d.front.ln.Addr().String(), "tls", cert != nil, "data_dir", d.cfg.DataDir,
		"version", versionText(), "agent", d.agent,
	}
	if cert != nil {
		attrs = append(attrs, "fingerprint", cert.fingerprint())
	}
	d.log.Info("node started", attrs...)
}

// Run returns when the node has stopped: after ctx has ended and requests were
// drained, or when a part failed.
func (d *daemon) Run(ctx context.Context) error {
	// The parts outlive ctx: requests that drain need them.
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, running := errgroup.WithContext(running)
	for _, part := range d.parts {
		group.Go(func() error {
			err := part.Run(running)
			if running.Err() != nil && errors.Is(err, context.Canceled) {
				return nil // it stopped because it was to stop
			}
			return err
		})
	}
	group.Go(d.ssh.run)
	group.Go(func() error {
		defer end()
		stop, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(running, cancel)() // a part failed
		return d.front.run(stop.Done())
	})
	return group.Wait()
}

// Reload is what SIGHUP does: the certificate and the level of the log. cfg is
// the configuration as it is now.
func (d *daemon) Reload(cfg *Loaded, level *slog.LevelVar) {
	level.Set(cfg.Log.Level)
	if d.front.cert != nil {
		if err := d.front.cert.reload(); err != nil {
			d.log.Error("keep the old certificate", "err", err)
		}
	}
	for _, path := range changed(d.cfg, cfg) {
		d.log.Warn("a changed setting needs a restart", "setting", path)
	}
}

// changed is the settings that differ and are not read again while running.
func changed(a, b *Loaded) (paths []string) {
	was := map[string]string{}
	for _, s := range a.settings() {
		was[s.path] = s.text()
	}
	for _, s := range b.settings() {
		if text, ok := was[s.path]; s.path != "log.level" && (!ok || text != s.text()) {
			paths = append(paths, s.path)
		}
		delete(was, s.path)
	}
	for path := range was {
		paths = append(paths, path)
	}
	return paths
}

// Close closes what is open, the last first.
func (d *daemon) Close() error {
	var errs []error
	for i := len(d.close) - 1; i >= 0; i-- {
		errs = append(errs, d.close[i]())
	}
	d.close = nil
	return errors.Join(errs...)
}

// openKeys reads the API keys of the store and adds that of the configuration.
func openKeys(cfg *Loaded, db *store.Store, cluster *node.Cluster, id ed25519.PrivateKey, log *slog.Logger) (*node.Keys, error) {
	keys, err := node.NewKeys(keysConfig(db, cluster, id, node.KeyKind, log))
	if err != nil {
		return nil, err
	}
	secret, made, err := adminKey(cfg.Config)
	if err != nil {
		return nil, err
	}
	if made {
		log.Info("api key made", "path", cfg.KeyPath())
	} else if cfg.APIKey == "" {
		warnIfPublic(cfg.KeyPath(), log)
	}
	if _, err := keys.Bootstrap(secret, adminOwner, boxed.RoleAdmin); err != nil {
		if cfg.APIKey == "" {
			return nil, fmt.Errorf("%s: %w", cfg.KeyPath(), err)
		}
		return nil, err
	}
	return keys, nil
}

// keysConfig is what keys of a kind need.
func keysConfig(db *store.Store, cluster *node.Cluster, id ed25519.PrivateKey, kind string, log *slog.Logger) node.KeysConfig {
	return node.KeysConfig{
		Documents: cluster.Documents(), Signer: id, Clock: db.Clock(), Logger: log,
		Trusted:  func(author ed25519.PublicKey) bool { return cluster.Trusted(kind, author) },
		MayWrite: cluster.MayControl,
	}
}

// adminOwner is whose sandboxes the configuration's key makes.
const adminOwner = "admin"

// memoryGoal is from when on garbage is collected more often, in bytes: what the
// budgets of streams and requests allow is held twice otherwise.
const memoryGoal = 256 << 20

// run is the command that runs the node.
func (p *program) run(ctx *cli.Context) error {
	cfg, err := p.load(ctx)
	if err != nil {
		return err
	}
	if p.getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryGoal)
	}
	level := &slog.LevelVar{}
	log := newLogger(cfg.Config, p.stderr, level)
	for _, warning := range cfg.Warnings {
		log.Warn(warning)
	}
	signals, release := catchSignals()
	defer release()
	d, err := newDaemon(ctx.Context, cfg, log)
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx.Context)
	defer stop()
	socket := p.getenv("NOTIFY_SOCKET")
	tell := func(state string) {
		if err := notify(socket, state); err != nil {
			log.Warn("service manager", "err", err)
		}
	}
	done, handled := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(handled)
		handleSignals(signals, done, log, func() { tell("STOPPING=1"); stop() }, func() {
			if now, err := p.load(ctx); err != nil {
				log.Error("keep the old configuration", "err", err)
			} else {
				d.Reload(now, level)
			}
		})
	}()
	tell("READY=1")
	err = d.Run(run)
	close(done)
	<-handled
	err = errors.Join(err, d.Close())
	log.Info("node stopped")
	return err
}
