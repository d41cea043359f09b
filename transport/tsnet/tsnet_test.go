package tsnet_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/transporttest"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childControl) != "" {
		child()
		return
	}
	goleak.VerifyTestMain(m)
}

// patience is far more than anything takes that is not a timeout by itself.
const patience = 30 * time.Second

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in %v, it did not come to this: %s", patience, what)
		}
	}
}

var count atomic.Int64

// newConfig is a new machine's.
func newConfig(t *testing.T, tailnet *tailnettest.Tailnet, keys ...transport.ClusterKey) tsnet.Config {
	t.Helper()
	_, identity, _ := ed25519.GenerateKey(rand.Reader)
	gate, err := transport.NewGate(transport.GateConfig{Identity: identity, Keys: func() []transport.ClusterKey { return keys }})
	if err != nil {
		t.Fatal(err)
	}
	cfg := tsnet.Config{
		Dir: t.TempDir(), Hostname: fmt.Sprintf("boxed-%d", count.Add(1)), ControlURL: tailnet.ControlURL, Gate: gate,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	if os.Getenv("TSNET_TEST_VERBOSE") != "" {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return cfg
}

// start makes a Network and does not wait for it.
func start(t *testing.T, cfg tsnet.Config) *tsnet.Network {
	t.Helper()
	n, err := tsnet.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func up(t *testing.T, n *tsnet.Network) *tsnet.Network {
	t.Helper()
	if err := n.Up(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	return n
}

// node is a machine that is up, as the suite has it.
func node(t *testing.T, cfg tsnet.Config) transporttest.Node {
	t.Helper()
	return transporttest.Node{ID: cfg.Gate.ID(), Network: up(t, start(t, cfg))}
}

func network(n transporttest.Node) *tsnet.Network { return n.Network.(*tsnet.Network) }

// acquainted waits until each of the nodes has all others in its network map.
func acquainted(t *testing.T, nodes ...transporttest.Node) {
	t.Helper()
	eventually(t, "all nodes know all", func() bool {
		for _, a := range nodes {
			known := map[string]bool{a.Addr(): true}
			for _, p := range network(a).Peers() {
				known[p.Addr] = true
			}
			for _, b := range nodes {
				if !known[b.Addr()] {
					return false
				}
			}
		}
		return true
	})
}

func TestNetwork(t *testing.T) {
	tailnet := tailnettest.Start(t)
	transporttest.Run(t, func(t *testing.T, count int) (nodes []transporttest.Node) {
		key := transport.NewClusterKey()
		for range count {
			nodes = append(nodes, node(t, newConfig(t, tailnet, key)))
		}
		acquainted(t, nodes...)
		return nodes
	})
}
