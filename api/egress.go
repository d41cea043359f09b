package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"time"

	"github.com/boxed-mesh/boxed"
)

// about answers with what f says of the sandbox that the path means.
func about[T any](c *call, f func(boxed.ID) (*T, error)) error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	v, err := f(id)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, v)
}

// asked is about for a call with a body.
func asked[In, Out any](c *call, f func(context.Context, boxed.ID, In) (*Out, error)) error {
	in, err := readInto[In](c)
	if err != nil {
		return err
	}
	return about(c, func(id boxed.ID) (*Out, error) { return f(c.ctx, id, in) })
}

func (c *call) getEgress() error {
	return about(c, func(id boxed.ID) (*boxed.EgressStatus, error) { return c.s.cfg.Service.GetEgress(c.ctx, id) })
}

func (c *call) suggestEgress() error {
	return about(c, func(id boxed.ID) (*boxed.EgressProfile, error) { return c.s.cfg.Service.SuggestEgress(c.ctx, id) })
}

func (c *call) setEgress() error   { return asked(c, c.s.cfg.Service.SetEgress) }
func (c *call) allowEgress() error { return asked(c, c.s.cfg.Service.AllowEgress) }
func (c *call) checkEgress() error { return asked(c, c.s.cfg.Service.CheckEgress) }

func (c *call) answerEgress() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	r, err := readInto[boxed.EgressReply](c)
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.AnswerEgress(c.ctx, id, r); err != nil {
		return err
	}
	return c.noContent()
}

// recordItem is one item of the audit log on its way.
type recordItem struct {
	rec boxed.EgressRecord
	err error
}

// egressLog streams audit records, and an empty line while nothing is recorded.
func (c *call) egressLog() error {
	f := boxed.EgressFilter{
		Owner: c.v.str("owner"), Denied: c.v.boolean("denied"),
		After: uint64(c.v.integer("after")), Limit: int(c.v.integer("limit")), Follow: c.v.boolean("follow"),
	}
	if ref := c.v.str("sandbox"); ref != "" {
		var err error
		if f.Sandbox, err = c.named(ref); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(c.ctx)
	items, done := make(chan recordItem), make(chan struct{})
	go func() {
		defer close(done)
		defer close(items)
		for rec, err := range c.s.cfg.Service.EgressLog(ctx, f) {
			select {
			case items <- recordItem{rec, err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { cancel(); <-done }()
	w := c.writer()
	defer w.rest()
	tick := time.NewTimer(settleTime)
	defer tick.Stop()
	for {
		line := []byte("\n")
		select {
		case it, more := <-items:
			switch {
			case !more && c.w.wrote:
				return nil
			case !more:
				line = nil
			case it.err != nil && !c.w.wrote:
				return c.outcome(it.err)
			case it.err != nil:
				line, _ = json.Marshal(map[string]any{"error": problemOf(c.outcome(it.err), c.id)})
			default:
				line, _ = json.Marshal(it.rec)
			}
			if line != nil {
				line = append(line, '\n')
			}
		case <-tick.C:
			if !f.Follow {
				tick.Reset(c.s.cfg.KeepAlive)
				continue
			}
		}
		if !c.w.wrote {
			c.w.Header().Set("Content-Type", "application/x-ndjson")
			c.w.WriteHeader(http.StatusOK)
		}
		tick.Reset(c.s.cfg.KeepAlive)
		if _, err := w.Write(line); err != nil {
			return err
		}
		if err := w.flush(); err != nil || line == nil {
			return err
		}
	}
}

func (c *call) verifyAudit() error {
	report, err := c.s.cfg.Service.VerifyAudit(c.ctx)
	if err != nil {
		return err
	}
	report.Broken = never(report.Broken)
	return c.reply(http.StatusOK, report)
}

// relayEgress is a connection of another node's sandbox, by way of this one.
func (c *call) relayEgress() error {
	if _, passedOn := hopOf(c.r); !passedOn {
		return boxed.Errorf(boxed.CodeForbidden, "nodes ask each other this")
	}
	if err := c.wantUpgrade(); err != nil {
		return err
	}
	var r boxed.EgressRelay
	raw, err := base64.RawURLEncoding.DecodeString(c.v.str("relay"))
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	if err != nil {
		return invalidField("relay", "is an EgressRelay in base64")
	}
	conn, err := c.s.cfg.Service.RelayEgress(c.ctx, r)
	if err != nil {
		return err
	}
	return c.join(conn)
}

// policies is the port for profiles and secrets, if there is one. Every node answers for
// itself: what another passes on, and may vouch for, is refused.
func (c *call) policies() (boxed.Policies, error) {
	if _, passedOn := hopOf(c.r); passedOn {
		return nil, boxed.Errorf(boxed.CodeForbidden, "calls about profiles and secrets are not passed on from node to node")
	}
	if c.s.cfg.Policies == nil {
		return nil, boxed.Errorf(boxed.CodeUnavailable, "this node serves no egress")
	}
	return c.s.cfg.Policies, nil
}

// owned is a name, behind that of its owner where the query has one.
func (c *call) owned(param string) string {
	if owner := c.v.str("owner"); owner != "" {
		return owner + "/" + c.v.str(param)
	}
	return c.v.str(param)
}

func (c *call) listProfiles() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	list, err := p.ListProfiles(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"profiles": never(list)})
}

func (c *call) getProfile() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	profile, err := p.GetProfile(c.ctx, c.owned("profile"))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, profile)
}

func (c *call) applyProfile() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	req, err := readInto[struct {
		Text string `json:"text"`
		Dry  bool   `json:"dry"`
	}](c)
	if err != nil {
		return err
	}
	change, err := p.ApplyProfile(c.ctx, []byte(req.Text), req.Dry)
	if err != nil {
		return err
	}
	change.Widened, change.Narrowed = never(change.Widened), never(change.Narrowed)
	return c.reply(http.StatusOK, change)
}

func (c *call) deleteProfile() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	if err := p.DeleteProfile(c.ctx, c.owned("profile")); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) listFreezes() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	list, err := p.Freezes(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"freezes": never(list)})
}

func (c *call) freezeEgress() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	f, err := readInto[boxed.EgressFreeze](c)
	if err != nil {
		return err
	}
	frozen, err := p.Freeze(c.ctx, f)
	if err != nil {
		return err
	}
	return c.reply(http.StatusCreated, frozen)
}

func (c *call) thawEgress() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	if err := p.Thaw(c.ctx, c.v.str("freeze")); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) listSecrets() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	list, err := p.ListSecrets(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"secrets": never(list)})
}

func (c *call) setSecret() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	req, err := readInto[boxed.SecretRequest](c)
	if err != nil {
		return err
	}
	req.Name = c.v.str("secret")
	secret, err := p.SetSecret(c.ctx, req)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, secret)
}

func (c *call) revokeSecret() error {
	p, err := c.policies()
	if err != nil {
		return err
	}
	if err := p.RevokeSecret(c.ctx, c.owned("secret")); err != nil {
		return err
	}
	return c.noContent()
}
