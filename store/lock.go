package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/boxed-mesh/boxed"
)

// lockName is the file whose lock says that a directory is in use.
const lockName = "LOCK"

// Lock is a directory held by this process. The kernel drops it with the
// process, however that ends.
type Lock struct{ f *os.File }

// LockDir takes dir for this process, or fails with [boxed.CodeConflict] naming
// the process that holds it. The directory must exist.
func LockDir(dir string) (*Lock, error) {
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, boxed.Errorf(boxed.CodeConflict, "%s is in use by %s; stop that process, or give this one another data directory", dir, holder(path))
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	// The text is for people; only the lock itself counts.
	if err := errors.Join(f.Truncate(0), writeAt(f, strconv.Itoa(os.Getpid())+"\n")); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return &Lock{f}, nil
}

// Release gives the directory back. It can be called on nil.
func (l *Lock) Release() error {
	if l == nil || l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}

// holder describes the process that wrote the lock file.
func holder(path string) string {
	text, err := os.ReadFile(path)
	pid, convErr := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || convErr != nil {
		return "another process"
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(cmdline) == 0 {
		return fmt.Sprintf("process %d", pid)
	}
	// Its arguments may hold a secret, and this goes to a log.
	program, _, _ := strings.Cut(string(cmdline), "\x00")
	return fmt.Sprintf("process %d (%s)", pid, strings.ToValidUTF8(program, "?"))
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}
