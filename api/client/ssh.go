package client

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"

	"github.com/boxed-mesh/boxed"
)

var _ boxed.SSH = (*Client)(nil)

// AddSSHKey adds a public key.
func (c *Client) AddSSHKey(ctx context.Context, req boxed.SSHKeyRequest) (*boxed.SSHKey, error) {
	return ask[boxed.SSHKey](ctx, c, http.MethodPost, "/v1/ssh/keys", nil, req)
}

// ListSSHKeys lists public keys.
func (c *Client) ListSSHKeys(ctx context.Context) ([]boxed.SSHKey, error) {
	out, err := get[struct {
		Keys []boxed.SSHKey `json:"keys"`
	}](ctx, c, "/v1/ssh/keys", nil)
	if err != nil {
		return nil, err
	}
	return out.Keys, nil
}

// RevokeSSHKey revokes a public key for good.
func (c *Client) RevokeSSHKey(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/v1/ssh/keys/"+url.PathEscape(id), nil, nil, nil)
}

// SSHInfo describes the node's SSH front door.
func (c *Client) SSHInfo(ctx context.Context) (*boxed.SSHInfo, error) {
	return get[boxed.SSHInfo](ctx, c, "/v1/ssh", nil)
}

// ListRecordings lists the recordings of the node that answers.
func (c *Client) ListRecordings(ctx context.Context) ([]boxed.Recording, error) {
	out, err := get[struct {
		Recordings []boxed.Recording `json:"recordings"`
	}](ctx, c, "/v1/ssh/recordings", nil)
	if err != nil {
		return nil, err
	}
	return out.Recordings, nil
}

// ReadRecording reads a recording. The caller closes it.
func (c *Client) ReadRecording(ctx context.Context, id string) (io.ReadCloser, error) {
	resp, err := c.request(ctx, http.MethodGet, "/v1/ssh/recordings/"+url.PathEscape(id), nil, nil, nil)
	if err != nil {
		return nil, err
	}
	return &download{ctx, resp.Body}, nil
}

// DialSSH connects to the node's SSH front door. The caller closes it.
func (c *Client) DialSSH(ctx context.Context) (net.Conn, error) {
	return c.tunnelTo(ctx, "/v1/ssh/tunnel", "ssh")
}
