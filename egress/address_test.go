package egress_test

import (
	"net/netip"
	"strings"
	"testing"

	"code.dny.dev/ssrf"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

func opening(t testing.TB, s string) egress.Opening {
	t.Helper()
	o, err := egress.ParseOpening(s)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// everything opens all addresses for one host and port, by ways that no parser allows.
func everything(h egress.Host) []egress.Opening {
	return []egress.Opening{
		{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Port: 443, Host: h},
		{Prefix: netip.MustParsePrefix("::/0"), Port: 443, Host: h},
		{Prefix: netip.MustParsePrefix("::ffff:0.0.0.0/96"), Port: 443, Host: h},
	}
}

func TestWhatNothingCanOpen(t *testing.T) {
	for _, c := range []struct {
		class string
		addrs []string
	}{
		{"loopback", []string{"127.0.0.1", "127.0.0.53", "127.64.0.1", "127.255.255.255", "::1"}},
		// EA6; NVIDIA/OpenShell#598: 0.0.0.0 is this host.
		{"unspecified", []string{"0.0.0.0", "0.0.0.1", "0.255.255.255", "::"}},
		{"link-local", []string{"169.254.0.1", "169.254.255.255", "fe80::1", "febf:ffff::1"}},
		// EA15: golang's Is* methods know of few of these.
		{"multicast", []string{"224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1", "ff00::"}},
		{"broadcast", []string{"255.255.255.255"}},
		{"cloud metadata", []string{
			"169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.42.42", "169.254.0.23", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.80.8.124",
			"fd00:ec2::254", "fd00:ec2::23", "fd00:ec2::253", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:a9fe:a9fe::1", "fd00:42::42", "fd00:100::100:200",
		}},
		// EA5; smokescreen "fix for denying CGNAT", NVIDIA/OpenShell#819, OmniRoute#11319.
		{"tailnet (100.64.0.0/10)", []string{"100.64.0.0", "100.100.100.100", "100.127.255.255"}},
		{"tailnet (fd7a:115c:a1e0::/48)", []string{"fd7a:115c:a1e0::1", "fd7a:115c:a1e0::53", "fd7a:115c:a1e0:ab12:4843:cd96:6258:b240"}},
		// EA1; CVE-2024-24790, GO-2024-2887, Glyph#177: the form that Is* methods missed.
		{"cloud metadata", []string{"::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "::ffff:168.63.129.16"}},
		{"loopback", []string{"::ffff:127.0.0.1"}},
		{"unspecified", []string{"::ffff:0.0.0.0"}},
		{"tailnet (100.64.0.0/10)", []string{"::ffff:100.64.0.1"}},
		// EA2; smokescreen#277, golang/go#79925, CVE-2026-44430, CVE-2026-45741,
		// CVE-2026-48736: a relay goes on to what a transition address holds.
		{"NAT64 of cloud metadata", []string{"64:ff9b::169.254.169.254", "64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:a9:fe00:808:808", "64:ff9b:1:8a9:fe:a9fe:808:808", "64:ff9b:1:8:a9:fea9:fe08:808"}},
		{"NAT64 of loopback", []string{"64:ff9b::7f00:1", "64:ff9b:1:1::7f00:1", "64:ff9b:1:7f00:0:100:808:808"}},
		{"NAT64 of unspecified", []string{"64:ff9b::", "64:ff9b:1::", "64:ff9b:1:808:8:800::"}},
		{"6to4 of cloud metadata", []string{"2002:a9fe:a9fe::1"}},
		{"6to4 of loopback", []string{"2002:7f00:1::"}},
		{"Teredo of loopback", []string{"2001:0:102:304:0:0:80ff:fffe", "2001:0:7f00:1:0:0:fefd:fcfb"}},
		{"Teredo of cloud metadata", []string{"2001:0:808:808::5601:5601"}},
		// EA3; lionagi#1125
		{"IPv4-compatible of cloud metadata", []string{"::169.254.169.254"}},
		{"IPv4-compatible of unspecified", []string{"::2", "::00ff:ffff"}},
		// EA4; poe-code#619
		{"IPv4-translated of cloud metadata", []string{"::ffff:0:169.254.169.254"}},
		{"IPv4-translated of tailnet (100.64.0.0/10)", []string{"::ffff:0:100.64.0.1"}},
		{"an address with a zone", []string{"fe80::1%eth0", "2606:4700::1%eth0", "::ffff:1.2.3.4%x.example"}},
	} {
		for _, s := range c.addrs {
			addr := netip.MustParseAddr(s)
			h := host(t, "open.example")
			judge := egress.NewJudge(egress.JudgeConfig{Openings: everything(h)})
			if reason, class := judge.Judge(h, netip.AddrPortFrom(addr, 443)); reason != boxed.EgressNeverAddress || class != c.class {
				t.Errorf("%s is %s (%s), want never (%s)", s, reason, class, c.class)
			}
		}
	}
}

func TestWhatOnlyAnOperatorCanOpen(t *testing.T) {
	for _, c := range []struct {
		class string
		addrs []string
	}{
		{"private (RFC 1918)", []string{"10.0.0.0", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "::ffff:10.0.0.1"}},
		{"unique-local", []string{"fc00::1", "fd00::1", "fdff:ffff::1", "fd00:42::43", "fd7a:115c:a1e1::1"}},
		// EA15: nothing that is not the public Internet, whatever Is* methods say of it.
		{"benchmarking", []string{"198.18.0.1", "198.19.255.255", "2001:2::1"}},
		{"documentation", []string{"192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1", "3fff:fff::1"}},
		{"IETF protocol assignment", []string{"192.0.0.1", "192.0.0.170", "2001:1::1", "2001:3::1", "2001:4:112::1", "2001:30::1", "2001:1ff::1"}},
		{"reserved (class E)", []string{"240.0.0.1", "255.255.255.254"}},
		{"6to4 relay", []string{"192.88.99.1"}},
		{"AS112", []string{"192.31.196.1", "192.175.48.1", "2620:4f:8000::1"}},
		{"AMT relay", []string{"192.52.193.1"}},
		{"ORCHID", []string{"2001:10::1", "2001:20::1", "2001:2f:ffff::1"}},
		{"discard-only", []string{"100::1", "100:0:0:1::1"}},
		{"segment routing", []string{"5f00::1"}},
		// EA2; smokescreen#277, go-containerregistry#2448, toolhive#6249, golang/go#79925,
		// GHSA-2r5c-gw76-rh3w: refused outright, not decoded and then allowed.
		{"NAT64", []string{"64:ff9b::8.8.8.8", "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8", "64:ff9b:1:808::10.0.0.1"}},
		{"6to4", []string{"2002:808:808::1", "2002:a00:1::1"}},
		{"Teredo", []string{"2001:0:808:808::f7f7:f7f7"}},
		{"site-local", []string{"fec0::1", "feff::1"}},
		// EA3; lionagi#1125
		{"IPv4-compatible", []string{"::8.8.8.8", "::10.0.0.1"}},
		// EA4; poe-code#619
		{"IPv4-translated", []string{"::ffff:0:8.8.8.8"}},
		// EA2: everything that nobody was ever given.
		{"outside of 2000::/3", []string{"::1:0:0:0", "1::1", "200::1", "1fff::1", "4000::1", "8000::1", "e000::1", "fe00::1", "64:ff9c::1"}},
	} {
		for _, s := range c.addrs {
			h, addr := host(t, "open.example"), netip.MustParseAddr(s)
			shut := egress.NewJudge(egress.JudgeConfig{})
			if reason, class := shut.Judge(h, netip.AddrPortFrom(addr, 443)); reason != boxed.EgressPrivateAddress || class != c.class {
				t.Errorf("%s is %s (%s), want private (%s)", s, reason, class, c.class)
			}
			open := egress.NewJudge(egress.JudgeConfig{Openings: everything(h)})
			if reason, class := open.Judge(h, netip.AddrPortFrom(addr, 443)); reason != boxed.EgressAllowed || class != c.class+", opened by the operator" {
				t.Errorf("%s, opened, is %s (%s)", s, reason, class)
			}
		}
	}
}

func TestThePublicInternetIsAllowed(t *testing.T) {
	judge := egress.NewJudge(egress.JudgeConfig{})
	for _, s := range []string{
		"1.1.1.1", "8.8.8.8", "::ffff:8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0",
		"172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
		"2001:200::1", "2001:4860:4860::8888", "2003::1", "2606:4700:4700::1111", "2a00:1450::1", "3ffe::1",
	} {
		if reason, class := judge.Judge(host(t, "a.example"), netip.AddrPortFrom(netip.MustParseAddr(s), 443)); reason != boxed.EgressAllowed || class != "public" {
			t.Errorf("%s is %s (%s)", s, reason, class)
		}
	}
}

// EA8: its host's public addresses are as much its host as the loopback.
func TestOurOwnAddressesAreNeverAllowed(t *testing.T) {
	self := []netip.Prefix{}
	h := host(t, "open.example")
	judge := egress.NewJudge(egress.JudgeConfig{
		Self:     func() []netip.Prefix { return self },
		Openings: everything(h),
	})
	reason := func(s string) boxed.EgressReason {
		r, class := judge.Judge(h, netip.AddrPortFrom(netip.MustParseAddr(s), 443))
		if r == boxed.EgressNeverAddress && !strings.HasSuffix(class, "this host or the mesh") {
			t.Errorf("%s is %s", s, class)
		}
		return r
	}
	if r := reason("5.6.7.8"); r != boxed.EgressAllowed {
		t.Fatal(r)
	}
	for _, s := range []string{"5.6.7.8/32", "::ffff:5.6.7.8/128", "2606:4700::/32", "10.1.0.0/16"} {
		p, err := egress.ParsePrefixOrAddr(s)
		if err != nil {
			t.Fatal(err)
		}
		self = append(self, p)
	}
	self = append(self, netip.MustParsePrefix("::ffff:5.6.9.0/120")) // as a list of interfaces may have it
	for s, want := range map[string]boxed.EgressReason{
		"5.6.7.8":            boxed.EgressNeverAddress,
		"::ffff:5.6.7.8":     boxed.EgressNeverAddress,
		"64:ff9b::5.6.7.8":   boxed.EgressNeverAddress,
		"2002:506:708::1":    boxed.EgressNeverAddress,
		"::5.6.7.8":          boxed.EgressNeverAddress,
		"::ffff:0:5.6.9.7":   boxed.EgressNeverAddress,
		"5.6.9.77":           boxed.EgressNeverAddress,
		"2606:4700:4700::11": boxed.EgressNeverAddress,
		"10.1.2.3":           boxed.EgressNeverAddress,
		"10.2.2.3":           boxed.EgressAllowed,
		"5.6.7.9":            boxed.EgressAllowed,
		"2607::1":            boxed.EgressAllowed,
	} {
		if got := reason(s); got != want {
			t.Errorf("%s is %s, want %s", s, got, want)
		}
	}
	self = []netip.Prefix{{}}
	if r, class := judge.Judge(h, netip.MustParseAddrPort("5.6.7.8:443")); r != boxed.EgressNeverAddress {
		t.Errorf("with addresses of our own that are not known, it is %s (%s)", r, class)
	}
	self = []netip.Prefix{netip.MustParsePrefix("::/0")}
	if r := reason("5.6.7.8"); r != boxed.EgressNeverAddress {
		t.Errorf("with all addresses our own, it is %s", r)
	}
}

func TestWhatIsNoDestinationIsNeverAllowed(t *testing.T) {
	judge := egress.NewJudge(egress.JudgeConfig{})
	for _, ap := range []netip.AddrPort{{}, netip.AddrPortFrom(netip.Addr{}, 443), netip.AddrPortFrom(netip.MustParseAddr("8.8.8.8"), 0)} {
		if reason, class := judge.Judge(host(t, "a.example"), ap); reason != boxed.EgressNeverAddress || class == "" {
			t.Errorf("%v is %s (%s)", ap, reason, class)
		}
	}
}

func TestAnOpeningIsForOneNameAtOnePort(t *testing.T) {
	judge := egress.NewJudge(egress.JudgeConfig{Openings: []egress.Opening{
		opening(t, "10.1.2.0/24 443 git.corp.example"),
		opening(t, "10.9.0.0/16\t22  10.9.1.1"),
		opening(t, "::ffff:192.168.4.0/120 8443 Bücher.Example."),
		opening(t, "fd12:3456:789a::/48 443 v6.corp.example"),
		opening(t, "64:ff9b::/96 443 legacy.example"),
	}})
	for _, c := range []struct {
		host, addr string
		want       boxed.EgressReason
	}{
		{"git.corp.example", "10.1.2.3:443", boxed.EgressAllowed},
		{"git.corp.example", "[::ffff:10.1.2.3]:443", boxed.EgressAllowed},
		{"git.corp.example", "10.1.2.3:80", boxed.EgressPrivateAddress},
		{"git.corp.example", "10.1.3.3:443", boxed.EgressPrivateAddress},
		{"git.corp.example", "10.9.1.1:22", boxed.EgressPrivateAddress},
		{"git.corp.example", "127.0.0.1:443", boxed.EgressNeverAddress},
		{"other.corp.example", "10.1.2.3:443", boxed.EgressPrivateAddress},
		{"a.git.corp.example", "10.1.2.3:443", boxed.EgressPrivateAddress},
		{"10.1.2.3", "10.1.2.3:443", boxed.EgressPrivateAddress},
		{"10.9.1.1", "10.9.1.1:22", boxed.EgressAllowed},
		{"xn--bcher-kva.example", "192.168.4.1:8443", boxed.EgressAllowed},
		{"v6.corp.example", "[fd12:3456:789a::1]:443", boxed.EgressAllowed},
		{"v6.corp.example", "[fd12:3456:789b::1]:443", boxed.EgressPrivateAddress},
		{"legacy.example", "[64:ff9b::8.8.8.8]:443", boxed.EgressAllowed},
		{"legacy.example", "[64:ff9b::169.254.169.254]:443", boxed.EgressNeverAddress},
	} {
		if got, class := judge.Judge(host(t, c.host), netip.MustParseAddrPort(c.addr)); got != c.want {
			t.Errorf("%s at %s is %s (%s), want %s", c.host, c.addr, got, class, c.want)
		}
	}
	zero := egress.NewJudge(egress.JudgeConfig{Openings: everything(egress.Host{})})
	if got, _ := zero.Judge(egress.Host{}, netip.MustParseAddrPort("10.1.2.3:443")); got != boxed.EgressPrivateAddress {
		t.Errorf("no host at all is %s", got)
	}
}

func TestAnOpeningIsWhatIsWritten(t *testing.T) {
	for in, want := range map[string]string{
		"10.1.2.0/24 443 git.corp.example":       "10.1.2.0/24 443 git.corp.example",
		"  10.1.2.3/32\t22   GIT.corp.example. ": "10.1.2.3/32 22 git.corp.example",
		"::ffff:10.0.0.0/104 1 a":                "10.0.0.0/8 1 a",
		"fd00:42::/112 443 [fd00:42::1]":         "",
		"fd12::/64 443 [fd12::1]":                "fd12::/64 443 fd12::1",
		"10.0.0.0/8 443 ::ffff:10.0.0.1":         "10.0.0.0/8 443 10.0.0.1",
	} {
		o, err := egress.ParseOpening(in)
		if want == "" {
			refused(t, in, err)
			continue
		}
		if err != nil || o.String() != want || opening(t, want) != o {
			t.Errorf("%q is %s, %v", in, o, err)
		}
	}
}

// EA14; NVIDIA/OpenShell net.rs: an allowed range that had a forbidden one in it.
func TestAnOpeningHoldsNothingThatIsNeverAllowed(t *testing.T) {
	for _, prefix := range []string{
		"::ffff:168.0.0.0/103", "168.0.0.0/7", "169.0.0.0/8", "0.0.0.0/0", "::/0", "::ffff:0.0.0.0/96", "::ffff:0:0/95", "::/64", "::/80",
		"127.0.0.0/8", "127.0.0.1/32", "126.0.0.0/7", "0.0.0.0/8", "169.254.0.0/16", "169.254.169.254/32", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32", "100.64.0.0/10", "100.100.0.0/16", "64.0.0.0/2", "168.63.129.16/32", "168.63.128.0/17", "192.0.0.0/24",
		"::ffff:127.0.0.1/128", "::ffff:100.64.0.0/106", "::ffff:169.254.169.254/128", "::ffff:240.0.0.0/100",
		"::1/128", "::/128", "fe80::/10", "fe00::/8", "ff00::/8", "fd7a:115c:a1e0::/48", "fd7a::/16", "fc00::/7", "fd00::/8", "fd00:ec2::/32", "fd20:ce::/64", "fd00:42::42/128",
		"64:ff9b::a9fe:a9fe/128", "::7f00:1/128", "2002:7f00:1::/128", "::ffff:0:127.0.0.1/128", "64:ff9b:1::7f00:1/128",
	} {
		s := prefix + " 443 git.corp.example"
		_, err := egress.ParseOpening(s)
		refused(t, s, err)
		if err != nil && !strings.Contains(err.Error(), "cannot be opened") && !strings.Contains(err.Error(), "bits set") {
			t.Errorf("%s: %v", prefix, err)
		}
	}
}

func TestWhatIsNoOpeningIsRefused(t *testing.T) {
	for _, s := range []string{
		"", "10.0.0.0/8", "10.0.0.0/8 443", "10.0.0.0/8 443 a b", "10.0.0.0/8,443,a",
		"10.1.2.3/24 443 a", "fd12::1/64 443 a", "::ffff:10.0.0.1/104 443 a", // bits after the length
		"10.0.0.1 443 a", "10.0.0.0/33 443 a", "10.0.0.0/08 443 a", "10.0.0.0/-1 443 a", "010.0.0.0/8 443 a", "10.0/8 443 a", "fe80::%eth0/64 443 a", "[fd12::]/64 443 a", "a/8 443 a",
		"10.0.0.0/8 0 a", "10.0.0.0/8 65536 a", "10.0.0.0/8 0443 a", "10.0.0.0/8 +443 a", "10.0.0.0/8 443-444 a", "10.0.0.0/8 * a", "10.0.0.0/8 https a",
		"10.0.0.0/8 443 *", "10.0.0.0/8 443 *.corp.example", "10.0.0.0/8 443 a..b", "10.0.0.0/8 443 a:443", "10.0.0.0/8 443 127.1", "10.0.0.0/8 443 １",
		"10.0.0.0/8 443 11.0.0.1", "10.0.0.0/8 443 127.0.0.1", "10.0.0.0/8 443 [fd12::1]", "10.0.0.0/8 443 ::10.0.0.1",
	} {
		o, err := egress.ParseOpening(s)
		refused(t, s, err)
		if o != (egress.Opening{}) {
			t.Errorf("%q is %s besides its error", s, o)
		}
	}
}

func TestAnEntryOfSelfIsAPrefixOrAnAddress(t *testing.T) {
	for in, want := range map[string]string{
		"5.6.7.8": "5.6.7.8/32", "5.6.7.0/24": "5.6.7.0/24", "2606::1": "2606::1/128", "2606::/32": "2606::/32", "::ffff:5.6.7.8": "5.6.7.8/32", "::ffff:5.6.7.0/120": "5.6.7.0/24", "0.0.0.0/0": "0.0.0.0/0",
	} {
		if p, err := egress.ParsePrefixOrAddr(in); err != nil || p.String() != want {
			t.Errorf("%q is %s, %v", in, p, err)
		}
	}
	for _, s := range []string{"", "/", "a", "example.com", "5.6.7.8/24", "5.6.7", "5.6.7.08", "5.6.7.8/33", "fe80::1%eth0", "fe80::%eth0/64", "[::1]", " 5.6.7.8", "5.6.7.8:443", "::ffff:5.6.7.8%x"} {
		p, err := egress.ParsePrefixOrAddr(s)
		refused(t, s, err)
		if p.IsValid() {
			t.Errorf("%q is %s besides its error", s, p)
		}
	}
}

// EA1, EA2, EA14, EA15; CVE-2024-24790, golang/go#79925. The oracle is a table that others made
// of the same registries.
func FuzzJudge(f *testing.F) {
	for _, s := range []string{"8.8.8.8", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:0:1.2.3.4", "fec0::1", "2001:db8::1", "3fff::1", "255.255.255.255", "2606:4700::1", "fd7a:115c:a1e0::1"} {
		f.Add(netip.MustParseAddr(s).AsSlice(), byte(8))
	}
	f.Fuzz(func(t *testing.T, raw []byte, bits byte) {
		addr, ok := netip.AddrFromSlice(raw)
		if !ok {
			return
		}
		oracle := ssrf.New(ssrf.WithAnyPort(), ssrf.WithAnyNetwork())
		h := host(t, "a.example")
		shut, open := egress.NewJudge(egress.JudgeConfig{}), egress.NewJudge(egress.JudgeConfig{Openings: everything(h)})

		reason, class := shut.Judge(h, netip.AddrPortFrom(addr, 443))
		if err := oracle.SafeAddr(addr.Unmap()); err != nil && reason == boxed.EgressAllowed {
			t.Fatalf("%s is %s (%s), and: %v", addr, reason, class, err)
		}
		mapped := netip.AddrFrom16(addr.As16())
		if r, c := shut.Judge(h, netip.AddrPortFrom(mapped, 443)); r != reason || c != class {
			t.Fatalf("%s is %s (%s), and %s is %s (%s)", addr, reason, class, mapped, r, c)
		}
		opened, _ := open.Judge(h, netip.AddrPortFrom(addr, 443))
		if (opened == boxed.EgressNeverAddress) != (reason == boxed.EgressNeverAddress) || opened == boxed.EgressPrivateAddress {
			t.Fatalf("%s is %s, and with openings %s", addr, reason, opened)
		}
		if _, zoned := shut.Judge(h, netip.AddrPortFrom(addr.WithZone("x"), 443)); addr.Is6() && zoned != "an address with a zone" {
			t.Fatalf("%s with a zone is %s", addr, zoned)
		}

		// Around any address that is never allowed itself there is no opening.
		prefix, err := addr.Prefix(int(bits) % (addr.BitLen() + 1))
		if err != nil {
			t.Fatal(err)
		}
		o, err := egress.ParseOpening(prefix.String() + " 443 a.example")
		if err == nil && reason == boxed.EgressNeverAddress && !strings.Contains(class, " of ") {
			t.Fatalf("%s opens %s, which is %s", o, addr, class)
		}
		if err == nil && o.Prefix.Addr().Is4In6() {
			t.Fatalf("%s is %s", prefix, o)
		}
	})
}
