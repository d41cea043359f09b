package e2e_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// newWatched makes a node with the hook, and a witness in it.
func newWatched(t *testing.T) (*mortal, *witness) {
	t.Helper()
	t.Parallel()
	program, err := stepped()
	if err != nil {
		t.Fatal(err)
	}
	m := newMortal(t, program, "")
	m.arm("keep", "runtimes")
	m.start()
	return m, m.newWitness()
}

// scene is a node that is about to be killed, with everything around it that
// must not notice.
type scene struct {
	*mortal
	witness *witness // of the node itself
	other   *witness // of another node on the same engine
	foreign []string // containers of nobody's that carry the node's labels
	began   []string // which run of each
}

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{}
	s.mortal, s.witness = newWatched(t)
	other := newMortal(t, s.program, "")
	other.start()
	s.other = other.newWitness()
	// One that has all labels of the witness, another that claims to be a sandbox that never was.
	labels, err := s.engine.docker("inspect", "-f", `{{range $k, $v := .Config.Labels}}{{$k}}={{$v}} {{end}}`, "boxed-"+string(s.witness.id))
	if err != nil {
		t.Fatal(err)
	}
	never := string(boxed.NewID(s.witness.id.Node()))
	for i, list := range []string{labels, strings.ReplaceAll(labels, string(s.witness.id), never)} {
		name := "foreign-" + []string{"a-", "b-"}[i] + string(s.witness.id)
		args := []string{"run", "-d", "--network", "none", "--name", name}
		for _, label := range strings.Fields(list) {
			args = append(args, "--label", label)
		}
		if _, err := s.engine.docker(append(args, crashImage, "sleep", "1000")...); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.engine.docker("rm", "-f", name) })
		s.foreign = append(s.foreign, name)
		s.began = append(s.began, s.runOf(name))
	}
	return s
}

func (s *scene) runOf(name string) string {
	text, err := s.engine.docker("inspect", "-f", "{{.Id}} {{.State.Running}} {{.State.StartedAt}}", name)
	if err != nil {
		s.t.Errorf("foreign container: %v", err)
	}
	return text
}

// untouched checks everything around.
func (s *scene) untouched() {
	s.t.Helper()
	s.witness.untouched()
	s.other.untouched()
	for i, name := range s.foreign {
		if now := s.runOf(name); now != s.began[i] {
			s.t.Errorf("the foreign container was %q and is %q", s.began[i], now)
		}
	}
}

// clean waits until the node has nothing but the witness and also.
func (s *scene) clean(also ...boxed.ID) {
	s.t.Helper()
	s.nothingStray(append(also, s.witness.id), 0, s.foreign...)
}

// named finds the node's sandboxes of that name, ended ones too.
func (m *mortal) named(name string) []boxed.Sandbox {
	m.t.Helper()
	states := []boxed.State{
		boxed.StatePending, boxed.StateStarting, boxed.StateRunning, boxed.StatePaused,
		boxed.StateStopping, boxed.StateStopped, boxed.StateFailed,
	}
	list, err := m.List(m.t.Context(), boxed.Filter{Name: name, States: states})
	if err != nil {
		m.t.Fatal(err)
	}
	return list.Sandboxes
}

// ends waits for a sandbox's end.
func (m *mortal) ends(id boxed.ID, state boxed.State, reasons ...boxed.EndReason) {
	m.t.Helper()
	var got *boxed.Sandbox
	within(m.t, 60*time.Second, "sandbox "+string(id)+" to end", func() bool {
		var err error
		if got, err = m.Get(m.t.Context(), id); err != nil {
			m.t.Fatal(err)
		}
		return got.State.Ended()
	})
	ok := false
	for _, reason := range reasons {
		ok = ok || got.Reason == reason
	}
	if got.State != state || !ok || got.Message == "" {
		m.t.Errorf("it is %s, %s (%q); want %s, %v", got.State, got.Reason, got.Message, state, reasons)
	}
	m.hasEnded(id, got.Reason)
}

// hasEnded: destroying it again is nil, however many do (L12), and using it is
// gone, with the reason (L13).
func (m *mortal) hasEnded(id boxed.ID, reason boxed.EndReason) {
	m.t.Helper()
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			if err := m.Destroy(m.t.Context(), id); err != nil {
				m.t.Errorf("destroy of what has ended: %v", err)
			}
		})
	}
	all.Wait()
	_, err := m.Exec(m.t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
	if e := boxed.AsError(err); e == nil || e.Code != boxed.CodeGone || e.Detail["reason"] != string(reason) {
		m.t.Errorf("exec in what has ended: %v, %+v", err, e)
	}
}

// again makes a sandbox of a name whose last one is ending or has ended, and
// uses it.
func (m *mortal) again(name string) *boxed.Sandbox {
	m.t.Helper()
	var s *boxed.Sandbox
	within(m.t, 60*time.Second, "the name to be free", func() bool {
		var err error
		s, err = m.Create(m.t.Context(), boxed.Spec{Name: name})
		if c := boxed.CodeOf(err); err != nil && c != boxed.CodeConflict && c != boxed.CodeNotReady {
			m.t.Fatalf("create %s again: %v", name, err)
		}
		return err == nil
	})
	m.works(s.ID)
	return s
}

func (m *mortal) works(id boxed.ID) {
	m.t.Helper()
	if text, status := m.sh(id, "cat /proc/sys/kernel/hostname; exit 3"); text == "" || status.Code != 3 {
		m.t.Errorf("%s: %q, %+v", id, text, status)
	}
}

// killed starts do, and waits until the node has been killed at the point, and
// do has returned. Then it starts the node again.
func (m *mortal) killed(point string, do func() error) (err error) {
	m.t.Helper()
	disarm := m.arm("kill", point)
	done := make(chan error, 1)
	go func() { done <- do() }()
	m.died()
	disarm()
	err = <-done
	m.start()
	return err
}

// L8 (traceroot#2101, deer-flow#1972, hermes-agent#28807), L9
// (docker/sbx-releases#353), L10 (OpenSandbox edbe86d8), L20: kill -9 before
// each step of create, after the last one, and between a deed and its record.
// Afterwards nothing of the sandbox is left, or all of it is there; its name can
// be had again; nobody else has noticed.
func TestKilledAtAnyStepOfCreate(t *testing.T) {
	s := newScene(t)
	steps, _, _ := sandbox.Steps()
	var points []string
	for _, step := range steps {
		points = append(points, "before-"+step)
	}
	points = append(points, "before-write-starting-container", "before-write-running", "after-write-running")
	for _, point := range points {
		t.Logf("killed at %s", point)
		name := "c-" + point
		err := s.killed(point, func() error {
			_, err := s.Create(t.Context(), boxed.Spec{Name: name, Dir: "/workspace/sub", Files: []boxed.File{{Path: "f", Content: []byte("x")}}})
			return err
		})
		if !cutOff(err) {
			t.Errorf("%s: the client got %v", point, err)
		}
		switch list := s.named(name); {
		case point == "after-write-running": // it was made; only its client does not know
			if len(list) != 1 || list[0].State != boxed.StateRunning {
				t.Fatalf("%s: %+v", point, list)
			}
			if text, _ := s.sh(list[0].ID, "pwd; cat f"); text != "/workspace/sub\nx" {
				t.Errorf("%s: %q", point, text)
			}
			if err := s.Destroy(t.Context(), list[0].ID); err != nil {
				t.Error(err)
			}
		case point == "before-record": // nothing was done yet
			if len(list) != 0 {
				t.Errorf("%s: %+v", point, list)
			}
		case len(list) != 1:
			t.Fatalf("%s: %+v", point, list)
		default:
			s.ends(list[0].ID, boxed.StateFailed, boxed.EndInterrupted)
		}
		once := s.again(name)
		if err := s.Destroy(t.Context(), once.ID); err != nil {
			t.Errorf("%s: %v", point, err)
		}
		s.clean()
	}
	s.untouched()
}

// L9 (docker/sbx-releases#353), L10 (OpenSandbox edbe86d8): a create fails at its
// last step, and the daemon is killed before each step of the undo.
func TestKilledAtAnyStepOfAnUndo(t *testing.T) {
	m, w := newWatched(t)
	_, steps, _ := sandbox.Steps()
	for _, step := range steps {
		point := "before-" + step
		t.Logf("killed at %s", point)
		m.arm("fail", "before-link")
		err := m.killed(point, func() error {
			_, err := m.Create(t.Context(), boxed.Spec{Name: "undone"})
			return err
		})
		// Its client may have been told of the failure before the kill.
		if !cutOff(err) && boxed.CodeOf(err) != boxed.CodeInternal {
			t.Errorf("%s: the client got %v", point, err)
		}
		newest := m.named("undone")[0]
		m.ends(newest.ID, boxed.StateFailed, boxed.EndCreateFailed, boxed.EndInterrupted)
		once := m.again("undone")
		if err := m.Destroy(t.Context(), once.ID); err != nil {
			t.Errorf("%s: %v", point, err)
		}
		m.nothingStray([]boxed.ID{w.id}, 0)
	}
	w.untouched()
}

// L8, L9, L12 (cloudflare/sandbox-sdk#799): kill -9 before each step of destroy
// and of clearing away behind it, and after the last one. What was decided
// durably is finished by the next life, what was answered never comes back, and
// what was not yet decided goes on; many victims are paused.
func TestKilledAtAnyStepOfDestroy(t *testing.T) {
	s := newScene(t)
	_, steps, clear := sandbox.Steps()
	type kill struct {
		point  string
		paused bool
	}
	var kills []kill
	for i, step := range steps {
		kills = append(kills, kill{"before-" + step, i%2 == 1})
	}
	for _, step := range clear { // a paused one is not left to it
		kills = append(kills, kill{"before-" + step, false})
	}
	kills = append(kills, kill{"before-remove", true}, kill{"after-write-stopped", true})
	victim := s.again("victim")
	for _, k := range kills {
		point, paused := k.point, k.paused
		t.Logf("killed at %s, paused: %v", point, paused)
		s.sh(victim.ID, "echo data > /workspace/file; sleep 1000 >/dev/null 2>&1 & exit 0")
		if paused {
			if _, err := s.Pause(t.Context(), victim.ID); err != nil {
				t.Fatal(err)
			}
		}
		err := s.killed(point, func() error { return s.Destroy(t.Context(), victim.ID) })
		if err != nil && !cutOff(err) {
			t.Errorf("%s: the client got %v", point, err)
		}
		if point == "before-stopping" {
			if err == nil {
				t.Errorf("%s: it was answered before it was durable", point)
			}
			s.aliveStill(victim.ID, paused)
			if err := s.Destroy(t.Context(), victim.ID); err != nil {
				t.Errorf("%s: again: %v", point, err)
			}
		}
		s.ends(victim.ID, boxed.StateStopped, boxed.EndDestroyed)
		victim = s.again("victim")
		s.clean(victim.ID)
	}
	s.untouched()
}

// aliveStill checks a sandbox that a destroy did not reach.
func (s *scene) aliveStill(id boxed.ID, paused bool) {
	s.t.Helper()
	want := boxed.StateRunning
	if paused {
		want = boxed.StatePaused
	}
	if got, err := s.Get(s.t.Context(), id); err != nil || got.State != want {
		s.t.Fatalf("%+v, %v; want %s", got, err, want)
	}
	if paused {
		if _, err := s.Resume(s.t.Context(), id); err != nil {
			s.t.Fatal(err)
		}
	}
	if text, _ := s.sh(id, "cat /workspace/file"); text != "data\n" {
		s.t.Errorf("its file: %q", text)
	}
}

// L8: killed while it starts, also while it tries the runtimes with containers
// of its own, and over and over.
func TestKilledWhileItStarts(t *testing.T) {
	m, w := newWatched(t)
	os.Remove(filepath.Join(m.dir, "steps", "keep-runtimes")) // it tries them each time
	for i := range 6 {
		m.stop(syscall.SIGKILL)
		m.launch()
		asked := make(chan struct{})
		go func() { // whether it is ready: to know that, it tries the runtimes
			defer close(asked)
			for over := m.over; ; time.Sleep(5 * time.Millisecond) {
				if resp, err := http.Get(m.endpoint + "/readyz"); err == nil {
					resp.Body.Close()
				}
				select {
				case <-over:
					return
				default:
				}
			}
		}()
		if i%2 == 0 { // as soon as a probe is there
			within(t, 60*time.Second, "a probe", func() bool {
				for _, name := range m.containers() {
					if name != "boxed-"+string(w.id) {
						return true
					}
				}
				return false
			})
		} else {
			time.Sleep(time.Duration(i) * 15 * time.Millisecond) // any moment will do
		}
		m.look()
		m.stop(syscall.SIGKILL)
		<-asked
	}
	m.start()
	m.nothingStray([]boxed.ID{w.id}, 0)
	w.untouched()
}

// L8: a kill between the making of a file of the store and its first byte, as it
// happens seldom when a start is killed, is no damage.
func TestKilledWhileTheStoreMakesAFile(t *testing.T) {
	m, w := newWatched(t)
	for _, name := range []string{"00099.mem", "000099.vlog"} {
		m.stop(syscall.SIGKILL)
		dirs, err := filepath.Glob(filepath.Join(m.dir, "store", "format-*"))
		if err != nil || len(dirs) != 1 {
			t.Fatalf("%v, %v", dirs, err)
		}
		if err := os.WriteFile(filepath.Join(dirs[0], name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		m.start()
	}
	w.untouched()
}
