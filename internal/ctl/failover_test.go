package ctl

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
)

// door is a node's front door that notes what it is asked.
type door struct {
	*httptest.Server
	mu    sync.Mutex
	asked []string
}

func (d *door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	d.mu.Lock()
	d.asked = append(d.asked, strings.TrimSpace(r.Method+" "+r.URL.EscapedPath()+" "+string(body)))
	d.mu.Unlock()
	if strings.HasSuffix(r.URL.Path, "/pause") { // it breaks off
		conn, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			conn.Close()
		}
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"version":"1","id":"x"}`)
}

func (d *door) heard() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked
}

func openDoor(t *testing.T, secure bool) *door {
	t.Helper()
	d := &door{}
	d.Server = httptest.NewUnstartedServer(d)
	d.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that are meant to fail
	if secure {
		d.StartTLS()
	} else {
		d.Start()
	}
	t.Cleanup(d.Close)
	return d
}

// through speaks to endpoints in this order.
func through(t *testing.T, first endpoint, others ...endpoint) service {
	t.Helper()
	svc, err := dial(target{Endpoint: first.url, Pin: first.pin, Others: others, Key: "boxed_k"})
	if err != nil {
		t.Fatal(err)
	}
	return svc
}

// nobody is an address at which nothing listens.
var nobody = endpoint{url: "http://127.0.0.1:1"}

func TestTheNextEndpointGetsAllOfACall(t *testing.T) {
	second := openDoor(t, false)
	svc := through(t, nobody, endpoint{url: second.URL + "/boxed"})
	if _, err := svc.WriteFile(t.Context(), "abc", boxed.WriteRequest{Path: "f", Content: strings.NewReader("all of it")}); err != nil {
		t.Error(err)
	}
	if _, err := svc.GetNode(t.Context(), "a/b c"); err != nil {
		t.Error(err)
	}
	want := []string{"PUT /boxed/v1/sandboxes/abc/files all of it", "GET /boxed/v1/nodes/a%2Fb%20c"}
	if diff := cmp.Diff(want, second.heard()); diff != "" {
		t.Error(diff)
	}
}

func TestTheEndpointThatAnsweredIsRemembered(t *testing.T) {
	first, second := openDoor(t, false), openDoor(t, false)
	svc := through(t, endpoint{url: first.URL}, endpoint{url: second.URL})
	ask := func() {
		t.Helper()
		if _, err := svc.Version(t.Context()); err != nil {
			t.Error(err)
		}
	}
	ask()
	first.Close()
	ask()
	ask()
	if len(first.heard()) != 1 || len(second.heard()) != 2 {
		t.Errorf("the first was asked %v, the second %v", first.heard(), second.heard())
	}
	second.Close()
	_, err := svc.Version(t.Context())
	if boxed.CodeOf(err) != boxed.CodeNotReady || !strings.Contains(message(err), first.URL+" or "+second.URL) {
		t.Errorf("with nobody there: %v", err)
	}
}

// The attack: who stands in the way of one node, or makes it fail in the middle
// of a call, must not be able to send the call, and the key, to another.
func TestWhatMayHaveArrivedIsNotSentAgain(t *testing.T) {
	second := openDoor(t, false)
	secure := openDoor(t, true)
	pin := fmt.Sprintf("%x", sha256.Sum256(secure.Certificate().Raw))
	for name, first := range map[string]endpoint{
		"a certificate of nobody known": {url: secure.URL},
		"another certificate":           {secure.URL, strings.Repeat("0", 64)},
	} {
		svc := through(t, first, endpoint{url: second.URL})
		if _, err := svc.Version(t.Context()); boxed.CodeOf(err) != boxed.CodeNotReady || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v", name, err)
		}
	}
	svc := through(t, endpoint{secure.URL, pin}, endpoint{url: second.URL})
	if _, err := svc.Version(t.Context()); err != nil {
		t.Errorf("the pinned certificate: %v", err)
	}
	if _, err := svc.Pause(t.Context(), "abc"); boxed.CodeOf(err) != boxed.CodeLost {
		t.Errorf("a call that broke off: %v", err)
	}
	if got := second.heard(); len(got) != 0 {
		t.Errorf("the second was asked %v", got)
	}
	if got := secure.heard(); len(got) != 2 {
		t.Errorf("the first was asked %v", got)
	}
}
