package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
)

// maxTries is how many of a name's addresses are tried.
const maxTries = 4

// reach makes a flow's first connection, which is on its record. There may be more later,
// at once.
func (f *flow) reach(ctx context.Context) (net.Conn, *refusal) {
	conn, r := f.connect(ctx)
	if r == nil && f.rec.Exit == "" {
		f.rec.Address = conn.RemoteAddr().String()
	}
	return conn, r
}

// connect resolves the flow's host once, judges every answer, and dials what it judged.
func (f *flow) connect(ctx context.Context) (net.Conn, *refusal) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(f.ctx, cancel)
	defer stop()
	if to, relay := f.by(); to != "" && !f.foreign { // one hop only
		return f.through(ctx, to, relay)
	}
	judge := f.s.proxy.judge
	if f.foreign && !f.private {
		judge = f.s.proxy.shut
	}
	addrs, r := f.s.proxy.addresses(ctx, judge, f.host, f.port)
	if r != nil {
		return nil, r
	}
	conn, err := f.s.proxy.dialAny(ctx, judge, f.host, addrs)
	if err != nil {
		if cause := context.Cause(f.ctx); cause != nil {
			err = cause
		}
		return nil, asRefusal(err, boxed.EgressConnectFailed)
	}
	return conn, nil
}

// addresses are those of a host, all of which may be connected to. One that may not refuses
// the lot: a name that has such an answer is not one to trust with the others.
func (p *Proxy) addresses(ctx context.Context, judge judgeFunc, host Host, port uint16) ([]netip.AddrPort, *refusal) {
	answers := []netip.Addr{host.Addr()}
	if !host.IsAddr() {
		var err error
		if answers, err = p.cfg.Resolver.Resolve(ctx, host.String()); err != nil {
			var missing *net.DNSError
			if errors.As(err, &missing) && missing.IsNotFound {
				return nil, refuse(boxed.EgressNoAddress, "%s has no address", host)
			}
			return nil, refuse(boxed.EgressResolveFailed, "%s: %v", host, err)
		}
	}
	if len(answers) == 0 {
		return nil, refuse(boxed.EgressNoAddress, "%s has no address", host)
	}
	list := make([]netip.AddrPort, 0, len(answers))
	for _, a := range answers {
		ap := netip.AddrPortFrom(a.Unmap(), port)
		if reason, class := judge(host, ap); reason != boxed.EgressAllowed {
			return nil, refuse(reason, "%s is at %s, which is %s", host, ap.Addr(), class)
		}
		list = append(list, ap)
	}
	return list[:min(len(list), maxTries)], nil
}

// dialAny tries the addresses one after the other, each a little after the one before,
// until one answers.
func (p *Proxy) dialAny(ctx context.Context, judge judgeFunc, host Host, addrs []netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Times.Dial)
	defer cancel()
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result, len(addrs))
	var wg sync.WaitGroup
	begin := func(ap netip.AddrPort) {
		wg.Go(func() {
			conn, err := p.dialOne(ctx, judge, host, ap)
			results <- result{conn, err}
		})
	}
	next := 0
	var errs []error
	timer := time.NewTimer(p.cfg.Times.Stagger)
	defer timer.Stop()
	for pending := 0; ; {
		if next < len(addrs) && pending == 0 {
			begin(addrs[next])
			next, pending = next+1, pending+1
			timer.Reset(p.cfg.Times.Stagger)
		}
		select {
		case <-timer.C:
			if next < len(addrs) {
				begin(addrs[next])
				next, pending = next+1, pending+1
				timer.Reset(p.cfg.Times.Stagger)
			}
		case r := <-results:
			pending--
			if r.err == nil {
				cancel()
				go func() { // those that were slower
					wg.Wait()
					close(results)
					for late := range results {
						if late.conn != nil {
							late.conn.Close()
						}
					}
				}()
				return r.conn, nil
			}
			errs = append(errs, r.err)
			if pending == 0 && next == len(addrs) {
				return nil, errors.Join(errs...)
			}
		}
	}
}

// dialOne connects to an address that was judged, and judges once more what the system is
// about to connect to.
func (p *Proxy) dialOne(ctx context.Context, judge judgeFunc, host Host, ap netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{
		KeepAlive: keepAlive,
		ControlContext: func(_ context.Context, network, address string, _ syscall.RawConn) error {
			got, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			if reason, class := judge(host, got); reason != boxed.EgressAllowed {
				return refuse(reason, "%s is %s", got.Addr(), class)
			}
			return nil
		},
	}
	conn, err := p.dial(ctx, &d, ap)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", ap, err)
	}
	return conn, nil
}

func dialAddress(ctx context.Context, d *net.Dialer, ap netip.AddrPort) (net.Conn, error) {
	return d.DialContext(ctx, "tcp", ap.String())
}
