package main

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
	"github.com/boxed-mesh/boxed/node"
)

// EgressConfig is how sandboxes get out, and where never.
type EgressConfig struct {
	AllowedHosts []string // of the default profile
	Resolvers    []string
	Roots        string // file of certificates
	Open         []string
	Deny         []string
	Self         []string
	Ceiling      []string
	Limits       egress.Limits
	Exits        []string
	Sources      []string
}

func (c *EgressConfig) settings() []setting {
	return []setting{
		{path: "egress.allowed_hosts", value: &c.AllowedHosts, help: "hosts that a sandbox may reach that names no egress profile, on 80 and 443; *.NAME is one label more; also EGRESS_ALLOWED_HOSTS; none: it reaches nothing"},
		{path: "egress.resolvers", value: &c.Resolvers, help: "name servers for what sandboxes ask for, address:port; default those of /etc/resolv.conf but for a tailnet's"},
		{path: "egress.roots", value: &c.Roots, help: "file of further certificates in PEM that are trusted, by the proxy and in sandboxes: those of one's own authorities"},
		{path: "egress.open", value: &c.Open, help: "private addresses that may be reached, each as \"PREFIX PORT NAME\": 10.1.2.0/24 443 git.corp.example"},
		{path: "egress.deny", value: &c.Deny, help: "hosts that no sandbox reaches, whatever its profile says; *.NAME is one label more"},
		{path: "egress.self", value: &c.Self, help: "further addresses or prefixes that are ours and that no sandbox reaches: public ones behind NAT"},
		{path: "egress.ceiling", value: &c.Ceiling, help: "hosts, or host:port, that owners may allow their sandboxes at most; *.NAME is one label more; none: any public host; admins' own profiles are not bounded"},
		{path: "egress.exits", value: &c.Exits, help: "who may leave by this node, each as \"NODE PROFILE\" (an ID, or * for any node; OWNER/NAME for an owner's own profile, * for any), with \"private\" behind it if egress.open is for them too; none: nobody"},
		{path: "egress.sources", value: &c.Sources, help: "what admins may have this node read values of secrets from besides what is given: env (its own variables), command (what a program prints that it runs); none: neither"},
		{path: "egress.limits.connections", value: &c.Limits.Connections, help: "connections of one sandbox at once"},
		{path: "egress.limits.dials", value: &c.Limits.Dials, help: "connections of one sandbox per second"},
		{path: "egress.limits.requests", value: &c.Limits.Requests, help: "requests of one sandbox per second, where the proxy reads them"},
		{path: "egress.limits.up_rate", value: (*size)(&c.Limits.UpRate), help: "bytes per second out of one sandbox; 0 is no bound"},
		{path: "egress.limits.down_rate", value: (*size)(&c.Limits.DownRate), help: "bytes per second into one sandbox; 0 is no bound"},
		{path: "egress.limits.up_total", value: (*size)(&c.Limits.UpTotal), help: "bytes out of one sandbox in its life; 0 is no bound"},
		{path: "egress.limits.down_total", value: (*size)(&c.Limits.DownTotal), help: "bytes into one sandbox in its life; 0 is no bound"},
	}
}

// defaultProfile is that of sandboxes that name none, nil without allowed hosts.
func (c *EgressConfig) defaultProfile() *boxed.EgressProfile {
	if len(c.AllowedHosts) == 0 {
		return nil
	}
	p := &boxed.EgressProfile{Version: 1, Name: "default", Rules: []boxed.EgressRule{}}
	for _, h := range c.AllowedHosts {
		p.Rules = append(p.Rules, boxed.EgressRule{Host: h, Ports: []uint16{80, 443}})
	}
	return p
}

func (c *EgressConfig) validate(v *checker) {
	if p := c.defaultProfile(); p != nil {
		_, err := egress.CheckProfile(*p)
		v.want(err == nil, "egress.allowed_hosts", "%v", err)
	}
	for _, text := range c.Resolvers {
		_, err := netip.ParseAddrPort(text)
		v.want(err == nil, "egress.resolvers", "%q is not an address and a port, like 9.9.9.9:53", text)
	}
	for _, text := range c.Open {
		_, err := egress.ParseOpening(text)
		v.want(err == nil, "egress.open", "%v", err)
	}
	for _, text := range c.Deny {
		_, err := egress.ParsePattern(text)
		v.want(err == nil, "egress.deny", "%v", err)
	}
	for _, text := range c.Self {
		_, err := egress.ParsePrefixOrAddr(text)
		v.want(err == nil, "egress.self", "%v", err)
	}
	for _, text := range c.Exits {
		_, err := egress.ParseExit(text)
		v.want(err == nil, "egress.exits", "%v", err)
	}
	for _, kind := range c.Sources {
		err := node.CheckSourceKind(kind)
		v.want(err == nil, "egress.sources", "%v", err)
	}
	_, err := egress.ParseCeiling(c.Ceiling)
	v.want(err == nil, "egress.ceiling", "%v", err)
}

// egressParts are what sandboxes leave through.
type egressParts struct {
	proxy  *egress.Proxy
	keeper *egress.Keeper
	audit  *egress.Audit
	own    *ownAddresses
	relay  egress.Relay // the Node's, once there is one
	// renewed is the Manager's, once there is one.
	renewed func(boxed.ID, *boxed.EgressGrant)
	asks    *node.Asks
}

// openEgress makes them.
func (d *daemon) openEgress() (_ *egressParts, err error) {
	c := &d.cfg.Egress
	servers, err := c.servers()
	if err != nil {
		d.log.Warn("sandboxes cannot look up names", "err", err, "next", "set egress.resolvers")
	}
	var resolver egress.Resolver = noResolver{err}
	if err == nil {
		if resolver, err = egress.NewUpstreams(servers); err != nil {
			return nil, err
		}
	}
	p := &egressParts{own: &ownAddresses{log: d.log}, renewed: func(boxed.ID, *boxed.EgressGrant) {}}
	for _, text := range c.Self {
		prefix, _ := egress.ParsePrefixOrAddr(text) // Validate has
		p.own.fixed = append(p.own.fixed, prefix)
	}
	for _, s := range servers {
		p.own.fixed = append(p.own.fixed, netip.PrefixFrom(s.Addr(), s.Addr().BitLen()))
	}
	judge := egress.JudgeConfig{Self: p.own.prefixes}
	for _, text := range c.Open {
		o, _ := egress.ParseOpening(text)
		judge.Openings = append(judge.Openings, o)
	}
	if p.audit, err = egress.OpenAudit(egress.AuditConfig{Dir: d.cfg.path("egress"), Node: d.id, Log: d.log}); err != nil {
		return nil, fmt.Errorf("open the egress audit log: %w", err)
	}
	roots, extra, err := c.roots()
	if err != nil {
		return nil, err
	}
	p.asks = &node.Asks{Emit: func(e boxed.Event) { d.store.AppendEvent(e) }, Now: time.Now, Node: d.id}
	p.proxy = egress.New(egress.Config{
		Ask: p.asks.Ask, Relay: func(ctx context.Context, to boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error) {
			return p.relay(ctx, to, owner, r)
		},
		Node: d.id, Records: p.audit, Resolver: resolver, Judge: egress.NewJudge(judge), Roots: roots, ExtraRoots: extra,
		Limits: c.Limits, Log: d.log,
	})
	d.close = append(d.close, func() error { p.proxy.Close(); return nil })
	key, err := hkdf.Key(sha256.New, d.identity.Seed(), nil, "boxed egress state v1", 32)
	if err != nil {
		return nil, err
	}
	sealer, err := egress.NewSealer(key)
	if err != nil {
		return nil, err
	}
	ceiling, _ := egress.ParseCeiling(c.Ceiling)
	var exits []egress.ExitRule
	for _, text := range c.Exits {
		e, _ := egress.ParseExit(text)
		exits = append(exits, e)
	}
	var deny []egress.Pattern
	for _, text := range c.Deny {
		pattern, _ := egress.ParsePattern(text)
		deny = append(deny, pattern)
	}
	life := d.cfg.TTL.Highest.D()
	if d.cfg.TTL.Highest == boxed.Never {
		life = 0
	}
	p.keeper = egress.NewKeeper(egress.KeeperConfig{
		Proxy: p.proxy, Sealer: sealer, Default: c.defaultProfile(), HostDeny: deny, Ceiling: ceiling, Life: life, Log: d.log, Node: d.id, Exits: exits,
		Renewed: func(id boxed.ID, grant *boxed.EgressGrant) { p.renewed(id, grant) },
	})
	if c.defaultProfile() == nil {
		d.log.Info("sandboxes reach nothing unless they name an egress profile or hosts", "setting", "egress.allowed_hosts")
	}
	return p, nil
}

// servers are the name servers to ask.
func (c *EgressConfig) servers() (list []netip.AddrPort, err error) {
	for _, text := range c.Resolvers {
		addr, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, err
		}
		list = append(list, addr)
	}
	if len(list) > 0 {
		return list, nil
	}
	if list, err = egress.SystemServers("/etc/resolv.conf"); err == nil && len(list) == 0 {
		err = fmt.Errorf("/etc/resolv.conf names no server that is for sandboxes")
	}
	return list, err
}

// noResolver says why no name has an address.
type noResolver struct{ err error }

func (r noResolver) Resolve(context.Context, string) ([]netip.Addr, error) { return nil, r.err }

// roots are the system's certificates and the operator's own; nil for the system's alone.
func (c *EgressConfig) roots() (*x509.CertPool, []byte, error) {
	if c.Roots == "" {
		return nil, nil, nil
	}
	text, err := os.ReadFile(c.Roots)
	if err != nil {
		return nil, nil, fmt.Errorf("egress.roots: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, nil, fmt.Errorf("egress.roots: %s holds no certificate in PEM", c.Roots)
	}
	return pool, append(bytes.TrimSpace(text), '\n'), nil
}

// ownAddresses are those that no sandbox may reach: of this host and of every node.
type ownAddresses struct {
	fixed []netip.Prefix
	peers func() []netip.Prefix // of the mesh; nil before there is one
	log   *slog.Logger

	mu   sync.Mutex
	at   time.Time
	last []netip.Prefix
}

// ownFresh is how long the addresses of this host are believed to be as they were: nothing
// is dialled that came up in between, for listeners of a new address have hardly begun.
const ownFresh = 2 * time.Second

func (o *ownAddresses) prefixes() []netip.Prefix {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.at) < ownFresh {
		return o.last
	}
	list := slices.Clone(o.fixed)
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		o.log.Error("read this host's addresses", "err", err)
		return []netip.Prefix{{}} // an invalid one: nothing may be reached
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				ip = ip.Unmap()
				list = append(list, netip.PrefixFrom(ip, ip.BitLen()))
			}
		}
	}
	if o.peers != nil {
		list = append(list, o.peers()...)
	}
	o.at, o.last = time.Now(), list
	return list
}

// addresses are those of every node that is or was known, and of where to find them.
func (m *mesh) addresses() (list []netip.Prefix) {
	add := func(text string) {
		if ap, err := netip.ParseAddrPort(text); err == nil {
			ip := ap.Addr().Unmap()
			list = append(list, netip.PrefixFrom(ip, ip.BitLen()))
		}
	}
	seen, err := m.known().All()
	if err != nil {
		m.log.Error("read the nodes that were seen", "err", err)
		return []netip.Prefix{{}}
	}
	for _, s := range seen {
		add(s.Address)
	}
	for _, s := range m.node.MeshNodes() {
		add(s.Address)
	}
	for _, seed := range append(slices.Clone(m.remembered().Seeds), m.cfg.Mesh.Seeds...) {
		add(seed)
	}
	return list
}

// egressEnviron is the variable of other systems that names hosts to allow.
const egressEnviron = "EGRESS_ALLOWED_HOSTS"

// allowedHosts reads it: names between commas or white space.
func allowedHosts(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' || r == '\r' })
}
