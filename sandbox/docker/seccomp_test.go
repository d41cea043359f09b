package docker_test

import (
	"runtime"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed/sandbox"
)

// Case I6: what the filter refuses, by really making the calls. The errno
// matters: programs take ENOSYS, EAFNOSUPPORT and EPROTONOSUPPORT for a kernel
// without the thing and go on.
func TestSystemCallsRefused(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	refused := map[string]string{
		// Socket families and protocols; types carry flags, and arguments may carry garbage that the kernel ignores.
		"socket:40,1,0":                    "EAFNOSUPPORT", // AF_VSOCK knows no network namespace
		"socket:0x10000000028,1,0":         "EAFNOSUPPORT",
		"socket:38,5,0":                    "EAFNOSUPPORT", // AF_ALG
		"socket:17,3,0":                    "EAFNOSUPPORT", // AF_PACKET
		"socket:30,1,0":                    "EAFNOSUPPORT", // AF_TIPC
		"socket:44,2,0":                    "EAFNOSUPPORT", // AF_XDP
		"socket:0,1,0":                     "EAFNOSUPPORT",
		"socket:9,1,0":                     "EAFNOSUPPORT",
		"socket:15,3,2":                    "EAFNOSUPPORT",    // AF_KEY
		"socket:16,3,9":                    "EPROTONOSUPPORT", // NETLINK_AUDIT
		"socket:16,3,16":                   "EPROTONOSUPPORT", // NETLINK_GENERIC
		"socket:16,3,0x100000009":          "EPROTONOSUPPORT",
		"socket:2,1,262":                   "EPROTONOSUPPORT", // MPTCP, as Go asks for it
		"socket:10,0x80801,262":            "EPROTONOSUPPORT",
		"socket:0x100000002,1,0x100000106": "EAFNOSUPPORT",
		"socket:2,1,0x100000106":           "EPERM",
		"socket:2,5,132":                   "EPERM", // SCTP
		"socket:2,6,33":                    "EPERM", // DCCP
		"socket:2,6,0":                     "EPERM",
		"socket:2,2,115":                   "EPERM", // L2TP
		"socket:2,2,136":                   "EPERM", // UDP-Lite
		"socket:2,3,1":                     "EPERM", // raw
		"socketpair:40,1,0,0":              "EPERM",
		"socketpair:30,1,0,0":              "EPERM",
		// Namespaces.
		"clone:0x20000": "EPERM", "clone:0x2000000": "EPERM", "clone:0x4000000": "EPERM", "clone:0x8000000": "EPERM",
		"clone:0x10000000": "EPERM", "clone:0x20000000": "EPERM", "clone:0x40000000": "EPERM",
		"clone:0x10020000": "EPERM", "clone3": "ENOSYS", "unshare:0": "EPERM", "unshare:0x10000000": "EPERM", "setns:0,0": "EPERM",
		// Mounts, the old and the new interface.
		"mount": "EPERM", "umount2": "EPERM", "pivot_root": "EPERM", "chroot": "EPERM", "open_tree": "EPERM",
		"move_mount": "EPERM", "fsopen": "EPERM", "fsconfig": "EPERM", "fsmount": "EPERM", "fspick": "EPERM", "mount_setattr": "EPERM",
		// Optional parts of the kernel.
		"io_uring_setup:8,0": "ENOSYS", "io_uring_enter": "ENOSYS", "io_uring_register": "ENOSYS", "io_setup:8,0": "ENOSYS",
		"memfd_secret": "ENOSYS", "userfaultfd": "ENOSYS", "bpf": "ENOSYS", "perf_event_open": "ENOSYS", "keyctl:0": "ENOSYS",
		"add_key": "ENOSYS", "request_key": "ENOSYS", "kcmp": "ENOSYS", "pidfd_getfd": "ENOSYS", "name_to_handle_at": "ENOSYS",
		"open_by_handle_at": "ENOSYS", "mbind": "ENOSYS", "move_pages": "ENOSYS", "migrate_pages": "ENOSYS",
		"unknown_new": "ENOSYS",
		// The machine.
		"init_module": "EPERM", "finit_module": "EPERM", "delete_module": "EPERM", "kexec_load": "EPERM", "reboot": "EPERM",
		"swapon": "EPERM", "swapoff": "EPERM", "syslog:3": "EPERM", "acct": "EPERM", "quotactl": "EPERM", "sethostname": "EPERM",
		"setdomainname": "EPERM", "settimeofday": "EPERM", "clock_settime": "EPERM", "clock_adjtime": "EPERM", "adjtimex": "EPERM",
		"fanotify_init": "EPERM", "vhangup": "EPERM", "lookup_dcookie": "EPERM",
		// Arguments.
		"personality:0x400000": "EPERM", "personality:0x440000": "EPERM",
		"tiocsti:0x5412": "EPERM", "tiocsti:0x100005412": "EPERM", "tiocsti:0x541c": "EPERM", "tiocsti:0x5423": "EPERM",
	}
	if runtime.GOARCH == "amd64" {
		for call, want := range map[string]string{
			"modify_ldt": "ENOSYS", "iopl:3": "EPERM", "ioperm:0,1,1": "EPERM", "uselib": "EPERM",
			// The other two ways into the kernel.
			"int80_getpid": "SIGSYS", "int80_socket": "SIGSYS", "x32_getpid": "SIGSYS", "x32_socket": "SIGSYS",
		} {
			refused[call] = want
		}
	}
	for call, want := range refused {
		if got := g.user("call", call); got != want {
			t.Errorf("%s: %s, want %s", call, got, want)
		}
		if strings.HasPrefix(call, "socket:") || strings.HasPrefix(call, "clone") { // the filter is the agent's as well
			if got := strings.TrimSpace(g.run(0, "self", "call", call).Out); got != want {
				t.Errorf("as root, %s: %s, want %s", call, got, want)
			}
		}
	}
}

// Case I6: what programs need goes through.
func TestSystemCallsAllowed(t *testing.T) {
	d := newDriver(t)
	g := start(t, d, empty(t, d))
	for call, want := range map[string]string{
		"socket:1,1,0": "ok", "socket:1,0x80802,0": "ok", "socket:2,1,0": "ok", "socket:2,0x80801,6": "ok", "socket:2,2,17": "ok",
		"socket:10,1,0": "ok", "socket:10,2,17": "ok", "socket:2,2,1": "ok", "socket:16,3,0": "ok", "socket:16,0x80002,0": "ok",
		"socketpair:1,1,0,0": "EFAULT", // reached the kernel
		"clone:0":            "ok", "personality:0xffffffff": "ok", "personality:0x40000": "ok", "sync": "ok",
		"epoll_create1:0": "ok", "eventfd2:0,0": "ok", "inotify_init1:0": "ok", "pidfd_open:1,0": "ok",
		"landlock_create_ruleset:0,0,1": "ok", "memfd_create:0,0": "EFAULT",
		"tiocsti:0x5413":             "ok",     // TIOCGWINSZ
		"tiocsti:0xffffffff80045430": "ENOTTY", // TIOCGPTN as musl passes it, on the wrong end
	} {
		if got := g.user("call", call); got != want && !(got == "EOPNOTSUPP" && strings.HasPrefix(call, "landlock")) {
			t.Errorf("%s: %s, want %s", call, got, want)
		}
	}
	if got := g.user("ptrace"); got != "ok" {
		t.Errorf("a debugger on its own child: %s", got)
	}
}

// Case I6, with the programs themselves where an image has them.
func TestProgramsWork(t *testing.T) {
	d := newDriver(t)
	img, err := d.Image(t.Context(), "boxed/full:bookworm", nil)
	if err != nil {
		t.Skip("no image boxed/full:bookworm on this host; make test builds it: ", err)
	}
	l := smallLimits()
	l.MemoryBytes, l.Processes, l.WorkspaceBytes, l.TmpBytes = 512<<20, 256, 128<<20, 64<<20
	g := start(t, d, img, func(b *sandbox.Box) { b.Limits = l })
	for name, script := range map[string]string{
		"python threads": `python3 -c 'import threading as t; ts=[t.Thread(target=print,args=(i,)) for i in range(50)]; [x.start() for x in ts]; [x.join() for x in ts]'`,
		"python multiprocessing": `python3 -c '
import multiprocessing as m
if __name__ == "__main__":
    with m.Pool(4) as p: print(sum(p.map(abs, range(100))))
    q = m.Queue(); l = m.Lock(); p = m.Process(target=q.put, args=(7,)); p.start(); print(q.get()); p.join()
'`,
		"python sockets":   `python3 -c 'import socket,asyncio; socket.create_server(("127.0.0.1",0)); asyncio.run(asyncio.sleep(0)); print(socket.getaddrinfo("localhost",80))'`,
		"sqlite":           `cd /workspace && python3 -c 'import sqlite3; c=sqlite3.connect("x.db"); c.execute("pragma journal_mode=wal"); c.execute("create table t(a)"); c.execute("insert into t values(1)"); c.commit()' && sqlite3 x.db 'select * from t'`,
		"node workers":     `node -e 'const {Worker}=require("worker_threads"); const w=new Worker("require(\"worker_threads\").parentPort.postMessage(1)",{eval:true}); w.on("message",m=>console.log(m))'`,
		"node children":    `node -e 'console.log(require("child_process").execSync("echo hi").toString()); require("fs").watch("/tmp").close()'`,
		"git":              `cd /workspace && git init -q r && cd r && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x && git clone -q . ../s && git log --oneline && git gc -q`,
		"gcc":              `cd /workspace && printf 'int main(){return 0;}' > a.c && gcc -O2 a.c -o a && ./a`,
		"make":             `cd /workspace && printf 'all: a b\na b:\n\tsleep 0.01\n' > Makefile && make -j4`,
		"a C extension":    `cd /workspace && printf '#include <stdio.h>\nint f(){return 42;}' > e.c && gcc -shared -fPIC e.c -o e.so && python3 -c 'import ctypes; print(ctypes.CDLL("./e.so").f())'`,
		"venv":             `cd /workspace && python3 -m venv --without-pip v && v/bin/python -c 'print(1)'`,
		"rsync and tar":    `cd /workspace && mkdir -p t/a && echo x > t/a/b && rsync -a t/ u/ && tar c t | tar t && zip -q z.zip t/a/b && unzip -l z.zip`,
		"fifo and ripgrep": `cd /workspace && mkfifo f && (echo hit > f &) && rg hit < f`,
		"sh":               `for i in 1 2 3; do sleep 0.01 & done; wait; nice -n 5 true; ulimit -n; ps aux | head -3; timeout 1 true; sync; curl --version`,
	} {
		r := g.run(g.box.UID, "/bin/bash", "-ec", script)
		if r.Code != 0 {
			t.Errorf("%s: code %d %s\n%s%s", name, r.Code, r.Signal, r.Out, r.Err)
		}
	}
}
