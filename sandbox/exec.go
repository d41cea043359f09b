package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Exec runs a program and returns when it has ended and its output is written.
func (m *Manager) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	b, host, done, err := m.hold(id)
	if err != nil {
		return lost(""), err
	}
	defer done()
	start, err := b.execStart(req)
	if err == nil && req.Linger != 0 {
		err = boxed.Errorf(boxed.CodeInvalid, "linger is for a detached exec; one that is attached ends with its client").WithField("linger")
	}
	if err != nil {
		return lost(""), err
	}
	execID, began := boxed.ExecID(start.ID), false
	stop, missing := func() {}, int64(0)
	defer func() { stop() }()
	look, stdin := b.watch(ctx, host, start.ID, req.Stdin)
	defer look.leave()
	ended := b.firstExec()
	start.Rushed = m.rush.busy()
	exit, err := host.Exec(ctx, start, agent.Streams{
		Stdin: stdin, Stdout: req.Stdout, Stderr: req.Stderr,
		Started: func(agent.ExecInfo) {
			began = true
			// Not before: a signal for what has not started would be lost.
			stop = b.control(ctx, host, look, req.Resize, req.Signals)
			m.execEvent(boxed.EventExec, b, execID, nil)
			if req.Started != nil {
				req.Started(execID)
			}
		},
		Gap: func(_ bool, n int64) { missing += n },
	})
	ended()
	if !began {
		return lost(""), b.execError(err)
	}
	status, err := b.ended(exit, err)
	if err != nil && errors.Is(context.Cause(ctx), boxed.ErrGoingAway) {
		return status, err // it runs on
	}
	m.execEvent(boxed.EventExecEnd, b, execID, &status)
	if err == nil && missing != 0 {
		err = boxed.Errorf(boxed.CodeLost, "%d bytes of output are missing: the link to the sandbox was broken for longer than its agent keeps output", missing)
	}
	return status, err
}

// ended turns the end of a stream into a status. A sandbox that ended under its
// exec is a status too: lost, with the reason, and no invented code.
func (b *box) ended(exit agent.Exit, err error) (boxed.ExitStatus, error) {
	if err == nil || (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		return exitStatus(exit), err
	}
	err = b.linkError(err)
	if errors.Is(err, boxed.CodeGone) {
		return lost(err.Error()), nil
	}
	return lost(""), err
}

func lost(why string) boxed.ExitStatus {
	return boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1, Message: why}
}

func exitStatus(e agent.Exit) boxed.ExitStatus {
	s := boxed.ExitStatus{
		Reason: boxed.ExitReason(e.Reason), Code: e.Code, Signal: clip(e.Signal),
		StdoutBytes: e.StdoutBytes, StderrBytes: e.StderrBytes, DurationMS: e.DurationMS,
	}
	switch s.Reason {
	case boxed.ReasonExited, boxed.ReasonSignaled, boxed.ReasonTimeout, boxed.ReasonOOM, boxed.ReasonOutputLimit, boxed.ReasonCanceled:
	default: // an agent may say what it likes; the list is closed
		s.Reason, s.Code = boxed.ReasonLost, -1
	}
	return s
}

func (m *Manager) execEvent(typ boxed.EventType, b *box, exec boxed.ExecID, status *boxed.ExitStatus) {
	m.emit(typ, &boxed.Sandbox{ID: b.id, Owner: b.record().Sandbox.Owner}, func(e *boxed.Event) {
		e.Exec, e.Status = exec, status
	})
}

// control passes window sizes and signals on until the returned function is
// called.
func (b *box) control(ctx context.Context, host *agent.Host, look *viewer, resize <-chan boxed.Size, signals <-chan string) func() {
	if resize == nil && signals == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for resize != nil || signals != nil {
			var err error
			select {
			case size, ok := <-resize:
				if !ok {
					resize = nil
					continue
				}
				look.resize(size)
			case sig, ok := <-signals:
				if !ok {
					signals = nil
					continue
				}
				err = host.Signal(ctx, look.exec, sig, false)
			case <-ctx.Done():
				return
			}
			if err != nil && ctx.Err() == nil {
				b.m.log.Debug("pass a signal on", "sandbox", b.id, "err", err)
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// execStart checks a request and completes it from the sandbox's record.
func (b *box) execStart(req boxed.ExecRequest) (agent.ExecStart, error) {
	r := b.record()
	start := agent.ExecStart{
		ID: string(boxed.NewExecID()), Code: []byte(req.Code), Dir: req.Dir, TTY: req.TTY,
		Cols: req.Size.Cols, Rows: req.Size.Rows, Stdin: req.Stdin != nil || req.OpenStdin || req.TTY,
		TimeoutMS: req.Timeout.D().Milliseconds(), MaxOutput: req.MaxOutput, LingerMS: req.Linger.D().Milliseconds(),
	}
	switch {
	case len(req.Args) > 0 && (req.Language != "" || req.Code != ""):
		return start, boxed.Errorf(boxed.CodeInvalid, "give args, or language and code, not both").WithField("args")
	case len(req.Args) == 0 && req.Language == "":
		return start, boxed.Errorf(boxed.CodeInvalid, "give args, or language and code").WithField("args")
	case req.Language != "":
		if start.Language = boxed.CanonicalLanguage(req.Language); start.Language == "" {
			return start, boxed.Errorf(boxed.CodeInvalid, "unsupported language %q; it may be %s", clip(req.Language), strings.Join(boxed.Languages(), ", ")).WithField("language")
		}
	}
	if req.Linger != 0 && (req.Linger < boxed.Duration(time.Second) || req.Linger > boxed.MaxLinger) {
		return start, boxed.Errorf(boxed.CodeInvalid, "linger of %s; it may be 1s to %s", req.Linger, boxed.MaxLinger).WithField("linger")
	}
	if len(req.Code) > boxed.MaxCodeBytes {
		return start, boxed.Errorf(boxed.CodeTooLarge, "code of %d bytes, at most %d are allowed; put it into a file", len(req.Code), boxed.MaxCodeBytes).WithField("code")
	}
	size := 0
	for _, arg := range req.Args {
		size += len(arg) + 1
		start.Argv = append(start.Argv, []byte(arg))
	}
	if start.Dir == "" {
		start.Dir = r.Sandbox.Dir
	} else if !path.IsAbs(start.Dir) {
		start.Dir = path.Join(r.Sandbox.Dir, start.Dir)
	}
	if req.Timeout == boxed.Never {
		start.TimeoutMS = 0
	} else if req.Timeout > 0 {
		start.TimeoutMS = max(1, start.TimeoutMS)
	}
	start.Env = environment(&r, req)
	for _, kv := range start.Env {
		size += len(kv) + 1
	}
	if size > boxed.MaxArgBytes {
		return start, boxed.Errorf(boxed.CodeTooLarge, "arguments and environment of %d bytes, at most %d are allowed; pass the data in a file or on stdin", size, boxed.MaxArgBytes).WithField("args")
	}
	return start, nil
}

// environment is a program's, weakest first: ours, the image's, the sandbox's,
// the request's. HOME and the user's name cannot come from an image.
func environment(r *Record, req boxed.ExecRequest) []string {
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG": "C.UTF-8", "TMPDIR": "/tmp",
		"HOME": GuestHome, "USER": GuestUser, "LOGNAME": GuestUser, "HOSTNAME": Hostname(r.Sandbox.ID),
		"BOXED_SANDBOX": string(r.Sandbox.ID),
	}
	if cpus := r.Sandbox.Limits.CPUs; cpus > 0 && cpus < float64(runtime.NumCPU()) {
		// runc has no way to show a program fewer cores than the host has without
		// pinning it to some; these runtimes heed a hint.
		n := strconv.Itoa(int(math.Ceil(cpus)))
		for _, name := range []string{"GOMAXPROCS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHON_CPU_COUNT", "RAYON_NUM_THREADS"} {
			env[name] = n
		}
	}
	if req.TTY {
		env["TERM"] = "xterm-256color"
	}
	maps.Copy(env, r.ImageEnv)
	if r.Egress != nil {
		maps.Copy(env, r.Egress.Env)
	}
	maps.Copy(env, r.Sandbox.Env)
	maps.Copy(env, req.Env)
	list := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// StartExec starts a program that outlives the call.
func (m *Manager) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	var info agent.ExecInfo
	err := m.with(id, func(b *box, host *agent.Host) error {
		start, err := b.execStart(req)
		if err != nil {
			return err
		}
		if info, err = host.Start(ctx, start); err != nil {
			return b.execError(err)
		}
		m.execEvent(boxed.EventExec, b, boxed.ExecID(start.ID), nil)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return execOf(info), nil
}

// Attach joins an exec. One that belongs to a client that went away with a
// daemon's restart becomes this caller's: leaving ends it.
func (m *Manager) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	status := lost("")
	err := m.with(id, func(b *box, host *agent.Host) error {
		info, err := b.findExec(ctx, host, exec)
		if err != nil {
			return err
		}
		own := !info.Detached && info.Exit == nil && info.Attached == 0 && !req.NoFollow
		look, stdin := b.watch(ctx, host, string(exec), req.Stdin)
		defer look.leave()
		stop := b.control(ctx, host, look, req.Resize, req.Signals)
		defer stop()
		at := agent.Attach{ID: string(exec), Stdout: req.StdoutOffset, Stderr: req.StderrOffset, NoFollow: req.NoFollow, Own: own}
		exit, err := host.Attach(ctx, at, agent.Streams{
			Stdin: stdin, Stdout: req.Stdout, Stderr: req.Stderr,
			Gap: func(stderr bool, n int64) {
				if req.Gap != nil {
					req.Gap(map[bool]string{false: "stdout", true: "stderr"}[stderr], n)
				}
			},
		})
		if err == nil && req.NoFollow && exit.Reason == "" {
			status = boxed.ExitStatus{}
			return nil
		}
		status, err = b.ended(exit, err)
		return err
	})
	return status, err
}

func (b *box) findExec(ctx context.Context, host *agent.Host, exec boxed.ExecID) (agent.ExecInfo, error) {
	infos, err := host.Execs(ctx)
	if err != nil {
		return agent.ExecInfo{}, b.linkError(err)
	}
	for _, info := range infos {
		if info.ID == string(exec) {
			return info, nil
		}
	}
	return agent.ExecInfo{}, boxed.Errorf(boxed.CodeNotFound, "sandbox %s has no exec %q", b.id, clip(string(exec))).With("exec", clip(string(exec)))
}

// GetExec describes one exec.
func (m *Manager) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	var found *boxed.Exec
	err := m.with(id, func(b *box, host *agent.Host) error {
		info, err := b.findExec(ctx, host, exec)
		found = execOf(info)
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// ListExecs lists execs, oldest first.
func (m *Manager) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	list := []boxed.Exec{}
	err := m.with(id, func(b *box, host *agent.Host) error {
		infos, err := host.Execs(ctx)
		for _, info := range infos {
			list = append(list, *execOf(info))
		}
		return b.linkError(err)
	})
	return list, err
}

// SignalExec signals an exec's leader or tree.
func (m *Manager) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		err := b.linkError(host.Signal(ctx, string(exec), signal, tree))
		if e := new(boxed.Error); errors.As(err, &e) && e.Code == boxed.CodeInvalid {
			e.WithField("signal")
		}
		return err
	})
}

// KillExec ends an exec's tree, also what its leader left behind.
func (m *Manager) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	return m.with(id, func(b *box, host *agent.Host) error {
		return b.linkError(host.Kill(ctx, string(exec), agent.ExitCanceled))
	})
}

// execOf is what an agent says of an exec, bounded.
func execOf(i agent.ExecInfo) *boxed.Exec {
	e := &boxed.Exec{
		ID: boxed.ExecID(clip(i.ID)), Language: clip(i.Language), TTY: i.TTY, Detached: i.Detached,
		Running: i.Exit == nil, Viewers: i.Attached, Linger: boxed.Duration(time.Duration(i.LingerMS) * time.Millisecond), PID: i.PID, Processes: i.Processes, StartedAt: i.Started, EndedAt: i.Ended,
	}
	for n, arg := range i.Args {
		if n == 256 {
			e.Args = append(e.Args, fmt.Sprintf("… and %d more", len(i.Args)-n))
			break
		}
		e.Args = append(e.Args, clip(arg))
	}
	if i.Exit != nil {
		status := exitStatus(*i.Exit)
		e.Status = &status
	}
	return e
}
