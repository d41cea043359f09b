package sandboxtest

import (
	"context"
	"errors"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxed-mesh/boxed/agent"
	"github.com/boxed-mesh/boxed/sandbox"

	"github.com/boxed-mesh/boxed"
)

// container is one container, and the machine that an agent finds in it: it is
// the agent.Handler of its guest. Its status and limits are guarded by the
// driver's lock.
type container struct {
	d      *Driver
	box    sandbox.Box
	status sandbox.Status
	limits boxed.Limits
	gate   gate
	muted  atomic.Bool

	mu      sync.Mutex
	ctx     context.Context // ends with the container
	end     context.CancelFunc
	done    bool
	conns   map[net.Conn]struct{}
	pids    int
	procs   map[*process]struct{}
	listens map[uint16]net.Listener
	root    string // directory of its files, made at first use
}

func newContainer(d *Driver, id string, box sandbox.Box) *container {
	c := &container{
		d: d, box: box, limits: box.Limits, conns: map[net.Conn]struct{}{}, procs: map[*process]struct{}{}, listens: map[uint16]net.Listener{},
		status: sandbox.Status{ContainerID: id, Sandbox: box.ID, Nonce: box.Nonce, CreatedAt: time.Now()},
	}
	c.gate.init()
	c.ctx, c.end = context.WithCancel(context.Background())
	return c
}

func (c *container) start() {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.status.Running || c.ctx.Err() != nil {
		return
	}
	c.status.Running, c.status.StartedAt, c.status.PID = true, time.Now(), os.Getpid()
	run := c.d.agent
	if run == nil {
		run = func(ctx context.Context, _ sandbox.Box, dial func() (net.Conn, error)) {
			agent.NewGuest("fake", dial, c).Run(ctx)
		}
	}
	c.d.running.Go(func() { run(c.ctx, c.box, c.dial) })
}

// dial reaches the host through the container's freezer.
func (c *container) dial() (net.Conn, error) {
	c.gate.wait()
	conn, err := dialHost(c.box.Mount)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		conn.Close()
		return nil, net.ErrClosed
	}
	f := &frozenConn{Conn: conn, c: c}
	c.conns[f] = struct{}{}
	return f, nil
}

// cut closes the guest's connections.
func (c *container) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		conn.(*frozenConn).Conn.Close()
	}
	c.muted.Store(false)
}

// exit ends the first process, and everything with it.
func (c *container) exit(code int, oom bool) {
	c.mu.Lock()
	first := !c.done
	c.done = true
	c.mu.Unlock()
	c.gate.set(false)
	c.cut() // first: nobody inside lives to tell of the others' end
	c.killAll()
	c.end()
	c.mu.Lock()
	for _, l := range c.listens {
		l.Close()
	}
	c.mu.Unlock()
	c.d.mu.Lock()
	started := c.status.Running
	c.status.Running, c.status.Paused, c.status.PID = false, false, 0
	if first {
		c.status.ExitCode, c.status.OOMKilled = code, oom
	}
	var told []func(string)
	for _, w := range c.d.watchers {
		told = append(told, w.ended)
	}
	c.d.mu.Unlock()
	if started {
		for _, ended := range told {
			ended(c.status.ContainerID)
		}
	}
}

// destroy ends and removes the container.
func (c *container) destroy() {
	// First: whoever hears of its end must not find it as one that crashed.
	c.d.mu.Lock()
	delete(c.d.containers, c.status.ContainerID)
	c.d.mu.Unlock()
	c.exit(137, false)
	c.mu.Lock()
	if c.root != "" {
		os.RemoveAll(c.root)
		c.root = ""
	}
	c.mu.Unlock()
}

// Configure implements agent.Handler.
func (c *container) Configure(a agent.Config) error {
	if a.UID != c.box.UID {
		return errors.New("configured for another uid than the container's")
	}
	return nil
}

// End implements agent.Handler.
func (c *container) End(string) {
	c.exit(0, false)
	runtime.Goexit()
}

// Stats implements agent.Handler.
func (c *container) Stats() agent.Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 1
	for p := range c.procs {
		n += p.Count()
	}
	return agent.Stats{RSSBytes: 4 << 20, Processes: n}
}

// Ports implements agent.Handler.
func (c *container) Ports() ([]agent.Port, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ports := []agent.Port{}
	for port := range c.listens {
		ports = append(ports, agent.Port{Port: port, Address: "127.0.0.1", Process: "listen"})
	}
	return ports, nil
}

// Dial implements agent.Handler.
func (c *container) Dial(port uint16) (net.Conn, error) {
	c.mu.Lock()
	l := c.listens[port]
	c.mu.Unlock()
	if l == nil {
		return nil, &agent.Error{Code: agent.ErrNotFound, Message: "nothing listens on port " + strconv.Itoa(int(port))}
	}
	return net.Dial("tcp", l.Addr().String())
}

// frozenConn holds its traffic while its container is frozen.
type frozenConn struct {
	net.Conn
	c *container
}

func (f *frozenConn) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	f.c.gate.wait()
	return n, err
}

func (f *frozenConn) Write(p []byte) (int, error) {
	f.c.gate.wait()
	if f.c.muted.Load() {
		return len(p), nil
	}
	return f.Conn.Write(p)
}

func (f *frozenConn) Close() error {
	f.c.mu.Lock()
	delete(f.c.conns, f)
	f.c.mu.Unlock()
	return f.Conn.Close()
}

func (f *frozenConn) CloseWrite() error { return f.Conn.(*net.UnixConn).CloseWrite() }

// gate is a freezer: wait returns once it is open.
type gate struct {
	mu     sync.Mutex
	change *sync.Cond
	frozen bool
}

func (g *gate) init() { g.change = sync.NewCond(&g.mu) }

func (g *gate) set(frozen bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.frozen = frozen
	g.change.Broadcast()
}

func (g *gate) wait() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.frozen {
		g.change.Wait()
	}
}
