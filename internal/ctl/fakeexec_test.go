//go:build linux

package ctl

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"

	"github.com/boxed-mesh/boxed"
)

// fakeExec is a program of a fake sandbox. Its output is kept whole.
type fakeExec struct {
	info boxed.Exec
	cmd  *exec.Cmd
	tty  *os.File
	done chan struct{}

	mu     sync.Mutex
	grown  chan struct{}
	output [2][]byte
	reason boxed.ExitReason // why it was killed
	status *boxed.ExitStatus
}

// fakeOutput appends to one output of a fakeExec.
type fakeOutput struct {
	x *fakeExec
	i int
}

func (o fakeOutput) Write(p []byte) (int, error) {
	o.x.mu.Lock()
	defer o.x.mu.Unlock()
	o.x.output[o.i] = append(o.x.output[o.i], p...)
	close(o.x.grown)
	o.x.grown = make(chan struct{})
	return len(p), nil
}

// kill ends the whole process group.
func (x *fakeExec) kill(reason boxed.ExitReason) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.status == nil {
		if x.reason == "" {
			x.reason = reason
		}
		_ = syscall.Kill(-x.cmd.Process.Pid, syscall.SIGKILL)
	}
}

var fakeSignals = map[string]syscall.Signal{
	"INT": syscall.SIGINT, "TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "QUIT": syscall.SIGQUIT, "USR1": syscall.SIGUSR1, "KILL": syscall.SIGKILL,
}

// wait reaps the program and says how it ended.
func (x *fakeExec) wait(started time.Time, finish func()) {
	err := x.cmd.Wait()
	finish()
	x.mu.Lock()
	defer x.mu.Unlock()
	st := boxed.ExitStatus{Reason: boxed.ReasonExited, DurationMS: time.Since(started).Milliseconds()}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if ws := exit.Sys().(syscall.WaitStatus); ws.Signaled() {
			st.Reason, st.Code = boxed.ReasonSignaled, 128+int(ws.Signal())
			for name, s := range fakeSignals {
				if s == ws.Signal() {
					st.Signal = name
				}
			}
		} else {
			st.Code = exit.ExitCode()
		}
	}
	if x.reason != "" {
		st.Reason = x.reason
	}
	if st.Reason == boxed.ReasonLost {
		st.Code = -1
	}
	st.StdoutBytes, st.StderrBytes = int64(len(x.output[0])), int64(len(x.output[1]))
	x.status = &st
	x.info.Running, x.info.EndedAt, x.info.Status = false, time.Now().UTC(), &st
	close(x.grown)
	x.grown = make(chan struct{})
	close(x.done)
}

// start runs a program of the sandbox on this machine.
func (n *fakeNode) start(ctx context.Context, id boxed.ID, req boxed.ExecRequest, detached bool) (*fakeExec, *fakeBox, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, nil, err
	}
	cmd, err := b.command(req)
	if err != nil {
		return nil, nil, err
	}
	x := &fakeExec{
		cmd: cmd, done: make(chan struct{}), grown: make(chan struct{}),
		info: boxed.Exec{ID: boxed.NewExecID(), Args: req.Args, Language: req.Language, TTY: req.TTY, Detached: detached, Running: true, StartedAt: time.Now().UTC()},
	}
	finish := func() {}
	if req.TTY {
		size := req.Size
		if size.Cols == 0 || size.Rows == 0 {
			size = boxed.Size{Cols: 80, Rows: 24}
		}
		x.tty, err = pty.StartWithSize(cmd, &pty.Winsize{Cols: size.Cols, Rows: size.Rows})
		copied := make(chan struct{})
		if err == nil {
			go func() { defer close(copied); _, _ = io.Copy(fakeOutput{x, 0}, x.tty) }() // ends with EIO
		}
		finish = func() { <-copied; x.tty.Close() }
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Stdout, cmd.Stderr = fakeOutput{x, 0}, fakeOutput{x, 1}
		cmd.WaitDelay = 200 * time.Millisecond // what is left in the background does not hold the streams
		if req.Stdin != nil {
			in, err := cmd.StdinPipe()
			if err != nil {
				return nil, nil, err
			}
			go func() { _, _ = io.Copy(in, req.Stdin); in.Close() }()
		}
		err = cmd.Start()
	}
	if err != nil {
		return nil, nil, boxed.Errorf(boxed.CodeStartFailed, "%s cannot be started", cmd.Args[0])
	}
	if req.TTY && req.Stdin != nil {
		go func() { _, _ = io.Copy(x.tty, req.Stdin) }()
	}
	if req.Timeout > 0 && req.Timeout != boxed.Never {
		timer := time.AfterFunc(req.Timeout.D(), func() { x.kill(boxed.ReasonTimeout) })
		before := finish
		finish = func() { timer.Stop(); before() }
	}
	x.info.PID = cmd.Process.Pid
	n.mu.Lock()
	b.execs[x.info.ID] = x
	n.emitLocked(boxed.EventExec, b, func(e *boxed.Event) { e.Exec = x.info.ID })
	n.mu.Unlock()
	go x.wait(x.info.StartedAt, finish)
	return x, b, nil
}

// command is what really runs for a request.
func (b *fakeBox) command(req boxed.ExecRequest) (*exec.Cmd, error) {
	args := append([]string(nil), req.Args...)
	for i, arg := range args {
		if strings.HasPrefix(arg, "/tmp/") || strings.HasPrefix(arg, "/workspace") {
			args[i] = b.root + arg
		}
	}
	if req.Language != "" {
		file := filepath.Join(b.root, "tmp", "code-"+boxed.NewToken(6))
		if err := os.WriteFile(file, []byte(req.Code), 0o700); err != nil {
			return nil, err
		}
		args = []string{map[string]string{"python": "python3", "javascript": "node", "bash": "bash"}[req.Language], file}
	}
	dir := b.host(req.Dir)
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return nil, boxed.Errorf(boxed.CodeInvalid, "working directory %q does not exist", firstOf(req.Dir, b.Dir)).WithField("dir")
	}
	program := args[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(dir, program)
	}
	if path := firstOf(req.Env["PATH"], b.Env["PATH"]); path != "" && !strings.Contains(program, "/") {
		program = filepath.Join(path, program) // of one directory is enough here
	}
	program, err := exec.LookPath(program)
	if err != nil {
		e := boxed.Errorf(boxed.CodeStartFailed, "%s is not a program in this image's PATH", args[0])
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			e = e.With("reason", "not_found")
		}
		return nil, e
	}
	cmd := exec.Command(program)
	cmd.Args, cmd.Dir = args, dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + filepath.Join(b.root, "home"), "PYENV_ROOT=" + os.Getenv("PYENV_ROOT"), "TERM=xterm", "PS1=$ "}
	for _, env := range []map[string]string{b.Env, req.Env} {
		for k, v := range env {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	return cmd, nil
}

// follow writes an exec's output from the offsets until it has ended or ctx has.
func (x *fakeExec) follow(ctx context.Context, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	at := [2]int64{req.StdoutOffset, req.StderrOffset}
	for {
		x.mu.Lock()
		grown, status := x.grown, x.status
		var news [2][]byte
		for i := range at {
			news[i] = x.output[i][min(at[i], int64(len(x.output[i]))):]
		}
		x.mu.Unlock()
		for i, w := range []io.Writer{req.Stdout, req.Stderr} {
			at[i] += int64(len(news[i]))
			if w != nil && len(news[i]) > 0 {
				if _, err := w.Write(news[i]); err != nil {
					return boxed.ExitStatus{}, err
				}
			}
		}
		switch {
		case status != nil:
			return *status, nil
		case req.NoFollow:
			return boxed.ExitStatus{}, nil
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return boxed.ExitStatus{}, ctx.Err()
		case size := <-req.Resize:
			if x.tty != nil {
				_ = pty.Setsize(x.tty, &pty.Winsize{Cols: size.Cols, Rows: size.Rows})
			}
		case name := <-req.Signals:
			_ = syscall.Kill(x.cmd.Process.Pid, fakeSignals[name])
		}
	}
}

func (n *fakeNode) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	x, _, err := n.start(ctx, id, req, false)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	if req.Started != nil {
		req.Started(x.info.ID)
	}
	st, err := x.follow(ctx, boxed.AttachRequest{Stdout: req.Stdout, Stderr: req.Stderr, Resize: req.Resize, Signals: req.Signals})
	if err != nil {
		x.kill(boxed.ReasonCanceled)
		<-x.done
	}
	return st, err
}

func (n *fakeNode) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	x, _, err := n.start(ctx, id, req, true)
	if err != nil {
		return nil, err
	}
	return &x.info, nil
}

func (n *fakeNode) exec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*fakeExec, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if x := b.execs[exec]; x != nil {
		return x, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no exec %s", exec)
}

func (n *fakeNode) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	x, err := n.exec(ctx, id, exec)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	return x.follow(ctx, req)
}

func (n *fakeNode) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	x, err := n.exec(ctx, id, exec)
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	info := x.info
	return &info, nil
}

func (n *fakeNode) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	out := []boxed.Exec{}
	for _, x := range b.execs {
		x.mu.Lock()
		out = append(out, x.info)
		x.mu.Unlock()
	}
	return out, nil
}

func (n *fakeNode) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	x, err := n.exec(ctx, id, exec)
	if err != nil {
		return err
	}
	pid := x.cmd.Process.Pid
	if tree {
		pid = -pid
	}
	return syscall.Kill(pid, fakeSignals[signal])
}

func (n *fakeNode) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	x, err := n.exec(ctx, id, exec)
	if err != nil {
		return err
	}
	x.kill(boxed.ReasonCanceled)
	<-x.done
	return nil
}
