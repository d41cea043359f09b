package main

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hoards take memory of the host, each in another way, and say how much they
// got rid of in bytes; 0 is the end.
var hoards = map[string]func(n int) int64{
	"tcp": func(int) int64 { return fillPair(tcpPair()) },
	"udp": func(int) int64 { return fillPair(udpPair()) },
	"unix": func(int) int64 {
		return fillPair(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0))
	},
	"datagrams":   func(int) int64 { return fillPair(unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, 0)) },
	"pipes":       func(int) int64 { return fillPipe() },
	"tmpfs":       func(n int) int64 { return fillPlace(n) },
	"inodes":      func(n int) int64 { return fillInodes(n) },
	"queues":      fillQueue,
	"messages":    func(int) int64 { return fillMessages() },
	"shared":      func(int) int64 { return fillSegment() },
	"memfd":       func(int) int64 { return fillMemfd() },
	"unaccepted":  func(int) int64 { return leaveUnaccepted() },
	"connections": func(int) int64 { return connect() },
}

// hoard takes all that it can of one kind and says how many bytes it got rid
// of, and in how many pieces. It keeps them if told to.
func hoard(args []string) {
	var sum int64
	n, failures := 0, 0
	for ; n < 20_000 && failures < 20; n++ { // not every limit is one that stays reached
		got := hoards[args[0]](n)
		if sum += got; got == 0 {
			failures++
		}
		if len(args) > 1 && args[1] != "stay" && int64(n+1) >= number(args[1]) {
			n++
			break
		}
	}
	fmt.Println("hoarded", sum, n)
	for len(args) > 1 { // without Go's timers, which want a descriptor
		_ = raw(unix.SYS_PPOLL, 0, 0, 0, 0)
	}
}

var chunk = make([]byte, 32<<10)

// fillPair writes to a pair of sockets until they take no more, and keeps them.
func fillPair(pair [2]int, err error) int64 {
	if err != nil {
		return 0
	}
	var sum int64
	for sum < 1<<20 { // datagrams vanish when there is no room: they would have no end
		n, err := unix.Write(pair[0], chunk)
		if err != nil {
			break
		}
		sum += int64(n)
	}
	return sum
}

func tcpPair() (pair [2]int, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return pair, err
	}
	defer l.Close()
	for i := range pair {
		var c net.Conn
		if i == 0 {
			c, err = net.DialTimeout("tcp", l.Addr().String(), time.Second)
		} else {
			_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(time.Second))
			c, err = l.Accept()
		}
		if err != nil {
			return pair, err
		}
		if pair[i], err = keep(c); err != nil {
			return pair, err
		}
	}
	return pair, nil
}

// keep gives a descriptor of a connection that does not block and is never closed.
func keep(c net.Conn) (int, error) {
	defer c.Close()
	f, err := c.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		return -1, err
	}
	defer f.Close()
	fd, err := unix.Dup(int(f.Fd()))
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	return fd, err
}

// udpPair is a socket and one that is connected to it. Datagrams beyond the
// buffer vanish, so what it took is not what it holds.
func udpPair() (pair [2]int, err error) {
	u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return pair, err
	}
	c, err := net.Dial("udp", u.LocalAddr().String())
	if err == nil {
		if pair[1], err = keep(u); err == nil {
			pair[0], err = keep(c)
		}
	}
	return pair, err
}

func fillPipe() int64 {
	var p [2]int
	if unix.Pipe2(p[:], unix.O_NONBLOCK) != nil {
		return 0
	}
	_, _ = unix.FcntlInt(uintptr(p[1]), unix.F_SETPIPE_SZ, 1<<20)
	var sum int64
	for {
		n, err := unix.Write(p[1], chunk)
		if err != nil {
			return sum
		}
		sum += int64(n)
	}
}

var places = []string{"/workspace", "/home/sandbox", "/tmp", "/output", "/dev/shm"}

// fillPlace fills one tmpfs after the other.
func fillPlace(n int) int64 {
	f, err := os.Create(filepath.Join(places[n%len(places)], fmt.Sprint("hoard", n)))
	if err != nil {
		return 0
	}
	defer f.Close()
	sum, _ := io.Copy(f, io.LimitReader(rand.Reader, 64<<20)) // its end is no space
	return sum
}

// fillInodes makes empty files with long names, a thousand a time; each counts
// for the kernel's memory.
func fillInodes(n int) int64 {
	dir := places[n%len(places)]
	for i := range 1000 {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("%0200d-%d", n, i)))
		if err != nil {
			return int64(i) * 1024
		}
		f.Close()
	}
	return 1000 * 1024
}

func fillQueue(n int) int64 {
	attr := [8]int64{0, 10, 8192}
	fd, _, errno := syscall.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(queue(n))), unix.O_CREAT|unix.O_RDWR|unix.O_NONBLOCK, 0o600, uintptr(unsafe.Pointer(&attr)), 0, 0)
	if errno != 0 {
		return 0
	}
	var sum int64
	for raw(unix.SYS_MQ_TIMEDSEND, fd, uintptr(unsafe.Pointer(&chunk[0])), 8192, 0, 0) == nil {
		sum += 8192
	}
	return sum
}

// fillMessages fills one of System V's queues.
func fillMessages() int64 {
	id, _, errno := syscall.Syscall(unix.SYS_MSGGET, unix.IPC_PRIVATE, 0o600, 0)
	if errno != 0 {
		return 0
	}
	message := make([]byte, 8+8192)
	message[0] = 1 // its type
	var sum int64
	for raw(unix.SYS_MSGSND, id, uintptr(unsafe.Pointer(&message[0])), 8192, 0o4000) == nil { // IPC_NOWAIT
		sum += 8192
	}
	return sum
}

func fillSegment() int64 {
	const size = 1 << 20
	id, _, errno := syscall.Syscall(unix.SYS_SHMGET, unix.IPC_PRIVATE, size, 0o600)
	if errno != 0 {
		return 0
	}
	addr, err := unix.SysvShmAttach(int(id), 0, 0)
	if err != nil {
		return 0
	}
	for i := 0; i < size; i += 4096 {
		addr[i] = 1
	}
	_ = unix.SysvShmDetach(addr) // it stays: nobody removes it
	return size
}

func fillMemfd() int64 {
	fd, err := unix.MemfdCreate("x", 0)
	if err != nil {
		return 0
	}
	var sum int64
	for range 32 {
		n, err := unix.Write(fd, chunk)
		if err != nil {
			break
		}
		sum += int64(n)
	}
	return sum
}

// unaccepted is the listener that accepts nothing.
var unaccepted net.Listener

// dialUnaccepted makes one connection that nobody accepts.
func dialUnaccepted() (int, error) {
	var last error
	for range 2 {
		if unaccepted == nil {
			var err error
			if unaccepted, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
				return -1, err
			}
		}
		c, err := net.DialTimeout("tcp", unaccepted.Addr().String(), 100*time.Millisecond)
		if err == nil {
			return keep(c)
		}
		unaccepted, last = nil, err // its queue is full: another one
	}
	return -1, last
}

// connect keeps such a connection.
func connect() int64 {
	if _, err := dialUnaccepted(); err != nil {
		return 0
	}
	return 1
}

// leaveUnaccepted fills one and closes it: the data stays.
func leaveUnaccepted() int64 {
	fd, err := dialUnaccepted()
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return fillPair([2]int{fd, fd}, nil)
}

// orphan fills connections that nobody has accepted and closes them, so that
// their data stays without a descriptor, and says how many there are.
func orphan(args []string) {
	n := int(number(args[0]))
	held := []net.Listener{}
	for i := range n {
		if leaveUnaccepted() == 0 {
			n = i
			break
		}
		if len(held) == 0 || held[len(held)-1] != unaccepted {
			held = append(held, unaccepted)
		}
	}
	fmt.Println("orphaned", n, len(held))
	time.Sleep(time.Hour)
}

// loopback moves so many MiB over a TCP connection to itself, and says how many
// microseconds that took.
func loopback(args []string) {
	size := number(args[0]) << 20
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(errText(err))
		return
	}
	began := time.Now()
	go func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return
		}
		defer c.Close()
		for left := size; left > 0; left -= int64(len(chunk)) {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	}()
	c, err := l.Accept()
	if err != nil {
		fmt.Println(errText(err))
		return
	}
	buf := make([]byte, 256<<10)
	var sum int64
	for err == nil {
		var n int
		n, err = c.Read(buf)
		sum += int64(n)
	}
	if sum != size {
		fmt.Println("short", sum, errText(err))
		return
	}
	fmt.Println(time.Since(began).Microseconds())
}
