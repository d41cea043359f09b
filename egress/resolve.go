package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// keepAlive finds destinations that are gone.
const keepAlive = 30 * time.Second

// magicDNS answers for a tailnet's names (Tailscale's resolver), which are not for sandboxes.
var magicDNS = netip.MustParseAddr("100.100.100.100")

// Upstreams is a Resolver that asks name servers, with Go's own code: the system's has
// names and forms of addresses of its own.
type Upstreams struct {
	servers  []netip.AddrPort
	next     atomic.Uint32
	resolver net.Resolver
}

// NewUpstreams asks these servers.
func NewUpstreams(servers []netip.AddrPort) (*Upstreams, error) {
	if len(servers) == 0 {
		return nil, errors.New("no name server to ask: set egress.resolvers")
	}
	u := &Upstreams{servers: servers}
	u.resolver = net.Resolver{PreferGo: true, StrictErrors: true, Dial: u.dial}
	return u, nil
}

// Servers are those that are asked.
func (u *Upstreams) Servers() []netip.AddrPort { return u.servers }

func (u *Upstreams) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	server := u.servers[int(u.next.Add(1)-1)%len(u.servers)]
	d := net.Dialer{Timeout: 3 * time.Second}
	return d.DialContext(ctx, network, server.String())
}

// resolveLimit is how long an answer may take.
const resolveLimit = 10 * time.Second

// Resolve finds a name's addresses. The name is complete: no search list is used.
func (u *Upstreams) Resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveLimit)
	defer cancel()
	return u.resolver.LookupNetIP(ctx, "ip", name+".")
}

// SystemServers are the name servers of a resolv.conf, but for MagicDNS.
func SystemServers(path string) ([]netip.AddrPort, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("find a name server for sandboxes: %w", err)
	}
	var servers []netip.AddrPort
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil && addr != magicDNS {
			servers = append(servers, netip.AddrPortFrom(addr, 53))
		}
	}
	return servers, nil
}
