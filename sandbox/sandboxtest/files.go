package sandboxtest

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/boxed-mesh/boxed/agent"
	"github.com/boxed-mesh/boxed/sandbox"
)

// The files of a container lie in a temporary directory of this host, which is
// made when they are first touched.

func (c *container) files() (*os.Root, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.root == "" {
		if c.ctx.Err() != nil {
			return nil, errors.New("the sandbox ends")
		}
		dir, err := os.MkdirTemp("", "boxed-fake-")
		if err != nil {
			return nil, err
		}
		for _, t := range sandbox.GuestTmpfs(c.box.Limits) {
			if err := os.MkdirAll(dir+t.Path, 0o755); err != nil {
				return nil, err
			}
		}
		c.root = dir
	}
	return os.OpenRoot(c.root)
}

// on calls f with a path below the root. write says that it changes something:
// only below the places that are writable.
func (c *container) on(p string, write bool, f func(root *os.Root, name string) error) error {
	if !path.IsAbs(p) || strings.ContainsRune(p, 0) {
		return &agent.Error{Code: agent.ErrInvalid, Message: "a path must be absolute and without zero bytes", Path: p}
	}
	p = path.Clean(p)
	if write && c.room(p) == 0 {
		return &agent.Error{Code: agent.ErrDenied, Message: p + " lies on a read-only file system", Path: p}
	}
	root, err := c.files()
	if err != nil {
		return err
	}
	defer root.Close()
	name := strings.TrimPrefix(p, "/")
	if name == "" {
		name = "."
	}
	return fileError(f(root, name), p)
}

// room is the size of the file system in which a path may be written, or 0.
func (c *container) room(p string) int64 {
	for _, t := range sandbox.GuestTmpfs(c.box.Limits) {
		if strings.HasPrefix(p, t.Path+"/") {
			return t.Bytes
		}
	}
	return 0
}

func fileError(err error, p string) error {
	if err == nil || errors.As(err, new(*agent.Error)) {
		return err
	}
	code := agent.ErrInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = agent.ErrNotFound
	case errors.Is(err, fs.ErrPermission):
		code = agent.ErrDenied
	case errors.Is(err, syscall.ENOSPC):
		code = agent.ErrNoSpace
	case errors.Is(err, fs.ErrExist), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		code = agent.ErrConflict
	}
	return &agent.Error{Code: code, Message: p + ": " + err.Error(), Path: p}
}

func describe(root *os.Root, p string, st fs.FileInfo) agent.FileInfo {
	info := agent.FileInfo{Name: path.Base(p), Path: p, Type: "device", Size: st.Size(), Mode: uint32(st.Mode().Perm()), ModTime: st.ModTime()}
	switch m := st.Mode(); {
	case m.IsRegular():
		info.Type = "file"
	case m.IsDir():
		info.Type = "dir"
	case m&fs.ModeSymlink != 0:
		info.Type = "symlink"
		info.Target, _ = root.Readlink(strings.TrimPrefix(p, "/"))
	}
	return info
}

func (c *container) Stat(p string) (info agent.FileInfo, err error) {
	err = c.on(p, false, func(root *os.Root, name string) error {
		st, err := root.Lstat(name)
		if err == nil {
			info = describe(root, path.Clean(p), st)
		}
		return err
	})
	return info, err
}

func (c *container) List(p string) ([]agent.FileInfo, error) {
	infos := []agent.FileInfo{}
	err := c.on(p, false, func(root *os.Root, name string) error {
		dir, err := root.Open(name)
		if err != nil {
			return err
		}
		defer dir.Close()
		entries, err := dir.ReadDir(-1)
		for _, e := range entries {
			if st, err := e.Info(); err == nil {
				infos = append(infos, describe(root, path.Join(p, e.Name()), st))
			}
		}
		return err
	})
	slices.SortFunc(infos, func(a, b agent.FileInfo) int { return strings.Compare(a.Name, b.Name) })
	if len(infos) > agent.MaxListing {
		return nil, &agent.Error{Code: agent.ErrTooLarge, Message: p + " has too many entries"}
	}
	return infos, err
}

func (c *container) Open(p string) (f io.ReadSeekCloser, info agent.FileInfo, err error) {
	err = c.on(p, false, func(root *os.Root, name string) error {
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		if info = describe(root, path.Clean(p), st); info.Type != "file" {
			return &agent.Error{Code: agent.ErrConflict, Message: p + " is not a regular file but a " + info.Type, Path: p}
		}
		f, err = root.Open(name)
		return err
	})
	return f, info, err
}

func (c *container) Mkdir(a agent.Path) error {
	if a.Parents && path.IsAbs(a.Path) {
		if info, err := c.Stat(a.Path); err == nil && info.Type == "dir" {
			return nil
		}
	}
	return c.on(a.Path, true, func(root *os.Root, name string) error {
		if a.Parents {
			return root.MkdirAll(name, 0o755)
		}
		return root.Mkdir(name, 0o755)
	})
}

func (c *container) Remove(a agent.Path) error {
	return c.on(a.Path, true, func(root *os.Root, name string) error {
		if _, err := root.Lstat(name); err != nil {
			return err
		}
		if a.Recursive {
			return root.RemoveAll(name)
		}
		return root.Remove(name)
	})
}

func (c *container) Move(a agent.Move) error {
	return c.on(a.To, true, func(root *os.Root, to string) error {
		return c.on(a.From, true, func(_ *os.Root, from string) error { return root.Rename(from, to) })
	})
}

// newFile is a file that appears at Commit.
type newFile struct {
	*os.File
	c    *container
	a    agent.Write
	left int64
	temp string
}

func (c *container) Create(a agent.Write) (agent.NewFile, error) {
	f := &newFile{c: c, a: a, left: c.room(path.Clean(a.Path))}
	err := c.on(a.Path, true, func(root *os.Root, name string) (err error) {
		if a.Parents {
			if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
				return err
			}
		}
		mode := fs.FileMode(0o644)
		if st, err := root.Lstat(name); err == nil {
			if mode = st.Mode().Perm(); !st.Mode().IsRegular() {
				return &agent.Error{Code: agent.ErrConflict, Message: a.Path + " exists and is no file", Path: a.Path}
			}
		}
		if a.Mode != 0 {
			mode = fs.FileMode(a.Mode) & fs.ModePerm
		}
		f.temp = name + ".part"
		if f.File, err = root.OpenFile(f.temp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err == nil {
			err = f.File.Chmod(mode)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (f *newFile) Write(p []byte) (int, error) {
	if f.left -= int64(len(p)); f.left < 0 {
		return 0, &agent.Error{Code: agent.ErrNoSpace, Message: f.a.Path + " does not fit: the file system is full", Path: f.a.Path}
	}
	return f.File.Write(p)
}

func (f *newFile) Commit() (info agent.FileInfo, err error) {
	err = f.c.on(f.a.Path, true, func(root *os.Root, name string) error {
		if err := f.File.Close(); err != nil {
			return err
		}
		if err := root.Rename(f.temp, name); err != nil {
			return err
		}
		f.temp = ""
		return nil
	})
	if err != nil {
		return info, err
	}
	return f.c.Stat(f.a.Path)
}

func (f *newFile) Abort() {
	if f.temp == "" {
		return
	}
	f.File.Close()
	f.c.on(f.a.Path, true, func(root *os.Root, _ string) error { return root.Remove(f.temp) })
	f.temp = ""
}

func (c *container) ReadTar(p string, w io.Writer) error {
	out := tar.NewWriter(w)
	if err := c.tarEntry(out, path.Clean(p), ""); err != nil {
		return err
	}
	return out.Close()
}

func (c *container) tarEntry(out *tar.Writer, p, name string) error {
	info, err := c.Stat(p)
	if err != nil {
		return err
	}
	header := &tar.Header{Name: name, Mode: int64(info.Mode), ModTime: info.ModTime, Format: tar.FormatPAX}
	switch info.Type {
	case "dir":
		if name != "" {
			header.Typeflag, header.Name = tar.TypeDir, name+"/"
			if err := out.WriteHeader(header); err != nil {
				return err
			}
		}
		infos, err := c.List(p)
		for _, child := range infos {
			if err := c.tarEntry(out, child.Path, path.Join(name, child.Name)); err != nil {
				return err
			}
		}
		return err
	case "symlink":
		header.Typeflag, header.Linkname = tar.TypeSymlink, info.Target
		return out.WriteHeader(header)
	case "file":
		if name == "" {
			header.Name = info.Name
		}
		f, _, err := c.Open(p)
		if err != nil {
			return err
		}
		defer f.Close()
		header.Typeflag, header.Size = tar.TypeReg, info.Size
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		_, err = io.CopyN(out, f, info.Size)
		return err
	}
	return nil
}

func (c *container) WriteTar(p string, r io.Reader) error {
	if err := c.Mkdir(agent.Path{Path: p, Parents: true}); err != nil {
		return err
	}
	return c.on(p, false, func(root *os.Root, name string) error {
		dir, err := root.OpenRoot(name)
		if err != nil {
			return err
		}
		defer dir.Close()
		in := tar.NewReader(r)
		for {
			header, err := in.Next()
			if err == io.EOF {
				return nil
			}
			if err == nil {
				err = unpack(dir, header, in)
			}
			if err != nil && !errors.As(err, new(*agent.Error)) {
				err = &agent.Error{Code: agent.ErrInvalid, Message: err.Error(), Path: p}
			}
			if err != nil {
				return err
			}
		}
	})
}

func unpack(dir *os.Root, header *tar.Header, content io.Reader) error {
	name := path.Clean(strings.TrimSuffix(header.Name, "/"))
	if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") {
		return &agent.Error{Code: agent.ErrInvalid, Message: "the tar holds " + header.Name + ", which lies outside of the directory"}
	}
	if err := dir.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	switch header.Typeflag {
	case tar.TypeDir:
		return dir.MkdirAll(name, 0o755)
	case tar.TypeSymlink:
		return dir.Symlink(header.Linkname, name)
	case tar.TypeReg:
		if err := dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := dir.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_EXCL, fs.FileMode(header.Mode)&fs.ModePerm)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, content)
		return errors.Join(err, f.Close())
	}
	return &agent.Error{Code: agent.ErrInvalid, Message: "the tar holds " + header.Name + ", which is neither file, directory nor link"}
}
