package sandboxtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// runLife tests what becomes of sandboxes over time and restarts.
func runLife(t *testing.T, f Fixture) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"pause and resume keep everything", pauseKeepsFiles},
		{"a ttl and an idle timeout end a sandbox", deadlinesHold},
		{"destroy leaves nothing", destroyLeavesNothing},
		{"every sandbox has a uid of its own", uidsAreUnique},
		{"a restart of the daemon adopts", restartAdopts},
		{"a warm sandbox is claimed", warmIsClaimed},
		{"a crash is told", crashIsTold},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, f) })
	}
}

// L7, e2b-dev/E2B#884, #1104: data was lost on the second resume. 20 rounds, with
// the hash of a file after each, while a program runs on and loses no line.
func pauseKeepsFiles(t *testing.T, f Fixture) {
	s := newSite(t, f)
	box := s.create()
	content := make([]byte, 4<<20)
	rand.NewChaCha8([32]byte{1}).Read(content)
	ctx := t.Context()
	if _, err := s.WriteFile(ctx, box.ID, boxed.WriteRequest{Path: "f", Content: strings.NewReader(string(content))}); err != nil {
		t.Fatal(err)
	}
	job := s.begin(box.ID, boxed.ExecRequest{Args: []string{"sh", "-c", scriptCount}})
	for i := range 20 {
		if p, err := s.Pause(ctx, box.ID); err != nil || p.State != boxed.StatePaused {
			t.Fatalf("pause %d: %+v, %v", i, p, err)
		}
		_, err := s.Exec(ctx, box.ID, boxed.ExecRequest{Args: []string{"true"}})
		wantCode(t, "exec while paused", err, boxed.CodeConflict)
		if p, err := s.Resume(ctx, box.ID); err != nil || p.State != boxed.StateRunning {
			t.Fatalf("resume %d: %+v, %v", i, p, err)
		}
		f := s.read(box.ID, "f", 0, -1)
		got, err := io.ReadAll(f)
		if f.Close(); err != nil || sha256.Sum256(got) != sha256.Sum256(content) {
			t.Fatalf("round %d: %d bytes, %v", i, len(got), err)
		}
		n := len(job.out.String())
		eventually(t, "what ran runs on", func() bool { return len(job.out.String()) > n })
	}
	for i, line := range strings.Split(job.out.String(), "\n") {
		if line != fmt.Sprint(i) && !strings.HasPrefix(fmt.Sprint(i), line) { // the last one may not be whole
			t.Fatalf("line %d is %q", i, line)
		}
	}
	if s.processes(box.ID, job.id) == 0 {
		t.Error("it is dead")
	}
}

// L1, L5.
func deadlinesHold(t *testing.T, f Fixture) {
	s := newSite(t, f)
	short := s.create(func(spec *boxed.Spec) { spec.TTL = boxed.Duration(time.Minute) })
	idle := s.create(func(spec *boxed.Spec) { spec.IdleTimeout = boxed.Duration(time.Minute) })
	busy := s.create(func(spec *boxed.Spec) { spec.IdleTimeout = boxed.Duration(time.Minute) })
	if _, err := s.StartExec(t.Context(), busy.ID, boxed.ExecRequest{Args: []string{"sleep", "3600"}}); err != nil {
		t.Fatal(err)
	}
	s.ahead.Add(int64(2 * time.Minute))
	for _, c := range []struct {
		id     boxed.ID
		reason boxed.EndReason
	}{{short.ID, boxed.EndExpired}, {idle.ID, boxed.EndIdle}} {
		end := s.waitEnd(c.id)
		if end.State != boxed.StateStopped || end.Reason != c.reason {
			t.Errorf("%s, %s: %s", end.State, end.Reason, end.Message)
		}
		_, err := s.Exec(t.Context(), c.id, boxed.ExecRequest{Args: []string{"true"}})
		wantCode(t, "exec after the end", err, boxed.CodeGone)
	}
	s.works(busy.ID)
}

func (s *site) waitEnd(id boxed.ID) *boxed.Sandbox {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	end, err := s.Wait(ctx, id, boxed.StateStopped)
	if err != nil {
		s.t.Fatalf("it does not end: %v", err)
	}
	return end
}

// L8, L12, X2: on delete.
func destroyLeavesNothing(t *testing.T, f Fixture) {
	s := newSite(t, f)
	box := s.create()
	job := s.begin(box.ID, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTree}})
	eventually(t, "it runs", func() bool { return strings.Contains(job.out.String(), "started") })
	began := time.Now()
	if err := s.Destroy(t.Context(), box.ID); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took) // L11
	}
	if status := job.wait(t); status.Reason != boxed.ReasonLost || status.Code != -1 || job.err != nil {
		t.Errorf("the exec under it: %+v, %v", status, job.err) // X14
	}
	if err := s.Destroy(t.Context(), box.ID); err != nil {
		t.Errorf("again: %v", err)
	}
	s.left(0)
}

// left waits until n containers and directories are there, and no more: what is
// stopped is cleared away behind a destroy.
func (s *site) left(n int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%d containers and directories are left", n), func() bool {
		all, err := s.f.Driver.List(context.Background())
		if err != nil {
			s.t.Fatal(err)
		}
		dirs, err := os.ReadDir(s.cfg.Dir)
		if err != nil {
			s.t.Fatal(err)
		}
		return len(all) == n && len(dirs) == n
	})
}

// I3: the kernel counts its quotas by uid.
func uidsAreUnique(t *testing.T, f Fixture) {
	s := newSite(t, f)
	a, b := s.create(), s.create()
	x, y := s.sh(a.ID, scriptUser).out, s.sh(b.ID, scriptUser).out
	if x == y || x == "" {
		t.Errorf("uids %q and %q", x, y)
	}
}

// L3, L8.
func restartAdopts(t *testing.T, f Fixture) {
	s := newSite(t, f)
	box, paused := s.create(func(spec *boxed.Spec) { spec.Name = "web" }), s.create()
	job, err := s.StartExec(t.Context(), box.ID, boxed.ExecRequest{Args: []string{"sh", "-c", scriptCount}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	var id boxed.ExecID
	started, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		s.Exec(ctx, box.ID, boxed.ExecRequest{Args: []string{"sh", "-c", scriptCount}, Started: func(e boxed.ExecID) { id = e; close(started) }})
	}()
	<-started
	if _, err := s.Pause(t.Context(), paused.ID); err != nil {
		t.Fatal(err)
	}
	cancel(boxed.ErrGoingAway)
	<-done
	s.restart()
	s.left(2)
	s.works(box.ID)
	if got, err := s.Get(box.ID); err != nil || got.Name != "web" || got.State != boxed.StateRunning || !got.ExpiresAt.Equal(box.ExpiresAt) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, e := range []boxed.ExecID{job.ID, id} {
		if got, err := s.GetExec(t.Context(), box.ID, e); err != nil || !got.Running {
			t.Errorf("%+v, %v", got, err)
		}
	}
	eventually(t, "its output is there from the first byte on", func() bool {
		var out buffer
		status, err := s.Attach(t.Context(), box.ID, job.ID, boxed.AttachRequest{NoFollow: true, Stdout: &out})
		if err != nil || status.Reason != "" {
			t.Fatalf("%q, %+v, %v", out.String(), status, err)
		}
		return strings.HasPrefix(out.String(), "0\n1\n")
	})
	if got, err := s.Resume(t.Context(), paused.ID); err != nil || got.State != boxed.StateRunning {
		t.Errorf("%+v, %v", got, err)
	}
	s.works(paused.ID)
}

// Decision 9.
func warmIsClaimed(t *testing.T, f Fixture) {
	s := newSite(t, f, func(c *sandbox.Config) {
		template := c.Templates[boxed.DefaultTemplate]
		template.Pool = 1
		c.Templates = map[string]boxed.Template{boxed.DefaultTemplate: template}
	})
	warm := func() bool { infos, _, _ := s.Pools(); return infos[0].Ready == 1 && infos[0].Runtime != "" }
	eventually(t, "the pool is full", warm)
	s.restart()
	eventually(t, "the pool is full again", warm)
	box := s.create(func(spec *boxed.Spec) {
		spec.Limits.MemoryBytes = 300 * boxed.MiB
		spec.Env = map[string]string{"MINE": "1"}
		spec.Files = []boxed.File{{Path: "f", Content: []byte("x"), Mode: 0o600}}
	})
	if !box.Warm {
		t.Errorf("missed: %s", box.WarmMiss)
	}
	stats, err := s.Stats(t.Context(), box.ID)
	if err != nil || stats.MemoryLimit != 300*boxed.MiB {
		t.Errorf("%+v, %v", stats, err)
	}
	if info, err := s.Stat(t.Context(), box.ID, "/workspace/f"); err != nil || info.Mode != 0o600 {
		t.Errorf("%+v, %v", info, err)
	}
	s.works(box.ID)
	// Warm ones outlive a stop on purpose; this test's is not wanted any more.
	t.Cleanup(func() {
		all, err := f.Driver.List(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, c := range all {
			err = errors.Join(err, f.Driver.Remove(context.Background(), c.ContainerID))
		}
		if err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		if err := s.Destroy(context.Background(), box.ID); err != nil {
			t.Error(err)
		}
		s.ended()
		s.ended = nil
	})
}

// X25, L13.
func crashIsTold(t *testing.T, f Fixture) {
	if f.Crash == nil {
		t.Skip("the driver cannot be made to crash a container")
	}
	s := newSite(t, f)
	box := s.create()
	job := s.begin(box.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	all, err := f.Driver.List(t.Context())
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	began := time.Now()
	f.Crash(t, all[0].ContainerID)
	end := s.waitEnd(box.ID)
	if end.State != boxed.StateFailed || end.Reason != boxed.EndCrashed || time.Since(began) > 6*time.Second {
		t.Errorf("%s, %s: %s, after %v", end.State, end.Reason, end.Message, time.Since(began))
	}
	if status := job.wait(t); status.Reason != boxed.ReasonLost {
		t.Errorf("%+v, %v", status, job.err)
	}
	_, err = s.Exec(t.Context(), box.ID, boxed.ExecRequest{Args: []string{"true"}})
	if wantCode(t, "exec after it", err, boxed.CodeGone); !strings.Contains(fmt.Sprint(err), "exit code") {
		t.Errorf("%v does not say why", err)
	}
	s.left(0)
}
