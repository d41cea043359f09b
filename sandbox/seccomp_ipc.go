package sandbox

// Socket families, types and protocols as the kernel numbers them.
const (
	afUnix    = 1
	afInet    = 2
	afInet6   = 10
	afNetlink = 16

	sockStream = 1
	sockDgram  = 2
	sockMask   = 0xf // the rest of a type are flags

	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
	protoMPTCP  = 262

	netlinkRoute = 0

	solSocket  = 1
	soSndbuf   = 7
	soRcvbuf   = 8
	soRcvlowat = 18
)

// low32 is the mask of a condition that looks at an int, as the kernel does.
const low32 = 0xffffffff

// ipcCalls connect processes.
func ipcCalls() []group {
	return []group{
		{
			Name: "sockets",
			Reason: "Unix sockets, TCP, UDP and ping on loopback, and what libc asks of NETLINK_ROUTE. Everything else is " +
				"surface: AF_VSOCK knows no network namespace, AF_ALG and AF_PACKET have had holes, and a socket of a rare " +
				"protocol (SCTP, DCCP, L2TP, TIPC) loads its module",
			Names: []string{"socket"},
			Match: socketMatches(),
		},
		{
			Name:   "socket pairs",
			Reason: "only Unix sockets come in pairs; another family would load its module first",
			Names:  []string{"socketpair"},
			Match:  equals(0, afUnix),
		},
		{
			Name:   "using sockets",
			Reason: "whatever the socket is, making it was the question",
			Names: []string{
				"bind", "connect", "listen", "accept", "accept4", "getsockname", "getpeername", "getsockopt",
				"shutdown", "sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg",
			},
		},
		{
			Name: "socket options",
			Reason: "all but those that size buffers: what waits in a connection that nobody has accepted is charged to nobody, " +
				"so its size must stay the sysctls'",
			Names: []string{"setsockopt"},
			Match: optionMatches(),
		},
		{
			Name:   "futexes",
			Reason: "every lock of every runtime",
			Names:  []string{"futex", "futex_waitv", "futex_wake", "futex_wait", "futex_requeue"},
		},
		{
			Name:   "shared memory, semaphores, queues",
			Reason: "python's multiprocessing and databases; the IPC namespace is private and the memory is charged",
			Names: []string{
				"shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv",
				"msgctl", "mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr",
			},
		},
	}
}

// socketMatches are the sockets that may be made. All compare for equality, so
// that a number with garbage above its lower 32 bits is refused.
func socketMatches() [][]arg {
	out := [][]arg{
		{{Index: 0, Value: afUnix, Op: opEqual}},
		{{Index: 0, Value: afNetlink, Op: opEqual}, {Index: 2, Value: netlinkRoute, Op: opEqual}},
	}
	for _, s := range []struct{ family, typ, proto uint64 }{
		{afInet, sockStream, 0},
		{afInet, sockStream, protoTCP},
		{afInet, sockDgram, 0},
		{afInet, sockDgram, protoUDP},
		{afInet, sockDgram, protoICMP},
		{afInet6, sockStream, 0},
		{afInet6, sockStream, protoTCP},
		{afInet6, sockDgram, 0},
		{afInet6, sockDgram, protoUDP},
		{afInet6, sockDgram, protoICMPv6},
	} {
		out = append(out, []arg{
			{Index: 0, Value: s.family, Op: opEqual},
			{Index: 1, Value: sockMask, ValueTwo: s.typ, Op: opMasked},
			{Index: 2, Value: s.proto, Op: opEqual},
		})
	}
	return out
}

// optionMatches are the socket options that may be set: those of another level,
// and of level SOL_SOCKET all but three.
func optionMatches() [][]arg {
	out := except32(1, solSocket)
	for _, match := range except32(2, soSndbuf, soRcvbuf, soRcvlowat) {
		out = append(out, append([]arg{{Index: 1, Value: low32, ValueTwo: solSocket, Op: opMasked}}, match...))
	}
	return out
}

// option is one option of level SOL_SOCKET.
func option(name uint64) []arg {
	return []arg{{Index: 1, Value: low32, ValueTwo: solSocket, Op: opMasked}, {Index: 2, Value: low32, ValueTwo: name, Op: opMasked}}
}

// answerGroups are calls that are not made but answered, other than by EPERM.
func answerGroups() []group {
	groups := append(absentGroups(), socketAnswers()...)
	for i := range groups {
		groups[i].Action = actErrno
	}
	return append(groups, group{
		Name: "sync",
		Reason: "answered with success and not done: whatever a sandbox can write is memory, and flushing the host's disks " +
			"in a loop is felt by everybody on it",
		Action: actErrno, Errno: 0, Names: []string{"sync"},
	})
}

// absentGroups answer ENOSYS, as a kernel that was built without them: programs
// that know these calls know how to do without.
func absentGroups() []group {
	groups := []group{
		{
			Name:   "clone3",
			Reason: "its flags lie in memory, where no filter can read them; libc falls back to clone",
			Names:  []string{"clone3"},
		},
		{
			Name:   "io_uring",
			Reason: "its operations pass no filter at all, and it is the kernel's richest source of holes of late",
			Names:  []string{"io_uring_setup", "io_uring_enter", "io_uring_register"},
		},
		{
			Name:   "old asynchronous input and output",
			Reason: "fs.aio-max-nr is one number for the whole host: one sandbox could take all of it",
			Names:  []string{"io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents"},
		},
		{
			Name:   "hidden memory",
			Reason: "memfd_secret takes pages out of the kernel's own map, and stops the host from hibernating",
			Names:  []string{"memfd_secret"},
		},
		{
			Name:   "userfaultfd",
			Reason: "holds the kernel inside a page fault for as long as an exploit needs",
			Names:  []string{"userfaultfd"},
		},
		{
			Name:   "programs and counters in the kernel",
			Reason: "bpf and perf are surface, and perf sees what other sandboxes do",
			Names:  []string{"bpf", "perf_event_open"},
		},
		{
			Name:   "keyrings",
			Reason: "a keyring belongs to a uid and not to a namespace",
			Names:  []string{"add_key", "request_key", "keyctl"},
		},
		{
			Name:   "memory policy",
			Reason: "which node of memory is used is the host's business; numactl and libnuma do without",
			Names: []string{
				"mbind", "set_mempolicy", "get_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages",
			},
		},
		{
			Name:   "segments",
			Reason: "local descriptor tables serve 16-bit programs, and have had holes",
			Legacy: []string{"modify_ldt"},
		},
		{
			Name:   "descriptors of others",
			Reason: "taking another process's descriptors, comparing them, or opening by handle reaches around paths",
			Names:  []string{"pidfd_getfd", "kcmp", "name_to_handle_at", "open_by_handle_at"},
		},
	}
	for i := range groups {
		groups[i].Errno = errnoENOSYS
	}
	return groups
}

// socketAnswers are those of a kernel that lacks the option, family or protocol.
func socketAnswers() []group {
	families := [][]arg{{{Index: 0, Value: afNetlink, Op: opAbove}}}
	for f := uint64(0); f < afNetlink; f++ {
		if f != afUnix && f != afInet && f != afInet6 {
			families = append(families, []arg{{Index: 0, Value: f, Op: opEqual}})
		}
	}
	return []group{
		{
			Name: "buffer sizes",
			Reason: "answered with success and not done: the kernel itself sets less than what is asked for without a word, " +
				"and programs that need the size read it back",
			Errno: 0, Names: []string{"setsockopt"}, Match: [][]arg{option(soSndbuf), option(soRcvbuf)},
		},
		{
			Name:   "low-water mark",
			Reason: "it raises the receive buffer as well; programs do without, as on other systems",
			Errno:  errnoENOPROTOOPT, Names: []string{"setsockopt"}, Match: [][]arg{option(soRcvlowat)},
		},
		{
			Name:   "multipath TCP",
			Reason: "Go's listeners ask for it by default, and only this errno makes them fall back to TCP",
			Errno:  errnoEPROTONOSUPPORT, Names: []string{"socket"},
			Match: [][]arg{
				{{Index: 0, Value: afInet, Op: opEqual}, {Index: 2, Value: protoMPTCP, Op: opEqual}},
				{{Index: 0, Value: afInet6, Op: opEqual}, {Index: 2, Value: protoMPTCP, Op: opEqual}},
			},
		},
		{
			Name:   "other families",
			Reason: "programs take this for a kernel without the family and go on; EPERM they report",
			Errno:  errnoEAFNOSUPPORT, Names: []string{"socket"}, Match: families,
		},
		{
			Name:   "other netlink protocols",
			Reason: "as above: libaudit, for one, takes this for a kernel without audit",
			Errno:  errnoEPROTONOSUPPORT, Names: []string{"socket"},
			Match: [][]arg{{
				{Index: 0, Value: afNetlink, Op: opEqual},
				{Index: 2, Value: netlinkRoute, Op: opAbove},
			}},
		},
	}
}
