package sshd

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	gossh "golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// forward connects a channel to a port of the sandbox's own loopback, and to
// nothing else: the stock handler dials from the host.
func (s *Server) forward(c *caller, nc gossh.NewChannel) {
	var to struct {
		Host     string
		Port     uint32
		From     string
		FromPort uint32
	}
	switch {
	case c.who.NoForwarding:
		nc.Reject(gossh.Prohibited, "the certificate does not allow forwarding")
		return
	case gossh.Unmarshal(nc.ExtraData(), &to) != nil:
		nc.Reject(gossh.ConnectionFailed, "malformed")
		return
	case !loopback(to.Host) || to.Port == 0 || to.Port > 65535:
		nc.Reject(gossh.Prohibited, fmt.Sprintf("only ports of the sandbox's own loopback are forwarded, not %s", table.Inert(clip(net.JoinHostPort(to.Host, fmt.Sprint(to.Port))))))
		return
	}
	w, err := parseUser(c.user)
	var t *target
	if err == nil {
		t, err = s.find(c, w)
	}
	if err != nil {
		nc.Reject(gossh.ConnectionFailed, table.Inert(err.Error()))
		return
	}
	conn, err := s.cfg.Service.Dial(c.ctx, t.id, uint16(to.Port))
	if err != nil {
		reason := gossh.ConnectionFailed
		if boxed.CodeOf(err) == boxed.CodeForbidden {
			reason = gossh.Prohibited
		}
		nc.Reject(reason, table.Inert(err.Error()))
		return
	}
	defer conn.Close()
	ch, requests, err := nc.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	in := leavable(ctx, ch, requests, func() { conn.Close() })
	var both sync.WaitGroup
	both.Go(func() {
		io.Copy(conn, in)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			half.CloseWrite()
		}
	})
	both.Go(func() {
		io.Copy(ch, conn)
		ch.CloseWrite()
	})
	both.Wait()
}

// loopback reports whether a name can only mean the sandbox itself.
func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

// lastWords is how long what a client sent before it closed a connection has to arrive.
const lastWords = 10 * time.Second

// drained says when it was read to its end.
type drained struct {
	io.Reader
	end  chan struct{}
	once sync.Once
}

func (d *drained) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	if err != nil {
		d.once.Do(func() { close(d.end) })
	}
	return n, err
}

// leavable is what comes by a channel. leave is called once the client has closed it and
// what it had sent before had time to arrive, unless ctx has ended by then.
func leavable(ctx context.Context, ch gossh.Channel, requests <-chan *gossh.Request, leave func()) io.Reader {
	in := &drained{Reader: ch, end: make(chan struct{})}
	go func() {
		gossh.DiscardRequests(requests)
		select {
		case <-in.end:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(lastWords):
			leave()
		case <-ctx.Done():
		}
	}()
	return in
}
