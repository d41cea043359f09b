package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var probes = map[string]func(args []string){
	"call":   func(args []string) { fmt.Println(call(args[0])) },
	"env":    func([]string) { fmt.Println(strings.Join(os.Environ(), "\n")) },
	"sleep":  func([]string) { time.Sleep(time.Hour) },
	"cat":    cat,
	"ls":     ls,
	"stat":   stat,
	"write":  write,
	"fill":   fill,
	"files":  files,
	"links":  links,
	"forks":  forks,
	"eat":    eat,
	"hoard":  hoard,
	"ptrace": ptrace,
	"orphan": orphan, "attack": attack, "exhaust": exhaust, "flood": flood, "loopback": loopback,
	"calls": calls, "sockets": sockets, "clones": clones, "suid": suid,
	"listen": listen,
	"kernel": func([]string) {
		var u unix.Utsname
		err := unix.Uname(&u)
		fmt.Println(unix.ByteSliceToString(u.Release[:]), errText(err))
	},
	"host": func([]string) { name, err := os.Hostname(); fmt.Println(name, errText(err)) },
}

func errText(err error) string {
	var errno syscall.Errno
	switch {
	case err == nil:
		return ""
	case errors.As(err, &errno):
		return text(errno)
	}
	return err.Error()
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// cat prints files.
func cat(args []string) {
	for _, name := range args {
		b, err := os.ReadFile(name)
		os.Stdout.Write(b)
		if err != nil {
			fmt.Println(errText(err))
		}
	}
}

// ls counts a directory's entries.
func ls(args []string) {
	entries, err := os.ReadDir(args[0])
	fmt.Println(len(entries), errText(err))
}

// place is what stat prints.
type place struct {
	Bytes, Inodes, Mode, UID, GID   uint64
	NoSuid, NoDev, NoExec, ReadOnly bool
}

// stat describes a mounted directory as JSON.
func stat(args []string) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Statfs(args[0], &fs), unix.Stat(args[0], &st)); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(place{
		Bytes: fs.Blocks * uint64(fs.Bsize), Inodes: fs.Files, Mode: uint64(st.Mode & 0o7777), UID: uint64(st.Uid), GID: uint64(st.Gid),
		NoSuid: fs.Flags&unix.ST_NOSUID != 0, NoDev: fs.Flags&unix.ST_NODEV != 0, NoExec: fs.Flags&unix.ST_NOEXEC != 0,
		ReadOnly: fs.Flags&unix.ST_RDONLY != 0,
	})
}

// write makes a file in each directory.
func write(args []string) {
	for _, dir := range args {
		err := os.WriteFile(filepath.Join(dir, "probe"), []byte("x"), 0o600)
		fmt.Println(dir, errText(err))
	}
}

// fill writes to a file until it cannot, and says how much fitted, in bytes.
func fill(args []string) {
	f, err := os.Create(filepath.Join(args[0], "fill"))
	if err != nil {
		fmt.Println(errText(err))
		return
	}
	defer os.Remove(f.Name())
	var n int64
	for chunk := make([]byte, 64<<10); ; {
		m, err := f.Write(chunk)
		if n += int64(m); err != nil {
			fmt.Println(n, errText(err))
			return
		}
	}
}

// files makes empty files until it cannot, and says how many there are.
func files(args []string) {
	for n := 0; ; n++ {
		f, err := os.Create(filepath.Join(args[0], strconv.Itoa(n)))
		if err != nil {
			fmt.Println(n, errText(err))
			return
		}
		f.Close()
	}
}

// links lists network interfaces, and whether they are up.
func links([]string) {
	all, err := net.Interfaces()
	for _, i := range all {
		addrs, _ := i.Addrs()
		fmt.Println(i.Name, i.Flags&net.FlagUp != 0, addrs)
	}
	fmt.Print(errText(err))
}

// forks starts children until it cannot, and says how many lived.
func forks(args []string) {
	var children []int
	for {
		pid, errno := forkIdle()
		if errno == 0 {
			children = append(children, int(pid))
			continue
		}
		fmt.Println(len(children), text(errno))
		if len(args) > 0 {
			time.Sleep(time.Hour)
		}
		for _, child := range children {
			_ = unix.Kill(child, unix.SIGKILL)
			_, _ = unix.Wait4(child, nil, 0, nil)
		}
		return
	}
}

// eat takes so many bytes of memory, touches them, and sleeps if told to.
func eat(args []string) {
	b := make([]byte, number(args[0]))
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	fmt.Println("ok")
	if len(args) > 1 {
		os.Stdout.Close()
		time.Sleep(time.Hour)
	}
}

// listen binds an address and connects to another.
func listen(args []string) {
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		fmt.Println("listen", errText(err))
		return
	}
	defer l.Close()
	c, err := net.DialTimeout("tcp", args[1], time.Second)
	if err != nil {
		fmt.Println("dial", errText(err))
		return
	}
	c.Close()
	fmt.Println("ok")
}

// ptrace traces a child of its own, as a debugger does.
func ptrace([]string) {
	proc, err := os.StartProcess("/proc/self/exe", []string{self, "env"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{Ptrace: true}})
	if err != nil {
		fmt.Println("start:", errText(err))
		return
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(proc.Pid, &ws, 0, nil); err != nil || !ws.Stopped() {
		fmt.Println("wait:", errText(err), ws)
		return
	}
	var regs unix.PtraceRegs
	if err := unix.PtraceGetRegs(proc.Pid, &regs); err != nil {
		fmt.Println("registers:", errText(err))
		return
	}
	word := make([]byte, 8)
	if _, err := unix.PtracePeekData(proc.Pid, uintptr(regs.PC()), word); err != nil {
		fmt.Println("peek:", errText(err))
		return
	}
	fmt.Println("ok")
	_ = unix.Kill(proc.Pid, unix.SIGKILL)
}
