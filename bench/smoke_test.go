package main_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	main "github.com/boxed-mesh/boxed/bench"
)

// testImage has python3 and coreutils.
const testImage = "boxed/small:bookworm"

func needEngine(t *testing.T) {
	t.Helper()
	if err := exec.Command("docker", "image", "inspect", testImage).Run(); err != nil {
		if os.Getenv("CI") != "" { // there make test has seen to both: their absence is a fault
			t.Fatal("no container engine answers, or it has no " + testImage)
		}
		t.Skip("no container engine answers, or it has no " + testImage + "; make test sees to both")
	}
}

// shortTemp is where files go: the path of a socket below it has to fit.
func shortTemp(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "b")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("TMPDIR", dir)
}

// left are the containers that were made by this process, or have files of it.
func left(t *testing.T) (list []string) {
	t.Helper()
	docker := func(args ...string) string {
		out, _ := exec.Command("docker", args...).Output() // others' containers come and go meanwhile
		return string(out)
	}
	list = strings.Fields(docker("ps", "-aq", "--filter", "label=sh.boxed.bench="+strconv.Itoa(os.Getpid())))
	for _, id := range strings.Fields(docker("ps", "-aq")) {
		if strings.Contains(docker("inspect", "--format", "{{json .HostConfig.Mounts}}", id), os.Getenv("TMPDIR")) {
			list = append(list, id)
		}
	}
	return list
}

// The whole way once: every system lives and dies, and is measured.
func TestLifecycleOfEverySystemIsMeasured(t *testing.T) {
	needEngine(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir := t.TempDir()
	shortTemp(t)
	var stdout, stderr bytes.Buffer
	if err := main.Program(ctx, []string{"-quick", "-n", "1", "-only", "lifecycle", "-image", testImage, "-out", dir}, &stdout, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	rows, err := main.ReadRows(os.DirFS(dir), "lifecycle.csv")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]main.Row{}
	for _, r := range rows {
		found[r.System+" "+r.Metric] = r
	}
	for _, system := range []string{"docker-stock", "docker-hardened", "docker-ours", "boxed-cold", "boxed-warm"} {
		if r, ok := found[system+" failures"]; !ok || r.P50 != 0 || r.N != 1 {
			t.Errorf("%s: %+v\n%s", system, r, stderr.String())
		}
		for _, metric := range []string{"create", "exec", "destroy", "total"} {
			if r := found[system+" "+metric]; r.N != 1 || r.P50 <= 0 || r.Unit != "ms" {
				t.Errorf("%s %s: %+v", system, metric, r)
			}
		}
	}
	if trials := countTrials(t, dir+"/raw/lifecycle.csv.gz"); trials != 5 {
		t.Errorf("%d trials of 5 systems", trials)
	}
	if files, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(files) > 0 {
		t.Errorf("it leaves files behind: %v %v", files, err)
	}
	if containers := left(t); len(containers) > 0 {
		t.Errorf("it leaves containers behind: %s", containers)
	}
}

// docker-ours is there to show what the agent is worth: it must differ from a
// sandbox in nothing else.
func TestContainerWithOurSettingsIsASandboxWithoutAgent(t *testing.T) {
	needEngine(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var stderr bytes.Buffer
	raw, sandbox, err := main.Settings(ctx, testImage, &stderr)
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	for _, c := range []*container.InspectResponse{&raw, &sandbox} {
		for i := range c.HostConfig.Mounts {
			c.HostConfig.Mounts[i].Source = "" // each has files of its own
		}
		slices.SortFunc(c.HostConfig.Mounts, func(a, b mount.Mount) int { return strings.Compare(a.Target, b.Target) })
		for path, options := range c.HostConfig.Tmpfs { // and a user of its own
			before, _, _ := strings.Cut(options, ",uid=")
			c.HostConfig.Tmpfs[path] = before
		}
	}
	byTarget := cmpopts.SortSlices(func(a, b string) bool { return a < b })
	if diff := cmp.Diff(sandbox.HostConfig, raw.HostConfig, byTarget, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("a sandbox, and what docker-ours has:\n%s", diff)
	}
	if !raw.Config.NetworkDisabled || !sandbox.Config.NetworkDisabled {
		t.Error("one of them has a network")
	}
}

func TestCtrlCRemovesWhatWasMade(t *testing.T) {
	needEngine(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir := t.TempDir()
	shortTemp(t)
	var stdout bytes.Buffer
	stderr := &trigger{word: "lifecycle (1 of 1)", pull: func() { time.AfterFunc(5*time.Second, cancel) }}
	if err := main.Program(ctx, []string{"-only", "lifecycle", "-image", testImage, "-out", dir}, &stdout, stderr); err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("it ended with %v\n%s", err, stderr.String())
	}
	if files, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(files) > 0 {
		t.Errorf("it leaves files behind: %v %v\n%s", files, err, stderr.String())
	}
	if containers := left(t); len(containers) > 0 {
		t.Errorf("it leaves containers behind: %s", containers)
	}
	if _, err := os.Stat(dir + "/lifecycle.csv"); err == nil {
		t.Error("half an experiment passes for a whole one")
	}
}

// trigger is written to, and pulled by a word.
type trigger struct {
	bytes.Buffer
	word   string
	pull   func()
	pulled bool
}

func (w *trigger) Write(p []byte) (int, error) {
	if !w.pulled && bytes.Contains(p, []byte(w.word)) {
		w.pulled = true
		w.pull()
	}
	return w.Buffer.Write(p)
}

func TestLoadEndsWithItsExperiment(t *testing.T) {
	load, err := main.StartLoad(2)
	if err != nil {
		t.Fatal(err)
	}
	pids := []int{}
	for _, cmd := range load {
		pids = append(pids, cmd.Process.Pid)
	}
	load.Stop()
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err == nil {
			t.Errorf("process %d runs on", pid)
		}
	}
}

func TestMemoryWatchSeesAPeakThatIsOver(t *testing.T) {
	// A process that takes 64 MiB and gives them back, when told, and tells when it has.
	cmd := exec.Command("perl", "-e", `$| = 1; print "a\n"; <STDIN>; { my $x = "x" x (64 << 20); } print "b\n"; <STDIN>`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("this host has no perl: %v", err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	turn := make([]byte, 2)
	if _, err := out.Read(turn); err != nil {
		t.Fatal(err)
	}
	before, peak, err := main.WatchRSS(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(turn); err != nil {
		t.Fatal(err)
	}
	if grown := peak() - before; grown < 60<<10 || grown > 140<<10 {
		t.Errorf("it saw a growth of %.0f KiB of about 65536", grown)
	}
}
