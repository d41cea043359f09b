package client

import (
	"context"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

// endOfBytes is the text message that closes one direction of a tunnel.
const endOfBytes = "eof"

// ListPorts lists what programs inside listen on.
func (c *Client) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	out, err := get[struct {
		Ports []boxed.Port `json:"ports"`
	}](ctx, c, sandboxPath(id)+"/ports", nil)
	if err != nil {
		return nil, err
	}
	return out.Ports, nil
}

// Dial connects to a loopback TCP port inside. ctx bounds the dial only. The
// connection has a CloseWrite method.
func (c *Client) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "port 0 cannot be dialled").WithField("port")
	}
	name := strconv.Itoa(int(port))
	return c.tunnelTo(ctx, sandboxPath(id)+"/ports/"+name+"/tunnel", "port "+name)
}

// tunnelTo connects to what a path is the tunnel of.
func (c *Client) tunnelTo(ctx context.Context, path, name string) (net.Conn, error) {
	return c.tunnelWith(ctx, path, url.Values{}, name)
}

func (c *Client) tunnelWith(ctx context.Context, path string, query url.Values, name string) (net.Conn, error) {
	conn, err := c.dial(ctx, path, query, nil)
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(frame.MaxMessage)
	t := &tunnel{ws: conn, name: name}
	t.reads, t.endReads = context.WithCancel(context.Background())
	t.writes, t.endWrites = context.WithCancel(context.Background())
	return t, nil
}

// tunnel is a net.Conn over a WebSocket. A deadline that passes closes it, as
// far as the WebSocket library goes.
type tunnel struct {
	ws   *websocket.Conn
	name string // of what is at the other end

	readMu sync.Mutex
	r      io.Reader
	eof    bool

	writeMu sync.Mutex

	deadlines           sync.Mutex
	reads, writes       context.Context
	endReads, endWrites context.CancelFunc
	readBy, writeBy     *time.Timer
}

func (t *tunnel) Read(p []byte) (int, error) {
	t.readMu.Lock()
	defer t.readMu.Unlock()
	for {
		if t.eof {
			return 0, io.EOF
		}
		if t.r == nil {
			typ, r, err := t.ws.Reader(t.reads)
			if err != nil {
				return 0, t.closed(err, "read")
			}
			if typ == websocket.MessageText {
				io.Copy(io.Discard, r)
				t.eof = true
				continue
			}
			t.r = r
		}
		n, err := t.r.Read(p)
		if err == io.EOF {
			t.r, err = nil, nil
			if n == 0 {
				continue
			}
		}
		if err != nil {
			err = t.closed(err, "read")
		}
		return n, err
	}
}

// closed maps the end of the socket: a normal close is the end of the bytes,
// anything else is a connection that broke.
func (t *tunnel) closed(err error, op string) error {
	if websocket.CloseStatus(err) == websocket.StatusNormalClosure {
		t.eof = true
		return io.EOF
	}
	return &net.OpError{Op: op, Net: "boxed", Addr: t.RemoteAddr(), Err: err}
}

func (t *tunnel) Write(p []byte) (written int, err error) {
	t.writeMu.Lock()
	defer t.writeMu.Unlock()
	for len(p) > 0 {
		n := min(len(p), frame.DataSize)
		if err := t.ws.Write(t.writes, websocket.MessageBinary, p[:n]); err != nil {
			return written, &net.OpError{Op: "write", Net: "boxed", Addr: t.RemoteAddr(), Err: err}
		}
		written, p = written+n, p[n:]
	}
	return written, nil
}

// CloseWrite says that no more bytes will come from this side.
func (t *tunnel) CloseWrite() error {
	t.writeMu.Lock()
	defer t.writeMu.Unlock()
	return t.ws.Write(t.writes, websocket.MessageText, []byte(endOfBytes))
}

func (t *tunnel) Close() error {
	t.SetDeadline(time.Time{})
	err := t.ws.Close(websocket.StatusNormalClosure, "")
	t.endReads()
	t.endWrites()
	if websocket.CloseStatus(err) != -1 {
		return nil // the other side was first
	}
	return err
}

type tunnelAddr string

func (a tunnelAddr) Network() string { return "boxed" }
func (a tunnelAddr) String() string  { return string(a) }

func (t *tunnel) LocalAddr() net.Addr  { return tunnelAddr("client") }
func (t *tunnel) RemoteAddr() net.Addr { return tunnelAddr("boxed:" + t.name) }

func (t *tunnel) SetDeadline(at time.Time) error {
	t.SetReadDeadline(at)
	return t.SetWriteDeadline(at)
}

func (t *tunnel) SetReadDeadline(at time.Time) error {
	t.deadlines.Lock()
	defer t.deadlines.Unlock()
	t.readBy = reset(t.readBy, at, t.endReads)
	return nil
}

func (t *tunnel) SetWriteDeadline(at time.Time) error {
	t.deadlines.Lock()
	defer t.deadlines.Unlock()
	t.writeBy = reset(t.writeBy, at, t.endWrites)
	return nil
}

func reset(timer *time.Timer, at time.Time, end func()) *time.Timer {
	if timer != nil {
		timer.Stop()
	}
	if at.IsZero() {
		return nil
	}
	return time.AfterFunc(time.Until(at), end)
}
