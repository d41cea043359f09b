package main

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// userThreads do file work with the user's rights. Only the file-system uid and
// gid of these threads are the user's: with the effective uid it could renice
// and re-schedule them, with the real uid signal them.
type userThreads struct{ jobs chan func() }

// userThreadCount is how many file-system calls run at once. Each is short: the
// files are opened here and copied elsewhere.
const userThreadCount = 4

func newUserThreads(uid int) (*userThreads, error) {
	u := &userThreads{jobs: make(chan func())}
	ready := make(chan error)
	for range userThreadCount {
		go u.run(uid, ready)
		if err := <-ready; err != nil {
			return nil, err
		}
	}
	return u, nil
}

func (u *userThreads) run(uid int, ready chan<- error) {
	runtime.LockOSThread() // for ever: the thread's credentials are the user's
	err := becomeUser(uid)
	ready <- err
	if err != nil {
		return // ends the thread
	}
	for job := range u.jobs {
		job()
	}
}

// becomeUser gives the calling thread the user's rights on files. A kernel that
// knows no such thing (gVisor) gets the effective credentials changed.
func becomeUser(uid int) error {
	if becomeFileUser(uid) {
		return nil
	}
	keep := ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(uid), keep); errno != 0 {
		return fmt.Errorf("become the user's group: %w", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		return fmt.Errorf("become the user: %w", errno)
	}
	return nil
}

// becomeFileUser changes the calling thread's file-system credentials, and
// reports whether the kernel has such.
func becomeFileUser(uid int) bool {
	unix.SetfsgidRetGid(uid)
	unix.SetfsuidRetUid(uid)
	gid, _ := unix.SetfsgidRetGid(-1)
	fsuid, _ := unix.SetfsuidRetUid(-1)
	return gid == uid && fsuid == uid
}

// do runs f with the user's rights and waits for it.
func (u *userThreads) do(f func() error) error {
	done := make(chan error, 1)
	u.jobs <- func() { done <- f() }
	return <-done
}
