package docker_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

func TestRunsAndRemovesASandbox(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	if out := g.user("call", "getpid"); out != "ok" {
		t.Errorf("getpid: %s", out)
	}
	s, err := d.Status(t.Context(), g.id)
	if err != nil || !s.Running || s.Paused || s.Sandbox != g.box.ID || s.Nonce != g.box.Nonce || s.PID == 0 ||
		s.StartedAt.IsZero() || s.CreatedAt.IsZero() || s.ContainerID != g.id {
		t.Errorf("status: %+v, %v", s, err)
	}
	if err := d.Start(t.Context(), g.id); err != nil {
		t.Errorf("starting it again: %v", err)
	}
	if all, err := d.List(t.Context()); err != nil || len(all) != 1 || all[0] != s {
		t.Errorf("list: %+v, %v", all, err)
	}
	if err := d.Remove(t.Context(), g.id); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Status(t.Context(), g.id); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("after remove: %v", err)
	}
	if all, err := d.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("list after remove: %v, %v", all, err)
	}
}

// Case L9: every step can be repeated.
func TestCreateIsIdempotent(t *testing.T) {
	d := newDriver(t)
	box, _ := newBox(t, empty(t, d))
	first, err := d.Create(t.Context(), box)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := d.Create(t.Context(), box); err != nil || second != first {
		t.Errorf("again: %s, %v, want %s", second, err, first)
	}
	box.Nonce = "another"
	if id, err := d.Create(t.Context(), box); !errors.Is(err, boxed.CodeConflict) {
		t.Errorf("the same sandbox with another nonce: %s, %v", id, err)
	}
	s, err := d.Status(t.Context(), first)
	if err != nil || s.Running || s.PID != 0 || !s.StartedAt.IsZero() {
		t.Errorf("status before start: %+v, %v", s, err)
	}
}

// Case L10: a create whose caller went away leaves nothing.
func TestCanceledCreateLeavesNothing(t *testing.T) {
	d := newDriver(t)
	img := empty(t, d)
	for delay := time.Duration(0); delay < 30*time.Millisecond; delay += 2 * time.Millisecond {
		box, _ := newBox(t, img)
		ctx, cancel := context.WithTimeout(t.Context(), delay)
		if _, err := d.Create(ctx, box); err != nil && boxed.CodeOf(err) != boxed.CodeDeadline {
			t.Errorf("after %v: %v", delay, err)
		} else if err == nil {
			removeLabelled(t, "sh.boxed.instance="+d.Instance())
		}
		cancel()
	}
	if all, err := d.List(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("left: %d, %v", len(all), err)
	}
}

// Case L12: removing is idempotent, and of many at once each returns when it is gone.
func TestRemoveConcurrently(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := d.Remove(t.Context(), g.id); err != nil {
				t.Errorf("remove: %v", err)
			}
			if _, err := d.Status(t.Context(), g.id); !errors.Is(err, boxed.CodeNotFound) {
				t.Errorf("returned before it was gone: %v", err)
			}
		})
	}
	wg.Wait()
	if err := d.Remove(t.Context(), g.id); err != nil {
		t.Errorf("what is gone: %v", err)
	}
}

// Cases L11, L12: whatever state it is in.
func TestRemoveInEveryState(t *testing.T) {
	d := newDriver(t)
	img := empty(t, d)
	for name, prepare := range map[string]func(t *testing.T) string{
		"never started": func(t *testing.T) string {
			box, _ := newBox(t, img)
			id, err := d.Create(t.Context(), box)
			if err != nil {
				t.Fatal(err)
			}
			return id
		},
		"ended by itself": func(t *testing.T) string {
			g := start(t, d, img)
			g.end(7)
			return g.id
		},
		"frozen by us": func(t *testing.T) string {
			g := start(t, d, img)
			if err := d.Pause(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
			return g.id
		},
		"frozen by a driver that is gone": func(t *testing.T) string {
			g := start(t, d, img)
			if err := d.Pause(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
			d.Forget(g.id)
			return g.id
		},
		"paused by the engine": func(t *testing.T) string {
			g := start(t, d, img)
			if err := engineClient.ContainerPause(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
			return g.id
		},
		"full of processes": func(t *testing.T) string {
			g := start(t, d, img)
			g.send(map[string]any{"uid": g.box.UID, "argv": []string{"self", "forks", "stay"}, "back": true})
			eventually(t, "it is full", func() bool {
				s, err := d.Stats(t.Context(), g.id)
				return err == nil && s.Processes > 50
			})
			return g.id
		},
	} {
		t.Run(name, func(t *testing.T) {
			id := prepare(t)
			began := time.Now()
			if err := d.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
			if _, err := engineClient.ContainerInspect(t.Context(), id); err == nil {
				t.Error("it is still there")
			}
		})
	}
}

// end makes the first process end with a code.
func (g *guest) end(code int) {
	g.t.Helper()
	g.send(map[string]any{"exit": code})
	eventually(g.t, "it ends", func() bool {
		s, err := g.d.Status(g.t.Context(), g.id)
		return err == nil && !s.Running
	})
}

func TestStatusOfOneThatEnded(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	g.end(7)
	s, err := d.Status(t.Context(), g.id)
	if err != nil || s.Running || s.Paused || s.ExitCode != 7 || s.OOMKilled || s.PID != 0 {
		t.Errorf("%+v, %v", s, err)
	}
	for name, err := range map[string]error{
		"pause": d.Pause(t.Context(), g.id), "resume": d.Resume(t.Context(), g.id), "limit": d.Limit(t.Context(), g.id, smallLimits()),
	} {
		if !errors.Is(err, boxed.CodeConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := d.Stats(t.Context(), g.id); !errors.Is(err, boxed.CodeConflict) {
		t.Errorf("stats: %v", err)
	}
}

func TestPauseAndResume(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	paused := func(want bool) {
		t.Helper()
		if s, err := d.Status(t.Context(), g.id); err != nil || s.Paused != want || !s.Running {
			t.Errorf("status: %+v, %v, want paused %v", s, err, want)
		}
	}
	for range 20 {
		for range 2 { // idempotent
			if err := d.Pause(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
			paused(true)
		}
		before, err := d.Stats(t.Context(), g.id)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := d.Resume(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
			paused(false)
		}
		if g.user("call", "getpid") != "ok" {
			t.Fatal("it does not run any more")
		}
		if after, err := d.Stats(t.Context(), g.id); err != nil || after.CPUSeconds <= before.CPUSeconds {
			t.Errorf("stats: %v then %v, %v", before, after, err)
		}
	}
}

func TestResumesWhatTheEnginePaused(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	if err := engineClient.ContainerPause(t.Context(), g.id); err != nil {
		t.Fatal(err)
	}
	if s, err := d.Status(t.Context(), g.id); err != nil || !s.Paused {
		t.Errorf("status: %+v, %v", s, err)
	}
	if err := d.Pause(t.Context(), g.id); err != nil {
		t.Errorf("pause: %v", err)
	}
	if err := d.Resume(t.Context(), g.id); err != nil {
		t.Fatal(err)
	}
	if g.user("call", "getpid") != "ok" {
		t.Error("it does not run")
	}
	if s, err := d.Status(t.Context(), g.id); err != nil || s.Paused {
		t.Errorf("status: %+v, %v", s, err)
	}
}

// Decision 9: a claim writes the limits of its own into a warm sandbox.
func TestChangesLimits(t *testing.T) {
	d := newDriver(t)
	for _, forget := range []bool{false, true} {
		g := start(t, d, empty(t, d))
		for _, mib := range []int64{128, 512, 200, 1024} { // raising and lowering write in different orders
			if forget {
				d.Forget(g.id)
			}
			l := boxed.Limits{MemoryBytes: mib << 20, CPUs: float64(mib) / 200}
			if err := d.Limit(t.Context(), g.id, l); err != nil {
				t.Fatalf("%d MiB: %v", mib, err)
			}
			if s, err := d.Stats(t.Context(), g.id); err != nil || s.MemoryLimit != l.MemoryBytes {
				t.Errorf("%d MiB: %+v, %v", mib, s, err)
			}
			if got := d.CgroupNumbers(g.id); got.Swap > l.MemoryBytes || got.Quota != int64(l.CPUs*100_000) || got.Loopback != sandbox.LoopbackBytes(l) && got.Loopback != 0 {
				t.Errorf("%d MiB: %+v", mib, got)
			}
		}
		if err := d.Limit(t.Context(), g.id, boxed.Limits{CPUs: 0.5}); err != nil {
			t.Error(err)
		}
		if s, err := d.Stats(t.Context(), g.id); err != nil || s.MemoryLimit != 1024<<20 {
			t.Errorf("a zero limit changed memory: %+v, %v", s, err)
		}
	}
}

// Where the cgroup is not to be found, or systemd keeps limits, the engine does it.
func TestWithoutTheCgroup(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	for _, mib := range []int64{128, 512, 200} {
		l := boxed.Limits{MemoryBytes: mib << 20, CPUs: 0.5}
		if err := d.LimitViaEngine(t.Context(), g.id, l); err != nil {
			t.Fatal(err)
		}
		if s, err := d.Stats(t.Context(), g.id); err != nil || s.MemoryLimit != l.MemoryBytes {
			t.Errorf("%d MiB: %+v, %v", mib, s, err)
		}
	}
	for _, pause := range []bool{true, true, false, false} {
		if err := d.PauseViaEngine(t.Context(), g.id, pause); err != nil {
			t.Fatal(err)
		}
		if s, err := d.Status(t.Context(), g.id); err != nil || s.Paused != pause {
			t.Errorf("%+v, %v", s, err)
		}
	}
	d.Forget(g.id)
	if err := d.LimitViaEngine(t.Context(), strings.Repeat("0", 64), boxed.Limits{CPUs: 1}); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("what does not exist: %v", err)
	}
}

// Case I8, L18, L20: another's container does not exist, whatever its labels
// say; one that forges ours is told apart by the record's nonce and ID.
func TestForeignContainers(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	make := func(name string, labels map[string]string) string {
		c, err := engineClient.ContainerCreate(t.Context(), &container.Config{
			Image: emptyImage.Digest, Entrypoint: []string{"/x"}, Labels: labels,
		}, nil, nil, nil, name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = engineClient.ContainerRemove(context.Background(), c.ID, container.RemoveOptions{Force: true})
		})
		return c.ID
	}
	plain := make("boxed-test-plain", nil)
	// Another daemon on the same engine: the same node key copied, another data directory.
	other := newDriver(t)
	theirs := make("boxed-test-theirs", map[string]string{"sh.boxed.instance": other.Instance(), "sh.boxed.sandbox": string(g.box.ID)})
	forged := make("boxed-test-forged", map[string]string{
		"sh.boxed.instance": d.Instance(), "sh.boxed.sandbox": string(g.box.ID), "sh.boxed.nonce": "guessed",
	})

	for _, id := range []string{plain, theirs, "boxed-test-plain", "boxed-" + string(g.box.ID), g.id[:12], g.id[:63], "", "../x", strings.ToUpper(g.id), strings.Repeat("0", 64)} {
		if s, err := d.Status(t.Context(), id); !errors.Is(err, boxed.CodeNotFound) {
			t.Errorf("status of %q: %+v, %v", id, s, err)
		}
		if err := d.Start(t.Context(), id); !errors.Is(err, boxed.CodeNotFound) {
			t.Errorf("start of %q: %v", id, err)
		}
		if err := d.Pause(t.Context(), id); !errors.Is(err, boxed.CodeNotFound) {
			t.Errorf("pause of %q: %v", id, err)
		}
		if err := d.Remove(t.Context(), id); err != nil {
			t.Errorf("remove of %q, which is not there for us: %v", id, err)
		}
	}
	for _, id := range []string{plain, theirs, g.id} {
		if _, err := engineClient.ContainerInspect(t.Context(), id); err != nil {
			t.Errorf("%.12s was touched: %v", id, err)
		}
	}
	all, err := d.List(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("list: %v, %v", all, err)
	}
	for _, s := range all {
		if ours := s.ContainerID == g.id && s.Nonce == g.box.Nonce; ours == (s.ContainerID == forged) {
			t.Errorf("a record cannot tell %+v", s)
		}
	}
}

func TestWatchTellsOfTheEnd(t *testing.T) {
	d, other := newDriver(t), newDriver(t)
	img := empty(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan string, 100)
	done := make(chan error, 1)
	go func() { done <- d.Watch(ctx, func(id string) { ended <- id }) }()
	start(t, other, img).end(1) // not ours
	// The stream begins some time after Watch was called, so one end may be missed.
	for found := false; !found; {
		g := start(t, d, img)
		g.end(1)
		select {
		case id := <-ended:
			found = id == g.id
			if !found {
				t.Fatalf("told of %s", id)
			}
		case <-time.After(time.Second):
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("watch: %v", err)
	}
}

// issues show 2, "Bad input": Docker down says what to do.
func TestEngineDown(t *testing.T) {
	d, err := docker.New(docker.Config{NodeID: testNode, DataDir: t.TempDir(), AgentPath: guestProgram, Host: "unix:///nonexistent/docker.sock"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx := t.Context()
	box, _ := newBox(t, sandbox.Image{Digest: "sha256:" + strings.Repeat("0", 64)})
	id := strings.Repeat("a", 64)
	_, create := d.Create(ctx, box)
	_, status := d.Status(ctx, id)
	_, list := d.List(ctx)
	_, info := d.Info(ctx)
	_, img := d.Image(ctx, "x", nil)
	_, stats := d.Stats(ctx, id)
	for name, err := range map[string]error{
		"create": create, "start": d.Start(ctx, id), "remove": d.Remove(ctx, id), "status": status, "list": list, "info": info,
		"image": img, "pause": d.Pause(ctx, id), "resume": d.Resume(ctx, id), "limit": d.Limit(ctx, id, smallLimits()),
		"stats": stats, "watch": d.Watch(ctx, func(string) {}),
	} {
		if !errors.Is(err, boxed.CodeNotReady) || !strings.Contains(err.Error(), "start it") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestInfoProbesRuntimes(t *testing.T) {
	d := newDriver(t)
	img := empty(t, d)
	before := emptyImages(t)
	info, err := d.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", info)
	if !strings.HasPrefix(info.Engine, "docker ") || info.Arch == "" || info.Cgroup == 0 || info.Default == "" || len(info.Runtimes) == 0 ||
		info.NoFile < 1024 || info.DiskFree <= 0 {
		t.Errorf("%+v", info)
	}
	if after := emptyImages(t); after > before {
		t.Errorf("probing left %d images", after-before)
	}
	box, _ := newBox(t, img)
	box.Limits.OpenFiles = info.NoFile
	id, err := d.Create(t.Context(), box)
	if err == nil {
		err = d.Start(t.Context(), id)
	}
	if err != nil {
		t.Errorf("the open-files limit that it names: %v", err)
	}
	if left, _ := os.ReadDir(d.DataDir()); len(left) > 0 {
		t.Errorf("probing left %v", left)
	}
	began := time.Now()
	if _, err := d.Info(t.Context()); err != nil || time.Since(began) > 2*time.Second {
		t.Errorf("again: %v after %v", err, time.Since(began))
	}
}

// emptyImages counts images of nothing and without a name.
func emptyImages(t *testing.T) int {
	t.Helper()
	all, err := engineClient.ImageList(t.Context(), image.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, i := range all {
		if i.Size == 0 && (len(i.RepoTags) == 0 || i.RepoTags[0] == "<none>:<none>") {
			n++
		}
	}
	return n
}

func TestUnknownRuntime(t *testing.T) {
	d := newDriver(t)
	box, _ := newBox(t, empty(t, d))
	box.Runtime = "nonesuch"
	_, err := d.Create(t.Context(), box)
	if e := boxed.AsError(err); e.Code != boxed.CodeUnavailable || e.Field() != "runtime" {
		t.Errorf("%v", err)
	}
}

// A socket's address holds 107 bytes; a data directory may be deeper than that.
func TestALongDataDirectory(t *testing.T) {
	d := newDriver(t, func(c *docker.Config) {
		c.DataDir = filepath.Join(c.DataDir, strings.Repeat("d", 100), strings.Repeat("e", 100))
	})
	empty(t, d)
	info, err := d.Info(t.Context())
	if err != nil || info.Default == "" {
		t.Errorf("%+v, %v", info, err)
	}
}
