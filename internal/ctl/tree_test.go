package ctl

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// entry is one entry of a tar that a sandbox sends.
type entry struct {
	typ        byte
	name, link string
	body       string
}

func makeTar(t testing.TB, entries ...entry) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Typeflag: e.typ, Name: e.name, Linkname: e.link, Size: int64(len(e.body)), Mode: 0o4755}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func unpackHere(t testing.TB, r io.Reader, limit int64) (dir string, skipped []string, err error) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "destination")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	err = unpackTree(root, r, limit, func(name, _ string) { skipped = append(skipped, name) })
	return dir, skipped, err
}

// The attacks of F5 and F7: a sandbox sends a tar that tries to write outside
// the directory that it is unpacked into.
func TestATarCannotWriteOutside(t *testing.T) {
	attacks := map[string][]entry{
		"dot dot":                     {{tar.TypeReg, "../evil", "", "x"}},
		"dot dot further in":          {{tar.TypeReg, "a/../../evil", "", "x"}},
		"an absolute path":            {{tar.TypeReg, "/tmp/boxedctl-evil", "", "x"}},
		"a directory above":           {{tar.TypeDir, "../evil/", "", ""}},
		"a link above":                {{tar.TypeSymlink, "../evil", "/etc/passwd", ""}},
		"a hard link to outside":      {{tar.TypeLink, "a", "../outside", ""}},
		"a hard link to absolute":     {{tar.TypeLink, "a", "/etc/passwd", ""}},
		"through a link":              {{tar.TypeSymlink, "a", "..", ""}, {tar.TypeReg, "a/evil", "", "x"}},
		"through an absolute link":    {{tar.TypeSymlink, "a", "/tmp", ""}, {tar.TypeReg, "a/boxedctl-evil", "", "x"}},
		"through a link to a link":    {{tar.TypeSymlink, "a", "b", ""}, {tar.TypeSymlink, "b", "..", ""}, {tar.TypeReg, "a/evil", "", "x"}},
		"a directory through a link":  {{tar.TypeSymlink, "a", "..", ""}, {tar.TypeDir, "a/evil/", "", ""}},
		"a hard link through a link":  {{tar.TypeSymlink, "a", "..", ""}, {tar.TypeLink, "b", "a/outside", ""}},
		"dot dot through a deep link": {{tar.TypeDir, "d/", "", ""}, {tar.TypeSymlink, "d/a", "../..", ""}, {tar.TypeReg, "d/a/evil", "", "x"}},
	}
	for name, entries := range attacks {
		t.Run(name, func(t *testing.T) {
			dir, _, err := unpackHere(t, makeTar(t, entries...), 1<<20)
			if err == nil {
				t.Error("it was unpacked")
			}
			around, _ := os.ReadDir(filepath.Dir(dir))
			if len(around) != 1 {
				t.Errorf("something was written beside the destination: %v", around)
			}
			if _, err := os.Lstat("/tmp/boxedctl-evil"); err == nil {
				os.Remove("/tmp/boxedctl-evil")
				t.Error("something was written to /tmp")
			}
		})
	}
}

// A file is never written through a link that an entry before it left, or that
// was there.
func TestALinkIsReplacedNotWrittenThrough(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(outside, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir, _, err := unpackHere(t, makeTar(t, entry{tar.TypeSymlink, "a", outside, ""}, entry{tar.TypeReg, "a", "", "mine"}), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(outside); string(got) != "precious" {
		t.Errorf("the link's target is now %q", got)
	}
	if got, _ := os.ReadFile(filepath.Join(dir, "a")); string(got) != "mine" {
		t.Errorf("the file is %q", got)
	}
}

func TestATarIsBounded(t *testing.T) {
	_, _, err := unpackHere(t, makeTar(t, entry{tar.TypeReg, "a", "", "123456"}, entry{tar.TypeReg, "b", "", "123456"}), 10)
	if boxed.CodeOf(err) != boxed.CodeTooLarge || !strings.Contains(nextStep(err), "--max-size") {
		t.Errorf("got %v", err)
	}
	// A header that claims what does not follow: the size counts before a byte is written.
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "huge", Size: 1 << 50, Mode: 0o644, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	dir, _, err := unpackHere(t, &b, 1<<30)
	if boxed.CodeOf(err) != boxed.CodeTooLarge {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("it left %v", left)
	}
}

func TestATarThatBreaksOffIsAnError(t *testing.T) {
	whole, _ := io.ReadAll(makeTar(t, entry{tar.TypeReg, "a", "", strings.Repeat("x", 2000)}))
	_, _, err := unpackHere(t, bytes.NewReader(whole[:1000]), 1<<20)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}

func TestSpecialFilesAreLeftOutAndSetuidIsDropped(t *testing.T) {
	dir, skipped, err := unpackHere(t, makeTar(t,
		entry{tar.TypeFifo, "pipe", "", ""}, entry{tar.TypeBlock, "disk", "", ""}, entry{tar.TypeChar, "tty", "", ""}, entry{tar.TypeReg, "program", "", "x"}), 1<<20)
	if err != nil || len(skipped) != 3 {
		t.Errorf("skipped %v: %v", skipped, err)
	}
	info, err := os.Stat(filepath.Join(dir, "program"))
	if err != nil {
		t.Fatal(err)
	}
	if runtime.GOOS != "windows" && info.Mode() != 0o755 {
		t.Errorf("mode is %v", info.Mode())
	}
}

func FuzzUnpackStaysInside(f *testing.F) {
	f.Add("a", "..", "a/evil")
	f.Add("d/x", "../../..", "d/x/y")
	f.Add(".", "/", "./x")
	f.Add("a\\b", "c", "..\\x")
	f.Fuzz(func(t *testing.T, link, target, file string) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: link, Linkname: target})
		if w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file, Size: 1, Mode: 0o644}) != nil {
			return
		}
		_, _ = w.Write([]byte("x"))
		_ = w.Close()
		dir, _, _ := unpackHere(t, &b, 1<<20)
		around, err := os.ReadDir(filepath.Dir(dir))
		if err != nil || len(around) != 1 {
			t.Fatalf("link %q -> %q and file %q wrote beside the destination: %v", link, target, file, around)
		}
	})
}
