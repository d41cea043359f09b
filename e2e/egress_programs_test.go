package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Images that make test builds.
const (
	programsImage = "boxed/egress:bookworm"
	browserImage  = "boxed/browser:bookworm"
)

// program is one that people and agents run in a sandbox.
type program struct {
	name    string // of its row in docs/egress-tls.md
	version string // prints it
	section string // of the document: its commands come first
	script  string // asks for something of $HOST, in an empty directory
	want    string // is in what that prints
	proxy   string // what it does with the variables, in the words of the document
	heavy   bool   // it takes long to start: not all ways with all modes
	looks   bool   // it looks at the certificate and asks for nothing, which is as if it rejected it
}

// What programs do with the proxy variables.
const (
	proxyAny  = "yes, SOCKS too"
	proxyHTTP = "yes"
	proxyNone = "no"
)

var programs = []program{
	{name: "curl", version: "curl --version", script: `curl -sS https://$HOST/hello`, want: "hello over HTTP/2", proxy: proxyAny},
	{name: "wget", version: "wget --version", section: "wget", script: `wget -qO- https://$HOST/hello`, want: "hello over", proxy: proxyHTTP},
	{name: "OpenSSL", version: "openssl version", script: `printf 'GET /hello HTTP/1.0\r\nHost: %s\r\n\r\n' $HOST | openssl s_client -quiet -verify_return_error -connect $HOST:443 -servername $HOST`, want: "hello over", proxy: proxyNone},
	{name: "git", version: "git --version", section: "git", script: `git clone -q https://$HOST/acme/app.git d && cd d && cat README && head -c 1500000 /dev/urandom >big && git add big && git -c user.name=x -c user.email=x@x commit -qm more && git push -q`, want: "the readme", proxy: proxyAny},
	{name: "Python's urllib", version: "python3 --version", script: `python3 -c 'import os, urllib.request; print(urllib.request.urlopen("https://" + os.environ["HOST"] + "/hello").read())'`, want: "hello over", proxy: proxyHTTP},
	{name: "requests", version: pipVersion("requests"), script: `/opt/pypi/bin/python -c 'import os, requests; print(requests.get("https://" + os.environ["HOST"] + "/hello").text)'`, want: "hello over", proxy: proxyAny, heavy: true},
	{name: "httpx", version: pipVersion("httpx"), script: `/opt/pypi/bin/python -c 'import os, httpx; print(httpx.Client(http2=True).get("https://" + os.environ["HOST"] + "/hello").text)'`, want: "hello over", proxy: proxyAny, heavy: true},
	{name: "Node, Debian's", version: "node --version", script: fetchScript("node"), want: "hello over", proxy: proxyNone},
	{name: "Node", version: "/opt/npm/bin/node --version", script: fetchScript("/opt/npm/bin/node"), want: "hello over", proxy: proxyHTTP},
	{name: "Deno", version: "/opt/npm/bin/deno --version", script: `/opt/npm/bin/deno eval 'console.log(await (await fetch("https://" + Deno.env.get("HOST") + "/hello")).text())'`, want: "hello over", proxy: proxyAny},
	{name: "Bun", version: "/opt/npm/bin/bun --version", script: `/opt/npm/bin/bun -e 'console.log(await (await fetch("https://" + process.env.HOST + "/hello")).text())'`, want: "hello over", proxy: proxyHTTP},
	{name: "Go", version: "cat /workspace/go/VERSION", script: `/workspace/reach get https://$HOST/hello`, want: "hello over HTTP/2", proxy: proxyHTTP},
	{name: "Java", version: "java -version 2>&1", section: "Java", script: javaScript, want: "hello over", proxy: proxyNone, heavy: true},
	{name: "keytool", version: "java -version 2>&1", script: `keytool -printcert -sslserver $HOST:443`, want: "Owner: CN=", proxy: proxyNone, looks: true},
	{name: "gRPC, Python's", version: pipVersion("grpcio"), script: `/opt/pypi/bin/python /workspace/say.py $HOST:443`, want: "hello grpc OK", proxy: proxyHTTP},

	{name: "pip, Debian's", version: "pip3 --version", script: `pip3 download -q --no-deps --index-url https://$HOST/simple boxed-hello && ls`, want: "boxed_hello-1.0.0-py3-none-any.whl", proxy: proxyHTTP, heavy: true},
	{name: "pip", version: "/opt/pypi/bin/pip --version", script: `/opt/pypi/bin/pip download -q --no-deps --index-url https://$HOST/simple boxed-hello && ls`, want: "boxed_hello-1.0.0-py3-none-any.whl", proxy: proxyHTTP, heavy: true},
	{name: "uv", version: "/opt/pypi/bin/uv --version", script: `/opt/pypi/bin/uv pip install -q --no-cache --target t --index-url https://$HOST/simple boxed-hello && cat t/boxed_hello.py`, want: "hello of pypi", proxy: proxyAny},
	{name: "npm", version: "npm --version", script: `npm install --silent --cache c --registry https://$HOST/npm/ boxed-hello && node -p 'require("boxed-hello")'`, want: "hello of npm", proxy: proxyHTTP, heavy: true},
	{name: "go mod", version: "cat /workspace/go/VERSION", script: `export HOME=$PWD GOROOT=/workspace/go GOPROXY=https://$HOST/go GONOSUMDB='*' GOFLAGS=-modcacherw; $GOROOT/bin/go mod download -json go.acme.example/hello@v1.0.0`, want: `"Sum": "h1:`, proxy: proxyHTTP},
	{name: "cargo", version: "/workspace/rust/cargo --version", script: crate + `printf '[source.crates-io]\nreplace-with = "x"\n[source.x]\nregistry = "sparse+https://%s/crates/"\n' $HOST >.cargo/config.toml; cargo fetch -q; ls .cargo/registry/cache/*`, want: "boxed-hello-1.0.0.crate", proxy: proxyAny},
	{name: "apt", version: "apt-get --version", section: "apt", script: debian("https"), want: "boxed-hello_1.0.0_all.deb", proxy: proxyHTTP},
	{name: "apt, port 80", version: "apt-get --version", section: "apt", script: debian("http"), want: "boxed-hello_1.0.0_all.deb", proxy: proxyHTTP},
}

func pipVersion(name string) string {
	return `/opt/pypi/bin/python -c 'import importlib.metadata as m; print(m.version("` + name + `"))'`
}

func fetchScript(node string) string {
	return node + ` -e 'fetch("https://" + process.env.HOST + "/hello").then(r => r.text()).then(console.log)'`
}

// javaScript asks by both of Java's own clients.
const javaScript = `export JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=$HOME/trust.jks; ls /workspace/*.class >/dev/null 2>&1 || ecj -proc:none -17 -d /workspace /workspace/Fetch.java
java -cp /workspace Fetch https://$HOST/hello`

const javaSource = `import java.io.*;
import java.net.*;
import java.net.http.*;

public class Fetch {
    public static void main(String[] args) throws Exception {
        URI uri = URI.create(args[0]);
        System.out.print(HttpClient.newHttpClient().send(HttpRequest.newBuilder(uri).build(), HttpResponse.BodyHandlers.ofString()).body());
        try (InputStream in = uri.toURL().openStream()) {
            in.transferTo(System.out);
        }
    }
}
`

// crate is a package that wants another one. Its rustc is asked for nothing but what it is.
const crate = `export PATH=/workspace/rust:$PATH CARGO_HOME=$PWD/.cargo; mkdir src .cargo; touch src/lib.rs
printf '[package]\nname = "x"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\nboxed-hello = "1"\n' >Cargo.toml
`

// debian reads a repository as a user who is not root.
func debian(scheme string) string {
	return `echo "deb [trusted=yes] ` + scheme + `://$HOST/debian bookworm main" >sources.list; export APT_CONFIG=$HOME/apt.conf
get() { apt-get -q -o Dir::Etc::sourcelist=$PWD/sources.list -o Dir::Etc::sourceparts=- "$@"; }
rm -rf $HOME/apt/state/lists/*_*; get update && get download boxed-hello && ls *.deb`
}

// ways are how a program that heeds variables comes out.
var ways = map[string]string{
	"proxy": "",
	"none":  `unset HTTP_PROXY http_proxy HTTPS_PROXY https_proxy ALL_PROXY all_proxy NODE_USE_ENV_PROXY`,
	"SOCKS": `unset HTTP_PROXY http_proxy HTTPS_PROXY https_proxy NODE_USE_ENV_PROXY; export ALL_PROXY=socks5h://127.0.0.1:1080 all_proxy=socks5h://127.0.0.1:1080`,
}

// entry is the way that a program comes by.
func (p program) entry(way string) boxed.EgressEntry {
	switch {
	case p.proxy != proxyNone && way == "proxy":
		return boxed.EntryHTTP
	case p.proxy == proxyAny && way == "SOCKS":
		return boxed.EntrySOCKS5
	}
	return boxed.EntryName
}

// trial is a sandbox in which programs are tried.
type trial struct {
	*outside
	in *internet
	n  *node
	id boxed.ID
}

// Hosts that everything is at: one behind a tunnel, one whose TLS the node reads. The last one is that of the
// document's commands.
const (
	tunnelHost = "tunnel.acme.example"
	readHost   = "read.acme.example"
	docHost    = "example.com"
)

const programsProfile = `
version: 1
name: programs
rules:
- host: tunnel.acme.example
- {host: tunnel.acme.example, ports: [80]}
- {host: read.acme.example, mode: intercept}
- {host: read.acme.example, ports: [80]}
- {host: get.acme.example, mode: intercept, methods: [GET]}
- {host: example.com, mode: intercept}
- {host: "*.strict.example", mode: intercept}
- {host: ech.acme.example, allow_ech: true}
- {host: git.acme.example, ports: [22], raw: true}
`

// newTrial starts a node, servers, and a sandbox of the image.
func newTrial(t *testing.T, image string) *trial {
	t.Helper()
	needImage(t, image)
	in := newInternet(t)
	for _, name := range []string{tunnelHost, readHost, docHost, "get.acme.example", "ech.acme.example", "git.acme.example"} {
		in.name(name)
	}
	tr := &trial{outside: newOutside(t, in), in: in, n: in.node()}
	if _, err := tr.n.ApplyProfile(t.Context(), []byte(programsProfile), false); err != nil {
		t.Fatal(err)
	}
	tr.id = tr.sandbox(image, boxed.EgressSpec{Profile: "programs"})
	return tr
}

func needImage(t *testing.T, image string) {
	t.Helper()
	needEngine(t)
	if err := exec.Command("docker", "image", "inspect", image).Run(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("there is no image %s, which make test builds", image)
		}
		t.Skip("there is no image " + image + " on this host; make test builds it")
	}
}

func (tr *trial) sandbox(image string, egress boxed.EgressSpec) boxed.ID {
	tr.t.Helper()
	limits := boxed.Limits{MemoryBytes: 2048 * boxed.MiB, CPUs: 2, Processes: 512, WorkspaceBytes: 256 * boxed.MiB, TmpBytes: 256 * boxed.MiB, HomeBytes: 128 * boxed.MiB}
	return tr.n.create(boxed.Spec{Image: image, Limits: limits, Egress: &egress}).ID
}

// copyIn copies a file or directory of this host to /workspace.
func (tr *trial) copyIn(from, name string) {
	tr.t.Helper()
	if out, errs, code := tr.n.ctl("cp", from, string(tr.id)+":/workspace/"+name); code != 0 {
		tr.t.Fatalf("cp %s: %s%s", from, out, errs)
	}
}

// try runs a script in an empty directory, with HOST set.
func (tr *trial) try(way, host, script string) (string, boxed.ExitStatus) {
	tr.t.Helper()
	return tr.n.sh(tr.id, fmt.Sprintf("%s\nexport HOST=%s\ncd $(mktemp -d)\n%s", ways[way], host, script))
}

// records are those of the sandbox after a number, of a host, once all that it opened has ended.
func (tr *trial) records(t *testing.T, host string, after uint64) (list []boxed.EgressRecord) {
	t.Helper()
	within(t, 15*time.Second, "the audit log to have all of "+host, func() bool {
		list = nil
		open := 0
		for r, err := range tr.n.EgressLog(t.Context(), boxed.EgressFilter{Sandbox: tr.id, After: after, Limit: 1000}) {
			switch {
			case err != nil:
				t.Fatal(err)
			case r.Host != host || r.Entry == boxed.EntryDNS:
				continue
			case r.End:
				open--
			case r.Allowed:
				open++
			}
			list = append(list, r)
		}
		return open == 0 && len(list) > 0
	})
	return list
}

// last is the number of the newest record.
func (tr *trial) last(t *testing.T) (seq uint64) {
	t.Helper()
	for r, err := range tr.n.EgressLog(t.Context(), boxed.EgressFilter{Sandbox: tr.id, Limit: 1}) {
		if err != nil {
			t.Fatal(err)
		}
		seq = r.Seq
	}
	return seq
}

// reach tries a program by a way, at a host, and checks what the audit log says of it.
func (tr *trial) reach(t *testing.T, way, host string, p program, entry boxed.EgressEntry) {
	t.Helper()
	before := tr.last(t)
	out, status := tr.try(way, host, p.script)
	if status.Code != 0 || !strings.Contains(out, p.want) {
		t.Errorf("%+v: %s", status, out)
		return
	}
	for _, r := range tr.records(t, host, before) {
		read := host == readHost || host == "api.github.com" || r.Port == 80
		if p.looks && read {
			if r.Reason != boxed.EgressRejectedCA {
				t.Errorf("the audit log says %s: %s", r.Reason, r.Detail)
			}
			continue
		}
		if r.Entry != entry || !r.Allowed {
			t.Errorf("it came by %s, allowed %v (%s); want %s", r.Entry, r.Allowed, r.Detail, entry)
		}
		if (r.Method != "") != read {
			t.Errorf("at %s:%d the node read %q", host, r.Port, r.Method)
		}
	}
}

// Each program reaches what it is allowed: through a tunnel and where the node reads it, by the proxy
// variables, without any, and by SOCKS where it knows that.
func TestProgramsReachOut(t *testing.T) {
	tr := newTrial(t, programsImage)
	tr.bring()
	tr.bringToolchains()
	document := readDocument(t)
	env, _ := tr.n.sh(tr.id, "env")
	head, _, _ := strings.Cut(document.text, "\n## ")
	for _, m := range regexp.MustCompile("`([A-Z_]+)`").FindAllStringSubmatch(head, -1) {
		if !strings.Contains("\n"+env, "\n"+m[1]+"=/run/boxed/") {
			t.Errorf("docs/egress-tls.md speaks of %s, which a sandbox does not have", m[1])
		}
	}
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			if p.name == "cargo" {
				tr.needCargo(t)
			}
			version, _ := tr.n.sh(tr.id, p.version)
			version, _, _ = strings.Cut(version, "\n")
			for _, script := range document.commands(t, p.section) {
				if out, status := tr.n.sh(tr.id, "set -e\n"+script); status.Code != 0 {
					t.Fatalf("%s\n%+v: %s", script, status, out)
				}
			}
			began := time.Now()
			for _, way := range []string{"proxy", "none", "SOCKS"} {
				for mode, host := range map[string]string{"tunnel": tunnelHost, "intercept": readHost} {
					switch {
					case way == "none" && p.proxy == proxyNone, way == "SOCKS" && p.proxy != proxyAny:
						continue // the same as before
					case p.heavy && way == "proxy" && mode == "tunnel" && p.proxy != proxyNone, p.heavy && way != "proxy" && mode == "intercept":
						continue
					}
					t.Run(way+" "+mode, func(t *testing.T) { tr.reach(t, way, host, p, p.entry(way)) })
				}
			}
			t.Logf("%s: %v", version, time.Since(began).Round(10*time.Millisecond))
			document.row(t, p)
		})
	}
	for _, c := range alsoSaid {
		t.Run(c.name, func(t *testing.T) { tr.reach(t, "none", readHost, c.p, c.entry) })
	}
	t.Run("SOCKS with an address", func(t *testing.T) {
		if out, status := tr.try("none", tunnelHost, `curl -sS -x socks5://127.0.0.1:1080 https://$HOST/hello`); status.Code == 0 {
			t.Errorf("an address from within means something outside: %s", out)
		}
	})
}

// alsoSaid are what the document says besides of single programs.
var alsoSaid = []struct {
	name  string
	p     program
	entry boxed.EgressEntry
}{
	{"OpenSSL by the proxy", program{script: `printf 'GET /hello HTTP/1.0\r\nHost: %s\r\n\r\n' $HOST | openssl s_client -proxy 127.0.0.1:3128 -quiet -verify_return_error -connect $HOST:443 -servername $HOST`, want: "hello over"}, boxed.EntryHTTP},
	{"Java by the proxy", program{script: strings.Replace(javaScript, "java -cp", "java -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=3128 -cp", 1), want: "hello over"}, boxed.EntryHTTP},
}

// bring copies into the sandbox what no image has.
func (tr *trial) bring() {
	tr.t.Helper()
	dir := tr.t.TempDir()
	reach := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, "reach"), "./testdata/reach")
	reach.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := reach.CombinedOutput(); err != nil {
		tr.t.Fatalf("build reach: %v: %s", err, text)
	}
	tr.copyIn(filepath.Join(dir, "reach"), "reach")
	for name, text := range map[string]string{"say.py": sayScript, "events.py": eventsScript, "Fetch.java": javaSource} {
		tr.copyIn(write(tr.t, filepath.Join(dir, name), []byte(text)), name)
	}
}

// bringToolchains copies what is too large for an image, and here already: the go command, which needs no more of
// Go to fetch modules, and cargo with no more of Rust than its name.
func (tr *trial) bringToolchains() {
	tr.t.Helper()
	dir := tr.t.TempDir()
	take := func(from, to string) {
		tr.t.Helper()
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(to), 0o755)
		}
		if err == nil {
			err = os.WriteFile(to, text, 0o755)
		}
		if err != nil {
			tr.t.Fatal(err)
		}
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		tr.t.Fatal(err)
	}
	for _, name := range []string{"bin/go", "go.env", "VERSION"} {
		take(filepath.Join(strings.TrimSpace(string(root)), name), filepath.Join(dir, "go", name))
	}
	tr.copyIn(filepath.Join(dir, "go"), "go")
	if cargo := hostCargo(); cargo != "" {
		take(cargo, filepath.Join(dir, "rust", "cargo"))
		if err := os.WriteFile(filepath.Join(dir, "rust", "rustc"), []byte(rustcStandIn()), 0o755); err != nil {
			tr.t.Fatal(err)
		}
		tr.copyIn(filepath.Join(dir, "rust"), "rust")
	}
}

const sayScript = `import sys, grpc
with grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials()) as c:
    reply, call = c.unary_unary("/hello.Greeter/Say").with_call(b"grpc", timeout=20)
    print(reply.decode(), call.code().name)
`

// hostCargo is the real cargo of this host, not rustup's that starts it. Debian's is a hundred megabytes of Rust
// besides, and older than sparse registries.
func hostCargo() string {
	if out, err := exec.Command("rustup", "which", "cargo").Output(); err == nil {
		return strings.TrimSpace(string(out))
	}
	found, _ := exec.LookPath("cargo")
	return found
}

// needCargo skips where the host has no cargo that runs within, or an old one.
func (tr *trial) needCargo(t *testing.T) {
	t.Helper()
	out, status := tr.n.sh(tr.id, "/workspace/rust/cargo --version")
	minor := 0
	fmt.Sscanf(out, "cargo 1.%d", &minor)
	if status.Code != 0 || minor < 70 {
		t.Skipf("this host has no cargo that runs within and knows sparse registries: %s", out)
	}
}

// rustcStandIn says what the host's rustc is: of its 300 MB nothing else is asked for.
func rustcStandIn() string {
	version, _ := exec.Command("rustc", "-vV").Output()
	target, _ := exec.Command("rustc", "-", "--crate-name", "___", "--print=file-names", "--crate-type", "bin", "--crate-type", "rlib", "--crate-type", "dylib",
		"--crate-type", "cdylib", "--crate-type", "staticlib", "--crate-type", "proc-macro", "--print=sysroot", "--print=split-debuginfo", "--print=crate-name", "--print=cfg").Output()
	return fmt.Sprintf("#!/bin/sh\nif [ \"$1\" = - ]; then cat <<'X'\n%sX\nelse cat <<'X'\n%sX\nfi\n", target, version)
}

// document is docs/egress-tls.md.
type document struct{ text string }

func readDocument(t *testing.T) document {
	t.Helper()
	text, err := os.ReadFile("../docs/egress-tls.md")
	if err != nil {
		t.Fatal(err)
	}
	return document{string(text)}
}

// shBlock finds the commands that are for within a sandbox.
var shBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```")

// sections of the document by their headings.
func (d document) sections() map[string]string {
	out := map[string]string{}
	for _, part := range strings.Split("\n"+d.text, "\n## ")[1:] {
		heading, text, _ := strings.Cut(part, "\n")
		out[heading] = text
	}
	return out
}

// commands are the blocks of a section.
func (d document) commands(t *testing.T, section string) (scripts []string) {
	t.Helper()
	if section == "" {
		return nil
	}
	for _, m := range shBlock.FindAllStringSubmatch(d.sections()[section], -1) {
		scripts = append(scripts, m[1])
	}
	if len(scripts) == 0 {
		t.Fatalf("docs/egress-tls.md has no commands under %q", section)
	}
	return scripts
}

// row checks what the document's table says of a program.
func (d document) row(t *testing.T, p program) {
	t.Helper()
	for line := range strings.Lines(d.text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) < 4 || strings.TrimSpace(cells[0]) != p.name {
			continue
		}
		if got := strings.TrimSpace(cells[2]); got != p.proxy {
			t.Errorf("docs/egress-tls.md says %q of its proxy variables, which is %q", got, p.proxy)
		}
		if p.section != "" && !strings.Contains(line, "(#"+strings.ToLower(p.section)+")") {
			t.Error("docs/egress-tls.md does not lead to what is to be done")
		}
		return
	}
	t.Errorf("docs/egress-tls.md has no row for %s", p.name)
}
