package main

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tcpnet"
)

// meshState is what a node must remember to be in its mesh, in
// <data_dir>/cluster.json, mode 0600.
type meshState struct {
	node.ClusterState
	Listen    string   `json:"listen,omitempty"` // as asked for when it joined; "": the configuration's
	Advertise string   `json:"advertise,omitempty"`
	Seeds     []string `json:"seeds,omitempty"`
}

// mesh makes the node one of many, and alone again. It implements boxed.Cluster.
type mesh struct {
	cfg      *Loaded
	log      *slog.Logger
	id       boxed.NodeID
	identity ed25519.PrivateKey
	db       *store.Store
	cluster  *node.Cluster
	keys     *node.Keys
	sshKeys  *node.SSHKeys
	policies *node.Policies
	ssh      *sshDoor
	node     *node.Node
	server   *api.Server
	vouch    *node.Assertions
	gate     *transport.Gate
	tailnet  tailnet // nil: the mesh goes over TCP
	path     string

	// changing is held while the node enters or leaves, which takes some seconds.
	changing sync.Mutex

	mu    sync.Mutex
	state meshState
	ctx   context.Context // of Run; nil before
	up    *meshUp
}

var _ boxed.Cluster = (*mesh)(nil)

// meshUp is what runs while the node is in a cluster.
type meshUp struct {
	network transport.Network // its owner closes it, where that is the tailnet
	members *transport.Membership
	peers   *node.Peers
	server  *http.Server
	leave   context.CancelFunc
	work    sync.WaitGroup
}

// How long a node that joins waits for the first answer, and what is tried for.
const (
	joinPatience   = 10 * time.Second
	resolvePatient = 2 * time.Second
	retrySharing   = 5 * time.Second
)

func (d *daemon) newMesh() (*mesh, error) {
	m := &mesh{cfg: d.cfg, log: d.log, id: d.id, identity: d.identity, db: d.store, path: d.cfg.path("cluster.json")}
	raw, err := os.ReadFile(m.path)
	if err == nil {
		err = json.Unmarshal(raw, &m.state)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read %s, which has the cluster key: %w; put back a copy, or move it away to be alone again", m.path, err)
	}
	var control []boxed.NodeID
	for _, id := range d.cfg.Mesh.Control {
		control = append(control, boxed.NodeID(id))
	}
	m.cluster, err = node.NewCluster(node.ClusterConfig{
		Store: d.store, Clock: d.store.Clock(), Identity: d.identity, State: m.state.ClusterState, Save: m.save, Control: control, Log: d.log,
	})
	if err != nil {
		return nil, err
	}
	var may []boxed.NodeID
	for _, id := range d.cfg.Mesh.Vouch {
		may = append(may, boxed.NodeID(id))
	}
	m.vouch = node.NewAssertions(d.identity, may, d.log)
	m.gate, err = transport.NewGate(transport.GateConfig{
		Identity: d.identity, Keys: m.cluster.GateKeys, Retired: m.cluster.Retired,
		Handover: m.cluster.Handover, Rekeyed: m.cluster.Rekeyed, Denied: m.cluster.Denied,
	})
	return m, err
}

// openTailnet starts the machine on the tailnet, where the mesh goes over one.
func (m *mesh) openTailnet(ctx context.Context) (err error) {
	if m.cfg.Mesh.Network != networkTailnet {
		return nil
	}
	cfg := m.cfg.Tailnet
	if cfg.Hostname == "" {
		cfg.Hostname = "boxed-" + m.node.Name()
	}
	if cfg.AuthKeyFile != "" {
		text, err := readSmall(cfg.AuthKeyFile)
		if err != nil {
			return fmt.Errorf("read the tailnet's auth key: %w", err)
		}
		cfg.AuthKey = strings.TrimSpace(string(text))
	}
	m.tailnet, err = openTailnet(ctx, cfg, m.cfg.path("tailnet"), m.gate, m.log)
	return err
}

// save keeps what the cluster wants remembered, with what this package adds.
func (m *mesh) save(s node.ClusterState) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.state
	next.ClusterState = s
	if s.ID == "" {
		if err := os.Remove(m.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		m.state = meshState{}
		return nil
	}
	raw, err := json.MarshalIndent(next, "", "  ")
	if err != nil {
		return err
	}
	if err := writeNew(m.path, append(raw, '\n'), 0o600); err != nil {
		return err
	}
	m.state = next
	return nil
}

func (m *mesh) remembered() meshState {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

// Run is in the mesh for as long as the node is in a cluster, until ctx ends.
func (m *mesh) Run(ctx context.Context) error {
	m.mu.Lock()
	m.ctx = ctx
	m.mu.Unlock()
	if m.tailnet == nil {
		if err := m.enter(ctx); err != nil {
			return err
		}
		<-ctx.Done()
	} else if err := m.runTailnet(ctx); err != nil {
		return err
	}
	m.changing.Lock()
	defer m.changing.Unlock()
	m.down()
	if m.tailnet != nil {
		return m.tailnet.Close()
	}
	return nil
}

// runTailnet serves the API on the tailnet, and enters the mesh, once the machine
// is on it; until then the node serves this host, and says what is missing.
func (m *mesh) runTailnet(ctx context.Context) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	nagging, quiet := context.WithCancel(ctx)
	defer quiet()
	serving.Go(func() { m.nag(nagging) })
	if err := m.tailnet.Up(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("get on the tailnet: %w", err)
	}
	m.log.Info("on the tailnet", "name", m.tailnet.Standing().Name, "addr", m.tailnet.Addr())
	if err := m.enter(ctx); err != nil {
		return err
	}
	if m.cfg.Tailnet.API {
		identify := func(ctx context.Context, addr string) (boxed.Principal, error) {
			who, err := m.tailnet.WhoIs(ctx, addr)
			if err != nil {
				return boxed.Principal{}, &boxed.Error{Code: boxed.CodeUnauthenticated, Message: "the tailnet does not know who this is; show an API key", Err: err}
			}
			return m.cfg.Tailnet.principal(who)
		}
		if err := m.serveDoor(ctx, &serving, m.tailnet.Front, identify); err != nil {
			return err
		}
		if err := m.serveSSH(ctx, &serving, identify); err != nil {
			return err
		}
		// Who comes by the shared name comes from the loopback, and shows a key.
		if err := m.serveDoor(ctx, &serving, m.tailnet.Service, nil); err != nil {
			m.log.Info("the name boxed is not served; clients keep a list of nodes", "err", err)
		}
	}
	<-ctx.Done()
	return nil
}

// serveDoor serves the API on a listener of the tailnet until ctx ends.
func (m *mesh) serveDoor(ctx context.Context, serving *sync.WaitGroup, listen func(context.Context) (net.Listener, []string, error),
	identify func(context.Context, string) (boxed.Principal, error),
) error {
	ln, hosts, err := listen(ctx)
	if err != nil {
		return err
	}
	server, err := m.server.DoorHTTPServer(api.Door{Hosts: hosts, Identify: identify})
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	m.log.Info("serving on the tailnet", "listen", ln.Addr().String(), "hosts", hosts)
	serving.Go(func() { server.Serve(ln) })
	serving.Go(func() {
		<-ctx.Done()
		server.Close()
	})
	return nil
}

// serveSSH serves SSH on the tailnet until ctx ends.
func (m *mesh) serveSSH(ctx context.Context, serving *sync.WaitGroup, identify func(context.Context, string) (boxed.Principal, error)) error {
	ln, err := m.tailnet.SSH(ctx)
	if err != nil {
		return err
	}
	m.log.Info("serving ssh on the tailnet", "listen", ln.Addr().String())
	serving.Go(func() { m.ssh.onTailnet(ln, identify) })
	serving.Go(func() {
		<-ctx.Done()
		ln.Close()
	})
	return nil
}

// nag says in the log what the tailnet waits for, whenever that changes.
func (m *mesh) nag(ctx context.Context) {
	said := ""
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if t := m.tailnet.Standing(); t.Problem != said {
			if said = t.Problem; said != "" {
				m.log.Warn("tailnet", "state", t.State, "problem", t.Problem, "next", t.Next, "url", t.LoginURL)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// enter is the first thing: the cluster that the node was in, or that of the
// configuration's token.
func (m *mesh) enter(ctx context.Context) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.remembered().ID != "" {
		return m.start(ctx)
	}
	if m.cfg.Mesh.TokenFile == "" {
		return nil
	}
	text, err := readSmall(m.cfg.Mesh.TokenFile)
	if err != nil {
		return fmt.Errorf("read the join token: %w", err)
	}
	token, err := parseToken(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", m.cfg.Mesh.TokenFile, err)
	}
	if err := m.become(token, boxed.ClusterRequest{}); err != nil {
		return err
	}
	return m.start(ctx)
}

// become writes down that the node is in a cluster.
func (m *mesh) become(t joinToken, req boxed.ClusterRequest) error {
	m.mu.Lock()
	m.state = meshState{Seeds: t.Seeds, Listen: req.Listen, Advertise: req.Advertise}
	m.mu.Unlock()
	return m.cluster.Enter(node.ClusterState{ID: t.Cluster, Keys: []transport.ClusterKey{t.Key}})
}

// start is in the mesh until down.
func (m *mesh) start(ctx context.Context) (err error) {
	s := m.remembered()
	up := &meshUp{}
	network, drop, err := m.network(ctx, s)
	if err != nil {
		return err
	}
	up.network = network
	defer func() {
		if err != nil {
			err = errors.Join(err, m.closeNetwork(network))
		}
	}()
	list, err := m.node.ListNodes(ctx)
	if err != nil {
		return err
	}
	up.members, err = transport.NewMembership(transport.MembershipConfig{
		Network: network, Cluster: s.ID, Identity: m.identity, Keys: m.cluster.GossipKeys, Seeds: m.seeds, Known: m.known(),
		Pace: transport.Pace(m.cfg.Mesh.Pace), Denied: m.cluster.Denied, Exchange: m.cluster.Documents(), Heard: m.node.Heard, Changed: m.changed, Log: m.log,
	}, list.Nodes[0])
	if err != nil {
		return err
	}
	up.peers = node.NewPeers(network, up.members, m.vouch)
	ln, err := network.Listen(transport.API)
	if err != nil {
		over, cancel := context.WithCancel(ctx)
		cancel()
		return errors.Join(err, up.members.Run(over)) // which closes it
	}
	up.server = m.server.PeerHTTPServer(m.id, transport.PeerOf)
	members, leave := context.WithCancel(context.WithoutCancel(ctx))
	up.leave = leave
	up.work.Go(func() { up.members.Run(members) })
	up.work.Go(func() { up.server.Serve(ln) })
	m.cluster.SetLive(&node.Live{Members: up.members, Drop: drop, Forget: up.peers.Forget})
	m.node.SetMesh(up.peers)
	up.work.Go(func() { m.share(members) })
	m.mu.Lock()
	m.up = up
	m.mu.Unlock()
	m.log.Info("in the mesh", "cluster", s.ID, "addr", network.Addr())
	return nil
}

// network is what the mesh goes over, and what puts out nodes that were removed.
func (m *mesh) network(ctx context.Context, s meshState) (transport.Network, func(func(boxed.NodeID) bool), error) {
	if m.tailnet != nil {
		if m.tailnet.Addr() == "" {
			t := m.tailnet.Standing()
			return nil, nil, boxed.Errorf(boxed.CodeNotReady, "this node is not on the tailnet yet (%s): %s", t.State, or(t.Next, "it is connecting; try again in a moment"))
		}
		return m.tailnet, m.tailnet.Drop, nil
	}
	n, err := tcpnet.New(ctx, tcpnet.Config{
		Gate: m.gate, Listen: or(s.Listen, m.cfg.Mesh.Listen), Advertise: or(s.Advertise, m.cfg.Mesh.Advertise), Log: m.log,
	})
	if err != nil {
		return nil, nil, err
	}
	return n, n.Drop, nil
}

// closeNetwork leaves the tailnet alone: its front door is still in use.
func (m *mesh) closeNetwork(n transport.Network) error {
	if m.tailnet != nil {
		return nil
	}
	return n.Close()
}

// share gives the configuration's keys to the mesh.
func (m *mesh) share(ctx context.Context) {
	for {
		err := m.keys.Share(m.id)
		if err == nil {
			return
		}
		m.log.Error("share the API key of the configuration", "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(retrySharing):
		}
	}
}

func (m *mesh) down() {
	m.mu.Lock()
	up := m.up
	m.up = nil
	m.mu.Unlock()
	if up == nil {
		return
	}
	m.node.SetMesh(nil)
	m.cluster.SetLive(nil)
	up.leave()
	up.server.Close()
	up.work.Wait()
	up.peers.Close()
	if err := m.closeNetwork(up.network); err != nil {
		m.log.Warn("close the mesh", "err", err)
	}
}

// seeds are the addresses to find other nodes by. Names are the operator's, and
// resolved here; the network itself knows only addresses.
func (m *mesh) seeds(ctx context.Context) (addrs []string) {
	ctx, cancel := context.WithTimeout(ctx, resolvePatient)
	defer cancel()
	if m.tailnet != nil {
		addrs = m.tailnet.Seeds()
	}
	for _, seed := range append(slices.Clone(m.remembered().Seeds), m.cfg.Mesh.Seeds...) {
		if _, err := netip.ParseAddrPort(seed); err == nil {
			addrs = append(addrs, seed)
			continue
		}
		host, port, err := net.SplitHostPort(seed)
		if err != nil {
			continue
		}
		number, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			continue
		}
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			m.log.Debug("resolve a seed", "seed", seed, "err", err)
		}
		for _, ip := range ips {
			addrs = append(addrs, netip.AddrPortFrom(ip.Unmap(), uint16(number)).String())
		}
	}
	return addrs
}

// changed puts what becomes of other nodes into the stream of events.
func (m *mesh) changed(s boxed.NodeSummary) {
	types := map[boxed.NodeState]boxed.EventType{
		boxed.NodeAlive: boxed.EventNodeUp, boxed.NodeSilent: boxed.EventNodeSilent, boxed.NodeStopped: boxed.EventNodeStopped,
	}
	m.db.AppendEvent(boxed.Event{Type: types[s.State], At: time.Now().UTC(), Node: s.ID, Message: s.Name})
}

func (m *mesh) known() knownNodes { return knownNodes{store.NewTable[boxed.NodeSummary](m.db, "peer")} }

// knownNodes keeps the nodes that were seen.
type knownNodes struct {
	*store.Table[boxed.NodeSummary]
}

func (k knownNodes) Put(s boxed.NodeSummary) error { return k.Table.Put(string(s.ID), s) }
func (k knownNodes) Delete(id boxed.NodeID) error  { return k.Table.Delete(string(id)) }

// nodeSettings keeps what an operator set.
type nodeSettings struct {
	*store.Table[node.Settings]
}

const settingsKey = "settings"

func (t nodeSettings) Load() (node.Settings, error) {
	s, err := t.Get(settingsKey)
	if boxed.CodeOf(err) == boxed.CodeNotFound {
		return node.Settings{}, nil
	}
	return s, err
}

func (t nodeSettings) Save(s node.Settings) error { return t.Put(settingsKey, s) }

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
