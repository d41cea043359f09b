package main_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

func code(err error) string {
	var e *agent.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return fmt.Sprint(err)
}

func TestFilesRoundTrip(t *testing.T) {
	s := start(t)
	ctx := t.Context()
	info, err := s.Write(ctx, agent.Write{Path: "/tmp/a/b/c.txt", Parents: true, Mode: 0o640}, strings.NewReader("hello world"))
	if err != nil || info.Size != 11 || info.Mode != 0o640 || info.Type != "file" {
		t.Fatalf("%+v %v", info, err)
	}
	// F1: there at once, and the user's.
	if out, _, _ := s.run(t, script("cat /tmp/a/b/c.txt; stat -c %u:%g /tmp/a/b/c.txt"), ""); out != "hello world231000:231000\n" {
		t.Errorf("got %q", out)
	}
	r, ri, err := s.Read(ctx, agent.Read{Path: "/tmp/a/b/c.txt", Offset: 6, Length: 3})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != "wor" || ri.Info.Size != 11 {
		t.Errorf("%q %v", b, err)
	}
	r.Close()
	if _, _, err := s.Read(ctx, agent.Read{Path: "/tmp/a/b/c.txt", Offset: 12, Length: -1}); code(err) != agent.ErrRange {
		t.Errorf("beyond the end: %v", err)
	}
	if err := s.Move(ctx, "/tmp/a/b/c.txt", "/tmp/a/d.txt"); err != nil {
		t.Error(err)
	}
	list, err := s.List(ctx, "/tmp/a")
	if err != nil || len(list) != 2 || list[0].Name != "b" || list[1].Name != "d.txt" {
		t.Errorf("%+v %v", list, err)
	}
	if err := s.Remove(ctx, "/tmp/a", false); code(err) != agent.ErrConflict {
		t.Errorf("remove of a full directory: %v", err)
	}
	if err := s.Remove(ctx, "/tmp/a", true); err != nil {
		t.Error(err)
	}
	if _, err := s.Stat(ctx, "/tmp/a"); code(err) != agent.ErrNotFound {
		t.Errorf("after remove: %v", err)
	}
}

// X29, F5, and the rule of the agent link: only regular files are read, links
// and FIFOs are refused and never hang, the kernel's files neither.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	s := start(t)
	s.run(t, script("cd /tmp; mkfifo fifo; ln -s /dev/zero zero; ln -s /etc/passwd link; mkdir dir; ln -s /proc/self/mem mem; mkdir -p deep; ln -s /proc deep/p; touch secret; chmod 0 secret"), "")
	for path, want := range map[string]string{
		"/tmp/fifo": agent.ErrConflict, "/tmp/zero": agent.ErrConflict, "/tmp/link": agent.ErrConflict, "/tmp/dir": agent.ErrConflict,
		"/tmp/mem": agent.ErrConflict, "/dev/zero": agent.ErrConflict, "/proc/self/mem": agent.ErrDenied, "/tmp/deep/p/self/environ": agent.ErrDenied,
		"/proc/1/environ": agent.ErrDenied, "/tmp/secret": agent.ErrDenied, "/etc/shadow": agent.ErrDenied, "relative": agent.ErrInvalid, "/no/such": agent.ErrNotFound,
	} {
		if _, _, err := s.Read(t.Context(), agent.Read{Path: path, Length: -1}); code(err) != want {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
		if path != "/tmp/secret" {
			continue
		}
	}
	for path, want := range map[string]string{
		"/tmp/fifo": agent.ErrConflict, "/tmp/link": agent.ErrConflict, "/tmp/dir": agent.ErrConflict, "/etc/x": agent.ErrDenied, "/root/x": agent.ErrDenied,
	} {
		if _, err := s.Write(t.Context(), agent.Write{Path: path}, strings.NewReader("x")); code(err) != want {
			t.Errorf("write %s: %v, want %s", path, err, want)
		}
	}
	if _, err := s.List(t.Context(), "/tmp/fifo"); code(err) != agent.ErrConflict {
		t.Errorf("list of a FIFO: %v", err)
	}
}

// F8: a full file system is a typed error, nothing is left, the sandbox lives.
func TestFullDiskIsATypedError(t *testing.T) {
	s := start(t)
	_, err := s.Write(t.Context(), agent.Write{Path: "/tmp/big"}, io.LimitReader(rand.NewChaCha8([32]byte{}), 100<<20))
	if code(err) != agent.ErrNoSpace {
		t.Fatalf("got %v", err)
	}
	if out, _, _ := s.run(t, script("ls -A /tmp"), ""); out != "" {
		t.Errorf("left behind: %q", out)
	}
}

// A caller whose own reader fails leaves no half of a file.
func TestBrokenUploadLeavesNothing(t *testing.T) {
	s := start(t)
	broken := errors.New("broken")
	_, err := s.Write(t.Context(), agent.Write{Path: "/tmp/f"}, io.MultiReader(strings.NewReader("half"), errReader{broken}))
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	waitFor(t, func() bool {
		list, err := s.List(t.Context(), "/tmp")
		return err == nil && len(list) == 0
	})
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

// F4, F5: a directory goes as one tar, links stay links.
func TestTarRoundTrip(t *testing.T) {
	s := start(t)
	s.run(t, script("mkdir -p /tmp/a/sub; cd /tmp/a; seq 100000 > sub/big; ln -s /etc/passwd out; ln -s sub/big in; mkfifo f; printf x > 'n m'; chmod 755 'n m'"), "")
	r, err := s.ReadTar(t.Context(), "/tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	whole, err := io.ReadAll(r)
	r.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.WriteTar(t.Context(), "/tmp/b", bytes.NewReader(whole)); err != nil {
		t.Fatal(err)
	}
	out, errs, _ := s.run(t, script("cd /tmp; rm a/f; diff -r --no-dereference a b && readlink b/out b/in; stat -c %a 'b/n m'"), "")
	if out != "/etc/passwd\nsub/big\n755\n" {
		t.Errorf("%q %q", out, errs)
	}
	one, err := s.ReadTar(t.Context(), "/tmp/a/sub/big")
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	if h, err := tar.NewReader(one).Next(); err != nil || h.Name != "big" {
		t.Errorf("%+v %v", h, err)
	}
}

// F7: nothing of a hostile tar lands outside of its directory.
func TestHostileTarStaysInside(t *testing.T) {
	s := start(t)
	for name, entries := range map[string][]tar.Header{
		"dots":         {{Name: "../evil", Typeflag: tar.TypeReg}},
		"absolute":     {{Name: "/tmp/evil", Typeflag: tar.TypeReg}},
		"through link": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, {Name: "l/evil", Typeflag: tar.TypeReg}},
		"hard link":    {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"}},
		"device":       {{Name: "d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}},
		"fifo":         {{Name: "d", Typeflag: tar.TypeFifo}},
	} {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, h := range entries {
			h.Mode = 0o644
			w.WriteHeader(&h)
		}
		w.Close()
		if err := s.WriteTar(t.Context(), "/tmp/in/"+strings.ReplaceAll(name, " ", ""), &buf); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if err := s.WriteTar(t.Context(), "/tmp/in/junk", strings.NewReader(strings.Repeat("junk", 1000))); code(err) != agent.ErrInvalid {
		t.Errorf("junk: %v", err)
	}
	if out, _, _ := s.run(t, script("ls /tmp"), ""); out != "in\n" {
		t.Errorf("outside: %q", out)
	}
}

func TestPortsAndTunnels(t *testing.T) {
	s := start(t)
	server := command("python3", "-c", `
import socket
l = socket.socket(); l.bind(("127.0.0.1", 8123)); l.listen()
print("ready", flush=True)
while True:
    c, _ = l.accept()
    data = b""
    while True:
        d = c.recv(65536)
        if not d: break
        data += d
    c.sendall(data[::-1]); c.close()`)
	if _, err := s.Start(t.Context(), server); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		ports, err := s.Ports(t.Context())
		return err == nil && len(ports) == 1 && ports[0].Port == 8123 && ports[0].Address == "127.0.0.1" && strings.HasPrefix(ports[0].Process, "python3")
	})
	conn, err := s.Dial(t.Context(), 8123)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "half-close works")
	conn.(interface{ CloseWrite() error }).CloseWrite()
	if b, err := io.ReadAll(conn); err != nil || string(b) != "skrow esolc-flah" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := s.Dial(t.Context(), 9); code(err) != agent.ErrNotFound {
		t.Errorf("a closed port: %v", err)
	}
}

// F2: a large file passes with its hash, and a stream that breaks is an error.
func TestLargeFiles(t *testing.T) {
	s := start(t)
	const size = 40 << 20
	sum := sha256.New()
	if _, err := s.Write(t.Context(), agent.Write{Path: "/tmp/big"}, io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{2}), size), sum)); err != nil {
		t.Fatal(err)
	}
	r, _, err := s.Read(t.Context(), agent.Read{Path: "/tmp/big", Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got := sha256.New()
	if n, err := io.Copy(got, r); err != nil || n != size || !bytes.Equal(got.Sum(nil), sum.Sum(nil)) {
		t.Errorf("%d %v", n, err)
	}
}

// I2, I7: who does not speak the protocol, or floods it, is refused and found out.
func TestHostileConnections(t *testing.T) {
	s := start(t)
	for _, junk := range [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n"), bytes.Repeat([]byte{0xff}, 100), {0, 0, 0, 2, '{', '}'}} {
		conn, err := net.Dial("unix", s.dir+"/agent.sock")
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(junk)
		conn.SetReadDeadline(time.Now().Add(8 * time.Second))
		io.Copy(io.Discard, conn)
		conn.Close()
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Errorf("the real agent: %v", err)
	}
}

// X29: what a tar leaves out is said, after all the rest.
func TestTarSaysWhatItLeavesOut(t *testing.T) {
	s := start(t)
	s.run(t, script("mkdir -p /tmp/d/sub; echo x > /tmp/d/a; echo x > /tmp/d/secret; chmod 0 /tmp/d/secret; echo x > /tmp/d/z; mkfifo /tmp/d/f"), "")
	r, err := s.ReadTar(t.Context(), "/tmp/d")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	whole, err := io.ReadAll(r)
	if code(err) != agent.ErrDenied || !strings.Contains(err.Error(), "/tmp/d/secret") {
		t.Errorf("got %v", err)
	}
	names := map[string]bool{}
	for in := tar.NewReader(bytes.NewReader(whole)); ; {
		h, err := in.Next()
		if err != nil {
			break
		}
		names[h.Name] = true
	}
	if !names["a"] || !names["z"] || !names["sub/"] || names["secret"] || names["f"] {
		t.Errorf("got %v", names)
	}
}
