package docker

import (
	"context"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxed-mesh/boxed"
)

// Gone waits until a container's first process has ended, which is when the
// kernel has ended all others of its PID namespace. It asks the engine nothing.
// Errors: unavailable (that cannot be seen from here; Remove tells), ctx's.
func (d *Driver) Gone(ctx context.Context, id string) error {
	d.mu.Lock()
	r := d.containers[id]
	d.mu.Unlock()
	if r == nil || r.first == nil {
		return boxed.Errorf(boxed.CodeUnavailable, "the container's first process is not known here")
	}
	raw, err := r.first.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { r.first.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	err = raw.Read(func(fd uintptr) bool { // a pidfd is readable once its process has ended
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || (err != nil && err != unix.EINTR)
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// openProcess opens a process so that its end can be waited for, or returns nil
// on kernels before 5.3.
func openProcess(pid int) *os.File {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err == unix.EINVAL { // before 5.10 without the flag
		if fd, err = unix.PidfdOpen(pid, 0); err == nil {
			err = unix.SetNonblock(fd, true)
		}
	}
	if err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}
