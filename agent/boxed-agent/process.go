package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
	"golang.org/x/sys/unix"
)

// process is a started program: an agent.Process.
type process struct {
	system    *system
	child     *child
	mark      uint64
	tty       bool
	oomBefore int64
	cleanup   func()

	stdin          io.WriteCloser
	stdout, stderr *output
}

func (p *process) take(st *streams) {
	if st.stdin != nil {
		p.stdin = st.stdin
	}
	p.stdout, p.stderr = st.stdout, st.stderr
}

func (p *process) PID() int { return p.child.pid }

func (p *process) Stdin() io.WriteCloser { return p.stdin }

func (p *process) Stdout() agent.Output { return p.stdout }

func (p *process) Stderr() agent.Output {
	if p.stderr == nil {
		return nil
	}
	return p.stderr
}

func (p *process) Wait() agent.WaitStatus {
	<-p.child.ended
	p.system.census.stale()
	status := p.child.status
	w := agent.WaitStatus{Code: status.ExitStatus()}
	if status.Signaled() {
		w.Code = 128 + int(status.Signal())
		w.Signal = signalName(status.Signal())
	}
	// A shell reports its killed child as 137. The counter tells what killed it.
	w.OOM = w.Code == 128+int(syscall.SIGKILL) && oomKills() > p.oomBefore
	return w
}

// WaitFor is Wait for at most so long.
func (p *process) WaitFor(d time.Duration) (agent.WaitStatus, bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.child.ended:
		return p.Wait(), true
	case <-timer.C:
		return agent.WaitStatus{}, false
	}
}

func (p *process) Signal(name string, tree bool) error {
	sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
	if sig == 0 {
		return &agent.Error{Code: agent.ErrInvalid, Message: fmt.Sprintf("%q is not a signal", name), Path: "signal"}
	}
	if tree {
		return signalTree(p.mark, sig)
	}
	return p.system.reaper.signal(p.child, sig)
}

func (p *process) KillTree() error {
	defer p.system.census.stale()
	return killTree(p.mark)
}

func (p *process) Resize(cols, rows uint16) error {
	if !p.tty {
		return &agent.Error{Code: agent.ErrConflict, Message: "the exec has no terminal"}
	}
	if err := setSize(p.stdout.open(), cols, rows); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (p *process) Count() int { return p.system.census.count(p.mark) }

// Release closes what is left open; the outputs were closed by their readers.
func (p *process) Release() {
	if p.stdin != nil {
		p.stdin.Close()
	}
	p.cleanup()
}

func signalName(sig syscall.Signal) string {
	if name := unix.SignalName(sig); name != "" {
		return strings.TrimPrefix(name, "SIG")
	}
	return strconv.Itoa(int(sig))
}

// output is the reading end of a pipe, or a terminal. What a short program wrote
// is read without the runtime's poller ever hearing of the pipe.
type output struct {
	mu   sync.Mutex
	fd   int      // of a pipe that is not opened yet, else -1
	file *os.File // nil before that, and after Close
}

// open is the output as a file that can wait.
func (o *output) open() *os.File {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fd >= 0 {
		o.file, o.fd = os.NewFile(uintptr(o.fd), "pipe"), -1
	}
	return o.file // of a nil one all methods fail with ErrInvalid
}

func (o *output) Read(p []byte) (int, error) {
	n, err := o.open().Read(p)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = agent.ErrInterrupted
	case errors.Is(err, syscall.EIO): // a terminal that nobody has open any more
		err = io.EOF
	}
	return n, err
}

// TryRead reads what is there.
func (o *output) TryRead(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fd < 0 {
		return 0, os.ErrClosed
	}
	n, err := unix.Read(o.fd, p)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return 0, agent.ErrInterrupted
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (o *output) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fd >= 0 {
		unix.Close(o.fd)
		o.fd = -1
		return nil
	}
	return o.file.Close()
}

func (o *output) Interrupt(afterMS int) {
	o.open().SetReadDeadline(time.Now().Add(time.Duration(afterMS) * time.Millisecond))
}

func (o *output) Pending() (n int) {
	raw, err := o.open().SyscallConn()
	if err != nil {
		return 0
	}
	raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return n
}

// oomKills is how often the kernel killed for the sandbox's memory limit, from
// the sandbox's own cgroup, version 1 or 2.
func oomKills() int64 {
	file := oomFile()
	if file == nil {
		return 0
	}
	var buf [1 << 10]byte
	size, _ := file.ReadAt(buf[:], 0)
	for line := range bytes.Lines(buf[:size]) {
		if v, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			n, _ := strconv.ParseInt(string(bytes.TrimSpace(v)), 10, 64)
			return n
		}
	}
	return 0
}

// oomFile is opened once: it is read at the start of every exec.
var oomFile = sync.OnceValue(func() *os.File {
	for _, name := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		if file, err := os.Open(name); err == nil {
			return file
		}
	}
	return nil
})
