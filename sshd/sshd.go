// Package sshd is the SSH front door: `ssh <sandbox>@boxed` is a shell, a command,
// a terminal or a port in a sandbox, on whatever node it runs.
//
// The user name says which sandbox is meant, and the key says who asks. Nothing of
// a connection reaches the host that it comes in at: programs run in the sandbox,
// and forwarding goes to the sandbox's own loopback.
//
// Start reading at [Server.Serve]; a connection is in conn.go, who
// it is of in who.go, and what it does in session.go.
package sshd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"
	"golang.org/x/time/rate"

	"github.com/boxed-mesh/boxed"
)

// Service is what the front door needs of a node.
type Service interface {
	Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error)
	Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error)
	Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error)
	Destroy(ctx context.Context, id boxed.ID) error
	Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error)
	Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error)
	Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error)
	StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error)
	Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error)
	ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error)
	KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error
	Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error)
	GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error)
	List(ctx context.Context, f boxed.Filter) (boxed.List, error)
}

// Bounds of what a client may hold. Before it has proved a key it has a
// connection and nothing else.
const (
	maxConns       = 512 // in all
	maxUnproven    = 64  // of them, those that have not proved a key
	maxChannels    = 64  // of a connection: ControlMaster has ten sessions by default
	maxTries       = 6   // keys that are offered; OpenSSH's own bound
	keepAliveEvery = 10 * time.Second
	keepAliveLimit = 15 * time.Second // for the answer
)

// handshakeLimit is from the connection to the proof; tests shorten it.
var handshakeLimit = 20 * time.Second

// Config is what a Server needs.
type Config struct {
	Service Service
	Node    boxed.NodeID // this one's, for events
	// HostKeys are at least one; they are asked for at each connection.
	HostKeys func() []gossh.Signer
	// Identify is whose key or certificate it is, from where it came. It is asked when a
	// key is offered, and again, of the one that was proved, for each session and as
	// long as the connection lasts.
	Identify func(ctx context.Context, key gossh.PublicKey, from net.Addr) (Identity, error)
	// Env are the variables that a client may set, beside LANG, LC_*, TERM and
	// COLORTERM. A name may end in *.
	Env []string
	// Allow has what of [Allowances] clients may use.
	Allow []string
	// Emit is told of sessions. Nil: nobody is.
	Emit func(boxed.Event)
	// Record keeps the recording of a terminal, which is written to what it returns; nil:
	// terminals are not recorded.
	Record func(boxed.Recording) (io.WriteCloser, error)
	// Lobby runs a command of the lobby and returns its status; nil: there is none.
	Lobby func(ctx context.Context, args []string, stdout, stderr io.Writer, color bool) int
	// Idle ends a terminal of a sandbox that was made for it in which nothing was typed
	// or shown for so long; 0: never.
	Idle time.Duration
	Log  *slog.Logger
}

// Identity is who a key or a certificate lets in, and what it does not allow.
type Identity struct {
	boxed.Principal
	NoTerminal, NoForwarding bool
}

// Server serves SSH on any number of listeners. Its methods are safe for
// concurrent use.
type Server struct {
	cfg    Config
	server *ssh.Server

	// away ends when the node goes away: sessions are over, and what they run is not.
	away   context.Context
	goAway context.CancelCauseFunc

	lines *rate.Limiter // of the log about strangers

	mu       sync.Mutex
	conns    int
	unproven []net.Conn // the oldest first
}

// New makes a Server. An error means that cfg is not complete.
func New(cfg Config) (*Server, error) {
	if cfg.Service == nil || cfg.Identify == nil || cfg.HostKeys == nil {
		return nil, errors.New("sshd: Service, Identify and a host key are required")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Emit == nil {
		cfg.Emit = func(boxed.Event) {}
	}
	s := &Server{cfg: cfg, lines: rate.NewLimiter(1, 20)}
	s.away, s.goAway = context.WithCancelCause(context.Background())
	s.server = &ssh.Server{
		Version:              "boxed",
		ConnCallback:         s.connected,
		ServerConfigCallback: s.serverConfig,
		PublicKeyHandler:     s.offered,
		ConnectionFailedCallback: func(conn net.Conn, err error) {
			if !s.lines.Allow() {
				return
			}
			s.cfg.Log.Info("ssh: a connection did not come to be", "addr", conn.RemoteAddr(), "err", err)
		},
		ChannelHandlers: map[string]ssh.ChannelHandler{
			"session": s.channel(s.session), "direct-tcpip": s.channel(s.forward), "default": refuseChannel,
		},
		RequestHandlers: map[string]ssh.RequestHandler{
			"keepalive@openssh.com": func(ssh.Context, *ssh.Server, *gossh.Request) (bool, []byte) { return true, nil },
			"tcpip-forward":         s.remoteForward,
			"cancel-tcpip-forward":  s.remoteForward,
		},
		SubsystemHandlers: map[string]ssh.SubsystemHandler{},
	}
	s.useHostKeys()
	return s, nil
}

// useHostKeys has the next connection see the host keys as they are now: one of each
// kind.
func (s *Server) useHostKeys() {
	for _, key := range s.cfg.HostKeys() {
		s.server.AddHostKey(key)
	}
}

// Serve serves connections of a listener, which it closes, until Shutdown.
func (s *Server) Serve(ln net.Listener) error {
	err := s.server.Serve(ln)
	if errors.Is(err, ssh.ErrServerClosed) {
		return nil
	}
	return err
}

// goodbye is how long sessions have to say that the node goes away.
const goodbye = time.Second

// Shutdown takes no more connections, and waits for those that are there until ctx
// ends. Then it tells them that the node goes away, and closes them; what runs in a
// sandbox lives on.
func (s *Server) Shutdown(ctx context.Context) error {
	ended := make(chan error, 1)
	go func() { ended <- s.server.Shutdown(context.WithoutCancel(ctx)) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.goAway(boxed.ErrGoingAway)
	select {
	case err := <-ended:
		return err
	case <-time.After(goodbye):
	}
	err := s.server.Close()
	<-ended
	return err
}

// caller is one channel's: who asks, and what for.
type caller struct {
	ctx  context.Context // with the principal; ends with the connection
	who  Identity
	user string
	peer *peerConn
	conn gossh.Conn
}

// channel counts a channel in and says whose it is.
func (s *Server) channel(serve func(*caller, gossh.NewChannel)) ssh.ChannelHandler {
	return func(_ *ssh.Server, conn *gossh.ServerConn, ch gossh.NewChannel, ctx ssh.Context) {
		peer, _ := ctx.Value(peerKey{}).(*peerConn)
		if peer == nil {
			ch.Reject(gossh.Prohibited, "not now")
			return
		}
		select {
		case peer.channels <- struct{}{}:
			defer func() { <-peer.channels }()
		default:
			ch.Reject(gossh.ResourceShortage, fmt.Sprintf("more than %d sessions on one connection", maxChannels))
			return
		}
		who, err := s.who(ctx, conn)
		if err != nil {
			ch.Reject(gossh.Prohibited, "the key is not valid any more")
			conn.Close()
			return
		}
		defer s.survive(conn)
		serve(&caller{ctx: boxed.WithPrincipal(ctx, who.Principal), who: who, user: conn.User(), peer: peer, conn: conn}, ch)
	}
}

// survive ends a connection whose channel made us panic, and not the node with it.
func (s *Server) survive(conn gossh.Conn) {
	if p := recover(); p != nil {
		s.cfg.Log.Error("ssh: a panic", "addr", conn.RemoteAddr(), "panic", p, "stack", string(debug.Stack()))
		conn.Close()
	}
}

func refuseChannel(_ *ssh.Server, _ *gossh.ServerConn, ch gossh.NewChannel, _ ssh.Context) {
	ch.Reject(gossh.UnknownChannelType, "boxed has sessions and forwards ports of a sandbox's loopback; nothing else")
}

// clip bounds what a stranger has us write.
func clip(s string) string {
	if len(s) > 80 {
		s = s[:80] + "…"
	}
	return s
}
