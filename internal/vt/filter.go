// Package vt takes from a terminal's recorded output what would make the terminal it
// is shown on again do more than show it: answer a question into somebody's shell,
// set the clipboard or the title, print, or open a window.
//
// It is for output that is shown a second time: the scroll-back of a shell that
// somebody comes back to, and recordings. Start reading at [Filter].
package vt

import (
	"io"
	"unicode/utf8"
)

// Filter is a writer that passes on text, colours and the movements of the cursor, and
// leaves out:
//
//   - every OSC, DCS, APC, PM and SOS string: titles, the clipboard, colours that are
//     asked for, notifications, files, settings that are asked for;
//   - the control sequences that ask for a report, and those that print, move windows
//     or use a locator;
//   - answer-back (ENQ), and the control characters of the C1 range.
//
// A sequence may be spread over any number of writes. What is not complete is not
// written. A Filter is not safe for concurrent use.
type Filter struct {
	to    io.Writer
	state state
	seq   []byte // of a sequence that is not complete yet
	rune  []byte // of a character that is not complete yet
}

// NewFilter makes a Filter that writes to w.
func NewFilter(w io.Writer) *Filter { return &Filter{to: w} }

type state int

const (
	ground    state = iota
	escape          // after ESC
	between         // ESC and intermediate bytes
	control         // CSI
	text            // OSC, DCS, APC, PM, SOS: to its end
	textEsc         // the same, after ESC
	swallowed       // CSI that is too long: to its end
)

// maxSequence bounds a control sequence, in bytes; longer ones are left out.
const maxSequence = 256

// Write filters p. It reports all of p as written unless the writer fails.
func (f *Filter) Write(p []byte) (int, error) {
	out := make([]byte, 0, len(p))
	for _, b := range p {
		out = f.next(out, b)
	}
	if len(out) > 0 {
		if _, err := f.to.Write(out); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

func (f *Filter) next(out []byte, b byte) []byte {
	switch f.state {
	case ground:
		return f.ground(out, b)
	case escape:
		return f.escape(out, b)
	case between:
		switch {
		case b == 0x1b:
			f.seq = append(f.seq[:0], b)
			f.state = escape
		case b < 0x20:
			return append(out, harmless(b)...)
		case b < 0x30 && len(f.seq) < maxSequence:
			f.seq = append(f.seq, b)
		case b >= 0x30 && b < 0x7f:
			f.state = ground
			return append(append(out, f.seq...), b)
		default:
			f.state = ground
		}
	case control, swallowed:
		return f.control(out, b)
	case text:
		switch b {
		case 0x07, 0x18, 0x1a: // BEL ends it, CAN and SUB give it up
			f.state = ground
		case 0x1b:
			f.state = textEsc
		}
	case textEsc:
		if b == '\\' {
			f.state = ground
			return out
		}
		f.seq, f.state = append(f.seq[:0], 0x1b), escape // a new sequence gives it up
		return f.escape(out, b)
	}
	return out
}

func (f *Filter) ground(out []byte, b byte) []byte {
	switch {
	case len(f.rune) > 0 || b >= 0x80:
		return f.character(out, b)
	case b == 0x1b:
		f.seq, f.state = append(f.seq[:0], b), escape
		return out
	}
	return append(out, harmless(b)...)
}

// character collects what is not ASCII, and passes on whole characters only.
func (f *Filter) character(out []byte, b byte) []byte {
	if b < 0x80 { // what came before it is none
		f.rune = f.rune[:0]
		return f.ground(out, b)
	}
	f.rune = append(f.rune, b)
	if !utf8.FullRune(f.rune) {
		return out
	}
	r, n := utf8.DecodeRune(f.rune)
	if r == utf8.RuneError && n == 1 {
		rest := append([]byte(nil), f.rune[1:]...)
		f.rune = f.rune[:0]
		for _, b := range rest {
			out = f.character(out, b)
		}
		return out
	}
	if r > 0x9f { // else a control character of the C1 range
		out = append(out, f.rune...)
	}
	f.rune = f.rune[:0]
	return out
}

func (f *Filter) escape(out []byte, b byte) []byte {
	switch {
	case b == 0x1b:
		f.seq = append(f.seq[:0], b)
	case b < 0x20:
		return append(out, harmless(b)...)
	case b == '[':
		f.seq, f.state = append(f.seq, b), control
	case b == ']' || b == 'P' || b == '_' || b == '^' || b == 'X':
		f.state = text
	case b < 0x30:
		f.seq, f.state = append(f.seq, b), between
	case b == 'Z' || b == '\\' || b >= 0x7f: // what are you?; an end without a beginning
		f.state = ground
	default:
		f.state = ground
		return append(append(out, f.seq...), b)
	}
	return out
}

func (f *Filter) control(out []byte, b byte) []byte {
	switch {
	case b == 0x1b:
		f.seq, f.state = append(f.seq[:0], b), escape
	case b == 0x18 || b == 0x1a || b >= 0x7f:
		f.state = ground
	case b < 0x20:
		return append(out, harmless(b)...)
	case b < 0x40:
		if f.seq = append(f.seq, b); len(f.seq) > maxSequence {
			f.seq, f.state = f.seq[:0], swallowed
		}
	default:
		whole := f.state == control && shows(f.seq[2:], b)
		f.state = ground
		if whole {
			return append(append(out, f.seq...), b)
		}
	}
	return out
}

// harmless is a control character, unless it has the terminal answer.
func harmless(b byte) []byte {
	if b == 0x05 { // ENQ
		return nil
	}
	return []byte{b}
}

// shows reports whether a control sequence only changes what is to be seen: by its
// final byte, and the private and intermediate bytes among its parameters.
func shows(params []byte, final byte) bool {
	has := func(marks string) bool {
		for _, p := range params {
			for i := range len(marks) {
				if p == marks[i] {
					return true
				}
			}
		}
		return false
	}
	switch final {
	case 'n', 'c', 'x', 'i', 't': // reports, attributes, parameters, printing, windows
		return final == 't' && has("$ ") // of an area: it only paints
	case 'p': // a mode that is asked for
		return !has("$")
	case 'q': // the version
		return !has(">")
	case 'm', 'S': // keys, graphics that are asked for
		return !has("?")
	case 'u', 'y', 'w', 'z', '{', '|', '}', 'v', 'R': // keyboard, checksums, locators, rectangles that are asked for
		return final == 'u' && len(params) == 0 || final == 'z' && has("$") || final == '{' && has("$")
	}
	return true
}
