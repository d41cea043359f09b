package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/boxed-mesh/boxed/agent"
)

// ReadTar writes a directory's content, or one file, as a tar. Links stay links.
// Devices, FIFOs, sockets and what belongs to the kernel are left out, and so is
// what goes while the tree is read. What the user may not read is left out too,
// but that is an error, after all the rest.
func (s *system) ReadTar(root string, w io.Writer) error {
	root, err := clean(root)
	if err != nil {
		return err
	}
	t := &tarWriter{system: s, out: tar.NewWriter(w)}
	if err := t.entry(root, ""); err != nil {
		return err
	}
	if err := t.out.Close(); err != nil {
		return err
	}
	if t.omitted > 0 {
		return &agent.Error{Code: agent.ErrDenied, Path: t.first, Message: fmt.Sprintf("the tar is complete but for %d entries that the sandbox's user may not read, the first of them %s", t.omitted, t.first)}
	}
	return nil
}

// tarWriter packs one tree.
type tarWriter struct {
	system  *system
	out     *tar.Writer
	omitted int
	first   string
}

// omit decides what an entry that cannot be read means.
func (t *tarWriter) omit(p, name string, err error) error {
	var e *agent.Error
	switch {
	case name == "" || !errors.As(err, &e):
		return err
	case e.Code == agent.ErrNotFound, e.Code == agent.ErrConflict: // gone or replaced meanwhile
		return nil
	case errors.As(err, new(kernelError)):
		return nil
	}
	if t.omitted++; t.first == "" {
		t.first = p
	}
	return nil
}

// entry adds one entry and all below it. name is its name in the tar; the root
// directory itself has none.
func (t *tarWriter) entry(p, name string) error {
	info, err := t.system.Stat(p)
	if err != nil {
		return t.omit(p, name, err)
	}
	header := &tar.Header{Name: name, Mode: int64(info.Mode), ModTime: info.ModTime, Format: tar.FormatPAX}
	switch info.Type {
	case "dir":
		return t.dir(header, p, name)
	case "symlink":
		header.Typeflag, header.Linkname = tar.TypeSymlink, info.Target
		if name == "" {
			header.Name = path.Base(p)
		}
		return t.out.WriteHeader(header)
	case "file":
		return t.file(header, p, name)
	}
	return nil
}

func (t *tarWriter) dir(header *tar.Header, p, name string) error {
	var names []string
	err := t.system.with(p, func(p string) error {
		dir, err := openDir(p)
		if err != nil {
			return err
		}
		defer dir.Close()
		names, err = dir.Readdirnames(-1)
		return err
	})
	if err != nil {
		return t.omit(p, name, err)
	}
	if name != "" {
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		if err := t.out.WriteHeader(header); err != nil {
			return err
		}
	}
	for _, child := range names {
		if err := t.entry(path.Join(p, child), path.Join(name, child)); err != nil {
			return err
		}
	}
	return nil
}

// file adds a regular file with the size that it has now: what is cut meanwhile
// is filled with zeros, what grows is left out.
func (t *tarWriter) file(header *tar.Header, p, name string) error {
	f, info, err := t.system.Open(p)
	if err != nil {
		return t.omit(p, name, err)
	}
	defer f.Close()
	header.Typeflag, header.Size = tar.TypeReg, info.Size
	if name == "" {
		header.Name = path.Base(p)
	}
	if err := t.out.WriteHeader(header); err != nil {
		return err
	}
	n, err := io.CopyN(t.out, f, info.Size)
	if err == io.EOF {
		_, err = io.CopyN(t.out, zeros{}, info.Size-n)
	}
	return err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// WriteTar unpacks into a directory, which is made if it is missing. Every
// entry is opened below that directory (os.Root), so that neither a name nor a
// link in the tar leads out of it.
func (s *system) WriteTar(dir string, r io.Reader) error {
	s.ready.changed()
	defer s.ready.changed()
	var root *os.Root
	err := s.with(dir, func(p string) (err error) {
		if err := os.MkdirAll(p, 0o755); err != nil {
			return err
		}
		root, err = os.OpenRoot(p)
		return err
	})
	if err != nil {
		return err
	}
	defer root.Close()
	in := tar.NewReader(r)
	for {
		header, err := in.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			if errors.As(err, new(*agent.Error)) {
				return err
			}
			return &agent.Error{Code: agent.ErrInvalid, Message: "not a tar: " + err.Error()}
		}
		if err := s.unpack(root, header, in); err != nil {
			return fileError(err, path.Join(dir, header.Name))
		}
	}
}

func (s *system) unpack(root *os.Root, header *tar.Header, content io.Reader) error {
	name := path.Clean(strings.TrimSuffix(header.Name, "/"))
	if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") {
		return &agent.Error{Code: agent.ErrInvalid, Message: fmt.Sprintf("the tar holds %q, which lies outside of the directory", header.Name)}
	}
	mode := fs.FileMode(header.Mode) & fs.ModePerm
	do := s.user.do
	switch header.Typeflag {
	case tar.TypeDir:
		return do(func() error { return unpackDir(root, name, mode) })
	case tar.TypeReg:
		var f *os.File
		err := do(func() (err error) {
			if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
				return err
			}
			// Removed first: an existing link or FIFO is replaced, not followed.
			if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			f, err = root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode|0o200)
			return err
		})
		if err != nil {
			return err
		}
		if _, err := io.Copy(f, content); err != nil {
			f.Close()
			return err
		}
		return errors.Join(do(func() error { return f.Chmod(mode) }), f.Close())
	case tar.TypeSymlink:
		return do(func() error {
			root.MkdirAll(path.Dir(name), 0o755)
			root.Remove(name)
			return root.Symlink(header.Linkname, name)
		})
	case tar.TypeLink:
		return do(func() error {
			root.Remove(name)
			return root.Link(path.Clean(header.Linkname), name)
		})
	case tar.TypeXGlobalHeader:
		return nil
	}
	return &agent.Error{Code: agent.ErrInvalid, Message: fmt.Sprintf("the tar holds %q, which is neither file, directory nor link", header.Name)}
}

func unpackDir(root *os.Root, name string, mode fs.FileMode) error {
	if name == "." {
		return nil
	}
	if err := root.MkdirAll(name, 0o755); err != nil {
		return err
	}
	return root.Chmod(name, mode|0o700)
}
