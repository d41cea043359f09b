package main_test

import (
	"slices"
	"testing"

	"github.com/boxed-mesh/boxed"
	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

// A machine that carries the node tag and does not answer is probably behind the
// tailnet's policy; one that answers and is refused is not.
func TestATaggedMachineThatDoesNotAnswerIsBlocked(t *testing.T) {
	status := &boxed.ClusterStatus{Faults: []boxed.MeshFault{
		{Peer: "100.64.0.1:7946", Message: "unreachable: context deadline exceeded"},
		{Peer: "aaaaaaaaaaaaaaaa", Message: "node aaaaaaaaaaaaaaaa at 100.64.0.2:7946: unreachable: i/o timeout"},
		{Peer: "bbbbbbbbbbbbbbbb", Message: "node bbbbbbbbbbbbbbbb at 100.64.0.3:7946: not a node of this cluster: the cluster keys differ"},
		{Peer: "192.168.1.9:7946", Message: "unreachable: no route to host"},
	}}
	got := main.Blocked(status, []string{"100.64.0.1:7946", "100.64.0.2:7946", "100.64.0.3:7946", "100.64.0.4:7946"})
	if want := []string{"100.64.0.1:7946", "100.64.0.2:7946"}; !slices.Equal(got, want) {
		t.Errorf("got %v, not %v", got, want)
	}
}
