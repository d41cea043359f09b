package sshd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	gossh "golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// Bounds of a session's requests.
const (
	maxEnv      = 64 // variables
	maxEnvBytes = 32 << 10
	ourStatus   = 255 // the exit status of what is our fault, and never a program's
)

// session is one session channel. Requests are answered by one goroutine, which
// waits for nothing: a client's resizes and signals pile up nowhere (gliderlabs/ssh
// blocks there).
type session struct {
	s   *Server
	c   *caller
	ch  gossh.Channel
	ctx context.Context

	env      map[string]string
	envBytes int
	tty      bool
	sftp     bool
	agent    bool // the client's is lent
	recorded *recording
	term     string
	window   atomic.Uint32   // its size
	resize   chan boxed.Size // capacity 1: only the last matters
	signals  chan string
	pumped   sync.Once
	input    *input
	touched  atomic.Int64 // when something was typed or shown last, in ns
	leave    context.CancelCauseFunc
	begun    bool
	program  func() // what begin was asked for and the loop starts
	running  sync.WaitGroup
}

// session serves a session channel to its end.
func (s *Server) session(c *caller, nc gossh.NewChannel) {
	ch, requests, err := nc.Accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer context.AfterFunc(s.away, func() { cancel(context.Cause(s.away)) })()
	x := &session{
		s: s, c: c, ch: ch, ctx: ctx, leave: cancel, env: map[string]string{},
		resize: make(chan boxed.Size, 1), signals: make(chan string, 16),
	}
	defer x.running.Wait()
	defer cancel(nil) // the channel is closed: nobody waits for its program any more
	for r := range requests {
		ok := x.request(r)
		if r.WantReply {
			r.Reply(ok, nil)
		}
		if x.program != nil { // after the answer: its end closes the channel
			program := x.program
			x.running.Go(func() {
				defer s.survive(c.conn)
				program()
			})
			x.program = nil
		}
	}
}

// request does what one request asks, and reports whether it may.
func (x *session) request(r *gossh.Request) bool {
	switch r.Type {
	case "env":
		var v struct{ Name, Value string }
		return gossh.Unmarshal(r.Payload, &v) == nil && !x.begun && x.setEnv(v.Name, v.Value)
	case "pty-req":
		var v struct {
			Term                      string
			Cols, Rows, Width, Height uint32
			Modes                     string
		}
		if gossh.Unmarshal(r.Payload, &v) != nil || x.begun || x.tty || x.c.who.NoTerminal {
			return false
		}
		x.tty, x.term = true, v.Term
		x.setSize(sizeOf(v.Cols, v.Rows))
		return true
	case "window-change":
		var v struct{ Cols, Rows, Width, Height uint32 }
		if gossh.Unmarshal(r.Payload, &v) != nil || !x.tty {
			return false
		}
		select { // the last one counts
		case <-x.resize:
		default:
		}
		x.setSize(sizeOf(v.Cols, v.Rows))
		x.resize <- x.size()
		return true
	case "signal":
		var v struct{ Name string }
		if gossh.Unmarshal(r.Payload, &v) != nil {
			return false
		}
		select {
		case x.signals <- v.Name:
			return true
		default:
			return false
		}
	case "auth-agent-req@openssh.com":
		if x.begun || !x.s.allows(AllowAgentForwarding) {
			return false
		}
		x.agent = true
		return true
	case "subsystem":
		var v struct{ Name string }
		if gossh.Unmarshal(r.Payload, &v) != nil || v.Name != "sftp" || x.tty || x.begun {
			return false
		}
		x.sftp = true
		return x.begin("")
	case "shell":
		return x.begin("")
	case "exec":
		var v struct{ Command string }
		return gossh.Unmarshal(r.Payload, &v) == nil && v.Command != "" && x.begin(v.Command)
	}
	return false // other subsystems, X11
}

// sizeOf bounds a terminal's size; 0 means 80×24, which the agent makes of it.
func sizeOf(cols, rows uint32) boxed.Size {
	return boxed.Size{Cols: uint16(min(cols, 4096)), Rows: uint16(min(rows, 4096))}
}

func (x *session) setSize(s boxed.Size) { x.window.Store(uint32(s.Cols)<<16 | uint32(s.Rows)) }

// size is the window's now.
func (x *session) size() boxed.Size {
	packed := x.window.Load()
	return boxed.Size{Cols: uint16(packed >> 16), Rows: uint16(packed)}
}

// setEnv takes a variable that a client may set. What it may not is left out and
// said so: OpenSSH goes on without it.
func (x *session) setEnv(name, value string) bool {
	if !x.s.mayEnv(name) || strings.ContainsRune(value, 0) || len(x.env) >= maxEnv || x.envBytes+len(name)+len(value) > maxEnvBytes {
		return false
	}
	x.envBytes += len(name) + len(value)
	x.env[name] = value
	return true
}

// mayEnv reports whether a client may set a variable: those that say how it shows
// text, and what the operator allows. Others decide what programs load.
func (s *Server) mayEnv(name string) bool {
	for _, allowed := range append([]string{"LANG", "LC_*", "TERM", "COLORTERM"}, s.cfg.Env...) {
		if prefix, star := strings.CutSuffix(allowed, "*"); name == allowed || star && strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// begin has the one program of the session started.
func (x *session) begin(command string) bool {
	if x.begun {
		return false
	}
	x.begun = true
	x.program = func() {
		status, err := x.run(command)
		x.end(status, err)
	}
	return true
}

// run finds the sandbox and runs the program in it.
func (x *session) run(command string) (boxed.ExitStatus, error) {
	if x.s.inLobby(x.c) {
		return x.lobby(command)
	}
	t, err := x.s.enter(x.c)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	defer x.leaveTarget(t)
	defer x.noted(t, command)()
	if x.recorded, err = x.record(t); err != nil {
		return boxed.ExitStatus{}, err
	}
	defer x.recorded.close()
	env := x.environ()
	if x.agent {
		ctx, end := context.WithCancel(x.ctx)
		defer end()
		if env["SSH_AUTH_SOCK"], err = x.lendAgent(ctx, t.id); err != nil {
			return boxed.ExitStatus{}, fmt.Errorf("lend the agent: %w", err)
		}
	}
	if x.sftp {
		status, err := x.command(t, [][]string{{boxed.ToolsPath, "sftp-server"}}, env)
		if boxed.CodeOf(err) == boxed.CodeStartFailed {
			err = boxed.Errorf(boxed.CodeStartFailed, "sandbox %s was made without SFTP, by an earlier release; scp -O, or boxedctl cp", t.id)
		}
		return status, err
	}
	argvs, shell, err := programs(t, command, x.tty)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	var status boxed.ExitStatus
	if shell && x.tty {
		status, err = x.terminal(t, argvs, env)
	} else {
		status, err = x.command(t, argvs, env)
	}
	if boxed.CodeOf(err) == boxed.CodeStartFailed && t.repl == "" {
		err = boxed.Errorf(boxed.CodeStartFailed, "the sandbox has neither bash nor sh; run its programs with: boxedctl exec %s PROGRAM", t.id)
	}
	return status, err
}

// noted has the session on the stream of events: its beginning, and by what it returns
// its end.
func (x *session) noted(t *target, command string) func() {
	what := "a command"
	switch {
	case x.sftp:
		what = "sftp"
	case command == "" && x.tty:
		what = "a shell on a terminal"
	case command == "":
		what = "a shell"
	}
	e := boxed.Event{
		Type: boxed.EventSSH, At: time.Now(), Node: x.s.cfg.Node, Sandbox: t.id, Owner: x.c.who.Owner,
		Message: what + " from " + x.c.conn.RemoteAddr().String(),
	}
	x.s.cfg.Emit(e)
	return func() {
		e.Type, e.At = boxed.EventSSHEnd, time.Now()
		x.s.cfg.Emit(e)
	}
}

// leaveTarget is the session's end in a sandbox.
func (x *session) leaveTarget(t *target) {
	if !errors.Is(context.Cause(x.ctx), boxed.ErrGoingAway) {
		x.s.left(x.c, t)
	}
}

// environ is what a program gets beside the sandbox's own.
func (x *session) environ() map[string]string {
	env := map[string]string{"LANG": "C.UTF-8"}
	maps.Copy(env, x.env)
	if x.tty && x.term != "" {
		env["TERM"] = x.term
	}
	return env
}

// programs are what a session runs, the first of them that is there, and whether it is
// a shell, which one comes back to.
func programs(t *target, command string, tty bool) (argvs [][]string, shell bool, err error) {
	if language, ok := strings.CutPrefix(command, "repl "); ok && t.repl == "" {
		if t.repl = boxed.CanonicalLanguage(language); t.repl == "" {
			return nil, false, noREPL(language)
		}
		command = ""
	}
	switch {
	case t.repl != "" && command != "":
		return nil, false, boxed.Errorf(boxed.CodeInvalid, "a REPL takes no command; leave out %q", command)
	case t.repl != "":
		return boxed.Interpreters(t.repl), true, nil
	}
	for _, sh := range []string{"bash", "sh"} {
		switch {
		case command != "":
			argvs = append(argvs, []string{sh, "-c", command})
		case tty:
			argvs = append(argvs, []string{sh, "-l"})
		default:
			argvs = append(argvs, []string{sh})
		}
	}
	return argvs, command == "", nil
}

// command runs a program that ends with its client.
func (x *session) command(t *target, argvs [][]string, env map[string]string) (status boxed.ExitStatus, err error) {
	req := boxed.ExecRequest{
		Env: env, TTY: x.tty, Size: x.size(), Resize: x.resize, Signals: x.signals,
		OpenStdin: true, Stdin: channelInput{x}, Stdout: x.ch, Stderr: x.ch.Stderr(),
	}
	if x.recorded != nil {
		x.say(recordedBanner)
		req.Stdout = writer(func(p []byte) (int, error) {
			x.recorded.shown(p)
			return x.ch.Write(p)
		})
	}
	for _, argv := range argvs {
		req.Args = argv
		if status, err = x.s.cfg.Service.Exec(x.ctx, t.id, req); boxed.CodeOf(err) != boxed.CodeStartFailed {
			break
		}
	}
	return status, err
}

// end says how it ended, and closes the channel. The status goes before the end of the
// output: a client that has nothing more to say itself closes the channel as soon as it has
// that, and would never have it (OpenSSH does so).
func (x *session) end(status boxed.ExitStatus, err error) {
	defer x.ch.Close()
	switch {
	case errors.Is(context.Cause(x.ctx), boxed.ErrGoingAway):
		err = errors.New("the node is going away; what runs in the sandbox lives on: come back by another node, or in a moment")
	case errors.Is(context.Cause(x.ctx), errIdle):
		err = errIdle
	case x.ctx.Err() != nil:
		return // nobody listens
	case err == nil && status.Reason == boxed.ReasonLost:
		err = errors.New(status.Message)
	}
	if err != nil {
		x.say(err.Error())
	}
	switch {
	case err != nil:
		x.exitStatus(ourStatus)
	case status.Signal != "":
		x.exitSignal(status)
	default:
		x.exitStatus(uint32(status.Code))
	}
	x.ch.CloseWrite()
}

// say writes one line of ours to the client's stderr.
func (x *session) say(text string) {
	newline := "\n"
	if x.tty { // the client has its terminal in raw mode
		newline = "\r\n"
	}
	fmt.Fprintf(x.ch.Stderr(), "boxed: %s%s", table.Inert(text), newline)
}

func (x *session) exitStatus(code uint32) {
	x.ch.SendRequest("exit-status", false, gossh.Marshal(struct{ Code uint32 }{code}))
}

// sshSignals are those that the protocol has names for (RFC 4254, section 6.10).
var sshSignals = map[string]bool{
	"ABRT": true, "ALRM": true, "FPE": true, "HUP": true, "ILL": true, "INT": true, "KILL": true,
	"PIPE": true, "QUIT": true, "SEGV": true, "TERM": true, "USR1": true, "USR2": true,
}

func (x *session) exitSignal(status boxed.ExitStatus) {
	if !sshSignals[status.Signal] {
		x.exitStatus(uint32(status.Code))
		return
	}
	x.ch.SendRequest("exit-signal", false, gossh.Marshal(struct {
		Name    string
		Core    bool
		Message string
		Lang    string
	}{Name: status.Signal, Message: table.Inert(status.Message)}))
}
