package main

import (
	"bytes"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// killLimit bounds a tree kill. A bomb of 250 processes takes 0.1–1.8 s.
const killLimit = 10 * time.Second

// pids lists the sandbox's processes.
func pids() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	list := make([]int, 0, len(names))
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			list = append(list, pid)
		}
	}
	return list
}

// marked lists the living processes that carry the mark.
func marked(mark uint64) (found []int) {
	eachMark(func(pid int, m uint64) {
		if m == mark {
			found = append(found, pid)
		}
	})
	return found
}

// eachMark calls f for every living process but this one. prlimit64 on another
// user's process needs CAP_SYS_RESOURCE; its limits file is for everybody.
func eachMark(f func(pid int, mark uint64)) {
	buf := make([]byte, 4<<10)
	for _, pid := range pids() {
		if pid == 1 {
			continue
		}
		_, line, ok := bytes.Cut(readProc(pid, "limits", buf), []byte("Max resident set"))
		if !ok {
			continue
		}
		// "Max resident set   <soft>   <hard>   bytes"
		fields := bytes.Fields(line[:min(len(line), 80)])
		if len(fields) < 2 {
			continue
		}
		if mark, err := strconv.ParseUint(string(fields[1]), 10, 64); err == nil && !zombie(pid, buf) {
			f(pid, mark)
		}
	}
}

// census counts the processes of each mark, for listings: one scan serves all
// that ask within a moment.
type census struct {
	mu     sync.Mutex
	at     time.Time
	counts map[uint64]int
}

const censusFresh = 5 * time.Millisecond // one listing

// stale makes the next question scan.
func (c *census) stale() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = time.Time{}
}

func (c *census) count(mark uint64) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) > censusFresh {
		counts := map[uint64]int{}
		eachMark(func(_ int, m uint64) { counts[m]++ })
		c.counts, c.at = counts, time.Now()
	}
	return c.counts[mark]
}

// zombie reports whether all of a process has ended. One whose main thread has
// exited is shown as a zombie too, while its other threads run on.
func zombie(pid int, buf []byte) bool {
	stat := readProc(pid, "stat", buf)
	// "pid (name) S …": the name may hold anything, so the last parenthesis counts.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const state, threads = 0, 17
	return len(fields) <= threads || fields[state][0] == 'X' || (fields[state][0] == 'Z' && string(fields[threads]) == "1")
}

func readProc(pid int, name string, buf []byte) []byte {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/"+name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	n, _ := syscall.Read(fd, buf)
	return buf[:max(0, n)]
}

// signalTree signals every process of a mark.
func signalTree(mark uint64, sig syscall.Signal) error {
	for _, pid := range marked(mark) {
		if err := ignoreGone(syscall.Kill(pid, sig)); err != nil {
			return err
		}
	}
	return nil
}

// killTree stops every process of a mark until a pass finds no new one, so that
// none can fork any more, and then kills them. Killing while scanning is a race
// that a bomb can win for many seconds.
func killTree(mark uint64) error {
	deadline := time.Now().Add(killLimit)
	for {
		stopped := map[int]bool{}
		for fresh := true; fresh && time.Now().Before(deadline); {
			fresh = false
			for _, pid := range marked(mark) {
				if !stopped[pid] {
					stopped[pid], fresh = true, true
					syscall.Kill(pid, syscall.SIGSTOP)
				}
			}
		}
		if len(stopped) == 0 {
			return nil
		}
		for pid := range stopped {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		for range 50 { // dying takes a moment, more with much memory
			if len(marked(mark)) == 0 {
				return nil
			}
			time.Sleep(time.Millisecond)
		}
		if time.Now().After(deadline) {
			return &agent.Error{Code: agent.ErrInternal, Message: "processes of the exec are still dying"}
		}
	}
}
