package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// call makes one system call by name and says "ok" or the errno. A name may
// carry arguments: "socket:16,3,9".
func call(spec string) string {
	name, rest, _ := strings.Cut(spec, ":")
	var a [6]uintptr
	for i, text := range strings.FieldsFunc(rest, func(r rune) bool { return r == ',' }) {
		n, err := strconv.ParseUint(text, 0, 64)
		if err != nil {
			return err.Error()
		}
		a[i] = uintptr(n)
	}
	if c, ok := foreignCalls[name]; ok {
		return inChild(c)
	}
	if name == "bufsize" {
		return bufsize(int(a[0]))
	}
	if name == "tiocsti" {
		return tty(a[0])
	}
	nr, ok := numbers[name]
	if !ok {
		return "unknown call " + name
	}
	if name == "clone" && int32(a[0]) >= 0 { // a child of our own making must end at once
		return clone(a[0])
	}
	_, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	return text(errno)
}

// inChild makes a call in a process of one thread: the filter ends the thread
// only, and a Go program that loses one hangs.
func inChild(c foreign) string {
	pid, errno := forkCall(c)
	if errno != 0 {
		return "clone: " + text(errno)
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &ws, 0, nil); err != nil {
		return "wait: " + err.Error()
	}
	if ws.Signaled() {
		return unix.SignalName(ws.Signal())
	}
	return text(syscall.Errno(ws.ExitStatus()))
}

// foreign is a call, and the way into the kernel.
type foreign struct {
	entry   int
	nr      uintptr
	a, b, c uintptr
}

// Ways into the kernel.
const (
	native = iota
	int80Entry
	x32Entry
)

// forkCall makes a child, which makes the call and ends with its errno. What
// runs in the child may not grow the stack: the check for that would find that
// the parent's scheduler wants something, and there is none in the child.
//
//go:nosplit
func forkCall(c foreign) (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	switch c.entry {
	case int80Entry:
		if r := int80(uint32(c.nr), uint32(c.a), uint32(c.b), uint32(c.c)); r < 0 {
			errno = syscall.Errno(-r)
		}
	case x32Entry:
		_, _, errno = syscall.RawSyscall(0x40000000|c.nr, c.a, c.b, c.c)
	default:
		_, _, errno = syscall.RawSyscall6(c.nr, c.a, c.b, c.c, 0, 0, 0)
	}
	for {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
	}
}

// forkIdle makes a child that does nothing.
//
//go:nosplit
func forkIdle() (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	for {
		syscall.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}

// forkCaller makes a child that, from when it has read a byte, connects to a Unix
// socket every few milliseconds without end, and ends with 7 when it got through.
// Two hundred that never rest would show what a processor is worth among them,
// and nothing of the socket.
//
//go:nosplit
func forkCaller(begin uintptr, addr unsafe.Pointer, length uintptr) (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	var b [8]byte
	syscall.RawSyscall(unix.SYS_READ, begin, uintptr(unsafe.Pointer(&b)), 1)
	pause := unix.Timespec{Nsec: 5_000_000}
	for {
		fd, _, errno := syscall.RawSyscall(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if errno != 0 {
			continue
		}
		_, _, errno = syscall.RawSyscall(unix.SYS_CONNECT, fd, uintptr(addr), length)
		if errno == 0 {
			syscall.RawSyscall(unix.SYS_EXIT_GROUP, 7, 0, 0)
		}
		syscall.RawSyscall(unix.SYS_CLOSE, fd, 0, 0)
		syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&pause)), 0, 0)
	}
}

func text(errno syscall.Errno) string {
	if errno == 0 {
		return "ok"
	}
	return unix.ErrnoName(errno)
}

func clone(flags uintptr) string {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	if errno == 0 {
		var ws unix.WaitStatus
		_, _ = unix.Wait4(int(pid), &ws, 0, nil)
	}
	return text(errno)
}

// bufsize sets an option of a TCP socket to 4 MiB and says what it then is.
func bufsize(option int) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return errText(err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, 4<<20); err != nil {
		return errText(err)
	}
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
	return fmt.Sprint("ok ", n, " ", errText(err))
}

// tty makes one ioctl on a terminal of its own.
func tty(request uintptr) string {
	f, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err.Error()
	}
	var zero int32
	c := [8]byte{'x'}
	if _, _, errno := syscall.Syscall(unix.SYS_IOCTL, f.Fd(), unix.TIOCSPTLCK, uintptr(unsafe.Pointer(&zero))); errno != 0 {
		return "unlock: " + text(errno)
	}
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPTN)
	if err != nil {
		return "number: " + err.Error()
	}
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err.Error()
	}
	if _, _, errno := syscall.Syscall(unix.SYS_IOCTL, s.Fd(), unix.TIOCSCTTY, 0); errno != 0 {
		return "control: " + text(errno)
	}
	_, _, errno := syscall.Syscall(unix.SYS_IOCTL, s.Fd(), request, uintptr(unsafe.Pointer(&c)))
	return text(errno)
}

var numbers = map[string]uintptr{
	"socket": unix.SYS_SOCKET, "socketpair": unix.SYS_SOCKETPAIR, "clone": unix.SYS_CLONE, "clone3": unix.SYS_CLONE3,
	"unshare": unix.SYS_UNSHARE, "setns": unix.SYS_SETNS, "mount": unix.SYS_MOUNT, "umount2": unix.SYS_UMOUNT2,
	"pivot_root": unix.SYS_PIVOT_ROOT, "chroot": unix.SYS_CHROOT, "open_tree": unix.SYS_OPEN_TREE,
	"move_mount": unix.SYS_MOVE_MOUNT, "fsopen": unix.SYS_FSOPEN, "fsconfig": unix.SYS_FSCONFIG, "fsmount": unix.SYS_FSMOUNT,
	"fspick": unix.SYS_FSPICK, "mount_setattr": unix.SYS_MOUNT_SETATTR, "statmount": unix.SYS_STATMOUNT,
	"listmount": unix.SYS_LISTMOUNT, "io_uring_setup": unix.SYS_IO_URING_SETUP, "io_uring_enter": unix.SYS_IO_URING_ENTER,
	"io_uring_register": unix.SYS_IO_URING_REGISTER, "io_setup": unix.SYS_IO_SETUP, "memfd_secret": unix.SYS_MEMFD_SECRET,
	"userfaultfd": unix.SYS_USERFAULTFD, "bpf": unix.SYS_BPF, "perf_event_open": unix.SYS_PERF_EVENT_OPEN,
	"keyctl": unix.SYS_KEYCTL, "add_key": unix.SYS_ADD_KEY, "request_key": unix.SYS_REQUEST_KEY, "kcmp": unix.SYS_KCMP,
	"pidfd_getfd": unix.SYS_PIDFD_GETFD, "name_to_handle_at": unix.SYS_NAME_TO_HANDLE_AT,
	"open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT, "init_module": unix.SYS_INIT_MODULE,
	"finit_module": unix.SYS_FINIT_MODULE, "delete_module": unix.SYS_DELETE_MODULE, "kexec_load": unix.SYS_KEXEC_LOAD,
	"reboot": unix.SYS_REBOOT, "swapon": unix.SYS_SWAPON, "swapoff": unix.SYS_SWAPOFF, "syslog": unix.SYS_SYSLOG,
	"acct": unix.SYS_ACCT, "quotactl": unix.SYS_QUOTACTL, "sethostname": unix.SYS_SETHOSTNAME,
	"setdomainname": unix.SYS_SETDOMAINNAME, "settimeofday": unix.SYS_SETTIMEOFDAY, "clock_settime": unix.SYS_CLOCK_SETTIME,
	"clock_adjtime": unix.SYS_CLOCK_ADJTIME, "adjtimex": unix.SYS_ADJTIMEX, "fanotify_init": unix.SYS_FANOTIFY_INIT,
	"mbind": unix.SYS_MBIND, "move_pages": unix.SYS_MOVE_PAGES, "migrate_pages": unix.SYS_MIGRATE_PAGES,
	"personality": unix.SYS_PERSONALITY, "sync": unix.SYS_SYNC, "vhangup": unix.SYS_VHANGUP,
	"nfsservctl": unix.SYS_NFSSERVCTL, "lookup_dcookie": unix.SYS_LOOKUP_DCOOKIE, "getpid": unix.SYS_GETPID,
	"memfd_create": unix.SYS_MEMFD_CREATE, "epoll_create1": unix.SYS_EPOLL_CREATE1, "eventfd2": unix.SYS_EVENTFD2,
	"inotify_init1": unix.SYS_INOTIFY_INIT1, "pidfd_open": unix.SYS_PIDFD_OPEN, "landlock_create_ruleset": unix.SYS_LANDLOCK_CREATE_RULESET,
	"unknown_new": 9999, "setuid": unix.SYS_SETUID, "setgid": unix.SYS_SETGID,
}
