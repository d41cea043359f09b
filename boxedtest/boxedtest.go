// Package boxedtest is a mesh in one process, for tests that read as stories: real
// nodes, gossip, documents, API and routing over a network in memory, with
// containers that are a fake driver's.
//
//	c := boxedtest.New(t, 3)
//	ann := c.As("ann")
//	sb := c.Create(ann, c.Nodes[0], boxed.Spec{})
//	c.Kill(c.Owner(sb))
//
// Start reading at [New].
package boxedtest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
	"github.com/boxed-mesh/boxed/store"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/memnet"
)

// TB is what a Cluster needs of a test: *testing.T and *testing.B are one.
type TB interface {
	Helper()
	Error(args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	Context() context.Context
}

// Patience is how long a verb waits for what it promises.
const Patience = 30 * time.Second

// Cluster is a mesh of nodes.
type Cluster struct {
	Hub   *memnet.Hub
	Nodes []*Node

	t      TB
	state  node.ClusterState
	change []func(int, *node.Config)
	log    *slog.Logger
}

// New starts so many nodes and waits until they see each other. change alters the
// configuration of each, by its number. They end with the test. With
// BOXED_TEST_LOG in the environment their logs are written to stderr.
func New(t TB, count int, change ...func(int, *node.Config)) *Cluster {
	t.Helper()
	c := &Cluster{
		Hub: memnet.NewHub(), t: t, change: change, log: slog.New(slog.DiscardHandler),
		state: node.ClusterState{ID: "test", Keys: []transport.ClusterKey{transport.NewClusterKey()}},
	}
	if os.Getenv("BOXED_TEST_LOG") != "" {
		c.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for range count {
		c.Add()
	}
	c.WaitMesh(c.Nodes...)
	return c
}

// Template is the limits of what a Cluster's default template makes: small, so
// that many fit.
func Template() boxed.Limits {
	return boxed.Limits{
		MemoryBytes: 128 * boxed.MiB, CPUs: 0.1, Processes: 64, OpenFiles: 1024, WorkspaceBytes: 16 * boxed.MiB,
		HomeBytes: 8 * boxed.MiB, TmpBytes: 8 * boxed.MiB, OutputBytes: 8 * boxed.MiB, ShmBytes: 4 * boxed.MiB,
	}
}

// Add starts one more node.
func (c *Cluster) Add() *Node {
	c.t.Helper()
	_, identity, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	// Short, since agents' sockets lie below it.
	dir, err := os.MkdirTemp("", "bx")
	if err != nil {
		c.t.Fatal(err)
	}
	db, err := store.Open(store.Options{InMemory: true, Logger: c.log})
	if err != nil {
		c.t.Fatal(err)
	}
	n := &Node{
		c: c, number: len(c.Nodes), identity: identity, ID: boxed.NodeIDOf(identity.Public().(ed25519.PublicKey)),
		Driver: sandboxtest.New(), records: &sandboxtest.Records{}, db: db, dir: filepath.Join(dir, "s"), state: c.state, known: &known{},
	}
	n.Driver.SetImage("base", "sha256:1")
	c.t.Cleanup(func() {
		n.stop(true)
		n.Driver.Close()
		db.Close()
		os.RemoveAll(dir)
	})
	c.Nodes = append(c.Nodes, n)
	n.start()
	return n
}

// Running are the nodes that run.
func (c *Cluster) Running() []*Node {
	return slices.DeleteFunc(slices.Clone(c.Nodes), func(n *Node) bool { return !n.running() })
}

// WaitMesh waits until these nodes see each other alive and ready.
func (c *Cluster) WaitMesh(nodes ...*Node) {
	c.t.Helper()
	c.Eventually("the nodes see each other", func() bool {
		for _, n := range nodes {
			for _, other := range nodes {
				s, ok := n.Members.Node(other.ID)
				if !ok || s.State != boxed.NodeAlive || !s.Ready {
					return false
				}
			}
		}
		return true
	})
}

// WaitState waits until every node that runs sees n so.
func (c *Cluster) WaitState(n *Node, state boxed.NodeState) {
	c.t.Helper()
	c.Eventually(fmt.Sprintf("%s is %s", n.ID, state), func() bool {
		for _, other := range c.Running() {
			if s, _ := other.Members.Node(n.ID); other != n && s.State != state {
				return false
			}
		}
		return true
	})
}

// Eventually fails the test unless ok becomes true.
func (c *Cluster) Eventually(what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(Patience); !ok(); {
		if time.Now().After(end) {
			c.t.Fatalf("not within %v: %s", Patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// As makes an API key for an owner, and is a context of whoever holds it, once all
// nodes that run know it.
func (c *Cluster) As(owner string) context.Context { return c.withKey(owner, boxed.RoleUser) }

// AsAdmin is As with an admin's key.
func (c *Cluster) AsAdmin(owner string) context.Context { return c.withKey(owner, boxed.RoleAdmin) }

func (c *Cluster) withKey(owner string, role boxed.Role) context.Context {
	c.t.Helper()
	root := boxed.WithPrincipal(context.Background(), boxed.Principal{Owner: "root", Role: boxed.RoleAdmin})
	running := c.Running()
	key, err := running[0].Keys.CreateKey(root, boxed.KeyRequest{Owner: owner, Role: role})
	if err != nil {
		c.t.Fatal(err)
	}
	c.Eventually("all nodes know the key", func() bool {
		for _, n := range running {
			if _, err := n.Keys.Authenticate(root, key.Secret); err != nil {
				return false
			}
		}
		return true
	})
	who := boxed.Principal{Owner: owner, Role: role, Key: key.ID}
	return boxed.WithCredential(boxed.WithPrincipal(c.t.Context(), who), key.Secret)
}

// Create asks a node for a sandbox.
func (c *Cluster) Create(ctx context.Context, by *Node, spec boxed.Spec) *boxed.Sandbox {
	c.t.Helper()
	sb, err := by.Create(ctx, spec)
	if err != nil {
		c.t.Fatalf("create by %s: %v", by.ID, err)
	}
	return sb
}

// WaitRunning waits until a node says that a sandbox runs.
func (c *Cluster) WaitRunning(ctx context.Context, by *Node, id boxed.ID) {
	c.t.Helper()
	c.Eventually(fmt.Sprintf("%s runs", id), func() bool {
		sb, err := by.Get(ctx, id)
		return err == nil && sb.State == boxed.StateRunning
	})
}

// Owner is the node of a sandbox.
func (c *Cluster) Owner(sb *boxed.Sandbox) *Node {
	c.t.Helper()
	return c.Node(sb.ID.Node())
}

// Node finds a node by its ID.
func (c *Cluster) Node(id boxed.NodeID) *Node {
	c.t.Helper()
	for _, n := range c.Nodes {
		if n.ID == id {
			return n
		}
	}
	c.t.Fatalf("there is no node %s", id)
	return nil
}

// Other is a node that runs and is none of these.
func (c *Cluster) Other(than ...*Node) *Node {
	c.t.Helper()
	for _, n := range c.Running() {
		if !slices.Contains(than, n) {
			return n
		}
	}
	c.t.Fatal("there is no other node")
	return nil
}

// HoldEngines has all engines take their time over making containers, until it is
// released.
func (c *Cluster) HoldEngines() (release func()) {
	held := make(chan struct{})
	for _, n := range c.Nodes {
		n.Driver.Fail(sandboxtest.Create, func(ctx context.Context, _ string) error {
			select {
			case <-held:
			case <-ctx.Done():
			}
			return nil
		})
	}
	return sync.OnceFunc(func() { close(held) })
}

// Kill ends a node as kill -9 does. Its containers and its disk stay.
func (c *Cluster) Kill(n *Node) { n.stop(true) }

// Stop ends a node as SIGTERM does.
func (c *Cluster) Stop(n *Node) { n.stop(false) }

// Restart starts a node that was ended, at another address.
func (c *Cluster) Restart(n *Node) { n.start() }

// Partition parts groups of nodes from each other. A node in none of them is with
// the first.
func (c *Cluster) Partition(groups ...[]*Node) {
	var ids [][]boxed.NodeID
	for _, group := range groups {
		var side []boxed.NodeID
		for _, n := range group {
			side = append(side, n.ID)
		}
		ids = append(ids, side)
	}
	c.Hub.Partition(ids...)
}

// Heal ends a partition.
func (c *Cluster) Heal() { c.Hub.Heal() }

// known remembers nodes over restarts, as a disk does.
type known struct {
	mu    sync.Mutex
	nodes map[boxed.NodeID]boxed.NodeSummary
}

func (k *known) All() (all []boxed.NodeSummary, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.nodes {
		all = append(all, s)
	}
	return all, nil
}

func (k *known) Put(s boxed.NodeSummary) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.nodes == nil {
		k.nodes = map[boxed.NodeID]boxed.NodeSummary{}
	}
	k.nodes[s.ID] = s
	return nil
}

func (k *known) Delete(id boxed.NodeID) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.nodes, id)
	return nil
}
