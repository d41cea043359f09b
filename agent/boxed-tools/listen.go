package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Bounds of `boxed-tools listen`.
const (
	maxWaiting = 64               // connections that nobody took yet
	takeLimit  = 10 * time.Second // for taking one
)

// listen serves a door into another machine, as the user who started it: it listens,
// and says on standard output of each connection its number. Whoever runs `boxed-tools
// take` with that number is joined to it, and is told on standard error of the end of
// what comes. It ends when standard input does.
//
//	boxed-tools listen tcp 127.0.0.1:8000     listening 127.0.0.1:8000 NAME
//	boxed-tools listen unix /tmp/x/agent      conn 1 127.0.0.1:40000
func listen(network, address string) error {
	if network == "unix" {
		if err := os.MkdirAll(filepath.Dir(address), 0o700); err != nil {
			return err
		}
	}
	outer, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	defer outer.Close()
	// Abstract, so that nothing is left behind: of this sandbox, as its network is.
	name := fmt.Sprintf("@boxed-listen-%d", os.Getpid())
	inner, err := net.Listen("unix", name)
	if err != nil {
		return err
	}
	defer inner.Close()
	if _, err := fmt.Printf("listening %s %s\n", outer.Addr(), name); err != nil {
		return err
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		outer.Close()
		inner.Close()
	}()
	d := &door{waiting: map[string]net.Conn{}}
	go d.accept(outer)
	for {
		conn, err := inner.Accept()
		if err != nil {
			return nil //nolint:nilerr // closed: the end
		}
		go d.join(conn)
	}
}

// door has the connections that wait to be taken.
type door struct {
	mu      sync.Mutex
	waiting map[string]net.Conn
	last    int
}

func (d *door) accept(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		d.mu.Lock()
		d.last++
		number := fmt.Sprint(d.last)
		full := len(d.waiting) >= maxWaiting
		if !full {
			d.waiting[number] = conn
		}
		d.mu.Unlock()
		if full {
			conn.Close()
			continue
		}
		from := conn.RemoteAddr().String()
		if from == "" {
			from = "-"
		}
		fmt.Printf("conn %s %s\n", number, from)
		time.AfterFunc(takeLimit, func() {
			if late := d.take(number); late != nil {
				late.Close()
			}
		})
	}
}

func (d *door) take(number string) net.Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	conn := d.waiting[number]
	delete(d.waiting, number)
	return conn
}

// join joins who takes a connection to it.
func (d *door) join(taker net.Conn) {
	defer taker.Close()
	taker.SetReadDeadline(time.Now().Add(takeLimit))
	r := bufio.NewReaderSize(taker, 64)
	line, err := r.ReadSlice('\n')
	if err != nil {
		return
	}
	conn := d.take(strings.TrimSpace(string(line)))
	if conn == nil {
		return
	}
	defer conn.Close()
	taker.SetReadDeadline(time.Time{})
	both(conn, r, taker)
}

// take is one end of a connection that `boxed-tools listen` has: standard input and
// output are the bytes.
func take(name, number string) error {
	if !strings.HasPrefix(name, "@boxed-listen-") {
		return errors.New("that is not what listen said")
	}
	conn, err := net.Dial("unix", name)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "%s\n", number); err != nil {
		return err
	}
	both(conn, os.Stdin, saidEnd{os.Stdout, new(int64)})
	return nil
}

// saidEnd is standard output whose end is said on standard error, with how much there
// was: who follows a program learns of its end, and not of its output's.
type saidEnd struct {
	io.Writer
	n *int64
}

func (s saidEnd) Write(p []byte) (int, error) {
	n, err := s.Writer.Write(p)
	*s.n += int64(n)
	return n, err
}

func (s saidEnd) CloseWrite() error {
	_, err := fmt.Fprintf(os.Stderr, "end %d\n", *s.n)
	return err
}

// both copies in to conn and conn to out until both have ended. The end of the one is
// passed on.
func both(conn net.Conn, in io.Reader, out io.Writer) {
	var copies sync.WaitGroup
	copies.Go(func() {
		io.Copy(out, conn)
		closeWrite(out)
	})
	copies.Go(func() {
		io.Copy(conn, in)
		closeWrite(conn)
	})
	copies.Wait()
}

func closeWrite(w io.Writer) {
	switch c := w.(type) {
	case interface{ CloseWrite() error }:
		c.CloseWrite()
	case io.Closer:
		c.Close()
	}
}
