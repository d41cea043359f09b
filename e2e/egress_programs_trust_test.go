package e2e_test

import (
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// A program that does not trust the sandbox's authority is on the audit log as such, however it says so: by an
// alert, in silence, or only after the handshake.
func TestProgramsThatDoNotTrustAreNamed(t *testing.T) {
	tr := newTrial(t, programsImage)
	tr.bring()
	const own = `unset SSL_CERT_FILE CURL_CA_BUNDLE REQUESTS_CA_BUNDLE PIP_CERT GIT_SSL_CAINFO CARGO_HTTP_CAINFO NODE_EXTRA_CA_CERTS DENO_CERT GRPC_DEFAULT_SSL_ROOTS_FILE_PATH` + "\n"
	for name, script := range map[string]string{
		"curl":   `curl -sS https://$HOST/`,
		"wget":   `wget -qO- https://$HOST/`, // GnuTLS looks when the handshake is over
		"git":    `git ls-remote https://$HOST/acme/app.git`,
		"python": `python3 -c 'import os, urllib.request; urllib.request.urlopen("https://" + os.environ["HOST"])'`,
		"node":   `/opt/npm/bin/node -e 'fetch("https://" + process.env.HOST)'`,
		"deno":   `/opt/npm/bin/deno eval 'await fetch("https://" + Deno.env.get("HOST"))'`,
		"bun":    `/opt/npm/bin/bun -e 'await fetch("https://" + process.env.HOST)'`,
		"go":     `/workspace/reach get https://$HOST/`,
		"java":   `ecj -proc:none -17 -d . /workspace/Fetch.java; java Fetch https://$HOST/`,
		"uv":     `/opt/pypi/bin/uv pip install -q --no-cache --target t --index-url https://$HOST/simple boxed-hello`,
		"apt":    `echo "deb [trusted=yes] https://$HOST/debian bookworm main" >l; mkdir -p s/lists/partial c; apt-get -q -o Acquire::Retries=0 -o APT::Update::Error-Mode=any -o Dir::State=$PWD/s -o Dir::Cache=$PWD/c -o Dir::Etc::sourcelist=$PWD/l -o Dir::Etc::sourceparts=- update`,
		"pinned": `CURL_CA_BUNDLE=/run/boxed/bundle.pem curl -sS --pinnedpubkey sha256//AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= https://$HOST/`,
	} {
		t.Run(name, func(t *testing.T) {
			host := name + ".strict.example"
			tr.in.name(host)
			before := tr.last(t)
			if out, status := tr.try("proxy", host, own+script); status.Code == 0 {
				t.Errorf("it was content: %s", out)
			}
			for _, r := range tr.records(t, host, before) {
				if r.Allowed || r.Reason != boxed.EgressRejectedCA || !strings.Contains(r.Detail, "docs/egress-tls.md") {
					t.Errorf("the audit log says %v %s %s", r.Allowed, r.Reason, r.Detail)
				}
			}
		})
	}
	if seen := tr.in.requests(); len(seen) != 0 {
		t.Errorf("servers saw %+v", seen)
	}
}

// What the document tells to do is done, and no command is in it that no test runs.
func TestTheTLSDocumentIsRight(t *testing.T) {
	document := readDocument(t)
	ran := map[string]bool{"SSH": true, "Chromium": true} // by their own tests
	for _, p := range programs {
		ran[p.section] = true
	}
	for heading, text := range document.sections() {
		if shBlock.MatchString(text) && !ran[heading] {
			t.Errorf("no test runs the commands under %q", heading)
		}
	}
}

// A browser: its tunnels hide a name or seem to, and its roots are in a database of its own.
func TestABrowserReachesOut(t *testing.T) {
	tr := newTrial(t, browserImage)
	const browse = `chromium-headless-shell --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking --user-data-dir=$PWD %s --dump-dom https://$HOST/hello 2>/dev/null`
	plain := strings.ReplaceAll(browse, "%s ", "")
	version, _ := tr.n.sh(tr.id, "chromium-headless-shell --version")
	t.Log(strings.TrimSpace(version))

	before := tr.last(t)
	if out, _ := tr.try("proxy", readHost, plain); strings.Contains(out, "hello over") {
		t.Errorf("it trusts the authority before it was told to: %s", out)
	}
	if got := tr.records(t, readHost, before); got[0].Reason != boxed.EgressRejectedCA {
		t.Errorf("the audit log says %s: %s", got[0].Reason, got[0].Detail)
	}
	for _, script := range readDocument(t).commands(t, "Chromium") {
		if out, status := tr.n.sh(tr.id, "set -e\n"+script); status.Code != 0 || !strings.Contains(out, "hello") {
			t.Fatalf("%s\n%+v: %s", script, status, out)
		}
	}
	readDocument(t).row(t, program{name: "Chromium", section: "Chromium", proxy: proxyHTTP})
	for _, way := range []string{"proxy", "none"} {
		p := program{script: plain, want: "hello over HTTP/2", proxy: proxyHTTP}
		t.Run(way+" intercept", func(t *testing.T) { tr.reach(t, way, readHost, p, p.entry(way)) })
		t.Run(way+" tunnel with allow_ech", func(t *testing.T) { tr.reach(t, way, "ech.acme.example", p, p.entry(way)) })
	}
	t.Run("SOCKS", func(t *testing.T) {
		p := program{script: strings.ReplaceAll(browse, "%s", "--proxy-server=socks5://127.0.0.1:1080"), want: "hello over HTTP/2"}
		tr.reach(t, "proxy", readHost, p, boxed.EntrySOCKS5)
	})
	t.Run("tunnel", func(t *testing.T) {
		before := tr.last(t)
		if out, _ := tr.try("proxy", tunnelHost, plain); strings.Contains(out, "hello over") {
			t.Errorf("it hid no name: %s", out)
		}
		if got := tr.records(t, tunnelHost, before); got[0].Reason != boxed.EgressECH {
			t.Errorf("the audit log says %s: %s", got[0].Reason, got[0].Detail)
		}
	})
}
