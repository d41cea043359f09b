package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

// outputWindow is how much of each output is on the way or waits for its
// writer, in bytes. With it a paused writer costs no more than that, and the
// socket is always read, so that pings are answered. What is on the way when a
// node goes away must be less than the agent keeps.
const outputWindow = 512 << 10

// stream is one exec over a WebSocket. The caller's goroutine reads the socket and
// writes output; one goroutine writes the socket. When an output takes long to be
// written, another goroutine reads on, and one for each output writes what waits.
type stream struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	resize         <-chan boxed.Size
	signals        <-chan string
	started        func(boxed.ExecID)
	gap            func(string, int64)

	conn   *websocket.Conn
	id     boxed.ExecID
	ended  chan struct{} // closed when the stream is over
	chunks chan chunk    // from the stdin reader
	kick   chan struct{} // capacity 1: a sink owes credit
	credit chan int64    // capacity 1: stdin credit from the server, summed up
	sinks  [2]*sink
	turn   atomic.Int64 // odd while the reader writes an output
	result chan result  // of a reader that took over
	wg     sync.WaitGroup

	gaps    sync.Mutex  // held over a call of gap
	refused atomic.Bool // stdin was closed, as the program reads no more

	mu  sync.Mutex
	err error // the first local failure
}

type chunk struct {
	data []byte // nil: end of input
	done chan<- struct{}
}

// run connects, sends the request (nil: none is due) and returns how it ended.
func (s *stream) run(ctx context.Context, c *Client, path string, q url.Values, request any) (boxed.ExitStatus, error) {
	q.Set("window", strconv.Itoa(outputWindow))
	quiet := silence{most: c.maxSilence}
	conn, err := c.dial(ctx, path, q, quiet.over)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	defer conn.CloseNow()
	conn.SetReadLimit(frame.MaxMessage)
	s.conn = conn
	defer quiet.watch(func() { conn.CloseNow() })()
	if request != nil {
		raw, err := json.Marshal(request)
		if err != nil {
			return boxed.ExitStatus{}, &boxed.Error{Code: boxed.CodeInvalid, Message: "write the request: " + err.Error(), Err: err}
		}
		if err := conn.Write(ctx, websocket.MessageText, raw); err != nil {
			return boxed.ExitStatus{}, c.transportError(ctx, err)
		}
	}
	s.ended, s.kick = make(chan struct{}), make(chan struct{}, 1)
	s.chunks, s.credit = make(chan chunk), make(chan int64, 1)
	s.result = make(chan result, 1)
	s.sinks[0] = newSink(frame.Stdout, s.stdout, s)
	s.sinks[1] = newSink(frame.Stderr, s.stderr, s)
	unhook := context.AfterFunc(ctx, func() { conn.CloseNow() })
	defer unhook()
	s.wg.Go(s.writeLoop)
	s.wg.Go(s.sinks[0].run)
	s.wg.Go(s.sinks[1].run)
	if s.stdin != nil {
		go s.readStdin() // nobody waits for it: its Read may be blocked for ever
	}
	status, err := s.read()
	for _, k := range s.sinks {
		k.finish(err == nil || errors.Is(err, boxed.CodeLost)) // what came is delivered
	}
	close(s.ended)
	s.refuseStdin() // whoever still writes: it has ended
	if err != nil {
		conn.CloseNow()
	}
	s.wg.Wait()
	if local := s.failure(); local != nil {
		return boxed.ExitStatus{}, local
	}
	if err != nil && ctx.Err() != nil {
		return boxed.ExitStatus{}, contextError(ctx)
	}
	return status, err
}

// silence ends a stream whose node has fallen silent.
type silence struct {
	most  time.Duration
	timer atomic.Pointer[time.Timer]
}

// over is called at each sign of life.
func (s *silence) over() {
	if t := s.timer.Load(); t != nil {
		t.Reset(s.most)
	}
}

// watch calls end when nothing came for too long, until stop is called.
func (s *silence) watch(end func()) (stop func()) {
	t := time.AfterFunc(s.most, end)
	s.timer.Store(t)
	return func() { t.Stop() }
}

// fail ends the stream for a reason of this side.
func (s *stream) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.conn.CloseNow()
}

func (s *stream) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// refuseStdin tells a writer of stdin that could learn of it (an io.PipeReader's)
// that the program reads no more.
func (s *stream) refuseStdin() {
	if c, ok := s.stdin.(interface{ CloseWithError(error) error }); ok {
		s.refused.Store(true)
		c.CloseWithError(errStdinRefused)
	}
}

var errStdinRefused = &boxed.Error{Code: boxed.CodeGone, Message: "the program no longer reads its standard input"}

// tellGap is called by both sinks; the caller hears of one gap after the other.
func (s *stream) tellGap(stream string, n int64) {
	s.gaps.Lock()
	defer s.gaps.Unlock()
	if s.gap != nil {
		s.gap(stream, n)
	}
}

func (s *stream) lost(err error) error {
	e := &boxed.Error{Code: boxed.CodeLost, Message: "the link to the sandbox broke; how the program ended is not known", Err: err}
	if s.id != "" {
		e = e.With("exec", string(s.id))
	}
	return e
}

// relief is how long the reader may write an output before another one takes
// over: much less than a node waits for the answer to a ping.
const relief = 250 * time.Millisecond

type result struct {
	status boxed.ExitStatus
	err    error
}

// read reads to the end, or waits for whoever took over.
func (s *stream) read() (boxed.ExitStatus, error) {
	status, err := s.readLoop()
	if err == errRelieved {
		r := <-s.result
		return r.status, r.err
	}
	return status, err
}

// relieve starts another reader if the one there is has been writing since the
// last look. It returns what it saw.
func (s *stream) relieve(last int64) int64 {
	turn := s.turn.Load()
	if turn%2 == 0 || turn != last || !s.turn.CompareAndSwap(turn, turn+1) {
		return turn
	}
	go func() {
		if status, err := s.readLoop(); err != errRelieved {
			s.result <- result{status, err}
		}
	}()
	return turn + 1
}

var errRelieved = errors.New("another goroutine reads on")

// output passes an item on, and reports whether the caller is still the reader.
func (s *stream) output(k *sink, it item) error {
	mine, err := k.put(it)
	if err != nil {
		return s.lost(err)
	}
	if !mine {
		return nil
	}
	turn := s.turn.Add(1)
	k.write(it)
	k.free()
	if !s.turn.CompareAndSwap(turn, turn+1) {
		return errRelieved
	}
	return nil
}

// readLoop reads frames until the last one, or errRelieved.
func (s *stream) readLoop() (boxed.ExitStatus, error) {
	for {
		buf, err := readMessage(s.conn)
		if err != nil {
			return boxed.ExitStatus{}, s.lost(err)
		}
		f, err := frame.Parse(*buf)
		if err != nil {
			return boxed.ExitStatus{}, s.lost(err)
		}
		switch f.Type {
		case frame.Stdout, frame.Stderr:
			if err := s.output(s.sinks[f.Type-frame.Stdout], item{data: f.Payload, buf: buf}); err != nil {
				return boxed.ExitStatus{}, err
			}
			continue // whoever writes it gives the buffer back
		case frame.Gap:
			if f.Stream == frame.Stdin {
				break
			}
			if err := s.output(s.sinks[f.Stream-frame.Stdout], item{gap: int64(f.Bytes)}); err != nil {
				return boxed.ExitStatus{}, err
			}
		case frame.Started:
			s.id = boxed.ExecID(f.Text)
			if s.started != nil {
				s.started(s.id)
			}
		case frame.Credit:
			if f.Stream == frame.Stdin {
				s.addCredit(int64(f.Bytes))
			}
		case frame.StdinClose:
			s.refuseStdin()
		case frame.Exit, frame.Error, frame.End:
			return s.last(f)
		}
		buffers.Put(buf)
	}
}

func (s *stream) last(f frame.Frame) (status boxed.ExitStatus, err error) {
	switch f.Type {
	case frame.Exit:
		if err := json.Unmarshal(f.Payload, &status); err != nil {
			return boxed.ExitStatus{}, s.lost(err)
		}
		return status, nil
	case frame.Error:
		var p problem
		if err := json.Unmarshal(f.Payload, &p); err != nil || p.Code == "" {
			return boxed.ExitStatus{}, s.lost(err)
		}
		e := p.err()
		if s.id != "" && e.Detail["exec"] == nil {
			e = e.With("exec", string(s.id))
		}
		return boxed.ExitStatus{}, e
	}
	return boxed.ExitStatus{}, nil // it still runs: Reason is empty
}

func (s *stream) addCredit(n int64) {
	select {
	case old := <-s.credit:
		n += old
	default:
	}
	select {
	case s.credit <- n:
	default: // cannot be full: this is the only sender
	}
}

// writeLoop is the only writer of the socket.
func (s *stream) writeLoop() {
	var buf []byte
	write := func(f frame.Frame) bool {
		buf = frame.Append(buf[:0], f)
		// No deadline: a node that does not read is found by the pings' absence and
		// by ctx, and a paused program may stop reading its input for long.
		return s.conn.Write(context.Background(), websocket.MessageBinary, buf) == nil
	}
	resize, signals := s.resize, s.signals
	tick := time.NewTicker(relief)
	defer tick.Stop()
	turn := int64(0)
	ok := true
	for ok {
		select {
		case c := <-s.chunks:
			if c.data == nil {
				ok = write(frame.Frame{Type: frame.StdinClose})
			} else {
				ok = write(frame.Frame{Type: frame.Stdin, Payload: c.data})
			}
			close(c.done)
		case size, open := <-resize:
			if !open {
				resize = nil
				continue
			}
			ok = write(frame.Frame{Type: frame.Resize, Cols: size.Cols, Rows: size.Rows})
		case name, open := <-signals:
			if !open {
				signals = nil
				continue
			}
			ok = write(frame.Frame{Type: frame.Signal, Text: name})
		case <-s.kick:
			for _, k := range s.sinks {
				if n := k.owed.Swap(0); n > 0 && ok {
					ok = write(frame.Frame{Type: frame.Credit, Stream: k.kind, Bytes: uint64(n)})
				}
			}
		case <-tick.C:
			turn = s.relieve(turn)
		case <-s.ended:
			return
		}
	}
}

// inputWindow is how much input is on the way or waits for the program, in
// bytes. It is less than a server must take, which holds it.
const inputWindow = 256 << 10

// readStdin sends the caller's input, never more than the server has room for.
func (s *stream) readStdin() {
	room := int64(inputWindow)
	buf := make([]byte, frame.DataSize)
	send := func(data []byte) bool {
		done := make(chan struct{})
		select {
		case s.chunks <- chunk{data, done}:
		case <-s.ended:
			return false
		}
		select {
		case <-done:
			return true
		case <-s.ended:
			return false
		}
	}
	for {
		for room == 0 {
			select {
			case n := <-s.credit:
				room += n
			case <-s.ended:
				return
			}
		}
		n, err := s.stdin.Read(buf[:min(int64(len(buf)), room)])
		if n > 0 {
			room -= int64(n)
			if !send(buf[:n]) {
				return
			}
		}
		if err == io.EOF {
			send(nil)
			return
		}
		if err != nil && s.refused.Load() { // it was closed here
			return
		}
		if err != nil {
			select {
			case <-s.ended:
			default: // input that broke off must not look whole
				s.fail(&boxed.Error{Code: boxed.CodeCanceled, Message: "read stdin: " + err.Error(), Err: err})
			}
			return
		}
	}
}

// buffers are messages on their way from the socket to a sink.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, frame.DataSize+1); return &b }}

// readMessage reads one binary message into a pooled buffer.
func readMessage(conn *websocket.Conn) (*[]byte, error) {
	typ, r, err := conn.Reader(context.Background())
	if err != nil {
		return nil, err
	}
	if typ != websocket.MessageBinary {
		return nil, errors.New("a text message where a frame belongs")
	}
	buf := buffers.Get().(*[]byte)
	b := (*buf)[:0]
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == io.EOF {
			*buf = b
			return buf, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// dial opens a WebSocket. ctx bounds the handshake; the connection lives on.
// onPing, which may be nil, hears of the node's pings while somebody reads.
func (c *Client) dial(ctx context.Context, path string, q url.Values, onPing func()) (*websocket.Conn, error) {
	keep := &keepBody{next: c.http.Transport}
	if keep.next == nil {
		keep.next = http.DefaultTransport
	}
	conn, _, err := websocket.Dial(ctx, c.url(path, q), &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: keep, CheckRedirect: c.http.CheckRedirect, Jar: c.http.Jar},
		HTTPHeader: c.header(ctx),
		OnPingReceived: func(context.Context, []byte) bool {
			if onPing != nil {
				onPing()
			}
			return true
		},
	})
	switch {
	case err == nil:
		return conn, nil
	case keep.err != nil:
		return nil, keep.err
	}
	return nil, c.transportError(ctx, err)
}

// keepBody reads the error of a refused handshake, of which the WebSocket
// library keeps only the first kilobyte.
type keepBody struct {
	next http.RoundTripper
	err  error
}

func (k *keepBody) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := k.next.RoundTrip(r)
	if err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
		k.err = responseError(resp)
		resp.Body = http.NoBody
	}
	return resp, err
}
