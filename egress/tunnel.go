package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/relay"
)

// carry does with a connection what its rules say. prefix was read of it already. It
// closes both connections.
func (f *flow) carry(conn Conn, prefix []byte, upstream net.Conn) {
	defer conn.Close()
	defer upstream.Close()
	stop := context.AfterFunc(f.ctx, func() {
		conn.Close()
		upstream.Close()
	})
	defer stop()
	switch {
	case f.mode == boxed.EgressIntercept:
		defer f.unasked()
		f.intercept(conn, prefix, upstream)
	case f.dec.Rules[0].Raw:
		f.tunnel(conn, prefix, upstream)
	case f.port == 80:
		defer f.unasked()
		f.s.proxy.fronts.servePlain(f, conn, prefix, upstream)
	default:
		hello, r := f.peek(conn, prefix)
		if r != nil {
			f.deny(r)
			return
		}
		f.tunnel(conn, hello, upstream)
	}
}

// tunnel carries bytes that nobody reads.
func (f *flow) tunnel(conn Conn, prefix []byte, upstream net.Conn) {
	if r := f.allow(); r != nil {
		return
	}
	if len(prefix) > 0 {
		upstream.SetWriteDeadline(time.Now().Add(f.s.proxy.cfg.Times.Hello))
		if _, err := upstream.Write(prefix); err != nil {
			f.ended(0, 0, err)
			return
		}
		upstream.SetWriteDeadline(time.Time{})
		f.s.limiter.passed(f.ctx, true, len(prefix))
	}
	f.relay(conn, upstream, int64(len(prefix)))
}

// relay pumps, and records the end. up is what went out before.
func (f *flow) relay(conn, upstream net.Conn, up int64) {
	t := f.s.proxy.cfg.Times
	res := relay.Both(conn, upstream, relay.Options{
		Idle: t.Idle, Drain: t.Drain,
		Passed: func(up bool, n int) error { return f.s.limiter.passed(f.ctx, up, n) },
	})
	if errors.Is(res.Err, relay.ErrIdle) {
		res.Err = refuse(boxed.EgressIdle, "nothing was sent for %s", t.Idle)
	}
	f.ended(up+res.Up, res.Down, res.Err)
}

// maxHello bounds what is read to find a ClientHello, in bytes.
const maxHello = 64 << 10

// extensionECH is that of an encrypted ClientHello (draft-ietf-tls-esni, code point of the
// IANA registry).
const extensionECH = 0xfe0d

// peek reads the ClientHello of a tunnel and judges it. It returns all that was read.
func (f *flow) peek(conn Conn, prefix []byte) ([]byte, *refusal) {
	limit := f.s.proxy.cfg.Times.Hello
	conn.SetReadDeadline(time.Now().Add(limit))
	defer conn.SetReadDeadline(time.Time{})
	hello, seen, err := readHello(f.ctx, io.MultiReader(bytes.NewReader(prefix), conn))
	if hello == nil {
		return nil, refuse(boxed.EgressNotTLS, "no ClientHello came: %v", err)
	}
	f.rec.SNI = hello.ServerName
	if r := judgeHello(hello, f.host, f.dec.Rules[0].AllowECH); r != nil {
		return nil, r
	}
	return seen, nil
}

// judgeHello compares a ClientHello with what was asked for.
func judgeHello(hello *tls.ClientHelloInfo, host Host, ech bool) *refusal {
	sni := strings.ToLower(strings.TrimSuffix(hello.ServerName, "."))
	switch {
	case sni == "" && host.IsAddr(): // nothing names an address
	case sni == "":
		return refuse(boxed.EgressNoSNI, "the ClientHello names no host")
	case sni != host.String():
		return refuse(boxed.EgressSNI, "the ClientHello names another host than was asked for")
	}
	if !ech && slices.Contains(hello.Extensions, extensionECH) {
		return refuse(boxed.EgressECH, "the name is hidden in an encrypted ClientHello; allow_ech in the rule allows it")
	}
	return nil
}

var errPeeked = errors.New("that is all")

// readHello has crypto/tls read a ClientHello, and keeps what it read.
func readHello(ctx context.Context, r io.Reader) (hello *tls.ClientHelloInfo, seen []byte, err error) {
	var kept bytes.Buffer
	c := peekConn{r: io.TeeReader(io.LimitReader(r, maxHello), &kept)}
	err = tls.Server(c, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		hello = h
		return nil, errPeeked
	}}).HandshakeContext(ctx)
	return hello, kept.Bytes(), err
}

// peekConn is a connection on which nothing is said.
type peekConn struct {
	net.Conn
	r io.Reader
}

func (c peekConn) Read(p []byte) (int, error)       { return c.r.Read(p) }
func (c peekConn) Write(p []byte) (int, error)      { return len(p), nil }
func (c peekConn) Close() error                     { return nil }
func (c peekConn) SetDeadline(time.Time) error      { return nil }
func (c peekConn) SetReadDeadline(time.Time) error  { return nil }
func (c peekConn) SetWriteDeadline(time.Time) error { return nil }

// prefixed is a connection of which something was read already.
type prefixed struct {
	Conn
	r io.Reader
}

func withPrefix(conn Conn, prefix []byte) Conn {
	if len(prefix) == 0 {
		return conn
	}
	return &prefixed{conn, io.MultiReader(bytes.NewReader(prefix), conn)}
}

func (c *prefixed) Read(p []byte) (int, error) { return c.r.Read(p) }
