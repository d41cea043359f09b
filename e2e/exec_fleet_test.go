package e2e_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// fleet makes many small sandboxes. All of them together may be promised 7 CPUs on
// a host of 2 cores, unless its node is told otherwise.
func (n *node) fleet(t *testing.T, size int, cpus float64) []boxed.ID {
	t.Helper()
	began := time.Now()
	ids := make([]boxed.ID, size)
	var made sync.WaitGroup
	turn := make(chan struct{}, 4)
	for i := range ids {
		made.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			s, err := n.Create(ctx, boxed.Spec{Limits: boxed.Limits{MemoryBytes: 128 * boxed.MiB, CPUs: cpus}})
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			ids[i] = s.ID
		})
	}
	made.Wait()
	if t.Failed() {
		t.FailNow()
	}
	t.Logf("%d sandboxes in %v", size, time.Since(began).Round(time.Millisecond))
	return ids
}

// X24, X21, at the size of a host: 500 execs at once over 50 sandboxes. All of
// them run at the same time, none waits for another to end; each has its own
// input, output, error output and exit code, and keeps them.
func TestFiveHundredExecsOverFiftySandboxes(t *testing.T) {
	alone(t)
	n := startBareNode(t)
	ids := n.fleet(t, 50, 0.1)
	const each = 10
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var all, running sync.WaitGroup
	running.Add(len(ids) * each)
	goOn := make(chan struct{})
	began := time.Now()
	for i := range len(ids) * each {
		all.Go(func() {
			id, code := ids[i%len(ids)], i%250+1
			text := fmt.Sprintf("exec %d in %s", i, id)
			in, w := io.Pipe()
			var out, errs safeBuffer
			once := sync.OnceFunc(running.Done)
			defer once()
			go func() {
				<-goOn // every one has been started
				io.WriteString(w, text)
				w.Close()
			}()
			status, err := n.Exec(ctx, id, boxed.ExecRequest{
				Args:  []string{"sh", "-c", `read -r line; echo "$line"; echo "$line" >&2; head -c 20000 /dev/zero; exit ` + fmt.Sprint(code)},
				Stdin: in, Stdout: &out, Stderr: &errs, Started: func(boxed.ExecID) { once() },
			})
			want := text + "\n" + string(make([]byte, 20000))
			if err != nil || status.Code != code || status.Reason != boxed.ReasonExited || out.String() != want || errs.String() != text+"\n" {
				t.Errorf("exec %d: %d bytes, %q, %+v, %v", i, len(out.String()), errs.String(), status, err)
			}
		})
	}
	running.Wait()
	t.Logf("all 500 run after %v", time.Since(began).Round(time.Millisecond))
	close(goOn)
	all.Wait()
	t.Logf("all 500 have ended after %v", time.Since(began).Round(time.Millisecond))
	for _, id := range ids {
		stats, err := n.Stats(t.Context(), id)
		if err != nil || stats.Execs != 0 || stats.Processes != 0 {
			t.Errorf("%s: %+v, %v", id, stats, err)
		}
	}
	// A host that is full of sandboxes at their limits delays one more no more than another load does.
	t.Run("all of them busy", func(t *testing.T) {
		p := n.bystander(n.create(boxed.Spec{Limits: boxed.Limits{MemoryBytes: 128 * boxed.MiB, CPUs: 1}}).ID)
		p.measure(t)
		p.holds(t, func(t *testing.T) func() {
			var stops []func()
			for _, id := range ids {
				stops = append(stops, n.noise(t, id, boxed.ExecRequest{Args: []string{"bash", "-c", "while :; do :; done"}}))
			}
			return func() {
				for _, stop := range stops {
					stop()
				}
			}
		})
	})
}
