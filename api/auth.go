package api

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Authenticator knows the API keys.
type Authenticator interface {
	// Authenticate says whose secret it is. Any error is answered with 401
	// unless it is a *boxed.Error with a code of its own. It compares in constant
	// time and may be called with anything a client sends.
	Authenticate(ctx context.Context, secret string) (boxed.Principal, error)
	// Watch returns a channel that is closed when the key (Principal.Key) is
	// revoked or expires, at once if it has been already. The caller calls stop
	// when it no longer cares.
	Watch(keyID string) (ended <-chan struct{}, stop func())
}

// maxSecret bounds what is handed to an Authenticator, in bytes.
const maxSecret = 512

// authenticate finds out who asks. Wrong keys are counted by address.
func (c *call) authenticate() (boxed.Principal, error) {
	secret, ok := c.secret()
	if who, known, err := c.known(ok); known {
		return who, err
	}
	if !ok {
		return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated,
			"this call needs an API key: send Authorization: Bearer boxed_… or X-Boxed-API-Key")
	}
	f := c.s.failures
	proof := f.proof(secret)
	who, err := c.s.cfg.Auth.Authenticate(c.ctx, secret)
	if err == nil { // a right key never waits for what others on its address guess
		f.passed(proof)
		return who, nil
	}
	if _, passedOn := hopOf(c.r); passedOn { // guesses are counted where they come in
		return boxed.Principal{}, &boxed.Error{Code: boxed.CodeUnauthenticated, Message: "the API key is not valid", Err: err}
	}
	if wait := f.wait(c.addr, proof, time.Now()); wait > 0 {
		seconds := int(math.Ceil(wait.Seconds()))
		c.w.Header().Set("Retry-After", strconv.Itoa(seconds))
		return boxed.Principal{}, boxed.Errorf(boxed.CodeRateLimited, "too many wrong API keys from this address; try again in %d s", seconds)
	}
	if code := boxed.CodeOf(err); code != boxed.CodeUnauthenticated && code != boxed.CodeInternal {
		return boxed.Principal{}, err // not the key's fault
	}
	f.failed(c.addr, proof, time.Now())
	return boxed.Principal{}, &boxed.Error{Code: boxed.CodeUnauthenticated, Message: "the API key is not valid", Err: err}
}

// known finds out who asks where no key says so: by the connection, or by the word
// of the node that passed the request on.
func (c *call) known(hasKey bool) (who boxed.Principal, known bool, err error) {
	showsKey := hasKey || len(c.r.Header.Values("Authorization"))+len(c.r.Header.Values("X-Boxed-API-Key")) > 0
	h, passedOn := hopOf(c.r)
	d := doorOf(c.r)
	switch {
	case showsKey: // a wrong one is no reason to fall back on something else
		return who, false, nil
	case passedOn && c.s.cfg.Vouched != nil && c.r.Header.Get("X-Boxed-Assertion") != "":
		who, err = c.s.cfg.Vouched(c.ctx, c.r.Header.Get("X-Boxed-Assertion"), h.peer.Node, c.r.Method, c.r.URL.EscapedPath())
		return who, true, err
	case d != nil && d.identify != nil:
		who, err = d.identify(c.ctx, c.r.RemoteAddr)
		return who, true, err
	}
	return who, false, nil
}

// secret is the key of the request. Two different ones are none.
func (c *call) secret() (string, bool) {
	var found []string
	for _, v := range c.r.Header.Values("Authorization") {
		scheme, token, _ := strings.Cut(v, " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return "", false
		}
		found = append(found, strings.TrimSpace(token))
	}
	found = append(found, c.r.Header.Values("X-Boxed-API-Key")...)
	for _, s := range found {
		if s == "" || len(s) > maxSecret || s != found[0] {
			return "", false
		}
	}
	if len(found) == 0 {
		return "", false
	}
	return found[0], true
}

// failures limits guessing: a token bucket of wrong keys for each address (each
// /64 of IPv6). An address that has used up its tokens waits, but not for a key
// that has been right before: whoever guesses beside you, or one misconfigured
// program on your machine, does not lock you out.
type failures struct {
	burst float64
	every time.Duration // one more guess
	salt  [16]byte

	mu      sync.Mutex
	buckets map[netip.Addr]bucket
	right   map[[32]byte]struct{} // salted hashes of keys that were right
}

type bucket struct {
	tokens float64
	at     time.Time
}

// maxAddresses and maxRight bound the two tables. When one is full, what has
// recovered is forgotten first, and then everything: memory is bounded, and who
// can come from thousands of addresses is not stopped by this in any case.
const (
	maxAddresses = 4096
	maxRight     = 4096
)

func newFailures(burst int) *failures {
	f := &failures{
		burst: float64(burst), every: 3 * time.Second,
		buckets: map[netip.Addr]bucket{}, right: map[[32]byte]struct{}{},
	}
	rand.Read(f.salt[:])
	return f
}

func (f *failures) proof(secret string) [32]byte {
	return sha256.Sum256(append(f.salt[:len(f.salt):len(f.salt)], secret...))
}

// group is what counts as one client.
func group(a netip.Addr) netip.Addr {
	if a.Is6() {
		p, _ := a.Prefix(64)
		return p.Addr()
	}
	return a
}

// wait is how long an address must wait before its next guess; 0: it need not.
func (f *failures) wait(a netip.Addr, proof [32]byte, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.buckets[group(a)]
	if !ok {
		return 0
	}
	if _, right := f.right[proof]; right {
		return 0
	}
	if b = f.refill(b, now); b.tokens >= 1 {
		return 0
	}
	return time.Duration((1 - b.tokens) * float64(f.every))
}

func (f *failures) refill(b bucket, now time.Time) bucket {
	b.tokens = min(f.burst, b.tokens+float64(now.Sub(b.at))/float64(f.every))
	b.at = now
	return b
}

func (f *failures) failed(a netip.Addr, proof [32]byte, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.right, proof) // revoked since
	a = group(a)
	b, ok := f.buckets[a]
	if !ok {
		if len(f.buckets) >= maxAddresses {
			f.forgetLocked(now)
		}
		b = bucket{tokens: f.burst, at: now}
	}
	b = f.refill(b, now)
	b.tokens = max(0, b.tokens-1)
	f.buckets[a] = b
}

func (f *failures) forgetLocked(now time.Time) {
	for a, b := range f.buckets {
		if f.refill(b, now).tokens >= f.burst {
			delete(f.buckets, a)
		}
	}
	if len(f.buckets) >= maxAddresses {
		clear(f.buckets)
	}
}

func (f *failures) passed(proof [32]byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.right[proof]; ok {
		return
	}
	if len(f.right) >= maxRight {
		clear(f.right)
	}
	f.right[proof] = struct{}{}
}
