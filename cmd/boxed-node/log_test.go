package main_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

// I20: whatever a user called something, a terminal that shows the node's log acts
// on none of it.
func TestTheLogIsInert(t *testing.T) {
	hostile := []string{
		"\x1b]0;title\x07", "\x1b[2J\x1b[H", "\u009b31m", "\r\nlevel=ERROR msg=forged", "a\x00b\x7f", "\u202eexe.txt", "\u2028", "\U000e0041",
		"\xff\x9b31m", `"}` + "\n{",
	}
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			for _, s := range hostile {
				var b bytes.Buffer
				log := main.NewLogger(format, &b)
				log.Error(s, "name", s, s, 1, "err", errors.New(s), "list", []string{s})
				line := b.String()
				if strings.ContainsFunc(strings.TrimSuffix(line, "\n"), func(r rune) bool { return !unicode.IsPrint(r) }) {
					t.Errorf("%q became %q", s, line)
				}
				var m map[string]any
				if format == "json" {
					if err := json.Unmarshal(b.Bytes(), &m); err != nil || m["msg"] != string([]rune(s)) {
						t.Errorf("%q became %q: %v", s, line, err)
					}
				}
			}
		})
	}
}
