package e2e_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// F1, OpenSandbox#895: a file was not there right after its upload was answered
// with 200. Uploaded, then read by a program: 1,000 times, of changing sizes,
// over files that are there and that are not.
func TestAnUploadedFileIsThere(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	quick(t, 1000, 8, func(ctx context.Context, i int) error {
		path := fmt.Sprintf("d%d/f", i%500) // each twice
		text := fmt.Sprintf("number %d %s", i, strings.Repeat("x", i*37%5000))
		if _, err := n.WriteFile(ctx, id, boxed.WriteRequest{Path: path, Content: strings.NewReader(text), Parents: true}); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		out, status, err := n.collect(ctx, id, boxed.ExecRequest{Args: []string{"cat", path}})
		if err != nil || out != text || status.Code != 0 {
			return fmt.Errorf("%.60q, want %.60q, %+v, %w", out, text, status, err)
		}
		return nil
	})
}

// F2, bytedance/deer-flow#4811, cloudflare/sandbox-sdk#647: a whole file was held
// in memory, and there were hidden caps. A sparse file of 10 GiB, which takes no
// room in its sandbox, is downloaded; node and agent stay as small as they were.
func TestTenGibibytesDownloadWithFlatMemory(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	const size = 10 * gib
	// Something at either end, so that zeros alone will not do.
	if out, status := n.sh(id, `printf begin > big; truncate -s 10G big; printf end | dd of=big bs=1 seek=$((10*1024**3-3)) conv=notrunc status=none; stat -c %s big`); out != fmt.Sprintln(int64(size)) {
		t.Fatalf("%q, %+v", out, status)
	}
	agent := n.agentPID(id)
	stop := growth(agent, n.cmd.Process.Pid)
	began := time.Now()
	f, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: "big", Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.Length != size || f.Info.Size != size {
		t.Errorf("announced: %d bytes of %d", f.Length, f.Info.Size)
	}
	ends := &endsOf{}
	got, err := io.CopyBuffer(struct{ io.Writer }{ends}, struct{ io.Reader }{f}, make([]byte, 256<<10))
	grown := stop()
	if err != nil || got != size || string(ends.first) != "begin" || string(ends.last) != "end" {
		t.Errorf("%d bytes, %q … %q, %v", got, ends.first, ends.last, err)
	}
	t.Logf("%d MiB/s; the agent grew by %d KiB, the node by %d", int64(float64(size>>20)/time.Since(began).Seconds()), grown[0], grown[1])
	if grown[0] > 8<<10 || grown[1] > 16<<10 {
		t.Errorf("the agent grew by %d KiB, the node by %d", grown[0], grown[1])
	}
	// A part from the far end, where 32 bits do not reach.
	part, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: "big", Offset: size - 5, Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer part.Close()
	if tail, err := io.ReadAll(part); err != nil || string(tail) != "\x00\x00end" {
		t.Errorf("the last 5 bytes: %q, %v", tail, err)
	}
}

// endsOf keeps the first 5 and the last 3 bytes of what is written.
type endsOf struct{ first, last []byte }

func (e *endsOf) Write(p []byte) (int, error) {
	if len(e.first) < 5 {
		e.first = append(e.first, p[:min(len(p), 5-len(e.first))]...)
	}
	e.last = append(e.last, p[max(0, len(p)-3):]...)
	e.last = e.last[max(0, len(e.last)-3):]
	return len(p), nil
}

// F2, the other way: 1 GiB is uploaded and downloaded again, the same bytes, in a
// sandbox with room for them. F8, daytonaio/daytona#4368: what has no room is
// refused as that, however much was on its way, leaves nothing, and the sandbox
// lives on.
func TestAGibibyteIsUploadedWithFlatMemory(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{Limits: boxed.Limits{MemoryBytes: 1536 * boxed.MiB, WorkspaceBytes: 1100 * boxed.MiB}}).ID
	agent := n.agentPID(id)
	flat := func(t *testing.T, do func()) {
		t.Helper()
		stop := growth(agent, n.cmd.Process.Pid)
		do()
		grown := stop()
		t.Logf("the agent grew by %d KiB, the node by %d", grown[0], grown[1])
		if grown[0] > 8<<10 || grown[1] > 16<<10 {
			t.Errorf("the agent grew by %d KiB, the node by %d", grown[0], grown[1])
		}
	}
	in, out := newSum(), newSum()
	t.Run("upload", func(t *testing.T) {
		flat(t, func() {
			info, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "big", Content: io.TeeReader(random(5, gib), in)})
			if err != nil || info.Size != gib {
				t.Fatalf("%+v, %v", info, err)
			}
		})
	})
	t.Run("download", func(t *testing.T) {
		flat(t, func() {
			f, err := n.ReadFile(t.Context(), id, boxed.ReadRequest{Path: "big", Length: -1})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := io.Copy(out, f); err != nil || out.n != gib || out.String() != in.String() {
				t.Errorf("%d bytes, the same: %t, %v", out.n, out.String() == in.String(), err)
			}
		})
	})
	t.Run("no room", func(t *testing.T) {
		flat(t, func() {
			_, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "more", Content: random(6, 10*gib)})
			if boxed.CodeOf(err) != boxed.CodeNoSpace || !strings.Contains(err.Error(), "full") {
				t.Errorf("%v (%s)", err, boxed.CodeOf(err))
			}
		})
		if text, status := n.sh(id, "ls -A /workspace; rm big; head -c 100M /dev/zero > small; stat -c %s small"); text != "big\n104857600\n" {
			t.Errorf("%q, %+v", text, status)
		}
	})
}

// F4, F1: many transfers of one sandbox at once, as programs that fetch results in
// parallel make them. Each comes whole, and none is refused for the others' sake.
func TestManyTransfersAtOnce(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	quick(t, 400, 50, func(ctx context.Context, i int) error {
		path, text := fmt.Sprintf("file-%d", i), strings.Repeat(fmt.Sprintf("%d,", i), 1000)
		if _, err := n.WriteFile(ctx, id, boxed.WriteRequest{Path: path, Content: strings.NewReader(text)}); err != nil {
			return fmt.Errorf("write (%s): %w", boxed.CodeOf(err), err)
		}
		f, err := n.ReadFile(ctx, id, boxed.ReadRequest{Path: path, Length: -1})
		if err != nil {
			return fmt.Errorf("read (%s): %w", boxed.CodeOf(err), err)
		}
		defer f.Close()
		if got, err := io.ReadAll(f); err != nil || string(got) != text {
			return fmt.Errorf("%d bytes of %d, %w", len(got), len(text), err)
		}
		return nil
	})
}
