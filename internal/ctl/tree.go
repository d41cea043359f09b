package ctl

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// packTree writes the content of a directory as a tar. Links are kept as links;
// a file that turns into a link on the way is not followed out of the tree.
// What is neither file, directory nor link is told to skipped.
func packTree(w io.Writer, dir string, skipped func(name, kind string)) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return plainPath(err)
	}
	defer root.Close()
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return plainPath(err)
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return plainPath(err)
		}
		return plainPath(packEntry(tw, root, name, info, skipped))
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packEntry(tw *tar.Writer, root *os.Root, name string, info fs.FileInfo, skipped func(name, kind string)) error {
	link := ""
	var file *os.File
	switch mode := info.Mode(); {
	case mode.IsDir():
	case mode&fs.ModeSymlink != 0:
		target, err := root.Readlink(name)
		if err != nil {
			return err
		}
		link = filepath.ToSlash(target)
	case mode.IsRegular():
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		// The open file is what is sent: the name may mean another one by now.
		if info, err = f.Stat(); err != nil || !info.Mode().IsRegular() {
			return errors.Join(err, fmt.Errorf("%s changed while it was copied", name))
		}
		file = f
	default:
		skipped(name, kindOf(mode))
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name = name
	if info.IsDir() {
		h.Name += "/"
	}
	h.Format = tar.FormatPAX
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", "" // of this machine, they mean nothing there
	if err := tw.WriteHeader(h); err != nil || file == nil {
		return err
	}
	if n, err := io.Copy(tw, io.LimitReader(file, h.Size)); err != nil || n < h.Size {
		return errors.Join(err, fmt.Errorf("%s changed while it was copied", name))
	}
	return nil
}

func kindOf(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeNamedPipe != 0:
		return "a pipe"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	}
	return "a device"
}

// maxEntries bounds the entries of a downloaded tar: each costs an inode here.
const maxEntries = 1_000_000

// unpacker writes a tar that a sandbox sent into a directory. Nothing that it
// does can reach outside: every path goes through root, which follows no link
// out of it.
type unpacker struct {
	root    *os.Root
	left    int64
	limit   int64
	skipped func(name, kind string)
	dirs    []*tar.Header // their modes and times come last: what is in them changes both
}

// unpackTree unpacks a tar below root. An entry that would land outside is
// refused and ends it; so does more than limit bytes. What came before stays.
func unpackTree(root *os.Root, r io.Reader, limit int64, skipped func(name, kind string)) error {
	u := &unpacker{root: root, left: limit, limit: limit, skipped: skipped}
	tr := tar.NewReader(r)
	for range maxEntries {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return u.finishDirs()
		}
		if err != nil {
			return fmt.Errorf("read the tar: %w", err)
		}
		if err := u.entry(h, tr); err != nil {
			return plainPath(err)
		}
	}
	return boxed.Errorf(boxed.CodeTooLarge, "it has more than %d entries", maxEntries)
}

// local checks an entry's name and writes it in this system's way.
func local(name string) (string, error) {
	clean := filepath.FromSlash(path.Clean(name))
	if path.IsAbs(name) || !filepath.IsLocal(clean) || strings.Contains(name, "\x00") {
		return "", boxed.Errorf(boxed.CodeForbidden, "refused: the entry %q would land outside", name)
	}
	return clean, nil
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	name, err := local(h.Name)
	if err != nil {
		return err
	}
	if name != "." {
		if err := u.root.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.root.MkdirAll(name, 0o777); err != nil {
			return err
		}
		if name != "." {
			u.dirs = append(u.dirs, &tar.Header{Name: name, Mode: h.Mode, ModTime: h.ModTime})
		}
		return nil
	case tar.TypeReg:
		return u.file(name, h, content)
	case tar.TypeSymlink:
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		target, err := local(h.Linkname)
		if err != nil {
			return err
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Link(target, name)
	case tar.TypeXGlobalHeader:
		return nil
	}
	u.skipped(h.Name, "a special file")
	return nil
}

// clear makes room for an entry. A directory that is there is not removed.
func (u *unpacker) clear(name string) error {
	info, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return &fs.PathError{Op: "create", Path: name, Err: errIsDirectory}
	}
	return u.root.Remove(name)
}

// file writes a new file: one that is there is replaced, never written through,
// since it may be a link.
func (u *unpacker) file(name string, h *tar.Header, content io.Reader) error {
	if u.left -= h.Size; u.left < 0 {
		return tooMuch(u.limit)
	}
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err == nil && filepath.Separator != '\\' {
		err = f.Chmod(fs.FileMode(h.Mode).Perm())
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return u.root.Chtimes(name, h.ModTime, h.ModTime)
}

func (u *unpacker) finishDirs() error {
	for _, h := range slices.Backward(u.dirs) {
		// A later entry may have put something else there; its own mode was set then.
		if info, err := u.root.Lstat(h.Name); err != nil || !info.IsDir() {
			continue
		}
		if filepath.Separator != '\\' {
			if err := u.root.Chmod(h.Name, fs.FileMode(h.Mode).Perm()); err != nil {
				return err
			}
		}
		if err := u.root.Chtimes(h.Name, h.ModTime, h.ModTime); err != nil {
			return err
		}
	}
	return nil
}
