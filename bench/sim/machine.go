package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// run is where and when a part was made.
type run struct {
	Date      time.Time `json:"date"`
	Seconds   float64   `json:"seconds"`
	Quick     bool      `json:"quick"`
	Revision  string    `json:"git_revision"`
	CPU       string    `json:"cpu"`
	Cores     int       `json:"cores"`
	MemoryMiB int64     `json:"memory_mib"`
	Kernel    string    `json:"kernel"`
	Go        string    `json:"go"`
	Load      float64   `json:"load_average_before"`
}

func describe(quick bool) run {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease") // empty where there is none
	return run{
		Date: time.Now().UTC().Truncate(time.Second), Quick: quick, Revision: revision(), CPU: field("/proc/cpuinfo", "model name"),
		Cores: runtime.NumCPU(), MemoryMiB: kib("/proc/meminfo", "MemTotal") / 1024, Kernel: strings.TrimSpace(string(kernel)),
		Go: runtime.Version(), Load: loadAverage(),
	}
}

// repository is the root of the module.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		text, err := os.ReadFile(filepath.Join(at, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module github.com/boxed-mesh/boxed\n") {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("%s is not in a clone of boxed: run this from one", dir)
		}
	}
}

// revision names the commit, and whether more than that was run.
func revision() string {
	root, err := repository()
	if err != nil {
		return "unknown"
	}
	git := func(args ...string) string {
		out, err := exec.Command("git", append([]string{"-c", "safe.directory=" + root, "-C", root}, args...)...).Output()
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	commit := git("rev-parse", "--short=12", "HEAD")
	if commit == "" {
		return "unknown"
	}
	if git("status", "--porcelain", "--", "scheduler", "transport", "store", "bench/sim", ":!bench/sim/machine.json") != "" {
		commit += "-dirty"
	}
	return commit
}

// field is the value behind the first line of a file that begins with name.
func field(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func kib(path, name string) int64 {
	n, err := strconv.ParseInt(strings.TrimSuffix(field(path, name), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// loadAverage is that of the last minute; 0 where it cannot be read.
func loadAverage() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}
