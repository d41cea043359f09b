package sshd

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
)

// knownConn is a connection of somebody who need show no key.
type knownConn struct {
	net.Conn
	who func(ctx context.Context) (boxed.Principal, error)
}

// ServeKnown is Serve for a listener that says whose a connection is. For which it does
// not, a key is asked for.
func (s *Server) ServeKnown(ln net.Listener, who func(ctx context.Context, conn net.Conn) (boxed.Principal, error)) error {
	return s.Serve(&knownListener{ln, who})
}

type knownListener struct {
	net.Listener
	who func(context.Context, net.Conn) (boxed.Principal, error)
}

func (l *knownListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &knownConn{conn, func(ctx context.Context) (boxed.Principal, error) { return l.who(ctx, conn) }}, nil
}

// ServeConn serves one connection of somebody who is known, to its end.
func (s *Server) ServeConn(conn net.Conn, who func(ctx context.Context) (boxed.Principal, error)) {
	s.server.HandleConn(&knownConn{conn, who})
}

// peerConn is what is known of a connection, from the first byte on.
type peerConn struct {
	proven   func() // called once a key is proved
	channels chan struct{}
	who      func(ctx context.Context) (boxed.Principal, error) // nil: by a key

	reverse reverse

	making sync.Mutex // guards what follows: the sandbox that new@ made
	made   *target
	users  int // sessions that are in it
}

type peerKey struct{}

// connected bounds connections, and the time until a key is proved. Of too many that
// have proved none the oldest gives way: an honest client takes a moment.
func (s *Server) connected(ctx ssh.Context, conn net.Conn) net.Conn {
	s.mu.Lock()
	full := s.conns >= maxConns
	var oldest net.Conn
	if !full {
		s.conns++
		if len(s.unproven) >= maxUnproven {
			oldest = s.unproven[0]
			s.unproven = slices.Delete(s.unproven, 0, 1)
		}
		s.unproven = append(s.unproven, conn)
	}
	s.mu.Unlock()
	if full && !s.lines.Allow() {
		return nil
	}
	if full {
		s.cfg.Log.Warn("ssh: too many connections", "addr", conn.RemoteAddr())
		return nil
	}
	if oldest != nil {
		oldest.Close()
	}
	s.useHostKeys()
	proven := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unproven = slices.DeleteFunc(s.unproven, func(c net.Conn) bool { return c == conn })
	}
	late := time.AfterFunc(handshakeLimit, func() { conn.Close() })
	var who func(context.Context) (boxed.Principal, error)
	if known, ok := conn.(*knownConn); ok {
		who = known.who
	}
	ctx.SetValue(peerKey{}, &peerConn{
		who: who,
		proven: sync.OnceFunc(func() {
			late.Stop()
			proven()
			go s.keepAlive(ctx)
		}),
		channels: make(chan struct{}, maxChannels),
	})
	return &countedConn{Conn: conn, closed: sync.OnceFunc(func() {
		late.Stop()
		proven()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns--
	})}
}

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// keepAlive notices a client that is gone without a word, and one whose key is not
// valid any more.
func (s *Server) keepAlive(ctx ssh.Context) {
	tick := time.NewTicker(keepAliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		conn, ok := ctx.Value(ssh.ContextKeyConn).(*gossh.ServerConn)
		if !ok {
			continue // its handshake is about to end
		}
		if _, err := s.who(ctx, conn); err != nil {
			s.cfg.Log.Info("ssh: a connection is ended: its key is not valid any more", "addr", conn.RemoteAddr(), "err", err)
			conn.Close()
			return
		}
		late := time.AfterFunc(keepAliveLimit, func() { conn.Close() })
		_, _, err := conn.SendRequest("keepalive@openssh.com", true, nil)
		late.Stop()
		if err != nil {
			return
		}
	}
}
