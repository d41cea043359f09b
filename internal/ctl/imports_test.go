package ctl

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// ours are the packages of this module that boxedctl may be linked with. What
// those import is held by the test at the module's root and followed here.
var ours = []string{"", "api/client", "internal/ctl", "internal/frame", "internal/table", "internal/vt"}

// theirs are the modules that it may be linked with.
var theirs = []string{"github.com/coder/websocket", "github.com/goccy/go-yaml", "github.com/urfave/cli/v2", "golang.org/x/sys", "golang.org/x/term"}

const module = "github.com/boxed-mesh/boxed"

// boxedctl is installed on laptops: it must not bring a tailnet, a database or
// Docker's library with it. The imports are parsed, since `go list` would be
// cached by `go test`.
func TestOnlyAFewPackagesAreLinked(t *testing.T) {
	seen := map[string]bool{}
	queue := []string{"cmd/boxedctl"}
	for len(queue) > 0 {
		pkg := queue[0]
		queue = queue[1:]
		if seen[pkg] {
			continue
		}
		seen[pkg] = true
		files, err := filepath.Glob(filepath.Join("..", "..", pkg, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %q: %v", pkg, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			src, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, src, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, spec := range f.Imports {
				path := strings.Trim(spec.Path.Value, `"`)
				if path == module || strings.HasPrefix(path, module+"/") {
					rel := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
					if !slices.Contains(ours, rel) {
						t.Errorf("%s imports %s", file, path)
						continue
					}
					queue = append(queue, rel)
				} else if strings.Contains(strings.SplitN(path, "/", 2)[0], ".") &&
					!slices.ContainsFunc(theirs, func(m string) bool { return path == m || strings.HasPrefix(path, m+"/") }) {
					t.Errorf("%s imports %s", file, path)
				}
			}
		}
	}
}
