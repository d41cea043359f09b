package e2e_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// follower is a client that runs a program, attached, and comes back whenever its
// node goes away, to the byte where it was.
type follower struct {
	t     *testing.T
	c     *client.Client
	id    boxed.ID
	exec  boxed.ExecID
	ended chan answer
	slow  func(received int64) // may block: what a client does that takes its time
	// forgetful is an agent that does not keep what it sent and its client has not got. It says how much that is.
	forgetful bool

	mu    sync.Mutex
	n     int64 // bytes received
	sum   hash.Hash
	text  strings.Builder // the first MiB of them
	times int             // that it came back
	gap   int64
	in    *io.PipeWriter // stdin of the present connection; nil without one
}

// followThrough starts the program and returns once it runs.
func followThrough(t *testing.T, c *client.Client, id boxed.ID, req boxed.ExecRequest, slow func(int64)) *follower {
	t.Helper()
	f := &follower{t: t, c: c, id: id, ended: make(chan answer, 1), slow: slow, sum: sha256.New()}
	started := make(chan boxed.ExecID, 1)
	req.Stdout, req.Started = f, func(id boxed.ExecID) { started <- id }
	if req.OpenStdin {
		req.Stdin = f.stdinLocked()
	}
	first := make(chan answer, 1)
	go func() {
		status, err := c.Exec(t.Context(), id, req)
		first <- answer{status: status, err: err}
	}()
	select {
	case f.exec = <-started:
	case a := <-first:
		t.Fatalf("exec: %+v, %v", a.status, a.err)
	}
	go f.follow(first, req.OpenStdin)
	return f
}

// follow joins the exec again until it has ended.
func (f *follower) follow(first chan answer, stdin bool) {
	a := <-first
	for deadline := time.Now().Add(90 * time.Second); cutOff(a.err) && time.Now().Before(deadline); {
		f.mu.Lock()
		f.times++
		req := boxed.AttachRequest{StdoutOffset: f.n, Stdout: f, Gap: func(_ string, n int64) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.gap += n
		}}
		if stdin {
			req.Stdin = f.stdinLocked()
		}
		f.mu.Unlock()
		a.status, a.err = f.c.Attach(f.t.Context(), f.id, f.exec, req)
		time.Sleep(20 * time.Millisecond) // the node is not there yet
	}
	f.ended <- a
}

// stdinLocked makes the input of the next connection; that of the last one ends.
func (f *follower) stdinLocked() io.Reader {
	r, w := io.Pipe()
	if f.in != nil {
		f.in.CloseWithError(errors.New("another connection has it"))
	}
	f.in = w
	return r
}

// say writes a line of input, once, on the connection that there is: the first,
// or one that was made after the client came back.
func (f *follower) say(line string, back bool) {
	f.t.Helper()
	within(f.t, 60*time.Second, "the client to be there", func() bool {
		f.mu.Lock()
		in, there := f.in, f.times > 0 || !back
		f.mu.Unlock()
		if !there {
			return false
		}
		n, err := io.WriteString(in, line+"\n") // takes as long as it takes to be read
		if n > 0 && err != nil {
			f.t.Fatalf("a part of %q was read: %v", line, err)
		}
		return err == nil
	})
}

// endInput ends the input on the present connection.
func (f *follower) endInput() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.in.Close()
}

func (f *follower) Write(p []byte) (int, error) {
	if f.slow != nil {
		f.mu.Lock()
		n := f.n
		f.mu.Unlock()
		f.slow(n)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n += int64(len(p))
	f.sum.Write(p)
	if f.text.Len() < 1<<20 {
		f.text.Write(p)
	}
	return len(p), nil
}

// hears waits until the output has the text.
func (f *follower) hears(text string) {
	f.t.Helper()
	within(f.t, 60*time.Second, "the exec to write "+text, func() bool { return strings.Contains(f.output(), text) })
}

func (f *follower) output() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.text.String()
}

func (f *follower) received() (n int64, sha string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n, hex.EncodeToString(f.sum.Sum(nil))
}

// end waits for the exec's end: with its own status, after at least one return,
// and with no byte missing.
func (f *follower) end() boxed.ExitStatus {
	f.t.Helper()
	a := soon(f.t, "the exec's end", f.ended)
	f.mu.Lock()
	defer f.mu.Unlock()
	if a.err != nil || a.status.Reason != boxed.ReasonExited {
		f.t.Errorf("%s ended: %+v, %v", f.exec, a.status, a.err)
	}
	if f.times == 0 {
		f.t.Errorf("%s ended before its node went away", f.exec)
	}
	if f.gap != 0 && !f.forgetful || f.n+f.gap != a.status.StdoutBytes {
		f.t.Errorf("%s wrote %d bytes, its client has %d, %d are said to be missing", f.exec, a.status.StdoutBytes, f.n, f.gap)
	}
	return a.status
}

// eventsOf are the types of a sandbox's events, as far back as there are any,
// until one of type last.
func eventsOf(t *testing.T, c *client.Client, id boxed.ID, last boxed.EventType) (types []boxed.EventType) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for e, err := range c.Events(ctx, boxed.CursorOldest) {
		if err != nil {
			t.Fatalf("events until %s of %s: %v; so far %v", last, id, err, types)
		}
		if e.Sandbox != id {
			continue
		}
		if types = append(types, e.Type); e.Type == last {
			return types
		}
	}
	return types
}
