package main

import (
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How long nothing must have happened before memory is given back: a sandbox that
// waits in a pool, or for its user to think, should cost little.
const (
	trimFirst = time.Second // after the start
	trimAfter = 5 * time.Second
)

// trimmer gives memory back when nothing happens: what the heap keeps for the
// next exec, and the pages of this program that only its start needed. They come
// back from the page cache, which all sandboxes share, when they are touched.
type trimmer struct {
	forker *forker

	mu    sync.Mutex
	timer *time.Timer
	used  bool // something was run
}

// start begins the first wait.
func (t *trimmer) start() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = time.AfterFunc(trimFirst, t.trim)
}

// busy puts the next trim off.
func (t *trimmer) busy() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer.Reset(trimAfter)
	t.used = true
}

// trim collects garbage, which stops the world, and that waits for a thread that
// forks: never while a program starts, which user code can delay.
func (t *trimmer) trim() {
	if !t.forker.mu.TryLock() {
		t.busy()
		return
	}
	defer t.forker.mu.Unlock()
	t.mu.Lock()
	used := t.used
	t.mu.Unlock()
	if used { // else there is no garbage, and to look for it would take memory
		debug.FreeOSMemory()
	}
	dropProgram()
}

// dropProgram unmaps the pages of this program that cannot have been written to.
func dropProgram() {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range bytes.Lines(maps) {
		// "400000-7a1000 r-xp 00000000 08:01 123 /.boxed-agent"
		fields := bytes.Fields(line)
		if len(fields) < 6 || fields[1][1] == 'w' || fields[5][0] != '/' {
			continue
		}
		from, to, _ := bytes.Cut(fields[0], []byte("-"))
		start, err := strconv.ParseUint(string(from), 16, 64)
		end, err2 := strconv.ParseUint(string(to), 16, 64)
		if err == nil && err2 == nil {
			unix.RawSyscall(unix.SYS_MADVISE, uintptr(start), uintptr(end-start), unix.MADV_DONTNEED)
		}
	}
}
