package agent

import (
	"bufio"
	"io"
)

// What tests of the wire need.
const (
	MaxFrame     = maxFrame
	MaxHello     = maxHello
	MaxMessage   = maxMessage
	MaxResponse  = maxResponse
	RingFloor    = ringFloor
	FrameStdin   = frameStdin
	FrameStdout  = frameStdout
	FrameGap     = frameGap
	FrameExit    = frameExit
	FrameChunk   = frameChunk
	FrameEOF     = frameEOF
	FrameRequest = frameRequest
	StreamFloor  = streamFloor
)

var (
	WriteMessage = writeMessage
	ReadMessage  = readMessage
	WriteFrame   = writeFrame
)

func ReadFrame(r *bufio.Reader, buf []byte) (typ byte, payload, grown []byte, err error) {
	return readFrame(r, buf)
}

func NewChunkReader(r io.Reader) io.Reader { return newChunkReader(r) }

func NewChunkWriter(w io.Writer) (io.Writer, func(error) error) {
	c := &chunkWriter{w: w}
	return c, c.finish
}

// Ring is a ring over a budget of its own.
type Ring struct{ ring }

func NewRing(budgeted int) *Ring {
	b := newBudget()
	b.left.Store(int64(budgeted))
	return &Ring{ring{budget: b}}
}

func (r *Ring) Write(p []byte)               { r.write(p) }
func (r *Ring) Read(p []byte, off int64) int { return r.read(p, off) }
func (r *Ring) Start() int64                 { return r.start() }
func (r *Ring) End() int64                   { return r.end }
func (r *Ring) Room(keep int64, n int) int   { return r.room(keep, n) }
func (r *Ring) Held() int                    { return len(r.buf) }
func (r *Ring) Left() int64                  { return r.budget.left.Load() }
func (r *Ring) Free()                        { r.free() }

// HasDirect reports whether a direct connection waits for an exec.
func (h *Host) HasDirect() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.direct != nil
}

// Streams is how many streams the host has open.
func (h *Host) Streams() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.session.NumStreams()
}
