package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// L8: a kill before any step of create, or at any write of a record.
func TestAKillDuringACreateLeavesNothingAndKillsNobodyElse(t *testing.T) {
	points := append(slices.Clone(createSteps), "put starting", "put starting 2", "put running")
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			r := started(t)
			other := r.create()
			n := 0
			killed := r.killAt(func(step string) bool {
				want, again, _ := strings.Cut(point, " 2")
				_ = again
				if strings.HasSuffix(point, " 2") && step == want {
					n++
					return n == 2 // the one that would have named the container
				}
				return step == point
			})
			in(func() { r.tryCreate() })
			if !killed.Load() {
				t.Fatal("it was not killed")
			}
			r.afterKill()
			for _, s := range r.List() {
				if s.ID != other.ID {
					r.waitEnd(s.ID, boxed.StateFailed, boxed.EndInterrupted)
				}
			}
			r.left(1)
			r.works(other.ID)
		})
	}
}

// L8: the same for destroy. Whatever was decided is finished.
func TestAKillDuringADestroyIsFinishedByTheNextDaemon(t *testing.T) {
	for _, point := range append(slices.Clone(destroySteps), "put stopping", "put stopped") {
		t.Run(point, func(t *testing.T) {
			r := started(t)
			other, s := r.create(), r.create()
			killed := r.killAt(func(step string) bool { return step == point })
			in(func() { r.Destroy(context.Background(), s.ID) })
			if !killed.Load() {
				t.Fatal("it was not killed")
			}
			r.afterKill()
			if point == "stopping" || point == "put stopping" { // nothing was decided for good
				r.works(s.ID)
				if err := r.Destroy(t.Context(), s.ID); err != nil {
					t.Fatal(err)
				}
			}
			r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
			r.left(1)
			r.works(other.ID)
		})
	}
}

// L8: a kill while an expired or failed sandbox is ended keeps the reason.
func TestTheReasonOfAnEndSurvivesAKill(t *testing.T) {
	r := started(t)
	s := r.create()
	killed := r.killAt(func(step string) bool { return step == "remove" })
	r.advance(2 * time.Hour)
	r.Sweep()
	r.eventually("it is killed", killed.Load)
	r.afterKill()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndExpired)
	r.nothingLeft()
}

// Decision 9: a warm sandbox into which a claimer's files were written is used,
// also if the daemon is killed before it was handed over.
func TestAKillDuringAClaimNeverPutsAUsedSandboxBack(t *testing.T) {
	r := started(t, withPool(1))
	r.waitWarm(1)
	var puts atomic.Int32
	killed := r.killAt(func(step string) bool {
		// The files are there when the record says running.
		return step == "put running" && puts.Add(1) == 1
	})
	in(func() {
		r.tryCreate(func(s *boxed.Spec) {
			s.Files = []boxed.File{{Path: "secret", Content: []byte("ann's")}}
		})
	})
	if !killed.Load() {
		t.Fatal("it was not killed")
	}
	r.afterKill()
	r.waitWarm(1)
	s := r.create(func(s *boxed.Spec) { s.Name = "next" })
	if _, err := r.Stat(t.Context(), s.ID, "secret"); boxed.CodeOf(err) != boxed.CodeNotFound {
		t.Errorf("another owner's file is there: %v", err)
	}
}

// L3, L8, X13: a restart changes nothing for a sandbox and what runs in it.
func TestARestartAdoptsWhatRuns(t *testing.T) {
	r := started(t)
	s := r.create(func(s *boxed.Spec) { s.Name, s.IdleTimeout = "web", boxed.Duration(time.Hour) })
	paused := r.create()
	if _, err := r.Pause(t.Context(), paused.ID); err != nil {
		t.Fatal(err)
	}
	job, err := r.StartExec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	ttl := boxed.Duration(5 * time.Hour)
	if _, err := r.Update(s.ID, boxed.Update{TTL: &ttl}, nil); err != nil {
		t.Fatal(err)
	}
	before := r.get(s.ID)
	r.advance(10 * time.Minute)
	r.restart()
	after := r.get(s.ID)
	before.ActiveAt, after.ActiveAt = time.Time{}, time.Time{}
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("before %+v\nafter %+v", before, after)
	}
	r.works(s.ID)
	if e, err := r.GetExec(t.Context(), s.ID, job.ID); err != nil || !e.Running {
		t.Errorf("%+v, %v", e, err)
	}
	if p := r.get(paused.ID); p.State != boxed.StatePaused {
		t.Errorf("the paused one is %s", p.State)
	}
	if _, err := r.Resume(t.Context(), paused.ID); err != nil {
		t.Fatal(err)
	}
	r.works(paused.ID)
	if got := r.get(paused.ID).ExpiresAt; !got.Equal(r.now().Add(time.Hour)) {
		t.Errorf("the paused time counted: expires %v, now %v", got, r.now())
	}
}

// I8, L18, L20: what only claims to be ours is never touched.
func TestForeignContainersSurviveEverySweep(t *testing.T) {
	r := started(t)
	s := r.create()
	ended := r.create()
	if err := r.Destroy(t.Context(), ended.ID); err != nil {
		t.Fatal(err)
	}
	forged := []sandbox.Status{
		{ContainerID: strings.Repeat("a", 64), Sandbox: s.ID, Nonce: "guessed", Running: true},
		{ContainerID: strings.Repeat("b", 64), Sandbox: ended.ID, Nonce: "guessed", Running: true},
		{ContainerID: strings.Repeat("c", 64), Sandbox: boxed.NewID(testNode), Nonce: "x", Running: true},
		{ContainerID: strings.Repeat("d", 64), Sandbox: s.ID, Nonce: "", Running: false},
	}
	for _, f := range forged {
		r.driver.Forge(f)
	}
	for range 5 {
		r.Look(t.Context())
		r.Sweep()
	}
	r.restart()
	for range 5 {
		r.Look(t.Context())
		r.Sweep()
	}
	r.works(s.ID)
	if err := r.Destroy(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	r.nothingLeft()
	if left := r.driver.Foreign(); len(left) != len(forged) {
		t.Errorf("left %v", left)
	}
}

// L8: an engine that finishes a create after we have given up leaves nothing.
func TestAContainerThatAppearsLateIsRemoved(t *testing.T) {
	r := started(t)
	var late sandbox.Box
	r.driver.Fail(sandboxtest.Create, func(context.Context, string) error { return errors.New("timed out") })
	r.records.Fail(func(_ string, rec sandbox.Record) error {
		late = sandbox.Box{ID: rec.Sandbox.ID, Nonce: rec.Nonce, Limits: rec.Sandbox.Limits, UID: rec.UID}
		return nil
	})
	if _, err := r.tryCreate(); err == nil {
		t.Fatal("it was made")
	}
	r.driver.Fail(sandboxtest.Create, nil)
	if _, err := r.driver.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}
	r.Look(t.Context())
	r.nothingLeft()
}

// "Docker down": nothing is declared dead, new ones are refused with the reason.
func TestAnEngineThatIsDownKillsNobody(t *testing.T) {
	r := started(t)
	s := r.create()
	r.driver.SetDown(true)
	for range 2 * sandbox.MissingLooks {
		r.Look(t.Context())
	}
	r.works(s.ID) // the agent needs no engine
	_, err := r.tryCreate()
	wantCode(t, err, boxed.CodeNotReady, "start it")
	if got := r.get(s.ID); got.State != boxed.StateRunning {
		t.Errorf("it is %s", got.State)
	}
	// A destroy is decided, says what is wrong, and is finished later.
	err = r.Destroy(t.Context(), s.ID)
	wantCode(t, err, boxed.CodeNotReady)
	if got := r.get(s.ID); got.State != boxed.StateStopping {
		t.Errorf("it is %s", got.State)
	}
	r.driver.SetDown(false)
	r.advance(time.Minute)
	r.Sweep()
	r.waitEnd(s.ID, boxed.StateStopped, boxed.EndDestroyed)
	r.nothingLeft()
}

func TestAnEngineThatIsDownAtTheStartIsWaitedFor(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.driver.SetDown(true)
	r.make()
	r.begin()
	r.eventually("it looks", func() bool { return r.driver.Calls(sandboxtest.List) > 0 })
	_, err := r.tryCreate()
	wantCode(t, err, boxed.CodeNotReady, "recovering")
	r.eventually("it knows the record", func() bool { _, err := r.Get(s.ID); return err == nil })
	_, err = r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
	wantCode(t, err, boxed.CodeNotReady)
	wantCode(t, r.Destroy(t.Context(), s.ID), boxed.CodeNotReady)
	_, err = r.Pause(t.Context(), s.ID)
	wantCode(t, err, boxed.CodeNotReady)
	if got, err := r.Wait(t.Context(), s.ID, boxed.StateRunning); err != nil || len(r.List()) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = r.Get(boxed.NewID(testNode))
	wantCode(t, err, boxed.CodeNotReady)
	r.driver.SetDown(false)
	r.eventually("it has recovered", r.Recovered)
	r.works(s.ID)
}

// A stop while the engine is down must not wait for it.
func TestAStopWhileTheEngineIsDownReturns(t *testing.T) {
	r := newRig(t)
	r.driver.SetDown(true)
	r.make()
	r.begin()
	began := time.Now()
	r.end()
	if time.Since(began) > 5*time.Second {
		t.Errorf("it took %v", time.Since(began))
	}
}

// L14: after a restart of the host, an engine that still loads its containers
// is given time; what ran before has ended, and says why.
func TestAHostRestartIsJudgedOverAWindow(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.driver.Reboot()
	r.make()
	r.SetBootID("another")
	r.begin()
	r.eventually("it has recovered", r.Recovered)
	r.waitEnd(s.ID, boxed.StateFailed, boxed.EndHostRestarted)
	r.nothingLeft()
}

func TestOneMissingAnswerAtTheStartDeclaresNobodyDead(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	// The first answers do not have it yet.
	hidden := sandboxtest.New()
	defer hidden.Close()
	lists := &slowEngine{Driver: r.driver, empty: 2}
	r.cfg.Driver = lists
	r.run()
	r.works(s.ID)
	if got := r.get(s.ID); got.State != boxed.StateRunning {
		t.Errorf("it is %s", got.State)
	}
	// The same later, in Look.
	lists.left.Store(sandbox.MissingLooks - 1)
	for range sandbox.MissingLooks - 1 {
		r.Look(t.Context())
	}
	r.Look(t.Context())
	r.works(s.ID)
}

// slowEngine lists nothing at first.
type slowEngine struct {
	sandbox.Driver
	empty int32
	once  atomic.Bool
	left  atomic.Int32
}

func (e *slowEngine) List(ctx context.Context) ([]sandbox.Status, error) {
	if e.once.CompareAndSwap(false, true) {
		e.left.Store(e.empty)
	}
	if e.left.Add(-1) >= 0 {
		return nil, nil
	}
	return e.Driver.List(ctx)
}

// L14: gone is what three looks in a row did not find.
func TestAVanishedContainerIsNoticedAfterThreeLooks(t *testing.T) {
	r := started(t)
	s := r.create()
	r.driver.Vanish(s.ID)
	for i := range sandbox.MissingLooks {
		if st := r.get(s.ID).State; st != boxed.StateRunning {
			t.Fatalf("%s after %d looks", st, i)
		}
		r.Look(t.Context())
	}
	r.waitEnd(s.ID, boxed.StateFailed, boxed.EndVanished)
	r.nothingLeft()
}

func TestAVanishedContainerIsNoticedAtTheStart(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.driver.Vanish(s.ID)
	r.run()
	r.waitEnd(s.ID, boxed.StateFailed, boxed.EndVanished)
	r.nothingLeft()
}

// X25, L13: a container that ends by itself is noticed by the engine's event,
// and by the look if that is missed.
func TestACrashIsNoticedAndTyped(t *testing.T) {
	for _, c := range []struct {
		name   string
		oom    bool
		reason boxed.EndReason
	}{{"crash", false, boxed.EndCrashed}, {"oom", true, boxed.EndOOM}} {
		t.Run(c.name, func(t *testing.T) {
			r := started(t)
			s, missed := r.create(), r.create()
			failed := make(chan boxed.ExitStatus, 1)
			began := make(chan struct{})
			go func() {
				status, _ := r.Exec(context.Background(), s.ID, boxed.ExecRequest{
					Args: []string{"sleep", "1000"}, Started: func(boxed.ExecID) { close(began) },
				})
				failed <- status
			}()
			<-began
			r.driver.Crash(s.ID, 137, c.oom)
			r.waitEnd(s.ID, boxed.StateFailed, c.reason)
			if status := <-failed; status.Reason != boxed.ReasonLost || status.Code != -1 {
				t.Errorf("the exec: %+v", status)
			}
			_, err := r.Exec(t.Context(), s.ID, boxed.ExecRequest{Args: []string{"true"}})
			wantCode(t, err, boxed.CodeGone)
			r.driver.SetDown(true) // breaks the events
			r.driver.Crash(missed.ID, 1, c.oom)
			r.driver.SetDown(false)
			r.Look(t.Context())
			r.waitEnd(missed.ID, boxed.StateFailed, c.reason)
			r.nothingLeft()
		})
	}
}

func TestACrashWhileTheDaemonIsAwayIsNoticed(t *testing.T) {
	r := started(t)
	s := r.create()
	r.end()
	r.driver.Crash(s.ID, 1, false)
	r.run()
	r.waitEnd(s.ID, boxed.StateFailed, boxed.EndCrashed)
	r.nothingLeft()
}

// The daemon can be killed between the freezer and the record.
func TestAHalfDonePauseIsMadeWhole(t *testing.T) {
	r := started(t)
	s, p := r.create(), r.create()
	if _, err := r.Pause(t.Context(), p.ID); err != nil {
		t.Fatal(err)
	}
	r.end()
	for id, box := range r.driver.Boxes() {
		var err error
		if box.ID == s.ID {
			err = r.driver.Pause(t.Context(), id)
		} else {
			err = r.driver.Resume(t.Context(), id)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.run()
	r.works(s.ID)
	all, _ := r.driver.List(t.Context())
	for _, c := range all {
		if c.Paused != (c.Sandbox == p.ID) {
			t.Errorf("%+v", c)
		}
	}
}

func TestStrayDirectoriesAreRemovedAtTheStart(t *testing.T) {
	r := started(t)
	s := r.create()
	stray := boxed.NewID(testNode)
	for _, name := range []string{string(stray), "keep-me"} {
		if err := os.MkdirAll(filepath.Join(r.dir, name, "x"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r.restart()
	entries, _ := os.ReadDir(r.dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{string(s.ID), "keep-me"}; len(names) != 2 || !slices.Contains(names, want[0]) || !slices.Contains(names, want[1]) {
		t.Errorf("left %v", names)
	}
	os.RemoveAll(filepath.Join(r.dir, "keep-me"))
}
