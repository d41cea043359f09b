package api

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// copySize is the buffer of a file's or tar's way through the server, in bytes.
const copySize = 64 << 10

func (c *call) file() (boxed.ID, string, error) {
	path := c.v.str("path")
	if strings.IndexByte(path, 0) >= 0 {
		return "", "", invalidField("path", "must not hold a NUL")
	}
	id, err := c.sandbox()
	return id, path, err
}

func (c *call) statFile() error {
	id, path, err := c.file()
	if err != nil {
		return err
	}
	info, err := c.s.cfg.Service.Stat(c.ctx, id, path)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, info)
}

func (c *call) listFiles() error {
	id, path, err := c.file()
	if err != nil {
		return err
	}
	list, err := c.s.cfg.Service.ListFiles(c.ctx, id, path)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"files": never(list)})
}

func (c *call) makeDirectory() error {
	in, err := readInto[struct {
		Path    string `json:"path"`
		Parents bool   `json:"parents"`
	}](c)
	if err != nil {
		return err
	}
	if strings.IndexByte(in.Path, 0) >= 0 {
		return invalidField("path", "must not hold a NUL")
	}
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.Mkdir(c.ctx, id, in.Path, in.Parents); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) moveFile() error {
	in, err := readInto[struct {
		From string `json:"from"`
		To   string `json:"to"`
	}](c)
	if err != nil {
		return err
	}
	if strings.IndexByte(in.From+in.To, 0) >= 0 {
		return invalidField("from", "must not hold a NUL")
	}
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.Move(c.ctx, id, in.From, in.To); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) removeFile() error {
	id, path, err := c.file()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.Remove(c.ctx, id, path, c.v.boolean("recursive")); err != nil {
		return err
	}
	return c.noContent()
}

// byteRange is a Range header with one range. last < 0: to the end; first < 0:
// the last `suffix` bytes.
type byteRange struct{ first, last, suffix int64 }

// parseRange reads one range. Several ranges, other units and If-Range (there
// are no validators) mean the whole file, as RFC 9110 allows.
func parseRange(h http.Header) (r byteRange, ok bool, err error) {
	spec := h.Get("Range")
	value, isBytes := strings.CutPrefix(spec, "bytes=")
	if spec == "" || !isBytes || strings.Contains(value, ",") || h.Get("If-Range") != "" {
		return r, false, nil
	}
	bad := boxed.Errorf(boxed.CodeRange, "the Range cannot be read; write it like bytes=0-99, bytes=100- or bytes=-100").WithField("Range")
	first, last, found := strings.Cut(strings.TrimSpace(value), "-")
	if !found {
		return r, false, bad
	}
	number := func(s string, empty int64) (int64, bool) {
		if s == "" {
			return empty, true
		}
		n, err := strconv.ParseUint(s, 10, 63)
		return int64(n), err == nil
	}
	var okFirst, okLast bool
	r.first, okFirst = number(first, -1)
	r.last, okLast = number(last, -1)
	switch {
	case !okFirst || !okLast, first == "" && last == "":
		return r, false, bad
	case first == "":
		r.suffix, r.last = r.last, -1
	case last != "" && r.last < r.first:
		return r, false, bad
	}
	return r, true, nil
}

func (c *call) readFile() error {
	id, path, err := c.file()
	if err != nil {
		return err
	}
	rng, ranged, err := parseRange(c.r.Header)
	if err != nil {
		return err
	}
	req := boxed.ReadRequest{Path: path, Length: -1}
	if ranged {
		if req.Offset, req.Length, err = c.span(id, path, rng); err != nil {
			return err
		}
	}
	f, err := c.s.cfg.Service.ReadFile(c.ctx, id, req)
	if err != nil {
		return c.rangeError(id, path, err)
	}
	defer f.Close()
	h := c.w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", "attachment")
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Length", strconv.FormatInt(f.Length, 10))
	h.Set("Last-Modified", f.Info.ModifiedAt.UTC().Format(http.TimeFormat))
	h.Set("X-Boxed-File", asciiJSON(f.Info))
	status := http.StatusOK
	if ranged {
		status = http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", f.Offset, f.Offset+f.Length-1, f.Info.Size))
	}
	c.w.WriteHeader(status)
	return c.copyOut(f, f.Length)
}

// span turns a range into an offset and a length. A suffix, and the check
// against an empty file, need the size first.
func (c *call) span(id boxed.ID, path string, r byteRange) (offset, length int64, err error) {
	info, err := c.s.cfg.Service.Stat(c.ctx, id, path)
	if err != nil {
		return 0, 0, err
	}
	offset = r.first
	if r.first < 0 {
		offset = max(0, info.Size-r.suffix)
	}
	if info.Type == "file" && (offset >= info.Size || (r.first < 0 && r.suffix == 0)) {
		return 0, 0, boxed.Errorf(boxed.CodeRange, "the range lies outside the file's %d bytes", info.Size).With("size", info.Size)
	}
	length = -1
	if r.last >= 0 {
		length = r.last - r.first + 1
	}
	return offset, length, nil
}

// rangeError adds the size to a range error of the port.
func (c *call) rangeError(id boxed.ID, path string, err error) error {
	var e *boxed.Error
	if errors.As(err, &e) && e.Code == boxed.CodeRange && e.Detail["size"] == nil {
		if info, serr := c.s.cfg.Service.Stat(c.ctx, id, path); serr == nil {
			return boxed.Errorf(boxed.CodeRange, "%s", e.Message).With("size", info.Size)
		}
	}
	return err
}

// copyOut streams a body. want < 0: until its end.
func (c *call) copyOut(r io.Reader, want int64) error {
	w := c.writer()
	defer w.rest()
	buf := make([]byte, copySize)
	var sent int64
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return c.outcome(&boxed.Error{Code: boxed.CodeCanceled, Message: "the client went away", Err: werr})
			}
			sent += int64(n)
		}
		switch {
		case err == io.EOF && want >= 0 && sent != want:
			return boxed.Errorf(boxed.CodeLost, "the file changed while it was read: %d of %d bytes", sent, want)
		case err == io.EOF:
			return nil
		case err != nil:
			return c.outcome(err)
		}
	}
}

func (c *call) writeFile() error {
	if err := c.bodyType(c.op.media); err != nil {
		return err
	}
	id, path, err := c.file()
	if err != nil {
		return err
	}
	req := boxed.WriteRequest{Path: path, Parents: c.v.boolean("parents")}
	if c.v.has("mode") {
		mode, _ := strconv.ParseUint(c.v.str("mode"), 8, 12) // checked before
		req.Mode = uint32(mode)
	}
	req.Content = &upload{r: c.body(c.s.cfg.BodyIdle), c: c}
	info, err := c.s.cfg.Service.WriteFile(c.ctx, id, req)
	if err = c.outcome(err); err != nil {
		return err
	}
	return c.reply(http.StatusOK, info)
}

// upload is a request's body whose errors say why it ended early. A body that
// broke off never ends in io.EOF.
type upload struct {
	r *idleReader
	c *call
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	if err != nil && err != io.EOF {
		err = u.c.readError(err)
	}
	return n, err
}

func (c *call) readTar() error {
	id, path, err := c.file()
	if err != nil {
		return err
	}
	tar, err := c.s.cfg.Service.ReadTar(c.ctx, id, path)
	if err != nil {
		return err
	}
	defer tar.Close()
	// What cannot be read at all should be a status, so the header waits for the
	// first block.
	first := make([]byte, 512)
	n, err := io.ReadFull(tar, first)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return c.outcome(err)
	}
	c.w.Header().Set("Content-Type", "application/x-tar")
	c.w.WriteHeader(http.StatusOK)
	return c.copyOut(io.MultiReader(strings.NewReader(string(first[:n])), tar), -1)
}

func (c *call) writeTar() error {
	if err := c.bodyType(c.op.media); err != nil {
		return err
	}
	id, path, err := c.file()
	if err != nil {
		return err
	}
	err = c.s.cfg.Service.WriteTar(c.ctx, id, path, &upload{r: c.body(c.s.cfg.BodyIdle), c: c})
	if err = c.outcome(err); err != nil {
		return err
	}
	return c.noContent()
}
