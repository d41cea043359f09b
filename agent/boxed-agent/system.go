package main

import (
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed/agent"
	"golang.org/x/sys/unix"
)

// spareThreads are made at start. A Go program that cannot make a thread dies,
// and a fork storm at the sandbox's limit is such a moment.
const spareThreads = 12

// makeThreads makes the runtime start n threads, which it then keeps.
func makeThreads(n int) {
	var here, done sync.WaitGroup
	here.Add(n)
	for range n {
		done.Go(func() {
			runtime.LockOSThread()
			here.Done()
			here.Wait()
			runtime.UnlockOSThread()
		})
	}
	done.Wait()
}

// system is the real agent.Handler.
type system struct {
	reaper *reaper
	forker *forker
	user   *userThreads
	census census
	ready  ready
	trim   trimmer
	own    ownPorts

	mu   sync.Mutex
	uid  int
	home string
}

var (
	_ agent.Handler  = (*system)(nil)
	_ agent.Loopback = (*system)(nil)
)

// newSystem hardens this process and starts its resident threads.
func newSystem() (*system, error) {
	// What this process inherited is not for the programs that it starts.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil && err != unix.ENOSYS && err != unix.EINVAL {
		return nil, fmt.Errorf("close descriptors on exec: %w", err)
	}
	// Without this, user code could trace a child between its setuid and its
	// exec, when it still shares this process's memory.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("clear dumpable: %w", err)
	}
	// What the engine may have found in the image's /etc/group.
	if err := unix.Setgroups(nil); err != nil {
		return nil, fmt.Errorf("drop groups: %w", err)
	}
	unix.Umask(0o022)
	if err := os.Chdir("/"); err != nil {
		return nil, err
	}
	reaper := newReaper()
	forker, err := newForker(reaper)
	if err != nil {
		return nil, err
	}
	s := &system{reaper: reaper, forker: forker}
	s.ready.system, s.trim.forker = s, forker
	return s, nil
}

// Configure learns the user's uid, once, and starts the threads that act with it.
func (s *system) Configure(c agent.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uid != 0 {
		if c.UID != s.uid {
			return fmt.Errorf("the sandbox's uid is %d, not %d", s.uid, c.UID)
		}
		s.ready.prepareFor(c.Ready)
		return nil
	}
	if c.UID <= 0 {
		return fmt.Errorf("bad uid %d", c.UID)
	}
	user, err := newUserThreads(c.UID)
	if err != nil {
		return err
	}
	s.trim.start()
	s.forker.become(c.UID)
	s.uid, s.home, s.user = c.UID, c.Home, user
	s.ready.prepareFor(c.Ready)
	return nil
}

// Stats describes this process and counts the others, without one that waits for
// its program: that is ours.
func (s *system) Stats() agent.Stats {
	stats := agent.Stats{Processes: len(pids()) - 1 - s.ready.count()}
	if statm, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := strings.Fields(string(statm)); len(fields) > 1 {
			pages, _ := strconv.ParseInt(fields[1], 10, 64)
			stats.RSSBytes = pages * int64(os.Getpagesize())
		}
	}
	return stats
}

// End exits: the kernel then ends everything in the sandbox.
func (s *system) End(reason string) {
	fmt.Fprintln(os.Stderr, "boxed-agent: end:", reason)
	os.Exit(0)
}

// Listen opens a listener on the sandbox's loopback.
func (s *system) Listen(network, address string) (net.Listener, error) {
	return s.own.listen(network, address)
}

// ListenPacket opens a socket for packets there.
func (s *system) ListenPacket(network, address string) (net.PacketConn, error) {
	return net.ListenPacket(network, address)
}

// ownPorts are those at which this process listens on 127.0.0.1, by how many listeners.
type ownPorts struct {
	mu    sync.Mutex
	ports map[string]int
}

// ownListener is a listener that takes its port out again.
type ownListener struct {
	net.Listener
	closed func()
}

func (l *ownListener) Close() error {
	l.closed()
	return l.Listener.Close()
}

func (o *ownPorts) listen(network, address string) (net.Listener, error) {
	l, err := net.Listen(network, address)
	if err != nil || !strings.HasPrefix(address, "127.0.0.1:") {
		return l, err
	}
	_, port, _ := net.SplitHostPort(address)
	add := func(n int) {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.ports == nil {
			o.ports = map[string]int{}
		}
		o.ports[port] += n
	}
	add(1)
	var once sync.Once
	return &ownListener{l, func() { once.Do(func() { add(-1) }) }}, nil
}

func (o *ownPorts) has(port string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.ports[port] > 0
}

// Dial connects to a loopback port, over IPv4 and then IPv6. What this process listens on
// is no port of the sandbox's.
func (s *system) Dial(port uint16) (net.Conn, error) {
	p := strconv.Itoa(int(port))
	if s.own.has(p) {
		return nil, &agent.Error{Code: agent.ErrNotFound, Message: "port " + p + " of the sandbox is the way out, which only programs inside may use"}
	}
	conn, err := net.DialTimeout("tcp4", "127.0.0.1:"+p, 5*time.Second)
	if err != nil {
		if conn6, err6 := net.DialTimeout("tcp6", "[::1]:"+p, 5*time.Second); err6 == nil {
			return conn6, nil
		}
		return nil, &agent.Error{Code: agent.ErrNotFound, Message: "nothing listens on port " + p + " inside the sandbox"}
	}
	return conn, nil
}
