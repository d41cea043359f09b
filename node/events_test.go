package node_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
)

// Events are filtered by owner; an admin sees all.
func TestEventsAreTheOwnersOnly(t *testing.T) {
	h := newHost(t)
	a := h.create(ann, boxed.Spec{})
	b := h.create(bob, boxed.Spec{})
	if err := h.Destroy(bob, b.ID); err != nil {
		t.Fatal(err)
	}
	if err := h.Destroy(ann, a.ID); err != nil {
		t.Fatal(err)
	}
	read := func(who context.Context, until boxed.ID) (seen []boxed.ID) {
		ctx, cancel := context.WithTimeout(who, 5*time.Second)
		defer cancel()
		for e, err := range h.Events(ctx, boxed.CursorOldest) {
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, e.Sandbox)
			if e.Sandbox == until && e.Type == boxed.EventStopped {
				break
			}
		}
		return seen
	}
	if seen := read(ann, a.ID); slices.Contains(seen, b.ID) || len(seen) != 3 {
		t.Errorf("ann saw %v", seen)
	}
	if seen := read(root, a.ID); len(seen) != 6 {
		t.Errorf("root saw %v", seen)
	}
	// From now on, live, until the context ends.
	ctx, cancel := context.WithCancel(ann)
	var live atomic.Int32
	done := make(chan error, 1)
	cursor := h.cfg.Events.EventsNow()
	go func() {
		var last error
		for _, err := range h.Events(ctx, cursor) {
			if last = err; err == nil {
				live.Add(1)
			}
		}
		done <- last
	}()
	h.create(bob, boxed.Spec{})
	h.create(ann, boxed.Spec{})
	eventually(t, "they arrive", func() bool { return live.Load() == 2 })
	cancel()
	wantCode(t, "the end", <-done, boxed.CodeCanceled)
}

// "Docker down": readyz says so, and new ones are refused with the reason.
func TestAnEngineThatIsDownIsSaid(t *testing.T) {
	var ahead atomic.Int64
	h := newHost(t, func(c *node.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	s := h.create(ann, boxed.Spec{})
	h.driver.SetDown(true)
	ahead.Add(int64(time.Minute))
	if problems := h.Ready(ann); len(problems) == 0 || !strings.Contains(problems[0], "start it") {
		t.Errorf("%q", problems)
	}
	if info, err := h.NodeInfo(ann); err != nil || info.Ready {
		t.Errorf("%+v, %v", info, err)
	}
	_, err := h.Create(ann, boxed.Spec{})
	if err == nil || !strings.Contains(fmt.Sprint(err, boxed.AsError(err).Detail), "start it") {
		t.Errorf("%v, %v", err, boxed.AsError(err).Detail)
	}
	if status, err := h.Exec(ann, s.ID, boxed.ExecRequest{Args: []string{"true"}}); err != nil || status.Code != 0 {
		t.Errorf("%+v, %v", status, err)
	}
	h.driver.SetDown(false)
	ahead.Add(int64(time.Minute))
	h.create(ann, boxed.Spec{})
}
