package sshd

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

// maxRecording bounds one recording, in bytes. What comes after is not recorded.
const maxRecording = 16 << 20

// recording writes what a terminal shows as an asciicast of version 2
// (docs.asciinema.org/manual/asciicast/v2). What is typed is not in it but as far as the
// terminal shows it, so no password is.
type recording struct {
	to    io.WriteCloser
	began time.Time

	mu   sync.Mutex
	left int
	part []byte // of a character that is not whole yet
}

// record begins the recording of the session's terminal, if terminals are recorded. It
// is nil if they are not; its methods take that.
func (x *session) record(t *target) (*recording, error) {
	if x.s.cfg.Record == nil || !x.tty {
		return nil, nil
	}
	size := x.size()
	began := time.Now()
	to, err := x.s.cfg.Record(boxed.Recording{Sandbox: t.id, Owner: x.c.who.Owner, StartedAt: began})
	if err != nil {
		return nil, fmt.Errorf("terminals are recorded here, and this one cannot be: %w", err)
	}
	r := &recording{to: to, began: began, left: maxRecording}
	header := map[string]any{
		"version": 2, "width": max(size.Cols, 1), "height": max(size.Rows, 1), "timestamp": began.Unix(),
		"title": "sandbox " + string(t.id), "env": map[string]string{"TERM": x.term},
	}
	if size == (boxed.Size{}) {
		header["width"], header["height"] = 80, 24
	}
	r.line(header)
	return r, nil
}

func (r *recording) line(v any) {
	text, err := json.Marshal(v)
	if err != nil || r.left < 0 {
		return
	}
	if r.left -= len(text) + 1; r.left >= 0 {
		r.to.Write(append(text, '\n'))
	}
}

func (r *recording) event(kind, data string) {
	r.line([]any{float64(time.Since(r.began).Milliseconds()) / 1000, kind, data})
}

// shown records what the terminal shows.
func (r *recording) shown(p []byte) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all := append(r.part, p...)
	whole := len(all)
	for i := 1; i <= utf8.UTFMax && i <= len(all); i++ {
		if tail := all[len(all)-i:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				whole = len(all) - i
			}
			break
		}
	}
	r.part = append([]byte(nil), all[whole:]...)
	if whole > 0 {
		r.event("o", strings.ToValidUTF8(string(all[:whole]), "\uFFFD"))
	}
}

// resized records another size of the window.
func (r *recording) resized(s boxed.Size) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.event("r", fmt.Sprintf("%dx%d", s.Cols, s.Rows))
}

func (r *recording) close() {
	if r != nil {
		r.to.Close()
	}
}
