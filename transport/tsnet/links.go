package tsnet

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// How long silence of another machine is borne. The library's TCP asks after a
// peer only on connections that were accepted, and after two hours; so each
// machine with which there are connections is asked below TCP, and a link that
// was cut ends them by itself, as in tcpnet.
const (
	keepEvery  = 5 * time.Second // between questions to a machine that answers
	keepWait   = 2 * time.Second // for one answer
	unanswered = 13 * time.Second
	// settled is how long a new process of the other machine may go unnoticed,
	// since that goes by the control server.
	settled = 10 * time.Second
)

// links are the connections with other machines.
type links struct {
	// ask reports whether a machine answers, and what names its process ("": it is
	// not in the network map).
	ask func(ctx context.Context, peer netip.Addr) (process string, ok bool)
	log *slog.Logger

	mu sync.Mutex
	of map[netip.Addr]*machine
}

// machine is one other machine, while there are connections with it.
type machine struct {
	conns  map[*link]struct{}
	heard  time.Time
	asking bool
}

// link is a connection with another machine.
type link struct {
	net.Conn
	all     *links
	peer    netip.Addr // the zero one until it is kept
	process string     // of the peer, by its name in the network map
	since   time.Time
}

func newLinks(ask func(context.Context, netip.Addr) (string, bool), log *slog.Logger) *links {
	return &links{ask: ask, log: log, of: map[netip.Addr]*machine{}}
}

// keep asks after the machine at peer for as long as l is open.
func (a *links) keep(l *link, peer netip.Addr, process string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	l.peer, l.process, l.since = peer, process, time.Now()
	m := a.of[peer]
	if m == nil {
		m = &machine{conns: map[*link]struct{}{}, heard: l.since}
		a.of[peer] = m
	}
	m.conns[l] = struct{}{}
}

// Close closes the connection.
func (l *link) Close() error {
	l.all.mu.Lock()
	if m := l.all.of[l.peer]; m != nil {
		delete(m.conns, l)
		if len(m.conns) == 0 {
			delete(l.all.of, l.peer)
		}
	}
	l.all.mu.Unlock()
	return l.Conn.Close()
}

// CloseWrite closes this side of the connection.
func (l *link) CloseWrite() error {
	if half, ok := l.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Read reads. When its deadline has passed, the error is the standard library's,
// as on other networks: the userspace TCP has one of its own.
func (l *link) Read(p []byte) (int, error) {
	n, err := l.Conn.Read(p)
	return n, deadline(err)
}

// Write writes; its errors are like Read's.
func (l *link) Write(p []byte) (int, error) {
	n, err := l.Conn.Write(p)
	return n, deadline(err)
}

// datagrams is the UDP socket, with errors like those of a link.
type datagrams struct{ net.PacketConn }

func (d datagrams) ReadFrom(p []byte) (int, net.Addr, error) {
	n, from, err := d.PacketConn.ReadFrom(p)
	return n, from, deadline(err)
}

func (d datagrams) WriteTo(p []byte, to net.Addr) (int, error) {
	n, err := d.PacketConn.WriteTo(p, to)
	return n, deadline(err)
}

// deadline makes the error of a deadline os.ErrDeadlineExceeded.
func deadline(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Timeout() && !errors.Is(err, os.ErrDeadlineExceeded) {
		return &net.OpError{Op: op.Op, Net: op.Net, Source: op.Source, Addr: op.Addr, Err: os.ErrDeadlineExceeded}
	}
	return err
}

// peers are the machines with which there are connections.
func (a *links) peers() []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Keys(a.of))
}

// run asks until ctx ends.
func (a *links) run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for _, peer := range a.due(time.Now()) {
			work.Go(func() { a.question(ctx, peer) })
		}
	}
}

// due are the machines to ask now, each of which is then being asked.
func (a *links) due(now time.Time) (list []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for peer, m := range a.of {
		if !m.asking && now.Sub(m.heard) >= keepEvery {
			m.asking = true
			list = append(list, peer)
		}
	}
	return list
}

// question asks one machine, and closes what it no longer knows of.
func (a *links) question(ctx context.Context, peer netip.Addr) {
	asked, cancel := context.WithTimeout(ctx, keepWait)
	process, ok := a.ask(asked, peer)
	cancel()
	if ctx.Err() != nil {
		return
	}
	for _, l := range a.answered(peer, process, ok, time.Now()) {
		a.log.Warn("a connection to the mesh was given up", "peer", peer, "age", time.Since(l.since).Round(time.Second), "answers", ok)
		l.Close()
	}
}

// answered takes an answer down, and returns the connections that are lost: all,
// if the machine has been silent for too long; if its daemon was started again
// without a goodbye, those with the one before.
func (a *links) answered(peer netip.Addr, process string, ok bool, now time.Time) (lost []*link) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.of[peer]
	if m == nil {
		return nil
	}
	m.asking = false
	if ok {
		m.heard = now
	}
	for l := range m.conns {
		switch {
		case now.Sub(m.heard) > unanswered:
			lost = append(lost, l)
		case process == "" || process == l.process:
		case now.Sub(l.since) < settled:
			l.process = process // it was made with the new one, of which the map told late
		default:
			lost = append(lost, l)
		}
	}
	return lost
}
