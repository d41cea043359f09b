package agent

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
)

// serveRead sends a part of a file as raw chunks.
func (g *Guest) serveRead(conn net.Conn, a Read) {
	f, info, err := g.handler.Open(a.Path)
	if err != nil {
		respond(conn, nil, err)
		return
	}
	defer f.Close()
	length := info.Size - a.Offset
	if a.Offset < 0 || a.Offset > info.Size {
		respond(conn, nil, &Error{Code: ErrRange, Message: "the range starts beyond the end of the file", Path: a.Path})
		return
	}
	if a.Length >= 0 {
		length = min(length, a.Length)
	}
	if _, err := f.Seek(a.Offset, io.SeekStart); err != nil {
		respond(conn, nil, err)
		return
	}
	if respond(conn, ReadInfo{Info: info, Offset: a.Offset, Length: length}, nil) != nil {
		return
	}
	w := &chunkWriter{w: conn}
	n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.LimitReader(f, length)}, make([]byte, 64<<10))
	if err == nil && n < length {
		err = &Error{Code: ErrConflict, Message: "the file shrank while it was read", Path: a.Path}
	}
	w.finish(err)
}

func (g *Guest) serveReadTar(conn net.Conn, a Path) {
	if _, err := g.handler.Stat(a.Path); err != nil {
		respond(conn, nil, err)
		return
	}
	if respond(conn, nil, nil) != nil {
		return
	}
	w := &chunkWriter{w: conn}
	buffered := bufio.NewWriterSize(w, 64<<10)
	err := g.handler.ReadTar(a.Path, buffered)
	if ferr := buffered.Flush(); err == nil { // also before an error: it says what is missing of the rest
		err = ferr
	}
	w.finish(err)
}

// serveWrite takes a file. The first response says that content may come, the
// second how it ended.
func (g *Guest) serveWrite(conn net.Conn, a Write) {
	f, err := g.handler.Create(a)
	if err != nil {
		respond(conn, nil, err)
		return
	}
	defer f.Abort()
	if respond(conn, nil, nil) != nil {
		return
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{newChunkReader(conn)}, make([]byte, 64<<10)); err != nil {
		respond(conn, nil, err)
		return
	}
	info, err := f.Commit()
	respond(conn, info, err)
}

func (g *Guest) serveWriteTar(conn net.Conn, a Path) {
	if respond(conn, nil, nil) != nil {
		return
	}
	r := newChunkReader(conn)
	err := g.handler.WriteTar(a.Path, r)
	if err == nil {
		_, err = io.Copy(io.Discard, r) // padding after the tar's end
	}
	respond(conn, nil, err)
}

// serveDial joins the stream with a loopback connection. Half-close passes.
func (g *Guest) serveDial(conn net.Conn, a Dial) {
	target, err := g.handler.Dial(a.Port)
	if err != nil {
		respond(conn, nil, err)
		return
	}
	defer target.Close()
	if respond(conn, nil, nil) != nil {
		return
	}
	join(conn, target)
}

// join copies both ways, each direction as chunk frames on the host's side, so
// that an end of file in one direction leaves the other open. The host's going
// ends both.
func join(framed, raw net.Conn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		w := &chunkWriter{w: framed}
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{raw}, make([]byte, ChunkSize))
		w.finish(err)
	})
	wg.Go(func() {
		r := newChunkReader(framed)
		_, err := io.CopyBuffer(struct{ io.Writer }{raw}, struct{ io.Reader }{r}, make([]byte, ChunkSize))
		if cw, ok := raw.(interface{ CloseWrite() error }); ok && err == nil {
			cw.CloseWrite()
			// Nothing more comes, but the host's leaving does.
			io.Copy(io.Discard, r.r)
		}
		raw.Close()
	})
	wg.Wait()
}

// chunkWriter sends what is written as chunk frames.
type chunkWriter struct {
	w   io.Writer
	buf []byte
}

func (c *chunkWriter) Write(p []byte) (int, error) {
	sent := 0
	for len(p) > 0 {
		n := min(len(p), 256<<10)
		if cap(c.buf) < 5+n {
			c.buf = make([]byte, 5+n)
		}
		frame := c.buf[:5+n]
		putFrameHead(frame, frameChunk, n)
		copy(frame[5:], p[:n])
		if _, err := c.w.Write(frame); err != nil {
			return sent, err
		}
		sent += n
		p = p[n:]
	}
	return sent, nil
}

// finish tells the other side that this was all, or that it was not.
func (c *chunkWriter) finish(err error) error {
	if err == nil {
		return writeFrame(c.w, frameEOF, nil)
	}
	body, merr := json.Marshal(wireError(err))
	return errors.Join(merr, writeFrame(c.w, frameError, body))
}

// chunkReader reads what a chunkWriter sent. A stream that breaks before the
// end frame is an error, never a short file.
type chunkReader struct {
	r    *bufio.Reader
	buf  []byte
	left []byte
	err  error
}

func newChunkReader(r io.Reader) *chunkReader {
	return &chunkReader{r: bufio.NewReaderSize(r, 4<<10)}
}

func (c *chunkReader) Read(p []byte) (int, error) {
	for len(c.left) == 0 && c.err == nil {
		typ, payload, grown, err := readFrame(c.r, c.buf)
		c.buf = grown
		switch {
		case err != nil:
			c.err = noEOF(err)
		case typ == frameChunk && len(payload) > 0:
			c.left = payload
		case typ == frameEOF:
			c.err = io.EOF
		case typ == frameError:
			e := &Error{Code: ErrInternal, Message: "the other side failed"}
			json.Unmarshal(payload, e)
			c.err = e
		default:
			c.err = errors.New("unexpected frame in a stream of chunks")
		}
	}
	if len(c.left) == 0 {
		return 0, c.err
	}
	n := copy(p, c.left)
	c.left = c.left[n:]
	return n, nil
}
