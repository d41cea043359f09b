package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What System V's calls are told.
const (
	shmLock   = 11
	wholePipe = 64 << 10 // bytes of a pipe that the kernel has not made smaller
	most      = 1 << 19
)

// exhaust takes all of something that the kernel counts by user, says how much
// there was, and keeps it if told to. What others give back it takes too.
func exhaust(args []string) {
	what := args[0]
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	_ = unix.PthreadSigmask(unix.SIG_BLOCK, &all, nil) // of this thread, so that signals stay pending
	t := &taker{what: what}
	n := 0
	for ; n < most; n++ {
		if t.take(n) != nil {
			break
		}
	}
	fmt.Println(n)
	for len(args) > 1 {
		if t.take(n) != nil {
			time.Sleep(2 * time.Millisecond)
		} else {
			n++
		}
	}
	t.release(n)
}

// taker takes one thing after the other.
type taker struct {
	what      string
	names     []string // of files to be watched
	instances []int    // of inotify
	pair      [2]int
	children  []int
	segments  []uintptr
}

func (t *taker) take(n int) error {
	switch t.what {
	case "inotify":
		_, err := unix.InotifyInit1(0)
		return err
	case "watches":
		return t.watch(n)
	case "processes":
		pid, errno := forkIdle()
		if errno != 0 {
			return errno
		}
		t.children = append(t.children, int(pid))
		return nil
	case "signals":
		info := queued(40, -1)
		return raw(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(os.Getpid()), uintptr(unix.Gettid()), 40, uintptr(unsafe.Pointer(&info[0])))
	case "timers":
		var id int32
		return raw(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&id)))
	case "queues":
		return raw(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(queue(n))), unix.O_CREAT|unix.O_RDWR, 0o600, 0)
	case "flight":
		return t.fly()
	case "pipes":
		return wholePipeOnly()
	case "memlock":
		return t.lock()
	}
	panic(t.what)
}

func queue(n int) *byte {
	return &append(fmt.Appendf(nil, "q%d-%d", os.Getpid(), n), 0)[0]
}

// watch watches one more file: as many files as fit in an instance, and then
// another instance.
func (t *taker) watch(n int) error {
	const files = 2000
	if t.names == nil {
		dir, err := os.MkdirTemp("/workspace", "w")
		if err != nil {
			return err
		}
		for i := range files {
			name := filepath.Join(dir, fmt.Sprint(i))
			if err := os.WriteFile(name, nil, 0o600); err != nil {
				return err
			}
			t.names = append(t.names, name)
		}
	}
	if n/files == len(t.instances) {
		fd, err := unix.InotifyInit1(0)
		if err != nil {
			return err
		}
		t.instances = append(t.instances, fd)
	}
	_, err := unix.InotifyAddWatch(t.instances[n/files], t.names[n%files], unix.IN_ATTRIB)
	return err
}

// fly sends descriptors that nobody receives, so many that few messages do.
func (t *taker) fly() error {
	if t.pair[0] == 0 {
		var err error
		if t.pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
	}
	fds := make([]int, 100)
	err := unix.Sendmsg(t.pair[0], []byte("x"), unix.UnixRights(fds...), nil, 0)
	if !errors.Is(err, unix.EAGAIN) {
		return err
	}
	t.pair = [2]int{} // its queue is full: another one
	return t.fly()
}

// wholePipeOnly makes a pipe, and fails when it is smaller than others.
func wholePipeOnly() error {
	var p [2]int
	if err := unix.Pipe(p[:]); err != nil {
		return err
	}
	n, err := unix.FcntlInt(uintptr(p[0]), unix.F_GETPIPE_SZ, 0)
	if err == nil && n < wholePipe {
		unix.Close(p[0])
		unix.Close(p[1])
		return unix.ENOSPC
	}
	return err
}

// lock locks a page of shared memory: unlike other locked memory it counts by
// user and not by process.
func (t *taker) lock() error {
	id, _, errno := syscall.Syscall(unix.SYS_SHMGET, unix.IPC_PRIVATE, 4096, 0o600)
	if errno != 0 {
		return errno
	}
	t.segments = append(t.segments, id)
	if err := raw(unix.SYS_SHMCTL, id, shmLock, 0); err != nil {
		_ = raw(unix.SYS_SHMCTL, id, unix.IPC_RMID, 0)
		t.segments = t.segments[:len(t.segments)-1]
		return err
	}
	return nil
}

// release gives back what outlives its process.
func (t *taker) release(n int) {
	for i := range n {
		if t.what == "queues" {
			_ = raw(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(queue(i))))
		}
	}
	for _, id := range t.segments {
		_ = raw(unix.SYS_SHMCTL, id, unix.IPC_RMID, 0)
	}
	for _, pid := range t.children {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	if len(t.names) > 0 {
		os.RemoveAll(filepath.Dir(t.names[0]))
	}
}

// flood has so many processes call the agent's host without end, and says when
// one gets through.
func flood(args []string) {
	addr := make([]byte, 110)
	addr[0] = unix.AF_UNIX
	copy(addr[2:], sock)
	length := uintptr(2 + len(sock) + 1)
	n := int(number(args[0]))
	var begin [2]int
	if err := unix.Pipe(begin[:]); err != nil {
		fmt.Println(errText(err))
		return
	}
	for range n {
		if _, errno := forkCaller(uintptr(begin[0]), unsafe.Pointer(&addr[0]), length); errno != 0 {
			fmt.Println("fork:", text(errno))
			return
		}
	}
	_, _ = unix.Write(begin[1], make([]byte, n)) // it fits
	fmt.Println("flooding", n)
	for {
		var ws unix.WaitStatus
		if _, err := unix.Wait4(-1, &ws, 0, nil); err != nil {
			return
		}
		if ws.ExitStatus() == 7 {
			fmt.Println("can: call its host")
		}
	}
}
