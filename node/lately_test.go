package node_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// A create is placed by what the engine said not long ago, while it is asked anew
// behind: an answer of the engine takes longer than a warm claim. Readiness waits
// for the answer.
func TestAPlaceIsFoundWithoutWaitingForTheEngine(t *testing.T) {
	var passed atomic.Int64
	h := newHost(t, func(c *node.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(passed.Load())) }
	})
	release, asked := make(chan struct{}), make(chan struct{}, 8)
	h.driver.Fail(sandboxtest.Info, func(ctx context.Context, _ string) error {
		asked <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	defer close(release)
	passed.Add(int64(2 * time.Minute))
	// What follows the placing asks the driver too, and is told to by its context.
	ctx, cancel := context.WithCancel(ann)
	go func() {
		<-asked // behind
		<-asked // by whoever makes it: the place was found
		cancel()
	}()
	_, err := h.Create(ctx, boxed.Spec{})
	if ctx.Err() == nil {
		t.Errorf("it ended with %v before the engine was asked twice", err)
	}
	if problems := h.Ready(t.Context()); len(problems) == 0 {
		t.Error("it counts as ready while the engine does not answer")
	}
}
