package e2e_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// outside are the servers that programs speak to, each as much of the real one as its
// client asks for. All of them are at every name, by their paths, and those of registries
// also where a client looks by itself.
type outside struct {
	t     *testing.T
	repos string            // of git
	token string            // what private servers want to see; "" is nothing
	mux   *http.ServeMux    // of every name
	hosts map[string]string // the path that is the root of a name

	mu        sync.Mutex
	published map[string]json.RawMessage // npm packages by name
	attached  map[string][]byte          // their files by path
	acks      chan string                // of events
}

// Names of the real registries, and what they are here.
var registries = map[string]string{
	"pypi.org": "", "files.pythonhosted.org": "", "registry.npmjs.org": "/npm", "proxy.golang.org": "/go", "index.crates.io": "/crates",
	"static.crates.io": "", "deb.debian.org": "", "api.github.com": "/github", "github.com": "", "api.anthropic.com": "",
}

func newOutside(t *testing.T, in *internet) *outside {
	t.Helper()
	o := &outside{
		t: t, repos: t.TempDir(), mux: http.NewServeMux(), hosts: registries,
		published: map[string]json.RawMessage{}, attached: map[string][]byte{}, acks: make(chan string, 16),
	}
	for name := range registries {
		in.name(name)
	}
	o.serveGit()
	o.serveNPM()
	o.servePyPI()
	o.serveGoProxy()
	o.serveCrates()
	o.serveDebian()
	o.serveGitHub()
	o.serveModels()
	o.serveWire()
	in.handle(o)
	return o
}

func (o *outside) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if root := o.hosts[r.Host]; root != "" && !strings.HasPrefix(r.URL.Path, root+"/") {
		r.URL.Path, r.URL.RawPath = root+r.URL.Path, ""
	}
	o.mux.ServeHTTP(w, r)
}

// files serves files by path.
func (o *outside) files(prefix string, files map[string][]byte) {
	o.mux.HandleFunc("GET "+prefix, func(w http.ResponseWriter, r *http.Request) {
		text, ok := files[strings.TrimPrefix(r.URL.Path, prefix)]
		if !ok {
			http.NotFound(w, r)
			return
		}
		// For the files that name a host.
		text = bytes.ReplaceAll(text, []byte("https://SELF"), []byte("https://"+r.Host))
		http.ServeContent(w, r, filepath.Base(r.URL.Path), time.Time{}, bytes.NewReader(text))
	})
}

// serveGit serves a repository acme/app that everybody may read, and acme/private to who
// has the token.
func (o *outside) serveGit() {
	git, err := exec.LookPath("git")
	if err != nil {
		o.t.Skip("there is no git on this host, which serves repositories")
	}
	for _, name := range []string{"app", "private"} {
		bare := filepath.Join(o.repos, "acme", name+".git")
		work := o.t.TempDir()
		script := `set -e; git init -q --bare "$1"; git -C "$1" config http.receivepack true; git -C "$1" symbolic-ref HEAD refs/heads/main
git init -q "$2"; cd "$2"; echo "the readme" >README; git add .; git -c user.name=x -c user.email=x@x commit -qm one; git push -q "$1" HEAD:refs/heads/main`
		cmd := exec.Command("bash", "-c", script, "bash", bare, work)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if text, err := cmd.CombinedOutput(); err != nil {
			o.t.Fatalf("make a repository: %v: %s", err, text)
		}
	}
	backend := &cgi.Handler{
		Path: git, Args: []string{"http-backend"}, Dir: o.repos,
		Env: []string{"GIT_PROJECT_ROOT=" + o.repos, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	}
	o.mux.HandleFunc("/acme/", func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/acme/private") {
			if user, password, ok := r.BasicAuth(); !ok || user != "x-access-token" || password != o.token {
				w.Header().Set("WWW-Authenticate", `Basic realm="GitHub"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil // CGI has a length
		backend.ServeHTTP(w, r)
	})
}

// tarball is a .tar.gz.
func tarball(files map[string]string) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(files[name])), Format: tar.FormatUSTAR})
		io.WriteString(w, files[name])
	}
	w.Close()
	z.Close()
	return out.Bytes()
}

func zipped(files map[string]string) []byte {
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		w, _ := z.Create(name)
		io.WriteString(w, files[name])
	}
	z.Close()
	return out.Bytes()
}

func sha256Of(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// serveNPM has a package boxed-hello, and takes others from who has the token.
func (o *outside) serveNPM() {
	pack := tarball(map[string]string{
		"package/package.json": `{"name":"boxed-hello","version":"1.0.0","main":"i.js"}`, "package/i.js": `module.exports = "hello of npm"`,
	})
	sum1, sum512 := sha1.Sum(pack), sha512.Sum512(pack)
	o.published["boxed-hello"] = json.RawMessage(fmt.Sprintf(`{"name":"boxed-hello","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"boxed-hello","version":"1.0.0","main":"i.js",
"dist":{"shasum":"%x","integrity":"sha512-%s","tarball":"https://SELF/npm/boxed-hello/-/boxed-hello-1.0.0.tgz"}}}}`, sum1, base64.StdEncoding.EncodeToString(sum512[:])))
	o.attached["boxed-hello-1.0.0.tgz"] = pack
	o.mux.HandleFunc("GET /npm/{name}", func(w http.ResponseWriter, r *http.Request) {
		o.mu.Lock()
		text, ok := o.published[r.PathValue("name")]
		o.mu.Unlock()
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"error":"Not found"}`)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(bytes.ReplaceAll(text, []byte("https://SELF"), []byte("https://"+r.Host)))
	})
	o.mux.HandleFunc("GET /npm/{name}/-/{file}", func(w http.ResponseWriter, r *http.Request) {
		o.mu.Lock()
		text := o.attached[r.PathValue("file")]
		o.mu.Unlock()
		w.Write(text)
	})
	o.mux.HandleFunc("PUT /npm/{name}", func(w http.ResponseWriter, r *http.Request) {
		var doc struct {
			Attachments map[string]struct{ Data []byte } `json:"_attachments"`
		}
		text, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(text, &doc); err != nil || r.Header.Get("Authorization") != "Bearer "+o.token {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.published[r.PathValue("name")] = text
		for name, a := range doc.Attachments {
			o.attached[name] = a.Data
		}
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, `{"ok":true}`)
	})
}

// servePyPI has a wheel of boxed-hello.
func (o *outside) servePyPI() {
	const info = "boxed_hello-1.0.0.dist-info/"
	files := map[string]string{
		"boxed_hello.py": "text = 'hello of pypi'\n", info + "METADATA": "Metadata-Version: 2.1\nName: boxed-hello\nVersion: 1.0.0\n",
		info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
	}
	record := info + "RECORD,,\n"
	for name, text := range files {
		sum := sha256.Sum256([]byte(text))
		record += fmt.Sprintf("%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(text))
	}
	files[info+"RECORD"] = record
	wheel := zipped(files)
	const path = "packages/boxed_hello-1.0.0-py3-none-any.whl"
	o.files("/packages/", map[string][]byte{strings.TrimPrefix(path, "packages/"): wheel})
	o.mux.HandleFunc("GET /simple/boxed-hello/", func(w http.ResponseWriter, r *http.Request) {
		files := r.Host
		if files == "pypi.org" {
			files = "files.pythonhosted.org"
		}
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><html><body><a href="https://%s/%s#sha256=%s">%s</a></body></html>`, files, path, sha256Of(wheel), filepath.Base(path))
	})
}

// serveGoProxy has a module go.acme.example/hello.
func (o *outside) serveGoProxy() {
	const mod = "module go.acme.example/hello\n\ngo 1.20\n"
	o.files("/go/go.acme.example/hello/@v/", map[string][]byte{
		"list": []byte("v1.0.0\n"), "v1.0.0.info": []byte(`{"Version":"v1.0.0","Time":"2025-01-01T00:00:00Z"}`), "v1.0.0.mod": []byte(mod),
		"v1.0.0.zip": zipped(map[string]string{
			"go.acme.example/hello@v1.0.0/go.mod": mod, "go.acme.example/hello@v1.0.0/hello.go": "package hello\n",
		}),
	})
}

// serveCrates has a crate boxed-hello in a sparse index.
func (o *outside) serveCrates() {
	crate := tarball(map[string]string{
		"boxed-hello-1.0.0/Cargo.toml": "[package]\nname = \"boxed-hello\"\nversion = \"1.0.0\"\n", "boxed-hello-1.0.0/src/lib.rs": "",
	})
	o.files("/crates/", map[string][]byte{
		"config.json":       []byte(`{"dl":"https://SELF/download"}`), // of crates.io it is another name, as there
		"bo/xe/boxed-hello": fmt.Appendf(nil, `{"name":"boxed-hello","vers":"1.0.0","deps":[],"cksum":"%s","features":{},"yanked":false}`+"\n", sha256Of(crate)),
	})
	download := func(w http.ResponseWriter, r *http.Request) { w.Write(crate) }
	o.mux.HandleFunc("GET /download/boxed-hello/1.0.0/download", download)
	o.mux.HandleFunc("GET /crates/download/boxed-hello/1.0.0/download", download)
}

// serveDebian has a package boxed-hello, in a repository without a signature.
func (o *outside) serveDebian() {
	var deb bytes.Buffer
	deb.WriteString("!<arch>\n")
	for _, m := range []struct {
		name string
		text []byte
	}{
		{"debian-binary", []byte("2.0\n")},
		{"control.tar.gz", tarball(map[string]string{"./control": "Package: boxed-hello\nVersion: 1.0.0\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"})},
		{"data.tar.gz", tarball(map[string]string{"./usr/share/boxed-hello": "hello of debian\n"})},
	} {
		fmt.Fprintf(&deb, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, 0, 0, 0, "100644", len(m.text))
		deb.Write(m.text)
		if len(m.text)%2 == 1 {
			deb.WriteByte('\n')
		}
	}
	const path = "pool/main/b/boxed-hello/boxed-hello_1.0.0_all.deb"
	packages := fmt.Appendf(nil, "Package: boxed-hello\nVersion: 1.0.0\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\nFilename: %s\nSize: %d\nSHA256: %s\n\n", path, deb.Len(), sha256Of(deb.Bytes()))
	release := "Origin: Debian\nSuite: stable\nCodename: bookworm\nArchitectures: amd64 arm64 all\nComponents: main\nDate: " + time.Now().UTC().Format(time.RFC1123) + "\n"
	files := map[string][]byte{path: deb.Bytes()}
	md5s, sha256s := "MD5Sum:\n", "SHA256:\n"
	for _, arch := range []string{"amd64", "arm64", "all"} {
		name := "main/binary-" + arch + "/Packages"
		files["dists/bookworm/"+name] = packages
		md5s += fmt.Sprintf(" %x %d %s\n", md5.Sum(packages), len(packages), name)
		sha256s += fmt.Sprintf(" %s %d %s\n", sha256Of(packages), len(packages), name)
	}
	files["dists/bookworm/Release"] = []byte(release + md5s + sha256s)
	o.files("/debian/", files)
}

// serveGitHub is as much of GitHub's API as `gh api` and `gh repo view` ask for.
func (o *outside) serveGitHub() {
	repo := func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "token "+o.token {
			w.WriteHeader(http.StatusUnauthorized)
			io.WriteString(w, `{"message":"Bad credentials"}`)
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		io.WriteString(w, `{"full_name":"acme/private","default_branch":"main","description":"of GitHub"}`)
	}
	o.mux.HandleFunc("GET /github/repos/acme/private", repo)
	o.mux.HandleFunc("POST /github/graphql", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "token "+o.token {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		io.WriteString(w, `{"data":{"repository":{"id":"R_1","name":"private","owner":{"login":"acme"},"description":"of GitHub","url":"https://github.com/acme/private","hasIssuesEnabled":true,"viewerPermission":"ADMIN","defaultBranchRef":{"name":"main"}}}}`)
	})
	o.mux.HandleFunc("GET /github/repos/acme/private/readme", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		fmt.Fprintf(w, `{"name":"README.md","content":%q,"html_url":""}`, base64.StdEncoding.EncodeToString([]byte("the readme")))
	})
}

// serveModels streams an answer of the Messages API.
func (o *outside) serveModels() {
	o.mux.HandleFunc("POST /v1/messages", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Api-Key") != o.token && r.Header.Get("Authorization") != "Bearer "+o.token {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			io.WriteString(w, `{"type":"error","error":{"type":"authentication_error","message":"invalid x-api-key"}}`)
			return
		}
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		event := func(kind, data string) {
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, data)
			http.NewResponseController(w).Flush()
		}
		event("message_start", `{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"test","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":1}}}`)
		event("content_block_start", `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`)
		for _, word := range []string{"hello ", "of ", "a ", "model"} {
			event("content_block_delta", fmt.Sprintf(`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%q}}`, word))
		}
		event("content_block_stop", `{"type":"content_block_stop","index":0}`)
		event("message_delta", `{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":4}}`)
		event("message_stop", `{"type":"message_stop"}`)
	})
}

// serveWire has what is told of protocols.
func (o *outside) serveWire() {
	o.mux.HandleFunc("/hello", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Alt-Svc", `h3=":443"; ma=86400`) // which nobody can follow from within
		fmt.Fprintf(w, "hello over %s\n", r.Proto)
	})
	o.mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello\n") })
	// gRPC: a message of five bytes' head and what was said, and the status in the trailers.
	o.mux.HandleFunc("POST /hello.Greeter/Say", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.ProtoMajor != 2 || r.Header.Get("Te") != "trailers" || len(body) < 5 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/grpc")
		reply := append([]byte("hello "), body[5:]...)
		w.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(reply))), reply...))
		http.NewResponseController(w).Flush()
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", "said")
	})
	// An event is sent when the one before has arrived.
	o.mux.HandleFunc("GET /events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 5 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			http.NewResponseController(w).Flush()
			select {
			case got := <-o.acks:
				if got != fmt.Sprint(i) {
					return
				}
			case <-time.After(10 * time.Second):
				return
			case <-r.Context().Done():
				return
			}
		}
		io.WriteString(w, "data: end\n\n")
	})
	o.mux.HandleFunc("POST /events/{n}", func(w http.ResponseWriter, r *http.Request) { o.acks <- r.PathValue("n") })
	o.mux.HandleFunc("GET /socket", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, text, err := c.Read(r.Context())
			if err != nil {
				return
			}
			c.Write(r.Context(), kind, append([]byte("echo of "), text...))
		}
	})
	o.mux.HandleFunc("/upload", func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, _ := io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%d %x expect=%q\n", n, sum.Sum(nil), r.Header.Get("Expect"))
	})
	o.mux.HandleFunc("GET /download", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, &pattern{left: wireBytes})
	})
}

// wireBytes is how much is sent each way.
const wireBytes = 100 << 20

// pattern is what `seq 99999999` prints, so that a sandbox can make it too.
type pattern struct {
	left int
	n    int64
	have []byte
}

func (p *pattern) Read(b []byte) (n int, err error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	for len(p.have) < min(len(b), p.left) {
		p.n++
		p.have = append(strconv.AppendInt(p.have, p.n, 10), '\n')
	}
	n = copy(b[:min(len(b), p.left)], p.have)
	p.have, p.left = append(p.have[:0], p.have[n:]...), p.left-n
	return n, nil
}
