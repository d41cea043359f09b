package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
	"golang.org/x/sys/unix"
)

// ready holds an interpreter that was started ahead of its program. It has set
// itself up, which is most of what a short program takes, and waits in the open of
// its main file, which is a FIFO still. Each serves one exec, and was executed for
// it alone, with the environment, directory and streams that it would have had
// anyway. So two programs share nothing of an interpreter, no variable,
// descriptor, import hook or random seed, as they would if both were forked from
// one.
//
// What an interpreter finds as it starts (site-packages, say) must be what it
// would find now. So one that waits is for the next exec only, and only while
// nothing was written through this program; and it is started while nothing else
// runs in the sandbox that could write.
type ready struct {
	system *system
	turn   sync.Mutex // held while one is being started: whoever wants it waits for that

	mu      sync.Mutex
	waiting *interpreter
	change  int64              // counts what may change what an interpreter finds
	last    *agent.ReadyConfig // what the last exec would have wanted
	timer   *time.Timer        // of the next start
}

// interpreter waits for its program.
type interpreter struct {
	agent.ReadyConfig
	launch launch
	child  *child
	mark   uint64
	change int64
}

const (
	readyAfter = 30 * time.Millisecond  // of quiet: who ends at once pays nothing for the next one
	readyFor   = time.Minute            // after an exec; a sandbox that nobody has used keeps its own
	readyStale = 300 * time.Millisecond // until one that nobody can use is ended
	readyCode  = 48 << 10               // bytes of a program that surely fit into a FIFO
	readyOpen  = 2 * time.Second        // for one that is still setting itself up
)

// codingLine is in a program that names its encoding: Python then seeks in the
// file, which a FIFO does not let it.
var codingLine = regexp.MustCompile(`\A(?:[^\n]*\n)?[ \t\f]*#[^\n]*coding[:=]`)

// count is how many interpreters wait.
func (r *ready) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting == nil {
		return 0
	}
	return 1
}

// prepareFor starts one, unless something was done in the sandbox already.
func (r *ready) prepareFor(c *agent.ReadyConfig) {
	r.mu.Lock()
	unused := r.change == 0 && r.waiting == nil
	r.mu.Unlock()
	if c != nil && unused {
		go r.start(*c, 0)
	}
}

// changed takes note that files were changed through this program: one that
// waits may have set itself up otherwise than it would now.
func (r *ready) changed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.change++
	if w := r.waiting; w != nil {
		r.last, r.waiting = &w.ReadyConfig, nil
		time.AfterFunc(readyStale, func() { r.end(w) })
	}
	r.lookAheadLocked()
}

// take returns the interpreter that waits, if it can serve an exec that is about
// to start, and takes note of the exec.
func (r *ready) take(start *agent.ExecStart) *interpreter {
	r.turn.Lock()
	defer r.turn.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waiting
	r.waiting = nil
	fits := w != nil && w.change == r.change && w.serves(start)
	r.change++
	if w != nil && !fits {
		time.AfterFunc(readyStale, func() { r.end(w) })
	}
	r.last = nil
	if start.Language == "python" && !start.TTY && !start.Stdin && !start.Rushed {
		r.last = &agent.ReadyConfig{Language: start.Language, Env: start.Env, Dir: start.Dir}
	}
	if !fits {
		return nil
	}
	return w
}

func (w *interpreter) serves(start *agent.ExecStart) bool {
	return start.Language == w.Language && start.Dir == w.Dir && !start.TTY && !start.Stdin &&
		len(start.Code) <= readyCode && !codingLine.Match(start.Code) && slices.Equal(start.Env, w.Env)
}

// released looks ahead after an exec has ended.
func (r *ready) released() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lookAheadLocked()
}

// lookAheadLocked starts one in a moment, unless something changes again.
func (r *ready) lookAheadLocked() {
	if r.last == nil || r.waiting != nil {
		return
	}
	if r.timer != nil {
		r.timer.Stop()
	}
	c, change := *r.last, r.change
	r.timer = time.AfterFunc(readyAfter, func() { r.start(c, change) })
}

// start starts one, if nothing has changed since change.
func (r *ready) start(c agent.ReadyConfig, change int64) {
	r.turn.Lock()
	defer r.turn.Unlock()
	r.mu.Lock()
	late := r.change != change || r.waiting != nil
	r.mu.Unlock()
	if late || c.Language != "python" || len(pids()) > 1 {
		return
	}
	w := &interpreter{ReadyConfig: c, change: change}
	w.launch.start = agent.ExecStart{ID: rand.Text()[:10], Language: c.Language, Env: slices.Clone(c.Env), Dir: c.Dir}
	var err error
	if w.child, w.mark, err = r.system.start(&w.launch, w.launch.waitForCode); err != nil {
		r.system.discard(&w.launch) // an image without Python, say
		return
	}
	w.launch.streams.closeChildEnds()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.change != change {
		go r.end(w)
		return
	}
	r.waiting = w
	if change > 0 {
		time.AfterFunc(readyFor, func() { r.expire(w) })
	}
}

func (r *ready) expire(w *interpreter) {
	r.mu.Lock()
	mine := r.waiting == w
	if mine {
		r.waiting = nil
	}
	r.mu.Unlock()
	if mine {
		r.end(w)
	}
}

// end ends one that nobody will use.
func (r *ready) end(w *interpreter) {
	if err := killTree(w.mark); err != nil {
		fmt.Fprintln(os.Stderr, "boxed-agent: end a waiting interpreter:", err)
	}
	w.launch.streams.closeOurEnds()
	r.system.discard(&w.launch)
}

// serve gives a waiting interpreter its program. If it cannot take it, it is
// ended, and the exec starts one of its own.
func (r *ready) serve(w *interpreter, code []byte) (*process, bool) {
	oom := oomKills()
	deadline := time.Now().Add(readyOpen)
	for {
		err := r.system.user.do(func() error { return w.launch.give(code) })
		if err == nil {
			return r.system.process(&w.launch, w.child, w.mark, oom), true
		}
		if !errors.Is(err, unix.ENXIO) || time.Now().After(deadline) {
			go r.end(w)
			return nil, false
		}
		select { // it is not there yet
		case <-w.child.ended:
			deadline = time.Time{}
		case <-time.After(500 * time.Microsecond):
		}
	}
}

// waitForCode prepares a launch whose main file is a FIFO, with the user's rights.
func (l *launch) waitForCode() (err error) {
	if err = checkDir(l.start.Dir); err == nil {
		l.argv, l.codeDir, err = prepareCode(&l.start, func(name string) error { return unix.Mkfifo(name, 0o600) })
	}
	return err
}

// give puts the code in the place of the FIFO, where tracebacks and imports look
// for it, and lets whoever waits in the open of the FIFO read it. ENXIO: nobody
// waits there yet.
func (l *launch) give(code []byte) error {
	name := l.argv[1]
	fifo, err := unix.Open(name, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fifo)
	var st unix.Stat_t
	if err := unix.Fstat(fifo, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return errors.Join(err, syscall.EINVAL)
	}
	file := path.Join(l.codeDir, ".new")
	if err := writeFile(file, code); err != nil {
		return err
	}
	if err := unix.Rename(file, name); err != nil {
		return err
	}
	n, err := unix.Write(fifo, code)
	if err == nil && n < len(code) {
		err = syscall.EAGAIN
	}
	return err
}
