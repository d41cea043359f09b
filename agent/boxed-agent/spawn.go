package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/boxed-mesh/boxed/agent"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// Spawn starts one program as the user.
func (s *system) Spawn(start agent.ExecStart) (agent.Process, error) {
	argv := make([]string, len(start.Argv))
	for i, arg := range start.Argv {
		argv[i] = string(arg)
		if strings.ContainsRune(argv[i], 0) {
			return nil, &agent.Error{Code: agent.ErrInvalid, Message: "an argument holds a zero byte", Path: "args"}
		}
	}
	if w := s.ready.take(&start); w != nil {
		if p, ok := s.ready.serve(w, start.Code); ok {
			return p, nil
		}
	}
	l := launch{start: start, argv: argv}
	p, err := s.launch(&l)
	if l.streams != nil {
		l.streams.closeChildEnds()
		if err != nil {
			l.streams.closeOurEnds()
		}
	}
	if err != nil {
		s.discard(&l)
		return nil, err
	}
	return p, nil
}

// launch is a program that is ready to be started.
type launch struct {
	start   agent.ExecStart
	argv    []string
	program string // path
	streams *streams
	codeDir string // with the code's file; "" without one
}

// code writes the code of a language to a file, with the user's rights.
func (l *launch) code() (err error) {
	if err = checkDir(l.start.Dir); err == nil {
		l.argv, l.codeDir, err = prepareCode(&l.start, func(name string) error { return writeFile(name, l.start.Code) })
	}
	return err
}

// prepare finds the program and opens its streams, with the user's rights.
func (l *launch) prepare() (err error) {
	if err := checkDir(l.start.Dir); err != nil {
		return err
	}
	if len(l.argv) == 0 || l.argv[0] == "" {
		return &agent.Error{Code: agent.ErrInvalid, Message: "no program is named", Path: "args"}
	}
	if l.program, err = lookPath(l.argv[0], l.start); err != nil {
		return err
	}
	if l.streams, err = openStreams(l.start); err != nil {
		return fmt.Errorf("open streams: %w", err)
	}
	return nil
}

// discard removes the code's file, if there is one.
func (s *system) discard(l *launch) {
	if l.codeDir != "" {
		s.user.do(func() error { return os.RemoveAll(l.codeDir) })
	}
}

func (s *system) launch(l *launch) (*process, error) {
	var code func() error
	if l.start.Language != "" {
		code = l.code
	}
	oom := oomKills()
	child, mark, err := s.start(l, code)
	if err != nil {
		return nil, err
	}
	return s.process(l, child, mark, oom), nil
}

// start prepares and starts. What touches files happens on the thread that
// forks, if that has the user's rights: each change of threads costs as much as
// all else. Only code, which may be large, is written elsewhere.
func (s *system) start(l *launch, code func() error) (*child, uint64, error) {
	if code != nil {
		if err := s.user.do(code); err != nil {
			return nil, 0, err
		}
	}
	prepare := l.prepare
	if !s.forker.isUser {
		if err := s.user.do(l.prepare); err != nil {
			return nil, 0, err
		}
		prepare = func() error { return nil }
	}
	child, mark, err := s.forker.start(func() (program, error) {
		if err := prepare(); err != nil {
			return program{}, err
		}
		return program{l.program, l.argv, &syscall.ProcAttr{
			Dir: l.start.Dir, Env: l.start.Env, Files: l.streams.fds(),
			Sys: &syscall.SysProcAttr{
				Credential: &syscall.Credential{Uid: uint32(s.uid), Gid: uint32(s.uid)},
				Setsid:     true, Setctty: l.start.TTY, Ctty: 0,
			},
		}}, nil
	})
	switch {
	case errors.As(err, new(prepareError)):
		return nil, 0, errors.Unwrap(err)
	case err != nil:
		return nil, 0, startError(l.argv[0], err)
	}
	return child, mark, nil
}

// process is a started launch.
func (s *system) process(l *launch, child *child, mark uint64, oom int64) *process {
	p := &process{system: s, child: child, mark: mark, tty: l.start.TTY, oomBefore: oom, cleanup: func() {
		s.discard(l)
		s.ready.released()
		s.trim.busy()
	}}
	p.take(l.streams)
	return p
}

// startError explains why a program that was found could not be started.
func startError(name string, err error) error {
	e := &agent.Error{Code: agent.ErrStartFailed, Path: name}
	switch {
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM):
		e.Code, e.Message = agent.ErrExhausted, "the sandbox is at its limit of processes or memory; end some or ask for more"
	case errors.Is(err, syscall.E2BIG):
		e.Code, e.Message = agent.ErrTooLarge, "arguments and environment are too large for the kernel; pass the data in a file or on stdin"
	case errors.Is(err, syscall.ENOENT):
		e.Code, e.Message = agent.ErrNotFound, name+" names an interpreter or loader that this image does not have"
	case errors.Is(err, syscall.ENOEXEC):
		e.Message = name + " is not a program for this machine, and its first line names no interpreter"
	case errors.Is(err, errStuck):
		e.Message = name + ": " + err.Error()
	case errors.Is(err, syscall.EACCES):
		e.Message = name + " may not be executed by the sandbox's user"
	default:
		e.Message = fmt.Sprintf("%s cannot be started: %v", name, err)
	}
	return e
}

func checkDir(dir string) error {
	bad := func(why string) error {
		return &agent.Error{Code: agent.ErrInvalid, Message: fmt.Sprintf("working directory %q %s", dir, why), Path: "dir"}
	}
	if !path.IsAbs(dir) {
		return bad("is not absolute")
	}
	var st unix.Stat_t
	switch err := unix.Stat(dir, &st); {
	case errors.Is(err, unix.ENOENT):
		return bad("does not exist")
	case errors.Is(err, unix.EACCES):
		return bad("may not be entered by the sandbox's user")
	case err != nil:
		return bad(err.Error())
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return bad("is not a directory")
	}
	return nil
}

// lookPath finds a program as a shell would.
func lookPath(name string, start agent.ExecStart) (string, error) {
	if strings.Contains(name, "/") {
		full := name
		if !path.IsAbs(full) {
			full = path.Join(start.Dir, name)
		}
		return name, executable(name, full)
	}
	var denied error
	for _, dir := range strings.Split(getenv(start.Env, "PATH"), ":") {
		if dir == "" || !path.IsAbs(dir) {
			dir = path.Join(start.Dir, dir)
		}
		full := path.Join(dir, name)
		switch err := executable(name, full); {
		case err == nil:
			return full, nil
		case err.(*agent.Error).Code != agent.ErrNotFound:
			denied = err
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", &agent.Error{Code: agent.ErrNotFound, Message: name + " is not a program in this image's PATH", Path: name}
}

// executable reports whether a path is a program, as *agent.Error if not.
func executable(name, full string) error {
	var st unix.Stat_t
	err := unix.Stat(full, &st)
	switch {
	case err != nil && !errors.Is(err, fs.ErrPermission):
		return &agent.Error{Code: agent.ErrNotFound, Message: name + " does not exist in the sandbox", Path: name}
	case err != nil, st.Mode&unix.S_IFMT != unix.S_IFREG, st.Mode&0o111 == 0:
		return &agent.Error{Code: agent.ErrStartFailed, Message: name + " is not an executable file", Path: name}
	}
	return nil
}

func getenv(env []string, key string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], key+"="); ok {
			return v
		}
	}
	return ""
}

// streams are both ends of a program's standard streams.
type streams struct {
	child    []int    // descriptors for the program's 0, 1 and 2, open until it has them
	terminal *os.File // the program's end of a terminal, instead of three descriptors
	stdin    *os.File // ours; nil for /dev/null
	stdout   *output  // ours, or the terminal's
	stderr   *output  // ours; nil on a terminal
}

// openStreams runs with the user's rights, so that a program may open its own
// terminal or /dev/stderr again by name.
func openStreams(start agent.ExecStart) (st *streams, err error) {
	st = &streams{}
	defer func() {
		if err != nil {
			st.closeChildEnds()
			st.closeOurEnds()
		}
	}()
	if start.TTY {
		if st.stdin, st.terminal, err = pty.Open(); err != nil {
			return st, err
		}
		st.stdout = &output{fd: -1, file: st.stdin}
		if err := eraseCharacters(st.terminal); err != nil {
			return st, err
		}
		return st, setSize(st.stdin, start.Cols, start.Rows)
	}
	if start.Stdin {
		var ends [2]int
		if err = unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			return st, err
		}
		st.child = append(st.child, ends[0])
		st.stdin, err = waitable(ends[1])
	} else {
		var null int
		if null, err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
			st.child = append(st.child, null)
		}
	}
	if err != nil {
		return st, err
	}
	if st.stdout, err = st.outPipe(); err == nil {
		st.stderr, err = st.outPipe()
	}
	return st, err
}

// outPipe opens a pipe from the program. Our end does not wait, its does.
func (st *streams) outPipe() (*output, error) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	st.child = append(st.child, ends[1])
	return &output{fd: ends[0]}, unix.SetNonblock(ends[0], true)
}

// waitable makes a file of a descriptor, on which goroutines wait and not threads.
func waitable(fd int) (*os.File, error) {
	err := unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), "pipe"), err
}

// fds are the child's descriptors 0, 1 and 2.
func (st *streams) fds() []uintptr {
	if st.terminal != nil {
		fd := st.terminal.Fd()
		return []uintptr{fd, fd, fd}
	}
	fds := make([]uintptr, len(st.child))
	for i, fd := range st.child {
		fds[i] = uintptr(fd)
	}
	return fds
}

func (st *streams) closeChildEnds() {
	st.terminal.Close()
	for _, fd := range st.child {
		unix.Close(fd)
	}
	st.terminal, st.child = nil, nil
}

func (st *streams) closeOurEnds() {
	st.stdin.Close()
	for _, out := range []*output{st.stdout, st.stderr} {
		if out != nil {
			out.Close()
		}
	}
}

// eraseCharacters has a terminal's line discipline erase characters of UTF-8 and not
// bytes of them, as every terminal that people sit at does.
func eraseCharacters(terminal *os.File) error {
	modes, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		return err
	}
	modes.Iflag |= unix.IUTF8
	return unix.IoctlSetTermios(int(terminal.Fd()), unix.TCSETS, modes)
}

// setSize sizes a terminal; 0 means 80×24.
func setSize(terminal *os.File, cols, rows uint16) error {
	if cols == 0 {
		cols = 80
	}
	if rows == 0 {
		rows = 24
	}
	return pty.Setsize(terminal, &pty.Winsize{Cols: cols, Rows: rows})
}
