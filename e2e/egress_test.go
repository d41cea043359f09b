package e2e_test

import (
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

func TestASandboxReachesWhatItIsAllowed(t *testing.T) {
	in := newInternet(t)
	in.name("api.acme.example")
	in.name("other.acme.example")
	n := in.node()
	s := n.egress(boxed.EgressSpec{Allow: []string{"api.acme.example"}})
	for name, script := range map[string]string{
		"through the proxy":  `curl -sS https://api.acme.example/hello`,
		"through SOCKS":      `curl -sS --noproxy '' -x socks5h://127.0.0.1:1080 https://api.acme.example/hello`,
		"by its name alone":  `curl -sS --noproxy '*' https://api.acme.example/hello`,
		"python, no proxies": `env -u HTTPS_PROXY -u https_proxy python3 -c 'import urllib.request; print(urllib.request.urlopen("https://api.acme.example/hello").read().decode())'`,
	} {
		t.Run(name, func(t *testing.T) {
			out, status := n.sh(s.ID, script)
			if status.Code != 0 || !strings.Contains(out, `"path":"/hello"`) {
				t.Errorf("%+v: %s", status, out)
			}
		})
	}
	out, status := n.sh(s.ID, `curl -sS https://other.acme.example/`)
	if status.Code == 0 || !strings.Contains(out, "403") {
		t.Errorf("a host that is not allowed: %+v: %s", status, out)
	}
}
