package egress_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// EH13: srt#274, #426: a host that was allowed could be reached on every port.
func TestAHostIsAllowedOnThePortsOfItsRuleOnly(t *testing.T) {
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		r := newRig(t)
		addr := r.server("ssh.example.com", 443, echo)
		b := r.ruled(boxed.EgressRule{Host: "ssh.example.com"}, boxed.EgressRule{Host: "two.example.com", Ports: []uint16{8443, 9443}})
		conn, refused := b.connect(entry, "ssh.example.com", 443)
		if refused != nil {
			t.Fatal(refused)
		}
		conn.Close()
		for _, port := range []uint16{1, 22, 80, 444, 8443, 65535} {
			b.refusedBy(t, entry, "ssh.example.com", port, boxed.EgressPort)
		}
		b.refusedBy(t, entry, "two.example.com", 443, boxed.EgressPort)
		if n := r.world.dials(addr); n != 1 {
			t.Errorf("%d connections were made, one was allowed", n)
		}
	})
}

// plainly asks for a page without TLS, in absolute form.
func (b *box) plainly(t testing.TB, host string, port uint16) boxed.EgressReason {
	t.Helper()
	target := "http://" + host
	if port != 80 {
		target += fmt.Sprintf(":%d", port)
	}
	a := raw(t, b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil), "GET "+target+"/ HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
	if a.StatusCode == 400 && a.reason == "" { // net/http's own: it is no URL
		return boxed.EgressInvalidName
	}
	return a.reason
}

// EH14: claude-code#40213, OpenShell#339, #666: plain HTTP went by a path of its own, without
// the checks that CONNECT had.
func TestEveryEntryPassesTheSameChecks(t *testing.T) {
	r := newRig(t, func(c *rigConfig) {
		pattern, err := egress.ParsePattern("tracker.example.com")
		if err != nil {
			t.Fatal(err)
		}
		c.Keeper.HostDeny = []egress.Pattern{pattern}
	})
	for name, addr := range map[string]string{
		"private.example.com": "10.1.2.3", "meta.example.com": "169.254.169.254", "mapped.example.com": "::ffff:127.0.0.1",
		"tailnet.example.com": "100.64.0.7", "shared.example.com": "192.168.0.1", "nat64.example.com": "64:ff9b::a00:1",
	} {
		r.names.set(name, at(addr))
	}
	b := r.profiled(boxed.EgressProfile{
		Rules: []boxed.EgressRule{
			{Host: "*.example.com", Ports: []uint16{80, 443}},
			{Host: "169.254.169.254", Ports: []uint16{80, 443}},
			{Host: "127.0.0.1", Ports: []uint16{80, 443}},
			{Host: "::1", Ports: []uint16{80, 443}},
			{Host: "10.0.0.1", Ports: []uint16{80, 443}},
		},
		Deny: []string{"pastebin.example.com"},
	})
	for _, c := range []struct {
		host   string
		reason boxed.EgressReason
	}{
		{"other.example.org", boxed.EgressNotListed},
		{"a.b.example.com", boxed.EgressNotListed},
		{"example.com", boxed.EgressNotListed},
		{"xexample.com", boxed.EgressNotListed},
		{"93.184.216.34", boxed.EgressNotListed},
		{"pastebin.example.com", boxed.EgressListDenied},
		{"PasteBin.Example.COM", boxed.EgressListDenied},
		{"tracker.example.com", boxed.EgressHostDenied},
		{"gone.example.com", boxed.EgressNoAddress},
		{"private.example.com", boxed.EgressPrivateAddress},
		{"shared.example.com", boxed.EgressPrivateAddress},
		{"nat64.example.com", boxed.EgressPrivateAddress},
		{"meta.example.com", boxed.EgressNeverAddress},
		{"mapped.example.com", boxed.EgressNeverAddress},
		{"tailnet.example.com", boxed.EgressNeverAddress},
		{"169.254.169.254", boxed.EgressNeverAddress},
		{"127.0.0.1", boxed.EgressNeverAddress},
		{"[::1]", boxed.EgressNeverAddress},
		{"10.0.0.1", boxed.EgressPrivateAddress},
		{"2130706433", boxed.EgressInvalidName},
		{"0x7f000001", boxed.EgressInvalidName},
		{"127.1", boxed.EgressInvalidName},
		{"0177.0.0.1", boxed.EgressInvalidName},
		{"two..dots.example.com", boxed.EgressInvalidName},
		{"exa mple.com", boxed.EgressInvalidName},
		{"[example.com]", boxed.EgressInvalidName},
		{"[::1%25.example.com]", boxed.EgressInvalidName},
	} {
		t.Run(c.host, func(t *testing.T) {
			for _, port := range []uint16{80, 443} {
				for _, entry := range entries {
					switch {
					case entry == boxed.EntryHTTP && strings.HasPrefix(c.host, "["):
						// What is no authority at all is refused before it is a request.
						if _, refused := b.tunnel(c.host+":443", nil); refused == nil || refused.Reason != c.reason && refused.Status != 400 {
							t.Errorf("CONNECT: %v", refused)
						}
						continue
					case entry == boxed.EntryHTTP && strings.Contains(c.host, " "): // no request at all
						continue
					}
					host := c.host
					if host == "[::1]" && entry == boxed.EntrySOCKS5 {
						host = "::1"
					}
					b.refusedBy(t, entry, host, port, c.reason)
				}
			}
			if strings.Contains(c.host, " ") || strings.Contains(c.host, "%") {
				return
			}
			if got := b.plainly(t, c.host, 80); got != c.reason {
				t.Errorf("plain HTTP was refused for %q, not for %q", got, c.reason)
			}
		})
	}
	r.world.mu.Lock()
	defer r.world.mu.Unlock()
	if len(r.world.dialled) > 0 {
		t.Errorf("connections were made to %v", r.world.dialled)
	}
}

// EH14, EP6: iron-proxy#78, #195: what is not configured yet served all.
func TestASandboxWithoutEgressReachesNothing(t *testing.T) {
	r := newRig(t)
	r.site("api.example.com", nil)
	stranger := &box{r: r, id: "stranger00-" + boxed.ID(rigNode)}
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		if conn, refused := stranger.connect(entry, "api.example.com", 443); refused == nil {
			conn.Close()
			t.Error("a connection was made")
		}
	})
	if code, ports := r.proxy.Resolve(stranger.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "api.example.com", Type: 1}); code == 0 || ports != nil {
		t.Errorf("the name was answered: %d %v", code, ports)
	}
	if n := r.names.count("api.example.com"); n != 0 {
		t.Errorf("it was looked up %d times", n)
	}
}

// EH14: a plain page needs a rule that names port 80, and nothing that is intercepted is
// served without TLS.
func TestPlainHTTPNeedsARuleForPort80(t *testing.T) {
	r := newRig(t)
	page := r.site("plain.example.com", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }, plain)
	odd := r.site("odd.example.com", nil, plain, func(c *siteConfig) { c.Port = 8080 })
	both := r.site("both.example.com", nil, plain)
	b := r.ruled(
		boxed.EgressRule{Host: "plain.example.com", Ports: []uint16{80}},
		boxed.EgressRule{Host: "odd.example.com", Ports: []uint16{8080}},
		boxed.EgressRule{Host: "both.example.com", Mode: boxed.EgressIntercept, Ports: []uint16{80, 443}},
		boxed.EgressRule{Host: "secure.example.com"},
	)
	if a := send(t, b.proxied(), request(t, "GET", "http://plain.example.com/", "")); a.StatusCode != 200 || a.body != "hello" {
		t.Errorf("the page is %d %q", a.StatusCode, a.body)
	}
	for _, entry := range entries {
		conn := b.must(entry, "plain.example.com", 80)
		if a := raw(t, conn, "GET /by HTTP/1.1\r\nHost: plain.example.com\r\n\r\n"); a.StatusCode != 200 || a.body != "hello" {
			t.Errorf("by %s the page is %d %q", entry, a.StatusCode, a.body)
		}
	}
	if n := len(page.requests()); n != 4 {
		t.Errorf("%d pages were asked for, not 4", n)
	}
	for target, reason := range map[string]boxed.EgressReason{
		"http://odd.example.com:8080/": boxed.EgressPlainHTTP, "http://both.example.com/": boxed.EgressPlainHTTP,
		"http://secure.example.com/": boxed.EgressPort, "http://plain.example.com:443/": boxed.EgressPort,
	} {
		if a := send(t, b.proxied(), request(t, "GET", target, "")); a.reason != reason {
			t.Errorf("%s was refused for %q, and is to be for %q", target, a.reason, reason)
		}
	}
	odd.untouched(t)
	both.untouched(t)
}

// EH16: docker/sbx-releases#224: a transparent gateway connected anew to whatever the payload
// named. EA10: E2B#1652: the address that the sandbox gave was trusted, since the name in the
// ClientHello was allowed.
func TestTheNameOfASyntheticAddressDecides(t *testing.T) {
	r := newRig(t)
	good := r.site("good.example.com", nil)
	evil := r.site("evil.example.com", nil)
	page := r.site("page.example.com", nil, plain)
	read := r.site("read.example.com", nil)
	b := r.ruled(
		boxed.EgressRule{Host: "good.example.com"}, boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}},
		boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept},
	)
	t.Run("tunnel", func(t *testing.T) {
		if _, err := b.shake(b.must(boxed.EntryName, "good.example.com", 443), "evil.example.com"); err == nil {
			t.Error("the handshake for another name went through")
		}
		if rec := r.records.denied(b.id); rec.Reason != boxed.EgressSNI || rec.SNI != "evil.example.com" || rec.Host != "good.example.com" {
			t.Errorf("the record is %+v", rec)
		}
	})
	t.Run("plain", func(t *testing.T) {
		conn := b.must(boxed.EntryName, "page.example.com", 80)
		raw(t, conn, "GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n").want(t, 421, boxed.EgressHost)
	})
	t.Run("intercepted", func(t *testing.T) {
		conn := b.secure(boxed.EntryName, "read.example.com")
		raw(t, conn, "GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n").want(t, 421, boxed.EgressHost)
	})
	t.Run("our own answer is what is connected to", func(t *testing.T) {
		if a := send(t, b.client(boxed.EntryName, "http/1.1"), request(t, "GET", "https://good.example.com/", "")); a.StatusCode != 200 {
			t.Errorf("the answer is %d", a.StatusCode)
		}
		if r.names.count("good.example.com") == 0 || r.world.dials(good.addr) == 0 {
			t.Error("the name was not looked up here")
		}
	})
	if r.names.count("evil.example.com")+r.world.dials(evil.addr) != 0 {
		t.Error("what the payload named was looked up, or connected to")
	}
	page.untouched(t)
	read.untouched(t)
}

// EN8: docker/sbx-releases#577: the proxy's port served the host's own control endpoint too.
func TestTheProxyServesNothingButProxying(t *testing.T) {
	r := newRig(t)
	b := r.ruled(boxed.EgressRule{Host: "*", Ports: []uint16{80, 443}})
	for _, text := range []string{
		"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET /_sbx/browser-open?url=x HTTP/1.1\r\nHost: 127.0.0.1:3128\r\n\r\n",
		"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"GET /ca.pem HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"GET https://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET HTTPS://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET ftp://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET file:///etc/passwd HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET unix:/var/run/docker.sock HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
	} {
		line, _, _ := strings.Cut(text, "\r\n")
		t.Run(line, func(t *testing.T) {
			conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
			if a := raw(t, conn, text); a.StatusCode != 400 {
				t.Errorf("the answer is %d %s", a.StatusCode, a.body)
			}
		})
	}
}

// EP9: OpenShell#128: the list of what the control plane needs let sandboxes past the policy.
// EN9: mitmproxy CVE-2025-23217: the proxy's own interface was reached through the proxy.
func TestNothingIsAllowedThatNobodyWrote(t *testing.T) {
	r := newRig(t)
	r.names.set("localhost", at("127.0.0.1"))
	b := r.ruled([]boxed.EgressRule{}...)
	open := r.ruled(boxed.EgressRule{Host: "*", Ports: []uint16{80, 443, 1080, 3128, 8080}})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, host := range []string{"localhost", "127.0.0.1", "api.anthropic.com", "github.com", "boxed.invalid", string(rigNode), "host.docker.internal"} {
			b.refusedBy(t, entry, host, 443, boxed.EgressNotListed)
		}
		open.refusedBy(t, entry, "localhost", 3128, boxed.EgressNeverAddress)
		open.refusedBy(t, entry, "127.0.0.1", 3128, boxed.EgressNotListed)
	})
}

// A refusal says why, and what to do, before a CONNECT is answered with yes.
func TestARefusalIsReadable(t *testing.T) {
	r := newRig(t)
	b := r.ruled(boxed.EgressRule{Host: "api.example.com"})
	_, refused := b.tunnel("other.example.com:443", nil)
	want := egress.Denied{Error: "egress_denied", Reason: boxed.EgressNotListed, Host: "other.example.com", Hint: "to allow it: boxedctl egress allow SANDBOX other.example.com"}
	if refused == nil || refused.Status != 403 || refused.Denied != want {
		t.Errorf("the refusal is %+v", refused)
	}
	_, refused = b.socks("other.example.com", 443)
	if refused == nil || refused.Code != 2 {
		t.Errorf("SOCKS5 was told %+v, not 2 (not allowed)", refused)
	}
}
