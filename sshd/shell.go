package sshd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/vt"
)

// A shell on a terminal is a program of its own: it outlives a link that is lost, and
// whoever comes back within lingerFor is in it again.
const (
	lingerFor  = boxed.Duration(30 * time.Minute)
	scrollBack = 128 << 10 // bytes of it that are shown again
)

// How often a terminal whose stream broke is taken up without a byte coming, and the
// pause between.
const (
	takeUps     = 30
	takeUpPause = time.Second
)

// terminal runs a shell, or another program, on a terminal that can be come back to.
// argvs are tried in turn until one is there.
func (x *session) terminal(t *target, argvs [][]string, env map[string]string) (boxed.ExitStatus, error) {
	e, back, err := x.comeBack(t, argvs)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	var at int64
	if back {
		if at, err = x.showAgain(t.id, e.ID); err != nil {
			return boxed.ExitStatus{}, err
		}
	} else {
		for _, argv := range argvs {
			e, err = x.s.cfg.Service.StartExec(x.ctx, t.id, boxed.ExecRequest{
				Args: argv, Env: env, TTY: true, Size: x.size(), OpenStdin: true, Linger: lingerFor,
			})
			if boxed.CodeOf(err) != boxed.CodeStartFailed {
				break
			}
		}
		if err != nil {
			return boxed.ExitStatus{}, err
		}
	}
	x.greet(t, e, back)
	ctx, stop := context.WithCancel(x.ctx)
	defer stop()
	x.watch(ctx, t)
	status, err := x.follow(t.id, e.ID, at, x.sizes(ctx, back && e.Viewers == 0))
	if errors.Is(context.Cause(x.ctx), errIdle) { // nobody shall come back to it
		late, cancel := context.WithTimeout(context.WithoutCancel(x.ctx), endLimit)
		defer cancel()
		x.s.cfg.Service.KillExec(late, t.id, e.ID)
	}
	return status, err
}

// comeBack finds the shell that somebody left without ending it; with +attach that
// which was started last.
func (x *session) comeBack(t *target, argvs [][]string) (*boxed.Exec, bool, error) {
	if t.made || t.fresh {
		return nil, false, nil
	}
	execs, err := x.s.cfg.Service.ListExecs(x.ctx, t.id)
	if err != nil {
		return nil, false, err
	}
	slices.Reverse(execs) // the youngest first
	for i, e := range execs {
		same := slices.ContainsFunc(argvs, func(argv []string) bool { return slices.Equal(argv, e.Args) })
		if e.Running && e.TTY && e.Linger > 0 && same && (t.attach || e.Viewers == 0) {
			return &execs[i], true, nil
		}
	}
	if t.attach {
		return nil, false, boxed.Errorf(boxed.CodeNotFound, "nobody has a shell in %s; start one: ssh -t %[1]s@…", t.ref)
	}
	return nil, false, nil
}

// showAgain writes the end of what a terminal has shown, and returns how much it has
// shown in all.
func (x *session) showAgain(id boxed.ID, exec boxed.ExecID) (int64, error) {
	kept, at := tail{most: scrollBack}, int64(0)
	_, err := x.s.cfg.Service.Attach(x.ctx, id, exec, boxed.AttachRequest{
		NoFollow: true, Stdout: writer(func(p []byte) (int, error) {
			at += int64(len(p))
			return kept.Write(p)
		}),
		Gap: func(_ string, n int64) { at += n },
	})
	if err != nil {
		return 0, err
	}
	if _, err := vt.NewFilter(x.ch).Write(kept.lines()); err != nil {
		return 0, err
	}
	_, err = x.ch.Write([]byte("\r\n")) // what we say is not part of its last line
	return at, err
}

// tail keeps the end of what is written to it.
type tail struct {
	most int
	buf  []byte
	cut  bool
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - t.most; over > 0 {
		t.buf, t.cut = t.buf[:copy(t.buf, t.buf[over:])], true
	}
	return len(p), nil
}

// lines is what is kept, from the first whole line on.
func (t *tail) lines() []byte {
	if i := bytes.IndexByte(t.buf, '\n'); t.cut && i >= 0 {
		return t.buf[i+1:]
	}
	return t.buf
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// sizes passes the client's window sizes on. Who comes back has its program draw
// everything again, by a size that is not quite it.
func (x *session) sizes(ctx context.Context, again bool) <-chan boxed.Size {
	sizes := make(chan boxed.Size)
	send := func(size boxed.Size) bool {
		select {
		case sizes <- size:
			return true
		case <-ctx.Done():
			return false
		}
	}
	x.running.Go(func() {
		if size := x.size(); again {
			send(boxed.Size{Cols: size.Cols, Rows: max(size.Rows, 2) - 1})
		}
		for size, ok := x.size(), true; ok && send(size); {
			select {
			case size = <-x.resize:
				x.recorded.resized(size)
			case <-ctx.Done():
				return
			}
		}
	})
	return sizes
}

// follow is attached to a terminal until its program ends. A stream that breaks
// between here and the sandbox is taken up where it was.
func (x *session) follow(id boxed.ID, exec boxed.ExecID, from int64, sizes <-chan boxed.Size) (boxed.ExitStatus, error) {
	var at atomic.Int64
	at.Store(from)
	out := writer(func(p []byte) (int, error) {
		n, err := x.ch.Write(p)
		x.recorded.shown(p[:n])
		at.Add(int64(n))
		x.touch()
		return n, err
	})
	reached, tries := from, 0
	for {
		in := x.stdin()
		status, err := x.s.cfg.Service.Attach(x.ctx, id, exec, boxed.AttachRequest{
			StdoutOffset: at.Load(), Stdin: in, Stdout: out, Resize: sizes, Signals: x.signals,
			Gap: func(_ string, n int64) { at.Add(n) },
		})
		in.leave()
		switch code := boxed.CodeOf(err); {
		case err == nil || x.ctx.Err() != nil, code != boxed.CodeLost && code != boxed.CodeNotReady:
			return status, err
		}
		if now := at.Load(); now > reached {
			reached, tries = now, 0
		}
		if tries++; tries > takeUps {
			return status, fmt.Errorf("%w; the shell may live on: ssh %s@… comes back to it for %s", err, id, lingerFor)
		}
		select {
		case <-time.After(takeUpPause):
		case <-x.ctx.Done():
			return status, x.ctx.Err()
		}
	}
}
