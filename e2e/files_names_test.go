package e2e_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// F3, daytonaio/daytona#4448, kubernetes-sigs/agent-sandbox#1158: %2F and dot
// segments were decoded on a hop. F7, vndee/llm-sandbox#147: names reached a
// shell. Each name arrives as it was sent, over the whole path and in every call
// that takes one, and no program ever reads it as anything but a name.
func TestNamesArriveAsTheyAre(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	names := []string{
		"%2F", "%2e%2e", "a%00b", "a+b&c=d?e#f", " ", "  lead and trail  ", "-rf", "--help", "*", "~", "...", "ünï😀",
		"$(touch injected)", "`touch injected`", "; touch injected;", "|touch injected", "a\nb", "a\\nb", `"'`, "\x01\x1b[31m",
	}
	want := map[string]string{}
	for i, name := range names {
		text := fmt.Sprint("file ", i)
		want[name] = text
		if _, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "/workspace/names/" + name, Content: strings.NewReader(text), Parents: true}); err != nil {
			t.Errorf("write %q: %v", name, err)
		}
	}
	// As a program sees them: name, NUL, content, NUL.
	out, _ := n.sh(id, `cd names && for f in * .*; do [ -f "./$f" ] && printf '%s\0%s\0' "$f" "$(cat "./$f")"; done`)
	fields := strings.Split(strings.TrimSuffix(out, "\x00"), "\x00")
	got := map[string]string{}
	for i := 0; i+1 < len(fields); i += 2 {
		got[fields[i]] = fields[i+1]
	}
	for name, text := range want {
		if got[name] != text {
			t.Errorf("%q is there with %q, want %q", name, got[name], text)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d files, want %d: %q", len(got), len(want), got)
	}
	for name, text := range want {
		path := "/workspace/names/" + name
		info, err := n.Stat(t.Context(), id, path)
		if err != nil || info.Size != int64(len(text)) {
			t.Errorf("stat %q: %+v, %v", name, info, err)
		}
		f, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: path, Length: -1})
		if err != nil {
			t.Errorf("read %q: %v", name, err)
			continue
		}
		if read, err := io.ReadAll(f); err != nil || string(read) != text {
			t.Errorf("read %q: %q, %v", name, read, err)
		}
		f.Close()
		if err := n.Move(t.Context(), id, path, path+".moved"); err != nil {
			t.Errorf("move %q: %v", name, err)
		}
		if err := n.Remove(t.Context(), id, path+".moved", false); err != nil {
			t.Errorf("remove %q: %v", name, err)
		}
	}
	if out, _ := n.sh(id, `ls -Ab names; find / -name injected 2>/dev/null`); out != "" {
		t.Errorf("left: %q", out)
	}
	// Dots and slashes are the kernel's to read, not a router's.
	for _, path := range []string{"/workspace/./names/../names/%2F", "//workspace//%2F"} {
		req, err := http.NewRequest("GET", n.endpoint+"/v1/sandboxes/"+string(id)+"/files/stat?path="+url.QueryEscape(path), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+n.key)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound { // the names were removed: an answer of the agent's, no redirect
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
}

// F3: a name that is no text is taken as its bytes or refused, never changed into
// another name.
func TestANameThatIsNoTextIsNotChanged(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	_, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "d/\xff\xfe", Content: strings.NewReader("x"), Parents: true})
	out, _ := n.sh(id, "ls d 2>/dev/null | od -An -tx1")
	switch {
	case err == nil && out == " ff fe 0a\n":
	case boxed.CodeOf(err) == boxed.CodeInvalid && out == "":
	default:
		t.Errorf("the name's bytes are %q, the answer was %v", out, err)
	}
}

// F4, NousResearch/hermes-agent#7362: 580 files went one by one and took five
// minutes. A directory goes as one tar, in one request each way.
// F5, NVIDIA/OpenShell#1595, #2319: links were flattened, or followed out of the
// tree. They stay links, both ways, whatever they point at.
func TestATreeGoesAsOneTar(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	from, to := filepath.Join(t.TempDir(), "tree"), filepath.Join(t.TempDir(), "back")
	for i := range 580 {
		name := filepath.Join(from, fmt.Sprintf("d%d/e%d/f%d", i%7, i%3, i))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, bytes.Repeat([]byte{byte(i)}, i*i%9000), 0o600|os.FileMode(i%8)); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"inside": "d0/e0/f0", "outside": "/etc/passwd", "above": "../../..", "dangling": "nowhere", "d0/loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(from, name)); err != nil {
			t.Fatal(err)
		}
	}
	requests := func(call string) int { return strings.Count(n.log.String(), call) }
	began := time.Now()
	for _, args := range [][]string{{"cp", from, string(id) + ":"}, {"cp", string(id) + ":tree", to}} {
		if out, errs, code := n.ctl(args...); code != 0 {
			t.Fatalf("%q: %s%s", args, out, errs)
		}
	}
	if took := time.Since(began); took > 60*time.Second {
		t.Errorf("it took %v", took)
	}
	out, err := exec.Command("diff", "-r", "--no-dereference", from, to).CombinedOutput()
	if err != nil {
		t.Errorf("it came back different: %v\n%s", err, out)
	}
	modes := func(dir string) string {
		out, err := exec.Command("sh", "-c", `cd "$1" && find . -type f -printf '%m %p\n' | sort`, "sh", dir).Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if modes(from) != modes(to) {
		t.Error("modes were changed")
	}
	if puts, gets := requests("method=PUT route=/v1/sandboxes/{id}/tar"), requests("method=GET route=/v1/sandboxes/{id}/tar"); puts != 1 || gets != 1 || requests("method=PUT route=/v1/sandboxes/{id}/files ") != 0 {
		t.Errorf("%d uploads and %d downloads of a tar", puts, gets)
	}
	// What a download holds of links is the links: nothing of what they lead to.
	n.sh(id, "mkdir /workspace/links; cd /workspace/links; ln -s /etc/passwd a; ln -s /proc/1/environ b; ln -s / c; ln -s ../tree d")
	r, err := n.ReadTar(t.Context(), id, "links")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	found := 0
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case h.Typeflag == tar.TypeSymlink && h.Size == 0:
			found++
		case h.Typeflag != tar.TypeDir || strings.Contains(strings.Trim(h.Name, "/"), "/"):
			t.Errorf("%q of type %c", h.Name, h.Typeflag)
		}
	}
	if found != 4 {
		t.Errorf("%d links", found)
	}
	for _, path := range []string{"links/a", "links/b", "links/c/etc/shadow", "tree/outside"} {
		if f, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: path, Length: -1}); err == nil {
			f.Close()
			t.Errorf("%s was read through a link", path)
		}
	}
}
