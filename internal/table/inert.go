package table

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxMarks is how many combining marks may follow one character. More than any
// orthography needs, they climb over the lines above and below.
const maxMarks = 3

// Inert makes s safe to show on a terminal, on one line: everything that is not
// a plain printable character is written as an escape in Go's form (\n, \x1b,
// \u202e). That covers control characters and with them all escape sequences,
// the C1 range, line and paragraph separators, bidirectional overrides,
// zero-width and other invisible characters, and bytes that are not UTF-8.
//
// The result is for eyes: a backslash in s stays as it is, so it cannot be
// turned back into s.
func Inert(s string) string {
	if plain(s) {
		return s
	}
	var b strings.Builder
	marks := maxMarks // a mark at the start would sit on what is printed before s
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
			marks = 0
		case unicode.Is(unicode.M, r) && marks < maxMarks:
			b.WriteRune(r)
			marks++
		case unicode.Is(unicode.M, r) || !visible(r):
			b.WriteString(escape(r))
			marks = 0
		default:
			b.WriteRune(r)
			marks = 0
		}
		i += n
	}
	return b.String()
}

// plain is the common case: printable ASCII.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// visible reports whether r prints as itself and takes room.
func visible(r rune) bool {
	switch r {
	case '\u115f', '\u1160', '\u3164', '\uffa0', '\u2800': // fillers: letters to Unicode, blank to the eye
		return false
	}
	return strconv.IsPrint(r)
}

func escape(r rune) string {
	switch {
	case r == '\n':
		return `\n`
	case r == '\r':
		return `\r`
	case r == '\t':
		return `\t`
	case r < 0x80:
		return fmt.Sprintf(`\x%02x`, r)
	case r <= 0xffff:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%08x`, r)
}

// InertJSON makes encoded JSON safe to show on a terminal without changing what
// it means: what encoding/json leaves raw inside strings (the C1 range,
// bidirectional overrides, invisible characters) becomes \u escapes.
func InertJSON(encoded []byte) []byte {
	out := make([]byte, 0, len(encoded))
	for i := 0; i < len(encoded); {
		r, n := utf8.DecodeRune(encoded[i:])
		switch {
		case r == '\n' || r >= ' ' && r <= '~':
			out = append(out, byte(r))
		case r == utf8.RuneError && n == 1:
			out = append(out, `\ufffd`...)
		case visible(r) && !unicode.Is(unicode.M, r):
			out = append(out, encoded[i:i+n]...)
		case r > 0xffff:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		i += n
	}
	return out
}
