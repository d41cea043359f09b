package api

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"strings"
	"sync/atomic"

	"github.com/boxed-mesh/boxed"
)

// passOn has the node answer that owns the sandbox which the call is about, if it
// is another than this. The request goes as it came, so a stream costs this node
// two copies and no thought. It reports whether it did.
func (c *call) passOn() (bool, error) {
	if c.s.cfg.Owner == nil || !strings.HasPrefix(c.route.path, sandboxPath) {
		return false, nil
	}
	id, err := c.sandbox()
	if err != nil {
		return false, err
	}
	owner, err := c.s.cfg.Owner(c.ctx, id)
	if owner == nil || err != nil {
		return false, err
	}
	ctx, done := c.hopContext()
	defer done()
	out := c.r.WithContext(ctx)
	if out.Body != nil && out.Body != http.NoBody {
		out.Body = io.NopCloser(c.body(c.s.cfg.BodyIdle))
	}
	var failed error
	proxy := &httputil.ReverseProxy{
		Transport: owner, FlushInterval: -1, BufferPool: copyBuffers{c.s},
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", string(id.Node()), string(id.Node())
			p.Out.URL.Path, p.Out.URL.RawPath = c.pathFor(id)
			p.Out.Header.Set("X-Request-ID", c.id)
			p.Out.Header.Set("X-Forwarded-For", c.addr.String())
			// What Connection names is stripped; the key is not the client's to strip.
			if secret := boxed.CredentialFrom(c.ctx); secret != "" {
				p.Out.Header.Set("Authorization", "Bearer "+secret)
				p.Out.Header.Del("X-Boxed-API-Key")
			}
			for _, h := range []string{"Origin", "Referer", "Cookie", "X-Boxed-Assertion"} { // judged already, or not the client's to say
				p.Out.Header.Del(h)
			}
		},
		ModifyResponse: func(r *http.Response) error {
			for name := range r.Header {
				if ownersHeader(name) {
					c.w.Header().Del(name) // the owner's stands for ours
				} else {
					r.Header.Del(name) // what a browser heeds is the entry's to say
				}
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err },
		ErrorLog:     log.New(io.Discard, "", 0),
	}
	proxy.ServeHTTP(c.w, out)
	if failed == nil {
		return true, nil
	}
	var known *boxed.Error
	switch {
	case c.ctx.Err() != nil:
		return true, c.outcome(c.ctx.Err())
	case errors.As(failed, &known):
		return true, known
	}
	return true, &boxed.Error{
		Code: boxed.CodeLost, Err: failed,
		Message: "the connection to node " + string(id.Node()) + " broke before its answer came; the outcome is not known",
	}
}

// hopContext is the context of what is passed on. When this node goes away, the
// connection to the owner breaks, or the owner would take it for the client's
// leaving and end what it runs.
func (c *call) hopContext() (ctx context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(c.ctx))
	var conn atomic.Pointer[net.Conn]
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { conn.Store(&info.Conn) },
	})
	stop := context.AfterFunc(c.ctx, func() {
		cause := context.Cause(c.ctx)
		if used := conn.Load(); used != nil && errors.Is(cause, boxed.ErrGoingAway) {
			if peer, ok := (*used).(interface{ Abort() error }); ok {
				peer.Abort()
			}
		}
		cancel(cause)
	})
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// ownersHeader reports whether a header of an answer is the owner's to set.
func ownersHeader(name string) bool {
	switch name {
	case "Content-Type", "Content-Length", "Content-Range", "Content-Disposition", "Accept-Ranges", "Etag", "Last-Modified", "Date",
		"Allow", "Location", "Retry-After", "Upgrade", "Connection", "X-Accel-Buffering":
		return true
	}
	return strings.HasPrefix(name, "X-Boxed-") || strings.HasPrefix(name, "Sec-Websocket-")
}

// pathFor is the path of the call with the sandbox by its ID.
func (c *call) pathFor(id boxed.ID) (path, raw string) {
	const prefix = "/v1/sandboxes/"
	_, rest, _ := strings.Cut(strings.TrimPrefix(c.r.URL.Path, prefix), "/")
	_, rawRest, more := strings.Cut(strings.TrimPrefix(c.r.URL.EscapedPath(), prefix), "/")
	path, raw = prefix+string(id), prefix+string(id)
	if more {
		path, raw = path+"/"+rest, raw+"/"+rawRest
	}
	return path, raw
}

// copyBuffers lends buffers for what is passed on.
type copyBuffers struct{ s *Server }

// copyBuffer is as much as one read of TLS and one frame of a stream take.
const copyBuffer = 64 << 10

func (b copyBuffers) Get() []byte {
	if buf, ok := b.s.buffers.Get().(*[]byte); ok {
		return *buf
	}
	return make([]byte, copyBuffer)
}

func (b copyBuffers) Put(buf []byte) { b.s.buffers.Put(&buf) }

// Owner finds who answers for a sandbox: nil is this node.
type Owner func(ctx context.Context, id boxed.ID) (http.RoundTripper, error)
