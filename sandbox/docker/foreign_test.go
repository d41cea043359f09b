package docker_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/docker/docker/api/types/container"

	"github.com/boxed-mesh/boxed"
)

// I8: containers that claim to be ours, with every label that one of ours has,
// survive all that looks for strays: a start, the sweeps, probing, the end of
// the sandbox they pose as.
func TestForgedContainersSurviveEverySweep(t *testing.T) {
	needDocker(t)
	r := onRunc()
	bringProbe(t, r)
	w := newWorld(t, r)
	b := w.create()
	real, err := r.client.ContainerInspect(t.Context(), b.container().ContainerID)
	if err != nil {
		t.Fatal(err)
	}
	without := func(names ...string) map[string]string {
		labels := map[string]string{}
		for name, value := range real.Config.Labels {
			if !slices.Contains(names, name) {
				labels[name] = value
			}
		}
		return labels
	}
	guessed := without("sh.boxed.nonce")
	guessed["sh.boxed.nonce"] = "guessed"
	unknown := without("sh.boxed.sandbox")
	unknown["sh.boxed.sandbox"] = string(boxed.NewID(testNode))
	instance := real.Config.Labels["sh.boxed.instance"]
	forged := map[string]string{}
	for name, labels := range map[string]map[string]string{
		"guessed": guessed, "unknown": unknown, "copied": without(), "nameless": without("sh.boxed.sandbox", "sh.boxed.nonce"),
		"probe": {"sh.boxed.probe": instance}, "probe-nonce": {"sh.boxed.probe": instance, "sh.boxed.nonce": "probe"},
		"probe-path": {"sh.boxed.probe": instance, "sh.boxed.nonce": "../" + filepath.Base(w.cfg.Dir)},
	} {
		forged[name] = foreign(t, r, "boxed-"+name+"-"+string(b.id), labels)
	}
	survive := func(what string) {
		t.Helper()
		for name, id := range forged {
			if _, err := r.client.ContainerInspect(t.Context(), id); err != nil {
				t.Errorf("%s removed the container %q: %v", what, name, err)
				delete(forged, name)
			}
		}
	}
	for range 2 {
		w.Look(t.Context())
		w.Sweep()
	}
	survive("looking around")
	if err := w.stopped(); err != nil {
		t.Fatal(err)
	}
	w.run()
	w.Look(t.Context())
	survive("a restart")
	if _, err := w.d.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	survive("probing")
	b.works("all sweeps") // and the real one is the one that is used
	if _, err := os.Stat(filepath.Join(w.cfg.Dir, string(b.id))); err != nil {
		t.Error(err)
	}
	if err := w.Destroy(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	delete(forged, "copied") // its nonce is that of a record that has ended: a stray of an engine that was slow
	w.Look(t.Context())
	survive("the end of the sandbox")
}

// foreign makes a container that is not ours.
func foreign(t *testing.T, r *oci, name string, labels map[string]string) string {
	t.Helper()
	d := newDriver(t)
	c, err := r.client.ContainerCreate(t.Context(), &container.Config{Image: empty(t, d).Digest, Entrypoint: []string{"/x"}, Labels: labels}, nil, nil, nil, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.client.ContainerRemove(context.Background(), c.ID, container.RemoveOptions{Force: true}) // it may be gone
	})
	return c.ID
}

// L8: what a process of this node that was killed left of probing is removed.
func TestProbingSweepsWhatAnEarlierOneLeft(t *testing.T) {
	d := newDriver(t)
	dir := filepath.Join(d.DataDir(), "probe-1234")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	id := foreign(t, onRunc(), "boxed-probe-left", map[string]string{"sh.boxed.probe": d.Instance(), "sh.boxed.nonce": "probe-1234"})
	if _, err := d.Info(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := engineClient.ContainerInspect(t.Context(), id); err == nil {
		t.Error("the container is still there")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the directory is still there")
	}
}
