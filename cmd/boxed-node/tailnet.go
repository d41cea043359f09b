//go:build !race

package main

import (
	"context"
	"log/slog"
	"net"
	"slices"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tsnet"
)

// openTailnet starts the node's machine on the tailnet. It does not wait for it.
func openTailnet(ctx context.Context, cfg TailnetConfig, dir string, gate *transport.Gate, log *slog.Logger) (tailnet, error) {
	n, err := tsnet.New(ctx, tsnet.Config{
		Dir: dir, Hostname: cfg.Hostname, AuthKey: cfg.AuthKey, ControlURL: cfg.ControlURL, Tag: cfg.Tag, Gate: gate, Log: log,
	})
	if err != nil {
		return nil, err
	}
	return onTailnet{n}, nil
}

// onTailnet is tsnet's Network in this package's words.
type onTailnet struct{ *tsnet.Network }

func (n onTailnet) Standing() *boxed.Tailnet {
	s := n.Status()
	return &boxed.Tailnet{
		State: string(s.State), Name: or(s.DNSName, s.Hostname), Address: s.Addr, LoginURL: s.LoginURL, KeyExpiry: s.KeyExpiry, Problem: s.Problem, Next: s.Next,
	}
}

func (n onTailnet) Seeds() (addrs []string) {
	for _, p := range n.Peers() {
		if p.Online {
			addrs = append(addrs, p.Addr)
		}
	}
	slices.Sort(addrs)
	return addrs
}

func (n onTailnet) WhoIs(ctx context.Context, remoteAddr string) (caller, error) {
	id, err := n.Network.WhoIs(ctx, remoteAddr)
	if err != nil {
		return caller{}, err
	}
	return caller{
		Login: id.Login, Tags: id.Tags, Grants: id.Caps[sandboxCap], Shared: id.Shared, SubnetRouted: id.SubnetRouted, Node: id.Node,
	}, nil
}

func (n onTailnet) Front(ctx context.Context) (net.Listener, []string, error) {
	ln, info, err := n.ListenFront(ctx)
	return ln, info.Hosts, err
}

func (n onTailnet) SSH(ctx context.Context) (net.Listener, error) { return n.ListenSSH(ctx) }

// serviceName is what all nodes of a tailnet are called together.
const serviceName = "svc:boxed"

func (n onTailnet) Service(ctx context.Context) (net.Listener, []string, error) {
	ln, info, err := n.ListenService(ctx, serviceName)
	return ln, info.Hosts, err
}
