package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attacks are what one process can try on the first one, by kind.
var attacks = map[string]func(){
	"signals": signals, "limits": limits, "scheduling": scheduling, "tracing": tracing, "files": procFiles, "socket": socket,
	"identity": identity,
}

// attempts counts what was tried, so that a test sees that anything was.
var attempts int

// attack tries all of some kinds, prints what was not refused, and how much was
// tried.
// "as-root" tries them as root of a user namespace, where one can be made.
func attack(args []string) {
	if args[0] == "as-root" {
		cmd := exec.Command("/proc/self/exe", append([]string{"attack"}, args[1:]...)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		}
		if err := cmd.Run(); err != nil {
			fmt.Println("as root:", err)
		}
		return
	}
	for _, kind := range args {
		attacks[kind]()
	}
	fmt.Println("tried", attempts)
}

// refused prints what was not refused. Only an errno that says so counts: a bad
// argument would mean that the caller's rights were in order.
func refused(what string, err error, also ...syscall.Errno) {
	attempts++
	var errno syscall.Errno
	if errors.As(err, &errno) && (slices.Contains([]syscall.Errno{unix.EPERM, unix.EACCES, unix.ENOSYS, unix.EROFS}, errno) || slices.Contains(also, errno)) {
		return
	}
	fmt.Println("can:", what, errText(err))
}

func raw(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

// threads are those of the first process; it is the first of them.
func threads() []int {
	list := []int{1}
	entries, _ := os.ReadDir("/proc/1/task") // the first at least
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n != 1 {
			list = append(list, n)
		}
	}
	return list
}

func signals() {
	pidfd, err := unix.PidfdOpen(1, 0)
	if err != nil && !errors.Is(err, unix.ENOSYS) {
		fmt.Println("no descriptor of the first process:", err)
	}
	for sig := 1; sig <= 64; sig++ {
		s := uintptr(sig)
		refused(fmt.Sprint("kill ", sig), unix.Kill(1, syscall.Signal(sig)))
		refused(fmt.Sprint("tkill ", sig), raw(unix.SYS_TKILL, 1, s))
		for _, code := range []int32{-1, -2, -3, -4, -5, -6, -60} { // those that user code may give
			info := queued(sig, code)
			refused(fmt.Sprint("sigqueue ", sig, code), raw(unix.SYS_RT_SIGQUEUEINFO, 1, s, uintptr(unsafe.Pointer(&info[0]))))
			refused(fmt.Sprint("tgsigqueue ", sig, code), raw(unix.SYS_RT_TGSIGQUEUEINFO, 1, 1, s, uintptr(unsafe.Pointer(&info[0]))))
		}
		for _, tid := range threads() {
			refused(fmt.Sprint("tgkill ", tid, sig), unix.Tgkill(1, tid, syscall.Signal(sig)), unix.ESRCH) // one that has just ended
		}
		for flags := 0; pidfd >= 0 && flags < 8; flags++ { // to the process, a thread, the group; combinations are invalid
			refused(fmt.Sprint("pidfd signal ", sig, flags), unix.PidfdSendSignal(pidfd, syscall.Signal(sig), nil, flags), invalidUnless(flags == 0)...)
		}
	}
	ownedBy(1)
	if os.Getuid() != 0 { // of a namespace: who made it would be killed
		refused("everybody", unix.Kill(-1, unix.SIGKILL), unix.ESRCH) // nobody else of this user's is there
	}
}

// invalidUnless lets EINVAL pass for arguments that not every kernel knows.
func invalidUnless(known bool) []syscall.Errno {
	if known {
		return nil
	}
	return []syscall.Errno{unix.EINVAL}
}

// queued is a siginfo with a code.
func queued(sig int, code int32) []byte {
	info := make([]byte, 128)
	*(*int32)(unsafe.Pointer(&info[0])) = int32(sig)
	*(*int32)(unsafe.Pointer(&info[8])) = code
	return info
}

// ownedBy has the kernel signal a process when a socket can be read: who owns a
// descriptor may be anybody, and is signalled with the rights of who said so.
func ownedBy(pid int) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		fmt.Println("no sockets:", err)
		return
	}
	for _, sig := range []int{int(unix.SIGKILL), int(unix.SIGTERM), int(unix.SIGSEGV)} {
		attempts++
		_, _ = unix.FcntlInt(uintptr(pair[0]), unix.F_SETOWN, pid)
		_, _ = unix.FcntlInt(uintptr(pair[0]), unix.F_SETSIG, sig)
		_, _ = unix.FcntlInt(uintptr(pair[0]), unix.F_SETFL, unix.O_ASYNC)
		_, _ = unix.Write(pair[1], []byte("x"))
	}
}

func limits() {
	for _, tid := range threads() {
		for limit := range 16 {
			refused(fmt.Sprint("prlimit ", tid, limit), unix.Prlimit(tid, limit, &unix.Rlimit{Cur: 1, Max: 1}, nil), unix.ESRCH)
			var old unix.Rlimit
			refused(fmt.Sprint("read prlimit ", tid, limit), unix.Prlimit(tid, limit, nil, &old), unix.ESRCH)
		}
	}
}

func scheduling() {
	var set unix.CPUSet
	set.Set(0)
	var param [64]byte
	for _, tid := range threads() {
		is := func(what string, err error) { refused(fmt.Sprint(what, " ", tid), err, unix.ESRCH) }
		is("affinity", unix.SchedSetaffinity(tid, &set))
		for _, policy := range []uintptr{0, 3, 5} { // OTHER, BATCH, IDLE
			is(fmt.Sprint("scheduler ", policy), raw(unix.SYS_SCHED_SETSCHEDULER, uintptr(tid), policy, uintptr(unsafe.Pointer(&param[0]))))
			is(fmt.Sprint("scheduling attributes ", policy), unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: uint32(policy)}, 0))
		}
		is("scheduling parameters", raw(unix.SYS_SCHED_SETPARAM, uintptr(tid), uintptr(unsafe.Pointer(&param[0]))))
		is("priority", unix.Setpriority(unix.PRIO_PROCESS, tid, 19))
		is("input and output priority", raw(unix.SYS_IOPRIO_SET, 1, uintptr(tid), 3<<13))
	}
	refused("priority of its group", unix.Setpriority(unix.PRIO_PGRP, 1, 19), unix.ESRCH)
	refused("input and output priority of its group", raw(unix.SYS_IOPRIO_SET, 2, 1, 3<<13), unix.ESRCH)
	refused("priority of its user", unix.Setpriority(unix.PRIO_USER, 1<<31-1, 19), unix.ESRCH)
}

func tracing() {
	var word [8]byte
	for _, tid := range threads() {
		refused(fmt.Sprint("attach ", tid), raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, uintptr(tid), 0, 0), unix.ESRCH)
		refused(fmt.Sprint("seize ", tid), raw(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, 0), unix.ESRCH)
	}
	local := []unix.Iovec{{Base: &word[0], Len: 1}}
	text := []unix.RemoteIovec{{Base: 0x400000, Len: 1}}
	_, err := unix.ProcessVMReadv(1, local, text, 0)
	refused("read its memory", err)
	_, err = unix.ProcessVMWritev(1, local, text, 0)
	refused("write its memory", err)
	var head, size uintptr
	refused("its list of locks", raw(unix.SYS_GET_ROBUST_LIST, 1, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&size))))
	refused("compare with it", raw(unix.SYS_KCMP, 1, uintptr(os.Getpid()), 0, 0, 0))
	refused("count its events", raw(unix.SYS_PERF_EVENT_OPEN, uintptr(unsafe.Pointer(&word[0])), 1, 0, 0, 0))
	refused("move its pages", raw(unix.SYS_MOVE_PAGES, 1, 0, 0, 0, 0, 0))
	refused("migrate its pages", raw(unix.SYS_MIGRATE_PAGES, 1, 8, uintptr(unsafe.Pointer(&word[0])), uintptr(unsafe.Pointer(&word[0]))))
	pidfd, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return
	}
	for fd := range 8 {
		_, err = unix.PidfdGetfd(pidfd, fd, 0)
		refused(fmt.Sprint("take its descriptor ", fd), err)
	}
	remote := [2]uintptr{0x400000, 4096} // an iovec with another process's address
	for _, advice := range []uintptr{unix.MADV_COLD, unix.MADV_PAGEOUT, unix.MADV_WILLNEED} {
		refused("advise on its memory", raw(unix.SYS_PROCESS_MADVISE, uintptr(pidfd), uintptr(unsafe.Pointer(&remote)), 1, advice, 0))
	}
	refused("reap its memory", raw(unix.SYS_PROCESS_MRELEASE, uintptr(pidfd), 0), unix.EINVAL) // it is not dying: asked first
	refused("join its namespaces", unix.Setns(pidfd, unix.CLONE_NEWNET|unix.CLONE_NEWUTS))
}

// procFiles tries to write to every file that /proc has of the first process,
// and to look at those that are its own affair.
func procFiles() {
	for _, dir := range []string{"/proc/1", "/proc/1/task/1", "/proc/1/attr", "/proc/1/net"} {
		entries, _ := os.ReadDir(dir) // what may not be listed is tried below by name
		for _, e := range entries {
			if e.Type().IsRegular() {
				writeTo(filepath.Join(dir, e.Name()))
			}
		}
	}
	for _, name := range []string{"mem", "environ", "maps", "smaps", "smaps_rollup", "numa_maps", "pagemap", "auxv", "stack", "syscall", "io", "personality", "timerslack_ns", "oom_score_adj", "clear_refs"} {
		for _, dir := range []string{"/proc/1/", "/proc/1/task/1/"} {
			writeTo(dir + name)
			if name == "oom_score_adj" || name == "smaps_rollup" && dir != "/proc/1/" {
				continue
			}
			f, err := os.Open(dir + name)
			if err == nil {
				_, err = f.Read(make([]byte, 1))
				f.Close()
			}
			refused("read "+dir+name, err, unix.ENOENT)
		}
	}
	for _, dir := range []string{"fd", "fdinfo", "map_files", "cwd", "root", "root/etc", "cwd/run"} {
		_, err := os.ReadDir("/proc/1/" + dir)
		refused("list "+dir, err, unix.ENOENT)
	}
	for _, link := range []string{"exe", "cwd", "root", "fd/0", "fd/3", "ns/net", "ns/pid", "ns/user", "ns/mnt"} {
		_, err := os.Readlink("/proc/1/" + link)
		refused("follow "+link, err, unix.ENOENT)
	}
	refused("run its program", syscall.Exec("/proc/1/exe", []string{"x", "call", "getpid"}, nil))
	for fd := range 64 {
		for _, mode := range []int{unix.O_RDONLY, unix.O_WRONLY, unix.O_PATH} {
			name := fmt.Sprint("/proc/1/fd/", fd)
			opened, err := unix.Open(name, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err == nil {
				unix.Close(opened)
			}
			refused(fmt.Sprint("open ", name, " ", mode), err, unix.ENOENT, unix.ENXIO)
		}
	}
}

// writeTo tries to write to a file in each way of opening it.
func writeTo(name string) {
	for _, mode := range []int{unix.O_WRONLY, unix.O_RDWR, unix.O_WRONLY | unix.O_TRUNC} {
		fd, err := unix.Open(name, mode|unix.O_CLOEXEC, 0)
		if err == nil {
			_, err = unix.Write(fd, []byte("1"))
			unix.Close(fd)
		}
		refused("write to "+name, err, unix.ENOENT)
	}
}

// socket tries to reach the agent's host in its place, or to keep the agent
// from it.
func socket() {
	for _, path := range []string{sock, "/proc/1/root" + sock, "/proc/self/root" + sock} {
		for _, typ := range []string{"unix", "unixpacket", "unixgram"} {
			c, err := net.DialTimeout(typ, path, time.Second)
			if err == nil {
				c.Close()
			}
			refused("call its host by "+path, err, unix.EPROTOTYPE)
		}
	}
	_ = os.Symlink(sock, "/tmp/sock")
	_, err := net.DialTimeout("unix", "/tmp/sock", time.Second)
	refused("call its host by a link", err)
	if fd, err := unix.Open(sock, unix.O_PATH, 0); err == nil {
		_, err = net.DialTimeout("unix", fmt.Sprint("/proc/self/fd/", fd), time.Second)
		refused("call its host by a descriptor", err)
		refused("link a descriptor", unix.Linkat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", fd), unix.AT_FDCWD, "/tmp/sock3", unix.AT_SYMLINK_FOLLOW), unix.EXDEV)
		refused("change its mode by a descriptor", unix.Fchmodat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", fd), 0o777, 0))
	}
	refused("link it", unix.Link(sock, "/tmp/sock2"), unix.EXDEV)
	refused("change its mode", unix.Chmod(sock, 0o777))
	refused("own it", unix.Chown(sock, os.Getuid(), os.Getgid()))
	refused("remove it", unix.Unlink(sock))
	refused("rename it", unix.Rename(sock, sock+"2"))
	refused("rename its directory", unix.Rename(filepath.Dir(sock), "/run/other"), unix.EBUSY)
	refused("open it", openTo(sock), unix.ENXIO)
	_, err = net.Listen("unix", sock)
	refused("listen in its place", err, unix.EADDRINUSE)
	_, err = net.Listen("unix", filepath.Dir(sock)+"/mine")
	refused("listen beside it", err)
	refused("change its time", unix.Utimes(sock, []unix.Timeval{{}, {}}))
	refused("replace the agent", openTo(self), unix.ETXTBSY)
	refused("remove the agent", unix.Unlink(self), unix.EBUSY)
	refused("mount over it", unix.Mount("/tmp", filepath.Dir(sock), "", unix.MS_BIND, ""))
}

func openTo(name string) error {
	fd, err := unix.Open(name, unix.O_RDWR, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// identity tries to become the first process's user, or to gain a right.
func identity() {
	for _, nr := range []uintptr{unix.SYS_SETUID, unix.SYS_SETGID} {
		refused(fmt.Sprint("set ", nr), raw(nr, 0))
	}
	refused("reuid", raw(unix.SYS_SETREUID, 0, 0))
	refused("regid", raw(unix.SYS_SETREGID, 0, 0))
	refused("resuid", raw(unix.SYS_SETRESUID, 0, 0, 0))
	refused("resgid", raw(unix.SYS_SETRESGID, 0, 0, 0))
	zero := uint32(0)
	refused("groups", raw(unix.SYS_SETGROUPS, 1, uintptr(unsafe.Pointer(&zero))))
	_ = raw(unix.SYS_SETFSUID, 0)
	if fsuid, _, _ := syscall.RawSyscall(unix.SYS_SETFSUID, ^uintptr(0), 0, 0); fsuid == 0 {
		fmt.Println("can: act on files as root")
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	all := [2]unix.CapUserData{{Effective: 0xe0, Permitted: 0xe0, Inheritable: 0xe0}}
	refused("capabilities", unix.Capset(&header, &all[0]))
	refused("ambient capabilities", unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_KILL, 0, 0), unix.EINVAL)
	refused("new privileges", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0), unix.EINVAL)
	refused("a root of its own", unix.Chroot("/tmp"))
	refused("namespaces of its own", unix.Unshare(unix.CLONE_NEWUSER))
	refused("another host name", unix.Sethostname([]byte("x")))
	refused("a process group with it", unix.Setpgid(0, 1), unix.ESRCH)
}
