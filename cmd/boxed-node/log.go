package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// newLogger logs to w. With level, which may be nil, the level can be changed
// while it is in use.
func newLogger(c *Config, w io.Writer, level *slog.LevelVar) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.Log.Level}
	if level != nil {
		level.Set(c.Log.Level)
		o.Level = level
	}
	if c.Log.Format == "json" {
		return slog.New(slog.NewJSONHandler(inert{w}, o))
	}
	return slog.New(slog.NewTextHandler(w, o)) // has only what can be printed
}

// inert escapes what a terminal would act on and encoding/json leaves as it is,
// such as U+009B, which begins a sequence, and marks that turn text around.
type inert struct{ w io.Writer }

func active(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }

// Write takes whole lines of JSON, in which such characters are in strings only.
func (i inert) Write(p []byte) (int, error) {
	if !bytes.ContainsFunc(p, active) {
		return i.w.Write(p)
	}
	line := make([]byte, 0, len(p)+64)
	for _, r := range string(p) {
		switch {
		case !active(r):
			line = utf8.AppendRune(line, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			line = fmt.Appendf(line, `\u%04x\u%04x`, high, low)
		default:
			line = fmt.Appendf(line, `\u%04x`, r)
		}
	}
	if _, err := i.w.Write(line); err != nil {
		return 0, err
	}
	return len(p), nil
}
