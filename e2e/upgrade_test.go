package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// release is a build of the node and of its agent.
type release struct {
	version     string
	node, agent string
}

// thisRelease is what TestMain has built.
func thisRelease() release {
	return release{"e2e", filepath.Join(bin, "boxed-node"), filepath.Join(bin, "boxed-agent")}
}

// nextRelease differs from it in what it calls itself, so that its agent is
// another program.
var nextRelease = sync.OnceValues(func() (release, error) { return buildRelease("..", "next") })

// earlier is a commit whose builds are in use. Its records and agents must be
// understood for as long as it is named here.
const earlier = "53132c8b318e321ab34a8a4b016d3f889e8ca472"

// earlierRelease is built from the repository's history, where that is at hand.
var earlierRelease = sync.OnceValues(func() (release, error) {
	src := filepath.Join(bin, "src-earlier")
	if err := os.Mkdir(src, 0o700); err != nil {
		return release{}, err
	}
	unpack := exec.Command("bash", "-c", `set -o pipefail; git archive "$1" | tar -x -C "$2"`, "-", earlier, src)
	unpack.Dir = ".."
	if text, err := unpack.CombinedOutput(); err != nil {
		return release{}, fmt.Errorf("unpack %s: %w: %s", earlier, err, text)
	}
	return buildRelease(src, "earlier")
})

func buildRelease(src, version string) (release, error) {
	r := release{version, filepath.Join(bin, "boxed-node-"+version), filepath.Join(bin, "boxed-agent-"+version)}
	for out, pkg := range map[string]string{r.node: "./cmd/boxed-node", r.agent: "./agent/boxed-agent"} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.version="+version, "-o", out, pkg)
		cmd.Dir = src
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return r, fmt.Errorf("build %s of %s: %w\n%s", pkg, version, err, text)
		}
	}
	return r, nil
}

// L3 (cloudflare#316, #345, #544), L8, X13 (managoat/fountain#691,
// TanStack/ai#1085), X14 (infra#3281, OpenShell#1992), decision 2: a node is
// replaced by another build, to a newer one and back to an older one, gracefully
// and not, with every kind of exec under way.
func TestUpgradeWithExecsRunning(t *testing.T) {
	for _, c := range []struct {
		name     string
		from, to func() (release, error)
		sig      syscall.Signal
	}{
		{"to the next", given(thisRelease()), nextRelease, syscall.SIGTERM},
		{"back from the next, killed", nextRelease, given(thisRelease()), syscall.SIGKILL},
		{"from an earlier one, killed", earlierRelease, given(thisRelease()), syscall.SIGKILL},
		{"back to an earlier one", given(thisRelease()), earlierRelease, syscall.SIGTERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(c.name, "earlier") {
				if err := exec.Command("git", "cat-file", "-e", earlier+"^{commit}").Run(); err != nil {
					t.Skipf("the commit %.7s is not in this clone's history: %v", earlier, err)
				}
			}
			from, err := c.from()
			if err != nil {
				t.Fatal(err)
			}
			to, err := c.to()
			if err != nil {
				t.Fatal(err)
			}
			upgrade(t, from, to, c.sig)
		})
	}
}

func given(r release) func() (release, error) { return func() (release, error) { return r, nil } }

// running is what a node has when it is replaced.
type running struct {
	*mortal
	from, to release
	s        *boxed.Sandbox
	paused   *boxed.Sandbox
	ended    *boxed.Sandbox
	key      *boxed.NewKey
	witness  *witness
	old      map[string]string // containers, by ID

	lines, pty, input, big *follower
	replaced               chan struct{} // closed when the old node has gone
}

func upgrade(t *testing.T, from, to release, sig syscall.Signal) {
	r := &running{mortal: newMortal(t, from.node, ""), from: from, to: to, replaced: make(chan struct{})}
	r.agent = from.agent
	r.setPool(1)
	r.start()
	r.fill()
	r.execs()
	r.old = r.containers()
	r.stop(sig)
	close(r.replaced)
	r.program, r.agent = to.node, to.agent
	r.start()
	r.goOn()
	r.recordsAreRead()
	r.poolIsRolled()
	r.leaveNothing()
}

// fill makes sandboxes in different states, and what else is durable.
func (r *running) fill() {
	t := r.t
	r.poolIs(1)
	var err error
	r.s = r.create(boxed.Spec{
		Name: "kept", Labels: map[string]string{"a": "b"}, Env: map[string]string{"GREETING": "hello"}, Dir: "/workspace/sub",
		TTL: boxed.Duration(40 * time.Minute), IdleTimeout: boxed.Duration(30 * time.Minute), Files: []boxed.File{{Path: "f", Content: []byte("x")}},
	})
	r.poolIs(1)
	r.paused = r.create(boxed.Spec{Name: "asleep"})
	r.sh(r.paused.ID, "echo dream > file")
	if r.paused, err = r.Pause(t.Context(), r.paused.ID); err != nil {
		t.Fatal(err)
	}
	ended := r.create(boxed.Spec{Name: "over"})
	if err := r.Destroy(t.Context(), ended.ID); err != nil {
		t.Fatal(err)
	}
	if r.ended, err = r.Get(t.Context(), ended.ID); err != nil {
		t.Fatal(err)
	}
	if r.key, err = r.CreateKey(t.Context(), boxed.KeyRequest{Owner: "ann", Role: boxed.RoleUser}); err != nil {
		t.Fatal(err)
	}
	r.witness = r.newWitness()
	r.poolIs(1)
	r.look()
}

// bigBytes is more than all buffers between a program and its client hold.
const bigBytes = 48 << 20

// execs starts one of each kind, all of them under way when it returns.
func (r *running) execs() {
	bash := func(script string) boxed.ExecRequest {
		return boxed.ExecRequest{Args: []string{"bash", "-c", script}}
	}
	r.lines = followThrough(r.t, r.Client, r.s.ID, bash(`for i in $(seq 200); do echo line $i; [[ -e /tmp/go ]] || sleep 0.1; done; exit 7`), nil)
	pty := bash(`PS1='$ '; stty size; read -r a; echo "first:$a"; read -r b; stty size; echo "second:$b"; exit 5`)
	pty.TTY, pty.OpenStdin, pty.Size = true, true, boxed.Size{Cols: 101, Rows: 41}
	r.pty = followThrough(r.t, r.Client, r.s.ID, pty, nil)
	input := bash(`while read -r line; do echo "got $line"; done; echo "end of input"; exit 6`)
	input.OpenStdin = true
	r.input = followThrough(r.t, r.Client, r.s.ID, input, nil)
	half := make(chan struct{})
	var once sync.Once
	// Its client stops taking bytes half-way, so that everything in between is full when the node goes.
	r.big = followThrough(r.t, r.Client, r.s.ID, bash(fmt.Sprintf(`head -c %d /dev/urandom | tee >(sha256sum >/tmp/sum)`, bigBytes)), func(n int64) {
		if n > bigBytes/2 {
			once.Do(func() { close(half) })
			<-r.replaced
		}
	})
	r.lines.hears("line 3\n")
	r.pty.say("one", false)
	r.pty.hears("first:one")
	for i := range 100 {
		r.input.say(fmt.Sprint(i), false)
	}
	r.input.hears("got 99\n")
	select {
	case <-half:
	case <-time.After(60 * time.Second):
		r.t.Fatal("the big output does not come")
	}
}

// goOn looks at each exec after the node has been replaced.
func (r *running) goOn() {
	t := r.t
	r.sh(r.s.ID, "touch /tmp/go")
	if status := r.lines.end(); status.Code != 7 {
		t.Errorf("lines: %+v", status)
	}
	var want strings.Builder
	for i := range 200 {
		fmt.Fprintf(&want, "line %d\n", i+1)
	}
	if r.lines.output() != want.String() {
		t.Errorf("lines: %q", r.lines.output())
	}
	r.pty.say("two", true)
	if status := r.pty.end(); status.Code != 5 || strings.Count(r.pty.output(), "41 101") != 2 || !strings.Contains(r.pty.output(), "second:two") {
		t.Errorf("pty: %+v, %q", status, r.pty.output())
	}
	for i := 100; i < 200; i++ {
		r.input.say(fmt.Sprint(i), true)
	}
	r.input.endInput()
	want.Reset()
	for i := range 200 {
		fmt.Fprintf(&want, "got %d\n", i)
	}
	if status := r.input.end(); status.Code != 6 || r.input.output() != want.String()+"end of input\n" {
		t.Errorf("input: %+v, %q", status, r.input.output())
	}
	// The earlier release's agent kept nothing of what was on the way: bytes may be missing, but it must be said how many.
	r.big.forgetful = r.from.version == "earlier"
	status := r.big.end()
	n, sum := r.big.received()
	if r.big.gap > 0 { // nothing to compare: it was said that bytes are missing
		r.witness.untouched()
		return
	}
	if text, _ := r.sh(r.s.ID, "until [[ -s /tmp/sum ]]; do sleep 0.05; done; cut -d' ' -f1 /tmp/sum"); status.Code != 0 || n != bigBytes || strings.TrimSpace(text) != sum {
		t.Errorf("big: %+v; %d bytes of %d, hash %s, want %s", status, n, bigBytes, sum, text)
	}
	r.witness.untouched()
}

// recordsAreRead compares what one build says with what the other said.
func (r *running) recordsAreRead() {
	t := r.t
	for _, before := range []*boxed.Sandbox{r.s, r.paused, r.ended} {
		after, err := r.Get(t.Context(), before.ID)
		if err != nil {
			t.Fatal(err)
		}
		was, is := *before, *after
		was.ActiveAt, is.ActiveAt = time.Time{}, time.Time{}
		if diff := cmp.Diff(was, is); diff != "" {
			t.Errorf("%s: %s", before.Name, diff)
		}
	}
	if text, _ := r.sh(r.s.ID, "echo $GREETING; pwd; cat f"); text != "hello\n/workspace/sub\nx" {
		t.Errorf("%q", text)
	}
	if _, err := r.Resume(t.Context(), r.paused.ID); err != nil {
		t.Error(err)
	}
	if text, _ := r.sh(r.paused.ID, "cat file"); text != "dream\n" {
		t.Errorf("%q", text)
	}
	r.hasEnded(r.ended.ID, boxed.EndDestroyed)
	ann, err := client.New(client.Config{Endpoint: r.endpoint, APIKey: r.key.Secret})
	if err != nil {
		t.Fatal(err)
	}
	if list, err := ann.List(t.Context(), boxed.Filter{}); err != nil || len(list.Sandboxes) != 0 {
		t.Errorf("ann's key: %+v, %v", list, err)
	}
	if types := eventsOf(t, r.Client, r.ended.ID, boxed.EventStopped); types[0] != boxed.EventCreated {
		t.Errorf("events of the ended one: %v", types)
	}
}

// poolIsRolled: a warm sandbox has the agent of the build that made it, so the
// other build ends it and makes its own.
func (r *running) poolIsRolled() {
	t := r.t
	r.poolIs(1)
	for id, name := range r.containers() {
		switch sandbox := boxed.ID(strings.TrimPrefix(name, "boxed-")); {
		case slices.Contains([]boxed.ID{r.s.ID, r.paused.ID, r.witness.id}, sandbox):
		case r.old[id] != "":
			t.Errorf("%s, which nobody claimed, is still there", name)
		}
	}
	fresh := r.create(boxed.Spec{Name: "fresh"})
	if !fresh.Warm {
		t.Errorf("it was not warm: %s", fresh.WarmMiss)
	}
	for id, want := range map[boxed.ID]string{r.s.ID: r.from.version, fresh.ID: r.to.version} {
		if text, _ := r.sh(id, "/.boxed-agent --version"); !strings.Contains(text, want) {
			t.Errorf("the agent of %s is %q, want that of %s", id, text, want)
		}
	}
	if err := r.Destroy(t.Context(), fresh.ID); err != nil {
		t.Error(err)
	}
	r.poolIs(1)
}

// leaveNothing: one build destroys what the other made.
func (r *running) leaveNothing() {
	t := r.t
	for _, id := range []boxed.ID{r.s.ID, r.paused.ID, r.witness.id} {
		if err := r.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
		r.ends(id, boxed.StateStopped, boxed.EndDestroyed)
	}
	r.nothingStray(nil, 1)
	r.stop(syscall.SIGTERM)
	r.start() // prunes
	programs, err := os.ReadDir(filepath.Join(r.dir, "agent"))
	if err != nil || len(programs) != 1 {
		t.Errorf("agents: %v, %v; want the one that is used", programs, err)
	}
}
