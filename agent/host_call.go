package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/yamux"
)

// link is the session with the guest, once there is one.
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

// roomPatience is how long a call waits while as many as may be are open: those
// that were left end a moment later, when the guest has said its part.
const roomPatience = time.Second

// openStream opens a stream. yamux would wait, past any context, for a guest
// that acknowledges none of as many as its backlog.
func (h *Host) openStream(ctx context.Context, session *yamux.Session) (net.Conn, error) {
	patience := time.Now().Add(roomPatience)
	select {
	case h.opening <- struct{}{}:
		defer func() { <-h.opening }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for session.NumStreams() >= hostStreams-1 {
		if time.Now().After(patience) {
			return nil, &Error{Code: ErrExhausted, Message: "too many calls wait for this sandbox's agent; try again when some have ended"}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if h.cfg.Budget == nil || session.NumStreams() < streamFloor {
		return session.OpenStream()
	}
	if !h.cfg.Budget.take() {
		return nil, &Error{Code: ErrExhausted, Message: "this node has as many calls open as it may; try again when some have ended"}
	}
	stream, err := session.OpenStream()
	if err != nil {
		h.cfg.Budget.left.Add(1)
		return nil, err
	}
	return &budgeted{Conn: stream, budget: h.cfg.Budget}, nil
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
	select {
	case h.dialling <- struct{}{}: // or some would be closed as unproven
		defer func() { <-h.dialling }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
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
	return h.answered(ctx, a, out)
}

// answered is the end of ask: it reads the answer into out.
func (h *Host) answered(ctx context.Context, a answer, out any) (conn net.Conn, stop func() bool, err error) {
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
	if err = writeRequest(conn, req); err == nil {
		value, err = h.readResponse(ctx, conn)
	}
	if err != nil {
		stop()
		h.release(conn, errors.As(err, new(*Error)))
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

// readAway takes what a guest still sends on a stream that was broken off, or it
// would hold its place until yamux gives it up. Nobody else may be reading it: two
// readers of one stream lock each other out (yamux 0.1.2).
func readAway(conn net.Conn) {
	if _, ok := conn.(*direct); ok {
		return
	}
	go func() {
		conn.SetReadDeadline(time.Now().Add(readAwayLimit))
		io.Copy(io.Discard, conn)
	}()
}

// readAwayLimit is how long that goes on; yamux forgets a stream after as long.
const readAwayLimit = 5 * time.Second

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

// BreakLink closes all connections as a fault would; the guest dials
// again. For tests and for a link that is found stuck.
func (h *Host) BreakLink() {
	h.mu.Lock()
	open := slices.Collect(maps.Keys(h.conns))
	h.mu.Unlock()
	for _, c := range open {
		c.Close()
	}
}
