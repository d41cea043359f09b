//go:build steps

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// This file is only in builds with -tags steps, with which tests stop the real
// daemon at any step of create and destroy.
//
// A point is "before-STEP" for each of sandbox.Steps, and "before-write-STATE"
// and "after-write-STATE" for each write of a sandbox's record; after a step is
// before the next step or write. What happens at a point is said by files in
// <data_dir>/steps, looked for whenever one is reached:
//
//	kill-POINT   the process kills itself with SIGKILL
//	fail-POINT   the step or write fails, once: the file is taken away
//	wait-POINT   it goes on when the file is gone; meanwhile at-POINT holds the
//	             sandbox's ID
//
// And keep-runtimes holds what a start found out of the runtimes, for the next
// one: to try them takes several containers, each time.

// hooked is c with the hook in it.
func hooked(dataDir string, c sandbox.Config) sandbox.Config {
	h := stepHook(filepath.Join(dataDir, "steps"))
	c.Step = func(id boxed.ID, step string) error { return h.reach("before-"+step, id) }
	c.Records = hookedRecords{c.Records, h}
	return c
}

// stepHook is the directory of what is to happen.
type stepHook string

func (h stepHook) reach(point string, id boxed.ID) error {
	file := func(what string) string { return filepath.Join(string(h), what+"-"+point) }
	if exists(file("kill")) {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // it has been sent and nothing more may happen
	}
	if os.Remove(file("fail")) == nil {
		return errors.New("a test wants this to fail")
	}
	if exists(file("wait")) {
		if err := os.WriteFile(file("at"), []byte(id), 0o600); err != nil {
			return err
		}
		for exists(file("wait")) {
			time.Sleep(5 * time.Millisecond)
		}
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// hookedRecords reaches a point before and after each write.
type hookedRecords struct {
	sandbox.Records
	hook stepHook
}

func (r hookedRecords) Put(key string, rec sandbox.Record) error {
	point := "write-" + string(rec.Sandbox.State)
	if rec.ContainerID != "" && rec.Sandbox.State == boxed.StateStarting {
		point += "-container"
	}
	if err := r.hook.reach("before-"+point, boxed.ID(key)); err != nil {
		return err
	}
	if err := r.Records.Put(key, rec); err != nil {
		return err
	}
	return r.hook.reach("after-"+point, boxed.ID(key))
}

// hookedDriver is d, which tries no runtimes if an earlier life has.
func hookedDriver(dataDir string, d sandbox.Driver) sandbox.Driver {
	return driverHook{d, filepath.Join(dataDir, "steps", "keep-runtimes")}
}

type driverHook struct {
	sandbox.Driver
	path string
}

func (d driverHook) Info(ctx context.Context) (info sandbox.Info, err error) {
	kept, readErr := os.ReadFile(d.path)
	if readErr != nil {
		return d.Driver.Info(ctx)
	}
	if json.Unmarshal(kept, &info) == nil {
		_, err := d.Driver.List(ctx) // whether the engine answers is asked all the same
		return info, err
	}
	if info, err = d.Driver.Info(ctx); err != nil {
		return info, err
	}
	raw, err := json.Marshal(info)
	if err != nil {
		return info, err
	}
	return info, os.WriteFile(d.path, raw, 0o600)
}
