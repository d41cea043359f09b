package agent

import (
	"bytes"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// Errors of a Host that are not a guest's answer.
var (
	// ErrLost says that the link broke or did not come back in time; what was
	// asked for may have happened.
	ErrLost = errors.New("the link to the sandbox's agent is lost")
	// ErrClosed says that the host side was closed.
	ErrClosed = errors.New("the sandbox has ended")
)

// HostConfig configures a Host.
type HostConfig struct {
	// Dir is the directory in which the socket is made, as Socket (mode 0600).
	Dir    string
	Socket string
	// Secret is what the first connection is given and later ones must prove.
	Secret string
	// Known says that a guest already has the secret: this host is a restarted one.
	Known bool
	// Config is sent on each control connection; see Host.Configure.
	Config Config
	// Away is the cause of a context whose end leaves its exec running: this
	// process stops, and takes it up again in its next life. May be nil.
	Away error
	// Broken is called once if the guest breaks the protocol. May be nil.
	Broken func(error)
	Log    *slog.Logger
}

// How long a Host waits.
const (
	helloLimit  = 5 * time.Second  // for a guest's first frame
	relinkLimit = 15 * time.Second // for a guest that lost its link to dial again
	maxUnproven = 8                // connections at once that have not said hello
)

// Host is the host's side of one guest: a socket that it dials, and the calls
// that it serves. All methods are safe for concurrent use.
type Host struct {
	cfg      HostConfig
	listener *net.UnixListener
	done     chan struct{}
	large    chan struct{} // held by who reads a large Response
	wg       sync.WaitGroup
	opening  chan struct{} // held while a stream is counted and opened

	mu      sync.Mutex
	known   bool
	config  Config
	session *yamux.Session
	linked  chan struct{} // closed while session is alive; replaced when it is not
	bulk    map[string]chan net.Conn
	conns   map[*conn]bool // all that are open, for Close
	hello   Hello
	closed  bool
	broken  bool
	refused int // connections
}

// conn is a connection of the guest that Close closes.
type conn struct {
	net.Conn
	host *Host
}

func (c *conn) Close() error {
	c.host.mu.Lock()
	delete(c.host.conns, c)
	c.host.mu.Unlock()
	return c.Conn.Close()
}

// Write gives every write a deadline: a guest that never reads holds nobody.
func (c *conn) Write(p []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(hostWriteLimit))
	return c.Conn.Write(p)
}

// track takes a fresh connection in, unless the host is closed.
func (h *Host) track(raw net.Conn) (*conn, bool) {
	c := &conn{Conn: raw, host: h}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		raw.Close()
		return nil, false
	}
	h.conns[c] = true
	return c, true
}

// Listen makes the socket and accepts the guest. Close ends it.
func Listen(cfg HostConfig) (*Host, error) {
	listener, err := listenUnix(cfg.Dir, cfg.Socket)
	if err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	h := &Host{
		cfg: cfg, listener: listener, done: make(chan struct{}), large: make(chan struct{}, 1), opening: make(chan struct{}, 1), known: cfg.Known, config: cfg.Config,
		linked: make(chan struct{}), bulk: map[string]chan net.Conn{}, conns: map[*conn]bool{},
	}
	h.wg.Go(h.accept)
	return h, nil
}

// listenUnix binds dir/name with mode 0600, whatever the length of the path: a
// socket's address holds 107 bytes, so it is bound through the directory's
// descriptor.
func listenUnix(dir, name string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// The mode is set under a name that no guest knows, then the name is given.
	temp := "." + name + ".new"
	os.Remove(filepath.Join(dir, temp))
	addr := &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), temp)}
	listener, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for the agent in %s: %w", dir, err)
	}
	listener.SetUnlinkOnClose(false)
	if err = os.Chmod(filepath.Join(dir, temp), 0o600); err == nil {
		err = os.Rename(filepath.Join(dir, temp), filepath.Join(dir, name))
	}
	if err != nil {
		listener.Close()
		return nil, err
	}
	return listener, nil
}

// Close ends the link and every call. The guest goes on and dials again.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	close(h.done)
	session := h.session
	open := slices.Collect(maps.Keys(h.conns))
	h.mu.Unlock()
	h.listener.Close()
	if session != nil {
		session.Close()
	}
	for _, c := range open {
		c.Close()
	}
	h.wg.Wait()
	return nil
}

func (h *Host) accept() {
	unproven := make(chan struct{}, maxUnproven)
	for {
		raw, err := h.listener.Accept()
		if err != nil {
			select {
			case <-h.done:
				return
			case <-time.After(50 * time.Millisecond): // out of descriptors, say: never gives up
				continue
			}
		}
		select {
		case unproven <- struct{}{}:
		default:
			raw.Close()
			continue
		}
		c, ok := h.track(raw)
		if !ok {
			return
		}
		h.wg.Go(func() {
			err := h.greet(c)
			<-unproven
			if err != nil {
				c.Close()
				h.logRefusal(err)
			}
		})
	}
}

// logRefusal logs the first few: a guest can be refused as often as it likes.
func (h *Host) logRefusal(err error) {
	const most = 10
	h.mu.Lock()
	h.refused++
	n, closed := h.refused, h.closed
	h.mu.Unlock()
	if n <= most && !closed {
		h.cfg.Log.Warn("agent connection refused", "err", err, "times", n)
	}
}

// greet judges a new connection and puts it to its use.
func (h *Host) greet(conn net.Conn) error {
	conn.SetDeadline(time.Now().Add(helloLimit))
	var hello Hello
	if err := readMessage(conn, maxHello, &hello); err != nil {
		return fmt.Errorf("read hello: %w", err)
	}
	welcome, first := Welcome{Version: Version, Features: guestFeatures}, false
	h.mu.Lock()
	proven := subtle.ConstantTimeCompare([]byte(hello.Secret), []byte(h.cfg.Secret)) == 1
	switch {
	case h.closed:
		welcome.Error = "the sandbox has ended"
	case hello.Version < 1:
		welcome.Error = "unknown version"
	case h.known && !proven:
		welcome.Error = "wrong secret"
	case !h.known && hello.Bulk != "":
		welcome.Error = "a bulk connection before the first"
	}
	if welcome.Error == "" && hello.Bulk == "" {
		if !h.known {
			welcome.Secret = h.cfg.Secret
			first = true
		}
		h.known = true
		config := h.config
		welcome.Config = &config
	}
	h.mu.Unlock()
	if err := writeMessage(conn, welcome); err != nil {
		if first { // nobody has the secret yet
			h.mu.Lock()
			h.known = false
			h.mu.Unlock()
		}
		return err
	}
	if welcome.Error != "" {
		return errors.New(welcome.Error)
	}
	conn.SetDeadline(time.Time{})
	if hello.Bulk != "" {
		return h.takeBulk(hello.Bulk, conn)
	}
	return h.takeControl(hello, conn)
}

func (h *Host) takeBulk(token string, conn net.Conn) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	waiter := h.bulk[token]
	delete(h.bulk, token)
	if waiter == nil {
		return errors.New("a bulk connection that nobody waits for")
	}
	waiter <- conn // it has room, and whoever waits looks once more after leaving
	return nil
}

// takeControl makes conn the control connection, in place of an earlier one.
func (h *Host) takeControl(hello Hello, conn net.Conn) error {
	session, err := yamux.Client(newGuard(conn, h.protocolBroken), muxConfig())
	if err != nil {
		return err
	}
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		session.Close()
		return ErrClosed
	}
	old := h.session
	h.session, h.hello = session, hello
	select {
	case <-h.linked:
	default:
		close(h.linked)
	}
	h.wg.Go(func() { h.watch(session) })
	h.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return nil
}

// watch refuses what the guest opens and takes note of the session's end.
func (h *Host) watch(session *yamux.Session) {
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			break
		}
		stream.Close()
	}
	session.Close()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.session == session {
		h.session = nil
		h.linked = make(chan struct{})
	}
}

func (h *Host) protocolBroken(err error) {
	h.mu.Lock()
	first := !h.broken
	h.broken = true
	h.mu.Unlock()
	if first && h.cfg.Broken != nil {
		go h.cfg.Broken(err)
	}
}

// Configure changes what the guest is told, now and on each later connection.
func (h *Host) Configure(ctx context.Context, c Config) error {
	h.mu.Lock()
	h.config = c
	h.mu.Unlock()
	return h.call(ctx, opConfig, c, nil)
}

// Ready waits until the guest has dialled.
func (h *Host) Ready(ctx context.Context) error {
	_, err := h.link(ctx)
	return err
}

// Linked reports whether the guest is connected now.
func (h *Host) Linked() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.session != nil
}

// Build is the hash that the connected guest gave of its program.
func (h *Host) Build() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hello.Build
}

func (h *Host) link(ctx context.Context) (*yamux.Session, error) {
	for {
		h.mu.Lock()
		session, linked, closed := h.session, h.linked, h.closed
		h.mu.Unlock()
		if closed {
			return nil, ErrClosed
		}
		if session != nil {
			return session, nil
		}
		select {
		case <-linked:
		case <-h.done:
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// open starts a stream on the control connection, waiting a while for a guest
// that is dialling again.
func (h *Host) open(ctx context.Context) (net.Conn, error) {
	wait, cancel := context.WithTimeout(ctx, relinkLimit)
	defer cancel()
	for {
		session, err := h.link(wait)
		if err != nil {
			if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
				return nil, ErrLost
			}
			return nil, err
		}
		stream, err := h.openStream(wait, session)
		if err == nil {
			return stream, nil
		}
		if errors.As(err, new(*Error)) || wait.Err() != nil {
			return nil, err
		}
		if !session.IsClosed() {
			return nil, fmt.Errorf("%w: %v", ErrLost, err)
		}
		h.forget(session)
	}
}

// openStream opens a stream. yamux would wait, past any context, for a guest
// that acknowledges none of as many as its backlog.
func (h *Host) openStream(ctx context.Context, session *yamux.Session) (net.Conn, error) {
	select {
	case h.opening <- struct{}{}:
		defer func() { <-h.opening }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if session.NumStreams() >= hostStreams-1 {
		return nil, &Error{Code: ErrExhausted, Message: "too many calls wait for this sandbox's agent; try again when some have ended"}
	}
	return session.OpenStream()
}

// forget drops a session that turned out to be dead before its watcher does.
func (h *Host) forget(session *yamux.Session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.session == session {
		h.session = nil
		h.linked = make(chan struct{})
	}
}

// openBulk gets a connection of its own.
func (h *Host) openBulk(ctx context.Context) (net.Conn, error) {
	token := randomToken()
	arrived := make(chan net.Conn, 1)
	h.mu.Lock()
	h.bulk[token] = arrived
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		delete(h.bulk, token)
		h.mu.Unlock()
		select {
		case late := <-arrived:
			late.Close()
		default:
		}
	}()
	if err := h.call(ctx, opBulk, Bulk{Token: token}, nil); err != nil {
		return nil, err
	}
	timeout := time.NewTimer(helloLimit)
	defer timeout.Stop()
	select {
	case conn := <-arrived:
		return conn, nil
	case <-h.done:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timeout.C:
		return nil, ErrLost
	}
}

// ask opens a stream, sends the request and reads the response into out. The
// stream is the caller's to close; ctx's end breaks it until stop is called.
func (h *Host) ask(ctx context.Context, open func(context.Context) (net.Conn, error), op string, args, out any) (conn net.Conn, stop func() bool, err error) {
	raw, err := json.Marshal(args)
	if err != nil {
		return nil, nil, err
	}
	answered := make(chan answer, 1)
	// On its own, since the multiplexer waits for a guest that does not read its
	// socket, up to its write limit, and knows no context.
	if !h.begin(func() { answered <- h.exchange(ctx, open, Request{Op: op, Args: raw}) }) {
		return nil, nil, ErrClosed
	}
	var a answer
	select {
	case a = <-answered:
	case <-ctx.Done():
		h.begin(func() {
			if late := <-answered; late.err == nil {
				late.stop()
				late.conn.Close()
			}
		})
		return nil, nil, ctx.Err()
	}
	if a.err == nil && out != nil && len(a.value) > 0 {
		if err := json.Unmarshal(a.value, out); err != nil {
			a.stop()
			a.conn.Close()
			a.err = &errProtocol{"an answer that is not one: " + err.Error()}
		}
	}
	if a.err != nil {
		return nil, nil, h.linkError(ctx, a.err)
	}
	return a.conn, a.stop, nil
}

// begin runs f, which ends by itself, unless the host is closed.
func (h *Host) begin(f func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.wg.Go(f)
	return true
}

// answer is what came of an exchange.
type answer struct {
	conn  net.Conn
	stop  func() bool
	value json.RawMessage
	err   error
}

// exchange does what ask waits for. Its errors leave nothing open.
func (h *Host) exchange(ctx context.Context, open func(context.Context) (net.Conn, error), req Request) answer {
	conn, err := open(ctx)
	if err != nil {
		return answer{err: err}
	}
	stop := context.AfterFunc(ctx, func() { breakOff(conn) })
	var value json.RawMessage
	if err = writeMessage(conn, req); err == nil {
		value, err = h.readResponse(ctx, conn)
	}
	if err != nil {
		stop()
		conn.Close()
		return answer{err: err}
	}
	return answer{conn: conn, stop: stop, value: value}
}

// breakOff closes a stream and ends what reads it. Closing alone does not: a
// stream of the multiplexer that this side has closed still waits for what the
// guest sends, and a guest that is frozen or hostile sends nothing.
func breakOff(conn net.Conn) {
	conn.SetDeadline(time.Unix(1, 0))
	conn.Close()
}

// linkError tells a guest's answer from a broken link.
func (h *Host) linkError(ctx context.Context, err error) error {
	var answer *Error
	var breach *errProtocol
	switch {
	case errors.As(err, &answer):
		return err
	case errors.As(err, &breach):
		h.protocolBroken(err)
		return fmt.Errorf("%w: %v", ErrLost, err)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	select {
	case <-h.done:
		return ErrClosed
	default:
		return fmt.Errorf("%w: %v", ErrLost, err)
	}
}

// readResponse reads the one Response of a stream. Large ones are read one at a
// time: what a guest can make this host hold does not grow with how much is
// asked of it at once.
func (h *Host) readResponse(ctx context.Context, conn net.Conn) (json.RawMessage, error) {
	n, err := readSize(conn, maxResponse)
	if err != nil {
		return nil, err
	}
	if n > maxAtOnce {
		select {
		case h.large <- struct{}{}:
			defer func() { <-h.large }()
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-h.done:
			return nil, ErrClosed
		}
	}
	var r Response
	if err := readSized(conn, n, &r); err != nil {
		return nil, err
	}
	if r.Error != nil {
		return nil, r.Error
	}
	return r.Value, nil
}

// bounded is a list from a guest, which is counted while it is decoded: four
// megabytes of "{}" would be half a gigabyte of entries.
type bounded[T any] struct {
	most  int
	items []T
}

// UnmarshalJSON reads an array of at most most entries.
func (b *bounded[T]) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return errors.New("not a list")
	}
	for dec.More() {
		if len(b.items) == b.most {
			return fmt.Errorf("a list of more than %d entries", b.most)
		}
		var item T
		if err := dec.Decode(&item); err != nil {
			return err
		}
		b.items = append(b.items, item)
	}
	return nil
}

// call is one request with one answer.
func (h *Host) call(ctx context.Context, op string, args, out any) error {
	conn, stop, err := h.ask(ctx, h.open, op, args, out)
	if err != nil {
		return err
	}
	stop()
	return conn.Close()
}

// Ping asks for a sign of life.
func (h *Host) Ping(ctx context.Context) error { return h.call(ctx, opPing, struct{}{}, nil) }

// End asks the guest to end the sandbox. The link breaks as it does: that is
// no error.
func (h *Host) End(ctx context.Context) error {
	err := h.call(ctx, opEnd, struct{}{}, nil)
	if errors.Is(err, ErrLost) {
		return nil
	}
	return err
}

// Stats describes the guest.
func (h *Host) Stats(ctx context.Context) (s Stats, err error) {
	err = h.call(ctx, opStats, struct{}{}, &s)
	return s, err
}

// Ports lists what listens inside.
func (h *Host) Ports(ctx context.Context) ([]Port, error) {
	list := bounded[Port]{most: MaxPorts}
	err := h.call(ctx, opPorts, struct{}{}, &list)
	return list.items, err
}

// BreakLink closes the control connection as a fault would; the guest dials
// again. For tests and for a link that is found stuck.
func (h *Host) BreakLink() {
	h.mu.Lock()
	session := h.session
	h.mu.Unlock()
	if session != nil {
		session.Close()
	}
}
