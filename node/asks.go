package node

import (
	"context"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// maxAsks is how many questions of one sandbox wait at once; more are refused unasked.
const maxAsks = 16

// Asks are questions about connections that wait for their owner. The stream of events has
// them, and whoever may see the sandbox answers.
type Asks struct {
	Emit func(boxed.Event)
	Now  func() time.Time
	Node boxed.NodeID

	mu   sync.Mutex
	open map[string]*question
}

// question is one of them. Connections of a sandbox to the same host share it.
type question struct {
	id      string
	asked   egress.Question
	waiting int
	done    chan struct{}
	allowed bool
	once    sync.Once
}

// name is what would be allowed.
func (q *question) name() string {
	if q.asked.Port == 443 {
		return q.asked.Host
	}
	return net.JoinHostPort(q.asked.Host, strconv.Itoa(int(q.asked.Port)))
}

func (q *question) answer(allow bool) {
	q.once.Do(func() {
		q.allowed = allow
		close(q.done)
	})
}

// Ask asks, and returns when somebody has answered or ctx has ended.
func (a *Asks) Ask(ctx context.Context, asked egress.Question) bool {
	q, fresh := a.begin(asked)
	if q == nil {
		return false
	}
	if fresh {
		a.emit(boxed.EventEgressAsk, q, "")
	}
	defer a.leave(q)
	select {
	case <-q.done:
		return q.allowed
	case <-ctx.Done():
		return false
	}
}

// begin finds the question, or makes it.
func (a *Asks) begin(asked egress.Question) (q *question, fresh bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := 0
	for _, q := range a.open {
		if q.asked == asked {
			q.waiting++
			return q, false
		}
		if q.asked.Sandbox == asked.Sandbox {
			mine++
		}
	}
	if mine >= maxAsks {
		return nil, false
	}
	if a.open == nil {
		a.open = map[string]*question{}
	}
	q = &question{id: boxed.NewToken(10), asked: asked, waiting: 1, done: make(chan struct{})}
	a.open[q.id] = q
	return q, true
}

// leave forgets a question that nobody waits for.
func (a *Asks) leave(q *question) {
	a.mu.Lock()
	q.waiting--
	last := q.waiting == 0
	if last {
		delete(a.open, q.id)
	}
	a.mu.Unlock()
	if !last {
		return
	}
	said := "nobody answered"
	select {
	case <-q.done:
		if said = "refused"; q.allowed {
			said = "allowed"
		}
	default:
	}
	a.emit(boxed.EventEgressEnd, q, said)
}

func (a *Asks) emit(t boxed.EventType, q *question, reason string) {
	a.Emit(boxed.Event{
		Type: t, At: a.Now(), Node: a.Node, Sandbox: q.asked.Sandbox, Owner: q.asked.Owner,
		Message: q.name(), Question: q.id, Reason: reason,
	})
}

// take finds a question of a sandbox, to be answered.
func (a *Asks) take(id boxed.ID, ref string) (*question, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := a.open[ref]
	if q == nil || q.asked.Sandbox != id {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no such question; a connection waits for %s at most", boxed.EgressAskLimit).WithField("question")
	}
	return q, nil
}
