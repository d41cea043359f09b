package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
	"github.com/boxed-mesh/boxed/transport"
)

// How long a node has to take a connection, before its caller is told that it is
// silent. One that gossip holds for gone is asked all the same, but not for long.
const (
	peerDial = 8 * time.Second // a tailnet may need a second attempt
	goneDial = 2 * time.Second
)

// Peers are the other nodes over a Network, as whom a Membership knows. It is a
// Mesh.
type Peers struct {
	*transport.Membership
	network transport.Network
	vouch   *Assertions

	mu    sync.Mutex
	peers map[boxed.NodeID]*peer
}

// peer is how one node is called: its API as a port, and as HTTP.
type peer struct {
	*client.Client
	transport http.RoundTripper
	close     func()
}

var _ Mesh = (*Peers)(nil)

// NewPeers makes Peers. vouch says who the callers are that have no API key; nil:
// nobody does.
func NewPeers(network transport.Network, members *transport.Membership, vouch *Assertions) *Peers {
	return &Peers{Membership: members, network: network, vouch: vouch, peers: map[boxed.NodeID]*peer{}}
}

// Peer calls a node over the mesh, with the credential and the request's ID of the
// call's context.
func (p *Peers) Peer(id boxed.NodeID) boxed.API { return p.peer(id) }

// HTTP carries requests to a node over the mesh.
func (p *Peers) HTTP(id boxed.NodeID) http.RoundTripper { return p.peer(id).transport }

func (p *Peers) peer(id boxed.NodeID) *peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.peers[id]; c != nil {
		return c
	}
	base := &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return p.dial(ctx, id) },
		MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second, DisableCompression: true, ExpectContinueTimeout: time.Second,
		WriteBufferSize: 64 << 10, ReadBufferSize: 64 << 10,
	}
	t := vouching{next: base, vouch: p.vouch, target: id}
	c, err := client.New(client.Config{
		Endpoint: "http://" + string(id), Name: "node " + string(id), UserAgent: "boxed-node", Header: hopHeader,
		HTTPClient: &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	})
	if err != nil {
		panic(fmt.Sprintf("a node's ID is no host name: %v", err)) // it was valid when it was parsed
	}
	p.peers[id] = &peer{Client: c, transport: t, close: base.CloseIdleConnections}
	return p.peers[id]
}

// Forget closes what is idle of a node that was removed.
func (p *Peers) Forget(id boxed.NodeID) error {
	p.mu.Lock()
	if c := p.peers[id]; c != nil {
		c.close()
		delete(p.peers, id)
	}
	p.mu.Unlock()
	return p.Membership.Forget(id)
}

// Close closes idle connections.
func (p *Peers) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.peers {
		c.close()
	}
}

func hopHeader(ctx context.Context, h http.Header) {
	if secret := boxed.CredentialFrom(ctx); secret != "" {
		h.Set("Authorization", "Bearer "+secret)
	}
	if id := boxed.RequestIDFrom(ctx); id != "" {
		h.Set("X-Request-ID", id)
	}
}

func (p *Peers) dial(ctx context.Context, id boxed.NodeID) (net.Conn, error) {
	s, ok := p.Node(id)
	if !ok {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no node %s in the mesh", id)
	}
	limit := peerDial
	if s.State != boxed.NodeAlive {
		limit = goneDial
	}
	dial, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := p.network.Dial(dial, transport.Target{ID: id, Addr: s.Address}, transport.API)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, transport.ErrStranger):
		return nil, &boxed.Error{Code: boxed.CodeNotReady, Message: err.Error(), Err: err}
	}
	silent := errSilent(s)
	silent.Err = err
	return nil, silent
}
