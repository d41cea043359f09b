// Package transporttest is the suite that every transport.Network passes: [Run]
// it with a function that makes networks of one cluster.
package transporttest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// Node is one node's Network.
type Node struct {
	ID boxed.NodeID
	transport.Network
}

// Mesh makes the networks of so many nodes of one cluster, which reach each
// other. They are closed when the test ends.
type Mesh func(t *testing.T, count int) []Node

// patience is far more than anything here takes.
const patience = 20 * time.Second

// Run runs the suite.
func Run(t *testing.T, mesh Mesh) {
	for _, tc := range []struct {
		name string
		test func(*testing.T, Mesh)
	}{
		{"each end knows the other", eachEndKnowsTheOther},
		{"bytes arrive as they were sent, both ways", bytesArrive},
		{"an address alone finds its node", anAddressAlone},
		{"another node than the one that is wanted is refused", theWrongNode},
		{"a service that is not listened for is refused", noService},
		{"an address where nobody is ends with the deadline", nobody},
		{"what is not an address is refused", noAddress},
		{"a service can be listened for again", listenAgain},
		{"many dial at once", manyDial},
		{"deadlines end a read", deadlines},
		{"a closed connection ends the other's read", closedConnection},
		{"a connection that breaks was not closed", brokenConnection},
		{"a connection is closed however much is under way", closedWhileWriting},
		{"buffers are written in order, and stay as they are", writeBuffers},
		{"datagrams arrive and name their sender", datagrams},
		{"close ends connections and listeners", closeEnds},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.test(t, mesh) })
	}
}

// dial connects a to a service of b.
func dial(t *testing.T, a, b Node, service transport.Service) (mine, its transport.Conn) {
	t.Helper()
	return connect(t, a, b, service, listen(t, b, service))
}

func connect(t *testing.T, a, b Node, service transport.Service, l transport.Listener) (mine, its transport.Conn) {
	t.Helper()
	accepted := make(chan transport.Conn, 1)
	go func() {
		defer close(accepted)
		if c, err := l.AcceptPeer(); err == nil {
			accepted <- c
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	mine, err := a.Dial(ctx, transport.Target{ID: b.ID, Addr: b.Addr()}, service)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mine.Close() })
	select {
	case its = <-accepted:
	case <-time.After(patience):
	}
	if its == nil {
		t.Fatal("nothing was accepted")
	}
	t.Cleanup(func() { its.Close() })
	return mine, its
}

func listen(t *testing.T, n Node, service transport.Service) transport.Listener {
	t.Helper()
	l, err := n.Listen(service)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func eachEndKnowsTheOther(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	for _, service := range []transport.Service{transport.Gossip, transport.API} {
		mine, its := dial(t, nodes[0], nodes[1], service)
		if mine.Peer().Node != nodes[1].ID || its.Peer().Node != nodes[0].ID {
			t.Errorf("%s: the ends are %v and %v", service, mine.Peer(), its.Peer())
		}
		if its.Peer().Address == "" || transport.PeerOf(its) != its.Peer() {
			t.Errorf("%s: %v is not %v", service, transport.PeerOf(its), its.Peer())
		}
	}
}

func bytesArrive(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	mine, its := dial(t, nodes[0], nodes[1], transport.API)
	sent := make([]byte, 4<<20)
	rand.Read(sent)
	var group sync.WaitGroup
	for _, c := range []net.Conn{mine, its} {
		group.Go(func() {
			if _, err := c.Write(sent); err != nil {
				t.Error(err)
			}
		})
		group.Go(func() {
			got := make([]byte, len(sent))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
				t.Errorf("%d bytes differ: %v", len(sent), err)
			}
		})
	}
	group.Wait()
}

func anAddressAlone(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	listen(t, nodes[1], transport.API)
	c, err := nodes[0].Dial(t.Context(), transport.Target{Addr: nodes[1].Addr()}, transport.API)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Peer().Node != nodes[1].ID {
		t.Errorf("it is %v", c.Peer())
	}
}

func theWrongNode(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 3)
	listen(t, nodes[1], transport.API)
	c, err := nodes[0].Dial(t.Context(), transport.Target{ID: nodes[2].ID, Addr: nodes[1].Addr()}, transport.API)
	if !errors.Is(err, transport.ErrStranger) {
		t.Errorf("got %v, %v", c, err)
	}
}

func noService(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	listen(t, nodes[1], transport.Gossip)
	c, err := nodes[0].Dial(t.Context(), transport.Target{ID: nodes[1].ID, Addr: nodes[1].Addr()}, transport.API)
	if !errors.Is(err, transport.ErrStranger) {
		t.Errorf("got %v, %v", c, err)
	}
}

func nobody(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	gone := transport.Target{ID: nodes[1].ID, Addr: nodes[1].Addr()}
	nodes[1].Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	start := time.Now()
	c, err := nodes[0].Dial(ctx, gone, transport.API)
	if !errors.Is(err, transport.ErrUnreachable) {
		t.Errorf("got %v, %v", c, err)
	}
	if took := time.Since(start); took > patience/2 {
		t.Errorf("it took %v", took)
	}
}

// tailscale's own: a name that is not in the netmap went to the host's resolver.
func noAddress(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 1)
	for _, addr := range []string{"", "localhost:80", "no-such-node:7946", "127.0.0.1", "[::1", "192.0.2.1:http"} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if c, err := nodes[0].Dial(ctx, transport.Target{Addr: addr}, transport.API); err == nil {
			t.Errorf("%q: got %v", addr, c.Peer())
		}
		cancel()
	}
}

func listenAgain(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	l := listen(t, nodes[1], transport.API)
	if _, err := nodes[1].Listen(transport.API); err == nil {
		t.Error("it is listened for twice")
	}
	l.Close()
	if _, err := l.AcceptPeer(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed listener says %v", err)
	}
	dial(t, nodes[0], nodes[1], transport.API)
}

func manyDial(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 3)
	l := listen(t, nodes[0], transport.API)
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.AcceptPeer()
			if err != nil {
				return
			}
			served.Go(func() { defer c.Close(); io.Copy(c, c) })
		}
	})
	var group sync.WaitGroup
	for i := range 60 {
		from := nodes[1+i%2]
		group.Go(func() {
			if err := echo(from, nodes[0], fmt.Sprintf("hello %d", i)); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	l.Close()
	served.Wait()
}

func echo(from, to Node, text string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := from.Dial(ctx, transport.Target{ID: to.ID, Addr: to.Addr()}, transport.API)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		return fmt.Errorf("got %q, %w", got, err)
	}
	return nil
}

func deadlines(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	mine, its := dial(t, nodes[0], nodes[1], transport.Gossip)
	for _, c := range []net.Conn{mine, its} {
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	}
}

func closedConnection(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	mine, its := dial(t, nodes[0], nodes[1], transport.API)
	its.Close()
	mine.SetReadDeadline(time.Now().Add(patience))
	if _, err := mine.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) || mine.Broken() {
		t.Errorf("got %v, broken: %v", err, mine.Broken())
	}
}

func brokenConnection(t *testing.T, mesh Mesh) {
	for name, end := range map[string]func(Node, transport.Conn){
		"aborted":      func(_ Node, its transport.Conn) { its.Abort() },
		"network gone": func(n Node, _ transport.Conn) { n.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			nodes := mesh(t, 2)
			mine, its := dial(t, nodes[0], nodes[1], transport.API)
			end(nodes[1], its)
			mine.SetReadDeadline(time.Now().Add(patience))
			if _, err := mine.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) || !mine.Broken() {
				t.Errorf("got %v, broken: %v", err, mine.Broken())
			}
		})
	}
}

func writeBuffers(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	mine, its := dial(t, nodes[0], nodes[1], transport.API)
	head, body := []byte("head"), bytes.Repeat([]byte("body"), 50<<10)
	bufs := net.Buffers{head, nil, body}
	done := make(chan error, 1)
	go func() {
		n, err := mine.WriteBuffers(bufs)
		if n != int64(len(head)+len(body)) {
			err = errors.Join(err, fmt.Errorf("%d bytes", n))
		}
		done <- err
	}()
	got := make([]byte, len(head)+len(body))
	its.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(its, got); err != nil || !bytes.Equal(got, append(head, body...)) {
		t.Errorf("%.20q …, %v", got, err)
	}
	if err := <-done; err != nil || len(bufs) != 3 || string(bufs[0]) != "head" || len(bufs[2]) != len(body) {
		t.Errorf("%v, left %d buffers", err, len(bufs))
	}
}

// Who leaves while much is sent to it is told apart from who is gone.
func closedWhileWriting(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	l := listen(t, nodes[1], transport.API)
	for range 20 {
		mine, its := connect(t, nodes[0], nodes[1], transport.API, l)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				if _, err := mine.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}()
		its.Read(make([]byte, 100<<10))
		its.Close()
		mine.SetReadDeadline(time.Now().Add(patience))
		if _, err := mine.Read(make([]byte, 1)); err == nil || mine.Broken() {
			t.Errorf("got %v, broken: %v", err, mine.Broken())
		}
		mine.Close()
		<-stopped
	}
}

func datagrams(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	a, b := packets(t, nodes[0]), packets(t, nodes[1])
	if _, err := nodes[0].Packets(); err == nil {
		t.Error("the datagrams have two readers")
	}
	to, err := net.ResolveUDPAddr("udp", nodes[1].Addr())
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{7}, transport.MaxPacket)
	got := make([]byte, 64<<10)
	for end := time.Now().Add(patience); time.Now().Before(end); { // datagrams may be lost
		if _, err := a.WriteTo(want, to); err != nil {
			t.Fatal(err)
		}
		b.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		n, from, err := b.ReadFrom(got)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil || !bytes.Equal(got[:n], want) {
			t.Fatalf("got %d bytes, %v", n, err)
		}
		if from.String() != nodes[0].Addr() {
			t.Errorf("the sender is %v, not %v", from, nodes[0].Addr())
		}
		return
	}
	t.Error("no datagram arrived")
}

func packets(t *testing.T, n Node) net.PacketConn {
	t.Helper()
	pc, err := n.Packets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	return pc
}

func closeEnds(t *testing.T, mesh Mesh) {
	nodes := mesh(t, 2)
	mine, its := dial(t, nodes[0], nodes[1], transport.API)
	l := listen(t, nodes[1], transport.Gossip)
	nodes[1].Close()
	if _, err := l.AcceptPeer(); err == nil {
		t.Error("a listener of a closed network accepts")
	}
	for _, c := range []net.Conn{mine, its} {
		c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection of a closed network says %v", err)
		}
	}
	if _, err := nodes[1].Listen(transport.API); err == nil {
		t.Error("a closed network listens")
	}
}
