package main

import (
	"context"
	"net"
	"sync/atomic"

	"github.com/boxed-mesh/boxed/transport"
)

// traffic is what a mesh has sent, of all nodes together.
type traffic struct {
	datagrams, datagramBytes atomic.Int64
	streams, streamBytes     atomic.Int64
}

// sent is a reading of traffic.
type sent struct{ datagrams, datagramBytes, streams, streamBytes int64 }

func (t *traffic) read() sent {
	return sent{t.datagrams.Load(), t.datagramBytes.Load(), t.streams.Load(), t.streamBytes.Load()}
}

func (s sent) since(old sent) sent {
	return sent{s.datagrams - old.datagrams, s.datagramBytes - old.datagramBytes, s.streams - old.streams, s.streamBytes - old.streamBytes}
}

// counted is a Network that counts what is sent over it: bytes as memberlist
// hands them over, encrypted and compressed, without headers of UDP or TCP.
type counted struct {
	transport.Network
	traffic *traffic
}

func (c counted) Dial(ctx context.Context, to transport.Target, service transport.Service) (transport.Conn, error) {
	conn, err := c.Network.Dial(ctx, to, service)
	if err != nil {
		return nil, err
	}
	c.traffic.streams.Add(1)
	return countedConn{conn, c.traffic}, nil
}

func (c counted) Listen(service transport.Service) (transport.Listener, error) {
	ln, err := c.Network.Listen(service)
	if err != nil {
		return nil, err
	}
	return countedListener{ln, c.traffic}, nil
}

func (c counted) Packets() (net.PacketConn, error) {
	pc, err := c.Network.Packets()
	if err != nil {
		return nil, err
	}
	return countedPackets{pc, c.traffic}, nil
}

type countedPackets struct {
	net.PacketConn
	traffic *traffic
}

func (c countedPackets) WriteTo(b []byte, to net.Addr) (int, error) {
	n, err := c.PacketConn.WriteTo(b, to)
	c.traffic.datagrams.Add(1)
	c.traffic.datagramBytes.Add(int64(n))
	return n, err
}

type countedListener struct {
	transport.Listener
	traffic *traffic
}

func (c countedListener) AcceptPeer() (transport.Conn, error) {
	conn, err := c.Listener.AcceptPeer()
	if err != nil {
		return nil, err
	}
	return countedConn{conn, c.traffic}, nil
}

func (c countedListener) Accept() (net.Conn, error) { return c.AcceptPeer() }

type countedConn struct {
	transport.Conn
	traffic *traffic
}

func (c countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.traffic.streamBytes.Add(int64(n))
	return n, err
}
