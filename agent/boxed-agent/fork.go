package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forker starts programs from one thread of its own, which carries a seccomp
// filter that the programs inherit: they cannot change RLIMIT_RSS, the mark of
// the exec that they belong to. The agent itself sets the mark from another
// thread; limits are shared by threads, filters are not.
type forker struct {
	reaper *reaper
	oom    *os.File // /proc/self/oom_score_adj
	jobs   chan forkJob

	// isUser says that the thread has the user's file-system rights, so that what
	// must be found or opened for a program needs no other thread.
	isUser bool

	mu   sync.Mutex // one fork at a time: limits are the whole process's
	last uint64     // mark of the last exec
}

// forkJob is done on the thread that forks. What it forks it says in a ProcAttr.
type forkJob struct {
	prepare func() (program, error)
	result  chan<- forkResult
	become  int // instead: take this user's file-system rights
}

// program is what is forked and executed.
type program struct {
	path string
	argv []string
	attr *syscall.ProcAttr
}

type forkResult struct {
	child *child
	err   error
}

// prepareError is an error of a job's prepare.
type prepareError struct{ error }

func (e prepareError) Unwrap() error { return e.error }

// firstMark is the mark before any exec's. Linux has not used RLIMIT_RSS since
// 2.4; a value no real memory reaches keeps that true for old kernels too.
const firstMark = 1 << 50

// userOOMScore makes the kernel choose user code before the agent.
const userOOMScore = "500"

func newForker(r *reaper) (*forker, error) {
	oom, err := os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	f := &forker{reaper: r, oom: oom, jobs: make(chan forkJob), last: firstMark}
	ready := make(chan error)
	go f.run(ready)
	return f, <-ready
}

func (f *forker) run(ready chan<- error) {
	runtime.LockOSThread() // for ever: the filter stays on this thread alone
	if err := protectMark(); err != nil {
		ready <- fmt.Errorf("install the mark's filter: %w", err)
		return
	}
	ready <- nil
	for job := range f.jobs {
		if job.become != 0 {
			f.isUser = becomeFileUser(job.become)
			job.result <- forkResult{}
			continue
		}
		var r forkResult
		prog, err := job.prepare()
		if err != nil {
			job.result <- forkResult{err: prepareError{err}}
			continue
		}
		r.child, r.err = f.reaper.fork(func() (int, error) {
			f.oom.WriteAt([]byte(userOOMScore), 0)
			pid, err := syscall.ForkExec(prog.path, prog.argv, prog.attr)
			f.oom.WriteAt([]byte("0"), 0)
			return pid, err
		})
		job.result <- r
	}
}

// become gives the thread the user's rights on files, if the kernel can: its
// others are needed to fork.
func (f *forker) become(uid int) {
	result := make(chan forkResult, 1)
	f.jobs <- forkJob{become: uid, result: result}
	<-result
}

// start prepares on the thread, and then forks and executes one program under a mark of its own: this process's
// hard limit, lowered by one. Lowered, it cannot be raised, since the process
// has no CAP_SYS_RESOURCE.
func (f *forker) start(prepare func() (program, error)) (*child, uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last--
	if err := unix.Prlimit(0, unix.RLIMIT_RSS, &unix.Rlimit{Cur: f.last, Max: f.last}, nil); err != nil {
		return nil, 0, fmt.Errorf("mark: %w", err)
	}
	result := make(chan forkResult, 1)
	f.jobs <- forkJob{prepare: prepare, result: result}
	for stuck := false; ; stuck = true {
		select {
		case r := <-result:
			if r.err == nil && stuck { // killed between fork and exec, which looks like a start
				<-r.child.ended
				return nil, 0, errStuck
			}
			return r.child, f.last, r.err
		case <-time.After(startLimit):
			if err := killTree(f.last); err != nil {
				fmt.Fprintln(os.Stderr, "boxed-agent: a program that does not start:", err)
			}
		}
	}
}

// startLimit is how long a program may take from fork to exec. In between its
// uid is the user's already, so that user code may stop it, or hold a lease on
// the file that is executed; the thread that forks waits for it.
const startLimit = 5 * time.Second

// errStuck is a program that did not get from fork to exec in time.
var errStuck = errors.New("it did not start in time: something in the sandbox stops new processes or holds a lease on the file")

// protectMark installs the filter on the calling thread.
func protectMark() error {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		arg0  = 16 // offsetof(struct seccomp_data, args[0])
		deny  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	)
	// The container's profile allows the native architecture only, so that the
	// numbers below are the right ones. Arguments are little-endian here.
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // the system call's number
		{Code: equal, K: unix.SYS_PRLIMIT64, Jt: 0, Jf: 6},
		{Code: load, K: arg0 + 8},
		{Code: equal, K: unix.RLIMIT_RSS, Jt: 0, Jf: 7},
		{Code: load, K: arg0 + 16}, // the new limit's address, low half
		{Code: equal, K: 0, Jt: 0, Jf: 6},
		{Code: load, K: arg0 + 20}, // high half
		{Code: equal, K: 0, Jt: 3, Jf: 4},
		{Code: equal, K: unix.SYS_SETRLIMIT, Jt: 0, Jf: 2},
		{Code: load, K: arg0},
		{Code: equal, K: unix.RLIMIT_RSS, Jt: 1, Jf: 0},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
		{Code: ret, K: deny},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return errno
	}
	return nil
}
