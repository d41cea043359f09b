package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// int80 enters the kernel as a 32-bit program would.
func int80(nr, a, b, c uint32) int32

func init() {
	numbers["modify_ldt"] = unix.SYS_MODIFY_LDT
	numbers["iopl"] = unix.SYS_IOPL
	numbers["ioperm"] = unix.SYS_IOPERM
	numbers["uselib"] = unix.SYS_USELIB
}

// foreignCalls give an errno, or 0.
var foreignCalls = map[string]func() int32{
	"int80_getpid": func() int32 { return errno32(int80(20, 0, 0, 0)) },
	"int80_socket": func() int32 { return errno32(int80(359, 40, 1, 0)) },
	"x32_getpid":   func() int32 { return x32(unix.SYS_GETPID, 0, 0) },
	"x32_socket":   func() int32 { return x32(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM) },
}

func x32(nr, a, b uintptr) int32 {
	_, _, errno := syscall.RawSyscall(0x40000000|nr, a, b, 0)
	return int32(errno)
}

func errno32(r int32) int32 { return max(0, -r) }
