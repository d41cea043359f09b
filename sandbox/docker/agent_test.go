package docker_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// I1: user code cannot kill, stop, trace, limit, re-schedule or impersonate the
// agent, and after each try an exec works. facts.md: as the same user it could,
// by prlimit, sched_* and signals on runc, and by a plain kill on runsc.
func TestUserCodeCannotTouchTheAgent(t *testing.T) {
	t.Parallel()
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		bringProbe(t, r)
		w := newWorld(t, r)
		b := w.create()
		b.works("its start")
		before := agentState(t, r, b)
		tries := []string{"signals", "limits", "scheduling", "tracing", "files", "socket", "identity"}
		if !r.shares { // gVisor makes user namespaces for anybody
			for _, kind := range slices.Clone(tries) {
				if kind != "identity" { // it is root there already
					tries = append(tries, "as-root "+kind)
				}
			}
		}
		for _, kind := range tries {
			out, status := b.exec(append([]string{"/probe", "attack"}, strings.Fields(kind)...)...)
			said, tried, _ := strings.Cut(out, "tried ")
			if tried == "" || tried == "0" || status.Reason != boxed.ReasonExited {
				t.Errorf("%s: %s%+v", kind, out, status)
			}
			for line := range strings.Lines(said) {
				if r.shares || !ownKernelTakes.MatchString(line) {
					t.Errorf("user code %s", strings.TrimSpace(line))
				}
			}
			t.Logf("%s: %s tries", kind, tried)
			b.works(kind)
			if diff := cmp.Diff(before, agentState(t, r, b)); diff != "" {
				t.Errorf("%s changed the agent: %s", kind, diff)
			}
		}
		if got, _ := b.exec("/suid", "suid"); !strings.HasSuffix(got, "EPERM") || len(slices.Compact(strings.Fields(got)[:4])) != 1 {
			t.Errorf("a set-uid program runs as %s", got)
		}
	})
}

// ownKernelTakes is what gVisor's kernel takes from everybody and does nothing
// with, as its threads are scheduled by the host, and names that say nothing.
var ownKernelTakes = regexp.MustCompile(`^can: (affinity|scheduler|scheduling|priority|input and output|its list of locks|count its events ENODEV|list fdinfo|follow ns/|namespaces of its own EINVAL|own it EINVAL)`)

// agentState is what somebody could have changed of the agent, as the host sees
// it: every thread's limits, processors, policy and priority.
func agentState(t *testing.T, r *oci, b *inside) map[string]string {
	t.Helper()
	if !r.shares {
		return nil
	}
	proc := fmt.Sprintf("/proc/%d", b.container().PID)
	state := map[string]string{}
	read := func(name string) string {
		raw, err := os.ReadFile(filepath.Join(proc, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	// Its own limit of resident memory goes down with each exec: the mark.
	state["limits"] = regexp.MustCompile(`(?m)^Max resident set.*$`).ReplaceAllString(read("limits"), "")
	state["oom_score_adj"] = read("oom_score_adj")
	status := statusFields(read("status"))
	for _, name := range []string{"Uid", "Gid", "CapEff", "CapPrm", "NoNewPrivs", "Seccomp", "Cpus_allowed", "TracerPid", "Name"} {
		state[name] = status[name]
	}
	_, rest, _ := strings.Cut(read("stat"), ") ")
	fields := strings.Fields(rest)
	state["priority"], state["nice"], state["policy"] = fields[15], fields[16], fields[38]
	return state
}

// forge says hello without the secret, again and again until stopped, and gives
// what a host told it that it should not have.
func forge(path string, stop <-chan struct{}) (told []string, calls int) {
	for {
		select {
		case <-stop:
			return told, calls
		case <-time.After(2 * time.Millisecond):
		}
		conn, err := net.Dial("unix", path)
		if err != nil {
			continue // there is none between two lives of the daemon
		}
		calls++
		_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
		hello := []byte(`{"version":1,"features":[],"build":"x","secret":"guessed"}`)
		_, _ = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(hello))), hello...))
		var welcome struct {
			Secret, Error string
			Config        any
		}
		var size uint32
		if binary.Read(conn, binary.BigEndian, &size) == nil && size < 1<<16 {
			body := make([]byte, size)
			if _, err := io.ReadFull(conn, body); err == nil && json.Unmarshal(body, &welcome) == nil && (welcome.Error == "" || welcome.Secret != "" || welcome.Config != nil) {
				told = append(told, string(body))
			}
		}
		conn.Close()
	}
}

// I2: 200 processes that flood connect, 40,000 times a second, while the daemon
// restarts delay the agent by less than a second, and never take its place; nor
// does a hello without the secret, even from the host's root, who alone can reach
// the socket.
func TestAFloodOfCallsDelaysNoRestart(t *testing.T) {
	onEveryKernel(t, func(t *testing.T, r *oci) {
		bringProbe(t, r)
		w := newWorld(t, r, func(c *sandbox.Config) {
			template := c.Templates[boxed.DefaultTemplate]
			template.Limits.MemoryBytes = 1024 * boxed.MiB // runsc: 4 MiB each
			c.Templates = map[string]boxed.Template{boxed.DefaultTemplate: template}
		})
		b := w.create()
		start := func(args ...string) boxed.ExecID {
			e, err := w.StartExec(t.Context(), b.id, boxed.ExecRequest{Args: append([]string{"/probe"}, args...)})
			if err != nil {
				t.Fatal(err)
			}
			return e.ID
		}
		witness := start("sleep")
		quiet := b.restart(t, 0, witness)
		n := 200
		if !r.shares {
			n = 20 // its calls take so long that 200 never rest
		}
		flood := start("flood", strconv.Itoa(n))
		id := b.container().ContainerID
		said := func() string {
			var out lockedBuffer
			if _, err := b.w.Attach(t.Context(), b.id, flood, boxed.AttachRequest{NoFollow: true, Stdout: &out}); err != nil {
				t.Errorf("the flood's output: %v", err)
			}
			return out.String()
		}
		eventually(t, "they call", func() bool {
			if !r.shares { // its threads are not its processes
				return said() != ""
			}
			s, err := w.d.Stats(t.Context(), id) // asked from outside: inside there is no time left
			return err == nil && s.Processes > 200
		})

		stop := make(chan struct{})
		var forgers sync.WaitGroup
		for range 2 {
			forgers.Go(func() {
				if told, calls := forge(filepath.Join(w.cfg.Dir, string(b.id), sandbox.SocketName), stop); len(told) > 0 || calls == 0 {
					t.Errorf("of %d forged hellos these were answered: %q", calls, told)
				}
			})
		}
		flooded := b.restart(t, quiet+time.Second, witness, flood)
		close(stop)
		forgers.Wait()
		t.Logf("from the daemon's start to the agent's first answer: %v, flooded %v", quiet, flooded)
		if flooded > quiet+floodPatience {
			t.Errorf("the flood delays the agent by %v", flooded-quiet)
		}
		if got := said(); got != fmt.Sprintf("flooding %d\n", n) {
			t.Errorf("the flood says %q", got)
		}
	})
}

// floodPatience is a bound of liveness, on a machine that does other things as
// well.
const floodPatience = 15 * time.Second

// restart ends the daemon's part and starts it again, a few times or until it is
// quick enough, and gives the shortest time until the agent answers. It must be
// the same agent: it knows the execs, which still run.
func (b *inside) restart(t *testing.T, enough time.Duration, execs ...boxed.ExecID) time.Duration {
	t.Helper()
	best := time.Hour
	for i := 0; i < 2 && best > enough; i++ {
		if err := b.w.stopped(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		b.w.run()
		list, err := b.w.ListExecs(t.Context(), b.id)
		best = min(best, time.Since(began))
		for _, id := range execs {
			if err != nil || !slices.ContainsFunc(list, func(e boxed.Exec) bool { return e.ID == id && e.Running }) {
				t.Errorf("the agent does not know %s: %+v, %v", id, list, err)
			}
		}
	}
	return best
}
