package egress_test

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// EA8: smokescreen#282, srt: a service of the host was reached at the host's own public
// address, and the proxy connected to itself. I16: so are peers' addresses.
func TestOurOwnAddressesAreNeverReached(t *testing.T) {
	var peers atomic.Pointer[[]netip.Prefix]
	r := newRig(t, func(c *rigConfig) {
		c.Judge.Self = func() []netip.Prefix {
			if p := peers.Load(); p != nil {
				return *p
			}
			return nil
		}
	})
	s := r.site("peer.example.com", nil)
	r.names.set("gateway.example.com", at("93.184.216.34", "127.0.0.1"))
	r.names.set("loop.example.com", at("127.0.0.1"))
	b := r.ruled(boxed.EgressRule{Host: "*", Ports: []uint16{443, 3128, 7946}}, boxed.EgressRule{Host: s.addr.String()})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		peers.Store(nil)
		b.must(entry, "peer.example.com", 443).Close()
		// The address is one of ours from now on: a node has joined, an interface has come up.
		peers.Store(&[]netip.Prefix{netip.PrefixFrom(s.addr, 32)})
		b.refusedBy(t, entry, "peer.example.com", 443, boxed.EgressNeverAddress)
		b.refusedBy(t, entry, "peer.example.com", 7946, boxed.EgressNeverAddress)
		b.refusedBy(t, entry, s.addr.String(), 443, boxed.EgressNeverAddress)
		b.refusedBy(t, entry, "loop.example.com", 3128, boxed.EgressNeverAddress)
	})
}

// EA9: suna#6096 (127.0.0.1.nip.io), token-enhancer#4, preflight#143, ProbOS#1285: a name was
// looked up once to be judged and once more to be connected to. Here an attacker's name
// server answers with a public address first and a private one from then on.
func TestANameThatIsRebound(t *testing.T) {
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		r := newRig(t)
		s := r.site("rebind.example.com", nil)
		r.names.set("rebind.example.com", []netip.Addr{s.addr}, at("10.0.0.5"), at("169.254.169.254"), at("::1"))
		b := r.ruled(boxed.EgressRule{Host: "rebind.example.com"})
		conn := b.must(entry, "rebind.example.com", 443)
		defer conn.Close()
		if _, err := b.shake(conn, "rebind.example.com"); err != nil {
			t.Errorf("the judged address is not what was connected to: %v", err)
		}
		for i, reason := range []boxed.EgressReason{boxed.EgressPrivateAddress, boxed.EgressNeverAddress, boxed.EgressNeverAddress} {
			b.refusedBy(t, entry, "rebind.example.com", 443, reason)
			if n := r.names.count("rebind.example.com"); n != i+2 {
				t.Errorf("after %d connections the name was looked up %d times", i+2, n)
			}
		}
		r.world.mu.Lock()
		defer r.world.mu.Unlock()
		if want := netip.AddrPortFrom(s.addr, 443); !slices.Equal(r.world.dialled, []netip.AddrPort{want}) {
			t.Errorf("connections were made to %v, and only %s is public", r.world.dialled, want)
		}
	})
}

// EA9: what the system is about to connect to is judged once more, whatever was judged
// before.
func TestAnAddressIsJudgedAgainAtTheDial(t *testing.T) {
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		r := newRig(t)
		l, err := net.Listen("tcp4", "127.0.0.1:0") // of the host, and none of the world's servers
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		r.names.set("trick.example.com", at("93.184.216.34"))
		r.world.servers[netip.MustParseAddrPort("93.184.216.34:443")] = l.Addr().(*net.TCPAddr).AddrPort()
		b := r.ruled(boxed.EgressRule{Host: "trick.example.com"})
		b.refusedBy(t, entry, "trick.example.com", 443, boxed.EgressNeverAddress)
		l.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Millisecond))
		if conn, err := l.Accept(); err == nil {
			conn.Close()
			t.Error("a connection was made")
		}
	})
}

// EA9: the requests of one kept connection are sent over the connection that was judged;
// each connection more is resolved and judged anew.
func TestEveryConnectionMoreIsJudgedAnew(t *testing.T) {
	r := newRig(t)
	busy := make(chan struct{})
	s := r.site("api.example.com", func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/slow" {
			w.(http.Flusher).Flush()
			<-busy
		}
		io.WriteString(w, "ok")
	}, oldHTTP)
	b := r.ruled(boxed.EgressRule{Host: "api.example.com", Mode: boxed.EgressIntercept})
	c := b.client(boxed.EntryHTTP, "h2")
	for range 3 {
		if a := send(t, c, request(t, "GET", "https://api.example.com/", "")); a.body != "ok" {
			t.Fatalf("the answer is %d %s", a.StatusCode, a.body)
		}
	}
	if n := r.names.count("api.example.com"); n != 1 {
		t.Errorf("one connection was looked up %d times", n)
	}
	slow, err := c.Get("https://api.example.com/slow") // takes the connection
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()
	defer close(busy)
	r.names.set("api.example.com", at("192.168.1.1"))
	send(t, c, request(t, "GET", "https://api.example.com/more", "")).want(t, 403, boxed.EgressPrivateAddress)
	if n := r.names.count("api.example.com"); n != 2 {
		t.Errorf("two connections were looked up %d times", n)
	}
	if n := len(s.requests()); n != 4 {
		t.Errorf("%d requests came", n)
	}
}

// EA12: agent-vault netguard: only the first address was tried, and an IPv6 host that was
// broken took the name with it.
func TestOtherAddressesAreTriedWhenTheFirstIsDead(t *testing.T) {
	silent := netip.MustParseAddr("2606:2800:220:1::1")
	for name, dead := range map[string]func(*rig){
		"refuses": func(*rig) {},
		"silent":  func(r *rig) { r.world.silent[netip.AddrPortFrom(silent, 443)] = true },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, times(func(x *egress.Times) { x.Stagger = 20 * time.Millisecond }))
			dead(r)
			s := r.site("api.example.com", nil)
			r.names.set("api.example.com", []netip.Addr{silent, s.addr})
			b := r.ruled(boxed.EgressRule{Host: "api.example.com"})
			everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
				begun := time.Now()
				conn := b.must(entry, "api.example.com", 443)
				defer conn.Close()
				if took := time.Since(begun); name == "silent" && took < 20*time.Millisecond {
					t.Errorf("the second address was tried after %s, and not a stagger after the first", took)
				}
				if _, err := b.shake(conn, "api.example.com"); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// EA12: four addresses are tried, one after the other, and then it has failed.
func TestFourAddressesAreTried(t *testing.T) {
	t.Parallel()
	r := newRig(t, times(func(x *egress.Times) { x.Stagger, x.Dial = 30*time.Millisecond, time.Second }))
	list := at("198.41.0.1", "198.41.0.2", "198.41.0.3", "198.41.0.4", "198.41.0.5", "198.41.0.6")
	for _, a := range list {
		r.world.silent[netip.AddrPortFrom(a, 443)] = true
	}
	r.names.set("dead.example.com", list)
	b := r.ruled(boxed.EgressRule{Host: "dead.example.com"})
	begun := time.Now()
	if refused := b.refusedBy(t, boxed.EntryHTTP, "dead.example.com", 443, boxed.EgressConnectFailed); refused.Status != 502 {
		t.Errorf("the status is %d", refused.Status)
	}
	if took := time.Since(begun); took < time.Second || took > patience {
		t.Errorf("it took %s, and may take a second", took)
	}
	for i, a := range list {
		if want := map[bool]int{true: 1}[i < 4]; r.world.dials(a) != want {
			t.Errorf("address %d was tried %d times", i+1, r.world.dials(a))
		}
	}
	if _, refused := b.socks("dead.example.com", 443); refused == nil || refused.Code != 5 {
		t.Errorf("SOCKS5 was told %+v", refused)
	}
}

// EA16: docker sbx: an allowed name was not held against the addresses that are denied. One
// bad answer refuses the good ones beside it.
func TestAnAllowedNameAtADeniedAddressIsRefused(t *testing.T) {
	r := newRig(t)
	s := r.site("good.example.com", nil)
	b := r.ruled(boxed.EgressRule{Host: "*.example.com"})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for text, reason := range map[string]boxed.EgressReason{
			"10.0.0.1": boxed.EgressPrivateAddress, "172.31.255.255": boxed.EgressPrivateAddress, "fd00::1": boxed.EgressPrivateAddress,
			"2002:0a00:0001::": boxed.EgressPrivateAddress, "64:ff9b::7f00:1": boxed.EgressNeverAddress,
			"127.0.0.1": boxed.EgressNeverAddress, "::ffff:169.254.169.254": boxed.EgressNeverAddress, "0.0.0.0": boxed.EgressNeverAddress,
			"100.100.100.100": boxed.EgressNeverAddress, "fd7a:115c:a1e0::1": boxed.EgressNeverAddress, "fe80::1": boxed.EgressNeverAddress,
		} {
			r.names.set("mixed.example.com", append([]netip.Addr{s.addr}, at(text)...))
			b.refusedBy(t, entry, "mixed.example.com", 443, reason)
		}
	})
	if n := r.world.dials(s.addr); n != 0 {
		t.Errorf("%d connections were made", n)
	}
}

// EA17: agent-vault#363: a parent proxy made the checks of addresses void. There is none
// here, and one in the node's own environment is not used.
func TestAProxyInTheEnvironmentOfTheNodeIsNotUsed(t *testing.T) {
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"} {
		t.Setenv(name, "http://127.0.0.1:1")
	}
	r := newRig(t)
	r.site("page.example.com", nil, plain)
	r.site("read.example.com", nil)
	b := r.ruled(boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}}, boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept})
	for _, target := range []string{"http://page.example.com/", "https://read.example.com/"} {
		if a := send(t, b.proxied(), request(t, "GET", target, "")); a.StatusCode != 200 {
			t.Errorf("%s: %d %s", target, a.StatusCode, a.body)
		}
	}
}

// What is opened is on the record before a byte has left, and nothing opens that cannot be
// recorded.
func TestNothingOpensThatCannotBeRecorded(t *testing.T) {
	r := newRig(t)
	s := r.site("read.example.com", nil)
	page := r.site("page.example.com", nil, plain)
	tunnel := r.site("tunnel.example.com", nil)
	b := r.ruled(
		boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept}, boxed.EgressRule{Host: "tunnel.example.com"},
		boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}},
	)
	r.records.setFull(true, true)
	send(t, b.proxied(), request(t, "GET", "https://read.example.com/", "")).want(t, 503, boxed.EgressAuditFull)
	send(t, b.proxied(), request(t, "GET", "http://page.example.com/", "")).want(t, 503, boxed.EgressAuditFull)
	if _, err := b.shake(b.must(boxed.EntryHTTP, "tunnel.example.com", 443), "tunnel.example.com"); err == nil {
		t.Error("a tunnel was opened")
	}
	for _, s := range []*site{s, page, tunnel} {
		s.untouched(t)
	}
	// Where it is known before, nobody outside hears of it.
	r.records.setFull(true, false)
	asked, dialled := r.names.count("tunnel.example.com"), r.world.dials(tunnel.addr)
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"read.example.com", "tunnel.example.com"} {
			if n := b.refusedBy(t, entry, host, 443, boxed.EgressAuditFull); entry == boxed.EntryHTTP && n.Status != 503 {
				t.Errorf("it was told %v", n)
			}
		}
	})
	if r.names.count("tunnel.example.com") != asked || r.world.dials(tunnel.addr) != dialled {
		t.Error("what cannot be recorded was looked up, or dialled")
	}
	r.records.setFull(false, false)
	if a := send(t, b.proxied(), request(t, "GET", "https://read.example.com/", "")); a.StatusCode != 200 {
		t.Errorf("with room again it is %d %s", a.StatusCode, a.body)
	}
}
