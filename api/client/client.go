// Package client speaks the boxed HTTP API. A [Client] is a [boxed.API] and a
// [boxed.Admin]: what the node does in process, it does over the wire, with the
// same errors.
//
// It keeps no state but idle connections. Streams use WebSockets with the frames
// of internal/frame, a window in both directions, and no buffering of whole
// files or outputs. Start reading at [New]; exec.go and stream.go run programs.
package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Config says which node to speak to, and as whom.
type Config struct {
	Endpoint string // "http://127.0.0.1:8080", "https://boxed.example"; a path is kept in front of the API's
	APIKey   string // "" sends none

	// CAFile is a PEM file of certificates that may sign the node's, instead of
	// the system's. Fingerprint pins the node's own certificate by the SHA-256 of
	// its DER, in hex with or without "sha256:" and colons; then nothing else is
	// checked, neither names nor dates.
	CAFile      string
	Fingerprint string

	// MaxSilence is how long a node may send no ping on a stream, of which it
	// sends one every 30 seconds, before the stream counts as lost: a machine that
	// froze or vanished closes no connection. 0 means 2 minutes.
	MaxSilence  time.Duration
	DialTimeout time.Duration // of a connection with its TLS handshake; 0 means 10 s
	UserAgent   string        // "" means "boxed-client"

	// Name is what messages call the other side; "" means its endpoint.
	Name string
	// Header adds to the header of each request, or replaces what is there: a node
	// that passes a call on says for whom. Nil: nothing.
	Header func(ctx context.Context, h http.Header)

	// DialContext replaces the network: tests and the mesh use it. Nil: TCP.
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
	// HTTPClient replaces everything about connections. It must have no Timeout:
	// streams last. Nil: made from the fields above.
	HTTPClient *http.Client
}

// Client is safe for concurrent use.
type Client struct {
	base      *url.URL
	key       string
	userAgent string
	name      string
	prepare   func(context.Context, http.Header)
	http      *http.Client

	maxSilence time.Duration
}

var (
	_ boxed.API     = (*Client)(nil)
	_ boxed.Admin   = (*Client)(nil)
	_ boxed.Cluster = (*Client)(nil)
)

// New makes a client. It does not connect yet. Its errors have code invalid and
// name the field.
func New(cfg Config) (*Client, error) {
	base, err := url.Parse(cfg.Endpoint)
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" || base.RawQuery != "" || base.User != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%q is no endpoint; write it like http://127.0.0.1:8080", cfg.Endpoint).WithField("endpoint")
	}
	base.Path = strings.TrimRight(base.Path, "/")
	base.RawPath = ""
	c := &Client{base: base, key: cfg.APIKey, userAgent: cfg.UserAgent, name: cmp.Or(cfg.Name, base.String()), prepare: cfg.Header, http: cfg.HTTPClient, maxSilence: cmp.Or(cfg.MaxSilence, 2*time.Minute)}
	if c.userAgent == "" {
		c.userAgent = "boxed-client"
	}
	if strings.ContainsAny(cfg.APIKey, "\r\n \t") {
		return nil, boxed.Errorf(boxed.CodeInvalid, "the API key has spaces or line breaks in it").WithField("api_key")
	}
	if c.http != nil {
		return c, nil
	}
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 10 * time.Second
	}
	if base.Scheme == "http" && (cfg.Fingerprint != "" || cfg.CAFile != "") {
		return nil, boxed.Errorf(boxed.CodeInvalid, "a pinned certificate needs an https:// endpoint: over http:// the key would go in the clear").WithField("endpoint")
	}
	tlsConfig, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	dial, proxy := cfg.DialContext, (func(*http.Request) (*url.URL, error))(nil)
	if dial == nil {
		proxy = http.ProxyFromEnvironment
		dial = (&net.Dialer{Timeout: cfg.DialTimeout, KeepAlive: 15 * time.Second}).DialContext
	}
	c.http = &http.Client{
		// HTTP/1.1 only: WebSockets need it, and a stream of its own connection has
		// its own flow control.
		Transport: &http.Transport{
			Proxy:                 proxy,
			DialContext:           dial,
			TLSClientConfig:       tlsConfig,
			TLSHandshakeTimeout:   cfg.DialTimeout,
			ExpectContinueTimeout: time.Second,
			MaxIdleConnsPerHost:   64,
			IdleConnTimeout:       90 * time.Second,
			DisableCompression:    true,
			WriteBufferSize:       64 << 10,
			ReadBufferSize:        64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c, nil
}

func (cfg Config) tls() (*tls.Config, error) {
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if cfg.CAFile != "" {
		pem, err := os.ReadFile(cfg.CAFile)
		if err != nil {
			return nil, &boxed.Error{Code: boxed.CodeInvalid, Message: "read the CA file: " + err.Error(), Err: err}
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, boxed.Errorf(boxed.CodeInvalid, "%s has no certificate in it", cfg.CAFile).WithField("ca_file")
		}
	}
	if cfg.Fingerprint == "" {
		return t, nil
	}
	clean := strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(cfg.Fingerprint), "sha256:"), ":", "")
	want, err := hex.DecodeString(clean)
	if err != nil || len(want) != sha256.Size {
		return nil, boxed.Errorf(boxed.CodeInvalid, "a fingerprint is the SHA-256 of a certificate: 64 hex digits").WithField("fingerprint")
	}
	t.InsecureSkipVerify = true // the pin below is the verification
	t.VerifyConnection = func(cs tls.ConnectionState) error {
		got := sha256.Sum256(cs.PeerCertificates[0].Raw)
		if subtle.ConstantTimeCompare(got[:], want) != 1 {
			return fmt.Errorf("the node's certificate is not the pinned one: it has sha256:%x", got)
		}
		return nil
	}
	return t, nil
}

// Close closes idle connections. Calls that run go on.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Endpoint is where the client connects to.
func (c *Client) Endpoint() string { return c.base.String() }

// url is the address of a call. Path elements must be escaped.
func (c *Client) url(path string, query url.Values) string {
	u := c.base.String() + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	return u
}

func (c *Client) header(ctx context.Context) http.Header {
	h := http.Header{"User-Agent": {c.userAgent}}
	if c.key != "" {
		h.Set("Authorization", "Bearer "+c.key)
	}
	if c.prepare != nil {
		c.prepare(ctx, h)
	}
	return h
}

// request sends one request and returns its answer, whose body the caller
// closes. Statuses from 300 on become errors.
func (c *Client) request(ctx context.Context, method, path string, query url.Values, h http.Header, body io.Reader) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		req, err := http.NewRequestWithContext(ctx, method, c.url(path, query), body)
		if err != nil {
			return nil, &boxed.Error{Code: boxed.CodeInvalid, Message: err.Error(), Err: err}
		}
		req.Header = c.header(ctx)
		for k, v := range h {
			req.Header[k] = v
		}
		if up, ok := body.(*upload); ok {
			up.prepare(req)
		}
		resp, err := c.http.Do(req)
		switch {
		case err == nil && resp.StatusCode < 300:
			return resp, nil
		case err == nil:
			return nil, responseError(resp)
		case method == http.MethodGet && attempt == 0 && broke(err) && ctx.Err() == nil:
			continue // nothing was changed, so ask once more
		}
		return nil, c.transportError(ctx, err)
	}
}

// call sends in as JSON (nil: no body) and reads the answer into out (nil: none).
func (c *Client) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	var body io.Reader
	h := http.Header{}
	if in != nil {
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(in); err != nil {
			return &boxed.Error{Code: boxed.CodeInvalid, Message: "write the request: " + err.Error(), Err: err}
		}
		body = bytes.NewReader(b.Bytes())
		h.Set("Content-Type", "application/json")
	}
	resp, err := c.request(ctx, method, path, query, h, body)
	if err != nil {
		return err
	}
	defer drain(resp.Body)
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		if ctx.Err() != nil {
			return contextError(ctx)
		}
		return &boxed.Error{Code: boxed.CodeLost, Message: "the answer broke off", Err: err}
	}
	return nil
}

// drain lets the connection be used again.
func drain(body io.ReadCloser) {
	io.CopyN(io.Discard, body, 4<<10)
	body.Close()
}

func sandboxPath[T ~string](id T) string { return "/v1/sandboxes/" + url.PathEscape(string(id)) }

func execPath(id boxed.ID, exec boxed.ExecID) string {
	return sandboxPath(id) + "/execs/" + url.PathEscape(string(exec))
}

// Version is the version of the node's program.
func (c *Client) Version(ctx context.Context) (string, error) {
	var out struct {
		Version string `json:"version"`
	}
	err := c.call(ctx, http.MethodGet, "/version", nil, nil, &out)
	return out.Version, err
}

// Ready is nil if the node can take work, and otherwise an error with code
// not_ready whose Detail["problems"] says why.
func (c *Client) Ready(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, "/readyz", nil, nil, nil)
}

// NodeInfo describes the node that answers.
func (c *Client) NodeInfo(ctx context.Context) (*boxed.NodeInfo, error) {
	return get[boxed.NodeInfo](ctx, c, "/v1/node", nil)
}

func get[T any](ctx context.Context, c *Client, path string, query url.Values) (*T, error) {
	return ask[T](ctx, c, http.MethodGet, path, query, nil)
}

func ask[T any](ctx context.Context, c *Client, method, path string, query url.Values, in any) (*T, error) {
	out := new(T)
	if err := c.call(ctx, method, path, query, in, out); err != nil {
		return nil, err
	}
	return out, nil
}
