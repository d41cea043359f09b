package egress_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

const otherNode = boxed.NodeID("bbbbbbbbbbbbbbbb")

// twoNodes are a sandbox's node and another, which connects for it.
func twoNodes(t *testing.T, changes ...func(*rigConfig)) (here, there *rig, away *atomic.Bool) {
	t.Helper()
	away = new(atomic.Bool)
	there = newRig(t, append([]func(*rigConfig){func(c *rigConfig) {
		c.Proxy.Node, c.Keeper.Node = otherNode, otherNode
		c.Keeper.Exits = []egress.ExitRule{{Node: string(rigNode), Profile: "out"}}
	}}, changes...)...)
	here = newRig(t, func(c *rigConfig) {
		c.Proxy.Relay = func(ctx context.Context, to boxed.NodeID, owner string, r boxed.EgressRelay) (net.Conn, error) {
			if away.Load() || to != otherNode {
				return nil, errors.New("there is no way to it")
			}
			return there.keeper.Foreign(ctx, rigNode, owner, r)
		}
	})
	// Its world is not the other's: whoever connects from here has nobody to connect to.
	return here, there, away
}

// A profile may leave by another node, which resolves, judges and connects with what it has
// itself.
func TestAnExitConnectsForAnotherNode(t *testing.T) {
	here, there, away := twoNodes(t)
	there.server("raw.example.com", 22, echo)
	there.site("read.example.com", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })
	there.names.set("private.example.com", at("10.0.0.1"))
	there.names.set("self.example.com", at("127.0.0.1"))
	rules := []boxed.EgressRule{rawRule("raw.example.com"), intercepted("read.example.com"), {Host: "private.example.com"}, {Host: "self.example.com"}, {Host: "only-here.example.com"}}
	here.profile(boxed.EgressProfile{Name: "out", Exit: otherNode, Rules: rules})
	here.profile(boxed.EgressProfile{Name: "other", Exit: otherNode, Rules: rules})
	there.profile(boxed.EgressProfile{Name: "out", Rules: rules[:4]})
	b := here.box(boxed.EgressSpec{Profile: "out"})
	other := here.box(boxed.EgressSpec{Profile: "other"})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		conn := b.must(entry, "raw.example.com", 22).(halfConn)
		if !alive(conn) {
			t.Error("nothing comes back")
		}
		conn.CloseWrite()
		io.ReadAll(conn)
		conn.Close()
		for _, proto := range []string{"h2", "http/1.1"} {
			if a := send(t, b.client(entry, proto), request(t, "GET", "https://read.example.com/", "")); a.body != "hello" {
				t.Errorf("%d %s", a.StatusCode, a.body)
			}
		}
		b.refusedBy(t, entry, "private.example.com", 443, boxed.EgressPrivateAddress)
		b.refusedBy(t, entry, "self.example.com", 443, boxed.EgressNeverAddress)
		b.refusedBy(t, entry, "only-here.example.com", 443, boxed.EgressNotListed)
		other.refusedBy(t, entry, "raw.example.com", 22, boxed.EgressNotListed) // it is no exit for that profile
		away.Store(true)
		if n := b.refusedBy(t, entry, "raw.example.com", 22, boxed.EgressExitAway); entry == boxed.EntryHTTP && n.Status != 503 {
			t.Errorf("it was told %v", n)
		}
		away.Store(false)
	})
	here.names.mu.Lock()
	defer here.names.mu.Unlock()
	if len(here.names.asked) > 0 {
		t.Errorf("names were looked up here: %v", here.names.asked)
	}
	for where, r := range map[string]*rig{"here": here, "there": there} {
		if recs := r.records.of(func(rec boxed.EgressRecord) bool {
			return isOpened(rec) && rec.Sandbox == b.id && rec.Host == "raw.example.com"
		}); len(recs) != len(entries) {
			t.Errorf("%s %d tunnels are on the record", where, len(recs))
		} else if want := map[string]boxed.NodeID{"here": otherNode}[where]; recs[0].Exit != want || recs[0].Owner != rigOwner {
			t.Errorf("%s the record is %+v", where, recs[0])
		}
	}
}

// I16: an exit's LAN is not for others, also where it is open for the exit's own; and no exit
// goes by a further one.
func TestAnExitsPrivateNetworkIsItsOwn(t *testing.T) {
	for _, private := range []bool{false, true} {
		var lan netip.AddrPort
		here, there, _ := twoNodes(t, func(c *rigConfig) {
			o, err := egress.ParseOpening("10.1.2.3/32 22 lan.example.com")
			if err != nil {
				t.Fatal(err)
			}
			c.Judge.Openings = []egress.Opening{o}
			c.Keeper.Exits[0].Private = private
		})
		addr := there.server("lan.example.com", 22, echo)
		lan = netip.MustParseAddrPort("10.1.2.3:22")
		there.world.servers[lan] = there.world.servers[netip.AddrPortFrom(addr, 22)]
		there.names.set("lan.example.com", []netip.Addr{lan.Addr()})
		here.profile(boxed.EgressProfile{Name: "out", Exit: otherNode, Rules: []boxed.EgressRule{rawRule("lan.example.com")}})
		there.profile(boxed.EgressProfile{Name: "out", Exit: rigNode, Rules: []boxed.EgressRule{rawRule("lan.example.com")}})
		there.profile(boxed.EgressProfile{Name: "own", Rules: []boxed.EgressRule{rawRule("lan.example.com")}})
		b, own := here.box(boxed.EgressSpec{Profile: "out"}), there.box(boxed.EgressSpec{Profile: "own"})
		everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
			conn := own.must(entry, "lan.example.com", 22)
			if !alive(conn) {
				t.Error("the exit's own sandbox does not reach it")
			}
			conn.Close()
			if !private {
				b.refusedBy(t, entry, "lan.example.com", 22, boxed.EgressPrivateAddress)
				return
			}
			conn = b.must(entry, "lan.example.com", 22)
			if !alive(conn) {
				t.Error("it is opened for others, and they do not reach it")
			}
			conn.Close()
		})
	}
}

// A secret that one node holds is used by it for the others, and never leaves it.
func TestAHolderUsesASecretForAnotherNode(t *testing.T) {
	here, there, away := twoNodes(t)
	s := there.site("api.anthropic.com", func(w http.ResponseWriter, req *http.Request) {
		io.Copy(io.Discard, req.Body)
		w.Header().Set("X-Echo", req.Header.Get("X-Api-Key"))
		w.Header().Set("Set-Cookie", "session=1")
		io.WriteString(w, "ok")
	})
	secret := boxed.Secret{Name: "anthropic", Preset: "anthropic", Owner: rigOwner, HeldBy: otherNode}
	there.secret(secret, realAnthropic)
	here.secret(secret, "") // it is known of here, and not what it is
	here.records.hide(realAnthropic)
	b := here.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "anthropic"}}})
	key := b.token("ANTHROPIC_API_KEY")
	there.records.hide(key)
	readers(t, b, func(t *testing.T, c *http.Client) {
		a := send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+key))
		if a.StatusCode != 200 || a.body != "ok" || s.last(t).Header.Get("X-Api-Key") != realAnthropic {
			t.Fatalf("%d %s %s", a.StatusCode, a.reason, a.body)
		}
		if a.Header.Get("X-Echo") != "" || a.Header.Get("Set-Cookie") != "" {
			t.Errorf("with the answer came %v", a.Header)
		}
		n := len(s.requests())
		for _, field := range []string{"X-Api-Key: " + foreignKey, "Authorization: Bearer " + foreignKey, "Cookie: a=" + foreignKey} {
			send(t, c, request(t, "POST", messages, "{}", field)).want(t, 403, boxed.EgressForeignCredential)
		}
		send(t, c, request(t, "POST", "https://api.anthropic.com/v1/files", "{}", "X-Api-Key: "+key)).want(t, 403, boxed.EgressPath)
		if len(s.requests()) != n {
			t.Error("what was refused has left")
		}
	})
	away.Store(true)
	if n := b.refusedBy(t, boxed.EntryHTTP, "api.anthropic.com", 443, boxed.EgressHolderAway); n.Status != 503 {
		t.Errorf("it was told %v", n)
	}
}

// What an exit does not allow any more ends there, whatever the sandbox's own node does.
func TestAnExitEndsWhatItDoesNotAllowAnyMore(t *testing.T) {
	rules := []boxed.EgressRule{rawRule("raw.example.com"), rawRule("other.example.com")}
	for what, c := range map[string]struct {
		change func(there *rig)
		reason boxed.EgressReason
	}{
		"a freeze": {func(there *rig) {
			there.proxy.Freeze(func(_ boxed.ID, o string, _ map[string]string) bool { return o == rigOwner })
		}, boxed.EgressFrozen},
		"a narrower profile": {func(there *rig) { there.profile(boxed.EgressProfile{Name: "out", Rules: rules[1:]}) }, boxed.EgressChanged},
		"no profile":         {func(there *rig) { there.keeper.SetProfiles(nil) }, boxed.EgressChanged},
		"the node's end":     {func(there *rig) { there.proxy.Close() }, boxed.EgressChanged},
	} {
		t.Run(what, func(t *testing.T) {
			here, there, _ := twoNodes(t)
			there.server("raw.example.com", 22, echo)
			here.profile(boxed.EgressProfile{Name: "out", Exit: otherNode, Rules: rules})
			there.profile(boxed.EgressProfile{Name: "out", Rules: rules})
			b := here.box(boxed.EgressSpec{Profile: "out"})
			conn := b.must(boxed.EntryHTTP, "raw.example.com", 22)
			if !alive(conn) {
				t.Fatal("nothing comes back")
			}
			there.profile(boxed.EgressProfile{Name: "unrelated", Rules: rules})
			if !alive(conn) {
				t.Error("another profile's change has ended it")
			}
			c.change(there)
			if !dies(conn) {
				t.Error("it goes on")
			}
			there.records.ended(t, c.reason)
			eventually(t, "end of the visit", func() bool { return there.proxy.Visits() == 0 })
		})
	}
}

// A holder ends what is under way with a secret that was revoked there, and carries no
// WebSocket: nobody could judge what is in it.
func TestAHolderEndsTheUseOfARevokedSecret(t *testing.T) {
	here, there, _ := twoNodes(t)
	begun, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	s := there.site("api.anthropic.com", func(w http.ResponseWriter, req *http.Request) {
		io.WriteString(w, "first")
		w.(http.Flusher).Flush()
		begun <- struct{}{}
		<-release
	})
	secret := boxed.Secret{Name: "anthropic", Preset: "anthropic", Owner: rigOwner, HeldBy: otherNode}
	there.secret(secret, realAnthropic)
	here.secret(secret, "")
	yes := true
	here.profile(boxed.EgressProfile{Name: "sockets", Rules: []boxed.EgressRule{{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", WebSocket: &yes}}})
	b := here.box(boxed.EgressSpec{Profile: "sockets"})
	key := b.token("ANTHROPIC_API_KEY")
	socket := b.secure(boxed.EntryHTTP, "api.anthropic.com", "http/1.1")
	raw(t, socket, "GET /v1/messages HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: "+key+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n").want(t, 400, boxed.EgressUpgrade)
	s.untouched(t)
	resp, err := b.client(boxed.EntryHTTP, "h2").Do(request(t, "POST", messages, "{}", "X-Api-Key: "+key))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-begun
	there.revoke(rigOwner, "anthropic")
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the answer looks whole")
	}
	there.records.ended(t, boxed.EgressRevoked)
}

// What another node asks for is judged here: whose sandbox it is, whose secret, and what the
// requests have in them.
func TestAnotherNodeIsNotBelieved(t *testing.T) {
	_, there, _ := twoNodes(t)
	s := there.site("api.anthropic.com", nil)
	there.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic", Owner: rigOwner, HeldBy: otherNode}, realAnthropic)
	there.secret(boxed.Secret{Name: "own", Preset: "anthropic", Owner: rigOwner}, realAnthropic)
	there.profile(boxed.EgressProfile{Name: "out", Rules: []boxed.EgressRule{rawRule("raw.example.com")}})
	id := "foreign000-" + boxed.ID(rigNode)
	placeholder := egress.Placeholder("sk-ant-api03-", 95)
	use := boxed.EgressRelay{Sandbox: id, Host: "api.anthropic.com", Port: 443, Secret: "anthropic", Placeholder: placeholder}
	for name, c := range map[string]struct {
		owner  string
		change func(*boxed.EgressRelay)
		reason boxed.EgressReason
	}{
		"another node's sandbox": {rigOwner, func(r *boxed.EgressRelay) { r.Sandbox = "foreign000-" + boxed.ID(otherNode) }, boxed.EgressInvalidRequest},
		"another owner":          {"bob@example.com", func(*boxed.EgressRelay) {}, boxed.EgressNoCredential},
		"a secret not held":      {rigOwner, func(r *boxed.EgressRelay) { r.Secret = "own" }, boxed.EgressNoCredential},
		"no such secret":         {rigOwner, func(r *boxed.EgressRelay) { r.Secret = "none" }, boxed.EgressNoCredential},
		"another host":           {rigOwner, func(r *boxed.EgressRelay) { r.Host = "evil.example.com" }, boxed.EgressNotListed},
		"another port":           {rigOwner, func(r *boxed.EgressRelay) { r.Port = 8443 }, boxed.EgressPort},
		"no placeholder":         {rigOwner, func(r *boxed.EgressRelay) { r.Placeholder = "" }, boxed.EgressInvalidRequest},
		"a bad name":             {rigOwner, func(r *boxed.EgressRelay) { r.Host = "127.1" }, boxed.EgressInvalidName},
		"no profile":             {rigOwner, func(r *boxed.EgressRelay) { r.Secret = "" }, boxed.EgressNotListed},
		"a profile not here":     {rigOwner, func(r *boxed.EgressRelay) { r.Secret, r.Profile = "", "elsewhere" }, boxed.EgressNotListed},
		"a host not allowed":     {rigOwner, func(r *boxed.EgressRelay) { r.Secret, r.Profile = "", "out" }, boxed.EgressNotListed},
	} {
		r := use
		c.change(&r)
		conn, err := there.keeper.Foreign(t.Context(), rigNode, c.owner, r)
		var e *boxed.Error
		if !errors.As(err, &e) || e.Detail["reason"] != string(c.reason) {
			t.Errorf("%s: %v", name, err)
		}
		if conn != nil {
			conn.Close()
		}
	}
	conn, err := there.keeper.Foreign(t.Context(), rigNode, rigOwner, use)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw(t, conn, "POST /v1/messages HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: "+foreignKey+"\r\nContent-Length: 0\r\n\r\n").want(t, 403, boxed.EgressForeignCredential)
	raw(t, conn, "POST /v1/files HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: "+placeholder+"\r\nContent-Length: 0\r\n\r\n").want(t, 403, boxed.EgressPath)
	raw(t, conn, "GET /v1/models HTTP/1.1\r\nHost: evil.example.com\r\nX-Api-Key: "+placeholder+"\r\n\r\n").want(t, 421, boxed.EgressHost)
	s.untouched(t)
	if a := raw(t, conn, "GET /v1/models HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: "+placeholder+"\r\n\r\n"); a.StatusCode != 200 || s.last(t).Header.Get("X-Api-Key") != realAnthropic {
		t.Errorf("%d %s", a.StatusCode, a.reason)
	}
	for _, text := range []string{"", "a", "a b c", "a b private d"} {
		if _, err := egress.ParseExit(text); err == nil {
			t.Errorf("%q is good", text)
		}
	}
	if e, err := egress.ParseExit(" * out private"); err != nil || e != (egress.ExitRule{Node: "*", Profile: "out", Private: true}) || strings.Contains(e.Node, " ") {
		t.Errorf("%+v %v", e, err)
	}
}
