package agent

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"
)

func randomToken() string { return rand.Text() }

// ErrStdinClosed is what a writer of stdin learns when the program no longer
// reads it.
var ErrStdinClosed = errors.New("the program no longer reads its standard input")

// killPatience is how long a canceled exec has to report its end.
const killPatience = 5 * time.Second

// Streams are an exec's, on the host's side. Any may be nil. The writers are
// called from one goroutine. A Stdin with a method CloseWithError (an
// io.PipeReader) gets ErrStdinClosed once the program reads no more.
type Streams struct {
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	Started func(ExecInfo)                 // once, before output
	Gap     func(stderr bool, bytes int64) // bytes that are no longer kept
}

// Exec runs a program and returns when it has ended and its output is written.
// ctx's end kills its whole tree and returns Exit with the reason canceled and
// ctx's error. A link that breaks is taken up again where it was; if it does not
// come back the error is ErrLost.
func (h *Host) Exec(ctx context.Context, start ExecStart, s Streams) (Exit, error) {
	start.Detached = false
	// A caller that leaves in between still learns whether it runs, within bounds:
	// a guest that does not answer holds nobody.
	asking, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	patience := context.AfterFunc(ctx, func() { time.AfterFunc(killPatience, cancel) })
	defer patience()
	conn, stop, err := h.askExec(asking, start)
	if err != nil {
		if !errors.As(err, new(*Error)) { // no answer: it may run, and nobody would follow it
			h.killSoon(start.ID)
		}
		if ctx.Err() != nil && asking.Err() != nil {
			err = ctx.Err()
		}
		return Exit{}, err
	}
	stop()
	return h.follow(ctx, conn, Attach{ID: start.ID, Own: true}, s, true)
}

// Start runs a program that nobody need follow.
func (h *Host) Start(ctx context.Context, start ExecStart) (ExecInfo, error) {
	start.Detached = true
	var a Attached
	err := h.call(ctx, opExec, start, &a)
	return a.Info, err
}

// Attach joins an exec at offsets. exit.Reason is "" if it still runs, with
// NoFollow. ctx's end leaves an exec that is not the caller's own running.
func (h *Host) Attach(ctx context.Context, a Attach, s Streams) (Exit, error) {
	conn, stop, err := h.ask(ctx, h.open, opAttach, a, &Attached{})
	if err != nil {
		return Exit{}, err
	}
	stop()
	return h.follow(ctx, conn, a, s, a.Own)
}

// follow reads one exec's stream to its end, over as many connections as it
// takes.
func (h *Host) follow(ctx context.Context, conn net.Conn, a Attach, s Streams, kill bool) (Exit, error) {
	f := &follower{host: h, at: a, streams: s, kill: kill, stdinDone: s.Stdin == nil}
	// Decided by the context, which has ended before anybody hears of it: a reader
	// or writer that fails because of that must not look like one of its own.
	f.left = func() bool { return ctx.Err() != nil && (!kill || h.leaves(ctx)) }
	defer f.close()
	defer func() {
		if f.feeding && !f.stdinEnd.Load() {
			f.refuseStdin()
		}
	}()
	ended := make(chan struct{})
	defer close(ended)
	if s.Started != nil {
		s.Started(ExecInfo{ID: a.ID})
	}
	f.use(conn)
	left := context.AfterFunc(ctx, func() {
		if f.left() {
			f.close()
			return
		}
		// The exec is the caller's: it ends, and says so on its stream.
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPatience)
		defer cancel()
		h.Kill(late, a.ID, ExitCanceled)
		select {
		case <-late.Done():
			f.close()
		case <-ended:
		}
	})
	defer left()
	for {
		exit, err := f.read()
		if err == nil || errors.As(err, new(writerError)) {
			if err != nil && kill && !f.left() {
				h.killSoon(a.ID)
			}
			if err == nil {
				f.release()
				if ctx.Err() != nil && exit.Reason == ExitCanceled {
					err = ctx.Err()
				}
			}
			return exit, err
		}
		if ctx.Err() != nil {
			return Exit{Reason: ExitCanceled, Code: -1}, ctx.Err()
		}
		if errors.As(err, new(*errProtocol)) {
			return Exit{}, h.linkError(ctx, err)
		}
		if err := f.again(ctx); err != nil {
			return Exit{}, err
		}
	}
}

// leaves reports whether ctx ended because this process goes away.
func (h *Host) leaves(ctx context.Context) bool {
	return h.cfg.Away != nil && errors.Is(context.Cause(ctx), h.cfg.Away)
}

// killSoon kills an exec whose caller has already been answered.
func (h *Host) killSoon(id string) {
	h.begin(func() {
		ctx, cancel := context.WithTimeout(context.Background(), killPatience)
		defer cancel()
		h.Kill(ctx, id, ExitCanceled)
	})
}

// writerError is an error of the caller's own writer.
type writerError struct{ error }

func (e writerError) Unwrap() error { return e.error }

// follower is the host's end of one exec's stream.
type follower struct {
	host      *Host
	at        Attach // offsets advance with what was written
	streams   Streams
	conn      atomic.Pointer[net.Conn] // whoever takes it out is done with it
	closed    atomic.Bool
	kill      bool         // the exec is the caller's, and ends with it
	left      func() bool  // the caller has gone, and what it followed runs on
	stdinDone bool         // nothing of stdin was or will be sent
	stdinSent atomic.Int64 // bytes
	feeding   bool
	stdinEnd  atomic.Bool // all of stdin and its end were sent
	refused   atomic.Bool // stdin was closed, as the program reads no more
	reached   int64       // sum of the offsets when the stream broke last
	tries     int         // to take it up since
}

func (f *follower) use(conn net.Conn) {
	f.conn.Store(&conn)
	if f.closed.Load() {
		f.close()
		return
	}
	if !f.stdinDone && !f.feeding {
		f.feeding = true
		go f.feed(conn)
	}
}

// refuseStdin tells a writer that could learn of it that nobody reads any more.
func (f *follower) refuseStdin() {
	if c, ok := f.streams.Stdin.(interface{ CloseWithError(error) error }); ok {
		f.refused.Store(true)
		c.CloseWithError(ErrStdinClosed)
	}
}

func (f *follower) close() {
	f.closed.Store(true)
	if conn := f.conn.Swap(nil); conn != nil {
		breakOff(*conn)
	}
}

// release is close for a stream that was read to its end.
func (f *follower) release() {
	if conn := f.conn.Swap(nil); conn != nil {
		f.host.release(*conn, !f.feeding || f.stdinEnd.Load())
	}
}

// feed copies stdin to the guest until its end. It may outlive the exec, for as
// long as a Read of the caller's reader blocks.
func (f *follower) feed(conn net.Conn) {
	buf := make([]byte, frameHead+ChunkSize)
	for {
		n, err := f.streams.Stdin.Read(buf[frameHead:])
		if n > 0 {
			putFrameHead(buf, frameStdin, n)
			if _, werr := conn.Write(buf[:frameHead+n]); werr != nil {
				if errors.Is(werr, yamux.ErrConnectionWriteTimeout) {
					breakOff(conn) // the stream lives on, with a hole in its input
				}
				return
			}
			f.stdinSent.Add(int64(n))
		}
		if err != nil {
			// A reader that failed must not look like a complete input.
			if err != io.EOF {
				if f.refused.Load() { // it was closed here
					return
				}
				if f.kill && !f.left() {
					f.host.killSoon(f.at.ID)
				}
				return
			}
			if writeFrame(conn, frameStdin, nil) == nil {
				f.stdinEnd.Store(true)
			}
			return
		}
	}
}

// How often a stream that breaks without progress is taken up, and how long a
// guest that ends one while its link is alive has to wait.
const (
	maxAgain   = 5
	againPause = 100 * time.Millisecond
)

// again takes the stream up after it broke. Input that was under way cannot be
// taken up without a doubt about what arrived: that is a lost exec.
func (f *follower) again(ctx context.Context) error {
	if at := f.at.Stdout + f.at.Stderr; at > f.reached {
		f.reached, f.tries = at, 0
	}
	for {
		old := f.conn.Swap(nil)
		if old != nil {
			breakOff(*old)
		}
		if f.tries++; f.tries > maxAgain {
			f.giveUp()
			return fmt.Errorf("%w: the exec's stream breaks again and again", ErrLost)
		}
		if old != nil && f.host.Linked() { // it was the guest who ended it
			select {
			case <-time.After(againPause):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		var a Attached
		conn, stop, err := f.host.ask(ctx, f.host.open, opAttach, f.at, &a)
		if errors.Is(err, ErrLost) && !errors.As(err, new(*errProtocol)) {
			continue
		}
		if err != nil {
			return err
		}
		stop()
		if f.feeding && (!f.stdinEnd.Load() || a.Stdin != f.stdinSent.Load()) {
			conn.Close()
			f.giveUp()
			return fmt.Errorf("%w while standard input was being sent", ErrLost)
		}
		f.use(conn)
		return nil
	}
}

// giveUp ends an exec that is the caller's and cannot be followed; another's, or one
// that runs by itself, lives on.
func (f *follower) giveUp() {
	if f.kill {
		f.host.killSoon(f.at.ID)
	}
}

// read handles frames until the exec's end or the stream's.
func (f *follower) read() (_ Exit, err error) {
	conn := f.conn.Load()
	if conn == nil {
		return Exit{}, net.ErrClosed
	}
	r, done := readerOf(*conn)
	defer done()
	defer func() {
		if errors.As(err, new(writerError)) {
			f.close() // before, as it ends all reading
		}
		// Not what runs on without us: the guest would take it for delivered, and who
		// attaches in our next life would miss it.
		if err != nil && !(f.kill && f.left()) {
			readAway(*conn)
		}
	}()
	for {
		typ, payload, size, err := r.peek()
		if err != nil {
			return Exit{}, err
		}
		switch typ {
		case frameStdout:
			err = f.write(f.streams.Stdout, payload, &f.at.Stdout)
		case frameStderr:
			err = f.write(f.streams.Stderr, payload, &f.at.Stderr)
		case frameGap:
			err = f.gap(payload)
		case frameNoRead:
			f.refuseStdin()
		case frameExit:
			var exit Exit
			if err := json.Unmarshal(payload, &exit); err != nil {
				return Exit{}, &errProtocol{"an exit that is not one: " + err.Error()}
			}
			r.Discard(size)
			return exit, nil
		case frameAlive:
			return Exit{}, nil
		}
		if err != nil {
			return Exit{}, err
		}
		r.Discard(size)
	}
}

func (f *follower) write(w io.Writer, p []byte, offset *int64) error {
	*offset += int64(len(p))
	if w == nil {
		return nil
	}
	if _, err := w.Write(p); err != nil {
		return writerError{err}
	}
	return nil
}

func (f *follower) gap(payload []byte) error {
	if len(payload) != 9 {
		return &errProtocol{"malformed gap frame"}
	}
	n := int64(binary.BigEndian.Uint64(payload[1:]))
	if n < 0 {
		return &errProtocol{"malformed gap frame"}
	}
	stderr := payload[0] == frameStderr
	if stderr {
		f.at.Stderr += n
	} else {
		f.at.Stdout += n
	}
	if f.streams.Gap != nil {
		f.streams.Gap(stderr, n)
	}
	return nil
}

// Execs lists the guest's execs, oldest first.
func (h *Host) Execs(ctx context.Context) ([]ExecInfo, error) {
	list := bounded[ExecInfo]{most: MaxExecs + MaxEnded}
	err := h.call(ctx, opExecs, struct{}{}, &list)
	return list.items, err
}

// Signal signals an exec's leader, or with tree all of its processes.
func (h *Host) Signal(ctx context.Context, id, signal string, tree bool) error {
	return h.call(ctx, opSignal, Signal{ID: id, Signal: signal, Tree: tree}, nil)
}

// Kill ends an exec's whole tree and returns when it is gone.
func (h *Host) Kill(ctx context.Context, id, reason string) error {
	return h.call(ctx, opKill, Kill{ID: id, Reason: reason}, nil)
}

// Resize sets the size of an exec's terminal.
func (h *Host) Resize(ctx context.Context, id string, cols, rows uint16) error {
	return h.call(ctx, opResize, Resize{ID: id, Cols: cols, Rows: rows}, nil)
}
