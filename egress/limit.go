package egress

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/boxed-mesh/boxed"
)

// Limits bound what one sandbox does. Zero fields are the default; a negative one is no
// bound.
type Limits struct {
	Connections int     // at once, 256
	Dials       float64 // connections per second, 500
	Requests    float64 // that the proxy reads, per second, 500
	Queries     float64 // of DNS, per second, 500
	UpRate      int64   // bytes per second out of the sandbox, no bound
	DownRate    int64
	UpTotal     int64 // bytes in its life, no bound
	DownTotal   int64
}

// Defaults fills the zero fields.
func (l Limits) Defaults() Limits {
	if l.Connections == 0 {
		l.Connections = 256
	}
	for _, f := range []*float64{&l.Dials, &l.Requests, &l.Queries} {
		if *f == 0 {
			*f = 500
		}
	}
	return l
}

// limiter counts what one sandbox does.
type limiter struct {
	limits                   Limits
	dials, requests, queries *rate.Limiter
	upRate, downRate         *rate.Limiter
	// Of another node: connections that it asks for, and those for nothing here, which are
	// recorded.
	visits, strays *rate.Limiter
	up, down       atomic.Int64

	mu                    sync.Mutex
	open, running, signed int
}

// rateBurst is how many bytes may pass at once where a rate is set: what is read at once.
const rateBurst = 256 << 10

func newLimiter(l Limits) *limiter {
	perSecond := func(n float64) *rate.Limiter {
		if n < 0 {
			return rate.NewLimiter(rate.Inf, 0)
		}
		return rate.NewLimiter(rate.Limit(n), max(1, int(2*n)))
	}
	bytes := func(n int64) *rate.Limiter {
		if n <= 0 {
			return nil
		}
		return rate.NewLimiter(rate.Limit(n), rateBurst)
	}
	return &limiter{
		limits: l, dials: perSecond(l.Dials), requests: perSecond(l.Requests), queries: perSecond(l.Queries),
		upRate: bytes(l.UpRate), downRate: bytes(l.DownRate), visits: perSecond(visitRate), strays: rate.NewLimiter(auditRate, auditBurst),
	}
}

// connection takes a place for one; done gives it back, once.
func (l *limiter) connection() (done func(), r *refusal) {
	if !l.dials.Allow() {
		return nil, refuse(boxed.EgressTooFast, "more than %g connections per second", l.limits.Dials)
	}
	if !l.take(&l.open, l.limits.Connections) {
		return nil, refuse(boxed.EgressTooMany, "%d connections at once, as many as one sandbox may have", l.limits.Connections)
	}
	return l.giveBack(&l.open), nil
}

// requestsPerConnection is how many requests may be under way at once for each connection
// that may: HTTP/2 has many on one, and each holds memory.
const requestsPerConnection = 2

// request takes a place for one that the proxy reads; done gives it back, once.
func (l *limiter) request() (done func(), r *refusal) {
	if !l.requests.Allow() {
		return nil, refuse(boxed.EgressTooFast, "more than %g requests per second", l.limits.Requests)
	}
	most := requestsPerConnection * l.limits.Connections
	if !l.take(&l.running, most) {
		return nil, refuse(boxed.EgressTooMany, "%d requests at once, as many as one sandbox may have", most)
	}
	return l.giveBack(&l.running), nil
}

// maxSigning is how many bodies of one sandbox are held at once to be signed.
const maxSigning = 4

// sign takes a place for one; done gives it back, once.
func (l *limiter) sign() (done func(), r *refusal) {
	if !l.take(&l.signed, maxSigning) {
		return nil, refuse(boxed.EgressTooMany, "%d bodies are being signed already; have the client say their hashes", maxSigning)
	}
	return l.giveBack(&l.signed), nil
}

// take counts one more of at most most; 0 or less is no bound.
func (l *limiter) take(n *int, most int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if most > 0 && *n >= most {
		return false
	}
	*n++
	return true
}

func (l *limiter) giveBack(n *int) func() {
	return sync.OnceFunc(func() {
		l.mu.Lock()
		*n--
		l.mu.Unlock()
	})
}

func (l *limiter) query() bool { return l.queries.Allow() }

// passed counts bytes, and slows down or refuses those that are too many.
func (l *limiter) passed(ctx context.Context, up bool, n int) error {
	total, most, limit := &l.down, l.limits.DownTotal, l.downRate
	if up {
		total, most, limit = &l.up, l.limits.UpTotal, l.upRate
	}
	if sum := total.Add(int64(n)); most > 0 && sum > most {
		return refuse(boxed.EgressTooMuch, "more than the %d bytes that the sandbox may send or receive", most)
	}
	if limit != nil {
		return limit.WaitN(ctx, min(n, rateBurst))
	}
	return nil
}
