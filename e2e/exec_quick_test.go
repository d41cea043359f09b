package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// quick does something many times, by so many at once, and stops at the first
// that fails.
func quick(t *testing.T, times, atOnce int, do func(ctx context.Context, i int) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	numbers := make(chan int)
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for i := range numbers {
				one, done := context.WithTimeout(ctx, 60*time.Second)
				err := do(one, i)
				done()
				if err != nil && ctx.Err() == nil {
					t.Errorf("number %d: %v", i, err)
					cancel()
				}
			}
		})
	}
	began := time.Now()
	for i := 0; i < times && ctx.Err() == nil; i++ {
		select {
		case numbers <- i:
		case <-ctx.Done():
		}
	}
	close(numbers)
	workers.Wait()
	t.Logf("%d in %v", times, time.Since(began).Round(time.Millisecond))
}

// collect runs a program and returns its standard output and error together.
func (n *node) collect(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (string, boxed.ExitStatus, error) {
	var out safeBuffer
	req.Stdout, req.Stderr = &out, &out
	status, err := n.Exec(ctx, id, req)
	return out.String(), status, err
}

// X5, moby/moby#27289: an exec's output was sometimes empty. X24,
// superradcompany/microsandbox#1212, beam-cloud/beta9#1577: exit codes of fast
// commands were lost, and zombies stayed. 10,000 runs of echo over the whole path,
// by streams and by calls, each with an exit code of its own and some with an
// orphan behind them: no output is empty or cut, no code is lost, nothing is left
// of them, and the agent has neither descriptors nor memory to show for it.
func TestTenThousandQuickExecsLoseNothing(t *testing.T) {
	n := startBareNode(t)
	boxes := []boxed.ID{n.create(boxed.Spec{}).ID, n.create(boxed.Spec{}).ID, n.create(boxed.Spec{}).ID, n.create(boxed.Spec{}).ID}
	quick(t, 200, 8, func(ctx context.Context, i int) error { // what is made once is there
		_, _, err := n.collect(ctx, boxes[i%len(boxes)], boxed.ExecRequest{Args: []string{"true"}})
		return err
	})
	agents, before := make([]int, len(boxes)), make([]int, len(boxes))
	for i, id := range boxes {
		agents[i] = n.agentPID(id)
		before[i] = descriptors(t, agents[i])
	}
	nodeBefore := descriptors(t, n.cmd.Process.Pid)

	quick(t, 10_000, 16, func(ctx context.Context, i int) error {
		id, want, code := boxes[i%len(boxes)], fmt.Sprintf("line %d\n", i), i%256
		script := fmt.Sprintf("echo line %d; exit %d", i, code)
		if i%10 == 0 { // a child that ends after it: an orphan is the agent's to wait for
			script = "(sleep 0.01 >/dev/null &) ; " + script
		}
		req := boxed.ExecRequest{Args: []string{"sh", "-c", script}}
		var out string
		var status boxed.ExitStatus
		var err error
		if i%8 < 4 { // a stream
			out, status, err = n.collect(ctx, id, req)
		} else { // or one call
			var result *client.ExecResult
			if result, err = n.Run(ctx, id, req); err == nil {
				out, status = string(result.Stdout), result.ExitStatus
			}
		}
		if err != nil || out != want || status.Code != code || status.Reason != boxed.ReasonExited || status.StdoutBytes != int64(len(want)) {
			return fmt.Errorf("%q, %+v, %w", out, status, err)
		}
		return nil
	})
	for i, id := range boxes {
		within(t, 10*time.Second, "only the agent to be left", func() bool { return len(insiders(agents[i])) == 1 })
		// As the sandbox sees it itself.
		if out, _ := n.sh(id, `grep -h '^State:\sZ' /proc/[0-9]*/status; true`); out != "" {
			t.Errorf("zombies: %s", out)
		}
		within(t, 10*time.Second, "the agent to have closed its files", func() bool { return descriptors(t, agents[i]) <= before[i]+2 })
		stats, err := n.Stats(t.Context(), id)
		if err != nil || stats.Execs != 0 || stats.AgentRSSBytes > 16*boxed.MiB {
			t.Errorf("%+v, %v", stats, err)
		}
		t.Logf("agent after 2,500 execs: %d KiB, %d descriptors (%d before)", stats.AgentRSSBytes>>10, descriptors(t, agents[i]), before[i])
	}
	// The client keeps idle connections; each is one of the node's.
	n.Client.Close()
	within(t, 10*time.Second, "the node to have closed its files", func() bool { return descriptors(t, n.cmd.Process.Pid) <= nodeBefore+2 })
}

// X6, moby/moby#29421: the end of standard input was sometimes not delivered.
// cat ends after its input was closed in 1,000 runs, with and without bytes.
func TestTheEndOfInputArrives(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	quick(t, 1000, 16, func(ctx context.Context, i int) error {
		text := strings.Repeat("x", i%3*1000) // none at all, too
		out, status, err := n.collect(ctx, id, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader(text)})
		if err != nil || out != text || status.Code != 0 {
			return fmt.Errorf("%d bytes of %d, %+v, %w", len(out), len(text), status, err)
		}
		return nil
	})
}

// X3, moby/moby#41052, moby/moby#26995: an exec hung until a background child
// had ended. It returns with its leader, every time, with what the leader wrote;
// the child lives on until it is killed by the exec's ID.
func TestABackgroundChildHoldsNobodyUp(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	agent := n.agentPID(id)
	quick(t, 100, 16, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		out, status, err := n.collect(ctx, id, boxed.ExecRequest{Args: []string{"sh", "-c", "sleep 1000 & echo left"}})
		if err != nil || out != "left\n" || status.Code != 0 {
			return fmt.Errorf("%q, %+v, %w", out, status, err)
		}
		return nil
	})
	if left := len(insiders(agent)); left != 101 {
		t.Errorf("%d processes, want the agent and 100 that were left behind", left)
	}
	execs, err := n.ListExecs(t.Context(), id)
	if err != nil || len(execs) != 100 {
		t.Fatalf("%d execs, %v", len(execs), err)
	}
	for _, e := range execs {
		if err := n.KillExec(t.Context(), id, e.ID); err != nil {
			t.Errorf("kill: %v", err)
		}
	}
	within(t, 10*time.Second, "all of them to be gone", func() bool { return len(insiders(agent)) == 1 })
}
