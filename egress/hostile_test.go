package egress_test

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// A connection that is made is on the record, whether anything is asked for on it or not: the
// name alone tells somebody something.
func TestAConnectionWithoutARequestIsOnTheRecord(t *testing.T) {
	r := newRig(t)
	r.site("read.example.com", nil)
	r.site("page.example.com", nil, plain)
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b := r.ruled(intercepted("read.example.com"), boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
		conn := b.secure(entry, "read.example.com", "http/1.1")
		io.WriteString(conn, "G") // and it says something
		conn.Close()
		b.must(entry, "page.example.com", 80).Close()
		for _, host := range []string{"read.example.com", "page.example.com"} {
			r.records.await(t, "record of "+host, func(rec boxed.EgressRecord) bool {
				return rec.Sandbox == b.id && rec.Host == host && rec.Allowed && rec.End && rec.Address != ""
			})
			opened := r.records.of(func(rec boxed.EgressRecord) bool { return rec.Sandbox == b.id && rec.Host == host && isOpened(rec) })
			if len(opened) != 1 {
				t.Errorf("%s was opened %d times", host, len(opened))
			}
		}
	})
}

// EP3: OpenShell#1118: a stream ends with what let it through, and so does a WebSocket.
func TestAStreamEndsWhenItIsNoLongerAllowed(t *testing.T) {
	no := false
	rule := boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept, Paths: []string{"/events", "/other"}}
	narrower, other := rule, rule
	narrower.Paths, other.WebSocket = []string{"/other"}, &no
	stream := func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	}
	for _, proto := range []string{"http/1.1", "h2"} {
		t.Run("a stream by "+proto, func(t *testing.T) {
			r := newRig(t)
			r.site("read.example.com", stream)
			b := r.ruled(rule)
			resp, err := b.client(boxed.EntryHTTP, proto).Get("https://read.example.com/events")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b.change(rule, intercepted("more.example.com")) // which takes nothing of it
			b.change(narrower)
			if _, err := io.ReadAll(resp.Body); err == nil {
				t.Error("the answer looks whole")
			}
			r.records.ended(t, boxed.EgressChanged)
		})
	}
	t.Run("a WebSocket", func(t *testing.T) {
		r := newRig(t)
		r.site("read.example.com", webSocket(switched), oldHTTP)
		b := r.ruled(rule)
		conn := b.secure(boxed.EntryHTTP, "read.example.com", "http/1.1")
		fmt.Fprintf(conn, "GET /events HTTP/1.1\r\nHost: read.example.com\r\n")
		if _, resp, err := upgradeRest(conn); err != nil || resp.StatusCode != 101 {
			t.Fatalf("%v %v", resp, err)
		}
		b.change(other)
		if !dies(conn) {
			t.Error("it goes on")
		}
		r.records.ended(t, boxed.EgressChanged)
	})
}

// Servers take some headers for the method or the path; where rules name these, such a header
// would be the way around them.
func TestNoHeaderChangesWhatARequestIs(t *testing.T) {
	r := newRig(t)
	s := r.site("read.example.com", nil)
	fields := []string{"X-HTTP-Method-Override: DELETE", "X-HTTP-Method: DELETE", "X-Method-Override: DELETE", "X-Original-URL: /admin", "X-Rewrite-URL: /admin"}
	b := r.ruled(boxed.EgressRule{Host: "read.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET", "POST"}})
	readers(t, b, func(t *testing.T, c *http.Client) {
		for _, field := range fields {
			send(t, c, request(t, "POST", "https://read.example.com/", "{}", field)).want(t, 403, boxed.EgressMethod)
		}
	})
	s.untouched(t)
	free := r.ruled(intercepted("read.example.com"))
	if a := send(t, free.client(boxed.EntryHTTP, "h2"), request(t, "POST", "https://read.example.com/", "{}", fields[0])); a.StatusCode != 200 || s.last(t).Header.Get("X-Http-Method-Override") == "" {
		t.Errorf("where no rule names methods it is %d %s", a.StatusCode, a.reason)
	}
}

// EC1, EC2: getsentry/junior#338: a credential is one by any of its names, and in a parameter
// that only some servers see.
func TestForeignCredentialsByOtherNames(t *testing.T) {
	_, b, models, _ := modelled(t)
	readers(t, b, func(t *testing.T, c *http.Client) {
		for _, field := range []string{"X-Auth: a", "DD-APPLICATION-KEY: a", "Ocp-Apim-Subscription-Key: a", "X-JWT: a", "X-Functions-Key: a", "X-Amz-Security-Token: a"} {
			send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+b.token("ANTHROPIC_API_KEY"), field)).want(t, 403, boxed.EgressForeignCredential)
		}
		send(t, c, request(t, "GET", "https://api.anthropic.com/v1/models?a=1;api_key=attackers", "")).want(t, 400, boxed.EgressInvalidRequest)
		for _, field := range []string{"Idempotency-Key: a", "X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id: a", "Session_id: a", "Npm-Auth-Type: web"} {
			if a := send(t, c, request(t, "POST", messages, "{}", field)); a.StatusCode != 200 {
				t.Errorf("%s is %d %s", field, a.StatusCode, a.reason)
			}
		}
	})
	if len(models.requests()) != 4*6 {
		t.Errorf("%d requests left", len(models.requests()))
	}
}

// A sandbox may only narrow its profile: what the profile says of one host stays said when
// a wildcard names it among others.
func TestNarrowingToAWildcardWidensNothing(t *testing.T) {
	r := newRig(t)
	r.profile(boxed.EgressProfile{Name: "wide", Rules: []boxed.EgressRule{
		{Host: "*", Ports: []uint16{443}}, {Host: "api.example.com", Mode: boxed.EgressIntercept, Methods: []string{"GET"}},
	}})
	r.site("api.example.com", nil)
	r.site("www.example.com", nil)
	b := r.box(boxed.EgressSpec{Profile: "wide", Only: []string{"*.example.com"}})
	c := b.client(boxed.EntryHTTP, "h2")
	send(t, c, request(t, "POST", "https://api.example.com/", "{}")).want(t, 403, boxed.EgressMethod)
	if a := send(t, c, request(t, "GET", "https://www.example.com/", "")); a.StatusCode != 200 {
		t.Errorf("another one is %d %s", a.StatusCode, a.reason)
	}
	b.refusedBy(t, boxed.EntryHTTP, "other.example.net", 443, boxed.EgressNotListed)
}

// What a node that was broken into held is not told to it anew: a connection by way of a
// holder ends when the secret has another one.
func TestAConnectionByAHolderEndsWithIt(t *testing.T) {
	here, there, _ := twoNodes(t)
	s := there.site("api.anthropic.com", nil)
	secret := boxed.Secret{Name: "anthropic", Preset: "anthropic", Owner: rigOwner, HeldBy: otherNode}
	there.secret(secret, realAnthropic)
	here.secret(secret, "")
	b := here.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "anthropic"}}})
	key := b.token("ANTHROPIC_API_KEY")
	conn := b.secure(boxed.EntryHTTP, "api.anthropic.com", "http/1.1")
	text := "GET /v1/models HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: " + key + "\r\n\r\n"
	if a := raw(t, conn, text); a.StatusCode != 200 {
		t.Fatalf("%d %s", a.StatusCode, a.reason)
	}
	n := len(s.requests())
	secret.HeldBy = ""
	here.secret(secret, "sk-ant-api03-another-0123456789")
	io.WriteString(conn, text)
	if answer, _ := io.ReadAll(conn); strings.HasPrefix(string(answer), "HTTP/1.1 200") || len(s.requests()) != n {
		t.Errorf("it went on: %s", answer)
	}
}

// An exit's configuration names the operator's profiles. An owner's own under such a name is
// another one, and is held to what owners may have there.
func TestAnOwnersProfileIsNotTheOperators(t *testing.T) {
	for name, c := range map[string]struct {
		exit   egress.ExitRule
		reason boxed.EgressReason // "": it is let out
	}{
		"by its bare name":   {egress.ExitRule{Node: string(rigNode), Profile: "out", Private: true}, boxed.EgressNotListed},
		"of any profile":     {egress.ExitRule{Node: string(rigNode), Profile: "*", Private: true}, boxed.EgressPrivateAddress},
		"by its whole name":  {egress.ExitRule{Node: string(rigNode), Profile: rigOwner + "/out", Private: true}, ""},
		"of another's":       {egress.ExitRule{Node: string(rigNode), Profile: bob + "/out", Private: true}, boxed.EgressNotListed},
		"beyond the ceiling": {egress.ExitRule{Node: string(rigNode), Profile: "*"}, boxed.EgressNoProfile},
	} {
		t.Run(name, func(t *testing.T) {
			here, there, _ := twoNodes(t, func(rc *rigConfig) {
				o, err := egress.ParseOpening("10.1.2.3/32 22 lan.example.com")
				if err != nil {
					t.Fatal(err)
				}
				rc.Judge.Openings = []egress.Opening{o}
				rc.Keeper.Exits = []egress.ExitRule{c.exit}
				if name == "beyond the ceiling" {
					if rc.Keeper.Ceiling, err = egress.ParseCeiling([]string{"other.example.com"}); err != nil {
						t.Fatal(err)
					}
				}
			})
			addr := there.server("lan.example.com", 22, echo)
			lan := netip.MustParseAddrPort("10.1.2.3:22")
			there.world.servers[lan] = there.world.servers[netip.AddrPortFrom(addr, 22)]
			there.names.set("lan.example.com", []netip.Addr{lan.Addr()})
			rules := []boxed.EgressRule{rawRule("lan.example.com")}
			here.profile(boxed.EgressProfile{Name: "out", Owner: rigOwner, Exit: otherNode, Rules: rules})
			there.profile(boxed.EgressProfile{Name: "out", Rules: []boxed.EgressRule{}})
			there.profile(boxed.EgressProfile{Name: "out", Owner: rigOwner, Rules: rules})
			b := here.box(boxed.EgressSpec{Profile: "out"})
			if c.reason != "" {
				b.refusedBy(t, boxed.EntryHTTP, "lan.example.com", 22, c.reason)
				return
			}
			conn := b.must(boxed.EntryHTTP, "lan.example.com", 22)
			if !alive(conn) {
				t.Error("nothing comes back")
			}
			conn.Close()
		})
	}
}

// A node that asks for what is nothing here fills no log, whatever sandboxes it makes up.
func TestANodeThatAsksForNothingFillsNoLog(t *testing.T) {
	_, there, _ := twoNodes(t)
	for i := range 2000 {
		id := boxed.ID(fmt.Sprintf("made%06d-%s", i, rigNode))
		if conn, err := there.keeper.Foreign(t.Context(), rigNode, fmt.Sprintf("owner-%d", i), boxed.EgressRelay{Sandbox: id, Host: "a.example.com", Port: 443, Profile: "none-such"}); err == nil {
			conn.Close()
			t.Fatal("it was let out")
		}
	}
	if n := len(there.records.of(func(boxed.EgressRecord) bool { return true })); n == 0 || n > 300 {
		t.Errorf("%d records", n)
	}
}

// A freeze by labels is for the labels that sandboxes have, not for those that they had.
func TestAFreezeFollowsLabels(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	b := r.ruled(rawRule("raw.example.com"))
	r.proxy.Freeze(func(_ boxed.ID, _ string, labels map[string]string) bool { return labels["task"] == "x" })
	conn := b.must(boxed.EntryHTTP, "raw.example.com", 22)
	r.keeper.Relabel(b.id, map[string]string{"task": "x"})
	if !dies(conn) {
		t.Error("a tunnel of what is frozen now goes on")
	}
	r.keeper.Relabel(b.id, nil)
	conn = b.must(boxed.EntryHTTP, "raw.example.com", 22)
	if !alive(conn) {
		t.Error("it is frozen still")
	}
	conn.Close()
	r.keeper.Relabel("unknown", nil)
}

// The ceiling is lifted for what an administrator did, and for nothing that the owner does
// afterwards.
func TestAnAdminsLeaveIsNotTheOwners(t *testing.T) {
	ceiling, err := egress.ParseCeiling([]string{"ok.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *rigConfig) { c.Keeper.Ceiling = ceiling })
	id := boxed.ID("box0000099-" + rigNode)
	sb := &boxed.Sandbox{ID: id, Owner: rigOwner}
	attach := func(admin bool, hosts ...string) (*boxed.EgressGrant, error) {
		return r.keeper.Attach(sb, &boxed.EgressSpec{Allow: hosts, Admin: admin})
	}
	if _, err := attach(false, "far.example.com"); err == nil {
		t.Error("an owner got beyond the ceiling")
	}
	if _, err := attach(false, "ok.example.com"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.keeper.Allow(id, "given.example.com", 0, true); err != nil {
		t.Errorf("an admin allows: %v", err)
	}
	if _, err := r.keeper.Allow(id, "taken.example.com", 0, false); err == nil {
		t.Error("the owner got beyond the ceiling after an admin had been there")
	}
	grant, err := attach(true, "far.example.com")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.keeper.Allow(id, "taken.example.com", 0, false); err == nil {
		t.Error("the owner got beyond the ceiling after an admin had set it")
	}
	r.keeper.Detach(id)
	if err := r.keeper.Restore(sb, grant); err != nil {
		t.Fatal(err)
	}
	if st := r.keeper.Status(id); st.State != boxed.EgressOpen || len(st.Allowed) != 1 {
		t.Errorf("after a restart it is %+v", st)
	}
}
