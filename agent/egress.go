package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"
)

// What leaves a sandbox goes through its host. The guest offers an HTTP proxy, a SOCKS5
// proxy and a DNS server on the sandbox's loopback, decides nothing, and hands every
// connection over on one of its own to the host: which connection it is says whose it is.

// featureEgress is of guests that can open the entries.
const featureEgress = "egress"

// EgressConfig has the ports of the entries, all on 127.0.0.1.
type EgressConfig struct {
	HTTP  uint16 `json:"http"`
	SOCKS uint16 `json:"socks"`
	DNS   uint16 `json:"dns"` // UDP and TCP
}

// Entries of an Intent.
const (
	EntryHTTP  = "http"   // bytes of an HTTP proxy's client follow
	EntrySOCKS = "socks5" // bytes of a SOCKS client follow
	EntryName  = "name"   // a Response without a value, then bytes of whoever connected to a synthetic address
	EntryDNS   = "dns"    // a Response of Verdict, and nothing more
)

// Intent says what a connection is that the guest hands to its host.
type Intent struct {
	Entry string `json:"entry"`
	Host  string `json:"host,omitempty"`
	Port  uint16 `json:"port,omitempty"`
	Type  uint16 `json:"type,omitempty"` // of a DNS query
	// Full says that the guest has no synthetic address left for the name.
	Full bool `json:"full,omitempty"`
}

// Verdict answers a DNS query.
type Verdict struct {
	// Code is the answer's RCODE (RFC 1035): 0 gives the name a synthetic address, 3 says
	// that there is no such name, 5 refuses.
	Code  int      `json:"code"`
	Ports []uint16 `json:"ports,omitempty"` // to listen on, at the address
}

// Bounds of egress.
const (
	MaxEgressConns = 1024 // connections of one sandbox that are open at once
	MaxNames       = 4096 // with a synthetic address, in a sandbox's life
	MaxNamePorts   = 16   // of one name
)

// EgressFunc serves a connection that a guest hands over, and closes it. ctx ends with the
// Host.
type EgressFunc func(ctx context.Context, intent Intent, conn EgressConn)

// EgressConn is the host's end of such a connection.
type EgressConn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
	// Answer sends the one Response of the entries name and dns. Err is what the guest is
	// told of a refusal.
	Answer(v any, err error) error
}

// egressConn is a connection whose peer may be slow: no write of it has a deadline unless
// one is set.
type egressConn struct {
	*net.UnixConn
	tracked *conn
}

func (c *egressConn) Close() error { return c.tracked.Close() }

func (c *egressConn) Answer(v any, err error) error {
	c.SetWriteDeadline(time.Now().Add(hostWriteLimit))
	defer c.SetWriteDeadline(time.Time{})
	return respond(c, v, err)
}

// takeEgress serves what a guest hands over until it is done with.
func (h *Host) takeEgress(tracked *conn, intent Intent) error {
	unix, ok := tracked.Conn.(*net.UnixConn)
	if !ok {
		return errors.New("egress over something else than a socket")
	}
	h.mu.Lock()
	serve, full := h.cfg.Egress, h.egress >= MaxEgressConns
	if serve != nil && !full {
		h.egress++
	}
	h.mu.Unlock()
	switch {
	case serve == nil:
		return errors.New("egress, which this host does not serve")
	case full:
		tracked.Close() // its program sees a connection that ends
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	begun := h.begin(func() {
		defer func() {
			cancel()
			tracked.Close()
			h.mu.Lock()
			h.egress--
			h.mu.Unlock()
		}()
		stop := context.AfterFunc(ctx, func() { tracked.Close() })
		defer stop()
		serve(ctx, intent, &egressConn{unix, tracked})
	})
	if !begun {
		cancel()
		return ErrClosed
	}
	go func() {
		select {
		case <-h.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return nil
}

// Serves reports whether the guest that is connected can open egress.
func (h *Host) ServesEgress() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.features, featureEgress)
}

// Canary is what a guest looks for from inside; see [Host.Canary].
type Canary struct {
	// Open says that the entries are, and that the names that follow are denied.
	Open bool   `json:"open,omitempty"`
	Name string `json:"name,omitempty"`
}

// CanaryResult is what it found.
type CanaryResult struct {
	Problem string `json:"problem,omitempty"` // "" is as it should be
	Micros  int64  `json:"micros"`
}

// Canary has the guest look from inside whether the sandbox is shut: nothing outside can be
// reached, no name resolves; where egress is open, a name that is denied does not resolve
// and a CONNECT to it is refused.
func (h *Host) Canary(ctx context.Context, c Canary) (r CanaryResult, err error) {
	if err = h.call(ctx, opCanary, c, &r); err == nil && r.Problem != "" {
		err = fmt.Errorf("the sandbox is not shut: %s", r.Problem)
	}
	return r, err
}
