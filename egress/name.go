package egress

import (
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
	"golang.org/x/net/publicsuffix"

	"github.com/boxed-mesh/boxed"
)

// Bounds of a host name, in bytes (RFC 1035, section 2.3.4).
const (
	maxName  = 253 // without its trailing dot
	maxLabel = 63
)

// Host is where a sandbox wants to go: a name or an address, in the one form that all
// of this package compares. Two equal Hosts are one host, so it may be a map's key. The
// zero Host is none, and no parser returns it without an error.
type Host struct {
	name string     // lower-case, without a trailing dot; "" of an address
	addr netip.Addr // unmapped and without a zone; invalid of a name
}

// String is the host as [ParseHost] takes it: of an IPv6 address without brackets, so
// that [net.JoinHostPort] may add them.
func (h Host) String() string {
	if h.addr.IsValid() {
		return h.addr.String()
	}
	return h.name
}

// IsAddr reports whether the host is an address literal.
func (h Host) IsAddr() bool { return h.addr.IsValid() }

// Addr is the address of a literal; invalid of a name.
func (h Host) Addr() netip.Addr { return h.addr }

// ParseHost reads a host from the wire. It takes the narrowest reading there is: what
// one resolver takes for a name and another for an address is neither. An address is
// four plain decimal numbers, or IPv6 with brackets or without. Its error has code
// [boxed.CodeInvalid].
func ParseHost(s string) (Host, error) {
	switch {
	// A zone is a suffix that anybody may choose: "::1%.example.com" is the loopback
	// address, and ends in what a rule may allow.
	case strings.Contains(s, "%"):
		return Host{}, notHost(s, "zones are not allowed")
	case strings.HasPrefix(s, "["):
		inner, closed := strings.CutSuffix(s[1:], "]")
		if !closed {
			return Host{}, notHost(s, "a bracket is not closed")
		}
		return parseIPv6(s, inner)
	case strings.Contains(s, ":"):
		return parseIPv6(s, s)
	}
	name := lower(strings.TrimSuffix(s, "."))
	if why := badName(name); why != "" {
		return Host{}, notHost(s, why)
	}
	if !endsInNumber(name) {
		return Host{name: name}, nil
	}
	addr, err := netip.ParseAddr(name)
	if err != nil {
		// C libraries read 127.1, 0x7f000001 and 0177.0.0.1 as addresses, Go does not.
		return Host{}, notHost(s, "it ends in a number, and is not an IPv4 address of four decimal numbers")
	}
	return Host{addr: addr}, nil
}

func parseIPv6(whole, s string) (Host, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil || !addr.Is6() {
		return Host{}, notHost(whole, "brackets and colons are of IPv6 addresses only")
	}
	return Host{addr: addr.Unmap()}, nil
}

// badName says what is wrong with a lower-case name, "" for nothing.
func badName(name string) string {
	if name == "" {
		return "it is empty"
	}
	if len(name) > maxName {
		return "it is longer than 253 bytes"
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" {
			return "a label is empty"
		}
		if len(label) > maxLabel {
			return "a label is longer than 63 bytes"
		}
		for i := range len(label) {
			c := label[i]
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "only letters, digits, hyphens, underscores and dots are allowed"
			}
		}
		// Go's resolver and its certificate check know of no such name.
		if label[0] == '-' || label[len(label)-1] == '-' {
			return "a label begins or ends with a hyphen"
		}
	}
	return ""
}

// endsInNumber reports whether some library could take the name for an address: whether
// its last label is a decimal, octal or hexadecimal number.
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	return strings.HasPrefix(last, "0x") || strings.Trim(last, "0123456789") == ""
}

// ParseConfigHost reads a host that a person wrote. Internationalised names become
// A-labels here, once, because on the wire there is nothing else. A name that the
// conversion would change beyond its case (full-width digits and dots, invisible or
// decomposed characters) is an error: what is written must be what is allowed. Errors
// have code [boxed.CodeInvalid].
func ParseConfigHost(s string) (Host, error) {
	if isASCII(s) {
		return ParseHost(s)
	}
	ascii, err := idna.Lookup.ToASCII(s)
	if err != nil {
		return Host{}, boxed.Errorf(boxed.CodeInvalid, "%s cannot be converted to a host name; write its xn-- form: %w", quoted(s), err)
	}
	if back, err := idna.Lookup.ToUnicode(ascii); err != nil || back != strings.ToLower(s) {
		return Host{}, boxed.Errorf(boxed.CodeInvalid, "%s cannot be converted to a host name as it is written; if it is meant to be %s, write that", quoted(s), quoted(ascii))
	}
	return ParseHost(ascii)
}

// ParseAuthority reads "host" or "host:port" from the wire: a CONNECT target, a Host
// header. It is no URL: there is no userinfo, path, space or sign in it, and an IPv6
// address has brackets. Port 0 as defaultPort means that there must be one. Its error has
// code [boxed.CodeInvalid].
func ParseAuthority(s string, defaultPort uint16) (Host, uint16, error) {
	end := strings.IndexByte(s, ':')
	if strings.HasPrefix(s, "[") {
		if end = strings.IndexByte(s, ']') + 1; end == 0 {
			return Host{}, 0, notHost(s, "a bracket is not closed")
		}
	}
	name, port := s, defaultPort
	if end >= 0 && end < len(s) {
		digits, ok := strings.CutPrefix(s[end:], ":")
		if strings.Contains(digits, ":") {
			return Host{}, 0, notHost(s, "an IPv6 address needs brackets")
		}
		if port = parsePort(digits); !ok || port == 0 {
			return Host{}, 0, notHost(s, "after the host comes a colon and a port of 1 to 65535, or nothing")
		}
		name = s[:end]
	}
	if port == 0 {
		return Host{}, 0, notHost(s, "it has no port")
	}
	host, err := ParseHost(name)
	if err != nil {
		return Host{}, 0, err
	}
	return host, port, nil
}

// parsePort reads a port in plain digits; 0 is none.
func parsePort(s string) uint16 {
	if s == "" || s[0] == '0' || strings.Trim(s, "0123456789") != "" {
		return 0
	}
	port, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0
	}
	return uint16(port)
}

// Pattern is what a rule or a deny list says of hosts. Two equal Patterns match the
// same, so it may be a map's key. The zero Pattern matches nothing.
type Pattern struct {
	kind patternKind
	host Host // exact: the host; wildcard: what comes after "*."
}

type patternKind uint8

const (
	matchNone patternKind = iota
	matchAny
	matchBelow
	matchExact
)

// exactRank is above that of every wildcard.
const exactRank = maxName + 2

// ParsePattern reads a pattern that a person wrote: a host as of [ParseConfigHost],
// "*." before a name for exactly one label more, or "*" for any name, which is no
// address. A wildcard whose names belong to unrelated people, such as *.com or
// *.github.io, is an error. Errors have code [boxed.CodeInvalid].
func ParsePattern(s string) (Pattern, error) {
	if s == "*" {
		return Pattern{kind: matchAny}, nil
	}
	suffix, wildcard := strings.CutPrefix(s, "*.")
	if strings.Contains(suffix, "*") {
		return Pattern{}, boxed.Errorf(boxed.CodeInvalid, `%s is not a pattern: a "*" is alone, or the whole first label`, quoted(s))
	}
	host, err := ParseConfigHost(suffix)
	switch {
	case err != nil:
		return Pattern{}, err
	case !wildcard:
		return Pattern{kind: matchExact, host: host}, nil
	case host.IsAddr():
		return Pattern{}, boxed.Errorf(boxed.CodeInvalid, "%s is not a pattern: addresses have no wildcards", quoted(s))
	case isShared(host.name):
		return Pattern{}, boxed.Errorf(boxed.CodeInvalid, "%s would allow names of anybody, because %s is a public suffix; name the hosts", quoted(s), host)
	case len(host.name) > maxName-2:
		return Pattern{}, boxed.Errorf(boxed.CodeInvalid, "%s is too long to match a name", quoted(s))
	}
	return Pattern{kind: matchBelow, host: host}, nil
}

// isShared reports whether anybody may have a name one label below suffix. It asks of the
// wildcard and not of the suffix: where the list has *.kawasaki.jp, kawasaki.jp by
// itself is no public suffix.
func isShared(suffix string) bool {
	public, _ := publicsuffix.PublicSuffix("*." + suffix)
	return len(public) >= len(suffix)
}

// Match reports whether the pattern names h. Only an exact pattern names an address.
func (p Pattern) Match(h Host) bool {
	switch p.kind {
	case matchExact:
		return p.host == h
	case matchBelow:
		label, rest, found := strings.Cut(h.name, ".")
		return found && label != "" && rest == p.host.name
	case matchAny:
		return h.name != ""
	}
	return false
}

// String is the pattern as [ParsePattern] takes it; "" of the zero Pattern.
func (p Pattern) String() string {
	switch p.kind {
	case matchExact:
		return p.host.String()
	case matchBelow:
		return "*." + p.host.name
	case matchAny:
		return "*"
	}
	return ""
}

// Exact reports whether the pattern names one host.
func (p Pattern) Exact() bool { return p.kind == matchExact }

// Any reports whether the pattern is "*".
func (p Pattern) Any() bool { return p.kind == matchAny }

// Host is the host of an exact pattern, and the zero Host of any other.
func (p Pattern) Host() Host {
	if p.kind == matchExact {
		return p.host
	}
	return Host{}
}

// Rank orders patterns that match one host; the highest decides. An exact pattern is
// above a wildcard, a longer wildcard above a shorter one, and "*" below.
func (p Pattern) Rank() int {
	switch p.kind {
	case matchExact:
		return exactRank
	case matchBelow:
		return 1 + len(p.host.name)
	case matchAny:
		return 1
	}
	return 0
}

func notHost(s, why string) error {
	return boxed.Errorf(boxed.CodeInvalid, "%s is not a host: %s", quoted(s), why)
}

// quoted is s for a message: bounded, and in ASCII, so that look-alikes show.
func quoted(s string) string {
	const most = 80
	if len(s) <= most {
		return strconv.QuoteToASCII(s)
	}
	return strconv.QuoteToASCII(s[:most]) + "…"
}

// lower is strings.ToLower for ASCII only: that maps the Kelvin sign to a "k".
func lower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
