package sshd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// What leads out of a sandbox into a client's machine is shut unless the operator
// opens it: it is a way past the egress proxy.
const (
	// AllowRemoteForwarding lets ssh -R listen on a sandbox's loopback.
	AllowRemoteForwarding = "remote-forwarding"
	// AllowAgentForwarding lets ssh -A lend a client's keys to what runs in a sandbox.
	AllowAgentForwarding = "agent-forwarding"
)

// Allowances are what Config.Allow may have.
func Allowances() []string { return []string{AllowAgentForwarding, AllowRemoteForwarding} }

// openLimit is how long a listener in a sandbox may take to listen.
const openLimit = 10 * time.Second

// maxReverse bounds the listeners of one connection.
const maxReverse = 16

// listener is one in a sandbox, for connections into the client's machine. It is a
// program there, `boxed-tools listen`, and each of its connections is another, so that
// nothing but bytes crosses to this host.
type listener struct {
	address string
	end     context.CancelFunc
}

// opener opens a channel to the client for a connection to a listener's address.
type opener func(address, from string) (gossh.Channel, <-chan *gossh.Request, error)

// listenInside starts a listener, and returns once it listens. For each connection a
// channel is opened to the client; it ends with ctx.
func (s *Server) listenInside(ctx context.Context, id boxed.ID, network, address string, open opener) (*listener, error) {
	ctx, cancel := context.WithCancel(ctx)
	out, lines := io.Pipe()
	go func() {
		status, err := s.cfg.Service.Exec(ctx, id, boxed.ExecRequest{
			Args: []string{boxed.ToolsPath, "listen", network, address}, OpenStdin: true, Stdin: silence{ctx}, Stdout: lines, Stderr: lines,
		})
		if err == nil {
			err = fmt.Errorf("it ended with %d", status.Code)
		}
		lines.CloseWithError(err)
		cancel()
	}()
	r := bufio.NewReaderSize(out, 1024)
	late := time.AfterFunc(openLimit, func() { out.CloseWithError(errors.New("it does not listen")) })
	first, err := readLine(r)
	if !late.Stop() && err == nil {
		err = errors.New("it does not listen")
	}
	words := strings.Fields(first)
	if err == nil && (len(words) != 3 || words[0] != "listening") {
		err = errors.New(strings.TrimPrefix(first, "boxed-tools: "))
	}
	if err != nil {
		cancel()
		out.Close()
		return nil, err
	}
	go func() {
		defer out.Close()
		defer cancel()
		for {
			line, err := readLine(r)
			if err != nil {
				return
			}
			conn := strings.Fields(line)
			if len(conn) == 3 && conn[0] == "conn" {
				go s.lead(ctx, id, words[2], conn[1], func() (gossh.Channel, <-chan *gossh.Request, error) { return open(words[1], conn[2]) })
			}
		}
	}()
	return &listener{address: words[1], end: cancel}, nil
}

// readLine reads a line that is not too long: it comes from a sandbox.
func readLine(r *bufio.Reader) (string, error) {
	line, err := r.ReadSlice('\n')
	return strings.TrimSpace(string(line)), err
}

// silence is an input without a byte, until ctx ends.
type silence struct{ ctx context.Context }

func (s silence) Read([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

// lead joins a connection in a sandbox to a channel of the client's.
func (s *Server) lead(ctx context.Context, id boxed.ID, name, number string, open func() (gossh.Channel, <-chan *gossh.Request, error)) {
	ch, requests, err := open()
	if err != nil {
		return // what waits there is closed when nobody takes it
	}
	defer ch.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := leavable(ctx, ch, requests, cancel)
	out := &endedOutput{ch: ch, end: -1}
	s.cfg.Service.Exec(ctx, id, boxed.ExecRequest{
		Args: []string{boxed.ToolsPath, "take", name, number}, OpenStdin: true, Stdin: in, Stdout: out, Stderr: writer(out.said),
	})
	ch.CloseWrite()
}

// endedOutput passes a connection's bytes on, and its end: the program says on its
// standard error how many there are, which may be heard before the last of them.
type endedOutput struct {
	ch gossh.Channel

	mu      sync.Mutex
	n, end  int64 // end is -1 until it is known
	control []byte
}

func (o *endedOutput) Write(p []byte) (int, error) {
	n, err := o.ch.Write(p)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.n += int64(n)
	o.closeAtEnd()
	return n, err
}

func (o *endedOutput) said(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.control)+len(p) > 256 { // it comes from a sandbox
		return 0, errors.New("the program says too much")
	}
	o.control = append(o.control, p...)
	var end int64
	if _, err := fmt.Sscanf(string(o.control), "end %d\n", &end); err == nil && strings.HasSuffix(string(o.control), "\n") {
		o.end = end
		o.closeAtEnd()
	}
	return len(p), nil
}

func (o *endedOutput) closeAtEnd() {
	if o.n == o.end {
		o.end = -1
		o.ch.CloseWrite()
	}
}

// reverse has the listeners of one connection.
type reverse struct {
	mu        sync.Mutex
	listeners map[string]*listener // by what the client asked for
}

// remoteForward is ssh -R: a port of the sandbox's loopback leads to the client.
func (s *Server) remoteForward(ctx ssh.Context, _ *ssh.Server, r *gossh.Request) (bool, []byte) {
	var ask struct {
		Host string
		Port uint32
	}
	conn, _ := ctx.Value(ssh.ContextKeyConn).(*gossh.ServerConn)
	peer, _ := ctx.Value(peerKey{}).(*peerConn)
	if conn == nil || peer == nil || gossh.Unmarshal(r.Payload, &ask) != nil || ask.Port > 65535 {
		return false, nil
	}
	asked := net.JoinHostPort(ask.Host, strconv.Itoa(int(ask.Port)))
	if r.Type == "cancel-tcpip-forward" {
		peer.reverse.mu.Lock()
		defer peer.reverse.mu.Unlock()
		l := peer.reverse.listeners[asked]
		if l != nil {
			l.end()
			delete(peer.reverse.listeners, asked)
		}
		return l != nil, nil
	}
	port, err := s.openRemote(ctx, conn, peer, ask.Host, asked, uint16(ask.Port))
	if err != nil {
		s.cfg.Log.Info("ssh: a remote forwarding is refused", "addr", conn.RemoteAddr(), "err", err)
		return false, nil
	}
	if ask.Port != 0 {
		return true, nil
	}
	return true, gossh.Marshal(struct{ Port uint32 }{uint32(port)})
}

func (s *Server) openRemote(ctx ssh.Context, conn *gossh.ServerConn, peer *peerConn, host, asked string, port uint16) (uint16, error) {
	who, err := s.who(ctx, conn)
	switch {
	case err != nil:
		return 0, err
	case !s.allows(AllowRemoteForwarding) || who.NoForwarding:
		return 0, errors.New("it is not allowed here (ssh.allow)")
	case host != "" && host != "*" && !loopback(host):
		return 0, errors.New("only the sandbox's loopback listens")
	}
	c := &caller{ctx: boxed.WithPrincipal(ctx, who.Principal), who: who, user: conn.User(), peer: peer, conn: conn}
	w, err := parseUser(c.user)
	if err != nil {
		return 0, err
	}
	t, err := s.find(c, w)
	if err != nil {
		return 0, err
	}
	peer.reverse.mu.Lock()
	defer peer.reverse.mu.Unlock()
	if len(peer.reverse.listeners) >= maxReverse {
		return 0, fmt.Errorf("there are %d already", maxReverse)
	}
	bind := "127.0.0.1"
	if host == "::1" {
		bind = host
	}
	l, err := s.listenInside(c.ctx, t.id, "tcp", net.JoinHostPort(bind, strconv.Itoa(int(port))), func(address, from string) (gossh.Channel, <-chan *gossh.Request, error) {
		at := portOf(address)
		fromHost, fromPort, _ := net.SplitHostPort(from)
		n, _ := strconv.ParseUint(fromPort, 10, 16)
		return conn.OpenChannel("forwarded-tcpip", gossh.Marshal(struct {
			Host     string
			Port     uint32
			From     string
			FromPort uint32
		}{host, uint32(at), table.Inert(clip(fromHost)), uint32(n)}))
	})
	if err != nil {
		return 0, err
	}
	got := portOf(l.address)
	if got == 0 || port != 0 && got != port {
		l.end()
		return 0, errors.New("it listens elsewhere")
	}
	if peer.reverse.listeners == nil {
		peer.reverse.listeners = map[string]*listener{}
	}
	peer.reverse.listeners[net.JoinHostPort(host, strconv.Itoa(int(got)))] = l
	return got, nil
}

// portOf is the port of an address, or 0.
func portOf(address string) uint16 {
	_, port, _ := net.SplitHostPort(address)
	n, _ := strconv.ParseUint(port, 10, 16)
	return uint16(n)
}

// lendAgent makes a socket in the sandbox that leads to the client's agent, and returns
// its path.
func (x *session) lendAgent(ctx context.Context, id boxed.ID) (string, error) {
	path := "/tmp/ssh-" + boxed.NewToken(10) + "/agent"
	_, err := x.s.listenInside(ctx, id, "unix", path, func(string, string) (gossh.Channel, <-chan *gossh.Request, error) {
		return x.c.conn.OpenChannel("auth-agent@openssh.com", nil)
	})
	return path, err
}

// allows reports whether the operator has opened something.
func (s *Server) allows(what string) bool {
	for _, a := range s.cfg.Allow {
		if a == what {
			return true
		}
	}
	return false
}
