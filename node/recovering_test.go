package node_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// Before it is known what is there, absent and forbidden look the same too.
func TestWhatOneMayNotSeeIsNotReadyWhileTheNodeRecovers(t *testing.T) {
	h := newHost(t)
	records, driver, id := &sandboxtest.Records{}, sandboxtest.New(), boxed.NewID(hostID)
	if err := records.Put(string(id), sandbox.Record{Sandbox: boxed.Sandbox{ID: id, Owner: "bob", State: boxed.StateRunning}}); err != nil {
		t.Fatal(err)
	}
	driver.SetDown(true)
	manager, err := sandbox.New(sandbox.Config{
		Node: hostID, Dir: filepath.Join(t.TempDir(), "boxes"), Agent: "/nonexistent", Driver: driver, Records: records,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- manager.Run(ctx) }()
	defer func() { cancel(); <-done }()
	cfg := h.cfg
	cfg.Manager, cfg.Driver = manager, driver
	n, err := node.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has read its records", func() bool { _, err := n.Get(bob, id); return err == nil })
	_, theirs := n.Get(ann, id)
	_, absent := n.Get(ann, boxed.NewID(hostID))
	for what, err := range map[string]error{"another owner's": theirs, "absent": absent, "use of one's own": n.Destroy(bob, id)} {
		wantCode(t, what, err, boxed.CodeNotReady)
	}
	if theirs.Error() != absent.Error() {
		t.Errorf("%q is not %q", theirs, absent)
	}
}

// A record has a bound, and a byte may take six in it.
func TestAnEnvironmentThatNoRecordCanHoldIsRefused(t *testing.T) {
	control := strings.Repeat("\x01", 80<<10) // 480 KiB as JSON
	h := newHost(t, func(c *node.Config) {
		other := c.Templates["other"]
		other.Env = map[string]string{"T": control}
		c.Templates["other"] = other
	})
	for what, spec := range map[string]boxed.Spec{
		"large":                   {Env: map[string]string{"A": control, "B": control}},
		"large with the template": {Template: "other", Env: map[string]string{"A": strings.Repeat("\x01", 10<<10)}},
	} {
		_, err := h.Create(ann, spec)
		if wantCode(t, what, err, boxed.CodeInvalid); boxed.AsError(err).Field() != "env" {
			t.Errorf("%s: field %q", what, boxed.AsError(err).Field())
		}
	}
	h.create(ann, boxed.Spec{Env: map[string]string{"A": control}})
}

func TestADescriptionAsksASlowEngineOnce(t *testing.T) {
	h := newHost(t, func(c *node.Config) { c.Now = func() time.Time { return time.Time{} } }) // nothing it knows is fresh
	h.driver.Fail(sandboxtest.Info, func(ctx context.Context, _ string) error {
		select {
		case <-time.After(2 * time.Second):
		case <-ctx.Done():
		}
		return nil
	})
	began := time.Now()
	info, err := h.NodeInfo(ann)
	if err != nil || info.Ready || time.Since(began) > 1500*time.Millisecond {
		t.Errorf("%+v, %v after %v", info, err, time.Since(began))
	}
}
