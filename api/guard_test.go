package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

func TestHostAndOrigin(t *testing.T) {
	h := newHarness(t, func(c *api.Config) { c.Hosts = append(api.LoopbackHosts(), "boxed.example:8443", "::2") })
	port := h.http.URL[strings.LastIndex(h.http.URL, ":"):]
	host := "127.0.0.1" + port
	for name, c := range map[string]struct {
		headers []string
		ok      bool
	}{
		"plain":                         {nil, true},
		"localhost":                     {[]string{"Host", "localhost" + port}, true},
		"upper case":                    {[]string{"Host", "LOCALHOST" + port}, true},
		"without a port":                {[]string{"Host", "localhost"}, true},
		"IPv6":                          {[]string{"Host", "[::1]:1"}, true},
		"configured IPv6":               {[]string{"Host", "[::2]:1"}, true},
		"configured with its port":      {[]string{"Host", "boxed.example:8443"}, true},
		"configured with another port":  {[]string{"Host", "boxed.example:8444"}, false},
		"rebound name":                  {[]string{"Host", "evil.example"}, false},
		"rebound name with our port":    {[]string{"Host", "evil.example" + port}, false},
		"suffix":                        {[]string{"Host", "localhost.evil.example"}, false},
		"prefix":                        {[]string{"Host", "evil-localhost"}, false},
		"trailing dot":                  {[]string{"Host", "localhost."}, false},
		"another loopback":              {[]string{"Host", "127.0.0.2" + port}, false},
		"user part":                     {[]string{"Host", "localhost@evil.example"}, false},
		"port that is none":             {[]string{"Host", "localhost:x"}, false},
		"own origin":                    {[]string{"Origin", "http://" + host}, true},
		"own origin by its other name":  {[]string{"Origin", "http://localhost" + port, "Host", "localhost" + port}, true},
		"origin of another name":        {[]string{"Origin", "http://localhost" + port}, false},
		"null origin":                   {[]string{"Origin", "null"}, false},
		"foreign origin":                {[]string{"Origin", "https://evil.example"}, false},
		"origin with another scheme":    {[]string{"Origin", "https://" + host}, false},
		"origin with another port":      {[]string{"Origin", "http://127.0.0.1:1"}, false},
		"origin with a suffix":          {[]string{"Origin", "http://" + host + ".evil.example"}, false},
		"origin with a user part":       {[]string{"Origin", "http://" + host + "@evil.example"}, false},
		"origin with a path":            {[]string{"Origin", "http://" + host + "/"}, false},
		"origin of a file":              {[]string{"Origin", "file://"}, false},
		"several origins in one":        {[]string{"Origin", "http://" + host + " https://evil.example"}, false},
		"same site":                     {[]string{"Sec-Fetch-Site", "same-site"}, false},
		"cross site":                    {[]string{"Sec-Fetch-Site", "cross-site"}, false},
		"cross site with our origin":    {[]string{"Sec-Fetch-Site", "cross-site", "Origin", "http://" + host}, false},
		"same origin":                   {[]string{"Sec-Fetch-Site", "same-origin", "Origin", "http://" + host}, true},
		"typed by hand":                 {[]string{"Sec-Fetch-Site", "none"}, true},
		"forwarded host is not trusted": {[]string{"X-Forwarded-Host", "evil.example"}, true},
	} {
		for _, call := range []string{"GET /v1/sandboxes", "POST /v1/sandboxes", "DELETE /v1/sandboxes/x", "OPTIONS /v1/sandboxes", "GET /docs", "GET /healthz", "GET /v1/sandboxes/x/exec/stream"} {
			method, path, _ := strings.Cut(call, " ")
			body := ""
			if method == "POST" {
				body = "{}"
			}
			a := h.do(method, path, body, c.headers...)
			if refused := a.status == 403; refused == c.ok {
				t.Errorf("%s, %s: %d %s", name, call, a.status, a.body)
			}
			if a.header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: CORS", name)
			}
		}
	}
	if n := h.called("Create"); n == 0 {
		t.Error("nothing was let through")
	}
}

func TestProxies(t *testing.T) {
	t.Run("a trusted proxy says whether it is https, nobody else", func(t *testing.T) {
		for _, trusted := range []bool{true, false} {
			h := newHarness(t, func(c *api.Config) {
				c.Hosts = []string{"boxed.example"}
				if trusted {
					c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
				}
			})
			a := h.do("GET", "/healthz", "", "Host", "boxed.example", "Origin", "https://boxed.example", "X-Forwarded-Proto", "https")
			if got := a.status == 200; got != trusted {
				t.Errorf("trusted %v: %d %s", trusted, a.status, a.body)
			}
		}
	})
	t.Run("the client is the nearest address that is not a proxy's", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) {
			c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/8")}
		})
		for forwarded, want := range map[string]string{
			"":                               "127.0.0.1",
			"192.0.2.7":                      "192.0.2.7",
			"203.0.113.1, 192.0.2.7":         "192.0.2.7",
			"203.0.113.1, 192.0.2.7, 10.1.1": "127.0.0.1",
			"192.0.2.7, 10.1.1.1":            "192.0.2.7",
			"::ffff:192.0.2.8":               "192.0.2.8",
			"junk":                           "127.0.0.1",
		} {
			id := fmt.Sprintf("id%d", len(forwarded))
			h.do("GET", "/healthz", "", "X-Forwarded-For", forwarded, "X-Request-ID", id)
			eventually(t, "logged", func() bool { return strings.Contains(h.log.String(), "request_id="+id) })
			for line := range strings.SplitSeq(h.log.String(), "\n") {
				if strings.Contains(line, "request_id="+id+" ") && !strings.Contains(line, "addr="+want) {
					t.Errorf("%q: %s", forwarded, line)
				}
			}
		}
	})
	t.Run("hosts that are none are refused at start", func(t *testing.T) {
		for _, host := range []string{"", "http://x", "*", "a b", "x@y"} {
			f := newFake()
			if _, err := api.New(api.Config{Service: f, Auth: newKeyring(), Logger: discard(), Hosts: []string{host}}); err == nil {
				t.Errorf("%q was taken", host)
			}
		}
	})
}

func TestAuth(t *testing.T) {
	t.Run("takes a key by either header", func(t *testing.T) {
		h := newHarness(t)
		for _, c := range []struct {
			headers []string
			ok      bool
		}{
			{[]string{"Authorization", "Bearer " + userKey}, true},
			{[]string{"Authorization", "bearer " + userKey}, true},
			{[]string{"Authorization", "", "X-Boxed-API-Key", userKey}, true},
			{[]string{"X-Boxed-API-Key", userKey}, true},
			{[]string{"X-Boxed-API-Key", adminKey}, false}, // which of the two?
			{[]string{"Authorization", ""}, false},
			{[]string{"Authorization", "Bearer"}, false},
			{[]string{"Authorization", "Basic dTpw"}, false},
			{[]string{"Authorization", userKey}, false},
			{[]string{"Authorization", "Bearer " + strings.Repeat("x", 4000)}, false},
			{[]string{"Authorization", "Bearer wrong"}, false},
		} {
			a := h.do("GET", "/v1/sandboxes", "", c.headers...)
			if got := a.status == 200; got != c.ok {
				t.Errorf("%.60v: %d %s", c.headers, a.status, a.body)
			}
			if !c.ok && (a.status != 401 || a.problem().Code != boxed.CodeUnauthenticated || a.header.Get("WWW-Authenticate") == "") {
				t.Errorf("%.60v: %d %v", c.headers, a.status, a.header)
			}
		}
		if a := h.do("GET", "/v1/sandboxes?api_key="+userKey, "", "Authorization", ""); a.status != 401 {
			t.Error("a key in the query was taken")
		}
	})
	t.Run("limits guessing, and does not lock out who has been right", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.AuthFailures = 3 })
		if a := h.do("GET", "/v1/sandboxes", ""); a.status != 200 {
			t.Fatal(a.status)
		}
		for i := range 3 {
			if a := h.do("GET", "/v1/sandboxes", "", "Authorization", fmt.Sprint("Bearer wrong", i)); a.status != 401 {
				t.Fatal(i, a.status)
			}
		}
		a := h.do("GET", "/v1/sandboxes", "", "Authorization", "Bearer wrong")
		if a.status != 429 || a.problem().Code != boxed.CodeRateLimited || a.header.Get("Retry-After") == "" {
			t.Errorf("%d %s", a.status, a.body)
		}
		if a := h.do("GET", "/v1/sandboxes", "", "Authorization", "Bearer "+adminKey); a.status != 200 {
			t.Errorf("a right key waits for what others guess: %d", a.status)
		}
		if a := h.do("GET", "/v1/sandboxes", ""); a.status != 200 {
			t.Errorf("locked out: %d %s", a.status, a.body)
		}
		if a := h.do("GET", "/healthz", "", "Authorization", ""); a.status != 200 {
			t.Error(a.status)
		}
	})
	t.Run("an authenticator that cannot answer is not the key's fault", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.Auth = deafAuth{}; c.AuthFailures = 1 })
		for range 3 {
			if a := h.do("GET", "/v1/sandboxes", ""); a.status != 503 {
				t.Errorf("%d %s", a.status, a.body)
			}
		}
	})
	t.Run("a revoked key ends a call that runs", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		done := make(chan error, 1)
		go func() {
			_, err := h.client.Run(context.Background(), sb.ID, boxed.ExecRequest{Args: []string{"sleep"}})
			done <- err
		}()
		eventually(t, "it runs", func() bool { return h.called("Exec") == 1 })
		start := time.Now()
		h.keys.revoke("user")
		if err := <-done; !errors.Is(err, boxed.CodeUnauthenticated) {
			t.Error(err)
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Error(d)
		}
		if a := h.do("GET", "/v1/sandboxes", ""); a.status != 401 {
			t.Error(a.status)
		}
	})
}

type deafAuth struct{}

func (deafAuth) Authenticate(context.Context, string) (boxed.Principal, error) {
	return boxed.Principal{}, boxed.Errorf(boxed.CodeNotReady, "the store is opening")
}
func (deafAuth) Watch(string) (<-chan struct{}, func()) { return nil, func() {} }

// A body that is held back until the key is revoked acts no more than a fresh
// request would.
func TestABodyHeldBackPastRevocationIsRefused(t *testing.T) {
	h := newHarness(t)
	conn, err := net.Dial("tcp", h.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := `{"name":"late"}`
	fmt.Fprintf(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", userKey, len(body), body[:5])
	eventually(t, "the request is authenticated", func() bool { return h.keys.asked("user") })
	h.keys.revoke("user")
	io.WriteString(conn, body[5:])
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("%+v %v", resp, err)
	}
	if h.called("Create") != 0 {
		t.Error("a revoked key made a sandbox")
	}
}

func TestANameThatIsThereTwiceIsRefused(t *testing.T) {
	h := newHarness(t)
	for _, body := range []string{
		`{"limits":{"memory_bytes":1073741824,"bogus":true},"limits":{"cpus":2}}`,
		`{"env":{"A":"1","A":"2"}}`,
		`{"name":"a","labels":{},"name":"b"}`,
	} {
		if a := h.do("POST", "/v1/sandboxes", body); a.status != 400 {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	if a := h.do("POST", "/v1/sandboxes", `{"labels":{"a":"1","b":"1"},"files":[{"path":"a","content":""},{"path":"b","content":""}],"limits":{"cpus":1}}`); a.status != 201 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// Calls of HTTP/2 that end because the node goes away leave nothing behind that
// touches an answer after its handler: that would end the process.
func TestManyCallsOverHTTP2EndTogether(t *testing.T) {
	for range 5 {
		h := newHarness(t)
		sb := h.add("x")
		server := httptest.NewUnstartedServer(h.server)
		server.EnableHTTP2 = true
		server.StartTLS()
		var calls sync.WaitGroup
		for range 100 {
			calls.Go(func() {
				req, err := http.NewRequest("GET", server.URL+"/v1/sandboxes/"+string(sb.ID)+"/wait?state=stopped&timeout=1m", nil)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Authorization", "Bearer "+userKey)
				if resp, err := server.Client().Do(req); err == nil {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			})
		}
		eventually(t, "all wait", func() bool { return h.called("Wait") >= 100 })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err := h.server.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		calls.Wait()
		server.Close()
	}
}
