package transport

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Bounds of messages.
const (
	maxMessage    = 16 << 20 // bytes of one: the digest of 200,000 documents
	messageLimit  = 10 * time.Second
	messagesAtOne = 16 // connections that are read at a time
)

// messages carries what Send sends. Not gossip: that is encrypted for whoever has
// the cluster key, while each of these comes over a connection from a node that
// has proved who it is and that it belongs to the cluster now.
type messages struct {
	network Network
	ln      Listener
	take    func(from boxed.NodeID, msg []byte)
	log     *slog.Logger
	work    sync.WaitGroup
	ctx     context.Context
	stop    context.CancelFunc
}

func listenMessages(n Network, take func(boxed.NodeID, []byte), log *slog.Logger) (*messages, error) {
	ln, err := n.Listen(Messages)
	if err != nil {
		return nil, fmt.Errorf("listen for messages: %w", err)
	}
	m := &messages{network: n, ln: ln, take: take, log: log}
	m.ctx, m.stop = context.WithCancel(context.Background())
	m.work.Go(m.accept)
	return m, nil
}

func (m *messages) accept() {
	slots := make(chan struct{}, messagesAtOne)
	for {
		c, err := m.ln.AcceptPeer()
		if err != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-m.ctx.Done():
			c.Close()
			return
		}
		m.work.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			defer context.AfterFunc(m.ctx, func() { c.Close() })()
			c.SetDeadline(time.Now().Add(messageLimit))
			if err := m.receive(c); err != nil && m.ctx.Err() == nil {
				m.log.Debug("receive a message", "peer", c.Peer().Node, "err", err)
			}
		})
	}
}

func (m *messages) receive(c Conn) error {
	var head [4]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size > maxMessage {
		return fmt.Errorf("a message of %d bytes", size)
	}
	// Not allocated before it has come.
	msg, err := io.ReadAll(io.LimitReader(c, int64(size)))
	if err != nil {
		return err
	}
	if len(msg) != int(size) {
		return io.ErrUnexpectedEOF
	}
	m.take(c.Peer().Node, msg)
	_, err = c.Write([]byte{1}) // it was taken
	return err
}

// send returns when the other side has taken the message.
func (m *messages) send(to Target, msg []byte) error {
	ctx, cancel := context.WithTimeout(m.ctx, messageLimit)
	defer cancel()
	c, err := m.network.Dial(ctx, to, Messages)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	c.SetDeadline(time.Now().Add(messageLimit))
	if _, err := c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(msg))), msg...)); err != nil {
		return err
	}
	var taken [1]byte
	_, err = io.ReadFull(c, taken[:])
	return err
}

func (m *messages) close() {
	m.stop()
	m.ln.Close()
	m.work.Wait()
}

// Send gives another node's Exchange a message, over a connection to it, and
// returns when it has been taken. Errors: not_found, ErrUnreachable, ErrStranger.
func (m *Membership) Send(id boxed.NodeID, msg []byte) error {
	n, ok := m.Node(id)
	if !ok {
		return boxed.Errorf(boxed.CodeNotFound, "there is no node %s", id)
	}
	err := m.messages.send(Target{ID: id, Addr: n.Address}, msg)
	if err == nil {
		m.proved(id)
	}
	return err
}

// proved notes that a node has shown over a connection that it belongs to the
// cluster.
func (m *Membership) proved(id boxed.NodeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.nodes[id]; n != nil && !n.Proven {
		n.Proven, n.saved = true, "" // and is to be remembered
	}
}

// Prove has nodes that are there and have not yet prove that they belong to the
// cluster, for as long as limit.
func (m *Membership) Prove(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		slots := make(chan struct{}, messagesAtOne)
		var asking sync.WaitGroup
		for _, n := range m.Nodes()[1:] {
			if n.Proven || n.State != boxed.NodeAlive {
				continue
			}
			slots <- struct{}{}
			asking.Go(func() {
				defer func() { <-slots }()
				m.Send(n.ID, nil) // which ends with the membership at the latest
			})
		}
		asking.Wait()
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
