package egress_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// alive sends something over an open connection, and reports whether it comes back.
func alive(conn net.Conn) bool {
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, "ping"); err != nil {
		return false
	}
	_, err := io.ReadFull(conn, make([]byte, 4))
	return err == nil
}

// dies waits for the end of a connection.
func dies(conn net.Conn) bool {
	for end := time.Now().Add(patience); alive(conn); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// EP3: OpenShell#1118: a tunnel kept the rights that it was opened with. EP4: pipelock 2.0:
// streams did not notice that they were no longer allowed. Those that are go on.
func TestAnOpenTunnelEndsWhenItIsNoLongerAllowed(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"stays.example.com", "goes.example.com"} {
		r.server(name, 22, echo)
	}
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b, other := r.ruled(rawRule("stays.example.com"), rawRule("goes.example.com")), r.ruled(rawRule("goes.example.com"))
		stays, goes, others := b.must(entry, "stays.example.com", 22), b.must(entry, "goes.example.com", 22), other.must(entry, "goes.example.com", 22)
		if !alive(stays) || !alive(goes) || !alive(others) {
			t.Fatal("the tunnels do not work")
		}
		b.change(rawRule("stays.example.com"), rawRule("new.example.com"))
		if n, err := goes.Read(make([]byte, 1)); err == nil {
			t.Errorf("the tunnel goes on: %d bytes", n)
		}
		if !alive(stays) || !alive(others) {
			t.Error("a tunnel that is allowed has ended")
		}
		b.refusedBy(t, entry, "goes.example.com", 22, boxed.EgressNotListed)
		rec := r.records.await(t, "end", func(rec boxed.EgressRecord) bool {
			return rec.End && rec.Sandbox == b.id && rec.Reason == boxed.EgressChanged
		})
		if rec.Host != "goes.example.com" || rec.Up != 4 || rec.Down != 4 || rec.Entry != entry {
			t.Errorf("the record is %+v", rec)
		}
		b.change()
		if !dies(stays) {
			t.Error("with no rule left a tunnel goes on")
		}
		stays.Close()
		others.Close()
	})
}

// EP3: what a connection may do is as narrow as the rules are now, also one that is kept and
// read: its methods, its paths, its port, whether it is read at all.
func TestAKeptConnectionIsHeldToTheRulesOfNow(t *testing.T) {
	for _, proto := range []string{"http/1.1", "h2"} {
		t.Run(proto, func(t *testing.T) {
			r := newRig(t)
			s := r.site("api.example.com", nil)
			b := r.ruled(intercepted("api.example.com"))
			c := b.client(boxed.EntryHTTP, proto)
			ask := func(method, path string) answer {
				return send(t, c, request(t, method, "https://api.example.com"+path, ""))
			}
			if a := ask("DELETE", "/any"); a.StatusCode != 200 {
				t.Fatalf("%d %s", a.StatusCode, a.body)
			}
			rule := intercepted("api.example.com")
			rule.Methods, rule.Paths = []string{"GET"}, []string{"/public/"}
			b.change(rule)
			ask("DELETE", "/public/x").want(t, 403, boxed.EgressMethod)
			ask("GET", "/any").want(t, 403, boxed.EgressPath)
			ask("GET", "/public/../any").want(t, 400, boxed.EgressInvalidRequest)
			if a := ask("GET", "/public/x"); a.StatusCode != 200 {
				t.Errorf("what is allowed is %d %s", a.StatusCode, a.reason)
			}
			b.change(intercepted("api.example.com"))
			if a := ask("DELETE", "/any"); a.StatusCode != 200 {
				t.Errorf("what is allowed again is %d %s", a.StatusCode, a.reason)
			}
			if n := len(s.requests()); n != 3 {
				t.Errorf("%d requests left", n)
			}
		})
	}
}

// EP3: so is one by plain HTTP, and a tunnel of another protocol whose rule is for TLS now.
func TestAKeptConnectionInPlainIsHeldToTheRulesOfNow(t *testing.T) {
	r := newRig(t)
	page := r.site("page.example.com", nil, plain)
	r.server("raw.example.com", 22, echo)
	rule := boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}}
	b := r.ruled(rule, rawRule("raw.example.com"))
	c := b.proxied()
	conn := b.must(boxed.EntryName, "page.example.com", 80)
	tunnel := b.must(boxed.EntrySOCKS5, "raw.example.com", 22)
	post := "POST / HTTP/1.1\r\nHost: page.example.com\r\nContent-Length: 0\r\n\r\n"
	if a := send(t, c, request(t, "POST", "http://page.example.com/", "")); a.StatusCode != 200 || raw(t, conn, post).StatusCode != 200 || !alive(tunnel) {
		t.Fatal("it does not work")
	}
	rule.Methods = []string{"GET"}
	b.change(rule, boxed.EgressRule{Host: "raw.example.com", Ports: []uint16{22}})
	send(t, c, request(t, "POST", "http://page.example.com/", "")).want(t, 403, boxed.EgressMethod)
	raw(t, conn, post).want(t, 403, boxed.EgressMethod)
	if !dies(tunnel) {
		t.Error("a raw tunnel goes on where only TLS is allowed")
	}
	b.change()
	send(t, c, request(t, "GET", "http://page.example.com/", "")).want(t, 403, boxed.EgressNotListed)
	if n := len(page.requests()); n != 2 {
		t.Errorf("%d requests left", n)
	}
}

// EP3: a policy that changes while connections are opened leaves none behind.
func TestAConnectionThatIsOpenedAsThePolicyChanges(t *testing.T) {
	r := newRig(t, limits(egress.Limits{Dials: -1}))
	r.server("raw.example.com", 22, echo)
	yes, err := egress.NewPolicy([]boxed.EgressRule{rawRule("raw.example.com")}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	no, _ := egress.NewPolicy(nil, nil, nil)
	b := &box{r: r, id: "swapped000-" + boxed.ID(rigNode)}
	attach := func(p *egress.Policy) {
		r.proxy.Attach(egress.Session{Sandbox: b.id, Owner: rigOwner, Labels: map[string]string{"a": "b"}, Policy: p})
	}
	attach(yes)
	var stop atomic.Bool
	var wg sync.WaitGroup
	var open sync.Map
	for i := range 6 {
		wg.Go(func() {
			for n := i; !stop.Load(); n++ {
				if conn, refused := b.connect(entries[n%3], "raw.example.com", 22); refused == nil {
					open.Store(conn, true)
				}
			}
		})
	}
	for range 40 {
		attach(no)
		time.Sleep(time.Millisecond)
		attach(yes)
		r.proxy.Freeze(func(boxed.ID, string, map[string]string) bool { return true })
		r.proxy.Freeze(nil)
	}
	attach(no)
	eventually(t, "end of all", func() bool { return r.proxy.LiveFlows(b.id) == 0 })
	stop.Store(true)
	wg.Wait()
	open.Range(func(conn, _ any) bool {
		if !dies(conn.(net.Conn)) {
			t.Error("a connection lives that nothing allows")
		}
		conn.(net.Conn).Close()
		return true
	})
}

// A frozen sandbox reaches nothing, and what it had open ends; others go on. Thawed, it is as
// before.
func TestAFreezeEndsWhatIsOpen(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	r.site("read.example.com", nil)
	rules := []boxed.EgressRule{rawRule("raw.example.com"), intercepted("read.example.com")}
	r.profile(boxed.EgressProfile{Name: "shared", Rules: rules})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		b := r.box(boxed.EgressSpec{Profile: "shared"})
		other, err := r.tryBox("bob@example.com", boxed.EgressSpec{Profile: "shared"})
		if err != nil {
			t.Fatal(err)
		}
		mine, theirs := b.must(entry, "raw.example.com", 22), other.must(entry, "raw.example.com", 22)
		c := b.client(entry, "h2")
		if a := send(t, c, request(t, "GET", "https://read.example.com/", "")); a.StatusCode != 200 {
			t.Fatal(a.StatusCode)
		}
		r.proxy.Freeze(func(_ boxed.ID, owner string, _ map[string]string) bool { return owner == rigOwner })
		if !dies(mine) {
			t.Error("a tunnel of a frozen sandbox goes on")
		}
		b.refusedBy(t, entry, "raw.example.com", 22, boxed.EgressFrozen)
		if resp, err := c.Get("https://read.example.com/"); err == nil {
			if resp.Body.Close(); resp.StatusCode < 400 {
				t.Errorf("a kept connection is answered with %d", resp.StatusCode)
			}
		}
		if code, _ := r.proxy.Resolve(b.id, boxed.EgressIntent{Entry: boxed.EntryDNS, Host: "raw.example.com", Type: 1}); code != 3 {
			t.Errorf("the name has code %d", code)
		}
		if a, err := r.keeper.Foresee(t.Context(), b.id, boxed.EgressQuery{Host: "raw.example.com:22"}); err != nil || a.Reason != boxed.EgressFrozen {
			t.Errorf("what would happen is %+v, %v", a, err)
		}
		if !alive(theirs) {
			t.Error("another owner's tunnel has ended")
		}
		r.records.await(t, "end", func(rec boxed.EgressRecord) bool {
			return rec.End && rec.Sandbox == b.id && rec.Reason == boxed.EgressFrozen
		})
		r.proxy.Freeze(nil)
		conn := b.must(entry, "raw.example.com", 22)
		if !alive(conn) {
			t.Error("a thawed sandbox reaches nothing")
		}
		conn.Close()
		theirs.Close()
	})
}

// EP4: a sandbox that is detached loses everything at once, and so do all when the proxy ends.
func TestADetachedSandboxLosesEverything(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	r.site("read.example.com", func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		for _, end := range []func(*box){func(b *box) { r.keeper.Detach(b.id); r.keeper.Detach(b.id) }, func(b *box) { r.proxy.Detach(b.id) }} {
			b := r.ruled(rawRule("raw.example.com"), intercepted("read.example.com"))
			tunnel := b.must(entry, "raw.example.com", 22)
			resp, err := b.client(entry, "h2").Get("https://read.example.com/")
			if err != nil {
				t.Fatal(err)
			}
			idle := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
			raw(t, idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").want(t, 400, boxed.EgressInvalidRequest)
			end(b)
			if !dies(tunnel) {
				t.Error("a tunnel goes on")
			}
			if _, err := io.ReadAll(resp.Body); err == nil {
				t.Error("an answer was taken for whole")
			}
			resp.Body.Close()
			io.ReadAll(idle) // a connection to the proxy, too
			b.refusedBy(t, entry, "raw.example.com", 22, boxed.EgressNoProfile)
		}
	})
}

// EP1: claude-code#81572: a change of something else switched the filter off. A policy is
// replaced as a whole, and whoever asks sees the one or the other.
func TestAPolicyIsReplacedAsAWhole(t *testing.T) {
	r := newRig(t)
	one, _ := egress.NewPolicy([]boxed.EgressRule{{Host: "one.example.com"}}, []string{"two.example.com"}, nil)
	two, _ := egress.NewPolicy([]boxed.EgressRule{{Host: "two.example.com"}}, []string{"one.example.com"}, nil)
	b := &box{r: r, id: "whole00000-" + boxed.ID(rigNode)}
	r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: one})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: two})
			r.proxy.Attach(egress.Session{Sandbox: b.id, Policy: one})
		}
	})
	for range 300 {
		p := r.proxy.Policy(b.id)
		first, second := p.Decide(host(t, "one.example.com"), 443).Reason, p.Decide(host(t, "two.example.com"), 443).Reason
		if !(first == boxed.EgressAllowed && second == boxed.EgressListDenied) && !(first == boxed.EgressListDenied && second == boxed.EgressAllowed) {
			t.Fatalf("a policy is %s and %s", first, second)
		}
		for _, name := range []string{"three.example.com", "canary.invalid"} {
			if conn, refused := b.connect(boxed.EntryHTTP, name, 443); refused == nil || refused.Reason != boxed.EgressNotListed {
				t.Fatalf("%s: %v %v", name, conn, refused)
			}
		}
	}
	cancel()
	wg.Wait()
}

// EP1: a profile that is not good changes nothing, and one that is gone shuts.
func TestAProfileThatIsGoneShuts(t *testing.T) {
	r := newRig(t)
	r.server("raw.example.com", 22, echo)
	b := r.ruled(rawRule("raw.example.com"))
	conn := b.must(boxed.EntryHTTP, "raw.example.com", 22)
	generation, hash := r.keeper.Generation()
	if _, err := egress.CheckProfile(boxed.EgressProfile{Version: 1, Name: b.grant.Spec.Profile, Rules: []boxed.EgressRule{{Host: "*.com"}}}); err == nil {
		t.Fatal("a bad profile is good")
	}
	if !alive(conn) {
		t.Error("the tunnel has ended")
	}
	r.keeper.SetProfiles(nil)
	if !dies(conn) {
		t.Error("the tunnel goes on")
	}
	b.refusedBy(t, boxed.EntryHTTP, "raw.example.com", 22, boxed.EgressNotListed)
	if st := r.keeper.Status(b.id); st.State != boxed.EgressClosed || st.Reason == "" {
		t.Errorf("the status is %+v", st)
	}
	if g, h := r.keeper.Generation(); g <= generation || h == hash {
		t.Errorf("the generation is %d %s, and was %d %s", g, h, generation, hash)
	}
	r.profile(boxed.EgressProfile{Name: b.grant.Spec.Profile, Rules: []boxed.EgressRule{rawRule("raw.example.com")}})
	again := b.must(boxed.EntryHTTP, "raw.example.com", 22)
	if !alive(again) {
		t.Error("with its profile again it reaches nothing")
	}
	again.Close()
	if st := r.keeper.Status(b.id); st.State != boxed.EgressOpen {
		t.Errorf("the status is %+v", st)
	}
}

// EP7: agent-vault#269, clawpatrol#619: a rule was picked before its credential was known, and
// the credential was that of when the connection was opened. All of a request is of one moment.
func TestARequestIsPlannedAsAWhole(t *testing.T) {
	r := newRig(t)
	s := r.site("api.anthropic.com", nil)
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	r.profile(boxed.EgressProfile{Name: "p", Rules: []boxed.EgressRule{
		{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Paths: []string{"/v1/messages"}, Credential: "anthropic"},
		{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Paths: []string{"/public/"}},
	}})
	b := r.box(boxed.EgressSpec{Profile: "p"})
	key := "X-Api-Key: " + b.token("ANTHROPIC_API_KEY")
	readers(t, b, func(t *testing.T, c *http.Client) {
		for range 2 { // on one connection
			if a := send(t, c, request(t, "POST", messages, "{}", key)); a.StatusCode != 200 || s.last(t).Header.Get("X-Api-Key") != realAnthropic {
				t.Errorf("%d %s", a.StatusCode, a.reason)
			}
			if a := send(t, c, request(t, "GET", "https://api.anthropic.com/public/x", "")); a.StatusCode != 200 {
				t.Errorf("%d %s", a.StatusCode, a.reason)
			}
			send(t, c, request(t, "GET", "https://api.anthropic.com/public/x", "", key)).want(t, 403, boxed.EgressMisuse)
			send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+foreignKey)).want(t, 403, boxed.EgressForeignCredential)
		}
	})
	recs := r.records.of(func(rec boxed.EgressRecord) bool { return isOpened(rec) && rec.Credential == "anthropic" })
	if want := 2 * 2 * len(entries); len(recs) != want {
		t.Errorf("%d requests with the credential are on the record, and %d were made", len(recs), want)
	}
	for _, rec := range recs {
		if rec.Rule != "profile p api.anthropic.com:443" || rec.Path != "/v1/messages" {
			t.Errorf("%+v", rec)
		}
	}
}
