package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Replies of SOCKS5 (RFC 1928).
const (
	socksOK          = 0
	socksFailed      = 1
	socksNotAllowed  = 2
	socksUnreachable = 4
	socksRefused     = 5
	socksNoCommand   = 7
	socksNoAddress   = 8
)

// serveSOCKS serves a SOCKS5 client: CONNECT only, and no authentication.
func (s *session) serveSOCKS(ctx context.Context, conn Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(s.proxy.cfg.Times.Hello))
	host, port, code, err := readSOCKS(conn)
	if err != nil {
		s.deny(boxed.EntrySOCKS5, host, port, refuse(boxed.EgressInvalidRequest, "%v", err))
		if code != 0 {
			writeSOCKS(conn, code)
		}
		return
	}
	conn.SetDeadline(time.Time{})
	name, err := ParseHost(host)
	if err != nil {
		s.deny(boxed.EntrySOCKS5, host, port, refuse(boxed.EgressInvalidName, "%v", err))
		writeSOCKS(conn, socksNotAllowed)
		return
	}
	f, r := s.open(ctx, boxed.EntrySOCKS5, name, port)
	if r != nil {
		writeSOCKS(conn, socksReply(r.Reason))
		return
	}
	defer f.close()
	upstream, r := f.reach(ctx)
	if r != nil {
		writeSOCKS(conn, socksReply(f.deny(r).Reason))
		return
	}
	if err := writeSOCKS(conn, socksOK); err != nil {
		upstream.Close()
		return
	}
	f.carry(conn, nil, upstream)
}

// readSOCKS reads a client's greeting and request. code is what to answer to what is wrong.
func readSOCKS(conn io.ReadWriter) (host string, port uint16, code byte, err error) {
	var head [4]byte
	if _, err := io.ReadFull(conn, head[:2]); err != nil {
		return "", 0, 0, err
	}
	if head[0] != 5 {
		return "", 0, 0, errors.New("not SOCKS version 5")
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(conn, methods); err != nil {
		return "", 0, 0, err
	}
	offered := false
	for _, m := range methods {
		offered = offered || m == 0
	}
	if !offered {
		conn.Write([]byte{5, 0xff})
		return "", 0, 0, errors.New("no method without authentication was offered: leave user and password away")
	}
	if _, err := conn.Write([]byte{5, 0}); err != nil {
		return "", 0, 0, err
	}
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return "", 0, 0, err
	}
	if host, err = readSOCKSAddress(conn, head[3]); err != nil {
		return "", 0, socksNoAddress, err
	}
	var raw [2]byte
	if _, err := io.ReadFull(conn, raw[:]); err != nil {
		return "", 0, 0, err
	}
	port = binary.BigEndian.Uint16(raw[:])
	switch {
	case head[0] != 5:
		return host, port, socksFailed, errors.New("not SOCKS version 5")
	case head[1] != 1:
		return host, port, socksNoCommand, errors.New("another command than CONNECT")
	case port == 0:
		return host, port, socksFailed, errors.New("port 0")
	}
	return host, port, 0, nil
}

func readSOCKSAddress(r io.Reader, kind byte) (string, error) {
	size := 0
	switch kind {
	case 1:
		size = 4
	case 4:
		size = 16
	case 3:
		var n [1]byte
		if _, err := io.ReadFull(r, n[:]); err != nil {
			return "", err
		}
		size = int(n[0])
	default:
		return "", errors.New("an address of an unknown kind")
	}
	raw := make([]byte, size)
	if _, err := io.ReadFull(r, raw); err != nil {
		return "", err
	}
	if kind == 3 {
		return string(raw), nil
	}
	addr, _ := netip.AddrFromSlice(raw)
	return addr.String(), nil
}

// writeSOCKS answers a request. The address is of no use to anybody, and not told.
func writeSOCKS(w io.Writer, code byte) error {
	_, err := w.Write([]byte{5, code, 0, 1, 0, 0, 0, 0, 0, 0})
	return err
}

func socksReply(r boxed.EgressReason) byte {
	switch r {
	case boxed.EgressNoAddress, boxed.EgressResolveFailed:
		return socksUnreachable
	case boxed.EgressConnectFailed:
		return socksRefused
	case boxed.EgressTooMany, boxed.EgressTooFast, boxed.EgressAuditFull, boxed.EgressExitAway:
		return socksFailed
	}
	return socksNotAllowed
}
