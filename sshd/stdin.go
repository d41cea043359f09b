package sshd

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// endPatience is how long the end of an input may be there before the end of the link
// that caused it.
const endPatience = 20 * time.Millisecond

// channelInput is a session's input for the one program that reads it. The end of a
// link is not the end of the input: a shell would leave, and a program take half a
// file for a whole one.
type channelInput struct{ x *session }

func (c channelInput) Read(p []byte) (int, error) {
	n, err := c.x.ch.Read(p)
	if errors.Is(err, io.EOF) {
		select {
		case <-c.x.ctx.Done():
			err = context.Cause(c.x.ctx)
		case <-time.After(endPatience):
		}
	}
	return n, err
}

// errLeft is what the input of one who has left ends with.
var errLeft = errors.New("the input is read by another")

// input is what a client sends, for one reader after the other: who takes a broken
// stream up has what the one before did not get.
type input struct {
	chunks chan []byte // closed at the end, when err is set
	err    error

	reading sync.Mutex // by whoever reads; guards rest
	rest    []byte
}

// stdin is the session's input for one reader, until it leaves.
func (x *session) stdin() *inputReader {
	x.pumped.Do(func() {
		x.input = &input{chunks: make(chan []byte)}
		x.running.Go(func() { x.pump(x.input) })
	})
	left := make(chan struct{})
	return &inputReader{input: x.input, ended: x.ctx.Done(), left: left, leave: sync.OnceFunc(func() { close(left) })}
}

// pump reads the channel to its end.
func (x *session) pump(in *input) {
	defer close(in.chunks)
	for {
		buf := make([]byte, 32<<10)
		n, err := channelInput{x}.Read(buf)
		if n > 0 {
			x.touch()
			select {
			case in.chunks <- buf[:n]:
			case <-x.ctx.Done():
				in.err = context.Cause(x.ctx)
				return
			}
		}
		if err == nil {
			continue
		}
		in.err = err
		return
	}
}

type inputReader struct {
	*input
	ended <-chan struct{} // the session
	left  <-chan struct{}
	leave func()
}

func (r *inputReader) Read(p []byte) (int, error) {
	r.reading.Lock()
	defer r.reading.Unlock()
	if len(r.rest) == 0 {
		select {
		case chunk, ok := <-r.chunks:
			if !ok {
				return 0, r.err
			}
			r.rest = chunk
		case <-r.left:
		case <-r.ended:
			return 0, errLeft
		}
	}
	select {
	case <-r.left:
		return 0, errLeft
	default:
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
