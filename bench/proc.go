package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// procKiB reads a line like "VmRSS:   1234 kB" of a file of /proc.
func procKiB(path, name string) (float64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
		}
	}
	return 0, fmt.Errorf("%s has no line %s", path, name)
}

// rss is the resident memory of a process.
func rss(pid int) (float64, error) { return procKiB(fmt.Sprintf("/proc/%d/status", pid), "VmRSS") }

// anon is the part of it that lies in no file.
func anon(pid int) (float64, error) {
	return procKiB(fmt.Sprintf("/proc/%d/status", pid), "RssAnon")
}

// descriptors is how many a process has open.
func descriptors(pid int) (float64, error) {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return float64(len(list)), err
}

// shimPSS is the memory of a container's shim, the parent of its first process,
// with what it shares divided among those who share it.
func shimPSS(pid int) (float64, error) {
	parent, err := procKiB(fmt.Sprintf("/proc/%d/status", pid), "PPid")
	if err != nil {
		return 0, err
	}
	return procKiB(fmt.Sprintf("/proc/%d/smaps_rollup", int(parent)), "Pss")
}

// memAvailable is what the host could still give.
func memAvailable() (float64, error) { return procKiB("/proc/meminfo", "MemAvailable") }

// memcg is what the kernel counts against the memory limit of a process.
func memcg(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		file := ""
		switch {
		case parts[1] == "memory":
			file = filepath.Join("/sys/fs/cgroup/memory", parts[2], "memory.usage_in_bytes")
		case parts[0] == "0":
			file = filepath.Join("/sys/fs/cgroup", parts[2], "memory.current")
		}
		if text, err := os.ReadFile(file); file != "" && err == nil {
			bytes, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
			return bytes / 1024, err
		}
	}
	return 0, fmt.Errorf("process %d has no memory cgroup that can be read", pid)
}

// sampleEvery is how often the memory of a process is looked at.
const sampleEvery = 20 * time.Millisecond

// watchRSS looks at the memory of a process until peak is called, which returns
// the highest, in KiB. The kernel's own record is used besides, where it can be
// begun anew: it misses nothing.
func watchRSS(pid int) (before float64, peak func() float64, err error) {
	reset := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0) == nil
	if before, err = rss(pid); err != nil {
		return 0, nil, err
	}
	stop, highest := make(chan struct{}), make(chan float64)
	go func() {
		seen, look := before, time.NewTicker(sampleEvery)
		defer look.Stop()
		for {
			select {
			case <-look.C:
				if now, err := rss(pid); err == nil {
					seen = max(seen, now)
				}
			case <-stop:
				if mark, err := procKiB(fmt.Sprintf("/proc/%d/status", pid), "VmHWM"); err == nil && reset {
					seen = max(seen, mark)
				}
				highest <- seen
				return
			}
		}
	}()
	return before, func() float64 { close(stop); return <-highest }, nil
}
