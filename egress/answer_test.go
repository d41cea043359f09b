package egress_test

import (
	"bufio"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// answering has an API of models that answers as a test says, and a sandbox with a secret for
// it.
func answering(t *testing.T, h http.HandlerFunc, changes ...func(*siteConfig)) (r *rig, b *box) {
	t.Helper()
	r = newRig(t)
	r.site("api.anthropic.com", h, changes...)
	r.site("read.example.com", h, changes...)
	yes := true
	r.profile(boxed.EgressProfile{Name: "model", Rules: []boxed.EgressRule{
		{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic", WebSocket: &yes}, intercepted("read.example.com"),
	}})
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	return r, r.box(boxed.EgressSpec{Profile: "model"})
}

// ER1: clawpatrol#199, #236: the cookie of a session that the credential had opened was handed
// in; so were those in trailers, and in the answer to an upgrade. ER9: clawpatrol: Alt-Svc
// leads a client to QUIC, around the proxy.
func TestAnAnswerOpensNoOtherWay(t *testing.T) {
	h := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Set-Cookie", "session=1")
		w.Header().Add("Set-Cookie", "other=2")
		w.Header()["set-cookie2"] = []string{"old=3"}
		w.Header().Set("Alt-Svc", `h3=":443"`)
		w.Header().Set("X-Kept", "1")
		w.Header().Set("Trailer", "Set-Cookie, X-Kept-Too, Alt-Svc")
		io.WriteString(w, "ok")
		w.Header().Set("Set-Cookie", "late=4")
		w.Header().Set("Alt-Svc", `h3=":444"`)
		w.Header().Set("X-Kept-Too", "1")
		w.Header().Set(http.TrailerPrefix+"Set-Cookie2", "unannounced=5")
	}
	for name, change := range map[string]func(*siteConfig){"from http/1.1": oldHTTP, "from h2": func(*siteConfig) {}} {
		t.Run(name, func(t *testing.T) {
			_, b := answering(t, h, change)
			readers(t, b, func(t *testing.T, c *http.Client) {
				a := send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+b.token("ANTHROPIC_API_KEY")))
				for where, head := range map[string]http.Header{"head": a.Header, "trailers": a.Trailer} {
					for field, values := range head {
						if f := strings.ToLower(field); (strings.HasPrefix(f, "set-cookie") || f == "alt-svc") && len(values) > 0 {
							t.Errorf("in the %s came %s: %v", where, field, values)
						}
					}
				}
				if a.body != "ok" || a.Header.Get("X-Kept") != "1" || a.Trailer.Get("X-Kept-Too") != "1" {
					t.Errorf("%q %v %v", a.body, a.Header, a.Trailer)
				}
				// Where there is no credential, cookies are the program's own.
				if a := send(t, c, request(t, "GET", "https://read.example.com/", "")); len(a.Header.Values("Set-Cookie")) != 2 {
					t.Errorf("of a host without a credential came %v", a.Header)
				}
			})
		})
	}
}

// The head of an answer is bounded, also of one to an upgrade: a server that writes heads for
// ever has no node's memory.
func TestTheHeadOfAnAnswerIsBounded(t *testing.T) {
	endless := func(conn net.Conn) {
		bufio.NewReader(conn).ReadString('\n')
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\n")
		line := []byte("X-Large: " + strings.Repeat("x", 32<<10) + "\r\n")
		for range 1024 { // 32 MiB
			if _, err := conn.Write(line); err != nil {
				return
			}
		}
		t.Error("all of it was read")
	}
	r := newRig(t)
	r.server("page.example.com", 80, endless)
	b := r.ruled(boxed.EgressRule{Host: "page.example.com", Ports: []uint16{80}})
	for _, upgrade := range []string{"", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"} {
		conn := b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil)
		if a := raw(t, conn, "GET http://page.example.com/ HTTP/1.1\r\nHost: page.example.com\r\n"+upgrade+"\r\n"); a.StatusCode != 502 {
			t.Errorf("%q: %d %s", upgrade, a.StatusCode, a.reason)
		}
		conn.Close()
	}
}

// ER1: the answer to an upgrade is one, too.
func TestTheAnswerToAnUpgradeOpensNoOtherWay(t *testing.T) {
	_, b := answering(t, webSocket(strings.Replace(switched, "X-Kept", "Alt-Svc: h3=\":443\"\nX-Echo: "+realAnthropic+"\nX-Kept", 1)), oldHTTP)
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		conn := b.secure(entry, "api.anthropic.com", "http/1.1")
		fmt.Fprintf(conn, "GET /v1/models HTTP/1.1\r\nHost: api.anthropic.com\r\nX-Api-Key: %s\r\n", b.token("ANTHROPIC_API_KEY"))
		_, resp, err := upgradeRest(conn)
		if err != nil || resp.StatusCode != 101 || resp.Header.Get("X-Kept") != "1" {
			t.Fatalf("%v %v", resp, err)
		}
		for _, field := range []string{"Set-Cookie", "Alt-Svc", "X-Echo"} {
			if v := resp.Header.Get(field); v != "" {
				t.Errorf("%s: %s", field, v)
			}
		}
	})
}

// A WebSocket to a host with a credential needs a rule that says so: nobody judges what is in
// one.
func TestAWebSocketWithACredentialNeedsARule(t *testing.T) {
	r := newRig(t)
	s := r.site("api.anthropic.com", webSocket(switched), oldHTTP)
	no := false
	free := r.site("read.example.com", webSocket(switched), oldHTTP)
	r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic"}, realAnthropic)
	r.profile(boxed.EgressProfile{Name: "model", Rules: []boxed.EgressRule{
		{Host: "api.anthropic.com", Mode: boxed.EgressIntercept, Credential: "anthropic"}, {Host: "read.example.com", Mode: boxed.EgressIntercept, WebSocket: &no},
	}})
	b := r.box(boxed.EgressSpec{Profile: "model"})
	for _, host := range []string{"api.anthropic.com", "read.example.com"} {
		conn := b.secure(boxed.EntryHTTP, host, "http/1.1")
		_, resp, err := upgrade(conn, host, "")
		if err != nil || resp.StatusCode != 400 || resp.Header.Get(egress.ReasonHeader) != string(boxed.EgressUpgrade) {
			t.Errorf("%s: %v %v", host, resp, err)
		}
	}
	s.untouched(t)
	free.untouched(t)
}

// ER3: OpenSandbox system.py: Location and other fields gave the credential back.
func TestAnAnswerThatHoldsTheCredential(t *testing.T) {
	var percent strings.Builder
	for i := range len(realAnthropic) {
		fmt.Fprintf(&percent, "%%%02X", realAnthropic[i])
	}
	h := func(w http.ResponseWriter, _ *http.Request) {
		head := w.Header()
		head.Set("Location", "https://other.example.com/?key="+realAnthropic)
		head.Set("X-Percent", percent.String())
		head.Set("X-Hex", strings.ToUpper(hex.EncodeToString([]byte(realAnthropic))))
		for i := range 3 {
			pad := strings.Repeat("u", i)
			head.Set(fmt.Sprintf("X-Basic-%d", i), "Basic "+base64.StdEncoding.EncodeToString([]byte(pad+realAnthropic+":x")))
			head.Set(fmt.Sprintf("X-Url-%d", i), base64.RawURLEncoding.EncodeToString([]byte(pad+realAnthropic)))
		}
		head["X-Many"] = []string{"good", "a " + realAnthropic + " b"}
		head.Set("X-Kept", "1")
		head.Set("Trailer", "X-Late")
		io.WriteString(w, "ok")
		head.Set("X-Late", realAnthropic)
	}
	r, b := answering(t, h)
	readers(t, b, func(t *testing.T, c *http.Client) {
		a := send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+b.token("ANTHROPIC_API_KEY")))
		if a.Header.Get("X-Kept") != "1" || a.body != "ok" {
			t.Errorf("%v", a.Header)
		}
		for field := range a.Header {
			if strings.HasPrefix(field, "X-") && field != "X-Kept" || field == "Location" {
				t.Errorf("%s: %v came", field, a.Header[field])
			}
		}
		if v := a.Trailer.Get("X-Late"); v != "" {
			t.Errorf("in the trailers came %s", v)
		}
	})
	if !strings.Contains(r.records.log.String(), "credential back") {
		t.Error("nobody was told")
	}
}

// EC15, ER1, ER3: what is taken out of a header, and what stays.
func TestWhatIsTakenOutOfAnAnswer(t *testing.T) {
	const secret = "se/cr+et=value-with/slashes"
	h := http.Header{
		"Set-Cookie": {"a"}, "Set-Cookie2": {"b"}, "Alt-Svc": {"c"}, "X-Kept": {"d"}, "Content-Type": {"text/plain"},
		"Www-Authenticate": {"Bearer x", `Basic realm="git"`, "basic", "NTLM", "Negotiate"},
		"X-Plain":          {"x" + secret}, "X-Query": {url.QueryEscape(secret)}, "X-Query-Low": {strings.ToLower(url.QueryEscape("/+=")) + lowerEscapes(url.QueryEscape(secret))},
		"X-Path": {url.PathEscape(secret)}, "X-Upper": {strings.ToUpper(secret)},
	}
	if !egress.Scrub(h, secret) {
		t.Error("the credential was not found")
	}
	want := http.Header{
		"X-Kept": {"d"}, "Content-Type": {"text/plain"}, "Www-Authenticate": {`Basic realm="git"`, "basic"}, "X-Upper": {strings.ToUpper(secret)},
	}
	if diff := cmp.Diff(want, h); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
	if egress.Scrub(http.Header{"X": {"nothing"}}, secret) {
		t.Error("the credential was found where it is not")
	}
}

// lowerEscapes has the digits of %XX in lower case, as some servers write them.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], strings.ToLower(string(b[i+1:i+3])))
		}
	}
	return string(b)
}

// ER6: agent-vault#196, iron-proxy#88: models that think for longer than 30 s were cut off.
func TestAnAnswerMayTakeItsTime(t *testing.T) {
	t.Parallel()
	if d := (egress.Times{}).Defaults().Answer; d != 10*time.Minute {
		t.Errorf("an answer has %s to begin", d)
	}
	r := newRig(t, times(func(x *egress.Times) {
		x.Answer = time.Second
	}))
	r.site("read.example.com", func(w http.ResponseWriter, req *http.Request) {
		wait := 400 * time.Millisecond
		if req.URL.Path == "/never" {
			wait = patience
		}
		select {
		case <-time.After(wait):
		case <-req.Context().Done():
		}
		io.WriteString(w, "thought")
	})
	b := r.ruled(intercepted("read.example.com"))
	readers(t, b, func(t *testing.T, c *http.Client) {
		if a := send(t, c, request(t, "POST", "https://read.example.com/", "{}")); a.body != "thought" {
			t.Errorf("the answer is %d %s", a.StatusCode, a.body)
		}
		if a := send(t, c, request(t, "POST", "https://read.example.com/never", "{}")); a.StatusCode < 500 {
			t.Errorf("the answer that never comes is %d %s", a.StatusCode, a.body)
		}
	})
}

// The record of a request says what became of it, and holds neither a query, nor a field, nor
// a body.
func TestTheRecordOfARequest(t *testing.T) {
	r, b := answering(t, func(w http.ResponseWriter, req *http.Request) {
		io.Copy(io.Discard, req.Body)
		w.WriteHeader(201)
		io.WriteString(w, "answer")
	})
	r.records.hide("in-the-query")
	r.records.hide("in-a-field")
	r.records.hide("in-the-body")
	everyEntry(t, func(t *testing.T, entry boxed.EgressEntry) {
		send(t, b.client(entry, "h2"), request(t, "POST", messages+"?beta=in-the-query", "in-the-body", "X-Api-Key: "+b.token("ANTHROPIC_API_KEY"), "X-Note: in-a-field"))
		of := func(end bool) boxed.EgressRecord {
			return r.records.await(t, "request", func(rec boxed.EgressRecord) bool {
				return rec.Entry == entry && rec.End == end && rec.Method == "POST"
			})
		}
		for _, rec := range []boxed.EgressRecord{of(false), of(true)} {
			if rec.Up != 0 && !rec.End {
				t.Errorf("%+v", rec)
			}
			want := boxed.EgressRecord{
				Node: rigNode, Sandbox: b.id, Owner: rigOwner, Generation: rec.Generation, Entry: entry, Host: "api.anthropic.com", Port: 443, SNI: "api.anthropic.com",
				Method: "POST", Path: "/v1/messages", Allowed: true, Reason: boxed.EgressAllowed, Rule: "profile model api.anthropic.com:443", Credential: "anthropic",
				At: rec.At, Address: rec.Address, MS: rec.MS,
			}
			if rec.End {
				want.End, want.Status, want.Up, want.Down = true, 201, int64(len("in-the-body")), int64(len("answer"))
			}
			if diff := cmp.Diff(want, rec); diff != "" || rec.Address == "" || rec.Generation == 0 {
				t.Errorf("the record (-want +got):\n%s", diff)
			}
		}
	})
}
