package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/coder/websocket"
)

// endOfBytes is the text message that closes one direction of a tunnel.
const endOfBytes = "eof"

func (c *call) listPorts() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	list, err := c.s.cfg.Service.ListPorts(c.ctx, id)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"ports": never(list)})
}

// tunnel joins a WebSocket to a TCP connection inside. It ends when both directions
// have, when either side breaks, or when the server ends the call.
func (c *call) tunnel() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	if err := c.wantUpgrade(); err != nil {
		return err
	}
	inside, err := c.s.cfg.Service.Dial(c.ctx, id, uint16(c.v.integer("port")))
	if err != nil {
		return err
	}
	return c.join(inside)
}

// wantUpgrade refuses a request that is not for a WebSocket.
func (c *call) wantUpgrade() error {
	if c.r.Header.Get("Upgrade") == "" {
		return boxed.Errorf(boxed.CodeInvalid, "this call is a WebSocket: connect with ws:// or wss://").WithField("Upgrade")
	}
	return nil
}

// join joins the call's WebSocket to a connection, which it closes.
func (c *call) join(inside net.Conn) error {
	defer inside.Close()
	conn, err := c.upgrade()
	if err != nil {
		return err
	}
	defer conn.CloseNow()
	conn.SetReadLimit(frame.MaxMessage)
	ctx, cancel := context.WithCancelCause(c.ctx)
	t := &tunnel{c: c, conn: conn, inside: inside, cancel: cancel}
	unhook := context.AfterFunc(ctx, func() {
		inside.Close()
		if ended(ctx) != nil {
			conn.Close(closeCode(ctx, ""), "")
		}
		conn.CloseNow()
	})
	var wg, pings sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(t.inward)
	wg.Go(t.outward)
	pings.Go(func() { t.ping(stop) })
	wg.Wait()
	close(stop)
	if unhook() {
		conn.Close(websocket.StatusNormalClosure, "")
	}
	conn.CloseNow()
	pings.Wait()
	cancel(nil)
	return nil
}

type tunnel struct {
	c      *call
	conn   *websocket.Conn
	inside net.Conn
	cancel context.CancelCauseFunc
}

// inward copies from the client to the program, until the client's end.
func (t *tunnel) inward() {
	for {
		typ, r, err := t.conn.Reader(context.Background())
		if err != nil {
			t.cancel(nil)
			return
		}
		if typ == websocket.MessageText {
			word, err := io.ReadAll(r)
			if half, ok := t.inside.(interface{ CloseWrite() error }); err == nil && string(word) == endOfBytes && ok {
				half.CloseWrite()
				continue
			}
			t.cancel(nil) // no half-close to be had, or nonsense
			return
		}
		if _, err := io.Copy(insideWriter{t}, r); err != nil {
			t.cancel(nil)
			return
		}
	}
}

// insideWriter gives each write to the program a deadline; a message may take
// longer to come than one write may.
type insideWriter struct{ t *tunnel }

func (w insideWriter) Write(p []byte) (int, error) {
	w.t.inside.SetWriteDeadline(time.Now().Add(w.t.c.s.cfg.WriteIdle))
	return w.t.inside.Write(p)
}

// outward copies from the program to the client, until the program's end.
func (t *tunnel) outward() {
	buf := make([]byte, frame.DataSize)
	for {
		n, err := t.inside.Read(buf)
		if n > 0 && t.write(websocket.MessageBinary, buf[:n]) != nil {
			t.cancel(nil)
			return
		}
		if err == io.EOF {
			if t.write(websocket.MessageText, []byte(endOfBytes)) != nil {
				t.cancel(nil)
			}
			return
		}
		if err != nil {
			t.cancel(nil)
			return
		}
	}
}

func (t *tunnel) write(typ websocket.MessageType, p []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), t.c.s.cfg.WriteIdle)
	defer cancel()
	return t.conn.Write(ctx, typ, p)
}

func (t *tunnel) ping(stop <-chan struct{}) {
	tick := time.NewTicker(t.c.s.cfg.PingInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			ctx, cancel := context.WithTimeout(context.Background(), t.c.s.cfg.WriteIdle)
			err := t.conn.Ping(ctx)
			cancel()
			if err != nil {
				t.cancel(nil)
				return
			}
		case <-stop:
			return
		}
	}
}
