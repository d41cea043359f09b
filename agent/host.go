package agent

import (
	"context"
	"crypto/subtle"
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
	// Budget is shared by all hosts of the process; nil is no bound.
	Budget *Budget
	// Egress serves what leaves the sandbox. Nil: nothing does.
	Egress EgressFunc
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
	dialling chan struct{} // held while a guest dials a bulk connection

	mu                sync.Mutex
	known             bool
	config            Config
	session           *yamux.Session
	control, controls int           // which control connection it is, and how many were welcomed
	linked            chan struct{} // closed while session is alive; replaced when it is not
	bulk              map[string]chan net.Conn
	direct            *direct        // that no exec uses, or nil
	conns             map[*conn]bool // all that are open, for Close
	closed            bool
	broken            bool
	refused           int      // connections
	egress            int      // connections that are served
	features          []string // of the guest that is connected
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
	listener, err := ListenUnix(cfg.Dir, cfg.Socket)
	if err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	h := &Host{
		cfg: cfg, listener: listener, done: make(chan struct{}), large: make(chan struct{}, 1), opening: make(chan struct{}, 1), dialling: make(chan struct{}, maxUnproven/2), known: cfg.Known, config: cfg.Config,
		linked: make(chan struct{}), bulk: map[string]chan net.Conn{}, conns: map[*conn]bool{},
	}
	h.wg.Go(h.accept)
	return h, nil
}

// ListenUnix binds dir/name with mode 0600, whatever the length of the path: a
// socket's address holds 107 bytes, so it is bound through the directory's
// descriptor.
func ListenUnix(dir, name string) (*net.UnixListener, error) {
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
func (h *Host) greet(conn *conn) error {
	conn.SetDeadline(time.Now().Add(helloLimit))
	var hello Hello
	if err := readMessage(conn, maxHello, &hello); err != nil {
		return fmt.Errorf("read hello: %w", err)
	}
	welcome, first, number := Welcome{Version: Version, Features: guestFeatures}, false, 0
	h.mu.Lock()
	proven := subtle.ConstantTimeCompare([]byte(hello.Secret), []byte(h.cfg.Secret)) == 1
	switch {
	case h.closed:
		welcome.Error = "the sandbox has ended"
	case hello.Version < 1:
		welcome.Error = "unknown version"
	case h.known && !proven:
		welcome.Error = "wrong secret"
	case !h.known && (hello.Bulk != "" || hello.Direct || hello.Egress != nil):
		welcome.Error = "a bulk connection before the first"
	}
	if welcome.Error == "" && hello.Bulk == "" && !hello.Direct && hello.Egress == nil {
		if !h.known {
			welcome.Secret = h.cfg.Secret
			first = true
		}
		h.known = true
		h.features = hello.Features
		h.controls++
		number = h.controls
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
	switch {
	case hello.Egress != nil:
		return h.takeEgress(conn, *hello.Egress)
	case hello.Direct:
		return h.takeDirect(conn)
	case hello.Bulk != "":
		return h.takeBulk(hello.Bulk, conn)
	}
	return h.takeControl(conn, number)
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

// takeControl makes conn the control connection, in place of an earlier one. The number
// is which it is of those that were welcomed: one that is late is not put in the place of
// the one that the guest dialled after it.
func (h *Host) takeControl(conn net.Conn, number int) error {
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
	if number < h.control {
		h.mu.Unlock()
		session.Close()
		return errors.New("the guest has dialled again")
	}
	h.control = number
	old := h.session
	h.session = session
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
