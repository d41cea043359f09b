package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// featureDirect is of both sides: the guest dials a direct connection.
const featureDirect = "direct"

// Features that this guest has.
var guestFeatures = []string{"exec", "files", "tar", "ports", "dial", "bulk", featureDirect}

// Guest serves one host, over as many connections as it takes. Its execs
// outlive connections.
type Guest struct {
	build      string
	handler    Handler
	dial       func() (net.Conn, error)
	operations map[string]operation
	entries    *entries   // nil: the handler has no loopback to serve egress on
	directs    sync.Mutex // held by whoever keeps the direct connection

	mu       sync.Mutex
	secret   string
	lease    time.Duration
	execs    map[string]*guestExec
	starting map[string]bool // IDs whose programs are being started
	order    []string        // of execs, oldest first
	budget   *budget
}

// NewGuest makes a guest. dial reaches the host; build identifies the program.
func NewGuest(build string, dial func() (net.Conn, error), h Handler) *Guest {
	g := &Guest{build: build, handler: h, dial: dial, operations: operations(), execs: map[string]*guestExec{}, starting: map[string]bool{}, budget: newBudget()}
	if l, ok := h.(Loopback); ok {
		g.entries = newEntries(g, l)
	}
	return g
}

// Run dials, serves and dials again until ctx ends. Without a host for as long
// as the lease says, it ends the sandbox: time is counted in ticks, so that a
// frozen sandbox does not age.
func (g *Guest) Run(ctx context.Context) error {
	const first, most = 2 * time.Millisecond, 250 * time.Millisecond
	away, pause := time.Duration(0), first
	for ctx.Err() == nil {
		conn, err := g.dial()
		if err == nil {
			if err = g.Serve(ctx, conn); err == nil {
				away, pause = 0, first
				continue
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		away += pause
		pause = min(2*pause, most)
		g.mu.Lock()
		lease := g.lease
		g.mu.Unlock()
		if lease > 0 && away > lease {
			g.handler.End("no host for " + away.String())
		}
	}
	return ctx.Err()
}

// Serve makes conn the control connection and serves it until it breaks (nil),
// or the host refuses it.
func (g *Guest) Serve(ctx context.Context, conn net.Conn) error {
	defer conn.Close()
	welcome, err := g.hello(conn, Hello{})
	if err != nil {
		return err
	}
	if welcome.Secret != "" { // first: it is given once
		g.mu.Lock()
		g.secret = welcome.Secret
		g.mu.Unlock()
	}
	if welcome.Config != nil {
		if err := g.configure(*welcome.Config); err != nil {
			return err
		}
	}

	session, err := yamux.Server(conn, muxConfig())
	if err != nil {
		return err
	}
	defer session.Close()
	stop := context.AfterFunc(ctx, func() { session.Close() })
	defer stop()
	if slices.Contains(welcome.Features, featureDirect) {
		linked, cancel := context.WithCancel(ctx)
		defer cancel()
		go g.serveDirects(linked)
	}
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			return nil
		}
		go g.serve(stream)
	}
}

func (g *Guest) configure(c Config) error {
	if err := g.handler.Configure(c); err != nil {
		return err
	}
	switch {
	case g.entries != nil:
		if err := g.entries.configure(c.Egress); err != nil {
			return err
		}
	case c.Egress != nil:
		return &Error{Code: ErrUnavailable, Message: "this agent serves no egress"}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lease = time.Duration(c.LeaseMS) * time.Millisecond
	return nil
}

// hello shakes hands on a fresh connection.
func (g *Guest) hello(conn net.Conn, hello Hello) (Welcome, error) {
	g.mu.Lock()
	secret := g.secret
	g.mu.Unlock()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	defer conn.SetDeadline(time.Time{})
	var welcome Welcome
	hello.Version, hello.Build, hello.Secret = Version, g.build, secret
	if hello.Features = guestFeatures; g.entries != nil {
		hello.Features = append(slices.Clone(guestFeatures), featureEgress)
	}
	if err := writeMessage(conn, hello); err != nil {
		return welcome, err
	}
	if err := readMessage(conn, maxHello, &welcome); err != nil {
		return welcome, err
	}
	if welcome.Error != "" {
		return welcome, errors.New(welcome.Error)
	}
	return welcome, nil
}

// bulkConn dials a bulk connection and serves the one request on it.
func (g *Guest) bulkConn(token string) error {
	conn, err := g.dial()
	if err != nil {
		return err
	}
	if _, err := g.hello(conn, Hello{Bulk: token}); err != nil {
		conn.Close()
		return err
	}
	go g.serve(conn)
	return nil
}

// serve answers one request and closes its stream.
func (g *Guest) serve(conn net.Conn) {
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	var req Request
	if err := readMessage(conn, maxMessage, &req); err != nil {
		return
	}
	conn.SetReadDeadline(time.Time{})
	g.answer(conn, req)
}

// answer serves one request on its stream.
func (g *Guest) answer(conn net.Conn, req Request) {
	serve, ok := g.operations[req.Op]
	if !ok {
		respond(conn, nil, &Error{Code: ErrUnavailable, Message: "this agent does not know the operation " + req.Op})
		return
	}
	serve(g, conn, req.Args)
}

// operation serves one request: it writes the response, and then owns the
// stream until it returns.
type operation func(*Guest, net.Conn, json.RawMessage)

// operations maps each operation to what serves it.
func operations() map[string]operation {
	return map[string]operation{
		opExec:   typed((*Guest).serveExec),
		opAttach: typed((*Guest).serveAttach),
		opSignal: call(func(g *Guest, a Signal) (any, error) {
			e, err := g.exec(a.ID)
			if err != nil {
				return nil, err
			}
			return nil, e.proc.Signal(a.Signal, a.Tree)
		}),
		opResize: call(func(g *Guest, a Resize) (any, error) {
			e, err := g.exec(a.ID)
			if err != nil {
				return nil, err
			}
			return nil, e.proc.Resize(a.Cols, a.Rows)
		}),
		opKill: call(func(g *Guest, a Kill) (any, error) {
			e, err := g.exec(a.ID)
			if err != nil {
				return nil, err
			}
			return nil, e.kill(a.Reason)
		}),
		opExecs:    call(func(g *Guest, _ struct{}) (any, error) { return g.list(), nil }),
		opConfig:   call(func(g *Guest, c Config) (any, error) { return nil, g.configure(c) }),
		opCanary:   call(func(g *Guest, c Canary) (any, error) { return g.serveCanary(c) }),
		opPing:     call(func(*Guest, struct{}) (any, error) { return nil, nil }),
		opEnd:      call(func(g *Guest, _ struct{}) (any, error) { g.handler.End("asked to"); return nil, nil }),
		opBulk:     call(func(g *Guest, a Bulk) (any, error) { return nil, g.bulkConn(a.Token) }),
		opStat:     call(func(g *Guest, a Path) (any, error) { return g.handler.Stat(a.Path) }),
		opList:     call(func(g *Guest, a Path) (any, error) { return g.handler.List(a.Path) }),
		opMkdir:    call(func(g *Guest, a Path) (any, error) { return nil, g.handler.Mkdir(a) }),
		opRemove:   call(func(g *Guest, a Path) (any, error) { return nil, g.handler.Remove(a) }),
		opMove:     call(func(g *Guest, a Move) (any, error) { return nil, g.handler.Move(a) }),
		opRead:     typed((*Guest).serveRead),
		opWrite:    typed((*Guest).serveWrite),
		opReadTar:  typed((*Guest).serveReadTar),
		opWriteTar: typed((*Guest).serveWriteTar),
		opPorts:    call(func(g *Guest, _ struct{}) (any, error) { return g.handler.Ports() }),
		opDial:     typed((*Guest).serveDial),
		opStats: call(func(g *Guest, _ struct{}) (any, error) {
			s := g.handler.Stats()
			s.Execs = g.running()
			return s, nil
		}),
	}
}

// typed decodes the arguments of an operation that owns its stream.
func typed[A any](serve func(*Guest, net.Conn, A)) operation {
	return func(g *Guest, conn net.Conn, raw json.RawMessage) {
		var args A
		if len(raw) > 0 {
			if err := json.Unmarshal(raw, &args); err != nil {
				respond(conn, nil, &Error{Code: ErrInvalid, Message: err.Error()})
				return
			}
		}
		serve(g, conn, args)
	}
}

// call wraps an operation that is one answer.
func call[A any](do func(*Guest, A) (any, error)) operation {
	return typed(func(g *Guest, conn net.Conn, args A) {
		v, err := do(g, args)
		respond(conn, v, err)
	})
}

// respond writes the one Response of a stream.
func respond(w io.Writer, value any, err error) error {
	var r Response
	if err != nil {
		r.Error = wireError(err)
	} else if value != nil {
		raw, merr := json.Marshal(value)
		if merr != nil {
			return merr
		}
		if r.Value = raw; len(raw) > maxResponse-1<<10 {
			r = Response{Error: &Error{Code: ErrTooLarge, Message: "the answer is larger than one may be"}}
		}
	}
	return writeMessage(w, r)
}

func wireError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: ErrInternal, Message: err.Error()}
}

func (g *Guest) exec(id string) (*guestExec, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if e := g.execs[id]; e != nil {
		return e, nil
	}
	return nil, &Error{Code: ErrNotFound, Message: "no exec " + id + " in this sandbox"}
}

func (g *Guest) running() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.runningLocked()
}

func (g *Guest) runningLocked() int {
	n := 0
	for _, e := range g.execs {
		select {
		case <-e.exited:
		default:
			n++
		}
	}
	return n
}

func (g *Guest) list() []ExecInfo {
	g.mu.Lock()
	all := make([]*guestExec, 0, len(g.order))
	for _, id := range g.order {
		all = append(all, g.execs[id])
	}
	g.mu.Unlock()
	infos := make([]ExecInfo, len(all))
	for i, e := range all {
		infos[i] = e.info(true)
	}
	return infos
}

// serveExec starts a program and, unless it is detached, streams it.
func (g *Guest) serveExec(conn net.Conn, start ExecStart) {
	e, err := g.spawn(start)
	switch {
	case err != nil:
		respond(conn, nil, err)
	case start.Detached:
		respond(conn, Attached{Info: e.info(false)}, nil)
	default:
		e.attach(Attach{ID: start.ID, Own: true}, conn)
	}
}

func (g *Guest) spawn(start ExecStart) (*guestExec, error) {
	if err := g.reserve(start.ID); err != nil {
		return nil, err
	}
	proc, err := g.handler.Spawn(start)
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.starting, start.ID)
	if err != nil {
		return nil, err
	}
	start.Code = nil
	e := newGuestExec(start, proc, g.budget)
	if !start.Detached {
		e.owners = 1 // until attach: what it writes now waits for its reader
	}
	g.execs[start.ID] = e
	g.order = append(g.order, start.ID)
	g.forgetLocked()
	go e.run()
	return e, nil
}

// reserve takes an ID and a place among the living.
func (g *Guest) reserve(id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, taken := g.execs[id]; taken || g.starting[id] || id == "" {
		return &Error{Code: ErrConflict, Message: "the exec ID is taken"}
	}
	if g.runningLocked()+len(g.starting) >= MaxExecs {
		return &Error{Code: ErrExhausted, Message: "too many execs at once in this sandbox; wait for one to end or kill one"}
	}
	g.starting[id] = true
	return nil
}

// keptAttached is how many attached execs keep their output after their end,
// for a client whose connection broke just before it.
const keptAttached = 16

// forgetLocked drops the oldest ended execs beyond MaxEnded, and the output of
// older ones that were attached, or of any while memory for output is short.
func (g *Guest) forgetLocked() {
	ended := 0 // that follow the one looked at
	for _, id := range g.order {
		if g.execs[id].hasEnded() {
			ended++
		}
	}
	g.order = slices.DeleteFunc(g.order, func(id string) bool {
		e := g.execs[id]
		if !e.hasEnded() {
			return false
		}
		ended--
		if g.budget.left.Load() < 4*RingSize || (!e.start.Detached && ended >= keptAttached) {
			e.free()
		}
		if ended < MaxEnded || e.inUse() {
			return false
		}
		e.free()
		delete(g.execs, id)
		return true
	})
}

func (g *Guest) serveAttach(conn net.Conn, a Attach) {
	e, err := g.exec(a.ID)
	if err != nil {
		respond(conn, nil, err)
		return
	}
	e.attach(a, conn)
}
