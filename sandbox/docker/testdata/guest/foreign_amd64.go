package main

import "golang.org/x/sys/unix"

// int80 enters the kernel as a 32-bit program would.
func int80(nr, a, b, c uint32) int32

func init() {
	numbers["modify_ldt"] = unix.SYS_MODIFY_LDT
	numbers["iopl"] = unix.SYS_IOPL
	numbers["ioperm"] = unix.SYS_IOPERM
	numbers["uselib"] = unix.SYS_USELIB
}

// foreignCalls come by the ways that are not the native one.
var foreignCalls = map[string]foreign{
	"int80_getpid": {entry: int80Entry, nr: 20},
	"int80_socket": {entry: int80Entry, nr: 359, a: unix.AF_VSOCK, b: unix.SOCK_STREAM},
	"int80_clone":  {entry: int80Entry, nr: 120, a: unix.CLONE_NEWUSER},
	"int80_mount":  {entry: int80Entry, nr: 21},
	"x32_getpid":   {entry: x32Entry, nr: unix.SYS_GETPID},
	"x32_socket":   {entry: x32Entry, nr: unix.SYS_SOCKET, a: unix.AF_VSOCK, b: unix.SOCK_STREAM},
	"x32_clone":    {entry: x32Entry, nr: unix.SYS_CLONE, a: unix.CLONE_NEWUSER},
	"x32_ioctl":    {entry: x32Entry, nr: 514, b: unix.TIOCSTI},
}
