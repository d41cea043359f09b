package sandboxtest

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// Program is what a scripted program does; it returns its exit code. It must
// return soon after p's context has ended: nothing else can end it.
type Program func(p *Proc) int

// Proc is one process of a scripted program.
type Proc struct {
	Args           []string
	Env            map[string]string
	Dir            string
	TTY            bool
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	tree    *process
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{}
	signal  string // that killed it; guarded by tree.mu, as is trapped
	trapped chan string
}

// Context ends when the process is killed.
func (p *Proc) Context() context.Context { return p.ctx }

// Sleep waits, and reports whether all of d has passed.
func (p *Proc) Sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		p.tree.c.gate.wait()
		return p.ctx.Err() == nil
	case <-p.ctx.Done():
		return false
	}
}

// Trap has all signals but KILL sent to the channel.
func (p *Proc) Trap() <-chan string {
	p.tree.mu.Lock()
	defer p.tree.mu.Unlock()
	p.trapped = make(chan string, 16)
	return p.trapped
}

// Fork runs a child of the same exec, which may outlive p.
func (p *Proc) Fork(child Program) {
	p.tree.run(&Proc{Args: p.Args, Env: p.Env, Dir: p.Dir, TTY: p.TTY, Stdin: strings.NewReader("")}, child)
}

// Size is the size of the terminal.
func (p *Proc) Size() (cols, rows uint16) {
	p.tree.mu.Lock()
	defer p.tree.mu.Unlock()
	return p.tree.cols, p.tree.rows
}

// OOM kills the process as the memory limit would.
func (p *Proc) OOM() int {
	p.tree.mu.Lock()
	p.tree.oom = true
	p.tree.mu.Unlock()
	p.kill("KILL")
	return 0
}

// Listen makes a port of the sandbox's loopback.
func (p *Proc) Listen(port uint16) (net.Listener, error) {
	c := p.tree.c
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done || c.listens[port] != nil {
		l.Close()
		return nil, syscall.EADDRINUSE
	}
	c.listens[port] = l
	context.AfterFunc(p.ctx, func() {
		l.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.listens[port] == l {
			delete(c.listens, port)
		}
	})
	return l, nil
}

func (p *Proc) kill(signal string) {
	p.tree.mu.Lock()
	if p.signal == "" {
		p.signal = signal
	}
	p.tree.mu.Unlock()
	p.cancel()
}

// process is one exec's tree of processes: an agent.Process.
type process struct {
	c      *container
	pid    int
	tty    bool
	stdin  io.WriteCloser
	out    *pipe
	errs   *pipe
	leader *Proc

	mu         sync.Mutex
	living     map[*Proc]struct{}
	cols, rows uint16
	code       int
	oom        bool
}

// signals are those that a guest knows, and whether they end who has no handler.
var signals = map[string]struct {
	number int
	ends   bool
}{
	"HUP": {1, true}, "INT": {2, true}, "QUIT": {3, true}, "KILL": {9, true}, "USR1": {10, true}, "USR2": {12, true},
	"PIPE": {13, true}, "TERM": {15, true}, "CHLD": {17, false}, "CONT": {18, false}, "WINCH": {28, false},
}

// Spawn implements agent.Handler.
func (c *container) Spawn(start agent.ExecStart) (agent.Process, error) {
	args := make([]string, len(start.Argv))
	for i, arg := range start.Argv {
		if args[i] = string(arg); strings.ContainsRune(args[i], 0) {
			return nil, &agent.Error{Code: agent.ErrInvalid, Message: "an argument holds a zero byte", Path: "args"}
		}
	}
	if info, err := c.Stat(start.Dir); err != nil || info.Type != "dir" {
		return nil, &agent.Error{Code: agent.ErrInvalid, Message: "working directory " + start.Dir + " does not exist", Path: "dir"}
	}
	switch start.Language {
	case "":
	case "bash":
		args = []string{"sh", "-c", string(start.Code)}
	default:
		return nil, &agent.Error{Code: agent.ErrNotFound, Message: "this image has no " + start.Language, Path: "language"}
	}
	if len(args) == 0 || args[0] == "" {
		return nil, &agent.Error{Code: agent.ErrInvalid, Message: "no program is named", Path: "args"}
	}
	c.d.mu.Lock()
	program := c.d.programs[args[0]]
	c.d.mu.Unlock()
	if program == nil {
		program = builtins[args[0]]
	}
	if program == nil {
		return nil, &agent.Error{Code: agent.ErrNotFound, Message: args[0] + ": no such program", Path: args[0]}
	}
	p := &process{c: c, tty: start.TTY, cols: start.Cols, rows: start.Rows, living: map[*Proc]struct{}{}, out: newPipe(c)}
	if p.cols == 0 || p.rows == 0 {
		p.cols, p.rows = 80, 24
	}
	leader := &Proc{Args: args, Env: map[string]string{}, Dir: start.Dir, TTY: start.TTY, Stdin: strings.NewReader("")}
	for _, kv := range start.Env {
		name, value, _ := strings.Cut(kv, "=")
		leader.Env[name] = value
	}
	if !start.TTY {
		p.errs = newPipe(c)
	}
	if start.Stdin || start.TTY {
		r, w := io.Pipe()
		leader.Stdin, p.stdin = r, w
		if start.TTY {
			p.stdin = &terminal{PipeWriter: w, p: p}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return nil, errors.New("the sandbox ends")
	}
	c.pids++
	p.pid, p.leader = c.pids+1, leader
	c.procs[p] = struct{}{}
	p.run(leader, program)
	return p, nil
}

// run starts one process of the tree.
func (p *process) run(proc *Proc, program Program) {
	proc.tree, proc.done = p, make(chan struct{})
	proc.ctx, proc.cancel = context.WithCancel(p.c.ctx)
	outputs := []*pipe{p.out}
	proc.Stdout = &writer{p.out, proc}
	proc.Stderr = proc.Stdout
	if p.errs != nil {
		outputs = append(outputs, p.errs)
		proc.Stderr = &writer{p.errs, proc}
	}

	for _, out := range outputs {
		out.open()
		context.AfterFunc(proc.ctx, out.wake)
	}
	if r, ok := proc.Stdin.(*io.PipeReader); ok {
		context.AfterFunc(proc.ctx, func() { r.CloseWithError(syscall.EPIPE) })
	}
	p.mu.Lock()
	p.living[proc] = struct{}{}
	p.mu.Unlock()
	p.c.d.running.Go(func() {
		code := program(proc)
		proc.cancel()
		for _, out := range outputs {
			out.leave()
		}
		p.mu.Lock()
		if proc == p.leader {
			p.code = code
		}
		delete(p.living, proc)
		last := len(p.living) == 0
		p.mu.Unlock()
		close(proc.done)
		if last {
			p.c.mu.Lock()
			delete(p.c.procs, p)
			p.c.mu.Unlock()
		}
	})
}

func (c *container) killAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := range c.procs {
		p.mu.Lock()
		for proc := range p.living {
			if proc.signal == "" {
				proc.signal = "KILL"
			}
			proc.cancel()
		}
		p.mu.Unlock()
	}
}

func (p *process) PID() int              { return p.pid }
func (p *process) Stdin() io.WriteCloser { return p.stdin }
func (p *process) Stdout() agent.Output  { return p.out }
func (p *process) Stderr() agent.Output {
	if p.errs == nil {
		return nil
	}
	return p.errs
}

func (p *process) Wait() agent.WaitStatus {
	<-p.leader.done
	p.mu.Lock()
	defer p.mu.Unlock()
	if signal := p.leader.signal; signal != "" {
		return agent.WaitStatus{Code: 128 + signals[signal].number, Signal: signal, OOM: p.oom}
	}
	return agent.WaitStatus{Code: p.code}
}

func (p *process) WaitFor(d time.Duration) (agent.WaitStatus, bool) {
	select {
	case <-p.leader.done:
		return p.Wait(), true
	case <-time.After(d):
		return agent.WaitStatus{}, false
	}
}

func (p *process) Signal(name string, tree bool) error {
	name = strings.TrimPrefix(strings.ToUpper(name), "SIG")
	sig, known := signals[name]
	if !known {
		return &agent.Error{Code: agent.ErrInvalid, Message: name + " is not a signal", Path: "signal"}
	}
	p.mu.Lock()
	var to []*Proc
	for proc := range p.living {
		if tree || proc == p.leader {
			to = append(to, proc)
		}
	}
	p.mu.Unlock()
	for _, proc := range to {
		p.mu.Lock()
		trapped := proc.trapped
		p.mu.Unlock()
		switch {
		case name == "KILL" || trapped == nil && sig.ends:
			proc.kill(name)
		case trapped != nil:
			select {
			case trapped <- name:
			default:
			}
		}
	}
	return nil
}

func (p *process) KillTree() error {
	for {
		p.mu.Lock()
		var proc *Proc
		for proc = range p.living {
			break
		}
		p.mu.Unlock()
		if proc == nil {
			return nil
		}
		proc.kill("KILL")
		<-proc.done
	}
}

func (p *process) Resize(cols, rows uint16) error {
	if !p.tty {
		return &agent.Error{Code: agent.ErrConflict, Message: "the exec has no terminal"}
	}
	p.mu.Lock()
	p.cols, p.rows = cols, rows
	p.mu.Unlock()
	return p.Signal("WINCH", false)
}

func (p *process) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.living)
}

func (p *process) Release() {
	if p.stdin != nil {
		p.stdin.Close()
	}
}

// terminal is the line discipline: echo, and the characters that mean something.
type terminal struct {
	*io.PipeWriter
	p    *process
	line []byte // a program gets whole lines
}

func (t *terminal) Write(b []byte) (int, error) {
	echo := &writer{t.p.out, t.p.leader}
	for i, c := range b {
		switch c {
		case 3:
			t.p.Signal("INT", true)
		case 4:
			t.PipeWriter.Close()
		default:
			if c == '\r' {
				c = '\n'
			}
			echo.Write([]byte{c})
			if t.line = append(t.line, c); c != '\n' {
				continue
			}
			line := t.line
			t.line = nil
			if _, err := t.PipeWriter.Write(line); err != nil {
				return i, err
			}
		}
	}
	return len(b), nil
}
