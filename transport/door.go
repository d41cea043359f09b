package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/boxed-mesh/boxed"
)

// Bounds of a Door. Whoever can reach it can open connections; what they cost
// before they have proved anything is bounded. Of too many the oldest gives way: a
// node's handshake takes milliseconds, and who holds one open is a stranger.
const (
	maxHandshakes = 64 // at a time
	acceptQueue   = 32 // connections that wait to be accepted from a Listener
	acceptPause   = 50 * time.Millisecond
	// acceptPatience is how long a node's connection waits for room in that queue:
	// a burst is longer than it, and over at once.
	acceptPatience = 2 * time.Second
)

// Door takes connections in at one listener, lets each through a [Gate], and
// hands it to the listener of its service.
type Door struct {
	gate *Gate
	raw  net.Listener
	pass func(net.Conn) error
	log  *slog.Logger
	stop context.CancelFunc
	work sync.WaitGroup

	saying *rate.Limiter // of log lines
	unsaid atomic.Int64  // refusals since the last one

	mu       sync.Mutex
	pending  []net.Conn // handshakes, the oldest first
	services map[Service]*doorListener
	open     map[*tracked]struct{}
	closed   bool
}

// NewDoor begins to take connections from raw, which it closes with itself. pass,
// if not nil, is asked first, and its error refuses a connection.
func NewDoor(gate *Gate, raw net.Listener, pass func(net.Conn) error, log *slog.Logger) *Door {
	ctx, stop := context.WithCancel(context.Background())
	d := &Door{
		gate: gate, raw: raw, pass: pass, log: log, stop: stop, saying: rate.NewLimiter(1, 10),
		services: map[Service]*doorListener{}, open: map[*tracked]struct{}{},
	}
	d.work.Go(func() { d.accept(ctx) })
	return d
}

func (d *Door) accept(ctx context.Context) {
	for {
		conn, err := d.raw.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			d.log.Warn("accept a node's connection", "err", err) // out of descriptors, say
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		d.begin(conn)
		d.work.Go(func() {
			if err := d.admit(ctx, conn); err != nil && ctx.Err() == nil {
				d.refused(err)
			}
		})
	}
}

// refused logs it. Whoever can reach the listener decides how often.
func (d *Door) refused(err error) {
	d.unsaid.Add(1)
	if d.saying.Allow() {
		d.log.Warn("a connection to the mesh was refused", "err", err, "since_the_last_line", d.unsaid.Swap(0))
	}
}

// begin makes room for a handshake.
func (d *Door) begin(conn net.Conn) {
	d.mu.Lock()
	var oldest net.Conn
	if len(d.pending) >= maxHandshakes {
		oldest = d.pending[0]
		d.pending = slices.Delete(d.pending, 0, 1)
	}
	d.pending = append(d.pending, conn)
	d.mu.Unlock()
	if oldest != nil {
		oldest.Close()
	}
}

func (d *Door) done(conn net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending = slices.DeleteFunc(d.pending, func(c net.Conn) bool { return c == conn })
}

func (d *Door) admit(ctx context.Context, raw net.Conn) error {
	defer d.done(raw)
	if d.pass != nil {
		if err := d.pass(raw); err != nil {
			raw.Close()
			return err
		}
	}
	conn, service, err := d.gate.Accept(ctx, raw, d.listening())
	d.done(raw)
	if err != nil {
		return err
	}
	t := d.Track(conn)
	if d.gate.cfg.Denied(conn.Peer().Node) { // meanwhile, and Drop may have come before Track
		conn.Close()
		return fmt.Errorf("%w: node %s was removed", ErrStranger, conn.Peer().Node)
	}
	d.mu.Lock()
	l := d.services[service]
	d.mu.Unlock()
	if t == nil || l == nil {
		conn.Close()
		return nil // it was closed meanwhile
	}
	late := time.NewTimer(acceptPatience)
	defer late.Stop()
	select {
	case l.queue <- t:
		return nil
	case <-l.done:
	case <-ctx.Done():
	case <-late.C: // whoever accepts does not keep up
		t.Close()
		return fmt.Errorf("too many connections for %s wait to be accepted", service)
	}
	t.Close()
	return nil
}

func (d *Door) listening() []Service {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.services))
}

// Listen makes the listener of a service.
func (d *Door) Listen(service Service) (Listener, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return nil, net.ErrClosed
	case d.services[service] != nil:
		return nil, fmt.Errorf("%s is listened for already", service)
	}
	l := &doorListener{door: d, service: service, queue: make(chan Conn, acceptQueue), done: make(chan struct{})}
	d.services[service] = l
	return l, nil
}

// Track makes c one of the connections that end with the Door, and with [Door.Drop];
// nil if the Door is closed. Connections that were dialled belong to it too.
func (d *Door) Track(c Conn) Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	t := &tracked{Conn: c, door: d}
	d.open[t] = struct{}{}
	return t
}

// Drop closes the connections whose other end is a node that gone reports.
func (d *Door) Drop(gone func(boxed.NodeID) bool) {
	for _, c := range d.tracked(func(c *tracked) bool { return gone(c.Peer().Node) }) {
		c.Close()
	}
}

func (d *Door) tracked(which func(*tracked) bool) (list []*tracked) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.open {
		if which(c) {
			list = append(list, c)
		}
	}
	return list
}

// Close closes the listener and all connections.
func (d *Door) Close() error {
	d.mu.Lock()
	d.closed = true
	listeners := slices.Collect(maps.Values(d.services))
	d.mu.Unlock()
	d.stop()
	err := d.raw.Close()
	for _, l := range listeners {
		l.Close()
	}
	for _, c := range d.tracked(func(*tracked) bool { return true }) {
		c.Abort() // what nobody has closed before breaks: this node is gone
	}
	d.work.Wait()
	return err
}

// tracked is a connection that its Door knows, until both sides have closed it.
type tracked struct {
	Conn
	door *Door
	once sync.Once // it was closed, or broken off
}

func (t *tracked) forget() {
	t.door.mu.Lock()
	defer t.door.mu.Unlock()
	delete(t.door.open, t)
}

func (t *tracked) Abort() error {
	t.once.Do(func() {})
	t.forget()
	return t.Conn.Abort()
}

func (t *tracked) Close() (err error) {
	t.once.Do(func() { err = t.close() })
	return err
}

func (t *tracked) close() error {
	c, ok := t.Conn.(*gated)
	if !ok || !c.farewell() || !t.door.goOn(c.hearOut, t) {
		t.forget()
		return t.Conn.Close()
	}
	return nil
}

// goOn runs work that a connection has after it was closed here, and ends the
// connection after it. It reports whether the Door is there for that.
func (d *Door) goOn(work func(), t *tracked) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.work.Go(func() {
		work()
		t.forget()
		t.Conn.Close()
	})
	return true
}

// doorListener is one service's.
type doorListener struct {
	door    *Door
	service Service
	queue   chan Conn
	once    sync.Once
	done    chan struct{}
}

func (l *doorListener) AcceptPeer() (Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *doorListener) Accept() (net.Conn, error) { return l.AcceptPeer() }

func (l *doorListener) Addr() net.Addr { return l.door.raw.Addr() }

func (l *doorListener) Close() error {
	l.once.Do(func() {
		l.door.mu.Lock()
		delete(l.door.services, l.service)
		l.door.mu.Unlock()
		close(l.done)
		for {
			select {
			case c := <-l.queue:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}
