package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

// firstMessage is how long a client may take to say what it wants.
const firstMessage = 30 * time.Second

// endGrace is how long a stream that the server ends may take to say so.
const endGrace = 3 * time.Second

// errAnswered is in the chain of an error that the client has been told already.
var errAnswered = errors.New("answered")

var errLeft = &boxed.Error{Code: boxed.CodeCanceled, Message: "the client went away"}

// stream is one exec's WebSocket. Output is written by whoever has it: handing it
// to a writer costs as much as the write. One goroutine reads and never stalls,
// one writes credit, one pings; finish ends all three.
type stream struct {
	c      *call
	conn   *websocket.Conn
	ctx    context.Context // of the exec; ends when the client has left
	cancel context.CancelCauseFunc

	kick   chan struct{} // capacity 1: stdin credit is due
	credit atomic.Int64
	stop   chan struct{}
	wg     sync.WaitGroup
	unhook func() bool // stops what run hooked to ctx

	stdin          *pipe // nil unless the exec reads it
	stdout, stderr *window
	resize         chan boxed.Size
	signals        chan string

	writing sync.Mutex // held over a write
	buf     []byte     // of the message that is written
	over    bool       // the last frame is written
}

// upgrade turns the request into a WebSocket. After it nothing can be answered
// over HTTP any more.
func (c *call) upgrade() (*websocket.Conn, error) {
	if c.r.Header.Get("Upgrade") == "" {
		return nil, boxed.Errorf(boxed.CodeInvalid, "this call is a WebSocket: connect with ws:// or wss://").WithField("Upgrade")
	}
	// The origin has been checked for every request. Compression would hold
	// 1.2 MB for each stream, and mix secrets with what an attacker can choose.
	conn, err := websocket.Accept(c.w, c.r, &websocket.AcceptOptions{
		InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, &boxed.Error{Code: boxed.CodeInvalid, Message: "not a WebSocket handshake", Err: errAnswered}
	}
	return conn, nil
}

func (c *call) openStream() (*stream, error) {
	conn, err := c.upgrade()
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(frame.MaxMessage)
	st := &stream{
		c: c, conn: conn,
		kick: make(chan struct{}, 1), stop: make(chan struct{}),
		resize: make(chan boxed.Size, 1), signals: make(chan string, 16),
	}
	st.ctx, st.cancel = context.WithCancelCause(c.ctx)
	if c.v.has("window") {
		n := c.v.integer("window")
		st.stdout, st.stderr = newWindow(n), newWindow(n)
	}
	return st, nil
}

// first reads the client's first message: the request, as JSON text.
func (st *stream) first() ([]byte, error) {
	st.conn.SetReadLimit(-1) // readHeld has one
	defer st.conn.SetReadLimit(frame.MaxMessage)
	ctx, cancel := context.WithTimeout(st.ctx, firstMessage)
	defer cancel()
	typ, r, err := st.conn.Reader(ctx)
	var raw []byte
	if err == nil {
		raw, err = st.c.readHeld(r, st.c.s.cfg.MaxJSON)
	}
	switch {
	case err == errTooMuch:
		return nil, tooLarge(st.c.s.cfg.MaxJSON)
	case err == error(errMemory):
		return nil, err
	case err != nil && ctx.Err() != nil && st.ctx.Err() == nil:
		return nil, boxed.Errorf(boxed.CodeDeadline, "no request came within 30 s")
	case err != nil:
		return nil, st.c.outcome(errLeft)
	case typ != websocket.MessageText:
		return nil, boxed.Errorf(boxed.CodeInvalid, "the first message must be the request, as JSON text")
	}
	return raw, nil
}

// run starts the goroutines. stdin: the client may send it.
func (st *stream) run(stdin bool) {
	if stdin {
		st.stdin = newPipe(frame.StdinWindow, &st.c.held, func(n int) {
			st.credit.Add(int64(n))
			select {
			case st.kick <- struct{}{}:
			default:
			}
		})
	}
	st.wg.Go(st.creditLoop)
	st.wg.Go(st.readLoop)
	st.wg.Go(st.pingLoop)
	// A client that takes nothing must not keep a stream alive that the server
	// has ended.
	st.unhook = context.AfterFunc(st.ctx, func() {
		if st.stdin != nil {
			st.stdin.fail(errLeft)
		}
		if ended(st.ctx) != nil {
			select {
			case <-st.stop:
			case <-time.After(endGrace):
				st.conn.CloseNow()
			}
		}
	})
}

// creditLoop tells the client how much more input it may send, and when no more
// is read.
func (st *stream) creditLoop() {
	var refused chan struct{}
	if st.stdin != nil {
		refused = st.stdin.refused
	}
	for {
		select {
		case <-refused:
			st.send(frame.Frame{Type: frame.StdinClose})
		case <-st.kick:
			if n := st.credit.Swap(0); n > 0 {
				st.send(frame.Frame{Type: frame.Credit, Stream: frame.Stdin, Bytes: uint64(n)})
			}
		case <-st.stop:
			return
		}
	}
}

// send writes a frame, and returns when it is on its way.
func (st *stream) send(f frame.Frame) error {
	st.writing.Lock()
	defer st.writing.Unlock()
	if st.over {
		return errLeft
	}
	st.over = f.Type.Last()
	var err error
	if s := st.c.w.socket; len(f.Payload) > 0 && !st.over && s.vectored() {
		err = s.writeMessage(byte(f.Type), f.Payload)
	} else {
		if st.buf == nil {
			st.buf = make([]byte, 0, min(len(f.Payload), frame.DataSize)+64)
		}
		st.buf = frame.Append(st.buf[:0], f)
		err = st.conn.Write(context.Background(), websocket.MessageBinary, st.buf) // the socket has a deadline
		if cap(st.buf) > 2*frame.DataSize {
			st.buf = nil
		}
	}
	if err != nil {
		st.unwritable(err)
	}
	st.c.w.bytes += int64(len(f.Payload))
	return err
}

// readLoop reads until the socket ends. It waits for nothing else, so that a
// client that leaves is noticed whatever the program does with its input.
func (st *stream) readLoop() {
	var buf bytes.Buffer // used again: take copies what it keeps
	for {
		typ, r, err := st.conn.Reader(context.Background())
		if err == nil {
			if buf.Reset(); buf.Cap() > 2*frame.DataSize {
				buf = bytes.Buffer{}
			}
			_, err = buf.ReadFrom(r)
		}
		if err != nil {
			st.cancel(st.why())
			return
		}
		if typ != websocket.MessageBinary {
			st.refuse(errors.New("a text message after the first"))
			return
		}
		f, err := frame.Parse(buf.Bytes())
		if err == nil {
			err = st.take(f)
		}
		if err != nil {
			st.refuse(err)
			return
		}
	}
}

// hopConn is a connection that another node passes a client's bytes on.
type hopConn interface {
	Broken() bool
}

// why is what it means that no more can be read. A node that is gone says nothing
// of its client, who may attach by another: what runs goes on.
func (st *stream) why() error {
	if c, ok := st.c.w.socket.Conn.(hopConn); ok && c.Broken() {
		return boxed.ErrGoingAway
	}
	return errLeft
}

// unwritable ends a stream that cannot be written to. Of another node's
// connection only readLoop can tell why, which is given a moment.
func (st *stream) unwritable(err error) {
	if _, ok := st.c.w.socket.Conn.(hopConn); ok && !errors.Is(err, os.ErrDeadlineExceeded) {
		st.c.w.socket.SetReadDeadline(time.Now().Add(time.Second))
		return
	}
	st.cancel(errLeft)
}

// refuse ends a stream whose client broke the protocol, and keeps reading so
// that the close handshake can be had.
func (st *stream) refuse(err error) {
	if known := (*boxed.Error)(nil); !errors.As(err, &known) {
		err = &boxed.Error{Code: boxed.CodeInvalid, Message: "the stream was ended: " + err.Error(), Err: err}
	}
	st.cancel(err)
	for {
		if _, _, err := st.conn.Read(context.Background()); err != nil {
			return
		}
	}
}

func (st *stream) take(f frame.Frame) error {
	switch f.Type {
	case frame.Stdin, frame.StdinClose:
		if st.stdin == nil {
			return errors.New("stdin was not asked for")
		}
		if f.Type == frame.StdinClose {
			st.stdin.close()
			return nil
		}
		return st.stdin.push(f.Payload)
	case frame.Resize:
		select { // only the last one matters
		case <-st.resize:
		default:
		}
		st.resize <- boxed.Size{Cols: f.Cols, Rows: f.Rows}
	case frame.Signal:
		select {
		case st.signals <- strings.TrimPrefix(strings.ToUpper(f.Text), "SIG"):
		default:
			return errors.New("more than 16 signals at once")
		}
	case frame.Credit:
		switch {
		case f.Stream == frame.Stdout && st.stdout != nil:
			st.stdout.add(int64(f.Bytes))
		case f.Stream == frame.Stderr && st.stderr != nil:
			st.stderr.add(int64(f.Bytes))
		default:
			return errors.New("credit without a window")
		}
	default:
		return errors.New(f.Type.String() + " is not for a client to send")
	}
	return nil
}

// pingLoop finds clients that have gone without a word.
func (st *stream) pingLoop() {
	tick := time.NewTicker(st.c.s.cfg.PingInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			ctx, cancel := context.WithTimeout(context.Background(), st.c.s.cfg.WriteIdle)
			err := st.conn.Ping(ctx)
			cancel()
			if err != nil && ctx.Err() == nil {
				st.unwritable(err)
				return
			}
			if err != nil {
				st.cancel(errLeft)
				st.conn.CloseNow()
				return
			}
		case <-st.stop:
			return
		}
	}
}

// finish sends how it ended, once, closes the socket and waits for the
// goroutines. last is nil if err is not.
func (st *stream) finish(last *frame.Frame, err error) {
	if err = st.c.outcome(err); st.ctx.Err() != nil {
		if own := ended(st.ctx); own != nil && own != errLeft {
			err = own // and not what follows from it
		}
	}
	code := websocket.StatusNormalClosure
	if err != nil {
		e := boxed.AsError(err)
		st.c.code, st.c.err = e.Code, err
		last = &frame.Frame{Type: frame.Error, Payload: problemOf(err, st.c.id).json()}
		code = closeCode(st.c.ctx, e.Code)
	}
	gone := context.Cause(st.ctx) == error(errLeft)
	if !gone && st.send(*last) == nil {
		st.conn.Close(code, "")
	}
	close(st.stop)
	st.conn.CloseNow()
	st.wg.Wait()
	st.unhook()
	st.cancel(nil)
}

func closeCode(ctx context.Context, code boxed.Code) websocket.StatusCode {
	switch {
	case errors.Is(context.Cause(ctx), boxed.ErrGoingAway):
		return websocket.StatusGoingAway
	case code == boxed.CodeInternal:
		return websocket.StatusInternalError
	}
	return websocket.StatusPolicyViolation
}

// output is where the port writes one stream.
type output struct {
	st     *stream
	kind   frame.Type
	window *window
}

func (st *stream) output(kind frame.Type) *output {
	w := st.stdout
	if kind == frame.Stderr {
		w = st.stderr
	}
	return &output{st: st, kind: kind, window: w}
}

// Write returns when all of p is on the wire, or the client has gone.
func (o *output) Write(p []byte) (written int, err error) {
	for len(p) > 0 {
		n := min(len(p), frame.DataSize)
		if o.window != nil {
			if n, err = o.window.take(o.st.ctx, n); err != nil {
				return written, err
			}
		}
		if err := o.st.send(frame.Frame{Type: o.kind, Payload: p[:n]}); err != nil {
			return written, err
		}
		written, p = written+n, p[n:]
	}
	return written, nil
}

func (c *call) execStream() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	st, err := c.openStream()
	if err != nil {
		return err
	}
	var req boxed.ExecRequest
	raw, err := st.first()
	if err == nil {
		var in execWire
		if in, err = check[execWire](c.s.doc.operations["POST "+sandboxPath+"/execs"], raw); err == nil {
			req, err = in.request()
		}
	}
	st.run(req.OpenStdin && err == nil)
	if err != nil {
		st.finish(nil, err)
		return nil
	}
	if st.stdin != nil {
		req.Stdin = st.stdin
	}
	req.Stdout, req.Stderr = st.output(frame.Stdout), st.output(frame.Stderr)
	req.Resize, req.Signals = st.resize, st.signals
	req.Timeout = endless(req.Timeout)
	req.Started = func(exec boxed.ExecID) {
		st.send(frame.Frame{Type: frame.Started, Text: string(exec)})
	}
	status, err := c.s.cfg.Service.Exec(st.ctx, id, req)
	st.finish(exitFrame(status), err)
	return nil
}

func exitFrame(status boxed.ExitStatus) *frame.Frame {
	raw, _ := json.Marshal(status) // strings and numbers
	return &frame.Frame{Type: frame.Exit, Payload: raw}
}

func (c *call) attachExec() error {
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	if _, err := c.s.cfg.Service.GetExec(c.ctx, id, exec); err != nil {
		return err // while it can still be an HTTP status
	}
	st, err := c.openStream()
	if err != nil {
		return err
	}
	st.run(c.v.boolean("stdin"))
	req := boxed.AttachRequest{
		StdoutOffset: c.v.integer("stdout_offset"), StderrOffset: c.v.integer("stderr_offset"),
		NoFollow: !c.v.boolean("follow"),
		Stdout:   st.output(frame.Stdout), Stderr: st.output(frame.Stderr),
		Resize: st.resize, Signals: st.signals,
	}
	if st.stdin != nil {
		req.Stdin = st.stdin
	}
	req.Gap = func(stream string, n int64) {
		kind := frame.Stdout
		if stream == "stderr" {
			kind = frame.Stderr
		}
		if n > 0 {
			st.send(frame.Frame{Type: frame.Gap, Stream: kind, Bytes: uint64(n)})
		}
	}
	st.send(frame.Frame{Type: frame.Started, Text: string(exec)})
	status, err := c.s.cfg.Service.Attach(st.ctx, id, exec, req)
	last := exitFrame(status)
	if status.Reason == "" {
		last = &frame.Frame{Type: frame.End}
	}
	st.finish(last, err)
	return nil
}

var (
	_ io.Writer    = (*output)(nil)
	_ http.Handler = (*Server)(nil)
)
