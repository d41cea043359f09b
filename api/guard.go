package api

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// LoopbackHosts are the Host names of a listener on the loopback, on any port.
func LoopbackHosts() []string { return []string{"localhost", "127.0.0.1", "[::1]"} }

// hostSet is the closed set of Hosts: what a name that was rebound to this
// address would have to be called.
type hostSet map[string]bool

func newHostSet(hosts []string) (hostSet, error) {
	set := hostSet{}
	for _, h := range hosts {
		host := strings.ToLower(h)
		if ip, err := netip.ParseAddr(host); err == nil && ip.Is6() {
			host = "[" + host + "]"
		}
		if host == "" || strings.ContainsAny(host, "/@*, \t") {
			return nil, fmt.Errorf("api: %q is not a Host name; write it like boxed.example, 10.0.0.1:8080 or [::1]", h)
		}
		set[host] = true
	}
	return set, nil
}

func (s hostSet) has(hostport string) bool {
	hostport = strings.ToLower(hostport)
	if s[hostport] {
		return true
	}
	host, port, err := net.SplitHostPort(hostport)
	if err != nil || port == "" || strings.Trim(port, "0123456789") != "" {
		return false
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return s[host]
}

// checkOrigin refuses what a browser sends for somebody else's page, and Hosts
// that are not served (DNS rebinding), whatever the method.
func (s *Server) checkOrigin(r *http.Request) error {
	if h, ok := hopOf(r); ok {
		if h.peer.Node == "" || r.Host != string(h.self) || len(r.Header.Values("Origin")) > 0 {
			return boxed.Errorf(boxed.CodeForbidden, "a node passes calls on to the node that they are for, and to no other").WithField("Host")
		}
		return nil
	}
	hosts := s.hosts
	if d := doorOf(r); d != nil {
		hosts = d.hosts
	}
	if !hosts.has(r.Host) {
		return boxed.Errorf(boxed.CodeForbidden, "the Host %q is not served here; add it to the node's configured hosts", clip(r.Host)).
			WithField("Host")
	}
	if origins := r.Header.Values("Origin"); len(origins) > 0 {
		// An exact comparison of the whole value: no parsing, no prefixes.
		if len(origins) != 1 || !strings.EqualFold(origins[0], s.scheme(r)+"://"+r.Host) {
			return boxed.Errorf(boxed.CodeForbidden, "requests from other origins are not served").WithField("Origin")
		}
	}
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "same-origin" && site != "none" {
			return boxed.Errorf(boxed.CodeForbidden, "requests from other sites are not served").WithField("Sec-Fetch-Site")
		}
	}
	return nil
}

func (s *Server) scheme(r *http.Request) string {
	if r.TLS != nil {
		return "https"
	}
	if s.proxied(r) && strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		return "https"
	}
	return "http"
}

func (s *Server) trusted(a netip.Addr) bool {
	for _, p := range s.cfg.TrustedProxies {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func (s *Server) proxied(r *http.Request) bool { return s.trusted(remote(r)) }

func remote(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{} // a listener without addresses: all its clients are one
	}
	return ap.Addr().Unmap().WithZone("")
}

// clientAddr is the nearest address that is not a trusted proxy's: what stands
// further left in X-Forwarded-For anybody may have written.
func (s *Server) clientAddr(r *http.Request) netip.Addr {
	addr := remote(r)
	if _, ok := hopOf(r); ok { // the node that passed it on has looked
		if client, err := netip.ParseAddr(r.Header.Get("X-Forwarded-For")); err == nil {
			return client
		}
		return addr
	}
	if !s.trusted(addr) {
		return addr
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0; i-- {
		hop, err := netip.ParseAddr(strings.TrimSpace(hops[i]))
		if err != nil {
			break
		}
		if addr = hop.Unmap().WithZone(""); !s.trusted(addr) {
			break
		}
	}
	return addr
}
