package main

import (
	"context"
	"encoding/json"
	"net"
	"slices"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// The values of mesh.network.
const (
	networkTCP     = "tcp"
	networkTailnet = "tailnet"
)

// sandboxCap is the application capability by which a tailnet's policy grants the
// use of boxed.
const sandboxCap = "boxed-mesh.dev/cap/sandbox"

// tailnet is the node's machine on a tailnet.
type tailnet interface {
	transport.Network
	Drop(gone func(boxed.NodeID) bool)
	// Up returns when the machine is on the tailnet.
	Up(ctx context.Context) error
	// Standing is how it stands.
	Standing() *boxed.Tailnet
	// Seeds are the addresses of the machines with the node tag that are online.
	Seeds() []string
	WhoIs(ctx context.Context, remoteAddr string) (caller, error)
	// Front is the listener of the API, and the Host names that it is served under.
	Front(ctx context.Context) (net.Listener, []string, error)
	// SSH is the listener of SSH.
	SSH(ctx context.Context) (net.Listener, error)
	// Service is the listener of the name that all nodes share, where the tailnet has it.
	Service(ctx context.Context) (net.Listener, []string, error)
}

// caller is who is at the other end of a tailnet connection.
type caller struct {
	Login        string
	Tags         []string
	Grants       []json.RawMessage // values of sandboxCap
	Shared       bool              // of another tailnet
	SubnetRouted bool              // or it may be a machine behind the one that is known
	Node         string
}

// grant is one value of sandboxCap.
type grant struct {
	Role  string `json:"role"`
	Owner string `json:"owner"` // "": the login, or the machine's name
	// The most that it may hold at a time; 0 is no bound but the owner's quota.
	Sandboxes int    `json:"sandboxes"`
	Memory    string `json:"memory"` // like "16GiB"
}

// principal is who a caller of the tailnet is to boxed. What the policy grants goes
// first, then a machine's tags, then a person's login. Whoever is of another
// tailnet, or may hide behind a router, needs a grant.
func (c *TailnetConfig) principal(who caller) (boxed.Principal, error) {
	role, owner := boxed.Role(""), who.Login
	var bounds []Quota
	for _, raw := range who.Grants {
		var g grant
		err := json.Unmarshal(raw, &g)
		memory, sizeErr := parseSize(or(g.Memory, "0"))
		if err != nil || sizeErr != nil || g.Sandboxes < 0 || g.Role != string(boxed.RoleUser) && g.Role != string(boxed.RoleAdmin) {
			continue
		}
		if role != boxed.RoleAdmin {
			role = boxed.Role(g.Role)
		}
		if g.Owner != "" {
			owner = g.Owner
		}
		bounds = append(bounds, Quota{g.Sandboxes, int64(memory)})
	}
	switch {
	case role != "":
	case who.Shared || who.SubnetRouted:
		return boxed.Principal{}, boxed.Errorf(boxed.CodeForbidden,
			"%s is of another tailnet or behind a subnet router, and needs a grant of %s, or an API key", or(who.Node, "this machine"), sandboxCap)
	case len(who.Tags) > 0:
		for _, tag := range slices.Sorted(slices.Values(who.Tags)) {
			if r := boxed.Role(c.Tags[tag]); r != "" && role != boxed.RoleAdmin {
				role = r
			}
		}
	case who.Login != "" && c.Users:
		role = boxed.RoleUser
	}
	owner = or(owner, who.Node)
	if role == "" || owner == "" {
		return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated,
			"%s has no role here: show an API key, or have an administrator grant %s in the tailnet's policy or list its tag under tailnet.tags", or(or(who.Login, who.Node), "this machine"), sandboxCap)
	}
	bound := widest(bounds)
	return boxed.Principal{Owner: owner, Role: role, Sandboxes: bound.Sandboxes, MemoryBytes: bound.MemoryBytes}, nil
}

// widest is the widest of several bounds, where 0 is none.
func widest(bounds []Quota) (widest Quota) {
	for i, b := range bounds {
		if i == 0 {
			widest = b
			continue
		}
		if widest.Sandboxes == 0 || b.Sandboxes == 0 {
			widest.Sandboxes = 0
		} else {
			widest.Sandboxes = max(widest.Sandboxes, b.Sandboxes)
		}
		if widest.MemoryBytes == 0 || b.MemoryBytes == 0 {
			widest.MemoryBytes = 0
		} else {
			widest.MemoryBytes = max(widest.MemoryBytes, b.MemoryBytes)
		}
	}
	return widest
}
