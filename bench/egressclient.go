package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// clientProgram is the command by which this program is the client of the experiment egress:
// the same one in a sandbox and on its host.
const clientProgram = "client"

// visitor uses the servers outside, and measures from where it stands.
type visitor struct {
	to      string // "host:port", by which the server is known
	at      string // where it is dialled instead, and not through a proxy; "": where its name says
	bytes   int64
	count   int
	workers int
}

// clientCommand writes what it measured as a list in JSON; see the methods of visitor.
func clientCommand(args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("client: down, up, first, hold or short")
	}
	var v visitor
	flags := flag.NewFlagSet("bench client", flag.ContinueOnError)
	flags.StringVar(&v.to, "to", "", "host:port of the server")
	flags.StringVar(&v.at, "at", "", "address:port to dial instead")
	flags.Int64Var(&v.bytes, "bytes", 0, "of down and up")
	flags.IntVar(&v.count, "count", 1, "connections, of first and short")
	flags.IntVar(&v.workers, "workers", 4, "connections at once, of short")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	var values []float64
	var err error
	switch args[0] {
	case "down":
		values, err = v.carry(askDown)
	case "up":
		values, err = v.carry(askUp)
	case "first":
		values, err = v.first()
	case "short":
		values, err = v.short()
	case "hold":
		return v.hold(in, out)
	default:
		err = fmt.Errorf("client: %q is none of down, up, first, hold and short", args[0])
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(values)
}

// dialer finds the server once, and dials it each time it is called.
func (v *visitor) dialer() (func() (net.Conn, error), error) {
	at := v.at
	if at == "" {
		host, port, err := net.SplitHostPort(v.to)
		if err != nil {
			return nil, err
		}
		addrs, err := net.DefaultResolver.LookupNetIP(context.Background(), "ip4", host)
		if err != nil {
			return nil, err
		}
		number, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return nil, err
		}
		at = netip.AddrPortFrom(addrs[0].Unmap(), uint16(number)).String()
	}
	d := net.Dialer{Timeout: 10 * time.Second}
	return func() (net.Conn, error) { return d.Dial("tcp", at) }, nil
}

// carry moves bytes over one connection, and measures megabytes per second.
func (v *visitor) carry(what byte) ([]float64, error) {
	dial, err := v.dialer()
	if err != nil {
		return nil, err
	}
	content := make([]byte, rawChunk)
	from := time.Now()
	conn, err := dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.Write(binary.BigEndian.AppendUint64([]byte{what}, uint64(v.bytes))); err != nil {
		return nil, err
	}
	if what == askUp {
		if err := writeRaw(conn, v.bytes, content); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(conn, content[:1]); err != nil {
			return nil, fmt.Errorf("the server has not got it all: %w", err)
		}
	} else if err := readRaw(conn, v.bytes); err != nil {
		return nil, err
	}
	took := time.Since(from).Seconds()
	if n, err := conn.Read(content); n != 0 || err != io.EOF {
		return nil, fmt.Errorf("no end came after %d bytes, but %d and %v", v.bytes, n, err)
	}
	return []float64{float64(v.bytes) / 1e6 / took}, nil
}

// first measures milliseconds from a request to the first byte of the answer's body, each on
// a connection of its own, after one that does not count.
func (v *visitor) first() (values []float64, err error) {
	for i := range v.count + 1 {
		took, err := v.firstByte()
		if err != nil {
			return nil, err
		}
		if i > 0 {
			values = append(values, took)
		}
	}
	return values, nil
}

func (v *visitor) firstByte() (float64, error) {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, Protocols: new(http.Protocols)}
	t.Protocols.SetHTTP1(true) // what clients of such answers speak
	if v.at != "" {
		t.Proxy = nil
		t.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, v.at)
		}
	}
	defer t.CloseIdleConnections()
	req, err := http.NewRequest(http.MethodGet, "https://"+strings.TrimSuffix(v.to, ":443")+"/events", nil)
	if err != nil {
		return 0, err
	}
	from := time.Now()
	resp, err := t.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var b [1]byte
	_, err = io.ReadFull(resp.Body, b[:])
	took := ms(from)
	if err == nil && (resp.StatusCode != http.StatusOK || b[0] != 'd') {
		err = fmt.Errorf("the answer is %s, and begins with %q", resp.Status, b)
	}
	return took, err
}

// oneByte makes a connection and has one byte go each way.
func oneByte(dial func() (net.Conn, error), what byte) (net.Conn, error) {
	conn, err := dial()
	if err != nil {
		return nil, err
	}
	b := []byte{what}
	if _, err = conn.Write(b); err == nil {
		_, err = io.ReadFull(conn, b)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// short makes connections that end after one byte each way, a few at once, and measures
// seconds. The server ends first, so no port of this side's is held for a minute.
func (v *visitor) short() ([]float64, error) {
	dial, err := v.dialer()
	if err != nil {
		return nil, err
	}
	var left, failed atomic.Int64
	left.Store(int64(v.count))
	var why atomic.Value
	var work sync.WaitGroup
	from := time.Now()
	for range v.workers {
		work.Go(func() {
			var end [1]byte
			for left.Add(-1) >= 0 {
				conn, err := oneByte(dial, askShort)
				if err == nil {
					if n, got := conn.Read(end[:]); n != 0 || got != io.EOF {
						err = fmt.Errorf("no end came, but %d bytes and %v", n, got)
					}
					conn.Close()
				}
				if err != nil {
					failed.Add(1)
					why.Store(err.Error())
				}
			}
		})
	}
	work.Wait()
	if n := failed.Load(); n > 0 {
		return nil, fmt.Errorf("%d of %d connections failed, one of them so: %s", n, v.count, why.Load())
	}
	return []float64{time.Since(from).Seconds()}, nil
}

// hold opens as many more connections as each line that it reads says, and says when it has
// them. It keeps them to the end of its input.
func (v *visitor) hold(in io.Reader, out io.Writer) error {
	var held []net.Conn
	defer func() {
		for _, conn := range held {
			conn.Close()
		}
	}()
	dial := func() (net.Conn, error) { return nil, os.ErrInvalid }
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		more, err := strconv.Atoi(lines.Text())
		if err != nil {
			return err
		}
		if len(held) == 0 {
			if dial, err = v.dialer(); err != nil {
				return err
			}
		}
		for range more {
			conn, err := oneByte(dial, askHold)
			if err != nil {
				return fmt.Errorf("connection %d: %w", len(held)+1, err)
			}
			held = append(held, conn)
		}
		if _, err := fmt.Fprintln(out, len(held)); err != nil {
			return err
		}
	}
	return lines.Err()
}
