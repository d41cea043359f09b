package sandboxtest

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// runDriver tests what Driver promises, without a Manager.
func runDriver(t *testing.T, f Fixture) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"describes its engine", describesItsEngine},
		{"says what is wrong with an image or a runtime", refusesWhatIsNotThere},
		{"every step can be repeated", stepsCanBeRepeated},
		{"removes in every state", removesInEveryState},
		{"what does not exist is not found", absentIsNotFound},
		{"pauses and resumes", pausesAndResumes},
		{"limits and measures", limitsAndMeasures},
		{"tells of an end", tellsOfAnEnd},
		{"honours its context", honoursContext},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, f) })
	}
}

func describesItsEngine(t *testing.T, f Fixture) {
	info, err := f.Driver.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.Engine == "" || info.Arch == "" || info.NoFile <= 0 || info.DiskFree <= 0 || !slices.Contains(info.Runtimes, info.Default) {
		t.Errorf("%+v", info)
	}
	image, err := f.Driver.Image(t.Context(), f.Image, nil)
	if err != nil || image.Digest == "" || image.Ref != f.Image {
		t.Errorf("%+v, %v", image, err)
	}
}

func refusesWhatIsNotThere(t *testing.T, f Fixture) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := f.Driver.Image(ctx, "localhost:1/no-such/image:1", nil)
	wantCode(t, "image", err, boxed.CodeImage)
	if e := boxed.AsError(err); e.Detail["reason"] == nil {
		t.Errorf("no reason: %v", e.Detail)
	}
	box, _ := newBox(t, f)
	box.Runtime = "no-such-runtime"
	_, err = f.Driver.Create(t.Context(), box)
	wantCode(t, "create", err, boxed.CodeUnavailable)
	if field := boxed.AsError(err).Field(); field != "runtime" {
		t.Errorf("field %q", field)
	}
}

// L9: every create and destroy step can be repeated.
func stepsCanBeRepeated(t *testing.T, f Fixture) {
	box, host := newBox(t, f)
	id, err := f.Driver.Create(t.Context(), box)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := f.Driver.Create(t.Context(), box); err != nil || again != id {
		t.Errorf("created again: %s, %v; want %s", again, err, id)
	}
	s, err := f.Driver.Status(t.Context(), id)
	if err != nil || s.ContainerID != id || s.Sandbox != box.ID || s.Nonce != box.Nonce || s.Running || s.CreatedAt.IsZero() {
		t.Errorf("created: %+v, %v", s, err)
	}
	for range 2 {
		if err := f.Driver.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	ready, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := host.Ready(ready); err != nil {
		t.Fatal(err)
	}
	s, err = f.Driver.Status(t.Context(), id)
	if err != nil || !s.Running || s.Paused || s.StartedAt.IsZero() || s.PID == 0 {
		t.Errorf("started: %+v, %v", s, err)
	}
	if !listed(t, f, id, box) {
		t.Error("it is not listed, or not with its nonce")
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := f.Driver.Remove(t.Context(), id); err != nil {
				t.Errorf("remove: %v", err)
			}
			_, err := f.Driver.Status(t.Context(), id)
			wantCode(t, "status when remove had returned", err, boxed.CodeNotFound)
		})
	}
	wg.Wait()
	if listed(t, f, id, box) {
		t.Error("it is still listed")
	}
}

func listed(t *testing.T, f Fixture, id string, box sandbox.Box) bool {
	t.Helper()
	all, err := f.Driver.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(all, func(s sandbox.Status) bool {
		return s.ContainerID == id && s.Sandbox == box.ID && s.Nonce == box.Nonce
	})
}

// L11, L12: whatever state it is in, also one that never started.
func removesInEveryState(t *testing.T, f Fixture) {
	for name, prepare := range map[string]func(t *testing.T) string{
		"never started": func(t *testing.T) string {
			box, _ := newBox(t, f)
			id, err := f.Driver.Create(t.Context(), box)
			if err != nil {
				t.Fatal(err)
			}
			return id
		},
		"paused": func(t *testing.T) string {
			id, _, _ := launch(t, f)
			if err := f.Driver.Pause(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			return id
		},
		"ended": func(t *testing.T) string {
			id, _, host := launch(t, f)
			host.End(t.Context())
			eventually(t, "it ends", func() bool { s, err := f.Driver.Status(t.Context(), id); return err == nil && !s.Running })
			return id
		},
	} {
		t.Run(name, func(t *testing.T) {
			id := prepare(t)
			began := time.Now()
			if err := f.Driver.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %v", took)
			}
			_, err := f.Driver.Status(t.Context(), id)
			wantCode(t, "status", err, boxed.CodeNotFound)
		})
	}
}

func absentIsNotFound(t *testing.T, f Fixture) {
	ctx, d, id := t.Context(), f.Driver, strings.Repeat("0", 64)
	if err := d.Remove(ctx, id); err != nil {
		t.Errorf("remove: %v", err)
	}
	_, status := d.Status(ctx, id)
	_, stats := d.Stats(ctx, id)
	for name, err := range map[string]error{
		"start": d.Start(ctx, id), "pause": d.Pause(ctx, id), "resume": d.Resume(ctx, id), "limit": d.Limit(ctx, id, limits()),
		"status": status, "stats": stats,
	} {
		wantCode(t, name, err, boxed.CodeNotFound)
	}
}

func pausesAndResumes(t *testing.T, f Fixture) {
	id, _, host := launch(t, f)
	for range 3 {
		for range 2 {
			if err := f.Driver.Pause(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if s, err := f.Driver.Status(t.Context(), id); err != nil || !s.Paused || !s.Running {
			t.Errorf("paused: %+v, %v", s, err)
		}
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if err := host.Ping(short); err == nil {
			t.Error("a paused sandbox answers")
		}
		cancel()
		for range 2 {
			if err := f.Driver.Resume(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if s, err := f.Driver.Status(t.Context(), id); err != nil || s.Paused {
			t.Errorf("resumed: %+v, %v", s, err)
		}
		long, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err := host.Ping(long); err != nil {
			t.Errorf("a resumed sandbox does not answer: %v", err)
		}
		cancel()
	}
}

// Decision 9: limits are written at the claim.
func limitsAndMeasures(t *testing.T, f Fixture) {
	id, _, _ := launch(t, f)
	for _, mib := range []int64{512, 192, 320} {
		l := limits()
		l.MemoryBytes, l.CPUs = mib*boxed.MiB, 0.5
		if err := f.Driver.Limit(t.Context(), id, l); err != nil {
			t.Fatalf("%d MiB: %v", mib, err)
		}
		s, err := f.Driver.Stats(t.Context(), id)
		if err != nil || s.MemoryLimit != l.MemoryBytes || s.MemoryBytes <= 0 || s.CPUSeconds <= 0 || s.Processes <= 0 {
			t.Errorf("%d MiB: %+v, %v", mib, s, err)
		}
	}
}

func tellsOfAnEnd(t *testing.T, f Fixture) {
	ctx, cancel := context.WithCancel(t.Context())
	ended, done := make(chan string, 100), make(chan error, 1)
	go func() { done <- f.Driver.Watch(ctx, func(id string) { ended <- id }) }()
	// The stream begins some time after Watch was called: one end may be missed.
	for told := false; !told; {
		id, _, host := launch(t, f)
		host.End(t.Context())
		eventually(t, "it ends", func() bool { s, err := f.Driver.Status(t.Context(), id); return err == nil && !s.Running })
		for wait := time.After(time.Second); ; {
			select {
			case got := <-ended:
				told = told || got == id
			case <-wait:
			}
			break
		}
		wantCode(t, "pause", f.Driver.Pause(t.Context(), id), boxed.CodeConflict)
		wantCode(t, "resume", f.Driver.Resume(t.Context(), id), boxed.CodeConflict)
		wantCode(t, "limit", f.Driver.Limit(t.Context(), id, limits()), boxed.CodeConflict)
		_, err := f.Driver.Stats(t.Context(), id)
		wantCode(t, "stats", err, boxed.CodeConflict)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("watch: %v", err)
	}
}

func honoursContext(t *testing.T, f Fixture) {
	box, _ := newBox(t, f)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d, id := f.Driver, strings.Repeat("0", 64)
	created, err := d.Create(ctx, box)
	wantCode(t, "create", err, boxed.CodeCanceled)
	if created != "" {
		d.Remove(t.Context(), created)
	}
	_, status := d.Status(ctx, id)
	_, list := d.List(ctx)
	for name, err := range map[string]error{"start": d.Start(ctx, id), "remove": d.Remove(ctx, id), "status": status, "list": list} {
		wantCode(t, name, err, boxed.CodeCanceled)
	}
}
