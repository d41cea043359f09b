package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/relay"
)

func itoa(port uint16) string { return strconv.Itoa(int(port)) }

// Bounds of what a destination answers.
const (
	maxAnswerHead = 256 << 10 // bytes
	h2Streams     = 100       // at once on one connection; CVE-2023-39325
)

// intercept ends the sandbox's TLS and serves the requests within.
func (f *flow) intercept(conn Conn, prefix []byte, upstream net.Conn) {
	_, _, ca := f.s.now()
	if ca == nil {
		f.deny(refuse(boxed.EgressNoCredential, "the sandbox has no certificate authority"))
		return
	}
	up := newUpstream(f, "https", upstream)
	if f.held() {
		up = newHeldUpstream(f, upstream)
	} else {
		up.greet() // while the program's own handshake goes on
	}
	defer up.close()
	shaken, r := f.shake(withPrefix(conn, prefix), ca)
	if r != nil {
		f.deny(r)
		return
	}
	inner := &heardConn{Conn: shaken}
	defer func() {
		inner.Close()
		if inner.silent.Load() && f.ctx.Err() == nil {
			f.deny(refuse(boxed.EgressRejectedCA, "the program ended the connection after the handshake and asked for nothing, as one does that looks at the certificate late (GnuTLS) and does not trust the sandbox's own CA; see docs/egress-tls.md"))
		}
	}()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		(&forwarding{f: f, w: w, in: r, transport: up, scheme: "https"}).serve()
	})
	if inner.ConnectionState().NegotiatedProtocol == "h2" {
		f.s.proxy.fronts.h2.serve(inner, handler)
		return
	}
	f.s.proxy.fronts.h1.serve(newFraming(inner, f.misframed), fullDuplex(handler))
}

// heardConn knows whether the program ended it before it had said anything.
type heardConn struct {
	*tls.Conn
	heard, silent atomic.Bool
}

func (c *heardConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	switch {
	case n > 0:
		c.heard.Store(true)
	case err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, net.ErrClosed) && !c.heard.Load():
		c.silent.Store(true)
	}
	return n, err
}

// fullDuplex lets an answer begin before a request has ended, as HTTP/2 does by itself.
func fullDuplex(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		h.ServeHTTP(w, r)
	})
}

// shake is the TLS handshake with a program in the sandbox, for the flow's host alone.
func (f *flow) shake(conn net.Conn, ca *authority) (*tls.Conn, *refusal) {
	var judged *refusal
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			f.rec.SNI = h.ServerName
			if judged = judgeHello(h, f.host, true); judged != nil {
				return nil, judged
			}
			leaf, err := ca.leaf(f.host.String())
			if err != nil {
				judged = refuse(boxed.EgressNoCredential, "%v", err)
				return nil, judged
			}
			c := &tls.Config{MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true, Certificates: []tls.Certificate{*leaf}}
			if len(h.SupportedProtos) > 0 { // ET11: one that offers none wants HTTP/1.1
				c.NextProtos = []string{"h2", "http/1.1"}
			}
			return c, nil
		},
	}
	inner := tls.Server(conn, config)
	ctx, cancel := context.WithTimeout(f.ctx, f.s.proxy.cfg.Times.Hello)
	defer cancel()
	err := inner.HandshakeContext(ctx)
	var remote *net.OpError
	switch {
	case err == nil:
		return inner, nil
	case judged != nil:
		return nil, judged
	case errors.As(err, &remote) && remote.Op == "remote error":
		return nil, refuse(boxed.EgressRejectedCA, "%v: the program does not trust the sandbox's own CA; see docs/egress-tls.md for the variable it needs", remote.Err)
	case f.rec.SNI == "":
		return nil, refuse(boxed.EgressNotTLS, "%v", err)
	}
	return nil, refuse(boxed.EgressRejectedCA, "%v: the program ended the handshake, as one does that does not trust the sandbox's own CA; see docs/egress-tls.md", err)
}

// upstream are the connections to a flow's destination: of one connection of the sandbox,
// so that nothing of two is ever mixed.
type upstream struct {
	f         *flow
	transport *http.Transport

	mu    sync.Mutex
	first net.Conn // that was made already
	spare bool     // the flow's own place is not taken by a connection yet
	// greeted is a connection whose handshake was begun ahead of the first request; nil:
	// none, or it is taken.
	greeted chan greeting
}

// greeting is what became of a handshake.
type greeting struct {
	conn net.Conn
	err  error
}

// greet begins the handshake with the destination.
func (u *upstream) greet() {
	u.greeted = make(chan greeting, 1)
	go func(done chan<- greeting) {
		conn, err := u.handshake(u.f.ctx, protocols())
		done <- greeting{conn, err}
	}(u.greeted)
}

func newUpstream(f *flow, scheme string, first net.Conn) *upstream {
	u := &upstream{f: f, first: first, spare: first == nil}
	t := f.s.proxy.cfg.Times
	u.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return u.dial(ctx) },
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return u.dialTLS(ctx)
		},
		ForceAttemptHTTP2: scheme == "https", DisableCompression: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: 90 * time.Second,
		ResponseHeaderTimeout: t.Answer, ExpectContinueTimeout: 5 * time.Second, MaxResponseHeaderBytes: maxAnswerHead,
		HTTP2: h2Buffers(),
	}
	return u
}

// h2Buffers bound what waits for a side that does not read, in bytes: Go's own are 4 MiB for
// each of a hundred streams.
func h2Buffers() *http.HTTP2Config {
	return &http.HTTP2Config{MaxReceiveBufferPerStream: 512 << 10, MaxReceiveBufferPerConnection: 1 << 20}
}

func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	return u.transport.RoundTrip(r)
}

func (u *upstream) close() {
	u.transport.CloseIdleConnections()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.greeted != nil {
		go closeGreeted(u.greeted)
		u.greeted = nil
	}
	if u.first != nil {
		u.first.Close()
	}
}

// dial takes the connection that was made already, or makes one more: resolved and judged
// anew.
func (u *upstream) dial(ctx context.Context) (net.Conn, error) {
	u.mu.Lock()
	conn, spare := u.first, u.spare
	u.first, u.spare = nil, false
	u.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	done := func() {}
	if !spare { // requests in parallel may need several, which count too
		var r *refusal
		if done, r = u.f.s.limiter.connection(); r != nil {
			return nil, r
		}
	}
	conn, r := u.f.connect(ctx)
	if r != nil {
		done()
		return nil, r
	}
	return &placed{conn, done}, nil
}

// placed is a connection that gives its place back when it is closed.
type placed struct {
	net.Conn
	done func()
}

func (c *placed) Close() error {
	c.done()
	return c.Conn.Close()
}

func (c *placed) CloseWrite() error { return closeWrite(c.Conn) }

// closeWrite passes on the end of what is written, where the connection has sides.
func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// dialTLS takes the connection that was greeted already, or makes one more.
func (u *upstream) dialTLS(ctx context.Context) (net.Conn, error) {
	u.mu.Lock()
	greeted := u.greeted
	u.greeted = nil
	u.mu.Unlock()
	if greeted == nil {
		return u.handshake(ctx, protocols())
	}
	select {
	case g := <-greeted:
		return g.conn, g.err
	case <-ctx.Done():
		go closeGreeted(greeted)
		return nil, ctx.Err()
	}
}

// closeGreeted closes a connection that nobody took.
func closeGreeted(greeted <-chan greeting) {
	if g := <-greeted; g.conn != nil {
		g.conn.Close()
	}
}

// protocols are those of requests, the best first.
func protocols() []string { return []string{"h2", "http/1.1"} }

// handshake is a connection to the destination with its TLS.
func (u *upstream) handshake(ctx context.Context, protos []string) (net.Conn, error) {
	conn, err := u.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := tls.Client(conn, &tls.Config{
		ServerName: u.f.host.String(), RootCAs: u.f.s.proxy.cfg.Roots, NextProtos: protos, MinVersion: tls.VersionTLS12,
	})
	ctx, cancel := context.WithTimeout(ctx, u.f.s.proxy.cfg.Times.Hello)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		conn.Close()
		var cert *tls.CertificateVerificationError
		if errors.As(err, &cert) {
			return nil, refuse(boxed.EgressUpstreamTLS, "the certificate of %s is not good: %v", u.f.host, cert.Err)
		}
		return nil, refuse(boxed.EgressUpstreamTLS, "%v", err)
	}
	return c, nil
}

// upgrade carries a WebSocket. It opens only when the destination has agreed.
func (q *forwarding) upgrade(out *http.Request) {
	up, ok := q.transport.(*upstream)
	if !ok {
		q.refuse(refuse(boxed.EgressUpgrade, "not here"))
		return
	}
	var conn net.Conn
	var err error
	if out.URL.Scheme == "https" {
		conn, err = up.handshake(q.ctx, []string{"http/1.1"})
	} else {
		conn, err = up.dial(q.ctx)
	}
	if err != nil {
		r := q.failed(err)
		q.tell(r)
		q.ended(r.status(), r)
		return
	}
	q.connected(conn)
	stop := context.AfterFunc(q.ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(q.f.s.proxy.cfg.Times.Answer))
	if err := out.Write(conn); err != nil {
		q.fail(err)
		return
	}
	head := &io.LimitedReader{R: conn, N: maxAnswerHead}
	r := bufio.NewReader(head)
	resp, err := http.ReadResponse(r, out)
	if err != nil {
		if head.N <= 0 {
			err = refuse(boxed.EgressTruncated, "the head of the answer is larger than %d bytes", maxAnswerHead)
		}
		q.fail(err)
		return
	}
	head.N = math.MaxInt64
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		q.ended(resp.StatusCode, q.answer(resp))
		return
	}
	if !strings.EqualFold(resp.Header.Get("Upgrade"), "websocket") || resp.Header.Get("Sec-Websocket-Accept") == "" { // EF6
		q.fail(errors.New("an answer that changes to something else than WebSocket"))
		return
	}
	conn.SetDeadline(time.Time{})
	stop() // what the program has said its last of is no request any more
	defer context.AfterFunc(q.life, func() { conn.Close() })()
	q.switched(resp, conn, r)
}

func (q *forwarding) fail(err error) {
	r := q.failed(err)
	q.tell(r)
	q.ended(r.status(), r)
}

// switched tells the program that the protocol has changed, and pumps.
func (q *forwarding) switched(resp *http.Response, conn net.Conn, r *bufio.Reader) {
	dropHops(resp.Header)
	q.scrub(resp.Header)
	raw, buffered, err := http.NewResponseController(q.w).Hijack()
	if err != nil {
		q.ended(resp.StatusCode, err)
		return
	}
	q.hijacked = true
	defer raw.Close()
	raw.SetDeadline(time.Time{})
	fmt.Fprintf(buffered, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n")
	resp.Header.Write(buffered)
	buffered.WriteString("\r\n")
	if err := buffered.Flush(); err != nil {
		q.ended(resp.StatusCode, err)
		return
	}
	q.idle.Stop() // from here on it is of the two sides
	t := q.f.s.proxy.cfg.Times
	res := relay.Both(&bufferedConn{raw, buffered.Reader}, &bufferedConn{conn, r}, relay.Options{
		Idle: t.Idle, Drain: t.Drain,
		Passed: func(up bool, n int) error { return q.f.s.limiter.passed(q.f.ctx, up, n) },
	})
	q.up.n.Store(res.Up)
	q.down.n.Store(res.Down)
	if errors.Is(res.Err, relay.ErrIdle) {
		res.Err = refuse(boxed.EgressIdle, "nothing was sent for %s", t.Idle)
	}
	q.ended(resp.StatusCode, asEnd(q.life, res.Err))
}

// asEnd is why a connection ended, where that was us.
func asEnd(ctx context.Context, err error) error {
	if r := (*refusal)(nil); errors.As(context.Cause(ctx), &r) || errors.As(err, &r) {
		return r
	}
	return nil
}

// bufferedConn is a connection of which a reader holds a part. EF7: those bytes come first.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func (c *bufferedConn) CloseWrite() error { return closeWrite(c.Conn) }

// servePlain serves requests without TLS to one host.
func (f *fronts) servePlain(fl *flow, conn Conn, prefix []byte, first net.Conn) {
	up := newUpstream(fl, "http", first)
	defer up.close()
	f.h1.serve(newFraming(withPrefix(conn, prefix), fl.misframed), fullDuplex(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		(&forwarding{f: fl, w: w, in: r, transport: up, scheme: "http"}).serve()
	})))
}

// plain serves requests of a proxy's client for URLs without TLS. It keeps connections per
// host for as long as the client's lives.
type plain struct {
	s *session

	mu    sync.Mutex
	hosts map[plainKey]*plainHost
}

type plainKey struct {
	host Host
	port uint16
}

type plainHost struct {
	f  *flow
	up *upstream
}

// maxPlainHosts is how many hosts one connection to the proxy asks for; more open a new one.
const maxPlainHosts = 16

func newPlain(s *session) *plain { return &plain{s: s, hosts: map[plainKey]*plainHost{}} }

func (p *plain) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range p.hosts {
		h.up.close()
		h.f.close()
	}
}

// serveAbsolute serves a request in absolute form.
func (p *plain) serveAbsolute(w http.ResponseWriter, r *http.Request) {
	rest := strings.TrimPrefix(r.RequestURI, "http://")
	authority, _, _ := strings.Cut(rest, "/")
	authority, _, _ = strings.Cut(authority, "?")
	host, port, err := parseTarget(authority, 80)
	if err != nil {
		writeRefusal(w, p.s.deny(boxed.EntryHTTP, withoutUser(authority), 0, refuse(boxed.EgressInvalidName, "%v", err)), withoutUser(authority), 0)
		return
	}
	h, refused := p.host(r.Context(), host, port)
	if refused != nil {
		writeRefusal(w, refused, host.String(), port)
		return
	}
	http.NewResponseController(w).EnableFullDuplex()
	(&forwarding{f: h.f, w: w, in: r, transport: h.up, scheme: "http"}).serve()
}

// host is the flow for a host, judged anew for each request.
func (p *plain) host(ctx context.Context, host Host, port uint16) (*plainHost, *refusal) {
	key := plainKey{host, port}
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.hosts[key]; h != nil {
		if h.f.ctx.Err() == nil {
			return h, nil
		}
		h.up.close()
		h.f.close()
		delete(p.hosts, key)
	}
	if len(p.hosts) >= maxPlainHosts {
		for k, h := range p.hosts {
			h.up.close()
			h.f.close()
			delete(p.hosts, k)
			break
		}
	}
	f, r := p.s.open(ctx, boxed.EntryHTTP, host, port)
	if r != nil {
		return nil, r
	}
	if port != 80 || f.mode == boxed.EgressIntercept {
		f.close()
		return nil, f.deny(refuse(boxed.EgressPlainHTTP, "the rule is for TLS"))
	}
	h := &plainHost{f: f, up: newUpstream(f, "http", nil)}
	p.hosts[key] = h
	return h, nil
}
