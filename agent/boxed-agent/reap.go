package main

import (
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper waits for every child, also those that were orphaned to PID 1, in one
// place: os/exec would park a thread for each running program.
type reaper struct {
	forked chan struct{}

	mu       sync.Mutex
	children map[int]*child
	forking  bool // a fork is under way: its child's end may come before its PID
	early    map[int]syscall.WaitStatus
}

// child is a started leader.
type child struct {
	pid   int
	ended chan struct{} // closed once status is set
	// status is the leader's, valid once ended is closed.
	status syscall.WaitStatus
	reaped bool // guarded by reaper.mu: its PID may be another's now
}

func newReaper() *reaper {
	r := &reaper{forked: make(chan struct{}, 1), children: map[int]*child{}, early: map[int]syscall.WaitStatus{}}
	go r.run()
	return r
}

// fork runs start, which forks, and registers the child, whose end may have
// been seen before that. One fork at a time. No lock is held over start: user
// code can delay it, and must not delay how other programs end.
func (r *reaper) fork(start func() (int, error)) (*child, error) {
	r.mu.Lock()
	r.forking = true
	r.mu.Unlock()
	pid, err := start()
	r.mu.Lock()
	defer r.mu.Unlock()
	var c *child
	if err == nil {
		c = &child{pid: pid, ended: make(chan struct{})}
		if status, ended := r.early[pid]; ended {
			c.end(status)
		} else {
			r.children[pid] = c
		}
	}
	r.forking = false
	clear(r.early)
	select {
	case r.forked <- struct{}{}:
	default:
	}
	return c, err
}

// end is called with the reaper's lock held.
func (c *child) end(status syscall.WaitStatus) {
	c.status, c.reaped = status, true
	close(c.ended)
}

// signal signals the leader unless it has been reaped.
func (r *reaper) signal(c *child, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.reaped {
		return nil
	}
	return ignoreGone(syscall.Kill(c.pid, sig))
}

func (r *reaper) run() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, unix.WALL, nil)
		switch err {
		case nil:
			r.mu.Lock()
			if c := r.children[pid]; c != nil {
				delete(r.children, pid)
				c.end(status)
			} else if r.forking {
				r.early[pid] = status
			}
			r.mu.Unlock()
		case syscall.ECHILD:
			<-r.forked // there is nothing to wait for before the next fork
		}
	}
}

func ignoreGone(err error) error {
	if err == syscall.ESRCH {
		return nil
	}
	return err
}
