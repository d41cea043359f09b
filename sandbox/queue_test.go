package sandbox_test

import (
	"context"
	"slices"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// crowd is creates that are held at the engine, one after the other.
type crowd struct {
	*rig
	start chan struct{} // lets one of them be made
	made  chan error
}

// newCrowd begins n creates, of which one at a time is made, and waits until the
// others queue.
func newCrowd(t *testing.T, n int) *crowd {
	t.Helper()
	c := &crowd{rig: started(t, func(c *sandbox.Config) { c.Making = 1 }), start: make(chan struct{}, n), made: make(chan error, n)}
	c.driver.Fail(sandboxtest.Start, func(ctx context.Context, _ string) error {
		select {
		case <-c.start:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	for i := range n {
		go func() {
			_, err := c.Create(context.Background(), "ann", c.spec(), func(sandbox.Admission) error { return nil })
			c.made <- err
		}()
		c.eventually("it queues", func() bool { return len(c.places()) == i })
	}
	return c
}

// places are those of the sandboxes that wait, the next one's first.
func (c *crowd) places() (places []int) {
	for _, s := range c.List() {
		if s.QueuePlace > 0 {
			places = append(places, s.QueuePlace)
		}
	}
	slices.Sort(places)
	return places
}

func (c *crowd) at(place int) boxed.ID {
	for _, s := range c.List() {
		if s.QueuePlace == place {
			return s.ID
		}
	}
	c.t.Fatalf("nobody stands at %d", place)
	return ""
}

func (c *crowd) finish(n int) {
	c.t.Helper()
	for range n {
		c.start <- struct{}{}
		if err := <-c.made; err != nil {
			c.t.Error(err)
		}
	}
}

func TestCreatesQueueAndAreToldTheirPlace(t *testing.T) {
	c := newCrowd(t, 4)
	if got := c.places(); !slices.Equal(got, []int{1, 2, 3}) {
		t.Fatalf("places %v", got)
	}
	third := c.at(3)
	var told []int
	c.mu.Lock()
	for _, e := range c.events {
		if e.Type == boxed.EventQueued {
			told = append(told, e.QueuePlace)
		}
	}
	c.mu.Unlock()
	if !slices.Equal(told, []int{1, 2, 3}) {
		t.Errorf("told %v", told)
	}
	c.finish(1)
	c.eventually("everybody moves up", func() bool { return c.get(third).QueuePlace == 2 })
	c.finish(3)
	if s := c.get(third); s.State != boxed.StateRunning || s.QueuePlace != 0 {
		t.Errorf("%s at %d", s.State, s.QueuePlace)
	}
}

func TestWhoIsDestroyedWhileItQueuesHoldsNobodyUp(t *testing.T) {
	c := newCrowd(t, 3)
	if err := c.Destroy(t.Context(), c.at(1)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-c.made, boxed.CodeGone)
	if got := c.places(); !slices.Equal(got, []int{1}) {
		t.Errorf("places %v", got)
	}
	c.finish(2)
}

func TestWhoLeavesTheQueueGivesTheTurnOn(t *testing.T) {
	c := newCrowd(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := c.Create(ctx, "ann", c.spec(), func(sandbox.Admission) error { return nil })
		left <- err
	}()
	c.eventually("it queues", func() bool { return len(c.places()) == 1 })
	cancel()
	if err := <-left; err == nil {
		t.Error("made without a turn")
	}
	c.finish(1)
	c.driver.Fail(sandboxtest.Start, nil)
	c.create()
}
