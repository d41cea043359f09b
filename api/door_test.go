package api_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

// serveOn serves on a listener of the loopback and returns its address.
func serveOn(t *testing.T, server *http.Server) string {
	t.Helper()
	s := &httptest.Server{Config: server}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Listener = ln
	s.Start()
	t.Cleanup(s.Close)
	return ln.Addr().String()
}

type ask struct {
	method, path, host string
	header             map[string]string
	body               string
}

func (a ask) do(t *testing.T, addr string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), a.method, "http://"+addr+a.path, strings.NewReader(a.body))
	if err != nil {
		t.Fatal(err)
	}
	if a.host != "" {
		r.Host = a.host
	}
	for name, value := range a.header {
		r.Header.Set(name, value)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// Case I13: where callers are known by their connection, which a browser lends to
// every page, an evil Host, Origin, content type or rebound name is refused all the
// same.
func TestADoorServesItsOwnNamesAndNoForeignPage(t *testing.T) {
	h := newHarness(t)
	server, err := h.server.DoorHTTPServer(api.Door{
		Hosts: []string{"boxed-attic", "boxed-attic.tail1.ts.net", "100.64.0.7"},
		Identify: func(_ context.Context, addr string) (boxed.Principal, error) {
			if !strings.HasPrefix(addr, "127.0.0.1:") {
				t.Errorf("the address is %q", addr)
			}
			return boxed.Principal{Owner: "ann@example.com", Role: boxed.RoleUser}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	addr := serveOn(t, server)
	post := func(host string, header map[string]string) ask {
		all := map[string]string{"Content-Type": "application/json"}
		for k, v := range header {
			all[k] = v
		}
		return ask{"POST", "/v1/sandboxes", host, all, "{}"}
	}
	for name, tc := range map[string]struct {
		ask    ask
		status int
	}{
		"by its name":              {post("boxed-attic", nil), 201},
		"by its whole name":        {post("boxed-attic.tail1.ts.net:80", nil), 201},
		"by its address":           {post("100.64.0.7", nil), 201},
		"of its own page":          {post("boxed-attic", map[string]string{"Origin": "http://boxed-attic", "Sec-Fetch-Site": "same-origin"}), 201},
		"by a rebound name":        {post("evil.example", nil), 403},
		"by the loopback's":        {post("127.0.0.1", nil), 403},
		"by a name that begins so": {post("boxed-attic.evil.example", nil), 403},
		"of a foreign page":        {post("boxed-attic", map[string]string{"Origin": "http://evil.example"}), 403},
		"of a sandboxed page":      {post("boxed-attic", map[string]string{"Origin": "null"}), 403},
		"of one that begins so":    {post("boxed-attic", map[string]string{"Origin": "http://boxed-attic.evil.example"}), 403},
		"from another site":        {post("boxed-attic", map[string]string{"Sec-Fetch-Site": "cross-site"}), 403},
		"as a form posts":          {post("boxed-attic", map[string]string{"Content-Type": "text/plain"}), 415},
		"as a form with a field":   {post("boxed-attic", map[string]string{"Content-Type": "application/x-www-form-urlencoded"}), 415},
		"a page that reads":        {ask{"GET", "/v1/sandboxes", "boxed-attic", map[string]string{"Sec-Fetch-Site": "cross-site"}, ""}, 403},
		"with a wrong key":         {post("boxed-attic", map[string]string{"Authorization": "Bearer boxed_wrong"}), 401},
		"with another scheme":      {post("boxed-attic", map[string]string{"Authorization": "Basic YTpi"}), 401},
	} {
		if status, text := tc.ask.do(t, addr); status != tc.status {
			t.Errorf("%s: got %d, not %d: %s", name, status, tc.status, text)
		}
	}
}

// What comes from another node is served with the rights of the key that it
// carries, and not passed on again; a client cannot pretend to be a node.
func TestACallThatANodePassesOnHasItsCallersRights(t *testing.T) {
	vouched := 0
	h := newHarness(t, func(c *api.Config) {
		c.Vouched = func(_ context.Context, text string, from boxed.NodeID, method, path string) (boxed.Principal, error) {
			vouched++
			if text != "ann" || from != "peerpeerpeerpeer" || method != "GET" || path != "/v1/sandboxes" {
				return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated, "no")
			}
			return boxed.Principal{Owner: "ann", Role: boxed.RoleUser}, nil
		}
		c.Owner = func(ctx context.Context, id boxed.ID) (http.RoundTripper, error) {
			if boxed.HopFrom(ctx) == "" {
				t.Error("a call of a node has no hop")
			}
			return nil, nil
		}
	})
	const self = "selfselfselfself"
	peer := serveOn(t, h.server.PeerHTTPServer(self, func(net.Conn) boxed.Peer { return boxed.Peer{Node: "peerpeerpeerpeer"} }))
	nobody := serveOn(t, h.server.PeerHTTPServer(self, func(net.Conn) boxed.Peer { return boxed.Peer{} }))
	front := strings.TrimPrefix(h.http.URL, "http://")
	assert := map[string]string{"X-Boxed-Assertion": "ann"}
	for name, tc := range map[string]struct {
		addr   string
		ask    ask
		status int
	}{
		"a node vouches":                        {peer, ask{"GET", "/v1/sandboxes", self, assert, ""}, 200},
		"a node vouches for another call":       {peer, ask{"DELETE", "/v1/sandboxes/" + string(boxed.NewID(testNode)), self, assert, ""}, 401},
		"a node says nothing of its caller":     {peer, ask{"GET", "/v1/sandboxes", self, nil, ""}, 401},
		"for another node":                      {peer, ask{"GET", "/v1/sandboxes", "otherotherothero", assert, ""}, 403},
		"of a browser's page":                   {peer, ask{"GET", "/v1/sandboxes", self, map[string]string{"X-Boxed-Assertion": "ann", "Origin": "http://" + self}, ""}, 403},
		"a connection that proved to be nobody": {nobody, ask{"GET", "/v1/sandboxes", self, assert, ""}, 403},
		"a client that vouches for itself":      {front, ask{"GET", "/v1/sandboxes", "127.0.0.1", assert, ""}, 401},
		"a cluster is not made through a node":  {peer, ask{"GET", "/v1/cluster", self, assert, ""}, 401},
	} {
		if status, text := tc.ask.do(t, tc.addr); status != tc.status {
			t.Errorf("%s: got %d, not %d: %s", name, status, tc.status, text)
		}
	}
	if vouched != 3 {
		t.Errorf("%d assertions were judged", vouched)
	}
}
