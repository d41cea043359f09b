package e2e_test

import (
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// newPool makes a node with a pool of one warm sandbox, and a witness.
func newPool(t *testing.T) (*mortal, *witness) {
	t.Helper()
	m, w := newWatched(t)
	m.stop(syscall.SIGTERM)
	m.setPool(1)
	m.start()
	m.poolIs(1)
	return m, w
}

// setPool sets the pool's size from the next start on.
func (m *mortal) setPool(size int) {
	for i, arg := range m.args {
		if arg == "--templates-default-pool" {
			m.args[i+1] = strconv.Itoa(size)
		}
	}
}

// poolIs waits until so many sandboxes are warm, and none is being made.
func (m *mortal) poolIs(ready int) {
	m.t.Helper()
	within(m.t, 60*time.Second, "the pool to have "+strconv.Itoa(ready), func() bool {
		info, err := m.NodeInfo(m.t.Context())
		return err == nil && len(info.Pool) == 1 && info.Pool[0].Ready == ready && info.Pool[0].Filling == 0
	})
}

// L8: kill -9 before each step of a create that fills the pool. The next life
// has as many warm sandboxes as it should, and what was claimed is there if its
// claimer was told.
func TestKilledAtAnyStepOfARefill(t *testing.T) {
	m, w := newPool(t)
	steps, _, _ := sandbox.Steps()
	living := []boxed.ID{w.id}
	for _, step := range steps {
		point := "before-" + step
		t.Logf("killed at %s", point)
		var s *boxed.Sandbox
		err := m.killed(point, func() (err error) {
			s, err = m.Create(t.Context(), boxed.Spec{Name: "claimed-" + step})
			return err
		})
		if err != nil && !cutOff(err) {
			t.Errorf("%s: the client got %v", point, err)
		}
		list := m.named("claimed-" + step)
		if err == nil && (len(list) != 1 || list[0].ID != s.ID) {
			t.Errorf("%s: %s was handed out, and now there is %+v", point, s.ID, list)
		}
		for _, s := range list {
			m.works(s.ID)
			if err := m.Destroy(t.Context(), s.ID); err != nil {
				t.Errorf("%s: %v", point, err)
			}
		}
		m.poolIs(1)
		m.nothingStray(living, 1)
	}
	w.untouched()
}

// L8: kill -9 around each write of a claim. A sandbox that was given files, or
// handed out, never serves as a warm one again; one that was not touched does.
func TestKilledInAClaim(t *testing.T) {
	m, w := newPool(t)
	secret := []boxed.File{{Path: "secret", Content: []byte("ann's")}}
	for _, c := range []struct {
		point string
		files []boxed.File
		state boxed.State // of what its claimer finds; "" for none
	}{
		{"before-write-running", nil, ""},
		{"after-write-running", nil, boxed.StateRunning},
		{"before-write-starting-container", secret, ""},
		{"after-write-starting-container", secret, boxed.StateFailed},
		{"before-write-running", secret, boxed.StateFailed},
		{"after-write-running", secret, boxed.StateRunning},
	} {
		t.Logf("killed at %s, files: %v", c.point, c.files != nil)
		name := "claim-" + c.point + strconv.Itoa(len(c.files))
		resume := m.arm("wait", "before-record") // or the refill could get there first
		err := m.killed(c.point, func() error {
			defer resume()
			_, err := m.Create(t.Context(), boxed.Spec{Name: name, Files: c.files})
			return err
		})
		if !cutOff(err) {
			t.Errorf("%s: the client got %v", c.point, err)
		}
		list := m.named(name)
		if c.state == "" && len(list) != 0 || c.state != "" && len(list) != 1 {
			t.Fatalf("%s: %+v", c.point, list)
		}
		switch c.state {
		case boxed.StateFailed:
			m.ends(list[0].ID, boxed.StateFailed, boxed.EndInterrupted)
		case boxed.StateRunning:
			m.works(list[0].ID)
			if err := m.Destroy(t.Context(), list[0].ID); err != nil {
				t.Error(err)
			}
		}
		m.poolIs(1)
		m.nothingStray([]boxed.ID{w.id}, 1)
		next := m.again(name)
		if text, _ := m.sh(next.ID, "ls -A"); text != "" || !next.Warm {
			t.Errorf("%s: warm: %v, in the next one's directory: %q", c.point, next.Warm, text)
		}
		if err := m.Destroy(t.Context(), next.ID); err != nil {
			t.Error(err)
		}
		m.poolIs(1)
	}
	w.untouched()
}

// L8, L9 (docker/sbx-releases#353): a start finds warm sandboxes to be too many,
// and is killed before each step of their end; the next one begins it anew, and
// is killed a step later.
func TestKilledAtAnyStepOfARoll(t *testing.T) {
	m, w := newPool(t)
	_, steps, _ := sandbox.Steps()
	m.look()
	m.stop(syscall.SIGTERM)
	m.setPool(0)
	for _, step := range steps {
		t.Logf("killed before %s", step)
		disarm := m.arm("kill", "before-"+step)
		m.launch()
		m.died()
		disarm()
	}
	m.start()
	m.nothingStray([]boxed.ID{w.id}, 0)
	w.untouched()
}
