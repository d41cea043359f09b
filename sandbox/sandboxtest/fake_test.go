package sandboxtest_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

func TestTheFakeDriverPasses(t *testing.T) {
	defer goleak.VerifyNone(t)
	sandboxtest.Run(t, func(t *testing.T) sandboxtest.Fixture {
		d := sandboxtest.New()
		d.SetImage("debian", "sha256:1")
		t.Cleanup(d.Close)
		return sandboxtest.Fixture{
			NoEgress: true,
			Driver:   d, Node: "aaaaaaaaaaaaaaaa", Agent: "/nonexistent", Image: "debian",
			Languages: map[string]string{"bash": "echo hello"},
			Crash: func(t *testing.T, id string) {
				for container, box := range d.Boxes() {
					if container == id {
						d.Crash(boxed.ID(box.ID), 3, false)
					}
				}
			},
		}
	})
}
