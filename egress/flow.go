package egress

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
)

// flow is one connection that was allowed.
type flow struct {
	s     *session
	host  Host
	port  uint16
	mode  boxed.EgressMode
	dec   Decision
	entry boxed.EgressEntry
	begun time.Time
	ctx   context.Context
	stop  context.CancelCauseFunc
	done  func() // gives its place back
	// closed is called when it has ended; nil: nobody is told.
	closed func()
	// asked: there is a record of it.
	asked   atomic.Bool
	running map[*forwarding]bool // guarded by s.mu
	// foreign is a connection of another node's sandbox; private lets it have what the
	// operator has opened.
	foreign, private bool
	rec              boxed.EgressRecord
}

// records keeps the session's records, without its placeholders: programs put them into
// paths and names.
func (s *session) records() Recorder {
	_, tokens, _ := s.now()
	return redacting{s.proxy.cfg.Records, tokens}
}

// redacting is a Recorder that no placeholder reaches.
type redacting struct {
	Recorder
	tokens *placeholders
}

func (r redacting) clean(rec boxed.EgressRecord) boxed.EgressRecord {
	if r.tokens == nil {
		return rec
	}
	for _, text := range []*string{&rec.Host, &rec.SNI, &rec.Path, &rec.Detail} {
		if r.tokens.scan.hits(*text) {
			*text = "[placeholder]"
		}
	}
	return rec
}

func (r redacting) Allow(rec boxed.EgressRecord) error { return r.Recorder.Allow(r.clean(rec)) }
func (r redacting) Deny(rec boxed.EgressRecord)        { r.Recorder.Deny(r.clean(rec)) }
func (r redacting) End(rec boxed.EgressRecord)         { r.Recorder.End(r.clean(rec)) }

// record begins a record of the session.
func (s *session) record(entry boxed.EgressEntry, host string, port uint16) boxed.EgressRecord {
	policy, _, _ := s.now()
	rec := boxed.EgressRecord{At: s.proxy.cfg.Now(), Node: s.proxy.cfg.Node, Sandbox: s.id, Entry: entry, Host: host, Port: port}
	_, rec.Owner, rec.Labels = s.who()
	if policy != nil {
		rec.Generation = policy.Generation
	}
	return rec
}

// deny records a refusal and returns it.
func (s *session) deny(entry boxed.EgressEntry, host string, port uint16, r *refusal) *refusal {
	rec := s.record(entry, host, port)
	rec.Reason, rec.Detail, rec.Rule = r.Reason, r.Detail, r.Rule
	s.mu.Lock()
	canary := s.canary
	s.mu.Unlock()
	if host == "" || host != canary {
		s.records().Deny(rec)
	}
	return r
}

// open judges a connection, without making it. The flow that it returns must be closed.
func (s *session) open(ctx context.Context, entry boxed.EgressEntry, host Host, port uint16) (*flow, *refusal) {
	done, r := s.limiter.connection()
	if r != nil {
		return nil, s.deny(entry, host.String(), port, r)
	}
	dec, r := s.judge(ctx, host, port)
	if err := s.records().Ready(); r == nil && err != nil { // before anybody outside hears of it
		r = refuse(boxed.EgressAuditFull, "it cannot be recorded: %v", err)
	}
	if r != nil {
		done()
		return nil, s.deny(entry, host.String(), port, r)
	}
	f := &flow{s: s, host: host, port: port, mode: dec.Mode(), dec: dec, entry: entry, begun: time.Now(), done: done, running: map[*forwarding]bool{}}
	f.ctx, f.stop = context.WithCancelCause(s.ctx)
	f.rec = s.record(entry, host.String(), port)
	f.rec.Rule = dec.Rule
	f.rec.Exit, _ = f.by()
	s.mu.Lock()
	s.live[f] = true
	s.mu.Unlock()
	if r := s.outdated(f); r != nil { // since it was judged, and before it could be ended
		f.close()
		return nil, f.deny(r)
	}
	return f, nil
}

// judge asks the policy, and whoever it says is to be asked.
func (s *session) judge(ctx context.Context, host Host, port uint16) (Decision, *refusal) {
	if s.proxy.isFrozen(s) {
		return Decision{}, refuse(boxed.EgressFrozen, "egress is frozen by an operator")
	}
	policy, _, ca := s.now()
	dec := policy.Decide(host, port)
	if s.isCanary(host) {
		return Decision{}, &refusal{Reason: boxed.EgressNotListed}
	}
	unlisted := dec.Reason == boxed.EgressNotListed || dec.Reason == boxed.EgressPort
	if unlisted && policy.OnDeny == boxed.DenyAsk && s.proxy.cfg.Ask != nil {
		asking, cancel := context.WithTimeout(ctx, boxed.EgressAskLimit)
		defer cancel()
		stop := context.AfterFunc(s.ctx, cancel)
		defer stop()
		_, owner, _ := s.who()
		if s.proxy.cfg.Ask(asking, Question{Sandbox: s.id, Owner: owner, Host: host.String(), Port: port}) {
			policy, _, ca = s.now()
			dec = policy.Decide(host, port)
		} else {
			return dec, refuse(boxed.EgressNotAnswered, "nobody allowed it")
		}
	}
	if !dec.Allowed() {
		return dec, &refusal{Reason: dec.Reason, Rule: dec.Rule}
	}
	if dec.Mode() == boxed.EgressIntercept && ca == nil && !s.heldHere { // ET14: OpenShell#2162
		return dec, refuse(boxed.EgressNoCredential, "the sandbox has no certificate authority")
	}
	return dec, nil
}

// close ends the flow.
func (f *flow) close() {
	f.stop(nil)
	f.s.mu.Lock()
	delete(f.s.live, f)
	f.s.mu.Unlock()
	f.done()
	if f.closed != nil {
		f.closed()
	}
}

// deny records that the flow came to nothing after all.
func (f *flow) deny(r *refusal) *refusal {
	f.asked.Store(true)
	rec := f.rec
	rec.Reason, rec.Detail = r.Reason, r.Detail
	f.s.records().Deny(rec)
	return r
}

// misframed records a request within the flow that two parsers could read in two ways.
func (f *flow) misframed(e *framingError) {
	f.deny(&refusal{Reason: boxed.EgressInvalidRequest, Detail: e.Why})
}

// allow records that the flow opens; nothing may flow before.
func (f *flow) allow() *refusal {
	f.asked.Store(true)
	f.rec.Allowed, f.rec.Reason = true, boxed.EgressAllowed
	if err := f.s.records().Allow(f.rec); err != nil {
		f.rec.Allowed = false
		return f.deny(refuse(boxed.EgressAuditFull, "it cannot be recorded: %v", err))
	}
	return nil
}

// unasked records a connection on which nobody asked for anything: it was made, and said
// the host's name.
func (f *flow) unasked() {
	if f.asked.Load() || f.allow() != nil {
		return
	}
	f.rec.Detail = "nothing was asked for"
	f.ended(0, 0, nil)
}

// ended records what passed and why it ended.
func (f *flow) ended(up, down int64, err error) {
	rec := f.rec
	rec.At, rec.End, rec.Up, rec.Down, rec.MS = f.s.proxy.cfg.Now(), true, up, down, time.Since(f.begun).Milliseconds()
	if cause := context.Cause(f.ctx); cause != nil {
		err = cause
	}
	if r := (*refusal)(nil); errors.As(err, &r) {
		rec.Reason, rec.Detail = r.Reason, r.Detail
	}
	rec.Allowed = rec.Reason == boxed.EgressAllowed // or it was cut
	f.s.records().End(rec)
}
