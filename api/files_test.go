package api_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/google/go-cmp/cmp"
)

func TestFiles(t *testing.T) {
	t.Run("the path arrives as it was sent", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		for _, path := range []string{"/a/../b", "a//b/./c", "%2F%2e%2e", "/ä b+c&d=e?f#g", "-rf", "..", "a\nb", " "} {
			if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: path, Content: strings.NewReader("x")}); err != nil {
				t.Errorf("%q: %v", path, err)
			}
			if got := h.lastCall().(boxed.WriteRequest).Path; got != path {
				t.Errorf("%q became %q", path, got)
			}
			a := h.do("GET", "/v1/sandboxes/"+string(sb.ID)+"/files?path="+url.QueryEscape(path), "")
			if a.status != 200 || h.lastCall().(boxed.ReadRequest).Path != path {
				t.Errorf("%q: %d %v", path, a.status, h.lastCall())
			}
		}
		// What is no text would be another name on the link to the agent.
		if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "\xff\xfe", Content: strings.NewReader("x")}); boxed.CodeOf(err) != boxed.CodeInvalid {
			t.Error(err)
		}
		h.do("GET", "/v1/sandboxes/x/files?path=/a/../b", "")
		if got := h.lastCall().(boxed.ReadRequest).Path; got != "/a/../b" {
			t.Error(got)
		}
	})
	t.Run("reads a file with what is known of it", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.files["/dir/é🙂"] = []byte("hello")
		f, err := h.client.ReadFile(t.Context(), sb.ID, boxed.ReadRequest{Path: "/dir/é🙂", Length: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b, err := io.ReadAll(f)
		if err != nil || string(b) != "hello" || f.Length != 5 || f.Offset != 0 {
			t.Error(string(b), err, f.Length, f.Offset)
		}
		if diff := cmp.Diff(*h.info("/dir/é🙂", 5), f.Info); diff != "" {
			t.Error(diff)
		}
		a := h.do("GET", "/v1/sandboxes/x/files?path=/dir/%C3%A9%F0%9F%99%82", "")
		for name, want := range map[string]string{
			"Content-Type": "application/octet-stream", "Content-Disposition": "attachment", "Accept-Ranges": "bytes",
			"Last-Modified": "Thu, 02 Jan 2025 03:04:05 GMT", "X-Content-Type-Options": "nosniff", "Content-Length": "5",
		} {
			if got := a.header.Get(name); got != want {
				t.Errorf("%s: %q", name, got)
			}
		}
	})
	t.Run("reads the part that Range names", func(t *testing.T) {
		h := newHarness(t)
		h.add("x")
		h.files["f"], h.files["empty"] = []byte("0123456789"), nil
		for _, c := range []struct {
			file, rng string
			status    int
			body, cr  string
		}{
			{"f", "bytes=0-0", 206, "0", "bytes 0-0/10"},
			{"f", "bytes=2-4", 206, "234", "bytes 2-4/10"},
			{"f", "bytes=7-", 206, "789", "bytes 7-9/10"},
			{"f", "bytes=7-99", 206, "789", "bytes 7-9/10"},
			{"f", "bytes=-3", 206, "789", "bytes 7-9/10"},
			{"f", "bytes=-99", 206, "0123456789", "bytes 0-9/10"},
			{"f", "bytes=0-1,4-5", 200, "0123456789", ""},
			{"f", "lines=1-2", 200, "0123456789", ""},
			{"f", "", 200, "0123456789", ""},
			{"f", "bytes=10-", 416, "", "bytes */10"},
			{"f", "bytes=-0", 416, "", "bytes */10"},
			{"f", "bytes=4-2", 416, "", ""},
			{"f", "bytes=x-", 416, "", ""},
			{"f", "bytes=-", 416, "", ""},
			{"f", "bytes=1", 416, "", ""},
			{"f", "bytes=99999999999999999999-", 416, "", ""},
			{"empty", "bytes=0-", 416, "", "bytes */0"},
			{"empty", "", 200, "", ""},
		} {
			a := h.do("GET", "/v1/sandboxes/x/files?path="+c.file, "", "Range", c.rng)
			if a.status != c.status || a.header.Get("Content-Range") != c.cr {
				t.Errorf("%s: %d %q %s", c.rng, a.status, a.header.Get("Content-Range"), a.body)
			}
			if c.status < 300 && string(a.body) != c.body {
				t.Errorf("%s: %q", c.rng, a.body)
			}
			if c.status == 416 && a.problem().Code != boxed.CodeRange {
				t.Errorf("%s: %s", c.rng, a.body)
			}
		}
		if a := h.do("GET", "/v1/sandboxes/x/files?path=f", "", "Range", "bytes=0-0", "If-Range", `"etag"`); a.status != 200 {
			t.Error("a part without a validator")
		}
		for _, c := range []struct {
			req  boxed.ReadRequest
			want string
		}{
			{boxed.ReadRequest{Offset: 3, Length: -1}, "3456789"},
			{boxed.ReadRequest{Offset: 3, Length: 2}, "34"},
			{boxed.ReadRequest{Length: 2}, "01"},
			{boxed.ReadRequest{Length: 0}, ""},
		} {
			c.req.Path = "f"
			f, err := h.client.ReadFile(t.Context(), "x", c.req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(f)
			if f.Close(); string(b) != c.want || f.Length != int64(len(c.want)) || f.Offset != c.req.Offset {
				t.Errorf("%+v: %q at %d", c.req, b, f.Offset)
			}
		}
		if _, err := h.client.ReadFile(t.Context(), "x", boxed.ReadRequest{Path: "f", Offset: 11, Length: -1}); !errors.Is(err, boxed.CodeRange) {
			t.Error(err)
		}
	})
	t.Run("a file that shrinks while it is read does not look whole", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.read = func(context.Context, boxed.ReadRequest) (*boxed.FileReader, error) {
			return &boxed.FileReader{ReadCloser: io.NopCloser(strings.NewReader("short")), Length: 100}, nil
		}
		f, err := h.client.ReadFile(t.Context(), sb.ID, boxed.ReadRequest{Path: "f", Length: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := io.ReadAll(f); !errors.Is(err, boxed.CodeLost) {
			t.Error(err)
		}
	})
	t.Run("writes with mode and parents, of any type or none", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "a/b", Content: strings.NewReader(""), Mode: 0o755, Parents: true}); err != nil {
			t.Fatal(err)
		}
		if got := h.lastCall().(boxed.WriteRequest); got.Mode != 0o755 || !got.Parents {
			t.Errorf("%+v", got)
		}
		for typ, status := range map[string]int{"": 200, "application/octet-stream": 200, "text/plain": 415, "application/x-www-form-urlencoded": 415} {
			if a := h.do("PUT", "/v1/sandboxes/x/files?path=a", "x", "Content-Type", typ); a.status != status {
				t.Errorf("%q: %d", typ, a.status)
			}
		}
	})
	t.Run("an upload of 64 MiB is never held", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		in, out := newHashed(), newHashed()
		h.fake.write = func(_ context.Context, req boxed.WriteRequest) (*boxed.FileInfo, error) {
			_, err := io.Copy(out, req.Content)
			return h.info(req.Path, int(out.n)), err
		}
		src := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{2}), 64<<20), in)
		info, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: src})
		if err != nil || info.Size != 64<<20 || !bytes.Equal(in.Sum(nil), out.Sum(nil)) {
			t.Error(info, err)
		}
	})
	t.Run("an upload that breaks off is never taken for whole", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		got := make(chan error, 3)
		h.fake.write = func(_ context.Context, req boxed.WriteRequest) (*boxed.FileInfo, error) {
			_, err := io.Copy(io.Discard, req.Content)
			got <- err
			return nil, err
		}
		r, w := io.Pipe()
		go func() { io.WriteString(w, "half"); w.CloseWithError(errors.New("disk on fire")) }()
		_, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: r})
		if err == nil || !strings.Contains(err.Error(), "disk on fire") {
			t.Error(err)
		}
		if err := <-got; err == nil {
			t.Error("the port saw a clean end")
		}
		for _, head := range []string{"Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"} {
			conn, err := net.Dial("tcp", h.http.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "PUT /v1/sandboxes/x/files?path=f HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n%s", userKey, head)
			eventually(t, "it has begun", func() bool { return h.called("WriteFile") >= 2 })
			conn.Close()
			if err := <-got; err == nil {
				t.Error("the port saw a clean end")
			}
		}
	})
	t.Run("an upload that stalls ends, one that is slow does not", func(t *testing.T) {
		h := newHarness(t, func(c *api.Config) { c.BodyIdle = 200 * time.Millisecond })
		sb := h.add("x")
		r, w := io.Pipe()
		go func() {
			for range 10 {
				io.WriteString(w, "x")
				time.Sleep(50 * time.Millisecond)
			}
			w.Close()
		}()
		if info, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: r}); err != nil || info.Size != 10 {
			t.Error(info, err)
		}
		r, w = io.Pipe()
		defer w.Close()
		go io.WriteString(w, "x")
		if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: r}); !errors.Is(err, boxed.CodeDeadline) {
			t.Error(err)
		}
	})
	t.Run("a refusal comes through though the body is not read", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.write = func(context.Context, boxed.WriteRequest) (*boxed.FileInfo, error) {
			return nil, boxed.Errorf(boxed.CodeNoSpace, "no space left in /workspace")
		}
		for range 20 {
			src := io.LimitReader(rand.NewChaCha8([32]byte{2}), 50<<20)
			if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: src}); !errors.Is(err, boxed.CodeNoSpace) {
				t.Fatal(err)
			}
		}
	})
	t.Run("no space in the middle of an upload comes through", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.write = func(_ context.Context, req boxed.WriteRequest) (*boxed.FileInfo, error) {
			io.CopyN(io.Discard, req.Content, 5<<20)
			return nil, boxed.Errorf(boxed.CodeNoSpace, "no space left in /workspace")
		}
		for range 5 {
			src := io.LimitReader(rand.NewChaCha8([32]byte{2}), 50<<20)
			if _, err := h.client.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "f", Content: src}); !errors.Is(err, boxed.CodeNoSpace) {
				t.Fatal(err)
			}
		}
	})
	t.Run("a revoked key ends an upload and a download that are stuck", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.read = func(context.Context, boxed.ReadRequest) (*boxed.FileReader, error) {
			return &boxed.FileReader{ReadCloser: io.NopCloser(rand.NewChaCha8([32]byte{})), Length: 1 << 40}, nil
		}
		r, w := io.Pipe()
		defer w.Close()
		up := make(chan error, 1)
		go func() {
			_, err := h.client.WriteFile(context.Background(), sb.ID, boxed.WriteRequest{Path: "f", Content: r})
			up <- err
		}()
		go io.WriteString(w, "x")
		f, err := h.client.ReadFile(t.Context(), sb.ID, boxed.ReadRequest{Path: "f", Length: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		eventually(t, "both run", func() bool { return h.called("WriteFile") == 1 })
		start := time.Now()
		h.keys.revoke("user")
		if err := <-up; !errors.Is(err, boxed.CodeUnauthenticated) {
			t.Errorf("upload: %v", err)
		}
		eventually(t, "both are logged as ended", func() bool {
			return strings.Count(h.log.String(), "route=/v1/sandboxes/{id}/files") == 2
		})
		if d := time.Since(start); d > 5*time.Second {
			t.Error(d)
		}
	})
	t.Run("directories go as one tar, both ways", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := range 300 {
			w.WriteHeader(&tar.Header{Name: fmt.Sprint("f", i), Size: 3, Mode: 0o644})
			w.Write([]byte("abc"))
		}
		w.Close()
		if err := h.client.WriteTar(t.Context(), sb.ID, "/d", &b); err != nil || len(h.files) != 300 || string(h.files["/d/f7"]) != "abc" {
			t.Fatal(err, len(h.files))
		}
		r, err := h.client.ReadTar(t.Context(), sb.ID, "/d")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		n := 0
		for tr := tar.NewReader(r); ; n++ {
			if _, err := tr.Next(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if n != 300 {
			t.Error(n)
		}
		if a := h.do("PUT", "/v1/sandboxes/x/tar?path=d", "x", "Content-Type", "application/json"); a.status != 415 {
			t.Error(a.status)
		}
	})
	t.Run("stat, list, mkdir, move, remove", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if a := h.do("GET", "/v1/sandboxes/x/files/list?path=/", ""); string(a.body) != `{"files":[]}`+"\n" {
			t.Errorf("%s", a.body)
		}
		h.files["/a"] = []byte("x")
		if info, err := h.client.Stat(t.Context(), sb.ID, "/a"); err != nil || info.Size != 1 {
			t.Error(info, err)
		}
		if list, err := h.client.ListFiles(t.Context(), sb.ID, "/"); err != nil || len(list) != 1 {
			t.Error(list, err)
		}
		for _, c := range []struct {
			do   func() error
			want string
		}{
			{func() error { return h.client.Mkdir(t.Context(), sb.ID, "/d", true) }, "/dtrue"},
			{func() error { return h.client.Move(t.Context(), sb.ID, "/a", "/b") }, "/a /b"},
			{func() error { return h.client.Remove(t.Context(), sb.ID, "/b", true) }, "/btrue"},
			{func() error { return h.client.Remove(t.Context(), sb.ID, "/b", false) }, "/bfalse"},
		} {
			if err := c.do(); err != nil || strings.ReplaceAll(h.lastCall().(string), " ", "") != strings.ReplaceAll(c.want, " ", "") {
				t.Error(err, h.lastCall())
			}
		}
	})
}

func TestTunnel(t *testing.T) {
	echo := func(t *testing.T) func(context.Context, uint16) (net.Conn, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					io.WriteString(c, "hello\n")
					io.Copy(c, c)
				}()
			}
		}()
		return func(ctx context.Context, port uint16) (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) }
	}
	t.Run("carries bytes both ways, also after one side has ended", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.dial = echo(t)
		conn, err := h.client.Dial(t.Context(), sb.ID, 8000)
		if err != nil || h.lastCall() != uint16(8000) {
			t.Fatal(err, h.lastCall())
		}
		defer conn.Close()
		in, out := newHashed(), newHashed()
		in.Write([]byte("hello\n"))
		sent := make(chan error, 1)
		go func() {
			_, err := io.Copy(conn, io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{3}), 20<<20), in))
			if err == nil {
				err = conn.(interface{ CloseWrite() error }).CloseWrite()
			}
			sent <- err
		}()
		if _, err := io.Copy(out, conn); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil || out.n != 20<<20+6 || !bytes.Equal(in.Sum(nil), out.Sum(nil)) {
			t.Error(err, out.n)
		}
	})
	t.Run("speaks HTTP", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		inside := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })}
		go inside.Serve(l)
		defer inside.Close()
		h.fake.dial = func(context.Context, uint16) (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) }
		c := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return h.client.Dial(ctx, sb.ID, 80)
		}}}
		defer c.CloseIdleConnections()
		for range 3 {
			resp, err := c.Post("http://inside/", "text/plain", strings.NewReader("ping"))
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			if resp.Body.Close(); string(b) != "ping" || err != nil {
				t.Error(string(b), err)
			}
		}
	})
	t.Run("a port where nothing listens is an error of the dial", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if _, err := h.client.Dial(t.Context(), sb.ID, 81); !errors.Is(err, boxed.CodeConflict) {
			t.Error(err)
		}
		if _, err := h.client.Dial(t.Context(), sb.ID, 0); !errors.Is(err, boxed.CodeInvalid) {
			t.Error(err)
		}
	})
	t.Run("ends with the key, and with the client", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		inside, other := net.Pipe()
		defer other.Close()
		h.fake.dial = func(context.Context, uint16) (net.Conn, error) { return inside, nil }
		conn, err := h.client.Dial(t.Context(), sb.ID, 80)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		h.keys.revoke("user")
		if _, err := conn.Read(make([]byte, 1)); err == nil || err == io.EOF {
			t.Errorf("it looks like a clean end: %v", err)
		}
		if _, err := other.Read(make([]byte, 1)); err == nil {
			t.Error("the inside is still open")
		}
	})
	t.Run("a read deadline passes", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		inside, other := net.Pipe()
		defer other.Close()
		h.fake.dial = func(context.Context, uint16) (net.Conn, error) { return inside, nil }
		conn, err := h.client.Dial(t.Context(), sb.ID, 80)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("no error")
		}
	})
}
