package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"github.com/boxed-mesh/boxed"
)

// listen opens the API's listener.
func listen(ctx context.Context, address string) (net.Listener, error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, boxed.Errorf(boxed.CodeConflict, "%s is in use by another program; stop it (ss -ltnp shows which), or choose another address with listen: %w", address, err)
	case errors.Is(err, syscall.EACCES):
		return nil, boxed.Errorf(boxed.CodeForbidden, "%s may not be used by this user; choose a port of 1024 or above with listen: %w", address, err)
	case err != nil:
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return ln, nil
}

// hostNames is the closed set of Host names that the API is served under: the
// loopback's, those of the address, and what the configuration adds. For an
// address that stands for all of the host's, it has each of them and the host's
// name.
func (c *Config) hostNames() []string {
	names := []string{"localhost", "127.0.0.1", "::1"}
	host, _, _ := net.SplitHostPort(c.Listen)
	addr, err := netip.ParseAddr(host)
	switch {
	case host == "" || err == nil && addr.IsUnspecified():
		if name, err := os.Hostname(); err == nil {
			names = append(names, name)
		}
		addrs, _ := net.InterfaceAddrs() // without them, hosts can still name them
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				names = append(names, p.Addr().Unmap().WithZone("").String())
			}
		}
	default:
		names = append(names, host)
	}
	names = append(names, c.Hosts...)
	slices.Sort(names)
	return slices.Compact(names)
}
