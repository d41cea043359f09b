package api_test

import (
	"context"
	"errors"
	"iter"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

func (f *fake) egressOf(ctx context.Context, id boxed.ID, name string, last any) (*boxed.EgressStatus, error) {
	if _, err := f.Get(ctx, id); err != nil {
		return nil, err
	}
	f.note(ctx, name, last)
	return &boxed.EgressStatus{State: boxed.EgressOpen, Rules: []boxed.EgressRule{{Host: "api.example.com"}}}, nil
}

func (f *fake) GetEgress(ctx context.Context, id boxed.ID) (*boxed.EgressStatus, error) {
	return f.egressOf(ctx, id, "GetEgress", id)
}

func (f *fake) SetEgress(ctx context.Context, id boxed.ID, spec boxed.EgressSpec) (*boxed.EgressStatus, error) {
	return f.egressOf(ctx, id, "SetEgress", spec)
}

func (f *fake) AllowEgress(ctx context.Context, id boxed.ID, a boxed.EgressAllowance) (*boxed.EgressStatus, error) {
	return f.egressOf(ctx, id, "AllowEgress", a)
}

func (f *fake) CheckEgress(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	f.note(ctx, "CheckEgress", q)
	return &boxed.EgressAnswer{Reason: boxed.EgressNotListed}, nil
}

func (f *fake) SuggestEgress(ctx context.Context, id boxed.ID) (*boxed.EgressProfile, error) {
	return &boxed.EgressProfile{Version: 1, Name: "suggested", Rules: []boxed.EgressRule{}}, nil
}

func (f *fake) AnswerEgress(ctx context.Context, id boxed.ID, r boxed.EgressReply) error {
	f.note(ctx, "AnswerEgress", r)
	return nil
}

func (f *fake) EgressLog(ctx context.Context, filter boxed.EgressFilter) iter.Seq2[boxed.EgressRecord, error] {
	f.note(ctx, "EgressLog", filter)
	return func(yield func(boxed.EgressRecord, error) bool) {
		if filter.Owner == "nobody" {
			yield(boxed.EgressRecord{}, boxed.Errorf(boxed.CodeForbidden, "not yours"))
			return
		}
		if !yield(boxed.EgressRecord{Seq: 1, Host: "a.example.com", Reason: boxed.EgressAllowed, Allowed: true}, nil) {
			return
		}
		if filter.Owner == "breaks" {
			yield(boxed.EgressRecord{}, boxed.Errorf(boxed.CodeNotReady, "it broke"))
			return
		}
		yield(boxed.EgressRecord{Seq: 2, Host: "b.example.com", Reason: boxed.EgressNotListed}, nil)
	}
}

func (f *fake) RelayEgress(ctx context.Context, r boxed.EgressRelay) (net.Conn, error) {
	return nil, boxed.Errorf(boxed.CodeForbidden, "no")
}

func (f *fake) VerifyAudit(ctx context.Context) (*boxed.AuditReport, error) {
	return &boxed.AuditReport{Records: 2, First: 1, Last: 2, Files: 1}, nil
}

// fakePolicies remember what they were asked for.
type fakePolicies struct{ last any }

func (p *fakePolicies) ListProfiles(context.Context) ([]boxed.EgressProfile, error) { return nil, nil }

func (p *fakePolicies) GetProfile(_ context.Context, name string) (*boxed.EgressProfile, error) {
	return &boxed.EgressProfile{Version: 1, Name: name, Rules: []boxed.EgressRule{}}, nil
}

func (p *fakePolicies) ApplyProfile(_ context.Context, text []byte, dry bool) (*boxed.EgressChange, error) {
	if strings.Contains(string(text), "bad") {
		return nil, boxed.Errorf(boxed.CodeInvalid, "line 3: unknown field")
	}
	return &boxed.EgressChange{Profile: &boxed.EgressProfile{Version: 1, Name: "web", Rules: []boxed.EgressRule{}}, Applied: !dry}, nil
}

func (p *fakePolicies) DeleteProfile(_ context.Context, name string) error { p.last = name; return nil }

func (p *fakePolicies) ListSecrets(context.Context) ([]boxed.Secret, error) { return nil, nil }

func (p *fakePolicies) SetSecret(_ context.Context, r boxed.SecretRequest) (*boxed.Secret, error) {
	p.last = r
	return &r.Secret, nil
}

func (p *fakePolicies) RevokeSecret(_ context.Context, name string) error {
	return boxed.Errorf(boxed.CodeNotFound, "there is no secret %q", name)
}

func (p *fakePolicies) Freeze(_ context.Context, f boxed.EgressFreeze) (*boxed.EgressFreeze, error) {
	f.ID = "f1"
	return &f, nil
}

func (p *fakePolicies) Freezes(context.Context) ([]boxed.EgressFreeze, error) { return nil, nil }
func (p *fakePolicies) Thaw(_ context.Context, id string) error               { p.last = id; return nil }

func TestEgressOverTheAPI(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	s, err := h.client.Create(ctx, boxed.Spec{Egress: &boxed.EgressSpec{Profile: "packages", Allow: []string{"a.example.com"}, Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"acme/app"}, ReadOnly: true}}}})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := h.client.GetEgress(ctx, s.ID); err != nil || st.State != boxed.EgressOpen || len(st.Rules) != 1 {
		t.Errorf("%+v, %v", st, err)
	}
	for name, c := range map[string]struct {
		call func() error
		want any
	}{
		"set": {func() error { _, err := h.client.SetEgress(ctx, s.ID, boxed.EgressSpec{Profile: "web"}); return err }, boxed.EgressSpec{Profile: "web"}},
		"allow": {func() error {
			_, err := h.client.AllowEgress(ctx, s.ID, boxed.EgressAllowance{Host: "x.example.com", For: 600e9})
			return err
		}, boxed.EgressAllowance{Host: "x.example.com", For: 600e9}},
		"check": {func() error {
			_, err := h.client.CheckEgress(ctx, s.ID, boxed.EgressQuery{Host: "x.example.com:80", Method: "GET", Path: "/"})
			return err
		}, boxed.EgressQuery{Host: "x.example.com:80", Method: "GET", Path: "/"}},
		"answer": {func() error {
			return h.client.AnswerEgress(ctx, s.ID, boxed.EgressReply{Question: "q1", Allow: true})
		}, boxed.EgressReply{Question: "q1", Allow: true}},
	} {
		if err := c.call(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(c.want, h.lastCall()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if p, err := h.client.SuggestEgress(ctx, s.ID); err != nil || p.Name != "suggested" {
		t.Errorf("%+v, %v", p, err)
	}
	if r, err := h.client.VerifyAudit(ctx); err != nil || r.Records != 2 {
		t.Errorf("%+v, %v", r, err)
	}
}

// The audit log is a stream of lines, whose end says what went wrong.
func TestTheAuditLogStreams(t *testing.T) {
	h := newHarness(t)
	read := func(owner string, follow bool) (seqs []uint64, err error) {
		for rec, e := range h.client.EgressLog(t.Context(), boxed.EgressFilter{Owner: owner, Follow: follow, Limit: 10, Denied: true}) {
			if e != nil {
				return seqs, e
			}
			seqs = append(seqs, rec.Seq)
		}
		return seqs, nil
	}
	if seqs, err := read("", false); err != nil || len(seqs) != 2 {
		t.Errorf("%v, %v", seqs, err)
	}
	if seqs, err := read("nobody", false); !errors.Is(err, boxed.CodeForbidden) || len(seqs) != 0 {
		t.Errorf("%v, %v", seqs, err)
	}
	if seqs, err := read("breaks", false); !errors.Is(err, boxed.CodeNotReady) || len(seqs) != 1 {
		t.Errorf("%v, %v", seqs, err)
	}
	if seqs, err := read("", true); !errors.Is(err, boxed.CodeLost) || len(seqs) != 2 {
		t.Errorf("one that is followed ends only with an error: %v, %v", seqs, err)
	}
}

func TestPoliciesOverTheAPI(t *testing.T) {
	p := &fakePolicies{}
	h := newHarness(t, func(c *api.Config) { c.Policies = p })
	ctx := t.Context()
	want := boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github", Env: []string{"GH_TOKEN"}, All: true}, Value: "ghp_0123456789"}
	if _, err := h.client.SetSecret(ctx, want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, p.last); diff != "" {
		t.Error(diff)
	}
	if err := h.client.RevokeSecret(ctx, "github"); !errors.Is(err, boxed.CodeNotFound) {
		t.Error(err)
	}
	if list, err := h.client.ListSecrets(ctx); err != nil || list == nil {
		t.Errorf("%v, %v", list, err)
	}
	if c, err := h.client.ApplyProfile(ctx, []byte("version: 1"), true); err != nil || c.Applied || c.Widened == nil {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := h.client.ApplyProfile(ctx, []byte("bad"), false); err == nil || !strings.Contains(err.Error(), "line 3") {
		t.Error(err)
	}
	if g, err := h.client.GetProfile(ctx, "web"); err != nil || g.Name != "web" {
		t.Errorf("%+v, %v", g, err)
	}
	if err := h.client.DeleteProfile(ctx, "web"); err != nil || p.last != "web" {
		t.Error(err, p.last)
	}
	if list, err := h.client.ListProfiles(ctx); err != nil || list == nil {
		t.Errorf("%v, %v", list, err)
	}
	if f, err := h.client.Freeze(ctx, boxed.EgressFreeze{Labels: map[string]string{"a": "b"}}); err != nil || f.ID != "f1" || f.Labels["a"] != "b" {
		t.Errorf("%+v, %v", f, err)
	}
	if err := h.client.Thaw(ctx, "f1"); err != nil || p.last != "f1" {
		t.Error(err)
	}
	if list, err := h.client.Freezes(ctx); err != nil || list == nil {
		t.Errorf("%v, %v", list, err)
	}
	none := newHarness(t)
	if _, err := none.client.ListSecrets(ctx); !errors.Is(err, boxed.CodeUnavailable) {
		t.Error(err)
	}
}
