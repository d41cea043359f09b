package egress_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// What a sandbox learns of names: whether it may connect, and nothing of what is outside.
// EN3: httpjail#53, boundary#108: a resolver carries data out.
func TestANameIsAnsweredByThePolicyAlone(t *testing.T) {
	r := newRig(t, func(c *rigConfig) {
		p, err := egress.ParsePattern("never.example.com")
		if err != nil {
			t.Fatal(err)
		}
		c.Keeper.HostDeny = []egress.Pattern{p}
	})
	r.names.set("api.example.com", at("93.184.216.34"))
	b := r.profiled(boxed.EgressProfile{
		Rules: []boxed.EgressRule{
			{Host: "api.example.com"},
			{Host: "*.cdn.example.com", Ports: []uint16{443, 8443}},
			{Host: "never.example.com"},
			{Host: "no.example.com"},
			{Host: "git.example.com", Ports: []uint16{22}, Raw: true},
			{Host: "git.example.com", Ports: []uint16{443}},
			intercepted("read.example.com"),
			{Host: "93.184.216.34"},
		},
		Deny: []string{"no.example.com"},
	})
	const (
		ok, failed, noName, refused = 0, 2, 3, 5
		a, aaaa, txt, https, svcb   = 1, 28, 16, 65, 64
	)
	for _, c := range []struct {
		host   string
		kind   uint16
		code   int
		ports  []uint16
		reason boxed.EgressReason
	}{
		{"api.example.com", a, ok, []uint16{443}, ""},
		{"API.Example.com.", a, ok, []uint16{443}, ""},
		{"x.cdn.example.com", a, ok, []uint16{443, 8443}, ""},
		{"git.example.com", a, ok, []uint16{22, 443}, ""},
		{"read.example.com", a, ok, []uint16{443}, ""},
		// Whose types have no data inside, and are answered at once: the agent's business.
		{"api.example.com", aaaa, ok, []uint16{443}, ""},
		{"api.example.com", https, ok, []uint16{443}, ""},
		{"api.example.com", svcb, ok, []uint16{443}, ""},
		{"api.example.com", txt, ok, []uint16{443}, ""},
		{"other.example.com", a, noName, nil, boxed.EgressNotListed},
		{"other.example.com", txt, noName, nil, boxed.EgressNotListed},
		{"data-that-is-to-leave.attacker.example", a, noName, nil, boxed.EgressNotListed},
		{"a.b.cdn.example.com", a, noName, nil, boxed.EgressNotListed},
		{"no.example.com", a, noName, nil, boxed.EgressListDenied},
		{"never.example.com", a, noName, nil, boxed.EgressHostDenied},
		{"93.184.216.34", a, noName, nil, boxed.EgressInvalidName},
		{"::1", a, noName, nil, boxed.EgressInvalidName},
		{"127.1", a, noName, nil, boxed.EgressInvalidName},
		{"a..b", a, noName, nil, boxed.EgressInvalidName},
		{"", a, noName, nil, boxed.EgressInvalidName},
		{"api.example.com", 255, refused, nil, boxed.EgressBadQuery}, // ANY
		{"api.example.com", 252, refused, nil, boxed.EgressBadQuery}, // AXFR
		{"api.example.com", 251, refused, nil, boxed.EgressBadQuery}, // IXFR
		{"api.example.com", 41, refused, nil, boxed.EgressBadQuery},  // OPT
	} {
		code, ports := r.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: c.host, Type: c.kind})
		slices.Sort(ports)
		if code != c.code || !slices.Equal(ports, c.ports) {
			t.Errorf("%s type %d is answered with %d %v", c.host, c.kind, code, ports)
		}
		rec := r.records.denied(b.id)
		if c.reason != "" && (rec.Reason != c.reason || rec.Entry != boxed.EntryDNS) {
			t.Errorf("%s type %d is on the record for %s by %s", c.host, c.kind, rec.Reason, rec.Entry)
		}
	}
	if code, ports := r.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "api.example.com", Type: a, Full: true}); code != failed || ports != nil {
		t.Errorf("without an address left it is %d %v", code, ports)
	}
	if rec := r.records.denied(b.id); rec.Reason != boxed.EgressNames {
		t.Errorf("it is on the record for %s", rec.Reason)
	}
	r.names.mu.Lock()
	defer r.names.mu.Unlock()
	if len(r.names.asked) > 0 {
		t.Errorf("names were looked up outside: %v", r.names.asked)
	}
}

// Where the owner is asked, a name that nobody has listed has an address, so that the
// connection can be asked about; one that is denied has none.
func TestANameThatIsAskedAbout(t *testing.T) {
	var mu sync.Mutex
	var asked []egress.Question
	answer := true
	ask := newRig(t, func(c *rigConfig) {
		c.Proxy.Ask = func(_ context.Context, q egress.Question) bool {
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, q)
			return answer
		}
	})
	ask.server("new.example.com", 22, echo)
	b := ask.profiled(boxed.EgressProfile{Rules: []boxed.EgressRule{{Host: "api.example.com"}}, Deny: []string{"no.example.com"}, OnDeny: boxed.DenyAsk})
	code, ports := ask.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "new.example.com", Type: 1})
	if code != 0 || len(ports) == 0 {
		t.Errorf("it is answered with %d %v", code, ports)
	}
	if code, _ := ask.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "no.example.com", Type: 1}); code != 3 {
		t.Errorf("what is denied is answered with %d", code)
	}
	full := boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "new.example.com", Type: 1, Full: true}
	if code, _ := ask.proxy.Resolve(b.id, full); code != 2 || ask.records.denied(b.id).Reason != boxed.EgressNames {
		t.Errorf("without an address left it is answered with %d, and on the record is %s", code, ask.records.denied(b.id).Reason)
	}
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		asked = nil
		// The answer alone lets nothing through: the policy does, which it has changed.
		b.refusedBy(t, entry, "new.example.com", 22, boxed.EgressNotListed)
		answer = false
		b.refusedBy(t, entry, "new.example.com", 22, boxed.EgressNotAnswered)
		b.refusedBy(t, entry, "no.example.com", 443, boxed.EgressListDenied)
		answer = true
		want := egress.Question{Sandbox: b.id, Owner: rigOwner, Host: "new.example.com", Port: 22}
		if len(asked) != 2 || asked[0] != want || asked[1] != want {
			t.Errorf("asked was %+v", asked)
		}
	})
}

// nameServer answers queries on loopback as zone says; a name that is not there does not
// exist.
func nameServer(t *testing.T, zone map[string][]netip.Addr) (netip.AddrPort, func() []string) {
	t.Helper()
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var asked []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			name := q.Name.String()
			mu.Lock()
			asked = append(asked, name+" "+q.Type.String())
			mu.Unlock()
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			addrs, ok := zone[strings.TrimSuffix(name, ".")]
			if !ok {
				m.RCode = dnsmessage.RCodeNameError
			}
			if strings.HasPrefix(name, "broken.") {
				m.RCode = dnsmessage.RCodeServerFailure
			}
			for _, a := range addrs {
				h := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60}
				if a.Is4() && q.Type == dnsmessage.TypeA {
					m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
				}
				if a.Is6() && q.Type == dnsmessage.TypeAAAA {
					m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
				}
			}
			if raw, err := m.Pack(); err == nil {
				conn.WriteTo(raw, from)
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return conn.LocalAddr().(*net.UDPAddr).AddrPort(), func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(asked)
	}
}

// Names are looked up at the servers that were configured, as they are: complete, without a
// search list, and without forms of addresses that only a C library knows.
func TestNamesAreLookedUpAtTheConfiguredServers(t *testing.T) {
	server, asked := nameServer(t, map[string][]netip.Addr{
		"api.example.com": at("93.184.216.34", "2606:2800:220:1::1"), "empty.example.com": nil, "mapped.example.com": at("93.184.216.35"), "host": at("93.184.216.36"),
	})
	u, err := egress.NewUpstreams([]netip.AddrPort{server})
	if err != nil {
		t.Fatal(err)
	}
	got, err := u.Resolve(t.Context(), "api.example.com")
	slices.SortFunc(got, netip.Addr.Compare)
	if err != nil || len(got) != 2 || got[0].Unmap() != at("93.184.216.34")[0] || got[1] != at("2606:2800:220:1::1")[0] {
		t.Errorf("the addresses are %v, %v", got, err)
	}
	if got, err := u.Resolve(t.Context(), "host"); err != nil || len(got) != 1 {
		t.Errorf("a name of one label is %v, %v", got, err)
	}
	var missing *net.DNSError
	for name, notFound := range map[string]bool{"gone.example.com": true, "empty.example.com": true, "broken.example.com": false} {
		if got, err := u.Resolve(t.Context(), name); !errors.As(err, &missing) || missing.IsNotFound != notFound {
			t.Errorf("%s is %v, %v", name, got, err)
		}
	}
	for _, q := range asked() {
		if name, _, _ := strings.Cut(q, " "); strings.Count(name, ".") > 3 || !strings.HasSuffix(name, ".") {
			t.Errorf("asked was for %s: a search list was used", q)
		}
	}
	if _, err := egress.NewUpstreams(nil); err == nil {
		t.Error("no servers are enough")
	}
}

// A name server that does not answer is a refusal that says so.
func TestANameThatCannotBeLookedUp(t *testing.T) {
	server, _ := nameServer(t, nil)
	u, err := egress.NewUpstreams([]netip.AddrPort{server})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *rigConfig) { c.Proxy.Resolver = u })
	b := r.ruled(boxed.EgressRule{Host: "*.example.com"})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		if n := b.refusedBy(t, entry, "gone.example.com", 443, boxed.EgressNoAddress); entry == boxed.EntryHTTP && n.Status != 502 || entry == boxed.EntrySOCKS5 && n.Code != 4 {
			t.Errorf("it was told %v", n)
		}
		if n := b.refusedBy(t, entry, "broken.example.com", 443, boxed.EgressResolveFailed); entry == boxed.EntryHTTP && n.Status != 502 || entry == boxed.EntrySOCKS5 && n.Code != 4 {
			t.Errorf("it was told %v", n)
		}
	})
}

// The system's servers are those of its file, but for the one that knows the tailnet.
func TestTheServersOfTheSystem(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	text := "# comment\nsearch corp.example\nnameserver 100.100.100.100\nnameserver 9.9.9.9\nnameserver  2620:fe::fe # x\noptions ndots:5\nnameserver\nnameserver x\nNameserver 1.1.1.1\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := egress.SystemServers(path)
	want := []netip.AddrPort{netip.MustParseAddrPort("9.9.9.9:53"), netip.MustParseAddrPort("[2620:fe::fe]:53")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("they are %v, %v", got, err)
	}
	if _, err := egress.SystemServers(path + "x"); err == nil {
		t.Error("a file that is not there has servers")
	}
}
