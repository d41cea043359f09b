package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// calls makes the system calls of some numbers with no arguments, each in a
// process of its own, by one of the ways into the kernel, and prints what came
// of each. "12-20" are several.
func calls(args []string) {
	enter, ok := entries[args[0]]
	if !ok {
		fmt.Println("no such entry here")
		return
	}
	for _, arg := range args[1:] {
		first, last, _ := strings.Cut(arg, "-")
		from, err := strconv.Atoi(first)
		to := from
		if err == nil && last != "" {
			to, err = strconv.Atoi(last)
		}
		if err != nil {
			fmt.Println(err)
			return
		}
		for nr := from; nr <= to; nr++ {
			fmt.Println(nr, inChild(foreign{entry: enter, nr: uintptr(nr)}))
		}
	}
}

// entries are the ways into the kernel by name.
var entries = map[string]int{"native": native, "int80": int80Entry, "x32": x32Entry}

// sockets asks for a socket of every family and type and of some protocols, and
// prints what came of each.
func sockets([]string) {
	var out strings.Builder
	for family := range 46 {
		for typ := range 11 {
			for _, protocol := range []int{0, 1, 2, 6, 9, 15, 16, 17, 33, 58, 115, 132, 136, 255, 256, 262} {
				fd, _, errno := syscall.RawSyscall(unix.SYS_SOCKET, uintptr(family), uintptr(typ)|unix.SOCK_CLOEXEC, uintptr(protocol))
				if errno == 0 {
					unix.Close(int(fd))
				}
				fmt.Fprintln(&out, family, typ, protocol, text(errno))
			}
		}
	}
	os.Stdout.WriteString(out.String())
}

// clones asks for every combination of new namespaces, by clone and by unshare,
// and prints those that it got, and how many it tried.
func clones([]string) {
	spaces := []uintptr{
		unix.CLONE_NEWNS, unix.CLONE_NEWCGROUP, unix.CLONE_NEWUTS, unix.CLONE_NEWIPC, unix.CLONE_NEWUSER, unix.CLONE_NEWPID, unix.CLONE_NEWNET,
	}
	for set := 1; set < 1<<len(spaces); set++ {
		var flags uintptr
		for i, space := range spaces {
			if set>>i&1 != 0 {
				flags |= space
			}
		}
		if got := clone(flags); got != "EPERM" {
			fmt.Printf("clone %#x: %s\n", flags, got)
		}
		if got := inChild(foreign{nr: unix.SYS_UNSHARE, a: flags}); got != "EPERM" {
			fmt.Printf("unshare %#x: %s\n", flags, got)
		}
	}
	if got := inChild(foreign{nr: unix.SYS_UNSHARE, a: unix.CLONE_NEWTIME}); got != "EPERM" { // clone has no flag for it
		fmt.Println("unshare time:", got)
	}
	fmt.Println("tried", 1<<len(spaces)-1)
}

// suid says as whom a program with the set-uid bit runs.
func suid([]string) {
	fmt.Println(os.Getuid(), os.Geteuid(), os.Getgid(), os.Getegid(), errText(unix.Kill(1, 0)))
}
