package scheduler_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/scheduler"
)

// applied is what a Ledger adds to node a, whose summary was made at told.
func applied(l *scheduler.Ledger, a scheduler.Ask, told, now time.Time) scheduler.NodeState {
	n := node("a", used(gib, 1, 1), func(n *scheduler.NodeState) { n.Warm = 4 })
	l.Apply(&n, a, told, now)
	return n
}

func TestALedgerCountsWhatTheSummaryCannotKnow(t *testing.T) {
	var l scheduler.Ledger
	a := ask(2*gib, 0.1)
	a.Image = "python"
	other := ask(gib, 0.2)
	l.Placed("a", a, noon)
	l.Placed("a", other, noon)
	l.Placed("b", a, noon)
	n := applied(&l, a, noon.Add(time.Second), noon.Add(time.Second))
	if want := (boxed.Capacity{MemoryBytes: 3 * gib, CPUs: 0.3, Sandboxes: 2}); n.Recent != want {
		t.Errorf("lately %+v, want %+v", n.Recent, want)
	}
	if want := (boxed.Capacity{MemoryBytes: 4 * gib, CPUs: 1.3, Sandboxes: 3}); n.Used != want {
		t.Errorf("used %+v, want %+v", n.Used, want)
	}
	if n.Warm != 3 {
		t.Errorf("%d warm, want 3: the other ask claims another kind", n.Warm)
	}
}

func TestALedgerForgets(t *testing.T) {
	at := func(s float64) time.Time { return noon.Add(time.Duration(s * float64(time.Second))) }
	theirs := func(s float64) time.Time { return at(s - 3600) } // their clock is an hour behind
	for name, tc := range map[string]struct {
		admitted *time.Time
		told     time.Time
		now      time.Time
		want     int
	}{
		"not before an answer":            {nil, theirs(5), at(5), 1},
		"after a while without an answer": {nil, theirs(0), at(10), 0},
		"nor before the while is over":    {nil, theirs(0), at(9.9), 1},
		"by a summary made later":         {new(theirs(1)), theirs(1.5), at(2), 0},
		"not by one made before":          {new(theirs(1)), theirs(0.5), at(2), 1},
		"not by one that may be either":   {new(theirs(1)), theirs(1), at(2), 1},
		"after a while without a summary": {new(theirs(1)), theirs(0), at(10), 0},
		"when the clock is set back":      {nil, theirs(0), at(-60), 0},
	} {
		t.Run(name, func(t *testing.T) {
			var l scheduler.Ledger
			p := l.Placed("a", ask(gib, 1), noon)
			if tc.admitted != nil {
				l.Admitted(p, *tc.admitted)
			}
			if n := applied(&l, ask(gib, 1), tc.told, tc.now); n.Recent.Sandboxes != tc.want {
				t.Errorf("it counts %d, want %d", n.Recent.Sandboxes, tc.want)
			}
		})
	}
}

func TestALedgerForgetsWhatWasRefused(t *testing.T) {
	var l scheduler.Ledger
	p, q := l.Placed("a", ask(gib, 1), noon), l.Placed("a", ask(2*gib, 1), noon)
	l.Withdraw(p)
	l.Withdraw(p)
	l.Withdraw(scheduler.Placement{})
	if n := applied(&l, ask(gib, 1), noon, noon); n.Recent.MemoryBytes != 2*gib {
		t.Errorf("it counts %+v", n.Recent)
	}
	l.Withdraw(q)
	if diff := cmp.Diff(node("a", used(gib, 1, 1), func(n *scheduler.NodeState) { n.Warm = 4 }), applied(&l, ask(gib, 1), noon, noon)); diff != "" {
		t.Error(diff)
	}
}

func TestALedgerIsBounded(t *testing.T) {
	var l scheduler.Ledger
	for i := range scheduler.LedgerHolds + 100 {
		l.Placed(realID(1, i%50), ask(1, 0.01), noon)
	}
	held := func(now time.Time) (n int) {
		for i := range 50 {
			s := node(string(realID(1, i)))
			l.Apply(&s, ask(1, 1), noon, now)
			n += s.Recent.Sandboxes
		}
		return n
	}
	if n := held(noon); n != scheduler.LedgerHolds {
		t.Errorf("it holds %d", n)
	}
	later := noon.Add(scheduler.LedgerKeeps)
	l.Admitted(l.Placed("a", ask(1, 1), later), later) // full still, of what is long ago: that gives way
	if n := applied(&l, ask(1, 1), noon, later); n.Recent.Sandboxes != 1 {
		t.Errorf("it counts %d of the last", n.Recent.Sandboxes)
	}
	if n := held(later); n != 0 {
		t.Errorf("it still holds %d", n)
	}
}

func TestALedgerServesManyAtOnce(t *testing.T) {
	var l scheduler.Ledger
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				p := l.Placed("a", ask(gib, 1), noon)
				applied(&l, ask(gib, 1), noon, noon)
				l.Admitted(p, noon)
				l.Withdraw(p)
			}
		})
	}
	all.Wait()
	if n := applied(&l, ask(gib, 1), noon, noon); n.Recent != (boxed.Capacity{}) {
		t.Errorf("it counts %+v", n.Recent)
	}
}
