package egress

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// special is a range of addresses that are not the public Internet.
type special struct {
	prefix netip.Prefix
	class  string // for a person
}

// ranges gives several prefixes one class.
func ranges(class string, prefixes ...string) (list []special) {
	for _, p := range prefixes {
		list = append(list, special{netip.MustParsePrefix(p), class})
	}
	return list
}

// The tables are the IANA IPv4 and IPv6 Special-Purpose Address Registries, both as of
// 2025-10-09, with what clouds and tailnets have made of them, multicast, and the ranges
// that were taken out of the registries but that routers and kernels still know. Of
// ranges that overlap, the first gives the class.

// neverRanges hold what no file can open: this host, its neighbours on the link, the
// services that give credentials to whoever asks, and the tailnet.
var neverRanges = slices.Concat(
	ranges("cloud metadata",
		"169.254.169.254/32",     // almost all
		"169.254.170.2/32",       // AWS ECS tasks
		"169.254.170.23/32",      // AWS EKS pods
		"169.254.42.42/32",       // Scaleway
		"169.254.0.23/32",        // Tencent
		"100.100.100.200/32",     // Alibaba, in shared space
		"168.63.129.16/32",       // Azure's wire server, in public space
		"192.0.0.192/32",         // Oracle, classic
		"192.80.8.124/32",        // Equinix Metal (Packet), in public space
		"fd00:ec2::/32",          // AWS: 254 is metadata, 23 EKS pods, 253 DNS
		"fd20:ce::254/128",       // Google
		"fd00:c1::a9fe:a9fe/128", // Oracle
		"fd00:a9fe:a9fe::1/128",  // Akamai (Linode)
		"fd00:42::42/128",        // Scaleway
		"fd00:100::100:200/128",  // Alibaba
	),
	ranges("loopback", "127.0.0.0/8", "::1/128"),
	// Linux connects 0.0.0.0 and :: to this host, and other systems more of 0.0.0.0/8.
	ranges("unspecified", "0.0.0.0/8", "::/128"),
	ranges("link-local", "169.254.0.0/16", "fe80::/10"),
	ranges("multicast", "224.0.0.0/4", "ff00::/8"),
	ranges("broadcast", "255.255.255.255/32"),
	// The shared space of RFC 6598 too, but what has it here is the tailnet.
	ranges("tailnet (100.64.0.0/10)", "100.64.0.0/10"),
	ranges("tailnet (fd7a:115c:a1e0::/48)", "fd7a:115c:a1e0::/48"),
)

// Ranges whose addresses hold an IPv4 address that a relay goes on to.
var (
	nat64      = netip.MustParsePrefix("64:ff9b::/96")
	localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48")
	sixToFour  = netip.MustParsePrefix("2002::/16")
	teredo     = netip.MustParsePrefix("2001::/32")
	compatible = netip.MustParsePrefix("::/96")
	translated = netip.MustParsePrefix("::ffff:0:0:0/96")
)

// globalUnicast is all of IPv6 that was ever given to anybody on the Internet.
var globalUnicast = netip.MustParsePrefix("2000::/3")

// privateRanges hold what an operator may have reasons to open.
var privateRanges = slices.Concat(
	ranges("private (RFC 1918)", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
	ranges("unique-local", "fc00::/7"),
	ranges("site-local", "fec0::/10"),
	[]special{
		{nat64, "NAT64"},
		{localNAT64, "NAT64"},
		{sixToFour, "6to4"},
		{teredo, "Teredo"},
		{compatible, "IPv4-compatible"},
		{translated, "IPv4-translated"},
	},
	ranges("6to4 relay", "192.88.99.0/24"),
	ranges("benchmarking", "198.18.0.0/15", "2001:2::/48"),
	ranges("documentation", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
	ranges("ORCHID", "2001:10::/28", "2001:20::/28"),
	ranges("IETF protocol assignment", "192.0.0.0/24", "2001::/23"),
	// Reachable, but nothing there answers a sandbox: sinks for reverse look-ups, relays.
	ranges("AS112", "192.31.196.0/24", "192.175.48.0/24", "2620:4f:8000::/48"),
	ranges("AMT relay", "192.52.193.0/24"),
	ranges("discard-only", "100::/64", "100:0:0:1::/64"),
	ranges("segment routing", "5f00::/16"),
	ranges("reserved (class E)", "240.0.0.0/4"),
)

// JudgeConfig is what a [Judge] knows besides the tables.
type JudgeConfig struct {
	// Self gives the addresses of this host, of every node, of resolvers and of whatever
	// else the operator calls ours. It is asked at each judgement, by several goroutines
	// at once, and must not block; nil is none. A prefix of it that is not valid makes
	// every address a never-address, since nobody knows what it should have covered.
	Self func() []netip.Prefix
	// Openings are exceptions to what is private; see [ParseOpening].
	Openings []Opening
}

// Judge says which addresses may be connected to. It knows no network and does not
// change; it may be used by several goroutines at once.
type Judge struct {
	self     func() []netip.Prefix
	openings []Opening
}

// WithoutOpenings is the same, with nothing opened.
func (j *Judge) WithoutOpenings() *Judge { return &Judge{self: j.self} }

// NewJudge makes a Judge. It keeps none of cfg's memory but Self.
func NewJudge(cfg JudgeConfig) *Judge {
	j := &Judge{self: cfg.Self, openings: slices.Clone(cfg.Openings)}
	if j.self == nil {
		j.self = func() []netip.Prefix { return nil }
	}
	for i := range j.openings {
		j.openings[i].Prefix = unmapped(j.openings[i].Prefix)
	}
	return j
}

// Judge says whether a connection for host, which was looked up once and gave this
// address, may be made: [boxed.EgressAllowed], [boxed.EgressNeverAddress] or
// [boxed.EgressPrivateAddress], and the address's class for a person.
//
// No opening is looked at before all that is never allowed, inside transition addresses
// too: a relay may stand on this very host.
func (j *Judge) Judge(host Host, ap netip.AddrPort) (boxed.EgressReason, string) {
	switch {
	case !ap.Addr().IsValid():
		return boxed.EgressNeverAddress, "no address"
	case ap.Addr().Zone() != "":
		return boxed.EgressNeverAddress, "an address with a zone"
	case ap.Port() == 0:
		return boxed.EgressNeverAddress, "port 0"
	}
	addr, self := ap.Addr().Unmap(), j.self()
	if class := neverClass(addr, self); class != "" {
		return boxed.EgressNeverAddress, class
	}
	class := privateClass(addr)
	for _, inner := range embedded(addr) {
		if never := neverClass(inner, self); never != "" {
			return boxed.EgressNeverAddress, class + " of " + never
		}
	}
	switch {
	case class == "":
		return boxed.EgressAllowed, "public"
	case j.opened(host, addr, ap.Port()):
		return boxed.EgressAllowed, class + ", opened by the operator"
	}
	return boxed.EgressPrivateAddress, class
}

func (j *Judge) opened(host Host, addr netip.Addr, port uint16) bool {
	return slices.ContainsFunc(j.openings, func(o Opening) bool {
		return o.Host == host && o.Port == port && o.Host != Host{} && o.Prefix.Contains(addr)
	})
}

// neverClass is the class of an unmapped address that nothing can allow, "" of any other.
func neverClass(addr netip.Addr, self []netip.Prefix) string {
	if class := classIn(neverRanges, addr); class != "" {
		return class
	}
	for _, p := range self {
		if !p.IsValid() {
			return "this host or the mesh, whose addresses are not known"
		}
		if covers(p, addr) {
			return "this host or the mesh"
		}
	}
	return ""
}

// privateClass is the class of an address that is special, "" of a public one.
func privateClass(addr netip.Addr) string {
	if class := classIn(privateRanges, addr); class != "" {
		return class
	}
	if addr.Is6() && !globalUnicast.Contains(addr) {
		return "outside of 2000::/3"
	}
	return ""
}

func classIn(list []special, addr netip.Addr) string {
	for _, s := range list {
		if s.prefix.Contains(addr) {
			return s.class
		}
	}
	return ""
}

// covers is p.Contains(addr), whichever form p has: by itself that never holds between an
// IPv4 address and an IPv6 prefix, be it ::ffff:10.0.0.0/104 or ::/0.
func covers(p netip.Prefix, addr netip.Addr) bool {
	return p.Contains(addr) || (addr.Is4() && p.Contains(netip.AddrFrom16(addr.As16())))
}

// embedded lists the IPv4 addresses that a relay of addr's range may go on to.
func embedded(addr netip.Addr) []netip.Addr {
	if !addr.Is6() {
		return nil
	}
	b := addr.As16()
	v4 := func(w, x, y, z int) netip.Addr { return netip.AddrFrom4([4]byte{b[w], b[x], b[y], b[z]}) }
	switch {
	case nat64.Contains(addr), compatible.Contains(addr), translated.Contains(addr):
		return []netip.Addr{v4(12, 13, 14, 15)}
	case sixToFour.Contains(addr):
		return []netip.Addr{v4(2, 3, 4, 5)}
	case teredo.Contains(addr):
		// Its server, and its client, whose bits are inverted.
		client := netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]})
		return []netip.Addr{v4(4, 5, 6, 7), client}
	case localNAT64.Contains(addr):
		// The site chose where in it the address is (RFC 6052, section 2.2: byte 8 is
		// left out), and nothing here knows. Mostly it is at the end, after zeros that
		// would be no address in the middle. A site that has it in the middle, and zeros
		// at the end, cannot be opened.
		list := []netip.Addr{v4(12, 13, 14, 15)}
		for _, a := range []netip.Addr{v4(6, 7, 9, 10), v4(7, 9, 10, 11), v4(9, 10, 11, 12)} {
			if a.As4()[0] != 0 {
				list = append(list, a)
			}
		}
		return list
	}
	return nil
}

// Opening lets one host at one port have addresses that are private. All of it must
// hold at once.
type Opening struct {
	Prefix netip.Prefix
	Port   uint16
	Host   Host
}

// String is the opening as [ParseOpening] takes it.
func (o Opening) String() string {
	return o.Prefix.String() + " " + strconv.Itoa(int(o.Port)) + " " + o.Host.String()
}

// ParseOpening reads a line of the operator's file such as
// "10.1.2.0/24 443 git.corp.example": a prefix, a port, and an exact host, which may be
// an address in the prefix. A prefix that holds any never-address is an error, however
// it is written. Errors have code [boxed.CodeInvalid].
func ParseOpening(s string) (Opening, error) {
	fields := strings.Fields(s)
	if len(fields) != 3 {
		return Opening{}, boxed.Errorf(boxed.CodeInvalid, `%s is not an opening; write "10.1.2.0/24 443 git.corp.example"`, quoted(s))
	}
	prefix, err := parsePrefix(fields[0])
	if err != nil {
		return Opening{}, err
	}
	port := parsePort(fields[1])
	if port == 0 {
		return Opening{}, boxed.Errorf(boxed.CodeInvalid, "%s is not a port of 1 to 65535", quoted(fields[1]))
	}
	if strings.Contains(fields[2], "*") {
		return Opening{}, boxed.Errorf(boxed.CodeInvalid, "an opening is for one host, not for %s", quoted(fields[2]))
	}
	host, err := ParseConfigHost(fields[2])
	if err != nil {
		return Opening{}, err
	}
	if class := neverWithin(prefix); class != "" {
		return Opening{}, boxed.Errorf(boxed.CodeInvalid, "%s cannot be opened: some of it is %s", prefix, class)
	}
	if host.IsAddr() && !prefix.Contains(host.Addr()) {
		return Opening{}, boxed.Errorf(boxed.CodeInvalid, "%s is not in %s", host, prefix)
	}
	return Opening{Prefix: prefix, Port: port, Host: host}, nil
}

// neverWithin is the class of a never-range that the unmapped prefix p has a part of, ""
// for none. Of transition ranges it looks at single addresses only: whoever has nothing
// but NAT64 needs to open all of it, and each address is judged by what it embeds.
func neverWithin(p netip.Prefix) string {
	for _, n := range neverRanges {
		if p.Overlaps(n.prefix) || p.Overlaps(mapped(n.prefix)) {
			return n.class
		}
	}
	if p.IsSingleIP() {
		for _, inner := range embedded(p.Addr()) {
			if class := classIn(neverRanges, inner); class != "" {
				return class
			}
		}
	}
	return ""
}

// ParsePrefixOrAddr reads an entry of the operator's egress.self: a prefix, or an
// address for itself alone. Errors have code [boxed.CodeInvalid].
func ParsePrefixOrAddr(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		return parsePrefix(s)
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return netip.Prefix{}, boxed.Errorf(boxed.CodeInvalid, "%s is neither an address nor a prefix", quoted(s))
	}
	addr = addr.Unmap()
	return netip.PrefixFrom(addr, addr.BitLen()), nil
}

// parsePrefix reads a prefix. One with bits after its length is an error, because it is
// not known which of the two its author meant.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, boxed.Errorf(boxed.CodeInvalid, `%s is not a prefix such as "10.1.2.0/24"`, quoted(s))
	}
	if p != p.Masked() {
		return netip.Prefix{}, boxed.Errorf(boxed.CodeInvalid, "%s has bits set after its length; write %s, or a longer one", p, p.Masked())
	}
	return unmapped(p), nil
}

// unmapped is a prefix of IPv4-mapped addresses as one of IPv4, and any other as it is.
func unmapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

// mapped is an IPv4 prefix as one of IPv4-mapped addresses, and an IPv6 prefix as it is.
func mapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), p.Bits()+96)
	}
	return p
}
