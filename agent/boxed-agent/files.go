package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/boxed-mesh/boxed/agent"
	"golang.org/x/sys/unix"
)

// fileCodes maps what the kernel says to what the host is told.
var fileCodes = []struct {
	err           error
	code, message string
}{
	{syscall.ENOSPC, agent.ErrNoSpace, "does not fit: the file system is full"},
	{syscall.EDQUOT, agent.ErrNoSpace, "does not fit: the quota is used up"},
	{syscall.EROFS, agent.ErrDenied, "lies on a read-only file system; write below /workspace, /tmp, /output or the home directory"},
	{fs.ErrNotExist, agent.ErrNotFound, "does not exist"},
	{fs.ErrPermission, agent.ErrDenied, "may not be touched by the sandbox's user"},
	{fs.ErrExist, agent.ErrConflict, "exists"},
	{syscall.ENOTEMPTY, agent.ErrConflict, "is not empty"},
	{syscall.EISDIR, agent.ErrConflict, "is a directory"},
	{syscall.ENOTDIR, agent.ErrConflict, "is not a directory, or lies below something that is not one"},
	{syscall.ELOOP, agent.ErrConflict, "is a symbolic link, or leads through too many"},
	{syscall.EXDEV, agent.ErrConflict, "lies on another file system; copy it and remove the original"},
	{syscall.ENAMETOOLONG, agent.ErrInvalid, "is too long a name"},
	{syscall.EBUSY, agent.ErrConflict, "is in use, or a mount point"},
}

// clean checks a path from the host.
func clean(p string) (string, error) {
	if !path.IsAbs(p) || strings.ContainsRune(p, 0) {
		return "", &agent.Error{Code: agent.ErrInvalid, Message: "a path must be absolute and without zero bytes", Path: p}
	}
	return path.Clean(p), nil
}

// with runs f on a checked path with the user's rights.
func (s *system) with(p string, f func(p string) error) error {
	p, err := clean(p)
	if err != nil {
		return err
	}
	return fileError(s.user.do(func() error { return f(p) }), p)
}

// Stat describes a path; a link is described, not followed.
func (s *system) Stat(p string) (info agent.FileInfo, err error) {
	err = s.with(p, func(p string) error {
		st, err := os.Lstat(p)
		if err == nil {
			info = describe(p, st)
		}
		return err
	})
	return info, err
}

func describe(p string, st fs.FileInfo) agent.FileInfo {
	info := agent.FileInfo{
		Name: path.Base(p), Path: p, Type: typeOf(st.Mode()), Size: st.Size(),
		Mode: uint32(st.Mode().Perm()), ModTime: st.ModTime(),
	}
	if info.Type == "symlink" {
		info.Target, _ = os.Readlink(p)
	}
	return info
}

func typeOf(m fs.FileMode) string {
	switch {
	case m.IsRegular():
		return "file"
	case m.IsDir():
		return "dir"
	case m&fs.ModeSymlink != 0:
		return "symlink"
	case m&fs.ModeNamedPipe != 0:
		return "fifo"
	case m&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

// List lists a directory in the order of names.
func (s *system) List(p string) (infos []agent.FileInfo, err error) {
	infos = []agent.FileInfo{}
	err = s.with(p, func(p string) error {
		dir, err := openDir(p)
		if err != nil {
			return err
		}
		defer dir.Close()
		entries, err := dir.ReadDir(agent.MaxListing + 1)
		if err != nil && err != io.EOF {
			return err
		}
		if len(entries) > agent.MaxListing {
			return &agent.Error{Code: agent.ErrTooLarge, Path: p, Message: p + " has more entries than one listing holds; list it with a program, or fetch it as tar"}
		}
		for _, entry := range entries {
			if st, err := entry.Info(); err == nil { // else it is gone already
				infos = append(infos, describe(path.Join(p, entry.Name()), st))
			}
		}
		return nil
	})
	slices.SortFunc(infos, func(a, b agent.FileInfo) int { return strings.Compare(a.Name, b.Name) })
	return infos, err
}

// Open opens a regular file. It never blocks on a FIFO, follows no link at the
// end of the path, and refuses the kernel's own files: /proc/self would be this
// process.
func (s *system) Open(p string) (f io.ReadSeekCloser, info agent.FileInfo, err error) {
	err = s.with(p, func(p string) error {
		file, err := openRegular(p)
		if err != nil {
			return err
		}
		st, err := file.Stat()
		if err != nil {
			file.Close()
			return err
		}
		f, info = file, describe(p, st)
		return nil
	})
	return f, info, err
}

func openRegular(p string) (*os.File, error) {
	fd, err := unix.Open(p, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if errors.Is(err, unix.ELOOP) {
		target, _ := os.Readlink(p)
		return nil, &agent.Error{Code: agent.ErrConflict, Path: p, Message: p + " is a symbolic link to " + target + "; name the file itself"}
	}
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), p)
	st, err := file.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &agent.Error{Code: agent.ErrConflict, Path: p, Message: p + " is not a regular file but a " + typeOf(st.Mode())}
	}
	if err == nil && kernelFile(file) {
		err = errKernelFile(p)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// openDir opens a directory, and never waits on a FIFO. Of the kernel's own
// directories, those of /proc/self would show this process.
func openDir(p string) (*os.File, error) {
	dir, err := os.OpenFile(p, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err == nil && p != "/proc" && kernelFile(dir) {
		dir.Close()
		return nil, errKernelFile(p)
	}
	return dir, err
}

// kernelFile reports whether a file lies in /proc or /sys.
func kernelFile(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && (st.Type == unix.PROC_SUPER_MAGIC || st.Type == unix.SYSFS_MAGIC)
}

// kernelError refuses what lies in /proc or /sys.
type kernelError struct{ answer *agent.Error }

func (e kernelError) Error() string { return e.answer.Message }
func (e kernelError) Unwrap() error { return e.answer }

func errKernelFile(p string) error {
	return kernelError{&agent.Error{Code: agent.ErrDenied, Path: p, Message: p + " belongs to the kernel; look at it with a program"}}
}

// Mkdir makes a directory.
func (s *system) Mkdir(a agent.Path) error {
	defer s.ready.changed()
	return s.with(a.Path, func(p string) error {
		if a.Parents {
			return os.MkdirAll(p, 0o755)
		}
		return os.Mkdir(p, 0o755)
	})
}

// Remove removes a file, an empty directory, or with Recursive all below it.
func (s *system) Remove(a agent.Path) error {
	defer s.ready.changed()
	return s.with(a.Path, func(p string) error {
		if _, err := os.Lstat(p); err != nil {
			return err
		}
		if a.Recursive {
			return os.RemoveAll(p)
		}
		return os.Remove(p)
	})
}

// Move renames within one file system, and copies a regular file across two.
func (s *system) Move(a agent.Move) error {
	defer s.ready.changed()
	from, err := clean(a.From)
	if err != nil {
		return err
	}
	return s.with(a.To, func(to string) error {
		if _, err := os.Lstat(from); err != nil {
			return fileError(err, from)
		}
		err := os.Rename(from, to)
		if errors.Is(err, syscall.EXDEV) {
			return moveAcross(from, to)
		}
		return err
	})
}

func moveAcross(from, to string) error {
	src, err := openRegular(from)
	if err != nil {
		return err
	}
	defer src.Close()
	st, err := src.Stat()
	if err != nil {
		return err
	}
	dst, err := newFile(to, uint32(st.Mode().Perm()))
	if err != nil {
		return err
	}
	defer dst.abort()
	if _, err := io.Copy(dst.file, src); err != nil {
		return err
	}
	if err := dst.commit(); err != nil {
		return err
	}
	return os.Remove(from)
}

// Create begins a file beside its final place.
func (s *system) Create(a agent.Write) (agent.NewFile, error) {
	var f *pendingFile
	err := s.with(a.Path, func(p string) (err error) {
		if a.Parents {
			if err := os.MkdirAll(path.Dir(p), 0o755); err != nil {
				return err
			}
		}
		f, err = newFile(p, a.Mode)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &userFile{system: s, pending: f}, nil
}

// pendingFile is written under a temporary name and renamed at the end. Its
// methods run with the user's rights.
type pendingFile struct {
	file *os.File
	path string
	mode fs.FileMode
	done bool
}

func newFile(p string, mode uint32) (*pendingFile, error) {
	perm := fs.FileMode(mode) & fs.ModePerm
	st, err := os.Lstat(p)
	switch {
	case err == nil && !st.Mode().IsRegular():
		return nil, &agent.Error{Code: agent.ErrConflict, Path: p, Message: p + " exists and is a " + typeOf(st.Mode())}
	case err == nil && mode == 0:
		perm = st.Mode().Perm()
	case mode == 0:
		perm = 0o644
	}
	file, err := os.CreateTemp(path.Dir(p), ".boxed-*.part")
	if err != nil {
		return nil, err
	}
	return &pendingFile{file: file, path: p, mode: perm}, nil
}

func (f *pendingFile) commit() error {
	if err := f.file.Chmod(f.mode); err != nil {
		return err
	}
	if err := f.file.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.file.Name(), f.path); err != nil {
		return err
	}
	f.done = true
	return nil
}

func (f *pendingFile) abort() {
	if !f.done {
		f.done = true
		f.file.Close()
		os.Remove(f.file.Name())
	}
}

// userFile is an agent.NewFile: its bytes are written by any thread, its
// directory is touched with the user's rights.
type userFile struct {
	system  *system
	pending *pendingFile
}

func (f *userFile) Write(p []byte) (int, error) {
	n, err := f.pending.file.Write(p)
	return n, fileError(err, f.pending.path)
}

func (f *userFile) Commit() (info agent.FileInfo, err error) {
	defer f.system.ready.changed()
	err = f.system.with(f.pending.path, func(p string) error {
		if err := f.pending.commit(); err != nil {
			return err
		}
		st, err := os.Lstat(p)
		if err == nil {
			info = describe(p, st)
		}
		return err
	})
	return info, err
}

func (f *userFile) Abort() {
	f.system.user.do(func() error { f.pending.abort(); return nil })
}
