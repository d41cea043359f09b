package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// discardTime is how long the rest of an unwanted body may take to arrive.
const discardTime = 2 * time.Second

// Config is what a Server needs. Service, Auth and Logger are required.
type Config struct {
	Service boxed.API
	Admin   boxed.Admin   // nil: the calls about keys answer "unavailable"
	Cluster boxed.Cluster // nil: those about the cluster do
	SSH     boxed.SSH     // nil: those about SSH do
	// Policies are profiles and secrets; nil: those calls answer unavailable.
	Policies boxed.Policies
	Auth     Authenticator
	Logger   *slog.Logger
	Version  string // of the program

	// Ready returns why the node cannot take work, or nothing if it can. It must
	// answer within a second. Nil: always ready.
	Ready func(ctx context.Context) []string

	// Owner finds the node that owns a sandbox. Calls about it are passed on there
	// as they came. Nil: all are served here.
	Owner Owner

	// Vouched is the caller for whom another node vouches in X-Boxed-Assertion. Nil:
	// nobody is.
	Vouched func(ctx context.Context, assertion string, from boxed.NodeID, method, path string) (boxed.Principal, error)

	// Hosts is the closed set of Host headers that are served: names or
	// addresses without a port (any port), or with one. Empty: [LoopbackHosts].
	Hosts []string
	// TrustedProxies may say by X-Forwarded-For and X-Forwarded-Proto whom they
	// speak for.
	TrustedProxies []netip.Prefix

	// Limits; zero means the default that is given.
	MaxJSON      int64         // bytes of a JSON body: 16 MiB
	MaxHeld      int64         // bytes that all requests hold beyond 64 KiB each: 128 MiB
	JSONIdle     time.Duration // a JSON body without a byte: 30 s
	BodyIdle     time.Duration // a file's or tar's body without a byte: 5 min
	WriteIdle    time.Duration // a reader that takes nothing: 60 s
	PingInterval time.Duration // of WebSockets: 30 s
	KeepAlive    time.Duration // comments between server-sent events: 15 s
	AuthFailures int           // wrong keys of one address before it must wait: 20
}

func (c *Config) defaults() error {
	if c.Service == nil || c.Auth == nil || c.Logger == nil {
		return errors.New("api: Service, Auth and Logger are required")
	}
	if len(c.Hosts) == 0 {
		c.Hosts = LoopbackHosts()
	}
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&c.JSONIdle, 30*time.Second)
	set(&c.BodyIdle, 5*time.Minute)
	set(&c.WriteIdle, 60*time.Second)
	set(&c.PingInterval, 30*time.Second)
	set(&c.KeepAlive, 15*time.Second)
	if c.MaxJSON == 0 {
		c.MaxJSON = 16 << 20
	}
	if c.MaxHeld == 0 {
		c.MaxHeld = 128 << 20
	}
	if c.AuthFailures == 0 {
		c.AuthFailures = 20
	}
	return nil
}

// Server answers the API. It is an [http.Handler].
type Server struct {
	cfg      Config
	doc      *document
	router   *router
	hosts    hostSet
	failures *failures
	memory   *memory
	pages    pages
	buffers  sync.Pool // of what is passed on to other nodes

	// Contexts that end when the node goes away: follow at once, live after the
	// drain time.
	follow, live       context.Context
	endFollow, endLive context.CancelCauseFunc
	mu                 sync.Mutex
	draining           bool
	inflight           int
	idle               chan struct{} // closed when draining and nothing is in flight
	idleOnce           sync.Once     // closes it; requests may still come until the listener is closed
}

// New makes a Server. It starts nothing; Shutdown ends what its requests run.
func New(cfg Config) (*Server, error) {
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	doc, err := loadDocument()
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, doc: doc, failures: newFailures(cfg.AuthFailures), memory: newMemory(cfg.MaxHeld), idle: make(chan struct{})}
	if s.hosts, err = newHostSet(cfg.Hosts); err != nil {
		return nil, err
	}
	if s.router, err = newRouter(routes(), doc); err != nil {
		return nil, err
	}
	if s.pages, err = makePages(doc); err != nil {
		return nil, err
	}
	s.follow, s.endFollow = context.WithCancelCause(context.Background())
	s.live, s.endLive = context.WithCancelCause(context.Background())
	return s, nil
}

// HTTPServer is an http.Server for s with the timeouts that suit it: headers
// within 10 s and 64 KiB, two idle minutes, and no limit on a request as a
// whole, because streams and uploads last. Handlers set their own deadlines.
func (s *Server) HTTPServer() *http.Server {
	return &http.Server{
		Handler:           s,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
}

// peerKey is where the context of a connection from another node has it.
type peerKey struct{}

// PeerHTTPServer is an http.Server for s on connections from other nodes of the
// mesh, which peer names. A call that comes in there was passed on by a node: it
// is served here or nowhere, with the rights of the caller whose key it carries,
// and never with the node's.
func (s *Server) PeerHTTPServer(self boxed.NodeID, peer func(net.Conn) boxed.Peer) *http.Server {
	server := s.HTTPServer()
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, peerKey{}, hop{self: self, peer: peer(c)})
	}
	return server
}

// Door is a listener on which callers are known by their connection.
type Door struct {
	Hosts []string // as Config.Hosts
	// Identify is who is at the other end. Errors are answered as they are.
	Identify func(ctx context.Context, remoteAddr string) (boxed.Principal, error)
}

// doorKey is where the context of a Door's connection has it.
type doorKey struct{}

type door struct {
	hosts    hostSet
	identify func(context.Context, string) (boxed.Principal, error)
}

// DoorHTTPServer is an http.Server for s on a Door. A key that a request shows
// still counts, and first.
func (s *Server) DoorHTTPServer(d Door) (*http.Server, error) {
	hosts, err := newHostSet(d.Hosts)
	if err != nil {
		return nil, err
	}
	server := s.HTTPServer()
	server.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, doorKey{}, &door{hosts: hosts, identify: d.Identify})
	}
	return server, nil
}

func doorOf(r *http.Request) *door {
	d, _ := r.Context().Value(doorKey{}).(*door)
	return d
}

// hop is how a request came from another node.
type hop struct {
	self boxed.NodeID
	peer boxed.Peer
}

func hopOf(r *http.Request) (hop, bool) {
	h, ok := r.Context().Value(peerKey{}).(hop)
	return h, ok
}

// Shutdown refuses new requests, ends what only follows (events, output,
// waits), and returns when all requests have ended. When ctx ends first the
// rest is told that the node is going away and gets three more seconds; an
// attached exec is left running in its sandbox. Close the http.Server after it.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	if s.inflight == 0 {
		s.idleOnce.Do(func() { close(s.idle) })
	}
	s.mu.Unlock()
	s.endFollow(boxed.ErrGoingAway)
	defer s.endLive(boxed.ErrGoingAway)
	select {
	case <-s.idle:
		return nil
	case <-ctx.Done():
	}
	s.endLive(boxed.ErrGoingAway)
	select {
	case <-s.idle:
		return nil
	case <-time.After(3 * time.Second):
		return fmt.Errorf("requests are still in flight: %w", ctx.Err())
	}
}

// enter counts a request in; it reports whether it may go on.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inflight++
	return !s.draining
}

func (s *Server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inflight--
	if s.draining && s.inflight == 0 {
		s.idleOnce.Do(func() { close(s.idle) })
	}
}

// call is one request on its way through the server.
type call struct {
	s     *Server
	w     *recorder
	r     *http.Request
	ctx   context.Context // with the principal and the request's ID; ends early on revocation and shutdown
	id    string          // the request's
	addr  netip.Addr      // the client's, past trusted proxies
	route *route
	op    *operation
	v     values
	who   boxed.Principal
	held  holding // in memory, until it ends

	code boxed.Code // of the answer's error
	err  error      // what went wrong, for the log
}

// ServeHTTP does what every request needs, in this order: an ID, recovery and
// the access log; is the node going away; is the Host served and the origin
// not foreign; which call is it; who asks; does the request fit the document.
// Then the call's handler runs.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := &call{s: s, w: &recorder{ResponseWriter: w, idle: s.cfg.WriteIdle}, r: r, id: requestID(r), ctx: r.Context()}
	c.addr = s.clientAddr(r)
	h := w.Header()
	h.Set("X-Request-ID", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; sandbox")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	c.w.rearm() // the deadline of an earlier request may be over
	open := s.enter()
	defer s.leave()
	defer func() {
		v, half := recover(), c.w.wrote
		if v != nil {
			c.recovered(v)
		}
		c.limitDiscard()
		c.w.rearm()
		s.logAccess(c, time.Since(start))
		if v != nil && half {
			panic(http.ErrAbortHandler)
		}
	}()
	if !open {
		h.Set("Connection", "close")
		c.fail(boxed.Errorf(boxed.CodeNotReady, "the node is shutting down"))
		return
	}
	err := c.serve()
	switch {
	case err == nil:
	case errors.Is(err, errAnswered):
		c.code = boxed.CodeOf(err)
	case c.w.wrote:
		c.code, c.err = boxed.CodeOf(err), err
		http.NewResponseController(c.w).Flush() // what there is, so that it is seen to break off
		panic(http.ErrAbortHandler)             // half an answer must not look whole
	case len(c.opMedia()) > 0:
		c.failUpload(err)
	default:
		c.fail(err)
	}
}

func (c *call) opMedia() []string {
	if c.op == nil {
		return nil
	}
	return c.op.media
}

// failUpload answers with an error while the client may still be sending, and
// takes in what comes for a moment: a connection that is closed on arriving
// bytes is reset, and the reset overtakes the answer.
func (c *call) failUpload(err error) {
	ctl := http.NewResponseController(c.w)
	ctl.EnableFullDuplex()
	c.w.Header().Set("Connection", "close")
	c.fail(err)
	ctl.Flush()
	if c.r.Context().Err() == nil && c.code != boxed.CodeDeadline && c.code != boxed.CodeUnauthenticated {
		ctl.SetReadDeadline(time.Now().Add(discardTime))
		io.CopyN(io.Discard, c.r.Body, 1<<30)
	}
}

func (c *call) serve() error {
	if err := c.s.checkOrigin(c.r); err != nil {
		return err
	}
	path, err := c.match()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(boxed.WithRequestID(c.r.Context(), c.id))
	defer cancel(nil)
	c.ctx = ctx
	if h, ok := hopOf(c.r); ok {
		c.ctx = boxed.WithHop(c.ctx, h.peer.Node)
	}
	if !c.op.open {
		if c.who, err = c.authenticate(); err != nil {
			return err
		}
		c.ctx = boxed.WithPrincipal(c.ctx, c.who)
		if secret, ok := c.secret(); ok {
			c.ctx = boxed.WithCredential(c.ctx, secret)
		}
	}
	c.held.of, c.held.owner = c.s.memory, c.who.Owner
	defer c.held.release()
	if c.v, err = c.op.checkParams(path, c.r.URL.RawQuery); err != nil {
		return err
	}
	if c.route.long {
		defer c.guard(cancel)()
	}
	if passed, err := c.passOn(); passed || err != nil {
		return err
	}
	return c.route.handle(c)
}

// guard ends the call when its key is revoked or the node goes away, also if it
// is stuck in a read or a write.
func (c *call) guard(cancel context.CancelCauseFunc) (stop func()) {
	away := c.s.live
	if c.route.follows {
		away = c.s.follow
	}
	stopAway := context.AfterFunc(away, func() { cancel(boxed.ErrGoingAway) })
	ctl := http.NewResponseController(c.w)
	ctx := c.ctx
	stuck := make(chan struct{})
	stopStuck := context.AfterFunc(ctx, func() {
		defer close(stuck)
		if ended(ctx) != nil && !c.w.hijacked() {
			ctl.SetReadDeadline(time.Now())
			ctl.SetWriteDeadline(time.Now().Add(time.Second))
		}
	})
	stopWatch := func() {}
	if c.who.Key != "" {
		revoked, unwatch := c.s.cfg.Auth.Watch(c.who.Key)
		quit, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			select {
			case <-revoked:
				cancel(errRevoked)
			case <-quit:
			}
		}()
		stopWatch = func() { close(quit); <-done; unwatch() }
	}
	return func() {
		stopAway()
		if !stopStuck() {
			<-stuck // after the handler the answer is net/http's, and may be another request's
		}
		stopWatch()
	}
}

// limitDiscard bounds what net/http does after the handler: it reads on to the
// end of a small body that nobody wanted, before it sends the answer and without
// a deadline of its own. A client that has no key must not hold a connection by
// never sending the rest.
func (c *call) limitDiscard() {
	if c.r.ContentLength != 0 && !c.w.hijacked() {
		http.NewResponseController(c.w).SetReadDeadline(time.Now().Add(discardTime))
	}
}

// recovered answers a panic and keeps its trace for the log.
func (c *call) recovered(v any) {
	if v == http.ErrAbortHandler {
		return
	}
	c.code, c.err = boxed.CodeInternal, fmt.Errorf("panic: %v", v)
	c.s.cfg.Logger.Error("panic in a request", "request_id", c.id, "err", fmt.Sprint(v), "stack", string(debug.Stack()))
	if !c.w.wrote {
		c.fail(boxed.Errorf(boxed.CodeInternal, "internal error; the node's log has the cause under this request's ID"))
	}
}

// logAccess writes the one line of a request: the route's pattern and never the
// path or the query, which may hold names of files; no body, no key.
func (s *Server) logAccess(c *call, took time.Duration) {
	pattern := "none"
	if c.route != nil {
		pattern = c.route.path
	}
	level := slog.LevelInfo
	if c.op != nil && c.op.open && c.code == "" {
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("method", clip(c.r.Method)), slog.String("route", pattern),
		slog.Int("status", c.w.status), slog.Int64("bytes", c.w.bytes), slog.Duration("took", took),
		slog.String("request_id", c.id), slog.String("addr", c.addr.String()),
	}
	if h, ok := hopOf(c.r); ok {
		attrs = append(attrs, slog.String("peer", string(h.peer.Node)))
	}
	if c.who.Owner != "" {
		attrs = append(attrs, slog.String("owner", c.who.Owner), slog.String("key", c.who.Key))
	}
	if c.code != "" {
		attrs = append(attrs, slog.String("code", string(c.code)))
	}
	if c.code == boxed.CodeInternal || c.code == boxed.CodeLost {
		level = slog.LevelError
		attrs = append(attrs, slog.Any("err", cause(c.err)))
	}
	s.cfg.Logger.LogAttrs(c.r.Context(), level, "request", attrs...)
}

// cause is the whole chain of an error, for the log.
func cause(err error) error {
	var e *boxed.Error
	if errors.As(err, &e) && e.Err != nil && err == error(e) {
		return fmt.Errorf("%s: %w", e.Message, e.Err)
	}
	return err
}
