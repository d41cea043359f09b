package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// maxWait is the longest that a long poll lasts.
const maxWait = 10 * time.Minute

// reply answers with JSON.
func (c *call) reply(status int, v any) error {
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(status)
	enc := json.NewEncoder(c.w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return &boxed.Error{Code: boxed.CodeCanceled, Message: "the client went away", Err: err}
	}
	return nil
}

func (c *call) noContent() error {
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// sandbox is the ID that the path means: itself, or a name or prefix looked up.
func (c *call) sandbox() (boxed.ID, error) { return c.named(c.v.str("id")) }

// named is the ID that a reference means.
func (c *call) named(ref string) (boxed.ID, error) {
	if id, err := boxed.ParseID(ref); err == nil {
		return id, nil
	}
	sb, err := c.s.cfg.Service.Resolve(c.ctx, ref)
	if err != nil {
		return "", err
	}
	return sb.ID, nil
}

// replySandbox answers with a sandbox whose lists and maps are never null.
func (c *call) replySandbox(status int, sb *boxed.Sandbox, err error) error {
	if err != nil {
		return err
	}
	return c.reply(status, presentable(*sb))
}

func presentable(sb boxed.Sandbox) boxed.Sandbox {
	if sb.Labels == nil {
		sb.Labels = map[string]string{}
	}
	return sb
}

func (c *call) createSandbox() error {
	spec, err := readInto[boxed.Spec](c)
	if err != nil {
		return err
	}
	if key := c.r.Header.Get("Idempotency-Key"); key != "" {
		if spec.IdempotencyKey != "" && spec.IdempotencyKey != key {
			return invalidField("Idempotency-Key", "differs from idempotency_key in the body")
		}
		spec.IdempotencyKey = key
	}
	sb, err := c.s.cfg.Service.Create(c.ctx, spec)
	if err != nil {
		return err
	}
	c.w.Header().Set("Location", "/v1/sandboxes/"+string(sb.ID))
	return c.replySandbox(http.StatusCreated, sb, nil)
}

func (c *call) listSandboxes() error {
	f := boxed.Filter{
		Name: c.v.str("name"), Owner: c.v.str("owner"),
		Limit: int(c.v.integer("limit")), Cursor: c.v.str("cursor"),
	}
	for _, l := range c.v["label"] {
		k, v, _ := strings.Cut(l, "=")
		if f.Labels == nil {
			f.Labels = map[string]string{}
		}
		if old, ok := f.Labels[k]; ok && old != v {
			return invalidField("label", "asks for two values of one label")
		}
		f.Labels[k] = v
	}
	for _, s := range c.v["state"] {
		f.States = append(f.States, boxed.State(s))
	}
	list, err := c.s.cfg.Service.List(c.ctx, f)
	if err != nil {
		return err
	}
	page := boxed.List{Sandboxes: make([]boxed.Sandbox, 0, len(list.Sandboxes)), Next: list.Next, Incomplete: list.Incomplete}
	for _, sb := range list.Sandboxes {
		page.Sandboxes = append(page.Sandboxes, presentable(sb))
	}
	return c.reply(http.StatusOK, page)
}

func (c *call) getSandbox() error {
	ref := c.v.str("id")
	if id, err := boxed.ParseID(ref); err == nil {
		sb, err := c.s.cfg.Service.Get(c.ctx, id)
		return c.replySandbox(http.StatusOK, sb, err)
	}
	sb, err := c.s.cfg.Service.Resolve(c.ctx, ref)
	return c.replySandbox(http.StatusOK, sb, err)
}

func (c *call) updateSandbox() error {
	u, err := readInto[boxed.Update](c)
	if err != nil {
		return err
	}
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	sb, err := c.s.cfg.Service.Update(c.ctx, id, u)
	return c.replySandbox(http.StatusOK, sb, err)
}

func (c *call) destroySandbox() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.Destroy(c.ctx, id); err != nil {
		return err
	}
	return c.noContent()
}

// patience is a context that ends with the long poll.
func (c *call) patience() (context.Context, context.CancelFunc, error) {
	d := c.v.duration("timeout").D()
	if d > maxWait {
		return nil, nil, invalidField("timeout", "must be at most 10m")
	}
	ctx, cancel := context.WithTimeout(c.ctx, d)
	return ctx, cancel, nil
}

// polled reports whether err only says that the long poll's time is up.
func (c *call) polled(ctx context.Context, err error) bool {
	return err != nil && c.ctx.Err() == nil && errors.Is(ctx.Err(), context.DeadlineExceeded)
}

func (c *call) waitSandbox() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	ctx, cancel, err := c.patience()
	if err != nil {
		return err
	}
	defer cancel()
	sb, err := c.s.cfg.Service.Wait(ctx, id, boxed.State(c.v.str("state")))
	if c.polled(ctx, err) {
		sb, err = c.s.cfg.Service.Get(c.ctx, id)
	}
	return c.replySandbox(http.StatusOK, sb, err)
}

func (c *call) pauseSandbox() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	sb, err := c.s.cfg.Service.Pause(c.ctx, id)
	return c.replySandbox(http.StatusOK, sb, err)
}

func (c *call) resumeSandbox() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	sb, err := c.s.cfg.Service.Resume(c.ctx, id)
	return c.replySandbox(http.StatusOK, sb, err)
}

func (c *call) sandboxStats() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	st, err := c.s.cfg.Service.Stats(c.ctx, id)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, st)
}
