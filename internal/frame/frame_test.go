package frame_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/boxed-mesh/boxed/internal/frame"
	"github.com/google/go-cmp/cmp"
)

var samples = []frame.Frame{
	{Type: frame.Stdin, Payload: []byte("a\x00b\xff")},
	{Type: frame.Stdin, Payload: []byte{}},
	{Type: frame.StdinClose},
	{Type: frame.Resize, Cols: 65535, Rows: 24},
	{Type: frame.Signal, Text: "RTMIN+3"},
	{Type: frame.Credit, Stream: frame.Stdin, Bytes: 1<<32 - 1},
	{Type: frame.Stdout, Payload: bytes.Repeat([]byte{7}, frame.MaxPayload)},
	{Type: frame.Stderr, Payload: []byte("e")},
	{Type: frame.Gap, Stream: frame.Stderr, Bytes: 1<<63 - 1},
	{Type: frame.Started, Text: "abcdefghij23"},
	{Type: frame.Exit, Payload: []byte(`{"reason":"exited"}`)},
	{Type: frame.Error, Payload: []byte(`{"code":"lost"}`)},
	{Type: frame.End},
}

func TestFrame(t *testing.T) {
	t.Run("reads back what it wrote", func(t *testing.T) {
		for _, want := range samples {
			got, err := frame.Parse(frame.Append(nil, want))
			if err != nil {
				t.Fatalf("%s: %v", want.Type, err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s", want.Type, diff)
			}
		}
	})
	t.Run("refuses what is malformed", func(t *testing.T) {
		for name, msg := range map[string][]byte{
			"empty":              {},
			"unknown type":       {0x7f, 1},
			"zero type":          {0},
			"eof with a payload": {byte(frame.StdinClose), 1},
			"short resize":       {byte(frame.Resize), 0, 80, 0},
			"signal with escape": append([]byte{byte(frame.Signal)}, "TERM\x1b[2J"...),
			"empty signal":       {byte(frame.Signal)},
			"long signal":        append([]byte{byte(frame.Signal)}, "AAAAAAAAAAAAAAAAA"...),
			"credit for exit":    {byte(frame.Credit), byte(frame.Exit), 0, 0, 0, 1},
			"gap over int64":     {byte(frame.Gap), byte(frame.Stdout), 0x80, 0, 0, 0, 0, 0, 0, 0},
			"too large":          make([]byte, frame.MaxMessage+1),
		} {
			if name == "too large" {
				msg[0] = byte(frame.Stdin)
			}
			if _, err := frame.Parse(msg); !errors.Is(err, frame.ErrMalformed) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("says who may send what", func(t *testing.T) {
		for _, f := range samples {
			if want := f.Type < 0x10; f.Type.FromClient() != want {
				t.Errorf("%s: from client %v", f.Type, !want)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range samples[:6] {
		f.Add(frame.Append(nil, s))
	}
	f.Add([]byte{0x12, 0x10, 0xff})
	f.Fuzz(func(t *testing.T, msg []byte) {
		got, err := frame.Parse(msg)
		if err != nil {
			if !errors.Is(err, frame.ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		if back := frame.Append(nil, got); !bytes.Equal(back, msg) {
			t.Fatalf("%x became %x", msg, back)
		}
	})
}
