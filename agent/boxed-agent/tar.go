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

// ReadTar writes a directory's content, or one file, as a tar. Links stay links;
// devices, FIFOs and sockets are left out.
func (s *system) ReadTar(root string, w io.Writer) error {
	root, err := clean(root)
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	if err := s.tarEntry(out, root, ""); err != nil {
		return err
	}
	return out.Close()
}

// tarEntry adds one entry and all below it. name is its name in the tar; the
// root directory itself has none.
func (s *system) tarEntry(out *tar.Writer, p, name string) error {
	info, err := s.Stat(p)
	if err != nil {
		if name != "" && errors.As(err, new(*agent.Error)) {
			return nil // it went while the tree was read
		}
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
		return s.tarDir(out, p, name)
	case "symlink":
		header.Typeflag, header.Linkname = tar.TypeSymlink, info.Target
		return out.WriteHeader(header)
	case "file":
		if name == "" {
			header.Name = path.Base(p)
		}
		return s.tarFile(out, header, p)
	}
	return nil
}

func (s *system) tarDir(out *tar.Writer, p, name string) error {
	var names []string
	err := s.with(p, func(p string) error {
		dir, err := openDir(p)
		if err != nil {
			return err
		}
		defer dir.Close()
		names, err = dir.Readdirnames(-1)
		return err
	})
	if err != nil {
		return err
	}
	for _, child := range names {
		if err := s.tarEntry(out, path.Join(p, child), path.Join(name, child)); err != nil {
			return err
		}
	}
	return nil
}

// tarFile adds a regular file with the size that it has now: what is cut
// meanwhile is filled with zeros, what grows is left out.
func (s *system) tarFile(out *tar.Writer, header *tar.Header, p string) error {
	f, info, err := s.Open(p)
	if err != nil {
		if errors.As(err, new(*agent.Error)) {
			return nil // gone, replaced, or not the user's to read
		}
		return err
	}
	defer f.Close()
	header.Typeflag, header.Size = tar.TypeReg, info.Size
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	n, err := io.CopyN(out, f, info.Size)
	if err == io.EOF {
		_, err = io.CopyN(out, zeros{}, info.Size-n)
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
