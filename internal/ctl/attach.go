package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// streams says how this process is joined with a program in a sandbox.
type streams struct {
	stdin bool // our stdin is the program's; else it has none
	tty   bool // it runs on a terminal
	// grace is how long it may go on after a TERM or HUP was passed on; 0: as
	// long as it likes.
	grace time.Duration
}

// forcedAfter is how long an ended call may take to return.
const forcedAfter = 5 * time.Second

var (
	errKilledHere = errors.New("ended by a signal")
	errNoReader   = errors.New("nobody reads the output")
)

// check refuses a terminal where there is none.
func (s streams) check(a *app) error {
	if s.tty && s.stdin && !isTerminal(a.stdin) {
		return usagef("stdin is not a terminal").hint("leave out -t: programs then read and write pipes")
	}
	return nil
}

// attachment joins this process with one program until that has ended.
type attachment struct {
	a       *app
	s       streams
	in      *interrupts
	cancel  context.CancelCauseFunc
	signals chan string
	sizes   chan boxed.Size
	started chan struct{} // closed when the program runs
	restore func()        // of the terminal
	raw     sync.Mutex    // guards restore

	watchers sync.WaitGroup // of the window's size

	asked int // ending signals so far; only the interrupts' goroutine uses it
}

// attach runs one program with exec, which gets a request with all streams set
// up, and returns boxedctl's exit status. It prints what the status does not
// say. It never waits for a read of our own stdin.
func (a *app) attach(parent context.Context, in *interrupts, s streams, exec func(context.Context, boxed.ExecRequest) (boxed.ExitStatus, error)) (int, error) {
	if err := s.check(a); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	at := &attachment{
		a: a, s: s, in: in, cancel: cancel, started: make(chan struct{}), restore: func() {},
		signals: make(chan string, 16), sizes: make(chan boxed.Size, 1),
	}
	in.to(at.signal)
	defer in.to(nil)
	defer at.restoreTerminal()

	type result struct {
		st  boxed.ExitStatus
		err error
	}
	done := make(chan result, 1)
	watching, stopWatching := context.WithCancel(ctx)
	defer at.watchers.Wait()
	defer stopWatching()
	go func() { // ends with exec; when forced we leave it behind and exit
		st, err := exec(ctx, at.request(watching))
		done <- result{st, err}
	}()
	forced := make(chan struct{})
	defer context.AfterFunc(ctx, func() { time.AfterFunc(forcedAfter, sync.OnceFunc(func() { close(forced) })) })()
	select {
	case r := <-done:
		at.restoreTerminal()
		return at.status(ctx, r.st, r.err)
	case <-forced:
		at.restoreTerminal()
		return at.status(ctx, boxed.ExitStatus{}, context.Canceled)
	}
}

// request has the stream fields of an exec.
func (at *attachment) request(ctx context.Context) boxed.ExecRequest {
	req := boxed.ExecRequest{
		TTY: at.s.tty, OpenStdin: at.s.stdin, Signals: at.signals, Started: at.onStart(ctx),
		Stdout: &discardAfterError{w: at.a.stdout, failed: at.outputFailed},
		Stderr: &discardAfterError{w: at.a.stderr, failed: at.outputFailed},
	}
	if at.s.stdin {
		req.Stdin = &lateReader{r: at.a.stdin, ready: at.started}
	}
	if at.s.tty {
		if req.Size = terminalSize(at.a.stdout); req.Size == (boxed.Size{}) {
			req.Size = terminalSize(at.a.stdin)
		}
		req.Resize = at.sizes
	}
	return req
}

// onStart makes the terminal raw only once the program runs: until then Ctrl-C
// must still end boxedctl.
func (at *attachment) onStart(ctx context.Context) func(boxed.ExecID) {
	return func(boxed.ExecID) {
		if at.s.tty {
			if at.s.stdin {
				at.raw.Lock()
				if restore, err := makeRaw(at.a.stdin); err == nil && ctx.Err() == nil {
					at.restore = restore
				} else if err == nil {
					restore()
				}
				at.raw.Unlock()
			}
			enableEscapes(at.a.stdout) // a console that cannot shows them as they are
			if window, ok := at.window(); ok {
				at.watchers.Go(func() { watchSize(ctx, window, at.sizes) })
			}
		}
		close(at.started)
	}
}

// window is the terminal whose size the program's follows.
func (at *attachment) window() (*os.File, bool) {
	if f, ok := at.a.stdout.(*os.File); ok && isTerminal(f) {
		return f, true
	}
	return at.a.stdin, isTerminal(at.a.stdin)
}

func (at *attachment) restoreTerminal() {
	at.raw.Lock()
	defer at.raw.Unlock()
	at.restore()
}

// signal passes a signal on. Before the program runs the first one ends the
// call; afterwards the second one does, which kills the program.
func (at *attachment) signal(s os.Signal) {
	at.asked++
	running := false
	select {
	case <-at.started:
		running = true
	default:
	}
	if !running || at.asked > 1 {
		at.cancel(errKilledHere)
		return
	}
	name := signalName(s)
	select {
	case at.signals <- name:
	default: // the link does not take any more: the second signal will end it
	}
	if at.s.grace > 0 && (name == "TERM" || name == "HUP") {
		time.AfterFunc(at.s.grace, func() { at.cancel(errKilledHere) })
	}
}

func (at *attachment) outputFailed(error) { at.cancel(errNoReader) }

// status turns the end of an exec into an exit status.
func (at *attachment) status(ctx context.Context, st boxed.ExitStatus, err error) (int, error) {
	switch context.Cause(ctx) {
	case errNoReader:
		return exitPipe, nil
	case errKilledHere:
		if err != nil || st.Reason == boxed.ReasonCanceled || st.Reason == boxed.ReasonLost {
			return at.in.status(), nil
		}
	}
	if err != nil {
		return 0, err
	}
	if text := explain(st); text != "" {
		fmt.Fprintf(at.a.stderr, "boxedctl: %s\n", table.Inert(text))
	}
	return exitOfProgram(st), nil
}

// lateReader reads r only after ready: what a program that cannot start was to
// read is left to the next one.
type lateReader struct {
	r     io.Reader
	ready <-chan struct{}
}

func (l *lateReader) Read(p []byte) (int, error) {
	<-l.ready
	return l.r.Read(p)
}

// sendLatest puts size into a channel of one element, in place of an older one.
func sendLatest(sizes chan boxed.Size, size boxed.Size) {
	if size == (boxed.Size{}) {
		return
	}
	select {
	case <-sizes:
	default:
	}
	select {
	case sizes <- size:
	default:
	}
}
