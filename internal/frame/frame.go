// Package frame is the wire of an API stream: what goes over the WebSocket of
// an exec, and over anything else that carries one. A frame is one type byte
// and a payload; the transport keeps frames apart (one WebSocket binary message
// each), so there is no length field.
//
// It knows nothing of sandboxes: payloads that hold JSON are handed over as
// bytes. Start reading at [Type]; [Parse] is the decoder for hostile bytes.
//
// Two rules make a stream safe to use from a single loop. The reader of a
// socket never stalls, because a sender keeps at most a window of bytes on the
// way and waits for a [Credit] frame before it sends more: a signal, a ping or
// a close is never stuck behind data that nobody takes. And every stream ends
// with exactly one of [Exit], [End] and [Error]; a socket that closes without
// one of them has been cut, and the outcome is not known.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Type is the first byte of a frame. Unknown types are an error: the set only
// grows together with a request that asks for the new ones.
type Type byte

// The types. Client to server are below 0x10, except [Credit], which goes
// both ways.
const (
	Stdin      Type = 0x01 // client: bytes for the program's standard input
	StdinClose Type = 0x02 // client: no more input (EOF); server: the program reads no more; empty
	Resize     Type = 0x03 // client: columns and rows, two big-endian uint16
	Signal     Type = 0x04 // client: a signal's name without SIG, as in "TERM"
	Credit     Type = 0x05 // both: the type of a data frame, then a big-endian uint32 of bytes that may follow

	Stdout  Type = 0x10 // server: bytes
	Stderr  Type = 0x11 // server: bytes
	Gap     Type = 0x12 // server: the type of a data frame, then a big-endian uint64 of bytes that are lost here
	Started Type = 0x13 // server: the exec's ID; once, before any output
	Exit    Type = 0x14 // server, last: an exit status as JSON
	Error   Type = 0x15 // server, last: an error as JSON; no exit status is known
	End     Type = 0x16 // server, last: all that was asked for has been sent and the exec still runs; empty
)

// Bounds.
const (
	// MaxPayload is the most that a frame carries, in bytes.
	MaxPayload = 1 << 20
	// MaxMessage is the largest frame with its type byte.
	MaxMessage = MaxPayload + 1
	// DataSize is how much the writers of this project put in one data frame:
	// large enough that the cost per frame is small, small enough that a slow
	// reader makes progress within a write deadline.
	DataSize = 64 << 10
	// StdinWindow is how many bytes of [Stdin] a client may have on the way
	// before the first [Credit]. More is a protocol error.
	StdinWindow = 1 << 20

	maxSignal  = 16
	maxStarted = 64
)

var names = map[Type]string{
	Stdin: "stdin", StdinClose: "stdin-close", Resize: "resize", Signal: "signal", Credit: "credit",
	Stdout: "stdout", Stderr: "stderr", Gap: "gap", Started: "started", Exit: "exit", Error: "error", End: "end",
}

// String is the name used in documents and logs.
func (t Type) String() string {
	if n, ok := names[t]; ok {
		return n
	}
	return fmt.Sprintf("type 0x%02x", byte(t))
}

// FromClient reports whether a client may send t.
func (t Type) FromClient() bool { return t >= Stdin && t <= Credit }

// Last reports whether t ends a stream.
func (t Type) Last() bool { return t == Exit || t == Error || t == End }

func (t Type) data() bool { return t == Stdin || t == Stdout || t == Stderr }

// Frame is one decoded frame. Which fields are set depends on Type.
type Frame struct {
	Type    Type
	Payload []byte // Stdin, Stdout, Stderr, Exit, Error; aliases the message
	Text    string // Signal, Started
	Stream  Type   // Credit, Gap: Stdin, Stdout or Stderr
	Bytes   uint64 // Credit, Gap
	Cols    uint16 // Resize
	Rows    uint16 // Resize
}

// ErrMalformed is in the chain of every error of Parse.
var ErrMalformed = errors.New("malformed frame")

// Parse decodes one message. The frame's Payload aliases msg.
func Parse(msg []byte) (Frame, error) {
	if len(msg) == 0 {
		return Frame{}, malformed("it is empty")
	}
	f, p := Frame{Type: Type(msg[0])}, msg[1:]
	if len(p) > MaxPayload {
		return Frame{}, malformed("%s has %d bytes, more than %d", f.Type, len(p), MaxPayload)
	}
	ok := true
	switch f.Type {
	case Stdin, Stdout, Stderr, Exit, Error:
		f.Payload = p
	case StdinClose, End:
		ok = len(p) == 0
	case Resize:
		if ok = len(p) == 4; ok {
			f.Cols, f.Rows = binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:])
		}
	case Signal:
		f.Text, ok = string(p), plain(p, maxSignal)
	case Started:
		f.Text, ok = string(p), plain(p, maxStarted)
	case Credit:
		if ok = len(p) == 5 && Type(p[0]).data(); ok {
			f.Stream, f.Bytes = Type(p[0]), uint64(binary.BigEndian.Uint32(p[1:]))
		}
	case Gap:
		if ok = len(p) == 9 && Type(p[0]).data(); ok {
			f.Stream, f.Bytes = Type(p[0]), binary.BigEndian.Uint64(p[1:])
			ok = f.Bytes <= 1<<63-1 // it is added to offsets, which are int64
		}
	default:
		return Frame{}, malformed("%s is unknown", f.Type)
	}
	if !ok {
		return Frame{}, malformed("%s has a wrong payload of %d bytes", f.Type, len(p))
	}
	return f, nil
}

// Append appends the message that Parse reads back as f. Payloads over
// MaxPayload are the caller's mistake and make a message that Parse refuses.
func Append(b []byte, f Frame) []byte {
	b = append(b, byte(f.Type))
	switch f.Type {
	case Resize:
		b = binary.BigEndian.AppendUint16(b, f.Cols)
		b = binary.BigEndian.AppendUint16(b, f.Rows)
	case Signal, Started:
		b = append(b, f.Text...)
	case Credit:
		b = append(b, byte(f.Stream))
		b = binary.BigEndian.AppendUint32(b, uint32(f.Bytes))
	case Gap:
		b = append(b, byte(f.Stream))
		b = binary.BigEndian.AppendUint64(b, f.Bytes)
	case StdinClose, End:
	default:
		b = append(b, f.Payload...)
	}
	return b
}

// plain accepts what may go into a log or a terminal as it is.
func plain(p []byte, limit int) bool {
	if len(p) == 0 || len(p) > limit {
		return false
	}
	for _, c := range p {
		if (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '+' {
			return false
		}
	}
	return true
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrMalformed}, args...)...)
}
