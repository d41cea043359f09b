package e2e_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// onDockerd starts an engine, and a node with a pool of that size on it.
func onDockerd(t *testing.T, pool int, args ...string) (*dockerd, *mortal) {
	t.Helper()
	t.Parallel()
	program, err := stepped()
	if err != nil {
		t.Fatal(err)
	}
	d := newDockerd(t, crashImage, args...)
	m := newMortal(t, program, d.engine)
	m.setPool(pool)
	m.start()
	return d, m
}

// answer is what came of a call that may take its time.
type answer struct {
	s      *boxed.Sandbox
	status boxed.ExitStatus
	err    error
}

// soon waits for the answer of a call, within what callers can be asked to wait.
func soon(t *testing.T, what string, from <-chan answer) answer {
	t.Helper()
	select {
	case a := <-from:
		return a
	case <-time.After(90 * time.Second):
		t.Fatalf("%s was not answered", what)
		return answer{}
	}
}

func (m *mortal) createSoon(name string) <-chan answer {
	made := make(chan answer, 1)
	go func() {
		s, err := m.Create(m.t.Context(), boxed.Spec{Name: name})
		made <- answer{s: s, err: err}
	}()
	return made
}

func (m *mortal) destroySoon(id boxed.ID) <-chan answer {
	done := make(chan answer, 1)
	go func() { done <- answer{err: m.Destroy(m.t.Context(), id)} }()
	return done
}

// refused checks what a new sandbox gets while the engine is down: a typed no, or
// one that is warm, for which no engine is needed.
func (m *mortal) refused() {
	m.t.Helper()
	s, err := m.Create(m.t.Context(), boxed.Spec{})
	if err == nil && s.Warm {
		m.works(s.ID)
		if err := m.Destroy(m.t.Context(), s.ID); err != nil && boxed.CodeOf(err) != boxed.CodeNotReady {
			m.t.Errorf("destroy without an engine: %v", err)
		}
		return
	}
	if boxed.CodeOf(err) != boxed.CodeNotReady || !strings.Contains(err.Error(), "engine") {
		m.t.Errorf("create without an engine: %v (%s)", err, boxed.CodeOf(err))
	}
}

// anew makes a sandbox as soon as the node has noticed that the engine is back.
func (m *mortal) anew() boxed.ID {
	m.t.Helper()
	s := m.create(boxed.Spec{})
	m.works(s.ID)
	return s.ID
}

// L13, L14 (agents-sandbox#173): an engine that takes its containers with it.
// While it is away nobody is declared dead, and calls say what is wrong; when it
// is back what died is said to have, why, and nothing of it is left.
func TestEngineThatTakesItsContainersWithIt(t *testing.T) {
	d, m := onDockerd(t, 1)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Logf("the engine goes by %v", sig)
		s := m.again("named").ID
		paused, doomed := m.anew(), m.anew()
		if _, err := m.Pause(t.Context(), paused); err != nil {
			t.Fatal(err)
		}
		m.poolIs(1)
		m.look()
		exec := m.follow(s)
		d.stop(sig)
		m.refused()
		if sig == syscall.SIGKILL { // then they live on until the next engine finds them
			m.works(s)
			for _, id := range []boxed.ID{s, paused} {
				if got, err := m.Get(t.Context(), id); err != nil || got.State.Ended() {
					t.Errorf("%s was judged without an engine: %+v, %v", id, got, err)
				}
			}
		} else { // its agent has gone, and the engine may have had the time to say so
			_, err := m.Exec(t.Context(), s, boxed.ExecRequest{Args: []string{"true"}})
			if c := boxed.CodeOf(err); c != boxed.CodeLost && c != boxed.CodeGone {
				t.Errorf("exec in what died: %v (%s)", err, c)
			}
		}
		if err := m.Destroy(t.Context(), doomed); err != nil && boxed.CodeOf(err) != boxed.CodeNotReady {
			t.Errorf("destroy without an engine: %v (%s)", err, boxed.CodeOf(err))
		}
		d.start()
		m.ends(s, boxed.StateFailed, boxed.EndCrashed)
		m.ends(paused, boxed.StateFailed, boxed.EndCrashed)
		m.endsEither(doomed)
		// X14: lost, and no exit code.
		if a := soon(t, "the exec", exec); a.err == nil && (a.status.Reason != boxed.ReasonLost || a.status.Code != -1) ||
			a.err != nil && boxed.CodeOf(a.err) != boxed.CodeLost {
			t.Errorf("the exec under it: %+v, %v", a.status, a.err)
		}
		fresh := []boxed.ID{m.anew(), m.again("named").ID}
		m.poolIs(1)
		m.nothingStray(fresh, 1)
		for _, id := range fresh {
			if err := m.Destroy(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		m.nothingStray(nil, 1)
	}
}

// endsEither waits for the end of what was destroyed while its engine went: it
// may have crashed first.
func (m *mortal) endsEither(id boxed.ID) {
	m.t.Helper()
	within(m.t, 60*time.Second, "the destroyed one to end", func() bool {
		s, err := m.Get(m.t.Context(), id)
		return err == nil && s.State.Ended()
	})
	if s, _ := m.Get(m.t.Context(), id); s.Reason != boxed.EndDestroyed && s.Reason != boxed.EndCrashed {
		m.t.Errorf("it is %s, %s: %s", s.State, s.Reason, s.Message)
	}
}

// follow runs a silent program, attached, until somebody ends it.
func (m *mortal) follow(id boxed.ID) <-chan answer {
	m.t.Helper()
	ended, started := make(chan answer, 1), make(chan struct{})
	go func() {
		status, err := m.Exec(m.t.Context(), id, boxed.ExecRequest{
			Args: []string{"sleep", "1000"}, Started: func(boxed.ExecID) { close(started) },
		})
		ended <- answer{status: status, err: err}
	}()
	select {
	case <-started:
	case a := <-ended:
		m.t.Fatalf("exec: %+v, %v", a.status, a.err)
	}
	return ended
}

// L8, L14 (agents-sandbox#173): an engine that leaves its containers running
// goes away and comes back under sandboxes, under creates and under destroys, at
// each of their steps. What runs does not notice.
func TestEngineThatLeavesItsContainersRunning(t *testing.T) {
	d, m := onDockerd(t, 0, "--live-restore")
	w, sleeper := m.newWitness(), m.create(boxed.Spec{})
	attached := m.follow(w.id)
	if _, err := m.Pause(t.Context(), sleeper.ID); err != nil {
		t.Fatal(err)
	}
	creating, destroying, clearing := sandbox.Steps()
	ends := len(destroying)
	destroying = append(destroying, clearing...)
	for i := range max(len(creating), len(destroying)) {
		sig := []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[i%2]
		goOnWithout := i%4 < 2 // before the engine is back
		create, destroy := "before-"+creating[i%len(creating)], "before-"+destroying[i%len(destroying)]
		t.Logf("%v at %s and %s; they go on without it: %v", sig, create, destroy, goOnWithout)
		name := fmt.Sprintf("mid-%d", i)
		victim := m.anew()
		if i%2 == 1 && i < ends { // the engine itself must end it, and not its agent
			if _, err := m.Pause(t.Context(), victim); err != nil {
				t.Fatal(err)
			}
		}
		resume := []func(){m.arm("wait", create), m.arm("wait", destroy)}
		made := m.createSoon(name)
		half := m.at(create)
		gone := m.destroySoon(victim)
		m.at(destroy)
		m.look()
		d.stop(sig)
		if goOnWithout {
			for _, f := range resume {
				f()
			}
			m.refused()
		}
		m.works(w.id)
		d.start("--live-restore")
		for _, f := range resume {
			f()
		}
		if a := soon(t, "the destroy", gone); a.err != nil && boxed.CodeOf(a.err) != boxed.CodeNotReady {
			t.Errorf("%s: the destroy got %v (%s)", destroy, a.err, boxed.CodeOf(a.err))
		}
		m.ends(victim, boxed.StateStopped, boxed.EndDestroyed)
		a := soon(t, "the create", made)
		living := []boxed.ID{w.id, sleeper.ID}
		if a.err == nil {
			m.works(a.s.ID)
			living = append(living, a.s.ID)
		} else {
			if boxed.CodeOf(a.err) != boxed.CodeNotReady {
				t.Errorf("%s: the create got %v (%s)", create, a.err, boxed.CodeOf(a.err))
			}
			m.ends(half, boxed.StateFailed, boxed.EndCreateFailed)
		}
		m.nothingStray(living, 0)
		if a.err == nil {
			if err := m.Destroy(t.Context(), a.s.ID); err != nil {
				t.Error(err)
			}
		}
	}
	select {
	case a := <-attached:
		t.Errorf("the attached exec ended: %+v, %v", a.status, a.err)
	default:
	}
	m.awayForLong(d, w)
	m.bothAway(d, w)
	if _, err := m.Resume(t.Context(), sleeper.ID); err != nil {
		t.Errorf("resume: %v", err)
	}
	m.works(sleeper.ID)
	w.untouched()
}

// awayForLong keeps the engine away for longer than the node takes for the three
// looks after which a container that is missing counts as gone.
func (m *mortal) awayForLong(d *dockerd, w *witness) {
	m.t.Helper()
	d.stop(syscall.SIGKILL)
	for away := time.Now(); time.Since(away) < 18*time.Second; time.Sleep(time.Second) {
		m.works(w.id)
	}
	d.start("--live-restore")
}

// bothAway kills the engine and the node; the node comes back first and waits.
func (m *mortal) bothAway(d *dockerd, w *witness) {
	m.t.Helper()
	d.stop(syscall.SIGKILL)
	m.stop(syscall.SIGKILL)
	m.launch()
	within(m.t, 60*time.Second, "the node to answer", func() bool {
		got, err := m.Get(m.t.Context(), w.id)
		return err == nil && got.State == boxed.StateRunning
	})
	_, err := m.Exec(m.t.Context(), w.id, boxed.ExecRequest{Args: []string{"true"}})
	if boxed.CodeOf(err) != boxed.CodeNotReady {
		m.t.Errorf("exec in a node that has not recovered: %v (%s)", err, boxed.CodeOf(err))
	}
	d.start("--live-restore")
	within(m.t, 60*time.Second, "the node to recover", func() bool {
		_, err := m.Exec(m.t.Context(), w.id, boxed.ExecRequest{Args: []string{"true"}})
		return err == nil
	})
}

// L8, L10: the engine is killed at any moment of creates and destroys, not only
// between their steps. What it loses of its own then (a shim and a runtime that it
// had not told to go on) is not the node's to find, but no process of a sandbox is
// left.
func TestEngineKilledAtAnyMoment(t *testing.T) {
	d, m := onDockerd(t, 0, "--live-restore")
	m.debris = true
	w := m.newWitness()
	for i := range 5 {
		victim := m.anew()
		made := []<-chan answer{m.createSoon(fmt.Sprintf("a%d", i)), m.createSoon(fmt.Sprintf("b%d", i))}
		gone := m.destroySoon(victim)
		time.Sleep(time.Duration(i) * 35 * time.Millisecond) // any moment will do
		d.stop(syscall.SIGKILL)
		for _, id := range d.watched() {
			m.seen[id] = []string{id}
		}
		d.start("--live-restore")
		if a := soon(t, "the destroy", gone); a.err != nil && boxed.CodeOf(a.err) != boxed.CodeNotReady {
			t.Errorf("the destroy got %v (%s)", a.err, boxed.CodeOf(a.err))
		}
		m.ends(victim, boxed.StateStopped, boxed.EndDestroyed)
		for _, from := range made {
			a := soon(t, "a create", from)
			if a.err != nil {
				t.Logf("killed after %d ms: %v (%s)", i*35, a.err, boxed.CodeOf(a.err))
				continue
			}
			m.works(a.s.ID)
			if err := m.Destroy(t.Context(), a.s.ID); err != nil {
				t.Error(err)
			}
		}
		m.nothingStray([]boxed.ID{w.id}, 0)
	}
	w.untouched()
}
