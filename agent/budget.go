package agent

import (
	"net"
	"sync"
	"sync/atomic"
)

// streamFloor is how many streams every guest's host may have open whatever
// others have: nobody's hoard keeps an exec elsewhere from starting.
const streamFloor = 8

// Budget bounds what all hosts of a process hold for their guests beyond the
// floor of each: a stream that a guest fills and nobody reads holds muxWindow
// bytes, and a guest may have hostStreams of them.
type Budget struct{ left atomic.Int64 }

// NewBudget makes a budget of so many streams.
func NewBudget(streams int) *Budget {
	b := &Budget{}
	b.left.Store(int64(streams))
	return b
}

// Left is how many streams are still to be had.
func (b *Budget) Left() int { return int(b.left.Load()) }

func (b *Budget) take() bool {
	if b.left.Add(-1) < 0 {
		b.left.Add(1)
		return false
	}
	return true
}

// budgeted is a stream that gives back what it took.
type budgeted struct {
	net.Conn
	budget *Budget
	once   sync.Once
}

func (s *budgeted) Close() error {
	s.once.Do(func() { s.budget.left.Add(1) })
	return s.Conn.Close()
}
