package egress

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Recorder keeps audit records. Audit is one.
type Recorder interface {
	// Ready is an error while no connection could be recorded.
	Ready() error
	// Allow returns once the record is sure to be kept; nothing opens before that.
	Allow(boxed.EgressRecord) error
	Deny(boxed.EgressRecord)
	End(boxed.EgressRecord)
	Forget(boxed.ID)
}

// Resolver finds the addresses of a name, each time anew.
type Resolver interface {
	Resolve(ctx context.Context, name string) ([]netip.Addr, error)
}

// Config configures a Proxy. Node, Records, Resolver and Judge are required.
type Config struct {
	Node     boxed.NodeID
	Records  Recorder
	Resolver Resolver
	Judge    *Judge
	// Roots are trusted of destinations whose TLS the proxy reads; nil: the system's.
	Roots *x509.CertPool
	// ExtraRoots are PEM certificates that sandboxes trust too.
	ExtraRoots []byte
	Limits     Limits
	Times      Times
	// Ask asks the owner of a sandbox whether a connection may be made; it returns when it
	// was answered or ctx ended. Nil: nobody is asked.
	Ask func(ctx context.Context, q Question) bool
	// Relay connects by way of other nodes. Nil: there are none.
	Relay Relay
	Log   *slog.Logger
	Now   func() time.Time
}

// Question is a connection that nobody has allowed yet.
type Question struct {
	Sandbox boxed.ID
	Owner   string
	Host    string
	Port    uint16
}

// Times bound how long things may take. Zero fields are the default.
type Times struct {
	Dial    time.Duration // of one address, 10 s
	Hello   time.Duration // for a ClientHello or a request's head, 10 s
	Answer  time.Duration // for the head of an answer, 10 min: models think long
	Idle    time.Duration // of a tunnel, 15 min
	Drain   time.Duration // of the side that is left when the other has ended, 60 s
	Stagger time.Duration // between tries of a name's addresses, 250 ms
}

// Defaults fills the zero fields.
func (t Times) Defaults() Times {
	for _, f := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&t.Dial, 10 * time.Second},
		{&t.Hello, 10 * time.Second},
		{&t.Answer, 10 * time.Minute},
		{&t.Idle, 15 * time.Minute},
		{&t.Drain, time.Minute},
		{&t.Stagger, 250 * time.Millisecond},
	} {
		if *f.v == 0 {
			*f.v = f.d
		}
	}
	return t
}

// judgeFunc is [Judge.Judge].
type judgeFunc = func(Host, netip.AddrPort) (boxed.EgressReason, string)

// Proxy serves what leaves the sandboxes of one node. All methods are safe for concurrent
// use.
type Proxy struct {
	cfg    Config
	fronts *fronts
	// What tests, whose world is on loopback, have otherwise.
	judge judgeFunc
	shut  judgeFunc // without openings, for what other nodes ask for
	dial  func(context.Context, *net.Dialer, netip.AddrPort) (net.Conn, error)

	mu       sync.Mutex
	sessions map[boxed.ID]*session
	visits   map[*session]bool         // of other nodes' sandboxes, one for each connection
	foreign  map[boxed.NodeID]*limiter // of what other nodes ask for
	frozen   func(*session) bool       // nil: none
}

// New makes a Proxy. Close ends it.
func New(cfg Config) *Proxy {
	cfg.Times = cfg.Times.Defaults()
	cfg.Limits = cfg.Limits.Defaults()
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{cfg: cfg, judge: cfg.Judge.Judge, shut: cfg.Judge.WithoutOpenings().Judge, dial: dialAddress, sessions: map[boxed.ID]*session{}, visits: map[*session]bool{}}
	p.fronts = newFronts(p)
	return p
}

// Close ends everything that is under way.
func (p *Proxy) Close() {
	p.mu.Lock()
	all := p.allLocked()
	p.sessions = map[boxed.ID]*session{}
	p.mu.Unlock()
	for _, s := range all {
		s.end(boxed.EgressChanged)
	}
	p.fronts.close()
}

// session is one sandbox's egress.
type session struct {
	proxy   *Proxy
	id      boxed.ID
	owner   string
	labels  map[string]string
	limiter *limiter
	ctx     context.Context
	cancel  context.CancelCauseFunc

	mu     sync.Mutex
	policy *Policy
	tokens *placeholders
	ca     *authority // nil: nothing is intercepted
	canary string     // a name that its own agent asks for
	// heldHere: requests come from the node that has ended the sandbox's TLS.
	heldHere bool
	live     map[*flow]bool
	// remake makes the policy of another node's sandbox anew, under the Keeper's lock. Nil:
	// it is one of this node.
	remake func() (*Policy, []*Binding, error)
}

func (p *Proxy) newSession(id boxed.ID, owner string, l *limiter) *session {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &session{
		proxy: p, id: id, owner: owner, limiter: l, ctx: ctx, cancel: cancel, live: map[*flow]bool{}, tokens: newPlaceholders(nil),
	}
}

// Session is what a sandbox's egress is made of.
type Session struct {
	Sandbox  boxed.ID
	Owner    string
	Labels   map[string]string
	Policy   *Policy
	Bindings []*Binding
	CA       *Authority // nil: nothing is intercepted
	Canary   string     // a name that the sandbox's own agent asks for, which is not recorded
}

// Attach lets a sandbox out, or changes what it may reach: connections that are no longer
// allowed end.
func (p *Proxy) Attach(a Session) {
	p.mu.Lock()
	s := p.sessions[a.Sandbox]
	if s == nil {
		s = p.newSession(a.Sandbox, a.Owner, newLimiter(p.cfg.Limits))
		p.sessions[a.Sandbox] = s
	}
	p.mu.Unlock()
	s.mu.Lock()
	s.owner, s.labels, s.canary = a.Owner, a.Labels, a.Canary
	s.policy, s.tokens = a.Policy, newPlaceholders(a.Bindings)
	if a.CA != nil {
		s.ca = newAuthority(a.CA, p.cfg.Now)
	} else {
		s.ca = nil
	}
	s.mu.Unlock()
	s.rejudge()
}

// Detach shuts a sandbox. It is idempotent.
func (p *Proxy) Detach(id boxed.ID) {
	p.mu.Lock()
	s := p.sessions[id]
	delete(p.sessions, id)
	p.mu.Unlock()
	if s != nil {
		s.end(boxed.EgressChanged)
		p.cfg.Records.Forget(id)
	}
}

// Freeze refuses everything to the sandboxes that which names, and ends what is open; nil
// thaws.
func (p *Proxy) Freeze(which func(id boxed.ID, owner string, labels map[string]string) bool) {
	p.mu.Lock()
	p.frozen = nil
	if which != nil {
		p.frozen = func(s *session) bool { return which(s.who()) }
	}
	all := p.allLocked()
	p.mu.Unlock()
	for _, s := range all {
		s.rejudge()
	}
}

func (p *Proxy) allLocked() []*session {
	return slices.AppendSeq(slices.Collect(maps.Values(p.sessions)), maps.Keys(p.visits))
}

// Policy is that of a sandbox, nil if it has none.
func (p *Proxy) Policy(id boxed.ID) *Policy {
	if s := p.session(id); s != nil {
		policy, _, _ := s.now()
		return policy
	}
	return nil
}

func (p *Proxy) session(id boxed.ID) *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sessions[id]
}

func (p *Proxy) isFrozen(s *session) bool {
	p.mu.Lock()
	frozen := p.frozen
	p.mu.Unlock()
	return frozen != nil && frozen(s)
}

// isCanary finds the name by which the sandbox's own agent looks whether what is denied is:
// whatever the policy says of it.
func (s *session) isCanary(host Host) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.canary != "" && host.String() == s.canary
}

// now is what is in force.
func (s *session) now() (*Policy, *placeholders, *authority) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy, s.tokens, s.ca
}

// who is whose it is.
func (s *session) who() (id boxed.ID, owner string, labels map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id, s.owner, s.labels
}

func (s *session) end(why boxed.EgressReason) { s.cancel(&refusal{Reason: why}) }

// rejudge ends the connections that are no longer allowed. EP3: OpenShell#1118.
func (s *session) rejudge() {
	s.mu.Lock()
	live := slices.Collect(maps.Keys(s.live))
	s.mu.Unlock()
	for _, f := range live {
		if f.dec.revoked() {
			f.stop(refuse(boxed.EgressRevoked, "a secret that it may use was revoked"))
		} else if r := s.outdated(f); r != nil {
			f.stop(r)
		} else {
			s.rejudgeRequests(f)
		}
	}
}

// rejudgeRequests ends the requests of a flow that are no longer allowed: a stream may go on
// for days.
func (s *session) rejudgeRequests(f *flow) {
	policy, _, _ := s.now()
	dec := policy.Decide(f.host, f.port)
	s.mu.Lock()
	running := slices.Collect(maps.Keys(f.running))
	s.mu.Unlock()
	for _, q := range running {
		if !q.still(dec) {
			q.end(refuse(boxed.EgressChanged, "the policy has changed"))
		}
	}
}

// outdated is why a flow would not be opened any more, nil if it would.
func (s *session) outdated(f *flow) *refusal {
	policy, _, ca := s.now()
	d := policy.Decide(f.host, f.port)
	switch {
	case s.proxy.isFrozen(s):
		return &refusal{Reason: boxed.EgressFrozen}
	case !d.Allowed(), d.Mode() != f.mode, d.Mode() == boxed.EgressIntercept && ca == nil && !s.heldHere,
		f.dec.Rules[0].Raw && !d.Rules[0].Raw, f.dec.Rules[0].AllowECH && !d.Rules[0].AllowECH,
		s.leavesBy(policy, d) != f.rec.Exit: // what was said to one node is not for another
		return refuse(boxed.EgressChanged, "the policy has changed")
	}
	return nil
}

// revoked reports whether a rule's secret has no value any more.
func (d Decision) revoked() bool {
	return slices.ContainsFunc(d.Rules, func(r *Rule) bool {
		if r.Binding == nil {
			return false
		}
		if r.Binding.gone != nil && r.Binding.gone() {
			return true
		}
		if r.Binding.HeldBy != "" {
			return false
		}
		_, ok := r.Binding.value()
		return !ok
	})
}

// refusal is why something is not done.
type refusal struct {
	Reason boxed.EgressReason
	Detail string // for a person
	Rule   string
	Status int // of HTTP; 0: the reason's
}

func (r *refusal) status() int {
	if r.Status != 0 {
		return r.Status
	}
	return statusOf(r.Reason)
}

func (r *refusal) Error() string {
	if r.Detail != "" {
		return string(r.Reason) + ": " + r.Detail
	}
	return string(r.Reason)
}

func refuse(reason boxed.EgressReason, format string, args ...any) *refusal {
	return &refusal{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// asRefusal is why err came to be.
func asRefusal(err error, otherwise boxed.EgressReason) *refusal {
	var r *refusal
	if errors.As(err, &r) {
		return r
	}
	return refuse(otherwise, "%v", err)
}

// Resolve answers a DNS query of a sandbox. Nothing is looked up outside.
func (p *Proxy) Resolve(id boxed.ID, intent boxed.EgressIntent) (code int, ports []uint16) {
	const noName, refused, failed = 3, 5, 2
	s := p.session(id)
	if s == nil {
		return refused, nil
	}
	if !s.limiter.query() {
		s.deny(boxed.EntryDNS, "", 0, refuse(boxed.EgressTooFast, "more than %g look-ups per second", s.limiter.limits.Queries))
		return refused, nil
	}
	switch intent.Type {
	case 249, 250, 251, 252, 253, 254, 255, 41: // TKEY, TSIG, IXFR, AXFR, MAILB, MAILA, ANY, OPT
		s.deny(boxed.EntryDNS, intent.Host, 0, refuse(boxed.EgressBadQuery, "type %d", intent.Type))
		return refused, nil
	}
	host, err := ParseHost(intent.Host)
	if err != nil || host.IsAddr() {
		s.deny(boxed.EntryDNS, intent.Host, 0, refuse(boxed.EgressInvalidName, "%v", err))
		return noName, nil
	}
	policy, _, _ := s.now()
	d := policy.Known(host)
	switch {
	case s.isCanary(host):
		return noName, nil
	case p.isFrozen(s):
		s.deny(boxed.EntryDNS, host.String(), 0, refuse(boxed.EgressFrozen, ""))
		return noName, nil
	case intent.Full:
		s.deny(boxed.EntryDNS, host.String(), 0, refuse(boxed.EgressNames, "the sandbox has asked for as many names as it may"))
		return failed, nil
	case d.Reason == boxed.EgressNotListed && policy.OnDeny == boxed.DenyAsk:
		return 0, []uint16{443, 80} // the connection is what is asked about
	case !d.Allowed():
		s.deny(boxed.EntryDNS, host.String(), 0, &refusal{Reason: d.Reason, Rule: d.Rule})
		return noName, nil
	}
	return 0, d.Ports
}

// Conn is a sandbox's end of a connection.
type Conn = boxed.EgressConn

// Serve serves a connection of a sandbox, and returns when it has ended. opened is called
// for an entry that must be told whether anybody is there, before any byte.
func (p *Proxy) Serve(ctx context.Context, id boxed.ID, intent boxed.EgressIntent, conn Conn, opened func(error) error) {
	s := p.session(id)
	if s == nil { // not yet, or no more: it is told so, and gets no further
		s = p.newSession(id, "", newLimiter(p.cfg.Limits))
		defer s.cancel(nil)
	}
	stop := context.AfterFunc(s.ctx, func() { conn.Close() })
	defer stop()
	switch intent.Entry {
	case boxed.EntryHTTP:
		p.fronts.serveProxy(s, conn)
	case boxed.EntrySOCKS5:
		s.serveSOCKS(ctx, conn)
	case boxed.EntryName:
		s.serveName(ctx, intent, conn, opened)
	}
}

// serveName serves a connection to a synthetic address.
func (s *session) serveName(ctx context.Context, intent boxed.EgressIntent, conn Conn, opened func(error) error) {
	host, err := ParseHost(intent.Host)
	if err != nil {
		opened(s.deny(boxed.EntryName, intent.Host, intent.Port, refuse(boxed.EgressInvalidName, "%v", err)))
		return
	}
	f, r := s.open(ctx, boxed.EntryName, host, intent.Port)
	if r != nil {
		opened(r)
		return
	}
	defer f.close()
	upstream, r := f.reach(ctx)
	if r != nil {
		opened(f.deny(r))
		return
	}
	if err := opened(nil); err != nil {
		upstream.Close()
		return
	}
	f.carry(conn, nil, upstream)
}

// statusOf is the HTTP status of a refusal.
func statusOf(r boxed.EgressReason) int {
	switch r {
	case boxed.EgressInvalidName, boxed.EgressInvalidRequest, boxed.EgressUpgrade:
		return http.StatusBadRequest
	case boxed.EgressHost:
		return http.StatusMisdirectedRequest
	case boxed.EgressTooMany, boxed.EgressTooFast, boxed.EgressTooMuch:
		return http.StatusTooManyRequests
	case boxed.EgressNoAddress, boxed.EgressResolveFailed, boxed.EgressConnectFailed, boxed.EgressUpstreamTLS, boxed.EgressTruncated:
		return http.StatusBadGateway
	case boxed.EgressAuditFull, boxed.EgressExitAway, boxed.EgressHolderAway, boxed.EgressNoCredential:
		return http.StatusServiceUnavailable
	}
	return http.StatusForbidden
}
