package e2e_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lab is a LAN that the test holds in its hands: each host is a network namespace
// with one interface, and what it sends comes here, to be passed on, lost, or kept
// for a while. So links are cut as they are in the field: nobody is told.
type lab struct {
	t     *testing.T
	hosts []*labHost
	work  sync.WaitGroup

	mu    sync.Mutex
	cut   map[[2]int]bool
	loss  float64
	delay time.Duration
}

// labHost is one host of a lab.
type labHost struct {
	number int
	ns     string // of `ip netns`
	addr   string
	tun    *os.File
}

// newLab makes so many hosts, 10.77.0.1 and so on. They go with the test.
func newLab(t *testing.T, hosts int) *lab {
	t.Helper()
	l := &lab{t: t, cut: map[[2]int]bool{}}
	for i := range hosts {
		h := &labHost{number: i, ns: fmt.Sprintf("bx-%d-%d", os.Getpid(), labNumber()), addr: fmt.Sprintf("10.77.0.%d", i+1)}
		ip := func(args ...string) {
			t.Helper()
			if text, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Fatalf("ip %v: %v: %s", args, err, text)
			}
		}
		ip("netns", "add", h.ns)
		t.Cleanup(func() { exec.Command("ip", "netns", "del", h.ns).Run() })
		tun, err := h.openTUN()
		if err != nil {
			t.Fatalf("make a network for %s: %v", h.ns, err)
		}
		h.tun = tun
		ip("-n", h.ns, "addr", "add", h.addr+"/24", "dev", "lan0")
		ip("-n", h.ns, "link", "set", "lan0", "up")
		ip("-n", h.ns, "link", "set", "lo", "up")
		l.hosts = append(l.hosts, h)
	}
	for _, h := range l.hosts {
		l.work.Go(func() { l.carry(h) })
	}
	t.Cleanup(func() {
		for _, h := range l.hosts {
			h.tun.Close()
		}
		l.work.Wait()
	})
	return l
}

var labNumber = func() func() int {
	var mu sync.Mutex
	n := 0
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		n++
		return n
	}
}()

// inside runs f on a thread that is in the host's network.
func (h *labHost) inside(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ns, err := os.Open("/var/run/netns/" + h.ns)
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}

func (h *labHost) openTUN() (tun *os.File, err error) {
	err = h.inside(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		var req struct {
			name  [unix.IFNAMSIZ]byte
			flags uint16
			_     [22]byte
		}
		copy(req.name[:], "lan0")
		req.flags = unix.IFF_TUN | unix.IFF_NO_PI
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&req))); errno != 0 {
			unix.Close(fd)
			return errno
		}
		tun = os.NewFile(uintptr(fd), "tun")
		return nil
	})
	return tun, err
}

// carry passes on what a host sends.
func (l *lab) carry(from *labHost) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.tun.Read(buf)
		if err != nil {
			return
		}
		if n < 20 || buf[0]>>4 != 4 {
			continue
		}
		to := int(buf[19]) - 1
		if [3]byte(buf[16:19]) != [3]byte{10, 77, 0} || to < 0 || to >= len(l.hosts) {
			continue
		}
		l.mu.Lock()
		lost := l.cut[[2]int{from.number, to}] || rand.Float64() < l.loss
		delay := l.delay
		l.mu.Unlock()
		if lost {
			continue
		}
		if delay == 0 {
			l.hosts[to].tun.Write(buf[:n])
			continue
		}
		packet := append([]byte(nil), buf[:n]...)
		time.AfterFunc(delay+rand.N(delay), func() { l.hosts[to].tun.Write(packet) })
	}
}

// part cuts the links between two groups of hosts.
func (l *lab) part(a, b []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, x := range a {
		for _, y := range b {
			l.cut[[2]int{x, y}], l.cut[[2]int{y, x}] = true, true
		}
	}
}

// heal mends all links.
func (l *lab) heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.cut)
}

// weather loses a share of all packets, and keeps each for between one and two
// times delay, so that they overtake each other.
func (l *lab) weather(loss float64, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loss, l.delay = loss, delay
}

// dial connects from within the host's network.
func (h *labHost) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = h.inside(func() (err error) {
		conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// command runs a program within the host's network. Unlike `ip netns exec` it
// leaves mounts as they are: a node needs its control groups.
func (h *labHost) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=/var/run/netns/" + h.ns, program}, args...)...)
}
