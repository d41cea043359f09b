package api

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"os"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
)

// recorder notes what an answer was, for the access log, and gives each write a
// deadline: a client that takes nothing holds neither a connection nor the end.
type recorder struct {
	http.ResponseWriter
	idle   time.Duration // for a write; 0: none
	status int
	bytes  int64
	wrote  bool        // the header has gone out, or the connection was taken over
	taken  atomic.Bool // by a WebSocket
	socket *socket     // what it took
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader notes the status.
func (w *recorder) WriteHeader(status int) {
	if !w.wrote {
		w.status, w.wrote = status, status != http.StatusSwitchingProtocols
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write counts bytes.
func (w *recorder) Write(p []byte) (int, error) {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	w.rearm()
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

// rearm gives the next write, which after the handler is net/http's, its time.
func (w *recorder) rearm() {
	if w.idle > 0 && !w.hijacked() {
		http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.idle))
	}
}

// hijackedBuffer holds a WebSocket message of output with all of its heads, where
// it cannot be written from where it lies.
const hijackedBuffer = frame.DataSize + 32

// Hijack hands the connection to a WebSocket.
func (w *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil {
		w.wrote = true
		if w.status == 0 { // a proxy answers past this
			w.status = http.StatusSwitchingProtocols
		}
		w.taken.Store(true)
		w.socket = &socket{Conn: conn, idle: w.idle}
		conn = w.socket
		rw.Writer.Reset(conn)
		if !w.socket.vectored() {
			// net/http's holds 4 KiB: a frame of output would be two writes, and wake the
			// client twice.
			rw.Writer = bufio.NewWriterSize(conn, hijackedBuffer)
		}
	}
	return conn, rw, err
}

func (w *recorder) hijacked() bool { return w.taken.Load() }

var saneID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// requestID takes the client's if it is harmless in a log, or mints one.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-ID"); saneID.MatchString(id) {
		return id
	}
	return boxed.NewToken(16)
}

// body is the request's body with a deadline for each read, not for the whole:
// an upload may last for as long as it makes progress.
func (c *call) body(idle time.Duration) *idleReader {
	return &idleReader{r: c.r, ctl: http.NewResponseController(c.w), idle: idle, c: c}
}

type idleReader struct {
	r    *http.Request
	ctl  *http.ResponseController
	idle time.Duration
	c    *call
}

func (b *idleReader) Read(p []byte) (int, error) {
	b.ctl.SetReadDeadline(time.Now().Add(b.idle))
	// After the deadline is set, so that guard's own deadline is not undone.
	if err := b.c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.r.Body.Read(p)
	// Cleared at once: the deadline must not hit net/http's own read-ahead, which
	// would take it for a client that has gone.
	b.ctl.SetReadDeadline(time.Time{})
	return n, err
}

// idleWriter writes an answer's body with a deadline for each write.
type idleWriter struct {
	c   *call
	ctl *http.ResponseController
}

func (c *call) writer() *idleWriter {
	return &idleWriter{c: c, ctl: http.NewResponseController(c.w)}
}

func (w *idleWriter) Write(p []byte) (int, error) {
	if err := w.c.ctx.Err(); err != nil {
		return 0, err
	}
	return w.c.w.Write(p)
}

// flush sends what is buffered.
func (w *idleWriter) flush() error {
	w.ctl.SetWriteDeadline(time.Now().Add(w.c.s.cfg.WriteIdle))
	return w.ctl.Flush()
}

// rest leaves a fresh deadline behind, for what net/http still has to send.
func (w *idleWriter) rest() { w.c.w.rearm() }

func isTimeout(err error) bool {
	var ne net.Error
	return errors.Is(err, os.ErrDeadlineExceeded) || (errors.As(err, &ne) && ne.Timeout())
}
