//go:build linux

package ctl

import (
	"context"
	"fmt"
	"iter"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// fakeEgress is what a fake node knows of egress. Nothing connects: a check of a host
// stands for a program that asks for it, and is on the log. A host tamper.example on it
// makes the log a broken one.
type fakeEgress struct {
	profiles []boxed.EgressProfile
	secrets  []boxed.Secret
	freezes  []boxed.EgressFreeze
	records  []boxed.EgressRecord
	open     map[string]boxed.Event // questions that wait
}

// fakeSSH says who asks, and no more.
type fakeSSH struct{ boxed.SSH }

func (fakeSSH) SSHInfo(ctx context.Context) (*boxed.SSHInfo, error) {
	who := boxed.PrincipalFrom(ctx)
	return &boxed.SSHInfo{Owner: who.Owner, Role: who.Role}, nil
}

func (n *fakeNode) profileLocked(name string) (*boxed.EgressProfile, error) {
	for _, p := range slices.Concat(n.egress.profiles, egress.ReadyProfiles()) {
		if p.Name == name {
			return &p, nil
		}
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no egress profile %q", name).WithField("profile")
}

func (n *fakeNode) secretLocked(name string) *boxed.Secret {
	for i := range n.egress.secrets {
		if s := &n.egress.secrets[i]; s.Name == name && s.RevokedAt.IsZero() {
			return s
		}
	}
	return nil
}

// attachLocked gives a sandbox its egress.
func (n *fakeNode) attachLocked(b *fakeBox, spec *boxed.EgressSpec) error {
	if spec.Profile != "" && spec.Profile != egress.NoProfile {
		if _, err := n.profileLocked(spec.Profile); err != nil {
			return boxed.Errorf(boxed.CodeNotFound, "%w", err).WithField("egress.profile")
		}
	}
	for _, use := range spec.Secrets {
		s := n.secretLocked(use.Name)
		switch {
		case s == nil:
			return boxed.Errorf(boxed.CodeNotFound, "there is no secret %q that you may attach", use.Name).WithField("egress.secrets")
		case use.Repos != nil && !slices.Contains(codeHosts, s.Preset):
			return boxed.Errorf(boxed.CodeInvalid, "repositories limit secrets of code hosts, and %q is of the preset %s", use.Name, s.Preset).WithField("egress.secrets")
		}
	}
	for i, a := range spec.Allow {
		if strings.Contains(a, "/") {
			return boxed.Errorf(boxed.CodeInvalid, "egress.allow: %q is no host", a).WithField(fmt.Sprintf("egress.allow[%d]", i))
		}
	}
	b.egress = spec
	return nil
}

// statusLocked is a sandbox's egress; "none" and none at all are closed.
func (n *fakeNode) statusLocked(b *fakeBox) *boxed.EgressStatus {
	st := &boxed.EgressStatus{State: boxed.EgressClosed}
	if b.egress == nil || b.egress.Profile == egress.NoProfile {
		return st
	}
	st.State, st.Profile = boxed.EgressOpen, b.egress.Profile
	if p, err := n.profileLocked(b.egress.Profile); err == nil {
		st.Rules, st.Flags = p.Rules, p.Flags
	}
	for _, use := range b.egress.Secrets {
		r := boxed.EgressRule{Host: use.Name + ".example", Mode: boxed.EgressIntercept, Credential: use.Name}
		for _, repo := range use.Repos {
			r.Paths = append(r.Paths, "/"+repo+"/")
		}
		if use.ReadOnly {
			r.Methods = []string{"GET", "HEAD"}
		}
		st.Rules, st.Secrets = append(st.Rules, r), append(st.Secrets, use.Name)
		if n.secretLocked(use.Name) == nil {
			st.State, st.Reason = boxed.EgressDegraded, "the secret "+use.Name+" was revoked"
		}
	}
	for _, a := range b.egress.Allow {
		host, port := hostPort(a)
		number, _ := strconv.ParseUint(port, 10, 16)
		st.Rules = append(st.Rules, boxed.EgressRule{Host: host, Ports: []uint16{uint16(number)}})
	}
	return st
}

// withEgress does something to a living sandbox, and says what its egress is then.
func (n *fakeNode) withEgress(ctx context.Context, id boxed.ID, f func(*fakeBox) error) (*boxed.EgressStatus, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := f(b); err != nil {
		return nil, err
	}
	return n.statusLocked(b), nil
}

func (n *fakeNode) GetEgress(ctx context.Context, id boxed.ID) (*boxed.EgressStatus, error) {
	return n.withEgress(ctx, id, func(*fakeBox) error { return nil })
}

func (n *fakeNode) SetEgress(ctx context.Context, id boxed.ID, spec boxed.EgressSpec) (*boxed.EgressStatus, error) {
	return n.withEgress(ctx, id, func(b *fakeBox) error { return n.attachLocked(b, &spec) })
}

func (n *fakeNode) AllowEgress(ctx context.Context, id boxed.ID, a boxed.EgressAllowance) (*boxed.EgressStatus, error) {
	return n.withEgress(ctx, id, func(b *fakeBox) error {
		spec := boxed.EgressSpec{}
		if b.egress != nil {
			spec = *b.egress
		}
		spec.Allow = append(slices.Clone(spec.Allow), a.Host)
		return n.attachLocked(b, &spec)
	})
}

func (n *fakeNode) CheckEgress(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	var ans boxed.EgressAnswer
	_, err := n.withEgress(ctx, id, func(b *fakeBox) error {
		ans = n.decideLocked(b, q)
		host, port := hostPort(q.Host)
		number, _ := strconv.ParseUint(port, 10, 16)
		n.egress.records = append(n.egress.records, boxed.EgressRecord{
			Seq: uint64(len(n.egress.records) + 1), At: time.Now().UTC(), Node: fakeNodeID, Sandbox: b.ID, Owner: b.Owner, Entry: boxed.EntryHTTP,
			Host: host, Port: uint16(number), Method: q.Method, Path: q.Path, Allowed: ans.Allowed, Reason: ans.Reason, Down: 3 << 10,
		})
		asks := !ans.Allowed && b.egress != nil && b.egress.OnDeny == boxed.DenyAsk
		n.emitLocked(boxed.EventUpdated, b, func(e *boxed.Event) {
			if asks {
				e.Type, e.Question, e.Message = boxed.EventEgressAsk, "q"+string(e.Cursor), q.Host
				if n.egress.open == nil {
					n.egress.open = map[string]boxed.Event{}
				}
				n.egress.open[e.Question] = *e
			}
		})
		return nil
	})
	return &ans, err
}

// decideLocked knows hosts and methods as they are written, and no patterns.
func (n *fakeNode) decideLocked(b *fakeBox, q boxed.EgressQuery) boxed.EgressAnswer {
	st := n.statusLocked(b)
	host, port := hostPort(q.Host)
	ans := boxed.EgressAnswer{Reason: boxed.EgressNotListed, Hint: "to allow it: boxedctl egress allow SANDBOX " + q.Host}
	for _, f := range n.egress.freezes {
		if f.All || f.Owner == b.Owner {
			return boxed.EgressAnswer{Reason: boxed.EgressFrozen}
		}
	}
	if st.State == boxed.EgressClosed {
		ans.Reason, ans.Hint = boxed.EgressNoProfile, ""
	}
	for _, r := range st.Rules {
		ports := r.Ports
		if ports == nil {
			ports = []uint16{443}
		}
		if r.Host != host && r.Host != "*" || !slices.ContainsFunc(ports, func(p uint16) bool { return strconv.Itoa(int(p)) == port }) {
			continue
		}
		ans = boxed.EgressAnswer{
			Allowed: true, Reason: boxed.EgressAllowed, Rule: r.Host + ":" + port, Mode: r.Mode, Credential: r.Credential, Addresses: []string{"203.0.113.7"},
		}
		if r.Methods != nil && q.Method != "" && !slices.Contains(r.Methods, q.Method) {
			ans.Allowed, ans.Reason, ans.Addresses = false, boxed.EgressMethod, nil
		}
	}
	return ans
}

func (n *fakeNode) SuggestEgress(ctx context.Context, id boxed.ID) (*boxed.EgressProfile, error) {
	b, err := n.find(ctx, id, false)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	records := slices.Clone(n.egress.records)
	n.mu.Unlock()
	return egress.Suggest(&b.Sandbox, func(yield func(boxed.EgressRecord, error) bool) {
		for _, r := range records {
			if r.Sandbox == id && !yield(r, nil) {
				return
			}
		}
	})
}

func (n *fakeNode) AnswerEgress(ctx context.Context, id boxed.ID, r boxed.EgressReply) error {
	n.mu.Lock()
	e, waits := n.egress.open[r.Question]
	delete(n.egress.open, r.Question)
	n.mu.Unlock()
	if !waits || e.Sandbox != id {
		return boxed.Errorf(boxed.CodeNotFound, "there is no such question; a connection waits for %s at most", boxed.EgressAskLimit).WithField("question")
	}
	said := "refused"
	if r.Allow {
		said = "allowed"
		if _, err := n.AllowEgress(ctx, id, boxed.EgressAllowance{Host: e.Message, For: r.For}); err != nil {
			return err
		}
	}
	b, err := n.find(ctx, id, true)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.emitLocked(boxed.EventEgressEnd, b, func(end *boxed.Event) { end.Question, end.Message, end.Reason = e.Question, e.Message, said })
	return nil
}

// giveUp ends the questions for a host, as if nobody had answered.
func (n *fakeNode) giveUp(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, e := range n.egress.open {
		if e.Message == host {
			delete(n.egress.open, id)
			n.emitLocked(boxed.EventEgressEnd, n.boxes[e.Sandbox], func(end *boxed.Event) { end.Question, end.Message, end.Reason = id, host, "nobody answered" })
		}
	}
}

func (n *fakeNode) EgressLog(ctx context.Context, f boxed.EgressFilter) iter.Seq2[boxed.EgressRecord, error] {
	who := boxed.PrincipalFrom(ctx)
	return func(yield func(boxed.EgressRecord, error) bool) {
		if f.Owner != "" && !who.Admin() {
			yield(boxed.EgressRecord{}, boxed.Errorf(boxed.CodeForbidden, "only an admin reads another owner's audit records").WithField("owner"))
			return
		}
		for next := 0; ; {
			n.mu.Lock()
			pending, changed := n.egress.records[next:], n.changed
			n.mu.Unlock()
			next += len(pending)
			for _, r := range pending {
				mine := f.Owner == "*" || r.Owner == firstOf(f.Owner, who.Owner) || f.Sandbox != "" && who.Admin()
				if mine && (f.Sandbox == "" || f.Sandbox == r.Sandbox) && (!f.Denied || !r.Allowed) && !yield(r, nil) {
					return
				}
			}
			if !f.Follow {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(boxed.EgressRecord{}, ctx.Err())
				return
			}
		}
	}
}

func (n *fakeNode) VerifyAudit(ctx context.Context) (*boxed.AuditReport, error) {
	if err := n.admin(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	report := &boxed.AuditReport{Records: len(n.egress.records), First: 1, Last: uint64(len(n.egress.records)), Files: 1}
	for i, r := range n.egress.records {
		if r.Host == "tamper.example" {
			report.Broken = append(report.Broken, boxed.AuditBreak{File: "audit-\x1b[31m.jsonl", Line: i + 1, Why: "it does not have the hash of the record before"})
		}
	}
	return report, nil
}

func (n *fakeNode) RelayEgress(context.Context, boxed.EgressRelay) (net.Conn, error) {
	return nil, boxed.Errorf(boxed.CodeForbidden, "a fake node connects for nobody")
}
