package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// upload is a body that is not closed by the transport: the caller's reader
// stays the caller's.
type upload struct {
	r    io.Reader
	size int64 // -1: not known
}

func newUpload(r io.Reader) *upload {
	u := &upload{r: r, size: -1}
	if r == nil {
		u.r = strings.NewReader("")
	}
	if l, ok := u.r.(interface{ Len() int }); ok {
		u.size = int64(l.Len())
	}
	return u
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	if err != nil && err != io.EOF {
		err = &boxed.Error{Code: boxed.CodeCanceled, Message: "read what to send: " + err.Error(), Err: err}
	}
	return n, err
}

// prepare asks the server first, where the body is large or of unknown size:
// a refusal then comes before the bytes.
func (u *upload) prepare(req *http.Request) {
	req.ContentLength = u.size
	if u.size == 0 {
		req.Body = http.NoBody
	}
	if u.size < 0 || u.size > 1<<20 {
		req.Header.Set("Expect", "100-continue")
	}
}

// Stat describes one file; a link is described itself.
func (c *Client) Stat(ctx context.Context, id boxed.ID, path string) (*boxed.FileInfo, error) {
	return get[boxed.FileInfo](ctx, c, sandboxPath(id)+"/files/stat", url.Values{"path": {path}})
}

// ListFiles lists a directory.
func (c *Client) ListFiles(ctx context.Context, id boxed.ID, path string) ([]boxed.FileInfo, error) {
	out, err := get[struct {
		Files []boxed.FileInfo `json:"files"`
	}](ctx, c, sandboxPath(id)+"/files/list", url.Values{"path": {path}})
	if err != nil {
		return nil, err
	}
	return out.Files, nil
}

// ReadFile opens a file, or a part of it. The caller closes the reader. A read
// that ends before Length bytes is an error, never a short file.
func (c *Client) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	if req.Offset < 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "the offset must not be negative").WithField("offset")
	}
	if req.Length == 0 {
		info, err := c.Stat(ctx, id, req.Path)
		if err != nil {
			return nil, err
		}
		return &boxed.FileReader{ReadCloser: http.NoBody, Info: *info, Offset: req.Offset}, nil
	}
	h := http.Header{}
	if req.Offset > 0 || req.Length > 0 {
		rng := fmt.Sprintf("bytes=%d-", req.Offset)
		if req.Length > 0 {
			rng += strconv.FormatInt(req.Offset+req.Length-1, 10)
		}
		h.Set("Range", rng)
	}
	resp, err := c.request(ctx, http.MethodGet, sandboxPath(id)+"/files", url.Values{"path": {req.Path}}, h, nil)
	if err != nil {
		return nil, err
	}
	f := &boxed.FileReader{ReadCloser: &download{ctx, resp.Body}, Length: resp.ContentLength}
	if resp.StatusCode == http.StatusPartialContent {
		f.Offset = req.Offset
	}
	if err := json.Unmarshal([]byte(resp.Header.Get("X-Boxed-File")), &f.Info); err != nil {
		resp.Body.Close()
		return nil, &boxed.Error{Code: boxed.CodeInternal, Message: "the node's answer does not describe the file", Err: err}
	}
	return f, nil
}

// download is a body whose breaking off is an error with a code.
type download struct {
	ctx context.Context // only to tell apart who ended it
	io.ReadCloser
}

func (d *download) Read(p []byte) (int, error) {
	n, err := d.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		if d.ctx.Err() != nil {
			return n, contextError(d.ctx)
		}
		err = &boxed.Error{Code: boxed.CodeLost, Message: "the download broke off", Err: err}
	}
	return n, err
}

// WriteFile writes a file whole, from a stream of any length. When the node
// refuses early, a Read of req.Content may still run for a moment after the
// return.
func (c *Client) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	q := url.Values{"path": {req.Path}}
	if req.Mode != 0 {
		q.Set("mode", fmt.Sprintf("%04o", req.Mode&0o777))
	}
	if req.Parents {
		q.Set("parents", "true")
	}
	h := http.Header{"Content-Type": {"application/octet-stream"}}
	resp, err := c.request(ctx, http.MethodPut, sandboxPath(id)+"/files", q, h, newUpload(req.Content))
	if err != nil {
		return nil, err
	}
	defer drain(resp.Body)
	info := new(boxed.FileInfo)
	if err := json.NewDecoder(resp.Body).Decode(info); err != nil {
		return nil, &boxed.Error{Code: boxed.CodeLost, Message: "the answer broke off", Err: err}
	}
	return info, nil
}

// Mkdir makes a directory.
func (c *Client) Mkdir(ctx context.Context, id boxed.ID, path string, parents bool) error {
	in := map[string]any{"path": path, "parents": parents}
	return c.call(ctx, http.MethodPost, sandboxPath(id)+"/files/mkdir", nil, in, nil)
}

// Remove removes a file or a directory.
func (c *Client) Remove(ctx context.Context, id boxed.ID, path string, recursive bool) error {
	q := url.Values{"path": {path}}
	if recursive {
		q.Set("recursive", "true")
	}
	return c.call(ctx, http.MethodDelete, sandboxPath(id)+"/files", q, nil, nil)
}

// Move renames a file or a directory.
func (c *Client) Move(ctx context.Context, id boxed.ID, from, to string) error {
	in := map[string]any{"from": from, "to": to}
	return c.call(ctx, http.MethodPost, sandboxPath(id)+"/files/move", nil, in, nil)
}

// ReadTar streams a directory as tar. The caller closes it.
func (c *Client) ReadTar(ctx context.Context, id boxed.ID, path string) (io.ReadCloser, error) {
	resp, err := c.request(ctx, http.MethodGet, sandboxPath(id)+"/tar", url.Values{"path": {path}}, nil, nil)
	if err != nil {
		return nil, err
	}
	return &download{ctx, resp.Body}, nil
}

// WriteTar unpacks a tar into a directory.
func (c *Client) WriteTar(ctx context.Context, id boxed.ID, path string, tar io.Reader) error {
	h := http.Header{"Content-Type": {"application/x-tar"}}
	resp, err := c.request(ctx, http.MethodPut, sandboxPath(id)+"/tar", url.Values{"path": {path}}, h, newUpload(tar))
	if err != nil {
		return err
	}
	drain(resp.Body)
	return nil
}
