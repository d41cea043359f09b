package boxedtest_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/boxedtest"
)

// How long the random test goes on, and its seed, unless BOXED_RANDOM says
// otherwise, like "5m 42".
const (
	randomFor  = 20 * time.Second
	callLimit  = 20 * time.Second // of each call
	callExcess = 10 * time.Second // what it may take beyond that on a busy machine
)

// ledger is what callers were told.
type ledger struct {
	mu        sync.Mutex
	running   map[boxed.ID]string // acknowledged, and not asked to end; by idempotency key
	ending    map[boxed.ID]bool   // asked to end, outcome unknown or good
	byKey     map[string]boxed.ID
	calls     atomic.Int64
	failed    atomic.Int64
	violation atomic.Pointer[string]
}

func (l *ledger) violate(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.violation.CompareAndSwap(nil, &text)
}

// timed runs a call and notes if it does not return when its context has ended.
func (l *ledger) timed(what string, call func(context.Context) error, as context.Context) error {
	ctx, cancel := context.WithTimeout(as, callLimit)
	defer cancel()
	start := time.Now()
	err := call(ctx)
	if took := time.Since(start); took > callLimit+callExcess {
		l.violate("%s took %v, and its deadline was %v", what, took, callLimit)
	}
	l.calls.Add(1)
	if err != nil {
		l.failed.Add(1)
	}
	return err
}

// Nodes are killed, cut off and restarted at random while callers make, use and end
// sandboxes through any node. No sandbox that was acknowledged disappears while its
// host lives, none runs twice, no stray container remains, and no call hangs past
// its deadline.
func TestNothingIsLostWhileNodesComeAndGo(t *testing.T) {
	last, seed := randomFor, uint64(time.Now().UnixNano())
	if text := os.Getenv("BOXED_RANDOM"); text != "" {
		var d string
		if n, err := fmt.Sscan(text, &d, &seed); n < 1 && err != nil {
			t.Fatalf("BOXED_RANDOM=%q is not like \"5m 42\"", text)
		}
		var err error
		if last, err = time.ParseDuration(d); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("BOXED_RANDOM=%q", fmt.Sprint(last, " ", seed))
	rnd := rand.New(rand.NewPCG(seed, 0))
	c := boxedtest.New(t, 5)
	ann := c.As("ann")
	l := &ledger{running: map[boxed.ID]string{}, ending: map[boxed.ID]bool{}, byKey: map[string]boxed.ID{}}
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for i := range 6 {
		seed := rnd.Uint64()
		callers.Go(func() { caller(c, ann, l, i, rand.New(rand.NewPCG(seed, 1)), stop) })
	}
	faults := map[string]int{}
	for end := time.Now().Add(last); time.Now().Before(end) && l.violation.Load() == nil; {
		faults[fault(c, rnd)]++
	}
	c.Heal()
	for _, n := range c.Nodes {
		if n != nil && !contains(c.Running(), n) {
			c.Restart(n)
		}
	}
	close(stop)
	callers.Wait()
	if v := l.violation.Load(); v != nil {
		t.Fatal(*v)
	}
	c.WaitMesh(c.Nodes...)
	check(t, c, ann, l)
	t.Logf("%d calls, %d of them failed; %v; %d sandboxes are left", l.calls.Load(), l.failed.Load(), faults, len(l.running))
}

func contains(nodes []*boxedtest.Node, n *boxedtest.Node) bool {
	for _, other := range nodes {
		if other == n {
			return true
		}
	}
	return false
}

// fault does one thing to the mesh, and waits a while.
func fault(c *boxedtest.Cluster, rnd *rand.Rand) string {
	pause := func(most time.Duration) { time.Sleep(time.Duration(rnd.Int64N(int64(most)))) }
	n := c.Nodes[rnd.IntN(len(c.Nodes))]
	defer pause(time.Second)
	switch rnd.IntN(4) {
	case 0:
		c.Kill(n)
		pause(4 * time.Second)
		c.Restart(n)
		return "killed"
	case 1:
		c.Stop(n)
		pause(2 * time.Second)
		c.Restart(n)
		return "stopped"
	case 2:
		at := 1 + rnd.IntN(len(c.Nodes)-1)
		c.Partition(c.Nodes[:at], c.Nodes[at:])
		pause(5 * time.Second)
		c.Heal()
		return "parted"
	}
	c.Hub.Weather(0.1, 5*time.Millisecond)
	pause(3 * time.Second)
	c.Hub.Weather(0, 0)
	return "weather"
}

// caller makes, uses and ends sandboxes until stop.
func caller(c *boxedtest.Cluster, ann context.Context, l *ledger, number int, rnd *rand.Rand, stop <-chan struct{}) {
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		default:
		}
		running := c.Running()
		by := running[rnd.IntN(len(running))]
		switch id := l.some(rnd); {
		case id == "" || rnd.IntN(3) == 0:
			create(c, ann, l, by, fmt.Sprintf("%d-%d", number, i), rnd)
		case rnd.IntN(4) == 0:
			l.mu.Lock()
			delete(l.running, id)
			l.ending[id] = true
			l.mu.Unlock()
			l.timed("destroy", func(ctx context.Context) error { return by.Destroy(ctx, id) }, ann)
		default:
			var out bytes.Buffer
			err := l.timed("exec", func(ctx context.Context) error {
				status, err := by.Exec(ctx, id, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader("x"), Stdout: &out})
				if err == nil && (status.Code != 0 || out.String() != "x") && status.Reason != boxed.ReasonLost && status.Reason != boxed.ReasonCanceled {
					l.violate("exec in %s ended with %+v and wrote %q", id, status, out.String())
				}
				return err
			}, ann)
			if code := boxed.CodeOf(err); code == boxed.CodeNotFound || code == boxed.CodeGone {
				l.mu.Lock()
				if _, still := l.running[id]; still {
					l.violate("%s is %s, through %s: %v", id, code, by.ID, err)
				}
				l.mu.Unlock()
			}
		}
		time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
	}
}

func (l *ledger) some(rnd *rand.Rand) boxed.ID {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.running) == 0 {
		return ""
	}
	skip := rnd.IntN(len(l.running))
	for id := range l.running {
		if skip--; skip < 0 {
			return id
		}
	}
	return ""
}

// create makes a sandbox under a key, and asks again, through another node, when it
// is not known what became of it.
func create(c *boxedtest.Cluster, ann context.Context, l *ledger, by *boxedtest.Node, key string, rnd *rand.Rand) {
	for range 30 {
		var sb *boxed.Sandbox
		err := l.timed("create", func(ctx context.Context) (err error) {
			sb, err = by.Create(ctx, boxed.Spec{IdempotencyKey: key})
			return err
		}, ann)
		if err == nil {
			l.mu.Lock()
			if old, twice := l.byKey[key]; twice && old != sb.ID {
				l.violate("the key %s made %s and %s", key, old, sb.ID)
			}
			l.byKey[key] = sb.ID
			if !sb.State.Ended() {
				l.running[sb.ID] = key
			}
			l.mu.Unlock()
			return
		}
		time.Sleep(time.Duration(100+rnd.IntN(400)) * time.Millisecond)
		running := c.Running()
		by = running[rnd.IntN(len(running))]
	}
}

// check compares what callers were told with what there is.
func check(t *testing.T, c *boxedtest.Cluster, ann context.Context, l *ledger) {
	t.Helper()
	for id := range l.running {
		for _, through := range c.Nodes {
			sb, err := through.Get(ann, id)
			if err != nil || sb.State != boxed.StateRunning {
				t.Errorf("%s, through %s: %+v, %v", id, through.ID, sb, err)
			}
		}
	}
	byKey := map[string]boxed.ID{}
	c.Eventually("no stray container is left", func() bool {
		clear(byKey)
		for _, n := range c.Nodes {
			living := map[boxed.ID]bool{}
			for _, s := range n.Manager.List() {
				if !s.State.Ended() {
					living[s.ID] = true
					if old, twice := byKey[s.IdempotencyKey]; twice {
						t.Fatalf("the key %s runs as %s and as %s", s.IdempotencyKey, old, s.ID)
					}
					byKey[s.IdempotencyKey] = s.ID
				}
			}
			boxes := n.Driver.Boxes()
			if len(boxes) != len(living) {
				return false
			}
			for _, box := range boxes {
				if !living[box.ID] {
					return false
				}
			}
		}
		return true
	})
}
