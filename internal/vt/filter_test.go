package vt_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed/internal/vt"
)

func filtered(chunks ...string) string {
	var out bytes.Buffer
	f := vt.NewFilter(&out)
	for _, c := range chunks {
		f.Write([]byte(c))
	}
	return out.String()
}

// I20: output that is shown a second time is text, colours and movements, and asks
// the terminal nothing.
func TestWhatIsShownAgainDoesNothing(t *testing.T) {
	for name, tc := range map[string]struct{ in, want string }{
		"text":                      {"a\tb\r\nÄ漢😀\b \x07", "a\tb\r\nÄ漢😀\b \x07"},
		"colours":                   {"\x1b[1;38;5;9mred\x1b[0m", "\x1b[1;38;5;9mred\x1b[0m"},
		"movement":                  {"\x1b[2J\x1b[H\x1b[3;4H\x1b[?1049h\x1b7\x1b8\x1b(B", "\x1b[2J\x1b[H\x1b[3;4H\x1b[?1049h\x1b7\x1b8\x1b(B"},
		"a title, by BEL":           {"a\x1b]0;owned\x07b", "ab"},
		"a title, by ST":            {"a\x1b]2;owned\x1b\\b", "ab"},
		"the clipboard":             {"a\x1b]52;c;cm0gLXJm\x07b", "ab"},
		"a colour that is asked":    {"a\x1b]11;?\x1b\\b", "ab"},
		"a setting that is asked":   {"a\x1bP$qm\x1b\\b", "ab"},
		"where the cursor is":       {"a\x1b[6nb\x1b[?6nc", "abc"},
		"what it is":                {"a\x1b[cb\x1b[>cc\x1b[=cd\x1bZe", "abcde"},
		"which version":             {"a\x1b[>0qb", "ab"},
		"the cursor's shape":        {"\x1b[2 q", "\x1b[2 q"},
		"a mode that is asked":      {"a\x1b[?2026$pb", "ab"},
		"a soft reset":              {"\x1b[!p", "\x1b[!p"},
		"windows":                   {"a\x1b[21tb\x1b[8;1;1t", "ab"},
		"the keyboard":              {"a\x1b[?ub", "ab"},
		"the cursor that was saved": {"\x1b[s\x1b[u", "\x1b[s\x1b[u"},
		"answer-back":               {"a\x05b\x1b[\x05mc", "ab\x1b[mc"},
		"printing":                  {"a\x1b[5ib", "ab"},
		"C1 as characters":          {"a\u009b6nb\u009d0;x", "a6nb0;x"},
		"C1 as bytes":               {"a\x9b6nb\x9d", "a6nb"},
		"no end":                    {"a\x1b]0;", "a"},
		"given up":                  {"a\x1b]0;x\x18b\x1b[6\x18n\x1b]0;x\x1b[1mc", "abn\x1b[1mc"},
		"too long":                  {"a\x1b[" + strings.Repeat("1;", 500) + "mb", "ab"},
		"no character":              {"a\xc3(\xe2\x82b\xff", "a(b"},
	} {
		if got := filtered(tc.in); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func FuzzFilter(f *testing.F) {
	f.Add("a\x1b]0;x\x07\x1b[6n\x1b[31mÄ\x9b", 3)
	f.Add("\x1bP\x1b\x1b[\x1b]\\", 1)
	f.Fuzz(func(t *testing.T, in string, at int) {
		got := filtered(in)
		if at = min(max(at, 0), len(in)); filtered(in[:at], in[at:]) != got {
			t.Errorf("%q, cut at %d, is another", in, at)
		}
		if again := filtered(got); again != got {
			t.Errorf("%q filtered is %q, and again %q", in, got, again)
		}
		for _, never := range []string{"\x1b]", "\x1bP", "\x1b_", "\x1b^", "\x1bX", "\x1bZ", "\x05", "\u009b", "\u009d"} {
			if strings.Contains(got, never) {
				t.Errorf("%q has %q", got, never)
			}
		}
	})
}
