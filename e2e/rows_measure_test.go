package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// startBareNode starts a node without warm sandboxes: those that the test makes
// are then all that runs.
func startBareNode(t *testing.T, args ...string) *node {
	t.Helper()
	return startNode(t, append([]string{"--templates-default-pool", "0"}, args...)...)
}

// agentPID is the PID that a sandbox's first process has on this host.
func (n *node) agentPID(id boxed.ID) int {
	n.t.Helper()
	out, err := exec.Command("docker", "inspect", "-f", "{{.State.Pid}}", "boxed-"+string(id)).Output()
	if err != nil {
		n.t.Fatalf("inspect: %v", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || pid == 0 {
		n.t.Fatalf("the agent's PID is %q", out)
	}
	return pid
}

// insiders are the processes of a sandbox as this host sees them, by PID with
// the letter of their state, the agent among them.
func insiders(agentPID int) map[int]byte {
	found := map[int]byte{}
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", agentPID))
	if err != nil {
		return found
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		// A zombie's namespaces are gone; it is known by its parent.
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		pid, _ := strconv.Atoi(filepath.Base(dir))
		at, _ := os.Readlink(dir + "/ns/pid")
		if at == namespace || string(fields[1]) == strconv.Itoa(agentPID) {
			found[pid] = fields[0][0]
		}
	}
	return found
}

// descriptors counts the open files of a process of this host.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// rss is the resident memory of a process of this host in KiB, 0 if it has ended.
func rss(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	kib, _ := strconv.Atoi(fields[0])
	return kib
}

// growth samples the memory of processes until it is stopped; then it returns
// by how many KiB each has grown at most since the start.
func growth(pids ...int) (stop func() []int) {
	before, most := make([]int, len(pids)), make([]int, len(pids))
	for i, pid := range pids {
		before[i] = rss(pid)
	}
	done := make(chan struct{})
	var sampling sync.WaitGroup
	sampling.Go(func() {
		for {
			for i, pid := range pids {
				most[i] = max(most[i], rss(pid)-before[i])
			}
			select {
			case <-done:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	return func() []int {
		close(done)
		sampling.Wait()
		return most
	}
}
