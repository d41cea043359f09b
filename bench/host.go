package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// host is where and how an experiment was done: <experiment>.env.json.
type host struct {
	Experiment    string    `json:"experiment"`
	Date          time.Time `json:"date"`
	Seconds       float64   `json:"seconds"` // that it took
	Condition     string    `json:"condition"`
	LoadProcesses int       `json:"load_processes"`
	Quick         bool      `json:"quick"`
	Revision      string    `json:"git_revision"`
	Kernel        string    `json:"kernel"`
	CPU           string    `json:"cpu"`
	Cores         int       `json:"cores"`
	MemoryMiB     int64     `json:"memory_mib"`
	Docker        string    `json:"docker"`
	Containerd    string    `json:"containerd"`
	Runc          string    `json:"runc"`
	Runtime       string    `json:"runtime"`
	Storage       string    `json:"storage_driver"`
	Cgroup        string    `json:"cgroup_version"`
	CgroupDriver  string    `json:"cgroup_driver"`
	Go            string    `json:"go"`
	Image         string    `json:"image"`
	ImageID       string    `json:"image_id"`
	Network       string    `json:"docker_stock_network"`
	LoadBefore    float64   `json:"load_average_before"`
	LoadAfter     float64   `json:"load_average_after"`
	Trials        int       `json:"trials"`
	Failed        int       `json:"failed_trials"`
	Failures      []string  `json:"failures,omitempty"` // the first of them
}

func describeHost(ctx context.Context, r *rig) (*host, error) {
	info, err := r.engine.Info(ctx)
	if err != nil {
		return nil, err
	}
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return nil, err
	}
	memory, err := procKiB("/proc/meminfo", "MemTotal")
	if err != nil {
		return nil, err
	}
	h := &host{
		Date: time.Now().UTC().Truncate(time.Second), Quick: r.options.quick, Revision: revision(ctx, r.root),
		Kernel: strings.TrimSpace(string(kernel)), CPU: cpuModel(), Cores: runtime.NumCPU(), MemoryMiB: int64(memory) / 1024,
		Docker: info.ServerVersion, Containerd: info.ContainerdCommit.ID, Runc: info.RuncCommit.ID, Runtime: info.DefaultRuntime,
		Storage: info.Driver, Cgroup: info.CgroupVersion, CgroupDriver: info.CgroupDriver, Go: runtime.Version(),
		Image: r.options.image, ImageID: r.imageID, Network: r.network,
	}
	h.LoadBefore, err = loadAverage()
	return h, err
}

// disturbed: others used the machine when a quiet one was wanted.
func (h *host) disturbed() bool { return h.LoadProcesses == 0 && h.LoadBefore > float64(h.Cores)/2 }

// finish adds what is known at the end.
func (h *host) finish(s *sheet) {
	h.Seconds = float64(time.Since(h.Date).Round(time.Second)) / 1e9
	h.LoadAfter, _ = loadAverage()
	h.Trials, h.Failed, h.Failures = len(s.trials), s.failed(), s.faults
}

// revision names the commit, and whether more than that was measured.
func revision(ctx context.Context, root string) string {
	git := func(args ...string) string {
		out, err := exec.CommandContext(ctx, "git", append([]string{"-c", "safe.directory=" + root, "-C", root}, args...)...).Output()
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	commit := git("rev-parse", "--short=12", "HEAD")
	if commit == "" {
		return "unknown"
	}
	// The results themselves, and what is made from them, are not what was measured.
	if git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs") != "" {
		commit += "-dirty"
	}
	return commit
}

func cpuModel() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// loadAverage is that of the last minute.
func loadAverage() (float64, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), " ")
	return strconv.ParseFloat(first, 64)
}

// load is processes that only compute.
type load []*exec.Cmd

func startLoad(processes int) (load, error) {
	var l load
	for range processes {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			l.stop()
			return nil, fmt.Errorf("start a load: %w", err)
		}
		l = append(l, cmd)
	}
	return l, nil
}

func (l load) stop() {
	for _, cmd := range l {
		cmd.Process.Kill()
		cmd.Wait()
	}
}
