package client

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

var _ boxed.Policies = (*Client)(nil)

// GetEgress says what a sandbox may reach.
func (c *Client) GetEgress(ctx context.Context, id boxed.ID) (*boxed.EgressStatus, error) {
	return get[boxed.EgressStatus](ctx, c, sandboxPath(id)+"/egress", nil)
}

// SetEgress changes what a sandbox may reach.
func (c *Client) SetEgress(ctx context.Context, id boxed.ID, spec boxed.EgressSpec) (*boxed.EgressStatus, error) {
	return ask[boxed.EgressStatus](ctx, c, http.MethodPut, sandboxPath(id)+"/egress", nil, spec)
}

// AllowEgress lets a sandbox reach one host more.
func (c *Client) AllowEgress(ctx context.Context, id boxed.ID, a boxed.EgressAllowance) (*boxed.EgressStatus, error) {
	return ask[boxed.EgressStatus](ctx, c, http.MethodPost, sandboxPath(id)+"/egress/allow", nil, a)
}

// CheckEgress says what would happen to a connection.
func (c *Client) CheckEgress(ctx context.Context, id boxed.ID, q boxed.EgressQuery) (*boxed.EgressAnswer, error) {
	return ask[boxed.EgressAnswer](ctx, c, http.MethodPost, sandboxPath(id)+"/egress/check", nil, q)
}

// SuggestEgress makes a profile of what a sandbox asked for.
func (c *Client) SuggestEgress(ctx context.Context, id boxed.ID) (*boxed.EgressProfile, error) {
	return get[boxed.EgressProfile](ctx, c, sandboxPath(id)+"/egress/suggest", nil)
}

// AnswerEgress answers a question about a connection that waits.
func (c *Client) AnswerEgress(ctx context.Context, id boxed.ID, r boxed.EgressReply) error {
	return c.call(ctx, http.MethodPost, sandboxPath(id)+"/egress/answer", nil, r, nil)
}

// EgressLog yields audit records, the oldest first.
func (c *Client) EgressLog(ctx context.Context, f boxed.EgressFilter) iter.Seq2[boxed.EgressRecord, error] {
	return func(yield func(boxed.EgressRecord, error) bool) {
		q := url.Values{}
		set := func(name, value string, given bool) {
			if given {
				q.Set(name, value)
			}
		}
		set("sandbox", string(f.Sandbox), f.Sandbox != "")
		set("owner", f.Owner, f.Owner != "")
		set("denied", "true", f.Denied)
		set("follow", "true", f.Follow)
		set("after", strconv.FormatUint(f.After, 10), f.After > 0)
		set("limit", strconv.Itoa(f.Limit), f.Limit > 0)
		resp, err := c.request(ctx, http.MethodGet, "/v1/egress/log", q, nil, nil)
		if err != nil {
			yield(boxed.EgressRecord{}, err)
			return
		}
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(make([]byte, 0, 8<<10), maxEvent)
		for lines.Scan() {
			if len(lines.Bytes()) == 0 {
				continue
			}
			var line struct {
				boxed.EgressRecord
				Error *problem `json:"error"`
			}
			switch err := json.Unmarshal(lines.Bytes(), &line); {
			case err != nil:
				yield(boxed.EgressRecord{}, &boxed.Error{Code: boxed.CodeInternal, Message: "the node sent a record that cannot be read", Err: err})
				return
			case line.Error != nil:
				yield(boxed.EgressRecord{}, line.Error.err())
				return
			}
			if !yield(line.EgressRecord, nil) {
				return
			}
		}
		if ctx.Err() != nil {
			yield(boxed.EgressRecord{}, contextError(ctx))
		} else if err := lines.Err(); err != nil || f.Follow {
			yield(boxed.EgressRecord{}, &boxed.Error{Code: boxed.CodeLost, Message: "the audit log broke off", Err: err})
		}
	}
}

// VerifyAudit checks the audit log of the node that answers.
func (c *Client) VerifyAudit(ctx context.Context) (*boxed.AuditReport, error) {
	return get[boxed.AuditReport](ctx, c, "/v1/egress/audit", nil)
}

// RelayEgress is for nodes only.
func (c *Client) RelayEgress(ctx context.Context, r boxed.EgressRelay) (net.Conn, error) {
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return c.tunnelWith(ctx, "/v1/egress/relay", url.Values{"relay": {base64.RawURLEncoding.EncodeToString(raw)}}, r.Host)
}

// ownedPath is where something with a name is, or for administrators with OWNER/NAME.
func ownedPath(prefix, name string) (string, url.Values) {
	if owner, bare, ok := strings.Cut(name, "/"); ok {
		return prefix + url.PathEscape(bare), url.Values{"owner": {owner}}
	}
	return prefix + url.PathEscape(name), nil
}

// ListProfiles lists egress profiles.
func (c *Client) ListProfiles(ctx context.Context) ([]boxed.EgressProfile, error) {
	out, err := get[struct {
		Profiles []boxed.EgressProfile `json:"profiles"`
	}](ctx, c, "/v1/egress/profiles", nil)
	if err != nil {
		return nil, err
	}
	return out.Profiles, nil
}

// GetProfile describes an egress profile.
func (c *Client) GetProfile(ctx context.Context, name string) (*boxed.EgressProfile, error) {
	path, query := ownedPath("/v1/egress/profiles/", name)
	return get[boxed.EgressProfile](ctx, c, path, query)
}

// ApplyProfile applies an egress profile.
func (c *Client) ApplyProfile(ctx context.Context, text []byte, dry bool) (*boxed.EgressChange, error) {
	return ask[boxed.EgressChange](ctx, c, http.MethodPost, "/v1/egress/profiles", nil, map[string]any{"text": string(text), "dry": dry})
}

// DeleteProfile deletes an egress profile.
func (c *Client) DeleteProfile(ctx context.Context, name string) error {
	path, query := ownedPath("/v1/egress/profiles/", name)
	return c.call(ctx, http.MethodDelete, path, query, nil, nil)
}

// ListSecrets lists secrets.
func (c *Client) ListSecrets(ctx context.Context) ([]boxed.Secret, error) {
	out, err := get[struct {
		Secrets []boxed.Secret `json:"secrets"`
	}](ctx, c, "/v1/secrets", nil)
	if err != nil {
		return nil, err
	}
	return out.Secrets, nil
}

// secretBody is what a request may set of a secret.
type secretBody struct {
	Value   string       `json:"value,omitempty"`
	Owner   string       `json:"owner,omitempty"`
	Preset  string       `json:"preset,omitempty"`
	Hosts   []string     `json:"hosts,omitempty"`
	Slot    string       `json:"slot,omitempty"`
	Paths   []string     `json:"paths,omitempty"`
	Methods []string     `json:"methods,omitempty"`
	Env     []string     `json:"env,omitempty"`
	Author  string       `json:"author,omitempty"`
	May     []string     `json:"may,omitempty"`
	All     bool         `json:"all,omitempty"`
	HeldBy  boxed.NodeID `json:"held_by,omitempty"`
	Source  string       `json:"source,omitempty"`
}

// SetSecret sets or rotates a secret.
func (c *Client) SetSecret(ctx context.Context, r boxed.SecretRequest) (*boxed.Secret, error) {
	return ask[boxed.Secret](ctx, c, http.MethodPut, "/v1/secrets/"+url.PathEscape(r.Name), nil, secretBody{
		Value: r.Value, Owner: r.Owner, Preset: r.Preset, Hosts: r.Hosts, Slot: r.Slot, Paths: r.Paths, Methods: r.Methods, Env: r.Env,
		Author: r.Author, May: r.May, All: r.All, HeldBy: r.HeldBy, Source: r.Source,
	})
}

// RevokeSecret revokes a secret.
func (c *Client) RevokeSecret(ctx context.Context, name string) error {
	path, query := ownedPath("/v1/secrets/", name)
	return c.call(ctx, http.MethodDelete, path, query, nil, nil)
}

// Freeze shuts the egress of sandboxes on all nodes.
func (c *Client) Freeze(ctx context.Context, f boxed.EgressFreeze) (*boxed.EgressFreeze, error) {
	body := map[string]any{}
	if f.Owner != "" {
		body["owner"] = f.Owner
	}
	if f.Labels != nil {
		body["labels"] = f.Labels
	}
	if f.All {
		body["all"] = true
	}
	return ask[boxed.EgressFreeze](ctx, c, http.MethodPost, "/v1/egress/freezes", nil, body)
}

// Freezes lists what is frozen.
func (c *Client) Freezes(ctx context.Context) ([]boxed.EgressFreeze, error) {
	out, err := get[struct {
		Freezes []boxed.EgressFreeze `json:"freezes"`
	}](ctx, c, "/v1/egress/freezes", nil)
	if err != nil {
		return nil, err
	}
	return out.Freezes, nil
}

// Thaw opens what was frozen.
func (c *Client) Thaw(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/v1/egress/freezes/"+url.PathEscape(id), nil, nil, nil)
}
