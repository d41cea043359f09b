package tsnet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"tailscale.com/client/local"
	"tailscale.com/tailcfg"

	"github.com/boxed-mesh/boxed"
)

// Identity is who is at an address, as the tailnet knows it. Authorise by Tags
// and Caps before Login: a machine with tags belongs to no person.
type Identity struct {
	Login string   // "" for a machine with tags
	Name  string   // of the person; "" for a machine with tags
	Node  string   // the machine's name, without a final dot
	Tags  []string // of the machine
	// Caps are the grants of the tailnet's policy to this caller towards this
	// machine: by the capability's name, its values as raw JSON.
	Caps map[string][]json.RawMessage
	// Shared: the caller is of another tailnet.
	Shared bool
	// SubnetRouted: the caller may be not Node but a machine behind it, which the
	// tailnet does not know. Either its address is in a subnet that Node routes, in
	// which case it has no login, no tags and no grants here; or it is Node's own,
	// and Node routes subnets, and so may hide others behind its address.
	SubnetRouted bool
}

// WhoIs is who is at remoteAddr, an address with or without a port. It is local,
// and quick. The error for an address that the tailnet does not know is
// boxed.CodeNotFound.
func (n *Network) WhoIs(ctx context.Context, remoteAddr string) (Identity, error) {
	addr, err := netip.ParseAddr(remoteAddr)
	if err != nil {
		var withPort netip.AddrPort
		if withPort, err = netip.ParseAddrPort(remoteAddr); err != nil {
			return Identity{}, boxed.Errorf(boxed.CodeNotFound, "who is %q: that is no address", remoteAddr)
		}
		addr = withPort.Addr()
	}
	addr = addr.Unmap().WithZone("")
	// The port is left out: with one, the library also looks among the host's own
	// connections, and a caller from those is nobody of the tailnet.
	who, err := n.client.WhoIs(ctx, addr.String())
	if errors.Is(err, local.ErrPeerNotFound) {
		if router := n.current().routerOf(addr); router != "" {
			return Identity{Node: router, SubnetRouted: true}, nil
		}
		return Identity{}, boxed.Errorf(boxed.CodeNotFound, "who is %s: the tailnet does not know the address", addr)
	}
	if err != nil {
		return Identity{}, fmt.Errorf("who is %s: %w", addr, err)
	}
	id := Identity{
		Node: strings.TrimSuffix(who.Node.Name, "."), Tags: who.Node.Tags,
		Caps: map[string][]json.RawMessage{}, Shared: shared(who.Node), SubnetRouted: len(subnets(who.Node.PrimaryRoutes)) > 0,
	}
	if len(id.Tags) == 0 {
		id.Login, id.Name = who.UserProfile.LoginName, who.UserProfile.DisplayName
	}
	for name, values := range who.CapMap {
		raw := make([]json.RawMessage, 0, len(values))
		for _, v := range values {
			var value bytes.Buffer // without the spaces that the library puts in
			if json.Compact(&value, []byte(v)) == nil {
				raw = append(raw, value.Bytes())
			}
		}
		id.Caps[string(name)] = raw
	}
	return id, nil
}

// shared reports whether a machine is of another tailnet: shared with this one,
// or one that this tailnet's machines were shared with.
func shared(node *tailcfg.Node) bool {
	return node.Sharer != 0 || node.Hostinfo.Valid() && node.Hostinfo.ShareeNode()
}

// subnets are the routes that are not the whole internet.
func subnets(routes []netip.Prefix) (list []netip.Prefix) {
	for _, r := range routes {
		if r.Bits() > 0 {
			list = append(list, r)
		}
	}
	return list
}
