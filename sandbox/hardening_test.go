package sandbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Case I5: the part of an image's environment that execs inherit.
func TestVetsTheEnvironmentOfImages(t *testing.T) {
	path := func(more ...string) map[string]string {
		out := map[string]string{"PATH": sandbox.DefaultPath}
		for i := 0; i < len(more); i += 2 {
			out[more[i]] = more[i+1]
		}
		return out
	}
	for name, c := range map[string]struct {
		env  []string
		want map[string]string
	}{
		"nothing":         {nil, path()},
		"what is useful":  {[]string{"LANG=C.UTF-8", "PYTHON_VERSION=3.12", "GOPATH=/go", "GOTOOLCHAIN=local", "X="}, path("LANG", "C.UTF-8", "PYTHON_VERSION", "3.12", "GOPATH", "/go", "GOTOOLCHAIN", "local", "X", "")},
		"the loader":      {[]string{"LD_PRELOAD=/x", "LD_AUDIT=/x", "GLIBC_TUNABLES=x", "GCONV_PATH=/x", "LD_LIBRARY_PATH=/cuda"}, path("LD_LIBRARY_PATH", "/cuda")},
		"Go's runtime":    {[]string{"GODEBUG=x", "GOGC=off", "GOMAXPROCS=1", "GOTRACEBACK=all", "GOCOVERDIR=/"}, path()},
		"shells":          {[]string{"BASH_ENV=/x", "ENV=/x", "PROMPT_COMMAND=x", "IFS=x", "BASH_FUNC_ls%%=() { evil; }"}, path()},
		"ours":            {[]string{"BOXED_API_KEY=x", "HOME=/root", "USER=root", "HOSTNAME=x", "TMPDIR=/x", "PWD=/"}, path()},
		"proxies":         {[]string{"HTTP_PROXY=x", "https_proxy=x", "ALL_PROXY=x", "no_proxy=x", "Ftp_Proxy=x"}, path()},
		"bad names":       {[]string{"=x", "A B=x", "1A=x", "A-B=x", "Ä=x", "NOVALUE", strings.Repeat("N", 200) + "=x"}, path()},
		"bad values":      {[]string{"A=\xff", "B=a\x00b", "C=" + strings.Repeat("x", 40<<10), "D=ok\n"}, path("D", "ok\n")},
		"twice":           {[]string{"A=1", "A=2"}, path("A", "2")},
		"equals signs":    {[]string{"A=b=c="}, path("A", "b=c=")},
		"a path":          {[]string{"PATH=/opt/bin:/usr/bin"}, map[string]string{"PATH": "/opt/bin:/usr/bin"}},
		"a hostile path":  {[]string{"PATH=:.:evil:../x::/bin:"}, map[string]string{"PATH": "/bin"}},
		"an empty path":   {[]string{"PATH="}, path()},
		"a relative path": {[]string{"PATH=bin:."}, path()},
	} {
		if diff := cmp.Diff(c.want, sandbox.VetEnv(c.env)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestEnvironmentOfImagesIsBounded(t *testing.T) {
	var env []string
	for i := range 10_000 {
		env = append(env, fmt.Sprintf("V%d=%s", i, strings.Repeat("x", i%2000)))
	}
	first, size := sandbox.VetEnv(env), 0
	for name, value := range first {
		size += len(name) + len(value)
	}
	if len(first) > 128 || size > 64<<10 || first["PATH"] == "" {
		t.Errorf("%d variables of %d bytes", len(first), size)
	}
	slices.Reverse(env)
	if diff := cmp.Diff(first, sandbox.VetEnv(env)); diff != "" {
		t.Errorf("what is dropped depends on the order: %s", diff)
	}
}

func TestHardeningListsAreInOrder(t *testing.T) {
	for name, list := range map[string][]string{"masked": sandbox.MaskedPaths(), "read-only": sandbox.ReadonlyPaths()} {
		seen := map[string]bool{}
		for _, p := range list {
			if seen[p] || !strings.HasPrefix(p, "/proc/") && !strings.HasPrefix(p, "/sys/") {
				t.Errorf("%s: %s", name, p)
			}
			seen[p] = true
		}
	}
	names := map[string]bool{}
	for _, u := range sandbox.Ulimits(boxed.DefaultLimits()) {
		if names[u.Name] || u.Name == "rss" || u.Value < 0 { // RLIMIT_RSS is the agent's mark
			t.Errorf("%+v", u)
		}
		names[u.Name] = true
	}
	for _, e := range sandbox.AgentEnv() {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "PATH" || name == "" {
			t.Errorf("%q", e)
		}
	}
}

// facts.md: a tmpfs is memory, so all of them must fit.
func TestVolumesFitTheHeadroom(t *testing.T) {
	if sandbox.VolumeTmpfs(nil) != nil {
		t.Error("no volumes, but mounts")
	}
	for n := 1; n <= sandbox.MaxVolumes; n++ {
		var sum int64
		for _, m := range sandbox.VolumeTmpfs(make([]string, n)) {
			if sum += m.Bytes; m.Bytes < boxed.MiB || m.Bytes%4096 != 0 {
				t.Errorf("%d volumes: %d bytes", n, m.Bytes)
			}
		}
		if sum > boxed.MemoryHeadroom/2 {
			t.Errorf("%d volumes: %d bytes in all", n, sum)
		}
	}
}

func TestLoopbackBytesFollowMemory(t *testing.T) {
	for mib, want := range map[int64]int64{16: 8, 64: 8, 128: 16, 512: 64, 4096: 64} {
		if got := sandbox.LoopbackBytes(boxed.Limits{MemoryBytes: mib << 20}); got != want<<20 {
			t.Errorf("%d MiB: %d", mib, got>>20)
		}
	}
}

func TestHardeningRevisionIsStable(t *testing.T) {
	if r := sandbox.HardeningRevision(); len(r) != 12 || r != sandbox.HardeningRevision() {
		t.Errorf("%q", r)
	}
}
