package ctl

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdForward() *cli.Command {
	return &cli.Command{
		Name: "forward", Category: catFiles,
		Usage:     "reach a port of a sandbox from this machine",
		UsageText: "boxedctl forward SANDBOX [LOCAL:]REMOTE…",
		Description: "Listens on 127.0.0.1:LOCAL and passes each connection to port REMOTE on the sandbox's loopback, until it is interrupted. " +
			"Without LOCAL the same number is used; 0 takes any free one. The address is printed once it listens." +
			examples("boxedctl forward build 8000", "boxedctl forward build 9000:8000 0:5432"),
		Action: a.forward,
	}
}

// portPair is one [LOCAL:]REMOTE.
type portPair struct{ local, remote uint16 }

func parsePortPair(s string) (portPair, error) {
	left, right, ok := strings.Cut(s, ":")
	if !ok {
		right = left
	}
	local, err1 := strconv.ParseUint(left, 10, 16)
	remote, err2 := strconv.ParseUint(right, 10, 16)
	if err1 != nil || err2 != nil || remote == 0 {
		return portPair{}, usagef("%q is not a port", s).hint("write it like 8000 or 9000:8000, numbers up to 65535")
	}
	return portPair{uint16(local), uint16(remote)}, nil
}

func (a *app) forward(c *cli.Context) error {
	words, err := a.operands(c, 2, -1)
	if err != nil {
		return err
	}
	var pairs []portPair
	for _, w := range words[1:] {
		p, err := parsePortPair(w)
		if err != nil {
			return err
		}
		pairs = append(pairs, p)
	}
	svc, id, err := a.reach(c.Context, words[0])
	if err != nil {
		return err
	}
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(c.Context)
	defer release()
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	for _, p := range pairs {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(p.local))))
		if err != nil {
			return wrapf(err, "port %d of this machine", p.local).hint("0:%d takes any free port", p.remote)
		}
		listeners = append(listeners, l)
		if err := a.printForward(l, words[0], p.remote); err != nil {
			return err
		}
	}
	return a.serveForwards(ctx, svc, id, listeners, pairs)
}

func (a *app) printForward(l net.Listener, ref string, remote uint16) error {
	if a.output == outputJSON {
		return a.printJSONLine(map[string]any{"local": l.Addr().String(), "sandbox": ref, "port": remote})
	}
	if a.output == outputName {
		_, err := fmt.Fprintln(a.stdout, l.Addr())
		return err
	}
	_, err := fmt.Fprintf(a.stdout, "%s -> %s:%d\n", l.Addr(), table.Inert(ref), remote)
	return err
}

// serveForwards accepts until ctx ends, and returns when all connections have
// been closed.
func (a *app) serveForwards(ctx context.Context, svc service, id boxed.ID, listeners []net.Listener, pairs []portPair) error {
	var wg sync.WaitGroup
	for i, l := range listeners {
		defer context.AfterFunc(ctx, func() { l.Close() })()
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return // it was closed: ctx has ended
				}
				wg.Go(func() {
					if err := pipe(ctx, svc, id, pairs[i].remote, conn); err != nil && ctx.Err() == nil {
						a.notice("port %d: %s", pairs[i].remote, message(err))
					}
				})
			}
		})
	}
	wg.Wait()
	return nil
}

// pipe joins a local connection with a port inside, both ways, until both have
// ended or ctx has.
func pipe(ctx context.Context, svc service, id boxed.ID, port uint16, local net.Conn) error {
	defer local.Close()
	remote, err := svc.Dial(ctx, id, port)
	if err != nil {
		return err
	}
	defer remote.Close()
	defer context.AfterFunc(ctx, func() { local.Close(); remote.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() { oneWay(remote, local) })
	oneWay(local, remote)
	wg.Wait()
	return nil
}

// oneWay copies until from has ended, and tells to in the same way: an end by
// an end, a break by a break, so that half an answer does not look whole.
func oneWay(to, from net.Conn) {
	if _, err := io.Copy(to, from); err == nil {
		closeWrite(to)
		return
	}
	for _, c := range []net.Conn{to, from} {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = c.Close()
	}
}

// closeWrite says that no more bytes will come, while others still may.
func closeWrite(c net.Conn) {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	_ = c.Close()
}

func (a *app) cmdPorts() *cli.Command {
	return &cli.Command{
		Name: "ports", Category: catFiles,
		Usage:       "list the ports that programs in a sandbox listen on",
		UsageText:   "boxedctl ports SANDBOX",
		Description: "boxedctl forward reaches them." + examples("boxedctl ports build", "boxedctl ports build -o json"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			ports, err := svc.ListPorts(c.Context, id)
			if err != nil {
				return err
			}
			if ports == nil {
				ports = []boxed.Port{}
			}
			t := table.New(table.Column{Name: "PORT", Right: true}, table.Column{Name: "ADDRESS"}, table.Column{Name: "PROCESS"})
			var names []string
			for _, p := range ports {
				names = append(names, strconv.Itoa(int(p.Port)))
				t.Row(strconv.Itoa(int(p.Port)), p.Address, firstOf(p.Process, "-"))
			}
			return a.print(map[string]any{"ports": ports}, names, t)
		},
	}
}
