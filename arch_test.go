package boxed_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/boxed-mesh/boxed"

// rooms is the architecture: every package, and which of ours it may import. A
// new package, or a new edge, fails here until somebody writes it down on
// purpose; docs/ARCHITECTURE.md says why it is as it is.
//
// "." is the root package and "*" any. Directories that hold no Go of ours yet
// are named when they come.
var rooms = map[string][]string{
	".":                           {},
	"internal/frame":              {},
	"internal/table":              {"."},
	"internal/vt":                 {},
	"internal/relay":              {},
	"egress":                      {".", "internal/relay"},
	"internal/ctl":                {".", "api/client", "internal/table", "internal/vt"},
	"scheduler":                   {"."},
	"agent":                       {"internal/relay"},
	"agent/boxed-agent":           {"agent"},
	"agent/boxed-tools":           {},
	"sandbox":                     {".", "agent"},
	"sandbox/docker":              {".", "sandbox"},
	"sandbox/sandboxtest":         {".", "sandbox", "agent"},
	"store":                       {"."},
	"node":                        {".", "scheduler", "sandbox", "egress", "transport", "api/client"},
	"transport":                   {"."},
	"api":                         {".", "internal/frame"},
	"api/client":                  {".", "internal/frame"},
	"transport/tcpnet":            {".", "transport"},
	"transport/memnet":            {".", "transport"},
	"transport/tsnet":             {".", "transport"},
	"transport/tsnet/tailnettest": {},
	"boxedtest":                   {".", "node", "store", "api", "api/client", "sandbox", "sandbox/sandboxtest", "scheduler", "transport", "transport/memnet"},
	"transport/transporttest":     {".", "transport"},
	"sshd":                        {".", "internal/table", "internal/vt"},
	"cmd/boxed-node":              {"*"},
	"cmd/boxedctl":                {"internal/ctl"},
	"e2e":                         {},
	// At the driver, that is below HTTP, it measures in its own process.
	"bench":     {".", "api/client", "boxedtest", "node", "sandbox", "sandbox/docker", "scheduler", "store"},
	"bench/sim": {".", "scheduler", "store", "transport", "transport/memnet"},
}

// soleUsers names packages from outside that only some rooms may know.
var soleUsers = map[string][]string{
	"github.com/hashicorp/yamux":      {"agent"},
	"github.com/creack/pty":           {"agent/boxed-agent"},
	"github.com/docker/docker":        {"sandbox/docker", "bench"},
	"github.com/dgraph-io/badger":     {"store"},
	"github.com/coder/websocket":      {"api", "api/client"},
	"github.com/getkin/kin-openapi":   {"api"},
	"github.com/urfave/cli":           {"cmd/boxed-node", "internal/ctl"},
	"github.com/hashicorp/memberlist": {"transport"},
	"tailscale.com":                   {"transport/tsnet", "transport/tsnet/tailnettest"},
	"github.com/gliderlabs/ssh":       {"sshd"},
	"github.com/pkg/sftp":             {"agent/boxed-tools"},
	"github.com/aws/aws-sdk-go-v2":    {"egress"},
}

// noRooms are names that say nothing of what lies in them.
var noRooms = []string{"pkg", "util", "utils", "common", "models", "types", "helpers"}

// It reads the files, and does not ask go list: what that found would be cached
// with the test's result, and pass stale.
func TestPackagesImportWhatTheArchitectureDraws(t *testing.T) {
	seen := map[string]bool{}
	for _, file := range goFiles(t) {
		room := path.Dir(filepath.ToSlash(file))
		if strings.HasSuffix(file, "_test.go") || strings.HasPrefix(room, "examples") {
			continue
		}
		allowed, known := rooms[room]
		if !known {
			t.Errorf("%s: the package %s is not in the architecture; write it into rooms and docs/ARCHITECTURE.md on purpose", file, room)
			continue
		}
		seen[room] = true
		for _, imported := range imports(t, file) {
			if ours, ok := strings.CutPrefix(imported, module); ok {
				target := strings.TrimPrefix(ours, "/")
				if target == "" {
					target = "."
				}
				if !slices.Contains(allowed, target) && !slices.Contains(allowed, "*") {
					t.Errorf("%s: %s may not import %s", file, room, target)
				}
				continue
			}
			if room == "." && strings.Contains(strings.SplitN(imported, "/", 2)[0], ".") {
				t.Errorf("%s: the root package imports the standard library only, not %s", file, imported)
			}
			for outside, users := range soleUsers {
				if (imported == outside || strings.HasPrefix(imported, outside+"/")) && !slices.Contains(users, room) {
					t.Errorf("%s: only %v may import %s", file, users, outside)
				}
			}
		}
	}
	for room := range rooms {
		if !seen[room] {
			t.Errorf("rooms has %s, which is not there", room)
		}
	}
}

func TestNoPackageIsNamedForNothing(t *testing.T) {
	for _, file := range goFiles(t) {
		for _, part := range strings.Split(path.Dir(filepath.ToSlash(file)), "/") {
			if slices.Contains(noRooms, part) {
				t.Errorf("%s: %q says nothing of what lies in it", file, part)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	documented := map[string]bool{}
	for _, file := range goFiles(t) {
		room := path.Dir(filepath.ToSlash(file))
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		documented[room] = documented[room] || (parsed.Doc != nil && len(parsed.Doc.Text()) > 80)
	}
	for room, ok := range documented {
		if !ok {
			t.Errorf("package %s has no comment that says what it does, what not, and where to start reading", room)
		}
	}
}

func goFiles(t *testing.T) (files []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || d.Name() == "node_modules" || (strings.HasPrefix(d.Name(), ".") && p != ".")):
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(p, ".go"):
			files = append(files, p)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		cwd, _ := os.Getwd()
		t.Fatalf("no Go files below %s", cwd)
	}
	return files
}

func imports(t *testing.T, file string) (list []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range parsed.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
	return list
}
