package e2e_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// X25, daytonaio/daytona#5140, e2b-dev/infra#2073: a fork storm or running out of
// memory killed the daemon in the sandbox, whose state said "running" for
// minutes. The agent survives both, and answers while they last.
func TestTheAgentSurvivesStorms(t *testing.T) {
	n := startBareNode(t)
	id := n.create(boxed.Spec{}).ID
	agent := n.agentPID(id)
	working := func(t *testing.T, what string) {
		t.Helper()
		within(t, 10*time.Second, "the sandbox to work "+what, func() bool {
			out, status, err := n.collect(t.Context(), id, boxed.ExecRequest{Args: []string{"echo", "works"}})
			return err == nil && out == "works\n" && status.Code == 0
		})
		if got := n.agentPID(id); got != agent {
			t.Fatalf("the agent is another process: %d, was %d", got, agent)
		}
	}
	t.Run("forks", func(t *testing.T) {
		storm, ended := n.began(t.Context(), id, boxed.ExecRequest{Args: []string{"bash", "-c", "echo storm; bomb() { bomb | bomb & }; bomb; while :; do bomb; done 2>/dev/null"}})
		within(t, 20*time.Second, "the limit of processes to be reached", func() bool { return len(insiders(agent)) >= 200 })
		// A new program may find no room: that is an answer, of its own kind and at once.
		for range 20 {
			_, status, err := n.collect(t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
			switch {
			case err == nil && status.Code == 0:
			case boxed.CodeOf(err) == boxed.CodeQuota && strings.Contains(err.Error(), "limit of processes"):
			default:
				t.Errorf("a program during it: %+v, %v (%s)", status, err, boxed.CodeOf(err))
			}
		}
		if _, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "f", Content: strings.NewReader("x")}); err != nil {
			t.Errorf("a file during it: %v", err)
		}
		if err := n.KillExec(t.Context(), id, storm); err != nil {
			t.Errorf("kill: %v", err)
		}
		if end := <-ended; end.err != nil || end.status.Reason != boxed.ReasonCanceled {
			t.Errorf("%+v", end)
		}
		within(t, 10*time.Second, "nothing to be left", func() bool { return len(insiders(agent)) == 1 })
		working(t, "after a storm of forks")
	})
	t.Run("memory", func(t *testing.T) {
		for i := range 5 {
			out, status := n.exec(id, boxed.ExecRequest{Language: "python", Code: "x = []\nwhile True: x.append(bytearray(1 << 22))"})
			if status.Reason != boxed.ReasonOOM || status.Code != 137 {
				t.Errorf("%d: %+v %.200q", i, status, out)
			}
			working(t, "out of memory")
		}
		stats, err := n.Stats(t.Context(), id)
		if err != nil || stats.OOMKills < 5 {
			t.Errorf("%+v, %v", stats, err)
		}
	})
	t.Run("memory of many", func(t *testing.T) { // all at once, so that the kernel has a choice
		_, status := n.exec(id, boxed.ExecRequest{Args: []string{"bash", "-c", `for i in $(seq 20); do python3 -c 'x = []
while True: x.append(bytearray(1 << 20))' & done; wait; exit 0`}})
		if status.Reason != boxed.ReasonExited && status.Reason != boxed.ReasonOOM {
			t.Errorf("%+v", status)
		}
		working(t, "after many ran out of memory")
	})
}

// X25: if the agent cannot survive, state and reason are right within 5 s, and
// what ran is told so.
func TestAnAgentThatDiesIsSaidWithinSeconds(t *testing.T) {
	n := startBareNode(t)
	for name, c := range map[string]struct {
		kill func(t *testing.T, id boxed.ID, agent int)
		want boxed.EndReason
	}{
		"killed": {func(t *testing.T, _ boxed.ID, agent int) {
			if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}, boxed.EndCrashed},
		"out of memory": {func(t *testing.T, id boxed.ID, agent int) {
			// The kernel chooses user code before the agent; here most of the memory is in files, which are nobody's, and
			// the agent the likelier of the two.
			if out, status := n.sh(id, "for d in /workspace ~ /output; do head -c 192M /dev/zero > $d/big; done 2>/dev/null; true"); status.Code != 0 {
				t.Fatalf("%q, %+v", out, status)
			}
			_, ended := n.began(t.Context(), id, boxed.ExecRequest{Args: []string{"python3", "-c", `
import time, os
print("ready", flush=True)
while not os.path.exists("/tmp/go"): time.sleep(0.01)
x = []
while True: x.append(bytearray(1 << 22))`}})
			t.Cleanup(func() { <-ended })
			if err := os.WriteFile("/proc/"+strconv.Itoa(agent)+"/oom_score_adj", []byte("1000"), 0); err != nil {
				t.Fatal(err)
			}
			if _, err := n.WriteFile(t.Context(), id, boxed.WriteRequest{Path: "/tmp/go", Content: strings.NewReader("")}); err != nil {
				t.Fatal(err)
			}
			within(t, 20*time.Second, "the agent to be killed", func() bool { return rss(agent) == 0 })
		}, boxed.EndOOM},
	} {
		t.Run(name, func(t *testing.T) {
			id := n.create(boxed.Spec{}).ID
			_, ended := n.began(t.Context(), id, boxed.ExecRequest{Args: []string{"sh", "-c", "echo here; exec sleep 1000"}})
			c.kill(t, id, n.agentPID(id))
			within(t, 5*time.Second, "the state to be right", func() bool {
				got, err := n.Get(t.Context(), id)
				return err == nil && got.State == boxed.StateFailed && got.Reason == c.want
			})
			if end := <-ended; end.status.Reason != boxed.ReasonLost || end.status.Code != -1 {
				t.Errorf("its exec: %+v", end)
			}
			_, err := n.Exec(t.Context(), id, boxed.ExecRequest{Args: []string{"true"}})
			if e := boxed.AsError(err); e.Code != boxed.CodeGone || fmt.Sprint(e.Detail["reason"]) != string(c.want) {
				t.Errorf("after it: %v, %v", err, e.Detail)
			}
		})
	}
}
