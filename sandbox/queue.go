package sandbox

import (
	"context"
	"slices"
	"sync"

	"github.com/boxed-mesh/boxed"
)

// queue lets a few creates that found no warm sandbox work at once, in the order
// in which they came. An engine that is asked for a hundred containers at once
// makes none of them sooner, and some not in time.
type queue struct {
	mu      sync.Mutex
	free    int
	waiting []*waiter
}

type waiter struct {
	id    boxed.ID
	ready chan struct{} // closed when its turn has come
}

// enter waits for the caller's turn; leave must follow. told is called once if
// there is a wait, with the caller's place: 1 is next.
func (q *queue) enter(ctx context.Context, id boxed.ID, told func(place int)) error {
	q.mu.Lock()
	if q.free > 0 {
		q.free--
		q.mu.Unlock()
		return nil
	}
	w := &waiter{id, make(chan struct{})}
	q.waiting = append(q.waiting, w)
	place := len(q.waiting)
	q.mu.Unlock()
	told(place)
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	at := slices.Index(q.waiting, w)
	if at >= 0 {
		q.waiting = slices.Delete(q.waiting, at, at+1)
	}
	q.mu.Unlock()
	if at < 0 { // its turn came in the same breath
		q.leave()
	}
	return ctx.Err()
}

// leave lets the next one work.
func (q *queue) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.free++
		return
	}
	close(q.waiting[0].ready)
	q.waiting = slices.Delete(q.waiting, 0, 1)
}

// place is where a sandbox stands, 1 for the next, or 0 if it does not wait.
func (q *queue) place(id boxed.ID) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return 1 + slices.IndexFunc(q.waiting, func(w *waiter) bool { return w.id == id })
}

// busy reports whether anybody waits.
func (q *queue) busy() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) > 0
}
