package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// nodeBudget is by how much many sandboxes together may make the node grow, in
// MiB, whatever their callers leave half done.
const nodeBudget = 256

// Many sandboxes, each with as much of the node's memory as its callers can make
// it hold: output that nobody takes, input that nobody reads, uploads and requests
// without an end. The node refuses what is too much, with a code that says so; it
// stays within its budget, and serves a bystander as before.
func TestManySandboxesCannotTakeTheNodesMemory(t *testing.T) {
	alone(t)
	n := startBareNode(t)
	ids := n.fleet(t, 10, 0.6)
	p := n.bystander(n.create(boxed.Spec{Limits: boxed.Limits{MemoryBytes: 128 * boxed.MiB}}).ID)
	for name, c := range map[string]struct {
		each int // of each sandbox
		hold func(n *node, ctx context.Context, id boxed.ID, held func()) error
	}{
		"input that nobody reads": {50, func(n *node, ctx context.Context, id boxed.ID, held func()) error {
			_, err := n.Exec(ctx, id, boxed.ExecRequest{
				Args: []string{"sleep", "1000"}, Stdin: endless{}, Stdout: io.Discard, Started: func(boxed.ExecID) { held() },
			})
			return err
		}},
		"output that nobody takes": {50, func(n *node, ctx context.Context, id boxed.ID, held func()) error {
			_, err := n.Exec(ctx, id, boxed.ExecRequest{Args: []string{"yes"}, Stdout: stuckWriter{ctx.Done()}, Started: func(boxed.ExecID) { held() }})
			return err
		}},
		"collected output": {20, func(n *node, ctx context.Context, id boxed.ID, held func()) error {
			time.AfterFunc(10*time.Second, held)
			_, err := n.Run(ctx, id, boxed.ExecRequest{Args: []string{"sh", "-c", "head -c 1M /dev/zero; head -c 1M /dev/zero >&2; exec sleep 1000"}})
			return err
		}},
		"half a request": {5, func(n *node, ctx context.Context, id boxed.ID, held func()) error {
			return n.half(ctx, "POST", "/v1/sandboxes/"+string(id)+"/exec", "application/json", `{"args":["`, 15_500_000, held)
		}},
		"half a file": {50, func(n *node, ctx context.Context, id boxed.ID, held func()) error {
			return n.half(ctx, "PUT", "/v1/sandboxes/"+string(id)+"/files?path=f", "application/octet-stream", "", 300_000, held)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n.stop(syscall.SIGKILL) // with what another case made it hold
			n.start()
			within(t, 20*time.Second, "the agents to be back", func() bool {
				for _, id := range ids {
					if _, err := n.ListExecs(t.Context(), id); err != nil {
						return false
					}
				}
				return true
			})
			p.measure(t)
			stop := growth(n.cmd.Process.Pid)
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			var held, refused, lost atomic.Int64
			var mu sync.Mutex
			wrong := map[string]int{}
			for _, id := range ids {
				for range c.each {
					running.Go(func() {
						err := c.hold(n, ctx, id, sync.OnceFunc(func() { held.Add(1) }))
						switch code := boxed.CodeOf(err); {
						case ctx.Err() != nil: // it is over
						case code == boxed.CodeExhausted, code == boxed.CodeQuota, code == boxed.CodeRateLimited, code == boxed.CodeNotReady:
							refused.Add(1)
						case code == boxed.CodeLost: // this machine is too slow for its own timeouts
							refused.Add(1)
							lost.Add(1)
						default:
							refused.Add(1)
							mu.Lock()
							wrong[fmt.Sprintf("%v (%s)", err, code)]++
							mu.Unlock()
						}
					})
				}
			}
			within(t, 2*time.Minute, "all to be held or refused", func() bool { return int(held.Load()+refused.Load()) >= len(ids)*c.each })
			beside := p.measure(t)
			most := stop()[0]
			cancel()
			running.Wait()
			t.Logf("%d held, %d refused, %d lost; the node grew by %d MiB, %d KiB for each; a bystander's exec takes %v",
				held.Load(), refused.Load()-lost.Load(), lost.Load(), most>>10, most/max(1, int(held.Load())), beside["exec"].at(0.5).Round(time.Microsecond))
			for text, times := range wrong {
				t.Errorf("refused %d times as %s", times, text)
			}
			if most > nodeBudget<<10 {
				t.Errorf("the node grew by %d MiB", most>>10)
			}
		})
	}
}

// half sends a request whose body ends early, and waits.
func (n *node) half(ctx context.Context, method, path, media, begin string, size int64, held func()) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", strings.TrimPrefix(n.endpoint, "http://"))
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s",
		method, path, n.key, media, size+1_000_000, begin)
	answered := make(chan error, 1)
	go func() {
		head := make([]byte, 4096)
		got, err := c.Read(head)
		for _, code := range []boxed.Code{boxed.CodeExhausted, boxed.CodeQuota, boxed.CodeRateLimited, boxed.CodeNotReady} {
			if strings.Contains(string(head[:got]), `"`+string(code)+`"`) {
				answered <- boxed.Errorf(code, "refused")
				return
			}
		}
		if err != nil {
			answered <- boxed.Errorf(boxed.CodeLost, "no answer: %w", err)
			return
		}
		answered <- fmt.Errorf("answered with %q", head[:min(got, 400)])
	}()
	io.CopyN(c, endless{}, size)
	held()
	return <-answered
}

// endless is the letter a.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}
