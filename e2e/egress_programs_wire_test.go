package e2e_test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// eventsScript acknowledges each event when it has come: the next is not sent before.
const eventsScript = `import os, sys, httpx
url = "https://" + os.environ["HOST"] + "/events"
with httpx.Client(http2=sys.argv[1] == "2", timeout=30) as events, httpx.Client() as acks:
    with events.stream("GET", url) as r:
        for line in r.iter_lines():
            if line.startswith("data: "):
                print(line[6:], end=" ")
                if line == "data: end":
                    break
                acks.post(url + "/" + line[6:]).raise_for_status()
print(r.http_version)
`

// Protocols pass as they are, also where the node reads them.
func TestProtocolsPass(t *testing.T) {
	tr := newTrial(t, programsImage)
	tr.bring()
	sum := sha256.New()
	io.Copy(sum, &pattern{left: wireBytes})
	large := fmt.Sprintf("%x", sum.Sum(nil))
	for _, c := range []struct{ name, script, want string }{
		{"HTTP 1.1", `curl -sS --http1.1 -o /dev/null -w '%{http_code} %{http_version}' https://$HOST/hello`, "200 1.1"},
		{"HTTP 2", `curl -sS --http2 -w '%{http_version}' https://$HOST/hello`, "hello over HTTP/2.0\n2"},
		{"HTTP 2, many at once", `for i in $(seq 50); do printf 'url = https://%s/hello\n' $HOST; done >urls; curl -sS --http2 --parallel --config urls | sort | uniq -c`, "50 hello over HTTP/2.0"},
		{"gRPC with trailers, Python", `/opt/pypi/bin/python /workspace/say.py $HOST:443`, "hello grpc OK"},
		{"gRPC with trailers, Go", `/workspace/reach say https://$HOST`, `"\x00\x00\x00\x00\fhello gopher" status=0 message=said`},
		{"events over HTTP 1.1", `/opt/pypi/bin/python /workspace/events.py 1`, "0 1 2 3 4 end HTTP/1.1"},
		{"events over HTTP 2", `/opt/pypi/bin/python /workspace/events.py 2`, "0 1 2 3 4 end HTTP/2"},
		{"WebSocket, Go", `/workspace/reach socket wss://$HOST/socket`, "echo of one\necho of two"},
		{"WebSocket, Node", `timeout 20 /opt/npm/bin/node -e '` + fmt.Sprintf(socketScript, "process.env.HOST") + `'`, "echo of hi\nclosed"},
		{"WebSocket, Deno", `timeout 20 /opt/npm/bin/deno eval '` + fmt.Sprintf(socketScript, `Deno.env.get("HOST")`) + `'`, "echo of hi\nclosed"},
		{"100-continue with a large upload", `seq 99999999 | head -c 104857600 >z; curl -sSv --http1.1 -H 'Expect: 100-continue' --expect100-timeout 60 -T z https://$HOST/upload 2>&1`, "< HTTP/1.1 100 Continue"},
		{"a large upload over HTTP 1.1", `seq 99999999 | head -c 104857600 | curl -sS --http1.1 -T - https://$HOST/upload`, large},
		{"a large upload over HTTP 2", `seq 99999999 | head -c 104857600 | curl -sS --http2 -T - https://$HOST/upload`, large},
		{"a large download over HTTP 1.1", `curl -sS --http1.1 https://$HOST/download | sha256sum`, large},
		{"a large download over HTTP 2", `/workspace/reach get https://$HOST/download`, large},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Where the node reads it, through the proxy; in a tunnel nothing but the way there is ours.
			for host, way := range map[string]string{readHost: "proxy", tunnelHost: "none"} {
				began := time.Now()
				out, status := tr.try(way, host, c.script)
				if status.Code != 0 || !strings.Contains(out, c.want) {
					t.Errorf("%s: want %q: %+v: %s", host, c.want, status, out)
				}
				t.Logf("%s: %v", host, time.Since(began).Round(10*time.Millisecond))
			}
		})
	}
	// What is refused is refused before a body is sent.
	t.Run("an upload that is refused", func(t *testing.T) {
		out, status := tr.try("proxy", "get.acme.example", `seq 99999999 | head -c 104857600 >z; curl -sS --http1.1 -H 'Expect: 100-continue' --expect100-timeout 60 -w ' sent %{size_upload}' -T z https://$HOST/upload`)
		if status.Code != 0 || !strings.Contains(out, `"reason":"method"`) || !strings.Contains(out, " sent 0") {
			t.Errorf("%+v: %s", status, out)
		}
	})
}

const socketScript = `const s = new WebSocket("wss://" + %s + "/socket"); s.onopen = () => s.send("hi")
s.onmessage = e => { console.log(e.data); s.close() }; s.onclose = () => console.log("closed")`

// The ready profile lets package managers read the real registries as they are set up by themselves, and
// nothing be written there.
func TestPackageManagersNeedNoSettings(t *testing.T) {
	tr := newTrial(t, programsImage)
	tr.id = tr.sandbox(programsImage, boxed.EgressSpec{Profile: "packages"})
	tr.bringToolchains()
	apt := strings.Join(readDocument(t).commands(t, "apt"), "")
	for _, c := range []struct{ name, script, want string }{
		{"pip, Debian's", `pip3 download -q --no-deps boxed-hello && ls`, "boxed_hello-1.0.0"},
		{"pip", `/opt/pypi/bin/pip download -q --no-deps boxed-hello && ls`, "boxed_hello-1.0.0"},
		{"uv", `/opt/pypi/bin/uv pip install -q --no-cache --target t boxed-hello && ls t`, "boxed_hello.py"},
		{"npm", `npm install --silent --cache c boxed-hello && node -p 'require("boxed-hello")'`, "hello of npm"},
		{"go mod", `export HOME=$PWD GOROOT=/workspace/go GONOSUMDB='*' GOFLAGS=-modcacherw; $GOROOT/bin/go mod download -json go.acme.example/hello@v1.0.0`, `"Sum": "h1:`},
		{"cargo", crate + `cargo fetch -q; ls .cargo/registry/cache/*`, "boxed-hello-1.0.0.crate"},
		{"apt", apt + strings.ReplaceAll(debian("http"), "$HOST", "deb.debian.org"), "boxed-hello_1.0.0_all.deb"},
		{"apt over TLS", apt + strings.ReplaceAll(debian("https"), "$HOST", "deb.debian.org"), "boxed-hello_1.0.0_all.deb"},
		{"publishing is refused", `echo '{"name":"boxed-evil","version":"1.0.0"}' >package.json; npm publish --cache c --//registry.npmjs.org/:_authToken=npm_0123456789abcdef 2>&1; true`, "403"},
		{"uploading is refused", `curl -sS -T /etc/passwd https://pypi.org/simple/`, `"reason":"method"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "cargo" {
				tr.needCargo(t)
			}
			out, status := tr.try("proxy", "", c.script)
			if status.Code != 0 || !strings.Contains(out, c.want) {
				t.Errorf("want %q: %+v: %s", c.want, status, out)
			}
		})
	}
	for _, r := range tr.in.requests() {
		if r.Method != "GET" && r.Method != "HEAD" {
			t.Errorf("%s %s%s has left", r.Method, r.Host, r.Path)
		}
	}
}
