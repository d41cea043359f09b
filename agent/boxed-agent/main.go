// Command boxed-agent is PID 1 of every sandbox. It dials boxed-node over the
// Unix socket that is mounted at /run/boxed, runs programs as the sandbox's own
// user, streams them, owns their whole trees, and moves files.
//
// It runs as uid 0 of the sandbox with SETUID, SETGID and KILL only, so that
// user code cannot signal, trace, limit or re-schedule it; with the same uid,
// one prlimit call of user code ends it. It must stay small and must survive a
// fork storm: all threads are made before anything runs, one wait4 loop reaps
// everything, and it opens regular files only. Start reading at run.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// version is set by the linker.
var version = "dev"

const socket = "/run/boxed/agent.sock"

func main() {
	if len(os.Args) > 1 && os.Args[1] == "--version" {
		fmt.Println("boxed-agent", version)
		return
	}
	if os.Getpid() != 1 || os.Getuid() != 0 || os.Getgid() != 0 {
		fmt.Fprintln(os.Stderr, "boxed-agent runs as the first process of a sandbox, as root of it; boxed-node starts it")
		os.Exit(2)
	}
	// The main thread does nothing, so that it never becomes one that acts for the
	// user: what the kernel shows of a process is its main thread's.
	runtime.LockOSThread()
	ended := make(chan error)
	go func() { ended <- run() }()
	if err := <-ended; err != nil {
		fmt.Fprintln(os.Stderr, "boxed-agent:", err)
		os.Exit(1)
	}
}

func run() error {
	// Caught and dropped, where Go's own handlers would end this process. Not
	// ignored: programs would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU)
	debug.SetGCPercent(50)
	os.Clearenv()
	system, err := newSystem()
	if err != nil {
		return err
	}
	makeThreads(spareThreads)
	dial := func() (net.Conn, error) { return net.DialTimeout("unix", socket, 5*time.Second) }
	return agent.NewGuest(version, dial, system).Run(context.Background())
}
