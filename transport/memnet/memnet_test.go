package memnet_test

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport/memnet"
	"github.com/boxed-mesh/boxed/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNetwork(t *testing.T) {
	transporttest.Run(t, func(t *testing.T, count int) (nodes []transporttest.Node) {
		hub := memnet.NewHub()
		for i := range count {
			id := boxed.NodeID(fmt.Sprintf("%016d", i))
			n := hub.Join(id)
			t.Cleanup(func() { n.Close() })
			nodes = append(nodes, transporttest.Node{ID: id, Network: n})
		}
		return nodes
	})
}
