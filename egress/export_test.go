package egress

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/boxed-mesh/boxed"
)

// What tests need.
type (
	JudgeFunc = func(Host, netip.AddrPort) (boxed.EgressReason, string)
	DialFunc  = func(context.Context, *net.Dialer, netip.AddrPort) (net.Conn, error)
)

const (
	MaxPlainHosts = maxPlainHosts
	LeafLife      = leafLife
	MinScan       = minScan
)

// SetWorld puts the world where a test has it. It is called before anything is served.
func (p *Proxy) SetWorld(judge func(JudgeFunc) JudgeFunc, dial DialFunc) {
	p.judge, p.shut, p.dial = judge(p.judge), judge(p.shut), dial
}

// LiveFlows is how many connections of a sandbox were allowed and have not ended.
func (p *Proxy) LiveFlows(id boxed.ID) int {
	s := p.session(id)
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live)
}

// Places is how many places for connections of a sandbox are taken.
func (p *Proxy) Places(id boxed.ID) int {
	l := p.session(id).limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// Expire ends what was allowed for a time.
func (k *Keeper) Expire() { k.expire() }

// NewPolicy compiles rules and deny lists as a profile has them.
func NewPolicy(rules []boxed.EgressRule, deny, hostDeny []string) (*Policy, error) {
	compiled, err := compileRules(rules, "")
	if err != nil {
		return nil, err
	}
	if err := order(compiled); err != nil {
		return nil, err
	}
	p := &Policy{Generation: 1, rules: compiled}
	for list, texts := range map[*[]Pattern][]string{&p.deny: deny, &p.hostDeny: hostDeny} {
		for _, text := range texts {
			pattern, err := ParsePattern(text)
			if err != nil {
				return nil, err
			}
			*list = append(*list, pattern)
		}
	}
	return p, nil
}

// Leaf is what the authority shows for a host at a time.
func (a *Authority) Leaf(host string, now time.Time) (*tls.Certificate, error) {
	return newAuthority(a, func() time.Time { return now }).leaf(host)
}

// Forms and Hits are of what is looked for in headers.
func Forms(text string) []string { return forms(text) }

func Hits(secret, text string) bool { return newScanner(secret).hits(text) }

// Scrub takes out of an answer's header what a sandbox must not have.
func Scrub(h http.Header, real string) bool { return scrub(h, newScanner(real)) }

func HoldsCredential(name string) bool { return holdsCredential(name) }

func PathMatches(rule, path string) bool { return pathMatches(rule, path) }

// Visits is how many connections of other nodes' sandboxes there are.
func (p *Proxy) Visits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.visits)
}
