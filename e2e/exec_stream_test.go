package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

const gib = 1 << 30

// random is size bytes that do not repeat, the same for the same seed: blocks of
// noise with their numbers, which cost nothing to make.
func random(seed byte, size int64) io.Reader {
	noise := make([]byte, 64<<10)
	rand.NewChaCha8([32]byte{seed}).Read(noise)
	return io.LimitReader(&blocks{noise: noise}, size)
}

type blocks struct {
	noise  []byte
	number uint64
	left   []byte
}

func (b *blocks) Read(p []byte) (int, error) {
	if len(b.left) == 0 {
		b.number++
		binary.BigEndian.PutUint64(b.noise, b.number)
		b.left = b.noise
	}
	n := copy(p, b.left)
	b.left = b.left[n:]
	return n, nil
}

// sum counts and hashes what is written.
type sum struct {
	hash.Hash
	n int64
}

func newSum() *sum { return &sum{Hash: sha256.New()} }

func (s *sum) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	return s.Hash.Write(p)
}

func (s *sum) String() string { return fmt.Sprintf("%x", s.Sum(nil)) }

// ctlFlat runs boxedctl, joined with the streams, and fails if its memory or that
// of others grows beyond a bound in KiB: what streams must not be held.
func (n *node) ctlFlat(t *testing.T, bound int, others map[string]int, stdin io.Reader, stdout io.Writer, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "boxedctl"), args...)
	cmd.Env = n.env()
	var errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	names, pids := []string{"boxedctl"}, []int{cmd.Process.Pid}
	for name, pid := range others {
		names, pids = append(names, name), append(pids, pid)
	}
	stop := growth(pids...)
	began := time.Now()
	err := cmd.Wait()
	grown := stop()
	if err != nil {
		t.Errorf("boxedctl %q: %v\n%s", args, err, errs.String())
	}
	for i, name := range names {
		t.Logf("%s grew by %d KiB in %v", name, grown[i], time.Since(began).Round(time.Millisecond))
		if grown[i] > bound {
			t.Errorf("%s grew by %d MiB", name, grown[i]>>10)
		}
	}
}

// X10, e2b-dev/E2B#1472, alibaba/OpenSandbox#981: large output ran the client or
// the server out of memory. X8, microsandbox#706: input over 64 KiB failed. 1 GiB
// goes in and out through cat, and comes back the same; neither node nor client
// nor agent grows by more than a few windows of it.
func TestAGibibyteStreamsBothWaysWithFlatMemory(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	// What a process needs once and for all is not growth by what streams.
	if _, _, code := n.ctlIn(random(0, 32<<20), "exec", "-i", string(id), "cat"); code != 0 {
		t.Fatal("cat failed")
	}
	processes := map[string]int{"boxed-node": n.cmd.Process.Pid, "boxed-agent": n.agentPID(id)}
	const bound = 32 << 10 // KiB
	t.Run("in and out", func(t *testing.T) {
		in, out := newSum(), newSum()
		n.ctlFlat(t, bound, processes, io.TeeReader(random(1, gib), in), out, "exec", "-i", string(id), "cat")
		if in.n != gib || out.n != gib || in.String() != out.String() {
			t.Errorf("%d bytes in, %d out, the same: %t", in.n, out.n, in.String() == out.String())
		}
	})
	t.Run("collected", func(t *testing.T) { // optional, and bounded
		stop := growth(n.cmd.Process.Pid)
		result, err := n.Run(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", "yes | head -c 1G"}})
		if err != nil || !result.StdoutTruncated || result.StdoutBytes != gib || len(result.Stdout) != boxed.CollectedOutput || result.Code != 0 {
			t.Errorf("%+v, %v", result.ExitStatus, err)
		}
		if grown := stop()[0]; grown > bound {
			t.Errorf("the node grew by %d MiB", grown>>10)
		}
	})
}

// X8, superradcompany/microsandbox#706: 100 MiB of input arrive as they were; a
// program that does not read it is told to the writer, and is no failure of the
// exec.
func TestInputArrivesWholeOrItsWriterIsTold(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	t.Run("100 MiB", func(t *testing.T) {
		in := newSum()
		out, status := n.exec(id, boxed.ExecRequest{Args: []string{"sha256sum"}, Stdin: io.TeeReader(random(2, 100<<20), in)})
		if status.Code != 0 || out != in.String()+"  -\n" {
			t.Errorf("%q, %+v", out, status)
		}
	})
	// Nobody reads: the writer must not write for ever, nor believe that all went well.
	for name, c := range map[string]struct {
		script string
		code   int
	}{
		"an early exit":                       {"exit 3", 3},
		"an early exit after a little":        {"head -c 100 >/dev/null; exit 4", 4},
		"input closed by a program that runs": {"exec <&-; echo closed; sleep 2; exit 5", 5},
	} {
		t.Run(name, func(t *testing.T) {
			in, w := io.Pipe()
			wrote := make(chan error, 1)
			go func() {
				_, err := io.Copy(w, random(3, 100<<20))
				wrote <- err
			}()
			out, status := n.exec(id, boxed.ExecRequest{Args: []string{"bash", "-c", c.script}, Stdin: in})
			if status.Code != c.code || status.Reason != boxed.ReasonExited {
				t.Errorf("%q, %+v", out, status)
			}
			select {
			case err := <-wrote:
				if err == nil {
					t.Error("the writer believes that everything was read")
				} else if !strings.Contains(err.Error(), "no longer reads") {
					t.Errorf("the writer got %q", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("the writer hangs")
				in.CloseWithError(io.ErrClosedPipe)
			}
		})
	}
}

// X9, e2b-dev/E2B#1441, daytonaio/daytona#2606: a character that was split across
// chunks was corrupted. X18, OpenSandbox#902: blank lines vanished, and a last
// line without its end. Streams are bytes: an emoji that arrives byte by byte, in
// and out, is whole, and what is around it is as it was written.
func TestStreamsAreBytes(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	t.Run("an emoji split at each byte", func(t *testing.T) {
		const text = "\n\na😀é\r\n\n\x00\xff\xfe€ last line"
		in, w := io.Pipe()
		go func() {
			for _, b := range []byte(text) {
				w.Write([]byte{b})
			}
			w.Close()
		}()
		// It passes on each byte as soon as it has it.
		out, status := n.exec(id, boxed.ExecRequest{Args: []string{"python3", "-c", `
import os, time
while b := os.read(0, 1):
    os.write(1, b)
    time.sleep(0.002)`}, Stdin: in})
		if out != text || status.StdoutBytes != int64(len(text)) {
			t.Errorf("got %q, want %q", out, text)
		}
	})
	t.Run("through boxedctl", func(t *testing.T) {
		const script = `printf '\n\nfirst\n\n\n'; printf 'last' ; printf '\nerr\n\n' >&2`
		out, errs, code := n.ctl("exec", string(id), "bash", "-c", script)
		if out != "\n\nfirst\n\n\nlast" || errs != "\nerr\n\n" || code != 0 {
			t.Errorf("%q, %q, %d", out, errs, code)
		}
	})
	t.Run("arguments", func(t *testing.T) {
		args := []string{"printf", `%s\0`, "", " ", "$(touch /tmp/x);`id`", "--", "-n", "a\nb", "\xff\xfe", "😀", `"'\`}
		want := strings.Join(args[2:], "\x00") + "\x00"
		if out, _ := n.exec(id, boxed.ExecRequest{Args: args}); out != want {
			t.Errorf("got %q, want %q", out, want)
		}
	})
}

// X11, e2b-dev/infra#2639: with nobody reading, the daemon in the sandbox grew.
// A detached program that writes 1 GiB ends all the same; the agent keeps the end
// of it, no more, and says how many bytes are gone.
func TestADetachedExecDoesNotWaitForAReader(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	agent := n.agentPID(id)
	n.sh(id, "true")
	stop := growth(agent, n.cmd.Process.Pid)
	e, err := n.StartExec(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", "head -c 1G /dev/zero; echo end; head -c 300M /dev/zero >&2"}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.WaitExec(t.Context(), id, e.ID)
	grown := stop()
	if err != nil || got.Status.Code != 0 || got.Status.StdoutBytes != gib+4 || got.Status.StderrBytes != 300<<20 {
		t.Fatalf("%+v, %v", got, err)
	}
	t.Logf("the agent grew by %d KiB, the node by %d", grown[0], grown[1])
	// The node has nothing of the output; it has only just started, and is still growing by itself.
	if grown[0] > 12<<10 || grown[1] > 24<<10 {
		t.Errorf("the agent grew by %d KiB, the node by %d", grown[0], grown[1])
	}
	var mu sync.Mutex
	gaps := map[string]int64{}
	var out, errs bytes.Buffer
	status, err := n.Attach(t.Context(), id, e.ID, boxed.AttachRequest{
		Stdout: &out, Stderr: &errs, Gap: func(stream string, n int64) {
			mu.Lock()
			defer mu.Unlock()
			gaps[stream] += n
		},
	})
	if err != nil || status.Code != 0 {
		t.Errorf("%+v, %v", status, err)
	}
	if kept := int64(out.Len()); gaps["stdout"]+kept != gib+4 || kept < boxed.OutputRing/2 || kept > boxed.OutputRing || !bytes.HasSuffix(out.Bytes(), []byte("\x00end\n")) {
		t.Errorf("stdout: %d bytes after a gap of %d", kept, gaps["stdout"])
	}
	if kept := int64(errs.Len()); gaps["stderr"]+kept != 300<<20 {
		t.Errorf("stderr: %d bytes after a gap of %d", kept, gaps["stderr"])
	}
}
