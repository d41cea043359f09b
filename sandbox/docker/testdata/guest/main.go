// Command guest stands in for the agent in the driver's tests: PID 1 of a
// sandbox, which dials the host and runs what it is told, as any user. It is
// also what it runs: "self call NAME" makes one system call and prints what
// came of it. In an image that has the file /hostile it breaks the agent's
// protocol in the way that the file says.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// sock is the socket in sandbox.GuestDir; self is sandbox.GuestAgent.
const (
	sock = "/run/boxed/agent.sock"
	self = "/.boxed-agent"
)

// command is one line from the host.
type command struct {
	UID  int      `json:"uid"`
	Argv []string `json:"argv"` // "self" first is this program
	Env  []string `json:"env"`
	Exit int      `json:"exit"` // when Argv is empty: end with it
	Back bool     `json:"back"` // run it in the background, and say nothing
}

// result is one line to the host.
type result struct {
	Out    string `json:"out"`
	Err    string `json:"err"`
	Code   int    `json:"code"`
	Signal string `json:"signal"`
}

func main() {
	if len(os.Args) > 1 {
		probe(os.Args[1], os.Args[2:])
		return
	}
	if how, err := os.ReadFile("/hostile"); err == nil {
		hostile(strings.TrimSpace(string(how)))
		return
	}
	for {
		conn, err := net.Dial("unix", sock)
		if err == nil {
			serve(conn)
			conn.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func serve(conn net.Conn) {
	fmt.Fprintln(conn, `{"out":"hello"}`)
	in := bufio.NewScanner(conn)
	for in.Scan() {
		var c command
		if json.Unmarshal(in.Bytes(), &c) != nil {
			return
		}
		if len(c.Argv) == 0 {
			os.Exit(c.Exit)
		}
		if c.Back {
			go run(c)
			continue
		}
		out, _ := json.Marshal(run(c))
		if _, err := conn.Write(append(out, '\n')); err != nil {
			return
		}
	}
}

func run(c command) result {
	program := c.Argv[0]
	if program == "self" {
		program = self
	}
	cmd := exec.Command(program, c.Argv[1:]...)
	if cmd.Env = c.Env; cmd.Env == nil {
		cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/home/sandbox"}
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(c.UID), Gid: uint32(c.UID)},
		Setsid:     true,
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	r := result{Out: out.String(), Err: errs.String()}
	if cmd.ProcessState == nil {
		r.Code, r.Err = -1, err.Error()
		return r
	}
	r.Code = cmd.ProcessState.ExitCode()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		r.Signal = ws.Signal().String()
	}
	return r
}

func probe(name string, args []string) {
	runtime.LockOSThread()
	do, ok := probes[name]
	if !ok {
		fmt.Fprintln(os.Stderr, "unknown probe", name)
		os.Exit(2)
	}
	do(args)
}
