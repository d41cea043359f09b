package egress

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// fronts are the HTTP servers behind which all sandboxes' requests are served: as a
// proxy's, as those of plain HTTP to one host, as those within intercepted TLS. They serve
// nothing else (EN8): what a connection is, its frontConn says.
type fronts struct {
	proxy  *Proxy
	h1, h2 *front
}

// front is the server of one version of HTTP.
type front struct {
	conns  chan net.Conn
	server *http.Server
	done   sync.WaitGroup
	ended  chan struct{}
	end    sync.Once
}

// frontConn is a connection on its way through the server.
type frontConn struct {
	net.Conn
	handler http.Handler
	once    sync.Once
	closed  chan struct{}
}

func (c *frontConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// CloseWrite passes on the end of what is written. EL2: a WebSocket ends by sides.
func (c *frontConn) CloseWrite() error { return closeWrite(c.Conn) }

type frontKey struct{}

func newFronts(p *Proxy) *fronts {
	f := &fronts{proxy: p, h1: newFront(p), h2: newFront(p)}
	// Its TLS has ended when a connection comes here, so that to the server there is none.
	f.h2.server.Protocols = new(http.Protocols)
	f.h2.server.Protocols.SetUnencryptedHTTP2(true)
	f.h2.server.HTTP2 = h2Buffers()
	f.h2.server.HTTP2.MaxConcurrentStreams = h2Streams
	for _, one := range []*front{f.h1, f.h2} {
		one.done.Go(func() { one.server.Serve(one) })
	}
	return f
}

func newFront(p *Proxy) *front {
	f := &front{conns: make(chan net.Conn), ended: make(chan struct{})}
	f.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.Context().Value(frontKey{}).(*frontConn).handler.ServeHTTP(w, r)
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, frontKey{}, c.(*frontConn))
		},
		ReadHeaderTimeout: p.cfg.Times.Hello, IdleTimeout: p.cfg.Times.Idle, MaxHeaderBytes: framingHead,
		ErrorLog: log.New(io.Discard, "", 0), DisableGeneralOptionsHandler: true,
	}
	return f
}

// Accept, Close and Addr make it the server's listener.
func (f *front) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.ended:
		return nil, net.ErrClosed
	}
}

// Close does nothing: close ends it.
func (f *front) Close() error   { return nil }
func (f *front) Addr() net.Addr { return &net.UnixAddr{Name: "egress", Net: "unix"} }

func (f *front) close() {
	f.end.Do(func() { close(f.ended) })
	f.server.Close()
	f.done.Wait()
}

func (f *fronts) close() {
	f.h1.close()
	f.h2.close()
}

// serve serves the requests on a connection until it is closed.
func (f *front) serve(conn net.Conn, h http.Handler) {
	c := &frontConn{Conn: conn, handler: h, closed: make(chan struct{})}
	select {
	case f.conns <- c:
		<-c.closed
	case <-f.ended:
		conn.Close()
	}
}

// serveProxy serves a client of the HTTP proxy.
func (f *fronts) serveProxy(s *session, conn Conn) {
	framed := newFraming(conn, func(e *framingError) {
		s.deny(boxed.EntryHTTP, "", 0, refuse(boxed.EgressInvalidRequest, "%s", e.Why))
	})
	h := &proxyHandler{s: s, conn: conn, framed: framed}
	h.plain = newPlain(s)
	defer h.plain.close()
	f.h1.serve(framed, h)
}

// proxyHandler serves one connection to the HTTP proxy.
type proxyHandler struct {
	s      *session
	conn   Conn
	framed *framing
	plain  *plain
}

func (h *proxyHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect:
		h.connect(w, r)
	case strings.HasPrefix(r.RequestURI, "http://"):
		h.plain.serveAbsolute(w, r)
	default:
		hint := "this is a proxy: give it http://HOST/… or CONNECT HOST:PORT"
		if strings.HasPrefix(strings.ToLower(r.RequestURI), "https:") {
			hint = "ask for https with CONNECT"
		}
		h.deny(w, "", 0, refuse(boxed.EgressInvalidRequest, "%s", hint))
	}
}

func (h *proxyHandler) deny(w http.ResponseWriter, host string, port uint16, r *refusal) {
	writeRefusal(w, h.s.deny(boxed.EntryHTTP, host, port, r), host, port)
}

// connect serves a CONNECT: all that can be known is judged before it is answered.
func (h *proxyHandler) connect(w http.ResponseWriter, r *http.Request) {
	host, port, err := parseTarget(r.RequestURI, 0)
	if err != nil {
		h.deny(w, withoutUser(r.RequestURI), 0, refuse(boxed.EgressInvalidName, "%v", err))
		return
	}
	if _, tokens, _ := h.s.now(); tokens.anywhere(r.Header) { // EC17: microsandbox#986
		h.deny(w, host.String(), port, refuse(boxed.EgressMisuse, "a placeholder in a header for the proxy"))
		return
	}
	f, refused := h.s.open(r.Context(), boxed.EntryHTTP, host, port)
	if refused != nil {
		writeRefusal(w, refused, host.String(), port)
		return
	}
	defer f.close()
	upstream, refused := f.reach(r.Context())
	if refused != nil {
		writeRefusal(w, f.deny(refused), host.String(), port)
		return
	}
	// What the server and the guard have read already is the tunnel's.
	raw, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		upstream.Close()
		return
	}
	defer raw.Close()
	raw.SetDeadline(time.Time{})
	early := make([]byte, buffered.Reader.Buffered())
	io.ReadFull(buffered.Reader, early)
	early = append(early, h.framed.rest()...)
	if _, err := io.WriteString(h.conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		upstream.Close()
		return
	}
	f.carry(h.conn, early, upstream)
}

// Denied is what a program is told of a refusal.
type Denied struct {
	Error  string             `json:"error"` // "egress_denied"
	Reason boxed.EgressReason `json:"reason"`
	Host   string             `json:"host,omitempty"`
	Detail string             `json:"detail,omitempty"`
	Hint   string             `json:"hint,omitempty"`
}

// ReasonHeader has a refusal's reason.
const ReasonHeader = "X-Egress-Reason"

// writeRefusal tells a program why, and what to do.
func writeRefusal(w http.ResponseWriter, r *refusal, host string, port uint16) {
	head := w.Header()
	head.Set("Content-Type", "application/json")
	head.Set("Cache-Control", "no-store")
	head.Set(ReasonHeader, string(r.Reason))
	status := r.status()
	if status == http.StatusTooManyRequests {
		head.Set("Retry-After", "1")
	}
	body, _ := json.Marshal(Denied{Error: "egress_denied", Reason: r.Reason, Host: host, Detail: r.Detail, Hint: hintOf(r.Reason, host, port)}) // of strings
	head.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body)
}

// hintOf is what to do about a refusal; port 0 is not known.
func hintOf(r boxed.EgressReason, host string, port uint16) string {
	if port != 0 && port != 443 {
		host = net.JoinHostPort(host, itoa(port))
	}
	switch r {
	case boxed.EgressNotListed, boxed.EgressPort:
		return "to allow it: boxedctl egress allow SANDBOX " + host
	case boxed.EgressNoProfile:
		return "this sandbox was given no egress: boxedctl run --allow " + host + " …, or --egress PROFILE"
	case boxed.EgressPrivateAddress:
		return "the operator of the host may open exactly this: egress.open"
	case boxed.EgressNeverAddress:
		return "nothing can allow this address"
	case boxed.EgressGraphQL:
		return "a token that is limited to repositories cannot be limited in GraphQL; use the REST API (gh api repos/…)"
	case boxed.EgressForeignCredential:
		return "only this sandbox's own placeholder is accepted there; attach the secret: --secret NAME"
	case boxed.EgressNoCredential:
		return "boxedctl secret ls shows where the secret is"
	case boxed.EgressPlainHTTP:
		return "use https, or name port 80 in a rule"
	case boxed.EgressTooMany, boxed.EgressTooFast:
		return "try again in a moment"
	}
	return ""
}

// anywhere reports whether a header has a placeholder, also in what Basic encodes.
func (p *placeholders) anywhere(h http.Header) bool {
	for name, values := range h {
		for _, v := range values {
			if p.scan.hits(v) || p.scan.hits(name) {
				return true
			}
			if _, payload, ok := strings.Cut(v, " "); ok && (&swapping{placeholders: p}).basicHits(payload) {
				return true
			}
		}
	}
	return false
}

// shown is a text for the record, which never holds a placeholder.
func (p *placeholders) shown(text string) string {
	if p != nil && p.scan.hits(text) {
		return redacted
	}
	return text
}

// parseTarget is ParseAuthority of what a program asks the proxy for. What stands before an
// "@" is a credential, of which nothing is said.
func parseTarget(s string, defaultPort uint16) (Host, uint16, error) {
	if strings.Contains(s, "@") {
		return Host{}, 0, errors.New("a user or a password before the host")
	}
	return ParseAuthority(s, defaultPort)
}

func withoutUser(authority string) string { return authority[strings.LastIndexByte(authority, '@')+1:] }

// hopByHop are headers of one connection (RFC 9110, 7.6.1), besides those that Connection
// names.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Http2-Settings",
}

// dropHops takes out what is of this connection only.
func dropHops(h http.Header) {
	for _, v := range h.Values("Connection") {
		for name := range strings.SplitSeq(v, ",") {
			h.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range hopByHop {
		h.Del(name)
	}
}

// dropIdentity takes out headers by which somebody behind a proxy is known: nothing here
// believes one, and nobody outside is to be told.
func dropIdentity(h http.Header) {
	for _, name := range []string{
		"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Forwarded-Proto", "X-Forwarded-Server",
		"X-Host", "X-Original-Host", "X-Real-Ip", "Via",
	} {
		h.Del(name)
	}
}

// errEnded says that a body was cut off.
var errEnded = errors.New("the connection has ended")
