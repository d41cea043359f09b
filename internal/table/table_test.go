package table_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func TestInert(t *testing.T) {
	tests := map[string]struct{ in, want string }{
		"keeps plain text":            {`a name, C:\dir`, `a name, C:\dir`},
		"keeps other scripts":         {"日本 héllo Привет", "日本 héllo Привет"},
		"keeps accents made of marks": {"e\u0301", "e\u0301"},
		"escapes a colour sequence":   {"\x1b[31mred\x1b[0m", `\x1b[31mred\x1b[0m`},
		"escapes a window title":      {"\x1b]0;pwned\a", `\x1b]0;pwned\x07`},
		"escapes eight-bit sequences": {"\u009b31m", `\u009b31m`},
		"escapes raw C1 bytes":        {"\x9b31m", `\x9b31m`},
		"escapes line breaks":         {"a\r\nb\u2028c", `a\r\nb\u2028c`},
		"escapes bidi overrides":      {"exe\u202egnp", `exe\u202egnp`},
		"escapes bidi isolates":       {"\u2066a\u2069", `\u2066a\u2069`},
		"escapes what is invisible":   {"a\u200bb\u00a0c\u3164", `a\u200bb\u00a0c\u3164`},
		"escapes tag characters":      {"a\U000e0041", `a\U000e0041`},
		"escapes backspaces":          {"abc\b\b\bxyz\x7f", `abc\x08\x08\x08xyz\x7f`},
		"bounds marks on a character": {"a" + strings.Repeat("\u0300", 5), "a\u0300\u0300\u0300\\u0300\u0300"},
		"escapes a mark at the start": {"\u0300a", `\u0300a`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := table.Inert(tt.in); got != tt.want {
				t.Errorf("Inert(%q) = %q, want %q", tt.in, got, tt.want)
			}
		})
	}
}

func TestWidthCountsColumns(t *testing.T) {
	for s, want := range map[string]int{"": 0, "abc": 3, "日本": 4, "e\u0301": 1, "é": 1, "🚀": 2, "ＡＢ": 4, "한글": 4, "…": 1} {
		if got := table.Width(s); got != want {
			t.Errorf("Width(%q) = %d, want %d", s, got, want)
		}
	}
}

func TestClipNeverExceedsTheWidth(t *testing.T) {
	for width := 1; width < 12; width++ {
		for _, s := range []string{"abcdefghijkl", "日本日本日本", "a日b本c日d本", "e\u0301e\u0301e\u0301e\u0301"} {
			got := table.Clip(s, width)
			if table.Width(got) > width {
				t.Errorf("Clip(%q, %d) = %q is %d wide", s, width, got, table.Width(got))
			}
			if table.Width(s) > width && !strings.HasSuffix(got, "…") {
				t.Errorf("Clip(%q, %d) = %q hides that it was cut", s, width, got)
			}
		}
	}
}

func TestWords(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	got := []string{
		table.Age(time.Time{}, now), table.Age(now.Add(time.Second), now), table.Age(now.Add(-119*time.Second), now),
		table.Age(now.Add(-150*time.Second), now), table.Age(now.Add(-47*time.Hour), now), table.Age(now.Add(-50*time.Hour), now),
		table.Until(time.Time{}, now), table.Until(now, now), table.Until(now.Add(time.Hour), now),
		table.Size(0), table.Size(1023), table.Size(1024), table.Size(512 << 20), table.Size(3 << 29), table.Size(1<<20 - 1), table.Size(-2048),
	}
	want := []string{
		"-", "0s", "119s", "2m", "47h", "2d", "never", "now", "60m",
		"0 B", "1023 B", "1 KiB", "512 MiB", "1.5 GiB", "1 MiB", "-2 KiB",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func render(t *testing.T, tb *table.Table, l table.Layout) string {
	t.Helper()
	var b strings.Builder
	if err := tb.Write(&b, l); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestAlignsByDisplayWidth(t *testing.T) {
	tb := table.New(table.Column{Name: "NAME"}, table.Column{Name: "SIZE", Right: true}, table.Column{Name: "NOTE"})
	tb.Row("日本", "5 B", "one")
	tb.Row("plain", "512 MiB", "")
	tb.Row("short")
	want := "NAME      SIZE  NOTE\n" +
		"日本       5 B  one\n" +
		"plain  512 MiB\n" +
		"short\n"
	if diff := cmp.Diff(want, render(t, tb, table.Layout{})); diff != "" {
		t.Error(diff)
	}
}

func TestShortensTheWidestColumnAndKeepsIDs(t *testing.T) {
	tb := table.New(table.Column{Name: "ID", Keep: true}, table.Column{Name: "IMAGE"}, table.Column{Name: "STATE"})
	tb.Row("abcdefghijklmnop", strings.Repeat("image", 20), "running")
	out := render(t, tb, table.Layout{Width: 50})
	for line := range strings.Lines(out) {
		if w := table.Width(strings.TrimSuffix(line, "\n")); w > 50 {
			t.Errorf("line is %d wide: %q", w, line)
		}
	}
	if !strings.Contains(out, "abcdefghijklmnop") || !strings.Contains(out, "running") || !strings.Contains(out, "…") {
		t.Errorf("got\n%s", out)
	}
}

func TestColoursOnlyWhenAllowed(t *testing.T) {
	tb := table.New(table.Column{Name: "STATE"})
	tb.Add(table.State(&boxed.Sandbox{State: boxed.StateRunning}))
	tb.Add(table.State(&boxed.Sandbox{State: boxed.StateFailed, Reason: boxed.EndOOM}))
	if got := render(t, tb, table.Layout{}); got != "STATE\nrunning\nfailed: oom\n" {
		t.Errorf("got %q", got)
	}
	want := "\x1b[1mSTATE\x1b[0m\r\n\x1b[32mrunning\x1b[0m\r\n\x1b[31mfailed: oom\x1b[0m\r\n"
	if got := render(t, tb, table.Layout{Color: true, Newline: "\r\n"}); got != want {
		t.Errorf("got %q", got)
	}
}

// The attack (I20): a sandbox's name, label, image, or a program's message
// carries bytes that a terminal obeys.
func FuzzCellsAreInert(f *testing.F) {
	for _, s := range []string{"", "plain", "\x1b]52;c;ZXZpbA==\a", "\u202eabc", "\xff\xfe", "日本\u0301", "a\u0300\u0300\u0300\u0300\u0300", "\x9b31m", "\u009d0;x\u009c"} {
		f.Add(s, 20)
	}
	f.Fuzz(func(t *testing.T, s string, width int) {
		got := table.Inert(s)
		if !utf8.ValidString(got) {
			t.Fatalf("Inert(%q) = %q is not UTF-8", s, got)
		}
		for _, r := range got {
			if !unicode.IsPrint(r) || unicode.Is(unicode.C, r) {
				t.Fatalf("Inert(%q) = %q has %U", s, got, r)
			}
		}
		if again := table.Inert(got); again != got {
			t.Fatalf("Inert(%q) = %q, and again %q", s, got, again)
		}
		width = max(0, width%200)
		tb := table.New(table.Column{Name: "A"}, table.Column{Name: "B"})
		tb.Row(s, "end")
		var b strings.Builder
		if err := tb.Write(&b, table.Layout{Width: width}); err != nil {
			t.Fatal(err)
		}
		if lines := strings.Count(b.String(), "\n"); lines != 2 {
			t.Fatalf("a cell of %q made %d lines", s, lines)
		}
		if strings.ContainsAny(b.String(), "\x1b\r\a\b\t") {
			t.Fatalf("a cell of %q wrote %q", s, b.String())
		}
	})
}

func FuzzInertJSONKeepsTheMeaning(f *testing.F) {
	f.Add("plain")
	f.Add("\x1b[0m\u009b\u202e\U000e0041\u0301日本🚀\u2028\x7f\\\"")
	f.Fuzz(func(t *testing.T, s string) {
		in, err := json.Marshal(map[string]string{"s": s})
		if err != nil {
			t.Fatal(err)
		}
		out := table.InertJSON(in)
		for _, r := range string(out) {
			if !unicode.IsPrint(r) {
				t.Fatalf("InertJSON of %q has %U", s, r)
			}
		}
		var before, after map[string]string
		if json.Unmarshal(in, &before) != nil || json.Unmarshal(out, &after) != nil || before["s"] != after["s"] {
			t.Fatalf("%q became %q (%s)", before["s"], after["s"], out)
		}
	})
}
