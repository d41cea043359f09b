package api_test

import (
	"flag"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed/api"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/api.md")

func TestPages(t *testing.T) {
	t.Run("docs/api.md is what the document says", func(t *testing.T) {
		const file = "../docs/api.md"
		want, err := api.Markdown()
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.MkdirAll("../docs", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("run make docs\n%s", diff)
		}
	})
	t.Run("the page needs nothing from elsewhere", func(t *testing.T) {
		h := newHarness(t)
		a := h.do("GET", "/docs", "", "Authorization", "")
		page := string(a.body)
		if a.status != http.StatusOK || !strings.HasPrefix(a.header.Get("Content-Type"), "text/html") {
			t.Fatal(a.status, a.header)
		}
		if csp := a.header.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Error(csp)
		}
		for _, bad := range []string{"<script", "<img", "<link", "src=", "url(", "@import", "style=\"", "http-equiv"} {
			if strings.Contains(page, bad) {
				t.Errorf("has %s", bad)
			}
		}
		for _, href := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(page, -1) {
			if !strings.HasPrefix(href[1], "#") {
				t.Errorf("links to %s", href[1])
			} else if !strings.Contains(page, `id="`+href[1][1:]+`"`) {
				t.Errorf("%s leads nowhere", href[1])
			}
		}
		ids := map[string]bool{}
		for _, id := range regexp.MustCompile(` id="([^"]*)"`).FindAllStringSubmatch(page, -1) {
			if ids[id[1]] {
				t.Errorf("id %s is there twice", id[1])
			}
			ids[id[1]] = true
		}
		for _, want := range []string{"call-createSandbox", "schema-ExecRequest", "<td><code>not_found</code></td><td>404</td>"} {
			if !strings.Contains(page, want) {
				t.Errorf("%s is missing", want)
			}
		}
		if strings.Contains(page, "**") || strings.Contains(page, "```") || regexp.MustCompile(`<p>\|`).MatchString(page) {
			t.Error("some Markdown was not read")
		}
	})
}
