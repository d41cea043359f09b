package egress

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
)

// Value is a real credential. Nothing prints it: whoever wants it says so. It is behind a
// pointer for the sake of fmt, which asks no method of a field that is not exported.
type Value struct{ secret *string }

const redacted = "[redacted]"

// NewValue holds a credential.
func NewValue(secret string) Value { return Value{&secret} }

// Reveal is the credential itself, for the wire.
func (v Value) Reveal() string {
	if v.secret == nil {
		return ""
	}
	return *v.secret
}

// Empty reports whether there is none.
func (v Value) Empty() bool { return v.Reveal() == "" }

func (v Value) String() string               { return redacted }
func (v Value) GoString() string             { return redacted }
func (v Value) Format(s fmt.State, _ rune)   { fmt.Fprint(s, redacted) }
func (v Value) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }
func (v Value) MarshalText() ([]byte, error) { return []byte(redacted), nil }
func (v Value) LogValue() slog.Value         { return slog.StringValue(redacted) }

// minScan is how long a text must be to be looked for in what a server answers: a shorter
// one is found everywhere.
const minScan = 8

// forms are a text as it may be written in a header: plain, in percent, hexadecimal and
// base64 form, the last at each of three offsets within what was encoded.
func forms(text string) []string {
	if len(text) < minScan {
		return nil
	}
	list := []string{text}
	add := func(s string) {
		if len(s) >= minScan && s != text {
			list = append(list, s)
		}
	}
	for _, s := range []string{url.QueryEscape(text), url.PathEscape(text)} {
		add(s)
		if low := lowerEscapes(s); low != s {
			add(low)
		}
	}
	var all strings.Builder
	for i := range len(text) {
		fmt.Fprintf(&all, "%%%02x", text[i])
	}
	add(all.String())
	add(hex.EncodeToString([]byte(text)))
	for offset := range 3 {
		padded := append(make([]byte, offset), text...)
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			s := enc.EncodeToString(padded)
			// What depends on the bytes around is left out at both ends.
			head := []int{0, 2, 3}[offset]
			tail := len(padded) % 3
			if tail != 0 {
				tail = 1
			}
			add(s[head : len(s)-tail])
		}
	}
	return list
}

// lowerEscapes is a percent form with its digits in lower case, as some servers write it.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:], strings.ToLower(s[i+1:i+3]))
		}
	}
	return string(b)
}

// scanner looks for texts in any of their forms.
type scanner struct{ forms []string }

func newScanner(texts ...string) *scanner {
	s := &scanner{}
	for _, t := range texts {
		s.forms = append(s.forms, forms(t)...)
	}
	return s
}

// hits reports whether one of the texts is in s. Percent and hexadecimal forms are looked
// for whatever the case of their digits.
func (s *scanner) hits(text string) bool {
	if s == nil || len(text) < minScan {
		return false
	}
	low := ""
	for i, f := range s.forms {
		if strings.Contains(text, f) {
			return true
		}
		if i > 0 && (f[0] == '%' || isHex(f)) {
			if low == "" {
				low = strings.ToLower(text)
			}
			if strings.Contains(low, f) {
				return true
			}
		}
	}
	return false
}

func isHex(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return !strings.ContainsRune("0123456789abcdef", c) })
}
