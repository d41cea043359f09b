package sandbox

// What the flags of clone may not hold: any of CLONE_NEWNS, NEWCGROUP, NEWUTS,
// NEWIPC, NEWUSER, NEWPID, NEWNET.
const cloneNewMask = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

// Terminal requests that reach beyond the terminal.
const (
	tiocsti   = 0x5412 // types into the terminal, as if by its user
	tioclinux = 0x541c // the same by way of the console's selection
	tiocsetd  = 0x5423 // loads a line discipline, a kernel module with a history of holes
)

// allowGroups are the calls that a sandbox may make.
func allowGroups() []group {
	groups := append(append(fileCalls(), processCalls()...), ipcCalls()...)
	for i := range groups {
		groups[i].Action = actAllow
	}
	return groups
}

// fileCalls work on files and descriptors.
func fileCalls() []group {
	return []group{
		{
			Name:   "files",
			Reason: "naming, opening and changing files: the mounts and the user's rights decide, not the filter",
			Names: []string{
				"openat", "openat2", "close", "close_range", "faccessat", "faccessat2", "newfstatat", "fstat", "statx",
				"statfs", "fstatfs", "mkdirat", "unlinkat", "renameat", "renameat2", "linkat", "symlinkat", "readlinkat",
				"fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "utimensat", "truncate", "ftruncate", "fallocate",
				"getdents64", "getcwd", "chdir", "fchdir", "umask", "flock", "fcntl",
				"mknodat", // FIFOs and sockets; device nodes need a capability that nobody here has
			},
			Legacy: []string{
				"open", "creat", "access", "stat", "lstat", "mkdir", "rmdir", "unlink", "rename", "link", "symlink",
				"readlink", "chmod", "chown", "lchown", "utime", "utimes", "futimesat", "getdents", "mknod",
			},
		},
		{
			Name:   "extended attributes",
			Reason: "tar, rsync and git carry them; tmpfs limits which there are",
			Names: []string{
				"setxattr", "lsetxattr", "fsetxattr", "setxattrat", "getxattr", "lgetxattr", "fgetxattr", "getxattrat",
				"listxattr", "llistxattr", "flistxattr", "listxattrat", "removexattr", "lremovexattr", "fremovexattr",
				"removexattrat", "file_getattr", "file_setattr",
			},
		},
		{
			Name:   "input and output",
			Reason: "reading, writing and moving bytes between descriptors; the agent relays output with splice and tee",
			Names: []string{
				"read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2",
				"lseek", "sendfile", "splice", "tee", "vmsplice", "copy_file_range", "fsync", "fdatasync",
				"sync_file_range", "syncfs", "readahead", "fadvise64", "dup", "dup3", "pipe2",
			},
			Legacy: []string{"dup2", "pipe"},
		},
		{
			Name:   "waiting for descriptors",
			Reason: "every event loop; each kind is bounded per user, and a sandbox has its own",
			Names: []string{
				"ppoll", "pselect6", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "eventfd2", "signalfd4",
				"timerfd_create", "timerfd_settime", "timerfd_gettime", "inotify_init1", "inotify_add_watch", "inotify_rm_watch",
			},
			Legacy: []string{"poll", "select", "epoll_create", "epoll_wait", "eventfd", "signalfd", "inotify_init"},
		},
		{
			Name:   "ioctl",
			Reason: "terminals, sockets and files need it; refused are the requests that type into a terminal or load a line discipline",
			Names:  []string{"ioctl"},
			Match:  except32(1, tiocsti, tioclinux, tiocsetd),
		},
		{
			Name:   "memory",
			Reason: "mapping and advising one's own memory; the memory limit and memlock bound it",
			Names: []string{
				"brk", "mmap", "munmap", "mprotect", "mremap", "msync", "mincore", "madvise", "process_madvise",
				"process_mrelease", "mlock", "mlock2", "munlock", "mlockall", "munlockall", "memfd_create", "mseal",
				"pkey_alloc", "pkey_free", "pkey_mprotect", "membarrier", "remap_file_pages", "cachestat", "map_shadow_stack",
			},
		},
	}
}

// processCalls start, end, describe and limit processes.
func processCalls() []group {
	return []group{
		{
			Name:   "processes",
			Reason: "starting, ending and waiting for programs; the process limit bounds them",
			Names: []string{
				"execve", "execveat", "exit", "exit_group", "wait4", "waitid", "set_tid_address", "set_robust_list",
				"get_robust_list", "rseq", "restart_syscall", "getpid", "getppid", "gettid", "getpgid", "setpgid", "getsid",
				"setsid", "pidfd_open", "prctl",
			},
			Legacy: []string{"fork", "vfork", "getpgrp", "arch_prctl"},
		},
		{
			Name:   "clone",
			Reason: "threads and processes, but no new namespace: each is kernel surface that needs no other right",
			Names:  []string{"clone"},
			Match:  [][]arg{{{Index: 0, Value: cloneNewMask, ValueTwo: 0, Op: opMasked}}},
		},
		{
			Name: "signals",
			Reason: "between one's own processes, for debuggers and runtimes; the agent has another uid, so the kernel " +
				"refuses those meant for it",
			Names: []string{
				"kill", "tkill", "tgkill", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "rt_sigaction",
				"rt_sigprocmask", "rt_sigpending", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "sigaltstack",
			},
			Legacy: []string{"pause", "alarm"},
		},
		{
			Name: "users",
			Reason: "the agent becomes the sandbox's user with them; that user has no capability and gains none, so for it " +
				"they change nothing",
			Names: []string{
				"getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "setuid", "setgid",
				"setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid", "capget", "capset",
			},
		},
		{
			Name: "limits and scheduling",
			Reason: "the agent marks each exec by a limit of its own and reads those of others; the kernel lets the user " +
				"change only the user's own processes, and the agent is not one",
			Names: []string{
				"prlimit64", "getrlimit", "setrlimit", "getrusage", "getpriority", "setpriority", "ioprio_get", "ioprio_set",
				"sched_yield", "sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_setparam",
				"sched_getscheduler", "sched_setscheduler", "sched_getattr", "sched_setattr", "sched_get_priority_max",
				"sched_get_priority_min", "sched_rr_get_interval", "getcpu",
			},
		},
		{
			Name:   "time",
			Reason: "reading clocks, sleeping and timers; nothing here sets a clock",
			Names: []string{
				"clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "times", "getitimer",
				"setitimer", "timer_create", "timer_settime", "timer_gettime", "timer_getoverrun", "timer_delete",
			},
			Legacy: []string{"time"},
		},
		{
			Name:   "facts of the system",
			Reason: "read-only, and needed by libc, runtimes and package managers",
			Names:  []string{"uname", "sysinfo", "getrandom"},
		},
		{
			Name:   "own filters",
			Reason: "a program may confine itself further",
			Names:  []string{"seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"},
		},
		{
			Name: "debuggers",
			Reason: "gdb and strace on one's own children; since Linux 4.8 a traced call passes the filter again, and the " +
				"kernel refuses to trace another user's process",
			Names: []string{"ptrace", "process_vm_readv", "process_vm_writev"},
		},
		{
			Name: "personality",
			Reason: "the default, 32-bit names, asking, and fixed addresses for debuggers (its own children only: " +
				"a set-uid program would clear it); not READ_IMPLIES_EXEC",
			Names: []string{"personality"},
			Match: equals(0, 0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xffffffff),
		},
	}
}

// equals gives one alternative for each value of an argument.
func equals(index uint, values ...uint64) [][]arg {
	var out [][]arg
	for _, v := range values {
		out = append(out, []arg{{Index: index, Value: v, Op: opEqual}})
	}
	return out
}
