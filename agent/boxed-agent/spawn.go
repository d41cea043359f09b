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
	var l launch
	// All that touches files at once: each change of threads costs as much as the rest.
	if err := s.user.do(func() error { return l.prepare(&start, argv) }); err != nil {
		s.discard(&l)
		return nil, err
	}
	defer l.streams.closeChildEnds()
	p, err := s.launch(start, &l)
	if err != nil {
		l.streams.closeOurEnds()
		s.discard(&l)
		return nil, err
	}
	return p, nil
}

// launch is a program that is ready to be started.
type launch struct {
	argv    []string
	program string // path
	streams *streams
	codeDir string // with the code's file; "" without one
}

// prepare runs with the user's rights, as do the functions that it calls.
func (l *launch) prepare(start *agent.ExecStart, argv []string) (err error) {
	if err := checkDir(start.Dir); err != nil {
		return err
	}
	if start.Language != "" {
		if argv, l.codeDir, err = prepareCode(start); err != nil {
			return err
		}
	}
	if len(argv) == 0 || argv[0] == "" {
		return &agent.Error{Code: agent.ErrInvalid, Message: "no program is named", Path: "args"}
	}
	l.argv = argv
	if l.program, err = lookPath(argv[0], *start); err != nil {
		return err
	}
	if l.streams, err = openStreams(*start); err != nil {
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

func (s *system) launch(start agent.ExecStart, l *launch) (*process, error) {
	oom := oomKills()
	attr := &syscall.ProcAttr{
		Dir: start.Dir, Env: start.Env, Files: l.streams.fds(),
		Sys: &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: uint32(s.uid), Gid: uint32(s.uid)},
			Setsid:     true, Setctty: start.TTY, Ctty: 0,
		},
	}
	child, mark, err := s.forker.start(l.program, l.argv, attr)
	if err != nil {
		return nil, startError(l.argv[0], err)
	}
	p := &process{system: s, child: child, mark: mark, tty: start.TTY, oomBefore: oom, cleanup: func() { s.discard(l) }}
	p.take(l.streams)
	return p, nil
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
	in, out, err *os.File // the child's
	stdin        *os.File // ours; nil for /dev/null
	stdout       *os.File // ours, or the terminal
	stderr       *os.File // ours; nil on a terminal
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
		if st.stdout, st.in, err = pty.Open(); err != nil {
			return st, err
		}
		st.stdin, st.out, st.err = st.stdout, st.in, st.in
		return st, setSize(st.stdout, start.Cols, start.Rows)
	}
	if start.Stdin {
		st.in, st.stdin, err = os.Pipe()
	} else {
		st.in, err = os.Open(os.DevNull)
	}
	if err != nil {
		return st, err
	}
	if st.stdout, st.out, err = os.Pipe(); err != nil {
		return st, err
	}
	st.stderr, st.err, err = os.Pipe()
	return st, err
}

// fds are the child's descriptors 0, 1 and 2.
func (st *streams) fds() []uintptr { return []uintptr{st.in.Fd(), st.out.Fd(), st.err.Fd()} }

func (st *streams) closeChildEnds() { closeAll(st.in, st.out, st.err) }
func (st *streams) closeOurEnds()   { closeAll(st.stdin, st.stdout, st.stderr) }

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
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
