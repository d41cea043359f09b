//go:build linux

package ctl

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/boxed-mesh/boxed"
)

// host is where a path of the sandbox lies on this machine.
func (b *fakeBox) host(p string) string {
	if p == "" {
		p = b.Dir
	}
	if !path.IsAbs(p) {
		p = path.Join(b.Dir, p)
	}
	return filepath.Join(b.root, path.Clean(p))
}

func (b *fakeBox) guest(host string) string {
	rel, _ := filepath.Rel(b.root, host)
	return "/" + rel
}

// fileError gives an error of the file system the code that the real agent does.
func fileError(p string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return boxed.Errorf(boxed.CodeNotFound, "%s does not exist", p).WithField("path")
	}
	return boxed.Errorf(boxed.CodeConflict, "%s: %v", p, err)
}

func (b *fakeBox) info(host string) (*boxed.FileInfo, error) {
	st, err := os.Lstat(host)
	if err != nil {
		return nil, fileError(b.guest(host), err)
	}
	f := &boxed.FileInfo{Name: st.Name(), Path: b.guest(host), Type: "file", Size: st.Size(), Mode: uint32(st.Mode().Perm()), ModifiedAt: st.ModTime().UTC()}
	switch {
	case st.IsDir():
		f.Type = "dir"
	case st.Mode()&fs.ModeSymlink != 0:
		f.Type = "symlink"
		f.Target, _ = os.Readlink(host)
	case st.Mode()&fs.ModeNamedPipe != 0:
		f.Type = "fifo"
	}
	return f, nil
}

func (n *fakeNode) Stat(ctx context.Context, id boxed.ID, p string) (*boxed.FileInfo, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	return b.info(b.host(p))
}

func (n *fakeNode) ListFiles(ctx context.Context, id boxed.ID, p string) ([]boxed.FileInfo, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(b.host(p))
	if err != nil {
		return nil, fileError(p, err)
	}
	out := []boxed.FileInfo{}
	for _, e := range entries {
		if f, err := b.info(filepath.Join(b.host(p), e.Name())); err == nil {
			out = append(out, *f)
		}
	}
	return out, nil
}

func (n *fakeNode) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	info, err := b.info(b.host(req.Path))
	if err != nil {
		return nil, err
	}
	if info.Type != "file" {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%s is no regular file", req.Path).WithField("path")
	}
	f, err := os.Open(b.host(req.Path))
	if err != nil {
		return nil, fileError(req.Path, err)
	}
	if _, err := f.Seek(req.Offset, io.SeekStart); err != nil {
		return nil, err
	}
	return &boxed.FileReader{ReadCloser: f, Info: *info, Offset: req.Offset, Length: info.Size - req.Offset}, nil
}

func (n *fakeNode) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	host := b.host(req.Path)
	if req.Parents {
		if err := os.MkdirAll(filepath.Dir(host), 0o755); err != nil {
			return nil, fileError(req.Path, err)
		}
	}
	mode := fs.FileMode(req.Mode)
	if mode == 0 {
		mode = 0o644
	}
	if err := writeByRename(host, req.Content, mode); err != nil {
		return nil, fileError(req.Path, err)
	}
	return b.info(host)
}

func (n *fakeNode) Mkdir(ctx context.Context, id boxed.ID, p string, parents bool) error {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return err
	}
	if parents {
		return fileError(p, os.MkdirAll(b.host(p), 0o755))
	}
	return fileError(p, os.Mkdir(b.host(p), 0o755))
}

func (n *fakeNode) Remove(ctx context.Context, id boxed.ID, p string, recursive bool) error {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(b.host(p)); err != nil || !recursive {
		return fileError(p, errors.Join(err, os.Remove(b.host(p))))
	}
	return fileError(p, os.RemoveAll(b.host(p)))
}

func (n *fakeNode) Move(ctx context.Context, id boxed.ID, from, to string) error {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return err
	}
	return fileError(from, os.Rename(b.host(from), b.host(to)))
}

func (n *fakeNode) ReadTar(ctx context.Context, id boxed.ID, p string) (io.ReadCloser, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	if info, err := b.info(b.host(p)); err != nil || info.Type != "dir" {
		return nil, errors.Join(err, boxed.Errorf(boxed.CodeInvalid, "%s is no directory", p))
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(packTree(w, b.host(p), func(string, string) {})) }()
	return r, nil
}

func (n *fakeNode) WriteTar(ctx context.Context, id boxed.ID, p string, r io.Reader) error {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(b.host(p), 0o755); err != nil {
		return fileError(p, err)
	}
	root, err := os.OpenRoot(b.host(p))
	if err != nil {
		return err
	}
	defer root.Close()
	return unpackTree(root, r, 1<<40, func(string, string) {})
}
