package tsnet

import "tailscale.com/tsnet"

// Server is the library's, for a test that stands in for those who make
// certificates.
func Server(n *Network) *tsnet.Server { return n.server }
