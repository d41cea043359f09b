package egress_test

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/publicsuffix"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

func host(t testing.TB, s string) egress.Host {
	t.Helper()
	h, err := egress.ParseHost(s)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func pattern(t testing.TB, s string) egress.Pattern {
	t.Helper()
	p, err := egress.ParsePattern(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// refused checks that err is one that a caller may show.
func refused(t testing.TB, s string, err error) {
	t.Helper()
	if !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("%q: %v, want an error of code invalid", s, err)
	}
}

func TestAHostHasOneForm(t *testing.T) {
	long := strings.Repeat("a", 63)
	longest := strings.Repeat(long+".", 3) + strings.Repeat("a", 61)
	for in, want := range map[string]string{
		"example.com": "example.com",
		// EH4; NVIDIA/OpenShell#2201, #2248
		"example.com.": "example.com",
		"127.0.0.1.":   "127.0.0.1",
		longest + ".":  longest,
		// EH5; denoland/clawpatrol#370
		"API.Example.COM":          "api.example.com",
		"XN--BCHER-KVA.example":    "xn--bcher-kva.example",
		"2001:DB8::A":              "2001:db8::a",
		"localhost":                "localhost",
		"_dmarc.example.com":       "_dmarc.example.com",
		"r3---sn-abc.example.com":  "r3---sn-abc.example.com",
		"1password.com":            "1password.com",
		"0.pool.ntp.org":           "0.pool.ntp.org",
		"0x.org":                   "0x.org",
		"127.0.0.1.nip.io":         "127.0.0.1.nip.io",
		long + ".com":              long + ".com",
		"93.184.216.34":            "93.184.216.34",
		"[::1]":                    "::1",
		"::1":                      "::1",
		"[2001:db8:0:0:0:0:0:1]":   "2001:db8::1",
		"::ffff:1.2.3.4":           "1.2.3.4",
		"[::ffff:a9fe:a9fe]":       "169.254.169.254",
		"[0:0:0:0:0:FFFF:1.2.3.4]": "1.2.3.4",
	} {
		h, err := egress.ParseHost(in)
		if err != nil || h.String() != want {
			t.Errorf("%q is %q, %v; want %q", in, h, err, want)
			continue
		}
		addr, err := netip.ParseAddr(want)
		if h.IsAddr() != (err == nil) || h.Addr() != addr {
			t.Errorf("%q: an address %v: %v", in, h.IsAddr(), h.Addr())
		}
		if h != host(t, want) || h == (egress.Host{}) {
			t.Errorf("%q and %q are two hosts", in, want)
		}
	}
}

func TestWhatIsNoHostIsRefused(t *testing.T) {
	long := strings.Repeat("a", 64)
	cases := map[string][]string{
		// golang/go#71984, CVE-2025-22870: a zone is a suffix of one's choice.
		"EH2": {"[::1%25.example.com]", "[::1%.example.com]", "::1%.example.com", "::ffff:1.2.3.4%x.allowed.com", "[::ffff:1.2.3.4%25x.allowed.com]", "fe80::1%eth0", "1.2.3.4%eth0", "a%2eexample.com"},
		// stripe/smokescreen CVE-2022-29188: brackets hid a name from the deny list.
		"EH3": {"[example.com]", "[1.2.3.4]", "[]", "[", "]", "[[::1]]", "[::1", "::1]", "[::1].", "[::1]a", "a[::1]", "[::1]]"},
		// NVIDIA/OpenShell#2248, openclaw#87305: dots that some layers collapse.
		"EH4": {"", ".", "..", "example.com..", ".example.com", "api..example.com", "127.0.0.1..", "::1.", ".."},
		// smokescreen "normalize global lists to ASCII": on the wire there are A-labels only.
		"EH6": {"bücher.example", "１２７.０.０.１", "127。0。0。1", "127．0．0．1", "example｡com", "exampl\u0435.com", "\u212Aelvin.example", "a\u200b.example", "a\xff.example", "１.example"},
		// webfinger.js#160, suna#6096, pipelock#336: what C libraries read as 127.0.0.1.
		"EH8": {"2130706433", "0x7f000001", "0X7F000001", "017700000001", "0177.0.0.1", "127.1", "127.0.1", "0x7f.1", "0x7f.0.0.0x1", "127.0.0.0x1", "010.0.0.1", "127.0.0.01", "00.0.0.0", "0", "0x", "0x7g", "127.0.0.256", "1.2.3.4.5", "example.0x1", "example.123", "127.0.0.1.1.", "4294967296", "08.08.08.08"},
		"characters": {
			"a b", " a", "a ", "a\t", "a\n", "a\r\nHost: b", "a\x00", "a/b", "a\\b", "a?b", "a#b", "a@b", "user@example.com", "a:b", "a,b", "a;b", "a*b", "*", "*.example.com", "a+b", "a'b", `a"b`, "http://a", "a:80", "~", "a=b", "a&b", "$a", "!a",
		},
		"lengths": {long + ".com", strings.Repeat("a.", 126) + "aa", strings.Repeat("a", 300), strings.Repeat("a.", 100_000)},
		"hyphens": {"-", "-a.example", "a-.example", "a.-b", "a.b-", "--help"},
		"colons":  {":", "::1:", "1::2::3", "1:2:3", "::g", "::1/128", "::ffff:010.0.0.1", "::256.0.0.1"},
	}
	for row, list := range cases {
		t.Run(row, func(t *testing.T) {
			for _, s := range list {
				h, err := egress.ParseHost(s)
				refused(t, s, err)
				if h != (egress.Host{}) {
					t.Errorf("%q is %q besides its error", s, h)
				}
				if err != nil && len(err.Error()) > 600 {
					t.Errorf("the error for %.20q… has %d bytes", s, len(err.Error()))
				}
			}
		})
	}
}

// EH6; stripe/smokescreen 2025-09-12: a rule in Unicode matched no request.
func TestInternationalisedNamesAreConvertedInConfigurationOnly(t *testing.T) {
	for in, want := range map[string]string{
		"bücher.example":    "xn--bcher-kva.example",
		"BÜCHER.example.":   "xn--bcher-kva.example",
		"faß.example":       "xn--fa-hia.example",
		"例え.テスト":            "xn--r8jz45g.xn--zckzah",
		"пример.example":    "xn--e1afmkfd.example",
		"plain.example":     "plain.example",
		"_srv.example":      "_srv.example",
		"r3---sn-x.example": "r3---sn-x.example",
		"[::1]":             "::1",
		"10.0.0.1":          "10.0.0.1",
	} {
		if h, err := egress.ParseConfigHost(in); err != nil || h != host(t, want) {
			t.Errorf("%q is %q, %v; want %q", in, h, err, want)
		}
	}
	for _, s := range []string{
		"１２７.０.０.１", "127。0。0。1", "127．0.0.1", "①.example", "ｅxample.com", "example。com", "bücher.example。",
		"bu\u0308cher.example", "a\u00ad.example", "bücher\u200b.example", "ﬁne.example", "℀.example",
		"bü cher.example", "bü/cher.example", "bü%.example", "*.bücher.*", "bü..example", ".bücher", "-ü.example", "ü\x00", "ü\xff.example",
		strings.Repeat("ü", 70) + ".example", "[bücher.example]", "bücher:443", "xn--ü.example", "א1a.example", "０x7f000001", "ü.１",
	} {
		h, err := egress.ParseConfigHost(s)
		refused(t, s, err)
		if h != (egress.Host{}) {
			t.Errorf("%q is %q besides its error", s, h)
		}
	}
	if _, err := egress.ParseConfigHost("ｅxample.com"); err == nil || !strings.Contains(err.Error(), `"example.com"`) {
		t.Errorf("%v does not say what to write", err)
	}
}

// EH7; Skyvern#5920, agent-vault#151: brackets that were not parsed skipped the check.
func TestAnAuthorityIsAHostAndAPort(t *testing.T) {
	for _, c := range []struct {
		in          string
		defaultPort uint16
		host        string
		port        uint16
	}{
		{"example.com:443", 0, "example.com", 443},
		{"example.com", 80, "example.com", 80},
		{"EXAMPLE.com.:8443", 443, "example.com", 8443},
		{"[::1]", 80, "::1", 80},
		{"[::1]:443", 80, "::1", 443},
		{"[::1]:1", 0, "::1", 1},
		{"[::ffff:1.2.3.4]:65535", 0, "1.2.3.4", 65535},
		{"1.2.3.4:443", 0, "1.2.3.4", 443},
		{"1.2.3.4", 443, "1.2.3.4", 443},
	} {
		h, port, err := egress.ParseAuthority(c.in, c.defaultPort)
		if err != nil || h != host(t, c.host) || port != c.port {
			t.Errorf("%q is %q at %d, %v", c.in, h, port, err)
		}
	}
}

// EH3, EH7; stripe/smokescreen CVE-2022-29188, agent-vault#151.
func TestWhatIsNoAuthorityIsRefused(t *testing.T) {
	for _, s := range []string{
		"", ":", ":443", "example.com:", "example.com:0", "example.com:00443", "example.com:0443", "example.com:65536", "example.com:99999999999999999999",
		"example.com:+443", "example.com:-1", "example.com: 443", "example.com :443", " example.com:443", "example.com:443 ", "example.com:443\n", "example.com:4_3", "example.com:0x1bb", "example.com:４４３", "example.com:https",
		"example.com:443/", "example.com:443?", "example.com/:443", "example.com:443:443", "user@example.com:443", "user:pass@example.com:443", "https://example.com:443", "//example.com:443", "example.com#:443", "example.com\\:443",
		"[example.com]", "[example.com]:443", "[1.2.3.4]:443", "[]:443", "[::1", "[::1:443", "::1:443", "::1", "2001:db8::1:443", "[::1]]:443", "[[::1]]:443", "[::1]443", "[::1]:", "[::1]:0", "[::1]:443:443", "[::1].:443", "[::1]x", "a[::1]:443", "[::1%25eth0]:443", "[::1%25.example.com]:443", "::ffff:1.2.3.4%x.allowed.com:443",
		"127.1:443", "0x7f000001:443", "example.com..:443", "bücher.example:443", "*:443",
	} {
		h, port, err := egress.ParseAuthority(s, 443)
		refused(t, s, err)
		if h != (egress.Host{}) || port != 0 {
			t.Errorf("%q is %q at %d besides its error", s, h, port)
		}
	}
	for _, s := range []string{"example.com", "[::1]", "1.2.3.4"} {
		_, _, err := egress.ParseAuthority(s, 0)
		refused(t, s, err)
	}
}

func TestAPatternMatchesWhatItSays(t *testing.T) {
	for _, c := range []struct {
		pattern string
		yes, no []string
	}{
		{"api.example.com", []string{"api.example.com", "API.example.com."}, []string{"example.com", "a.api.example.com", "xapi.example.com", "api.example.com.evil.com"}},
		// EH12; NVIDIA/OpenShell#1304: a wildcard crossed dots.
		{"*.example.com", []string{"a.example.com", "A.EXAMPLE.com.", "_x.example.com"}, []string{"example.com", "a.b.example.com", "xexample.com", "a.example.com.evil.com", "a.example.org"}},
		{"*.Example.com.", []string{"a.example.com"}, []string{"example.com"}},
		{"*.b.example.com", []string{"a.b.example.com"}, []string{"b.example.com", "b.b.b.example.com", "a.c.example.com"}},
		// EH6; stripe/smokescreen 2025-09-12
		{"*.bücher.example", []string{"a.xn--bcher-kva.example"}, []string{"xn--bcher-kva.example", "a.bcher.example"}},
		// No address by a name's pattern; golang/go#71984, CVE-2025-22870.
		{"*", []string{"example.com", "localhost", "a.b.c.d.e"}, []string{"1.2.3.4", "::1", "[::ffff:1.2.3.4]"}},
		{"1.2.3.4", []string{"1.2.3.4", "::ffff:1.2.3.4", "1.2.3.4."}, []string{"1.2.3.5", "::1.2.3.4", "64:ff9b::1.2.3.4", "a.1.2.3.4.example"}},
		{"[2001:DB8::1]", []string{"2001:db8::1", "[2001:db8:0::1]"}, []string{"2001:db8::2"}},
		{"::ffff:1.2.3.4", []string{"1.2.3.4"}, nil},
	} {
		p := pattern(t, c.pattern)
		for _, s := range c.yes {
			if !p.Match(host(t, s)) {
				t.Errorf("%s does not match %s", p, s)
			}
		}
		for _, s := range c.no {
			if p.Match(host(t, s)) {
				t.Errorf("%s matches %s", p, s)
			}
		}
		if p.Match(egress.Host{}) {
			t.Errorf("%s matches no host", p)
		}
		if again := pattern(t, p.String()); again != p {
			t.Errorf("%s read again is %s", p, again)
		}
	}
	for _, s := range []string{"example.com", "1.2.3.4"} {
		if (egress.Pattern{}).Match(host(t, s)) || (egress.Pattern{}).Match(egress.Host{}) {
			t.Errorf("the zero pattern matches %s", s)
		}
	}
}

// EH11; NVIDIA/OpenShell#791, e2b-dev/infra#3501, #3520: *.com was accepted, and then
// matched nothing or everything.
func TestAPatternThatNamesStrangersOrNothingIsRefused(t *testing.T) {
	for _, s := range []string{
		// Below a public suffix of ICANN's, of a company's, below one that is a wildcard
		// itself, and below names that are nobody's.
		"*.com", "*.COM.", "*.co.uk", "*.github.io", "*.blogspot.com", "*.s3.amazonaws.com", "*.appspot.com", "*.kawasaki.jp", "*.foo.kawasaki.jp", "*.ck", "*.foo.ck", "*.internal", "*.localhost", "*.公司.cn", "*.cromulent",
		// Not one whole first label.
		"", "*.", "**", "**.example.com", "*.*.example.com", "*.*", "a.*.example.com", "*a.example.com", "a*.example.com", "example.*", "*example.com", ".example.com", "＊.example.com", "*.＊.example.com",
		// Addresses have none.
		"*.1.2.3.4", "*.2.3.4", "*.::1", "*.[::1]", "[*.example.com]", "1.2.3.*",
		"example.com:443", "https://example.com", "*.example.com/", "10.0.0.0/8", "~.*", "*.0x7f", "*.１.example.com", "*. example.com",
		"*." + strings.Repeat(strings.Repeat("a", 49)+".", 5) + "aa",
	} {
		p, err := egress.ParsePattern(s)
		refused(t, s, err)
		if p != (egress.Pattern{}) {
			t.Errorf("%q is %q besides its error", s, p)
		}
	}
	for _, s := range []string{"github.io", "com", "*.foo.co.uk", "*.me.github.io", "*.www.ck", "*.city.kawasaki.jp", "*.a.b.c.corp", "*.openai.com"} {
		pattern(t, s)
	}
}

func TestPatternsAreRankedByHowMuchTheySay(t *testing.T) {
	ordered := []egress.Pattern{{}, pattern(t, "*"), pattern(t, "*.b.example"), pattern(t, "*.bb.example"), pattern(t, "*."+strings.Repeat(strings.Repeat("a", 62)+".", 3)+strings.Repeat("b", 62)), pattern(t, "a.b")}
	if !slices.IsSortedFunc(ordered, func(a, b egress.Pattern) int { return a.Rank() - b.Rank() }) {
		t.Errorf("out of order: %v", ordered)
	}
	for i := 1; i < len(ordered); i++ {
		if ordered[i].Rank() == ordered[i-1].Rank() {
			t.Errorf("%s and %s have one rank", ordered[i-1], ordered[i])
		}
	}
	if a, b := pattern(t, "a.example"), pattern(t, "1.2.3.4"); a.Rank() != b.Rank() || !a.Exact() || !b.Exact() || a.Any() || b.Host() != host(t, "1.2.3.4") {
		t.Errorf("%s: rank %d; %s: rank %d, host %s", a, a.Rank(), b, b.Rank(), b.Host())
	}
	if p := pattern(t, "*"); !p.Any() || p.Exact() || p.Host() != (egress.Host{}) {
		t.Errorf("%s: any %v, exact %v, host %q", p, p.Any(), p.Exact(), p.Host())
	}
	if p := pattern(t, "*.example.com"); p.Any() || p.Exact() || p.Host() != (egress.Host{}) {
		t.Errorf("%s: any %v, exact %v, host %q", p, p.Any(), p.Exact(), p.Host())
	}
}

// looksLikeAddress is what inet_aton takes, and somewhat more: one to four numbers, each
// decimal, octal or hexadecimal.
func looksLikeAddress(s string) bool {
	parts := strings.Split(strings.ToLower(strings.TrimSuffix(s, ".")), ".")
	for _, p := range parts {
		digits, hex := strings.CutPrefix(p, "0x")
		if hex && strings.Trim(digits, "0123456789abcdef") != "" || !hex && (p == "" || strings.Trim(p, "0123456789") != "") {
			return false
		}
	}
	return len(parts) <= 4
}

// EH2, EH4, EH5, EH8; golang/go#71984, CVE-2025-22870, webfinger.js#160.
func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"example.com", "API.example.com.", "127.0.0.1", "0177.0.0.1", "127.1", "0x7f000001", "2130706433", "[::1]", "::ffff:1.2.3.4", "::1%.example.com", "[::1%25x]", "a..b", "１.2.3.4", "xn--bcher-kva.example", "0x.org", "[example.com]", "1.2.3.4.", "ſ.example", "K.example"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := egress.ParseHost(s)
		upper := strings.Map(func(r rune) rune {
			if 'a' <= r && r <= 'z' {
				return r + 'A' - 'a'
			}
			return r
		}, s)
		if other, otherErr := egress.ParseHost(upper); other != h || (otherErr == nil) != (err == nil) {
			t.Fatalf("%q is %q, and in capitals %q", s, h, other)
		}
		if err != nil {
			refused(t, s, err)
			if h != (egress.Host{}) {
				t.Fatalf("%q is %q besides its error", s, h)
			}
			return
		}
		if again, err := egress.ParseHost(h.String()); err != nil || again != h {
			t.Fatalf("%q is %q, and that %q: %v", s, h, again, err)
		}
		if c, err := egress.ParseConfigHost(s); err != nil || c != h {
			t.Fatalf("%q is %q, and in configuration %q: %v", s, h, c, err)
		}
		plain := strings.TrimSuffix(s, ".")
		if looksLikeAddress(s) && (!h.IsAddr() || plain != h.String()) {
			t.Fatalf("%q is %q, and some libraries read another address", s, h)
		}
		if h.IsAddr() {
			if h.Addr().Zone() != "" || h.Addr().Is4In6() {
				t.Fatalf("%q is %q", s, h)
			}
			return
		}
		_, err = netip.ParseAddr(h.String())
		if err == nil || net.ParseIP(h.String()) != nil || looksLikeAddress(h.String()) || strings.ContainsAny(h.String(), ":[]%") {
			t.Fatalf("%q is the name %q, which is an address", s, h)
		}
		if len(h.String()) > 253 || strings.Contains("."+h.String()+".", "..") {
			t.Fatalf("%q is the name %q", s, h)
		}
	})
}

// EH3, EH7; stripe/smokescreen CVE-2022-29188, Skyvern#5920. What net/url makes of the
// same bytes must be the same host, or nothing.
func FuzzParseAuthority(f *testing.F) {
	for _, s := range []string{"example.com:443", "[::1]", "[::1]:80", "::1:80", "[example.com]:443", "a@b:1", "a:443/", "A.:1", "a:0443", "a:+1", "1.2.3.4:1", "[::1%25a]:1", "a:1:2", "[::ffff:1.2.3.4]:9"} {
		f.Add(s, uint16(0))
		f.Add(s, uint16(443))
	}
	f.Fuzz(func(t *testing.T, s string, defaultPort uint16) {
		h, port, err := egress.ParseAuthority(s, defaultPort)
		if err != nil {
			refused(t, s, err)
			return
		}
		whole := net.JoinHostPort(h.String(), strconv.Itoa(int(port)))
		if again, p, err := egress.ParseAuthority(whole, 0); err != nil || again != h || p != port || p == 0 {
			t.Fatalf("%q is %q at %d, and %q is %q at %d: %v", s, h, port, whole, again, p, err)
		}
		u, err := url.Parse("https://" + s)
		if err != nil {
			t.Fatalf("%q is %q, and no URL: %v", s, h, err)
		}
		name := u.Hostname()
		if strings.Contains(name, ":") {
			name = "[" + name + "]"
		}
		if got := host(t, name); got != h || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
			t.Fatalf("%q is %q, and as a URL %q", s, h, u)
		}
		if p := u.Port(); p != "" && p != strconv.Itoa(int(port)) || p == "" && port != defaultPort {
			t.Fatalf("%q is at %d, and as a URL at %q", s, port, p)
		}
	})
}

// EH6, EH11, EH12; NVIDIA/OpenShell#791, #1304.
func FuzzPattern(f *testing.F) {
	for _, p := range []string{"*", "*.example.com", "example.com", "1.2.3.4", "*.com", "*.bücher.example", "BÜCHER.example", "[::1]", "*.github.io", "１.example", "*.*", "*.ck"} {
		for _, h := range []string{"a.example.com", "example.com", "1.2.3.4", "a.b.example.com", "::1", "xn--bcher-kva.example"} {
			f.Add(p, h)
		}
	}
	f.Fuzz(func(t *testing.T, s, name string) {
		p, err := egress.ParsePattern(s)
		if err != nil {
			refused(t, s, err)
			return
		}
		if again, err := egress.ParsePattern(p.String()); err != nil || again != p {
			t.Fatalf("%q is %q, and that %q: %v", s, p, again, err)
		}
		for i := range len(p.String()) {
			if p.String()[i] >= 0x80 {
				t.Fatalf("%q is %q", s, p)
			}
		}
		suffix, wildcard := strings.CutPrefix(p.String(), "*.")
		if p.Exact() == (wildcard || p.Any()) || p.Exact() && !p.Match(p.Host()) {
			t.Fatalf("%q is %q", s, p)
		}
		if wildcard {
			if public, _ := publicsuffix.PublicSuffix(suffix); public == suffix {
				t.Fatalf("%q is below a public suffix", s)
			}
			if !p.Match(host(t, "a."+suffix)) || p.Match(host(t, suffix)) {
				t.Fatalf("%q does not match what it says", p)
			}
		}
		h, err := egress.ParseHost(name)
		if err != nil || !p.Match(h) {
			return
		}
		label, rest, _ := strings.Cut(h.String(), ".")
		switch {
		case p.Exact() && p.Host() != h,
			!p.Exact() && h.IsAddr(),
			wildcard && (label == "" || rest != suffix):
			t.Fatalf("%q matches %q", p, h)
		}
	})
}
