package tsnet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"tailscale.com/ipn/ipnstate"
	"tailscale.com/tailcfg"
	"tailscale.com/tsnet"
)

// FrontInfo describes the listener of an HTTP API on the tailnet.
type FrontInfo struct {
	TLS bool // it speaks TLS, with a certificate that browsers trust
	// Hosts are all the names that a request's Host may have, without a port: the
	// short and the full name of this machine, or of the service, and its addresses.
	Hosts []string
}

// ListenFront listens for HTTP on the tailnet: on port 443 with the tailnet's
// certificate where HTTPS is enabled for the tailnet, else on port 80 without
// TLS, which WireGuard then stands for. It waits for [Network.Up]. The caller
// closes the listener. Whoever may reach this machine by the tailnet's policy
// can connect; [Network.WhoIs] has who it is.
func (n *Network) ListenFront(ctx context.Context) (net.Listener, FrontInfo, error) {
	if err := n.Up(ctx); err != nil {
		return nil, FrontInfo{}, err
	}
	v := n.current()
	short, _, _ := strings.Cut(v.status.DNSName, ".")
	info := FrontInfo{TLS: len(v.certs) > 0}
	if short != "" {
		info.Hosts = slices.Compact([]string{short, v.status.DNSName})
	}
	for _, addr := range v.self {
		info.Hosts = append(info.Hosts, addr.String())
	}
	port := ":80"
	if info.TLS {
		port = ":443"
	}
	l, err := n.server.Listen("tcp", port)
	if err != nil {
		return nil, FrontInfo{}, fmt.Errorf("listen on the tailnet, port %s: %w", port[1:], err)
	}
	if info.TLS {
		// The certificate is got at the first connection, which takes some seconds.
		l = tls.NewListener(l, &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: n.client.GetCertificate})
	}
	return l, info, nil
}

// ListenSSH listens for SSH on the tailnet, port 22. It waits for [Network.Up]. The
// caller closes the listener.
func (n *Network) ListenSSH(ctx context.Context) (net.Listener, error) {
	if err := n.Up(ctx); err != nil {
		return nil, err
	}
	l, err := n.server.Listen("tcp", ":22")
	if err != nil {
		return nil, fmt.Errorf("listen on the tailnet, port 22: %w", err)
	}
	return l, nil
}

// serviceApproval is how long an approval by the tailnet's policy may take to
// arrive.
const serviceApproval = 10 * time.Second

// ListenService listens on port 443 of a service of the tailnet, like
// "svc:boxed", which several nodes may be hosts of. Where the tailnet has no such
// service, or has not approved this machine as a host of it, the error is
// errors.ErrUnsupported.
//
// The library relays a service's connections over a socket on the host's
// loopback. So they have no caller that [Network.WhoIs] knows, and whoever is on
// this host can connect too: they must bring a key.
func (n *Network) ListenService(ctx context.Context, name string) (net.Listener, FrontInfo, error) {
	if err := n.Up(ctx); err != nil {
		return nil, FrontInfo{}, err
	}
	l, err := n.server.ListenService(name, tsnet.ServiceModeTCP{Port: 443, TerminateTLS: true})
	if errors.Is(err, tsnet.ErrUntaggedServiceHost) {
		return nil, FrontInfo{}, fmt.Errorf("listen as %s: %w: this machine has no tag; %s", name, errors.ErrUnsupported, giveTag(n.cfg.Tag))
	}
	if err != nil {
		return nil, FrontInfo{}, fmt.Errorf("listen as %s: %w", name, err)
	}
	wait, cancel := context.WithTimeout(ctx, serviceApproval)
	defer cancel()
	for {
		n.mu.Lock()
		approved, changed := slices.Contains(n.view.services, name), n.changed
		n.mu.Unlock()
		if approved {
			break
		}
		select {
		case <-changed:
		case <-wait.Done():
			l.Close()
			return nil, FrontInfo{}, fmt.Errorf("listen as %s: %w: the tailnet has not made this machine a host of it; define the service on the Services page of the admin console, and approve this machine there or by autoApprovers in the policy",
				name, errors.ErrUnsupported)
		}
	}
	short, _, _ := strings.Cut(l.FQDN, ".")
	return l, FrontInfo{TLS: true, Hosts: []string{short, l.FQDN}}, nil
}

// servicesOf are the services of which the tailnet has made a machine a host.
func servicesOf(self *ipnstate.PeerStatus) (names []string) {
	maps, err := tailcfg.UnmarshalNodeCapJSON[tailcfg.ServiceIPMappings](self.CapMap, tailcfg.NodeAttrServiceHost)
	if err != nil {
		return nil
	}
	for _, m := range maps {
		for name := range m {
			names = append(names, name.String())
		}
	}
	return names
}
