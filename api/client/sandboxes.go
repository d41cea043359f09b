package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/boxed-mesh/boxed"
)

// poll is how long one long poll lasts.
const poll = 60 * time.Second

// Create returns when the sandbox is running.
func (c *Client) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	return ask[boxed.Sandbox](ctx, c, http.MethodPost, "/v1/sandboxes", nil, spec)
}

// Get returns living sandboxes and end records.
func (c *Client) Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return get[boxed.Sandbox](ctx, c, sandboxPath(id), nil)
}

// Resolve finds a sandbox by ID, name or prefix.
func (c *Client) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	if ref == "" {
		return nil, boxed.Errorf(boxed.CodeInvalid, "which sandbox? give an ID, a name or a prefix").WithField("id")
	}
	return get[boxed.Sandbox](ctx, c, sandboxPath(ref), nil)
}

// List returns one page.
func (c *Client) List(ctx context.Context, f boxed.Filter) (boxed.List, error) {
	q := url.Values{}
	for k, v := range f.Labels {
		q.Add("label", k+"="+v)
	}
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	for name, v := range map[string]string{"name": f.Name, "owner": f.Owner, "cursor": f.Cursor} {
		if v != "" {
			q.Set(name, v)
		}
	}
	if f.Limit > 0 {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	list, err := get[boxed.List](ctx, c, "/v1/sandboxes", q)
	if err != nil {
		return boxed.List{}, err
	}
	return *list, nil
}

// Wait returns when the sandbox is in the state, or has ended. It polls, each
// time for up to a minute.
func (c *Client) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	for {
		q := url.Values{"state": {string(until)}, "timeout": {patience(ctx)}}
		sb, err := get[boxed.Sandbox](ctx, c, sandboxPath(id)+"/wait", q)
		if err != nil || sb.State == until || sb.State.Ended() {
			return sb, err
		}
		if err := ctx.Err(); err != nil {
			return nil, contextError(ctx)
		}
	}
}

// patience is the timeout of a long poll: no longer than the caller's own.
func patience(ctx context.Context) string {
	d := poll
	if end, ok := ctx.Deadline(); ok {
		d = min(d, max(time.Until(end), time.Second))
	}
	return d.Round(time.Second).String()
}

// Destroy ends the sandbox and returns when it is gone.
func (c *Client) Destroy(ctx context.Context, id boxed.ID) error {
	return c.call(ctx, http.MethodDelete, sandboxPath(id), nil, nil, nil)
}

// Update changes a living sandbox.
func (c *Client) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	return ask[boxed.Sandbox](ctx, c, http.MethodPatch, sandboxPath(id), nil, u)
}

// Pause stops all processes and clocks.
func (c *Client) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return ask[boxed.Sandbox](ctx, c, http.MethodPost, sandboxPath(id)+"/pause", nil, nil)
}

// Resume lets them go on.
func (c *Client) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return ask[boxed.Sandbox](ctx, c, http.MethodPost, sandboxPath(id)+"/resume", nil, nil)
}

// Stats is what the sandbox uses now.
func (c *Client) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	return get[boxed.Stats](ctx, c, sandboxPath(id)+"/stats", nil)
}

// CreateKey makes an API key. Its secret is in the answer and nowhere else.
func (c *Client) CreateKey(ctx context.Context, req boxed.KeyRequest) (*boxed.NewKey, error) {
	return ask[boxed.NewKey](ctx, c, http.MethodPost, "/v1/keys", nil, req)
}

// ListKeys lists the API keys.
func (c *Client) ListKeys(ctx context.Context) ([]boxed.Key, error) {
	out, err := get[struct {
		Keys []boxed.Key `json:"keys"`
	}](ctx, c, "/v1/keys", nil)
	if err != nil {
		return nil, err
	}
	return out.Keys, nil
}

// RevokeKey revokes an API key for good.
func (c *Client) RevokeKey(ctx context.Context, keyID string) error {
	return c.call(ctx, http.MethodDelete, "/v1/keys/"+url.PathEscape(keyID), nil, nil, nil)
}
