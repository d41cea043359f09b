package main

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attack tries everything that one process can do to another on the first one,
// and prints what succeeded.
func attack([]string) {
	for sig := 1; sig <= 64; sig++ {
		tell(fmt.Sprint("kill ", sig), unix.Kill(1, syscall.Signal(sig)))
		tell(fmt.Sprint("tgkill ", sig), unix.Tgkill(1, 1, syscall.Signal(sig)))
		info := make([]byte, 128)
		info[8] = 0xff // si_code SI_QUEUE is -1
		info[9], info[10], info[11] = 0xff, 0xff, 0xff
		tell(fmt.Sprint("sigqueue ", sig), raw(unix.SYS_RT_SIGQUEUEINFO, 1, uintptr(sig), uintptr(unsafe.Pointer(&info[0]))))
		tell(fmt.Sprint("tgsigqueue ", sig), raw(unix.SYS_RT_TGSIGQUEUEINFO, 1, 1, uintptr(sig), uintptr(unsafe.Pointer(&info[0]))))
	}
	for limit := range 16 {
		tell(fmt.Sprint("prlimit ", limit), unix.Prlimit(1, limit, &unix.Rlimit{Cur: 1, Max: 1}, nil))
	}
	var set unix.CPUSet
	set.Set(0)
	var zero [64]byte
	tell("affinity", unix.SchedSetaffinity(1, &set))
	tell("scheduler", raw(unix.SYS_SCHED_SETSCHEDULER, 1, unix.SCHED_IDLE, uintptr(unsafe.Pointer(&zero[0]))))
	tell("scheduling attributes", unix.SchedSetAttr(1, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0))
	tell("scheduling parameters", raw(unix.SYS_SCHED_SETPARAM, 1, uintptr(unsafe.Pointer(&zero[0]))))
	tell("priority", unix.Setpriority(unix.PRIO_PROCESS, 1, 19))
	tell("input and output priority", raw(unix.SYS_IOPRIO_SET, 1, 1, 3<<13))
	tell("ptrace attach", raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1, 0, 0))
	tell("ptrace seize", raw(unix.SYS_PTRACE, unix.PTRACE_SEIZE, 1, 0, 0))
	local := []unix.Iovec{{Base: &zero[0], Len: 1}}
	_, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: 0x400000, Len: 1}}, 0)
	tell("read its memory", err)
	_, err = unix.ProcessVMWritev(1, local, []unix.RemoteIovec{{Base: 0x400000, Len: 1}}, 0)
	tell("write its memory", err)
	if fd, err := unix.PidfdOpen(1, 0); err == nil {
		tell("pidfd signal", unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0))
		_, err = unix.PidfdGetfd(fd, 0, 0)
		tell("take a descriptor", err)
	}
	for _, name := range []string{"mem", "environ", "maps", "fd", "cwd", "root", "oom_score_adj", "comm", "clear_refs", "timerslack_ns", "auxv", "stack", "syscall", "io"} {
		f, err := os.OpenFile("/proc/1/"+name, os.O_RDWR, 0)
		if err == nil {
			_, err = f.WriteString("1")
			f.Close()
		}
		tell("write to "+name, err)
	}
	for _, link := range []string{"exe", "cwd", "root"} {
		_, err := os.Readlink("/proc/1/" + link)
		tell("follow "+link, err)
	}
	_, err = net.DialTimeout("unix", sock, time.Second)
	tell("call its host", err)
	fmt.Println("done")
}

func tell(what string, err error) {
	if err == nil {
		fmt.Println("can:", what)
	}
}

func raw(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

// exhaust takes all of something that the kernel counts by user, keeps it, and
// says how much there was.
func exhaust(args []string) {
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	_ = unix.PthreadSigmask(unix.SIG_BLOCK, &all, nil) // of this thread, so that signals stay pending
	n := 0
	for ; n < 1<<20; n++ {
		if take(args[0], n) != nil {
			break
		}
	}
	fmt.Println(n)
	for len(args) > 1 { // what others give back too
		if n++; take(args[0], n) != nil {
			time.Sleep(time.Millisecond)
		}
	}
	for i := range n { // queues outlive their process
		if args[0] == "queues" {
			_ = raw(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(queue(i))))
		}
	}
}

func queue(n int) *byte {
	return &append(fmt.Appendf(nil, "q%d-%d", os.Getpid(), n), 0)[0]
}

func take(what string, n int) error {
	switch what {
	case "inotify":
		_, err := unix.InotifyInit1(0)
		return err
	case "signals":
		info := make([]byte, 128)
		for i := 8; i < 12; i++ {
			info[i] = 0xff
		}
		return raw(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(os.Getpid()), uintptr(unix.Gettid()), 40, uintptr(unsafe.Pointer(&info[0])))
	case "queues":
		return raw(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(queue(n))), unix.O_CREAT|unix.O_RDWR, 0o600, 0)
	}
	panic(what)
}
