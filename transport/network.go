// Package transport joins nodes to a mesh. A [Network] carries connections and
// datagrams between nodes that have proved who they are; [Membership] is who is
// there, by gossip over a Network; [Documents] keeps small records alike on all
// nodes.
//
// What networks there are is in the packages below: tcpnet over TCP and UDP,
// tsnet over a tailnet, memnet in memory for tests. Each passes the suite of
// transporttest. What makes a connection one between nodes is the same for the
// first two, and in [Gate]. Start reading at [Network].
package transport

import (
	"context"
	"errors"
	"net"

	"github.com/boxed-mesh/boxed"
)

// Service names what a connection is for. Each has a listener of its own.
type Service string

// The services.
const (
	Gossip   Service = "gossip"   // streams of the membership protocol
	Messages Service = "messages" // of a Membership's Send
	API      Service = "api"      // HTTP, as on a node's front door
)

// MaxPacket is the largest datagram that every network carries, in bytes: what
// fits the 1280 of a tailnet with the headers of IPv6 and UDP, and some to spare
// for those of the network's own.
const MaxPacket = 1152

// DefaultPort is where nodes listen for each other, TCP and UDP.
const DefaultPort = 7946

// Errors of a Network. Each comes wrapped in a text that says what to do.
var (
	// ErrStranger: the other side answered and is not who was wanted, or does not
	// belong to this cluster.
	ErrStranger = errors.New("not a node of this cluster")
	// ErrUnreachable: the other side did not answer in time, or not at all.
	ErrUnreachable = errors.New("unreachable")
)

// Target is whom to dial.
type Target struct {
	ID   boxed.NodeID // "": whatever node of this cluster answers at Addr
	Addr string       // host:port, as the other's Network.Addr has it
}

// Network connects the nodes of one cluster. Its methods are safe for concurrent
// use.
type Network interface {
	// Addr is the host:port at which other nodes reach this one.
	Addr() string
	// Dial connects to a service of the node that to names, and fails with
	// ErrStranger if another answers. Without a deadline in ctx it has one of ten
	// seconds. It never resolves or reaches what is not a node.
	Dial(ctx context.Context, to Target, service Service) (Conn, error)
	// Listen accepts connections to a service, each from a node that has proved
	// its ID. A service is listened for once at a time.
	Listen(service Service) (Listener, error)
	// Packets is the socket for datagrams of at most MaxPacket bytes. They are
	// neither encrypted nor attributed: who uses them does that. It is taken once.
	Packets() (net.PacketConn, error)
	// Close ends all of it, and returns when its goroutines have ended.
	Close() error
}

// Conn is a connection whose other end is a known node.
type Conn interface {
	net.Conn
	Peer() boxed.Peer // Node is never ""
	// Broken reports whether a Read failed because the connection broke, and was not
	// closed by either end: a node that dies closes nothing.
	Broken() bool
	// Abort ends the connection as if it broke: the other end is not told.
	Abort() error
	// WriteBuffers writes all of bufs as one piece, and changes none of them.
	WriteBuffers(bufs net.Buffers) (int64, error)
}

// Listener accepts Conns. It is a net.Listener as well.
type Listener interface {
	net.Listener
	AcceptPeer() (Conn, error)
}

// PeerOf is the node at the other end of a connection that a Listener of a
// Network accepted, also where TLS or a server has wrapped it; the zero Peer if
// it is none.
func PeerOf(c net.Conn) boxed.Peer {
	for c != nil {
		if p, ok := c.(interface{ Peer() boxed.Peer }); ok {
			return p.Peer()
		}
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = inner.NetConn()
	}
	return boxed.Peer{}
}
