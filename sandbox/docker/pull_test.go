package docker_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

// registry serves one image, "team/image:1", over plain HTTP, which engines
// allow on 127.0.0.1.
type registry struct {
	host      string
	manifests atomic.Int64  // how often the manifest was asked for
	gate      chan struct{} // blobs wait for it, if not nil
	user      string        // "user:password" that is asked for, if not ""
	blobs     map[string][]byte
	manifest  []byte
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// newRegistry serves an image of a random layer for arch.
func newRegistry(t *testing.T, arch string, change ...func(*registry)) *registry {
	t.Helper()
	content := make([]byte, 64<<10)
	rand.Read(content)
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	_ = w.WriteHeader(&tar.Header{Name: "random", Mode: 0o644, Size: int64(len(content))})
	_, _ = w.Write(content)
	_ = w.Close()
	config, _ := json.Marshal(map[string]any{
		"architecture": arch, "os": "linux", "config": map[string]any{"Env": []string{"PULLED=yes"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digestOf(layer.Bytes())}},
	})
	descriptor := func(kind string, b []byte) map[string]any {
		return map[string]any{"mediaType": "application/vnd.docker." + kind, "size": len(b), "digest": digestOf(b)}
	}
	r := &registry{blobs: map[string][]byte{digestOf(layer.Bytes()): layer.Bytes(), digestOf(config): config}}
	r.manifest, _ = json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
		"config": descriptor("container.image.v1+json", config),
		"layers": []any{descriptor("image.rootfs.diff.tar", layer.Bytes())},
	})
	for _, c := range change {
		c(r)
	}
	s := httptest.NewServer(r)
	t.Cleanup(s.Close)
	r.host = strings.TrimPrefix(s.URL, "http://")
	imported.add(r.host + "/team/image:1")
	return r
}

func (r *registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	if user, password, _ := req.BasicAuth(); r.user != "" && user+":"+password != r.user {
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`)
		return
	}
	rest, blob := strings.CutPrefix(req.URL.Path, "/v2/team/image/blobs/")
	tag, manifest := strings.CutPrefix(req.URL.Path, "/v2/team/image/manifests/")
	switch {
	case req.URL.Path == "/v2/":
	case manifest && (tag == "1" || tag == digestOf(r.manifest)):
		r.manifests.Add(1)
		w.Header().Set("Content-Type", "application/vnd.docker.distribution.manifest.v2+json")
		w.Header().Set("Docker-Content-Digest", digestOf(r.manifest))
		_, _ = w.Write(r.manifest)
	case blob && r.blobs[rest] != nil:
		if r.gate != nil {
			select {
			case <-r.gate:
			case <-req.Context().Done():
				return
			}
		}
		_, _ = w.Write(r.blobs[rest])
	default:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
	}
}

func TestPullsAnImage(t *testing.T) {
	needDocker(t)
	r := newRegistry(t, runtime.GOARCH)
	d := newDriver(t)
	var last sandbox.PullProgress
	img, err := d.Image(t.Context(), r.host+"/team/image:1", func(p sandbox.PullProgress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"PATH": sandbox.DefaultPath, "PULLED": "yes"}
	if diff := cmp.Diff(want, img.Env); diff != "" || !strings.HasPrefix(img.Digest, "sha256:") || last.Message == "" {
		t.Errorf("%+v, last progress %+v\n%s", img, last, diff)
	}
	if again, err := d.Image(t.Context(), img.Ref, nil); err != nil || again.Digest != img.Digest {
		t.Errorf("again: %+v, %v", again, err)
	}
	if both, err := d.Image(t.Context(), img.Ref+"@"+digestOf(r.manifest), nil); err != nil || both.Digest != img.Digest {
		t.Errorf("by tag and digest: %+v, %v", both, err)
	}
	if byID, err := d.Image(t.Context(), img.Digest, nil); err != nil || byID.Digest != img.Digest {
		t.Errorf("by its ID: %+v, %v", byID, err)
	}
}

// One pull of a reference however many ask; one that leaves does not end it for the others.
func TestPullsOnceForMany(t *testing.T) {
	needDocker(t)
	r := newRegistry(t, runtime.GOARCH, func(r *registry) { r.gate = make(chan struct{}) })
	d := newDriver(t)
	ref := r.host + "/team/image:1"
	first, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var told atomic.Int64
	wg.Go(func() {
		if _, err := d.Image(first, ref, nil); boxed.CodeOf(err) != boxed.CodeCanceled {
			t.Errorf("the one that left: %v", err)
		}
	})
	for range 5 {
		wg.Go(func() {
			progress := false
			_, err := d.Image(t.Context(), ref, func(sandbox.PullProgress) { progress = true })
			if err != nil {
				t.Errorf("one that stayed: %v", err)
			}
			if progress {
				told.Add(1)
			}
		})
	}
	eventually(t, "all wait", func() bool { return d.Waiting(ref) == 6 })
	leave()
	eventually(t, "one has left", func() bool { return d.Waiting(ref) == 5 })
	close(r.gate)
	wg.Wait()
	if n := r.manifests.Load(); n > 2 { // the engine asks for it once or twice a pull
		t.Errorf("the manifest was asked for %d times", n)
	}
	if told.Load() != 5 {
		t.Errorf("%d of 5 heard of progress", told.Load())
	}
}

// What the engine does then is its own: 20.10 waits for the registry's answer
// to what it has asked, and drops it.
func TestPullEndsWhenNobodyWaits(t *testing.T) {
	needDocker(t)
	r := newRegistry(t, runtime.GOARCH, func(r *registry) { r.gate = make(chan struct{}) })
	d := newDriver(t)
	ref := r.host + "/team/image:1"
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := d.Image(ctx, ref, nil)
		done <- err
	}()
	eventually(t, "it is being pulled", func() bool { return r.manifests.Load() > 0 })
	cancel()
	select {
	case err := <-done:
		if boxed.CodeOf(err) != boxed.CodeCanceled {
			t.Errorf("%v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the one that left still waits")
	}
	if n := d.Waiting(ref); n != 0 {
		t.Errorf("%d wait", n)
	}
	close(r.gate)
	if _, err := d.Image(t.Context(), ref, nil); err != nil {
		t.Errorf("a later pull: %v", err)
	}
}

// issues show 2: errors tell apart not found, unauthorised, no route, time; in one line that says what to do.
func TestPullErrors(t *testing.T) {
	needDocker(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	open := newRegistry(t, runtime.GOARCH)
	private := newRegistry(t, runtime.GOARCH, func(r *registry) { r.user = "me:secret" })
	foreign := newRegistry(t, map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH])
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	t.Cleanup(broken.Close)
	for name, c := range map[string]struct {
		ref    string
		reason boxed.ImageReason
		say    string
	}{
		"no such tag":       {open.host + "/team/image:2", boxed.ImageNotFound, "docker load"},
		"no such name":      {open.host + "/team/other:1", boxed.ImageNotFound, "docker load"},
		"no such digest":    {open.host + "/team/image@sha256:" + strings.Repeat("0", 64), boxed.ImageNotFound, "docker load"},
		"a login is needed": {private.host + "/team/image:1", boxed.ImageUnauthorized, "docker login " + private.host},
		"nobody listens":    {closed.Addr().String() + "/team/image:1", boxed.ImageNoRoute, "no registry answers"},
		"no such host":      {"registry.invalid/team/image:1", boxed.ImageNoRoute, "no registry answers"},
		"silence":           {silent.Addr().String() + "/team/image:1", boxed.ImageTimeout, "pull_timeout"},
		"another machine's": {foreign.host + "/team/image:1", boxed.ImageUnusable, "this host is " + runtime.GOARCH},
		"nonsense":          {strings.TrimPrefix(broken.URL, "http://") + "/team/image:1", boxed.ImageNoRoute, "did not serve"},
		"an ID":             {"sha256:" + strings.Repeat("0", 64), boxed.ImageNotFound, "docker load"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDriver(t, func(c *docker.Config) { c.PullTimeout = 3 * time.Second })
			_, err := d.Image(t.Context(), c.ref, nil)
			var e *boxed.Error
			if !errors.As(err, &e) || e.Code != boxed.CodeImage || e.Detail["reason"] != string(c.reason) || !strings.Contains(e.Message, c.say) ||
				strings.Contains(e.Message, "\n") || e.Field() != "image" {
				t.Errorf("%v, detail %v, cause %v", err, boxed.AsError(err).Detail, boxed.AsError(err).Err)
			}
		})
	}
}

func TestMalformedReferences(t *testing.T) {
	d := newDriver(t)
	for _, ref := range []string{"", " ", "UPPER/case", "a:b:c", "x@sha256:1", "-x", "a b", "x\n", "../x", strings.Repeat("a", 2000), "http://x/y", "x:" + strings.Repeat("t", 200)} {
		_, err := d.Image(t.Context(), ref, nil)
		if e := boxed.AsError(err); err == nil || e.Code != boxed.CodeInvalid || e.Field() != "image" || strings.Contains(e.Message, "\n") {
			t.Errorf("%q: %v", ref, err)
		}
	}
}

// A bare name is a name: to the engine it may also be the start of an image's ID.
func TestShortIDsAreNames(t *testing.T) {
	d := newDriver(t, func(c *docker.Config) { c.PullTimeout = 3 * time.Second })
	img := empty(t, d)
	short := strings.TrimPrefix(img.Digest, "sha256:")[:12]
	if got, err := d.Image(t.Context(), short, nil); err == nil {
		t.Errorf("%s is %+v", short, got)
	}
}

func TestCredentialsOfRegistries(t *testing.T) {
	needDocker(t)
	r := newRegistry(t, runtime.GOARCH, func(r *registry) { r.user = "me:se:cret" })
	helpers := t.TempDir()
	helper := fmt.Sprintf("#!/bin/sh\nread server\n[ \"$server\" = %s ] && echo '{\"Username\":\"me\",\"Secret\":\"se:cret\"}' || { echo credentials not found in native keychain; exit 1; }\n", r.host)
	for name, body := range map[string]string{"docker-credential-works": helper, "docker-credential-broken": "#!/bin/sh\nexit 3\n", "docker-credential-hangs": "#!/bin/sh\nsleep 100\n"} {
		if err := os.WriteFile(filepath.Join(helpers, name), []byte(body), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", helpers+":"+os.Getenv("PATH"))
	login := base64.StdEncoding.EncodeToString([]byte("me:se:cret"))
	for name, c := range map[string]struct {
		config string
		ok     bool
	}{
		"in the file":             {fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, login), true},
		"with a scheme":           {fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, "http://"+r.host+"/v1/", login), true},
		"as user and password":    {fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"se:cret"}}}`, r.host), true},
		"in the store":            {`{"credsStore":"works"}`, true},
		"in the registry's own":   {fmt.Sprintf(`{"credsStore":"broken","credHelpers":{%q:"works"}}`, r.host), true},
		"store without, file has": {fmt.Sprintf(`{"credsStore":"works","auths":{%q:{"auth":%q}}}`, r.host, login), true},
		"wrong":                   {fmt.Sprintf(`{"auths":{%q:{"auth":"bWU6eA=="}}}`, r.host), false},
		"not base64":              {fmt.Sprintf(`{"auths":{%q:{"auth":"!!"}}}`, r.host), false},
		"another registry's":      {fmt.Sprintf(`{"auths":{"other.example":{"auth":%q}}}`, login), false},
		"a broken helper":         {`{"credsStore":"broken"}`, false},
		"no such helper":          {`{"credsStore":"nonesuch"}`, false},
		"a path as a helper":      {`{"credsStore":"../../bin/sh"}`, false},
		"not JSON":                {`{`, false},
		"empty":                   {``, false},
		"none":                    {"-", false},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "config.json")
			if c.config != "-" {
				if err := os.WriteFile(file, []byte(c.config), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			d := newDriver(t, func(cfg *docker.Config) { cfg.DockerConfig = file })
			_, err := d.Image(t.Context(), r.host+"/team/image:1", nil)
			removeImage(r.host + "/team/image:1")
			if c.ok && err != nil {
				t.Errorf("%v, cause %v", err, boxed.AsError(err).Err)
			}
			if e := boxed.AsError(err); !c.ok && (err == nil || e.Detail["reason"] != string(boxed.ImageUnauthorized)) {
				t.Errorf("%v %v", err, e.Detail)
			}
			if err != nil && strings.Contains(err.Error(), "cret") {
				t.Errorf("the message has the secret: %v", err)
			}
		})
	}
}
