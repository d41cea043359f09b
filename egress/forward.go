package egress

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
)

// forwarding is one request that the proxy reads.
type forwarding struct {
	f         *flow
	w         http.ResponseWriter
	in        *http.Request
	transport http.RoundTripper
	scheme    string // of the destination
	real      *scanner
	rule      *Rule
	sign      *signing
	rec       boxed.EgressRecord
	begun     time.Time
	up, down  counter
	// judged: rule and upgrades are known. They are not written any more.
	judged             atomic.Bool
	upgrades, hijacked bool
	life               context.Context // ends with the flow, or when the request is allowed no more
	end                context.CancelCauseFunc
	ctx                context.Context // ends with the program's interest, the flow, or when nothing happens
	idle               *time.Timer
	wait               atomic.Int64 // how long nothing may happen, as a time.Duration
}

// counter counts a body's bytes, slows them down, and refuses too many.
type counter struct {
	f     *flow
	up    bool
	n     atomic.Int64 // a body may still be read when its answer has ended
	moved func()       // called when something was; nil: nobody is told
}

func (c *counter) pass(n int) error {
	c.n.Add(int64(n))
	if c.moved != nil {
		c.moved()
	}
	return c.f.s.limiter.passed(c.f.ctx, c.up, n)
}

// judge is everything that a request must be before anything of it leaves.
func (q *forwarding) judge() *refusal {
	r := q.in
	if !q.sameHost() { // ET2, ET7: also on a connection that is kept
		return refuse(boxed.EgressHost, "the request is for another host than the connection")
	}
	path := r.URL.EscapedPath()
	// A target like "http:http://other/x" has no path and no host, and says both.
	if r.URL.Opaque != "" || path != "" && path[0] != '/' && !(path == "*" && r.Method == http.MethodOptions) {
		return refuse(boxed.EgressInvalidRequest, "the target is no path")
	}
	// EP3: not as of when the connection was opened.
	if r := q.f.s.outdated(q.f); r != nil {
		return r
	}
	policy, _, _ := q.f.s.now()
	dec := policy.Decide(q.f.host, q.f.port)
	if !dec.Allowed() {
		return refuse(boxed.EgressChanged, "the policy has changed")
	}
	rule, res := dec.admit(r.Method, path)
	if res != nil {
		res.Detail = cmp.Or(res.Detail, q.rec.Method+" "+clip(q.rec.Path, 200))
		return res
	}
	if name := overrides(r.Header, dec); name != "" {
		return &refusal{Reason: boxed.EgressMethod, Detail: "the header " + name + " would have a server take it for another request", Rule: dec.Rule}
	}
	q.rule, q.rec.Rule = rule, rule.String()
	if up := r.Header.Get("Upgrade"); up != "" {
		if !strings.EqualFold(up, "websocket") || !rule.webSocket() || r.ProtoMajor != 1 {
			return refuse(boxed.EgressUpgrade, "the rule allows no change of protocols; websocket: true would allow that one")
		}
		q.upgrades = true
	}
	q.judged.Store(true)
	// A policy that came meanwhile has not found it under way.
	if now, _, _ := q.f.s.now(); now != policy && !q.still(now.Decide(q.f.host, q.f.port)) {
		return refuse(boxed.EgressChanged, "the policy has changed")
	}
	return nil
}

// still reports whether a request that is under way would be let through as the policy is
// now. EP3: OpenShell#1118.
func (q *forwarding) still(dec Decision) bool {
	if !q.judged.Load() {
		return true // it is still to be judged
	}
	rule, r := dec.admit(q.in.Method, q.in.URL.EscapedPath())
	return r == nil && (!q.upgrades || rule.webSocket()) && (rule.Binding == nil) == (q.rule.Binding == nil)
}

// overrides finds a header by which servers take a request for one of another method or
// path, where rules name these.
func overrides(h http.Header, dec Decision) string {
	limited := dec.HasPaths() || slices.ContainsFunc(dec.Rules, func(r *Rule) bool { return len(r.Methods) > 0 })
	for _, name := range []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override", "X-Original-Url", "X-Rewrite-Url"} {
		if limited && h.Get(name) != "" {
			return name
		}
	}
	return ""
}

// clip shortens what is shown.
func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}

// sameHost compares the request's host with the connection's.
func (q *forwarding) sameHost() bool {
	def := uint16(443)
	if q.scheme == "http" {
		def = 80
	}
	host, port, err := ParseAuthority(q.in.Host, def)
	return err == nil && host == q.f.host && port == q.f.port
}

// serve judges the request, swaps its credential, sends it on and streams the answer.
func (q *forwarding) serve() {
	q.pass()
	if q.in.ProtoMajor == 1 && !q.hijacked {
		// What sends a request on may outlive the answer, and must not read from the
		// program's connection any more when the server goes on to the next request:
		// golang/go#46866. Who waits for the answer before sending more has it first.
		http.NewResponseController(q.w).Flush()
		q.in.Body.Close()
	}
}

func (q *forwarding) pass() {
	q.begun = time.Now()
	q.up.f, q.up.up, q.down.f = q.f, true, q.f
	q.rec = q.f.rec
	_, tokens, _ := q.f.s.now()
	q.rec.At, q.rec.Method, q.rec.Path = q.f.s.proxy.cfg.Now(), clip(q.in.Method, 32), clip(tokens.shown(q.in.URL.EscapedPath()), 512)
	defer q.bound()()
	done, r := q.f.s.limiter.request()
	if r != nil {
		q.refuse(r)
		return
	}
	defer done()
	if r := q.judge(); r != nil {
		q.refuse(r)
		return
	}
	out, r := q.outgoing()
	if r != nil {
		q.refuse(r)
		return
	}
	q.rec.Allowed, q.rec.Reason = true, boxed.EgressAllowed
	q.f.asked.Store(true)
	if err := q.f.s.records().Allow(q.rec); err != nil {
		q.refuse(refuse(boxed.EgressAuditFull, "it cannot be recorded: %v", err))
		return
	}
	if out.Header.Get("Upgrade") != "" {
		q.upgrade(out)
		return
	}
	resp, err := q.transport.RoundTrip(out.WithContext(httptrace.WithClientTrace(q.ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { q.connected(info.Conn) },
	})))
	if err != nil {
		r := q.failed(err)
		q.tell(r)
		q.ended(r.status(), r)
		return
	}
	defer resp.Body.Close()
	q.quiet(q.f.s.proxy.cfg.Times.Idle)
	q.ended(resp.StatusCode, q.answer(resp))
}

// bound sets what ends the request besides its end. EL5: bytes keep it, in either direction;
// before the answer begins, it has the time for that besides.
func (q *forwarding) bound() (done func()) {
	ctx, cancel := context.WithCancelCause(q.in.Context())
	q.ctx = ctx
	q.life, q.end = context.WithCancelCause(q.f.ctx)
	stop := context.AfterFunc(q.life, func() { cancel(context.Cause(q.life)) })
	q.f.s.mu.Lock()
	q.f.running[q] = true
	q.f.s.mu.Unlock()
	t := q.f.s.proxy.cfg.Times
	q.idle = time.AfterFunc(t.Idle+t.Answer, func() { cancel(refuse(boxed.EgressIdle, "nothing was sent for too long")) })
	q.wait.Store(int64(t.Idle + t.Answer))
	moved := func() { q.idle.Reset(time.Duration(q.wait.Load())) }
	q.up.moved, q.down.moved = moved, moved
	return func() {
		q.f.s.mu.Lock()
		delete(q.f.running, q)
		q.f.s.mu.Unlock()
		q.idle.Stop()
		stop()
		cancel(nil)
		q.end(nil)
	}
}

// quiet sets how long nothing may happen from now on.
func (q *forwarding) quiet(d time.Duration) {
	q.wait.Store(int64(d))
	q.idle.Reset(d)
}

// connected notes the address that the request goes to, for the record of its end.
func (q *forwarding) connected(conn net.Conn) {
	if q.rec.Exit == "" {
		q.rec.Address = conn.RemoteAddr().String()
	}
}

// refuse records and tells why nothing leaves.
func (q *forwarding) refuse(r *refusal) {
	q.rec.Allowed, q.rec.Reason, q.rec.Detail, q.rec.Status = false, r.Reason, r.Detail, r.status()
	q.f.asked.Store(true)
	q.f.s.records().Deny(q.rec)
	q.tell(r)
}

// maxUnwanted is how much is read of a body that nobody wants, in bytes: who is still
// sending when the answer comes may not read it.
const maxUnwanted = 256 << 10

// tell answers with a refusal. What there is of a small body is taken first; a connection
// of HTTP/1 on which more would come ends.
func (q *forwarding) tell(r *refusal) {
	if n := q.in.ContentLength; q.in.Body != nil && q.in.Header.Get("Expect") == "" && n >= 0 && n <= maxUnwanted {
		http.NewResponseController(q.w).SetReadDeadline(time.Now().Add(q.f.s.proxy.cfg.Times.Hello))
		io.CopyN(io.Discard, q.in.Body, maxUnwanted)
	} else if q.in.ProtoMajor == 1 {
		q.w.Header().Set("Connection", "close")
	}
	writeRefusal(q.w, r, q.f.host.String(), q.f.port)
}

// failed is why no answer came.
func (q *forwarding) failed(err error) *refusal {
	var r *refusal
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &r):
		return r
	case q.ctx.Err() != nil:
		return asRefusal(context.Cause(q.ctx), boxed.EgressTruncated)
	case errors.As(err, &cert):
		return refuse(boxed.EgressUpstreamTLS, "%v", cert.Err)
	}
	return refuse(boxed.EgressConnectFailed, "%v", err)
}

func (q *forwarding) ended(status int, err error) {
	rec := q.rec
	rec.At, rec.End, rec.Status = q.f.s.proxy.cfg.Now(), true, status
	rec.Up, rec.Down, rec.MS = q.up.n.Load(), q.down.n.Load(), time.Since(q.begun).Milliseconds()
	// What ended the flow ends its connections too, and is the reason whichever of these shows
	// first.
	if r := (*refusal)(nil); errors.As(err, &r) || err != nil && errors.As(context.Cause(q.life), &r) {
		rec.Reason, rec.Detail = r.Reason, r.Detail
	} else if err != nil {
		rec.Reason, rec.Detail = boxed.EgressTruncated, "the answer was cut off"
	}
	rec.Allowed = rec.Reason == boxed.EgressAllowed
	q.f.s.records().End(rec)
}

// outgoing is the request as it leaves. Hop-by-hop headers are gone before anything is put
// in.
func (q *forwarding) outgoing() (*http.Request, *refusal) {
	in := q.in
	out := in.Clone(q.ctx)
	out.RequestURI, out.Close, out.URL.Opaque = "", false, ""
	out.URL.Scheme, out.URL.Host = q.scheme, authorityOf(q.f.host, q.f.port, q.scheme)
	out.Host = out.URL.Host // EF15: without the default port
	upgrade := in.Header.Get("Upgrade") != ""
	trailers := slices.ContainsFunc(in.Header.Values("Te"), func(v string) bool { return strings.Contains(strings.ToLower(v), "trailers") })
	dropHops(out.Header)
	dropIdentity(out.Header)
	if trailers { // gRPC needs it
		out.Header.Set("Te", "trailers")
	}
	if upgrade {
		out.Header.Set("Connection", "Upgrade")
		out.Header.Set("Upgrade", "websocket")
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = nil // net/http would add its own
	}
	if r := q.credentials(out); r != nil {
		return nil, r
	}
	if q.f.held() && !q.f.foreign { // in the clear to the holder, over what is between nodes
		out.URL.Scheme = "http"
	}
	out.Body, out.GetBody = q.body(in), nil
	out.Trailer = nil // nobody could judge what is in it before it has left
	if q.sign != nil {
		if r := q.resign(out); r != nil {
			return nil, r
		}
	}
	return out, nil
}

// resign signs a request anew. A body that must be read for that is held as long as the
// request is under way.
func (q *forwarding) resign(out *http.Request) *refusal {
	hash, r := payloadHash(out, func() *refusal {
		done, r := q.f.s.limiter.sign()
		if r == nil {
			context.AfterFunc(q.ctx, done)
		}
		return r
	})
	if r != nil {
		return r
	}
	return q.sign.resign(q.ctx, out, hash, q.f.s.proxy.cfg.Now())
}

// credentials swaps the placeholder, and refuses all else that is a credential.
func (q *forwarding) credentials(out *http.Request) *refusal {
	_, tokens, _ := q.f.s.now()
	if q.f.mode != boxed.EgressIntercept {
		if tokens.anywhere(out.Header) || tokens.scan.hits(out.URL.String()) {
			return refuse(boxed.EgressMisuse, "a placeholder in a request without TLS")
		}
		return nil
	}
	// Of the next hop, which this is: a placeholder in it was for somebody.
	if v := q.in.Header.Get("Proxy-Authorization"); v != "" {
		return refuse(boxed.EgressForeignCredential, "the credential in Proxy-Authorization is not this sandbox's placeholder for the host")
	}
	v := tokens.swap(out, q.rule, q.rule.Slots)
	if v.reason != boxed.EgressAllowed {
		return refuse(v.reason, "%s", v.detail)
	}
	q.sign = v.sign
	if v.used != nil {
		q.rec.Credential = v.used.Secret
		if value, ok := v.used.value(); ok {
			q.real = newScanner(value.Reveal())
		}
	}
	return nil
}

// body is the request's, sent once: net/http sends nothing twice that it cannot get anew.
func (q *forwarding) body(in *http.Request) io.ReadCloser {
	if in.Body == nil || in.Body == http.NoBody || in.ContentLength == 0 { // HTTP/2 always has one
		if in.Header.Get("Idempotency-Key") == "" && in.Header.Get("X-Idempotency-Key") == "" {
			return http.NoBody
		}
		return io.NopCloser(strings.NewReader("")) // or net/http would take that for leave to send it twice
	}
	return &counted{ReadCloser: in.Body, c: &q.up}
}

// counted is a body whose bytes are counted.
type counted struct {
	io.ReadCloser
	c *counter
}

// Close does nothing: the server's would wait for what a program does not send before it has
// its answer.
func (b *counted) Close() error { return nil }

func (b *counted) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		if lerr := b.c.pass(n); lerr != nil {
			return 0, lerr
		}
	}
	return n, err
}

// answer streams a response: each read is sent on at once.
func (q *forwarding) answer(resp *http.Response) error {
	head := q.w.Header()
	dropHops(resp.Header)
	q.scrub(resp.Header)
	for name, values := range resp.Header {
		head[name] = values
	}
	for name := range resp.Trailer {
		head.Add("Trailer", name)
	}
	if len(resp.Trailer) > 0 && q.in.ProtoMajor == 1 {
		head.Del("Content-Length") // HTTP/1.1 has one of the two
	}
	if head.Get("Date") == "" {
		head["Date"] = nil
	}
	if _, ok := head["Content-Type"]; !ok {
		head["Content-Type"] = nil // net/http would guess one
	}
	control := http.NewResponseController(q.w)
	q.w.WriteHeader(resp.StatusCode)
	if resp.ContentLength != 0 {
		control.Flush() // a stream may begin long after its head
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(buf)
		if n > 0 {
			if lerr := q.down.pass(n); lerr != nil {
				q.ended(resp.StatusCode, lerr)
				panic(http.ErrAbortHandler) // so that it is not taken for whole
			}
			if _, werr := q.w.Write(buf[:n]); werr != nil {
				return errEnded
			}
			control.Flush()
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			q.ended(resp.StatusCode, cmp.Or(asEnd(q.ctx, err), errEnded))
			panic(http.ErrAbortHandler)
		}
	}
	q.scrub(resp.Trailer)
	for name, values := range resp.Trailer {
		head[http.TrailerPrefix+name] = values
	}
	return nil
}

// scrub takes out of the answer what a sandbox must not have.
func (q *forwarding) scrub(h http.Header) {
	if q.f.mode != boxed.EgressIntercept || q.rule.Binding == nil {
		return
	}
	if scrub(h, q.real) {
		q.f.s.proxy.cfg.Log.Warn("a server sent a credential back in a header, which was taken out", "sandbox", q.f.s.id, "host", q.f.host.String(), "secret", q.rec.Credential)
	}
}

// authorityOf is a host as a request names it.
func authorityOf(host Host, port uint16, scheme string) string {
	name := host.String()
	if host.IsAddr() && host.Addr().Is6() {
		name = "[" + name + "]"
	}
	if scheme == "https" && port == 443 || scheme == "http" && port == 80 {
		return name
	}
	return name + ":" + itoa(port)
}
