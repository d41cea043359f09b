# Tries from inside a sandbox what a sandbox must not allow. Prints one line for each check: its name, ok, failed or
# skipped, and a detail, separated by tabs. Standard library only; every attempt is one that does no harm if it succeeds.
import ctypes  # not in python3-minimal; boxedctl then uses smoke.sh
import errno
import os
import platform
import resource
import socket
import stat
import sys

GVISOR = "runsc" in os.environ.get("SMOKE_RUNTIME", "") or "gvisor" in os.environ.get("SMOKE_RUNTIME", "").lower()
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def report(name, result, detail=""):
    print(name, result, str(detail).replace("\t", " ").replace("\n", " ")[:500], sep="\t", flush=True)


def verdict(name, faults, detail):
    report(name, "failed" if faults else "ok", "; ".join(faults) if faults else detail)


def text(path):
    with open(path, "rb") as f:
        return f.read(1 << 20).decode("utf-8", "replace")


def code(e):
    return errno.errorcode.get(e.errno, str(e)) if e.errno else str(e)


def refused(attempt, faults, what, allowed=()):
    """Runs attempt; anything but a refusal is a fault."""
    try:
        attempt()
    except OSError as e:
        if e.errno not in REFUSED + tuple(allowed):
            faults.append("%s: %s" % (what, code(e)))
        return
    faults.append("%s worked" % what)


def in_child(attempt):
    """Runs attempt in a child, since its success would change this process; returns its errno, 0 if it succeeded."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os.write(w, b"0")
        except OSError as e:
            os.write(w, str(e.errno).encode())
        finally:
            os._exit(0)
    os.close(w)
    said = os.read(r, 20)
    os.close(r)
    os.waitpid(pid, 0)
    return int(said or b"-1")


libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    ctypes.set_errno(0)
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), name)


def syscall(number, *args):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args]) == -1:
        raise OSError(ctypes.get_errno(), "syscall")


STATUS = dict(line.split(":", 1) for line in text("/proc/self/status").splitlines() if ":" in line)


def uid():
    ids = STATUS["Uid"].split() + STATUS["Gid"].split() + STATUS.get("Groups", "").split()
    faults = ["an identity is 0: " + " ".join(ids)] if "0" in ids else []
    if in_child(lambda: os.setuid(0)) == 0:
        faults.append("setuid(0) worked")
    verdict("uid", faults, "uid %d, gid %d" % (os.getuid(), os.getgid()))


def capabilities():
    faults = []
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        if int(STATUS.get(name, "0"), 16) != 0:
            faults.append("%s is %s" % (name, STATUS[name].strip()))
    beyond = int(STATUS.get("CapBnd", "0"), 16) & ~0xE0  # the first process keeps KILL, SETGID and SETUID
    if beyond and not GVISOR:
        faults.append("the bounding set has %x" % beyond)
    verdict("capabilities", faults, "none")


def no_new_privs():
    value = STATUS.get("NoNewPrivs", "").strip()
    if value == "":
        return report("no_new_privs", "skipped", "the kernel does not tell")
    verdict("no_new_privs", [] if value == "1" else ["NoNewPrivs is " + value], "on")


def seccomp():
    value = STATUS.get("Seccomp", "").strip()
    if GVISOR:
        return report("seccomp", "skipped", "gVisor answers system calls itself")
    verdict("seccomp", [] if value == "2" else ["Seccomp is %s" % (value or "unknown")], "a filter is on")


def mounts():
    for line in text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        yield fields[4], fields[5].split(","), tail[0], (tail[2].split(",") if len(tail) > 2 else [])


def read_only_root():
    faults = []
    for directory in ("/", "/etc", "/usr", "/usr/bin", "/var", "/root", "/opt", "/bin", "/lib", "/run", "/srv", "/mnt"):
        if not os.path.isdir(directory):
            continue
        name = os.path.join(directory, ".boxed-smoke")
        try:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:
            continue
        os.unlink(name)
        faults.append(directory + " can be written to")
    if not GVISOR and not os.statvfs("/").f_flag & os.ST_RDONLY:
        faults.append("/ is mounted read-write")
    verdict("read_only_root", faults, "nothing outside the writable places can be changed")


def tmpfs():
    limits = dict(pair.rsplit("=", 1) for pair in os.environ.get("SMOKE_TMPFS", "").split("|") if "=" in pair)
    faults = []
    seen = {}
    for point, options, kind, _ in mounts():
        seen[point] = (options, kind)
    for place, limit in limits.items():
        place = os.environ.get("HOME", place) if place == "HOME" else place
        if place not in seen:
            faults.append(place + " is no mount of its own")
            continue
        options, kind = seen[place]
        if kind != "tmpfs":
            faults.append("%s is %s" % (place, kind))
        if "nosuid" not in options and not GVISOR:
            faults.append(place + " lacks nosuid")
        if "nodev" not in options and not GVISOR:
            faults.append(place + " lacks nodev")
        s = os.statvfs(place)
        size = s.f_blocks * s.f_frsize
        if size == 0 or size > int(limit):
            faults.append("%s has %d bytes, more than %s" % (place, size, limit))
        if s.f_files == 0 and not GVISOR:
            faults.append(place + " has no limit of files")
    verdict("tmpfs", faults, "each has its limit")


def host_paths():
    virtual = {"proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "none"}
    ours = {"/", "/run/boxed", "/.boxed-agent", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname"}
    faults = []
    for point, options, kind, _ in mounts():
        if kind in virtual:
            continue
        if point not in ours:
            faults.append("%s is a mount of %s" % (point, kind))
        elif "ro" not in options and not GVISOR:
            faults.append(point + " is mounted read-write")
    for path in ("/host", "/hostfs", "/rootfs", "/var/lib/docker", "/var/lib/kubelet", "/var/lib/boxed"):
        if os.path.exists(path) and (os.path.ismount(path) or os.listdir(path)):
            faults.append(path + " is there")
    verdict("host_paths", faults, "no directory of the host is mounted")


def engine_socket():
    faults = []
    for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock",
                 "/run/crio/crio.sock", "/var/run/crio/crio.sock", "/run/systemd/private", "/run/dbus/system_bus_socket"):
        if os.path.exists(path):
            faults.append(path + " is there")
    verdict("engine_socket", faults, "no socket of the host's services is there")


def agent_socket():
    faults = []
    path = "/run/boxed/agent.sock"
    with socket.socket(socket.AF_UNIX) as s:
        refused(lambda: s.connect(path), faults, "connecting to " + path, (errno.ENOENT, errno.ECONNREFUSED))
    refused(lambda: os.close(os.open("/run/boxed/.boxed-smoke", os.O_CREAT | os.O_WRONLY)), faults, "writing to /run/boxed",
            (errno.EROFS, errno.ENOENT))
    verdict("agent_socket", faults, "the way to the node is not open to programs")


def interfaces():
    # Tunnels that the kernel puts into every network namespace; nobody here can bring them up.
    idle = {"tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0"}
    names = [line.split(":")[0].strip() for line in text("/proc/net/dev").splitlines()[2:] if ":" in line]
    others = [n for n in names if n != "lo" and n not in idle]
    verdict("interfaces", ["there is " + ", ".join(others)] if others else [], "only loopback")


def outside():
    faults = []
    for family, address in (
        (socket.AF_INET, ("1.1.1.1", 443)), (socket.AF_INET, ("172.17.0.1", 22)), (socket.AF_INET, ("10.0.0.1", 80)),
        (socket.AF_INET, ("169.254.169.254", 80)), (socket.AF_INET6, ("2606:4700:4700::1111", 443)),
    ):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.settimeout(2)
                s.connect(address)
            faults.append("a connection to %s port %d worked" % address)
        except socket.timeout:
            faults.append("%s has a route" % address[0])
        except OSError as e:
            if e.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
                faults.append("%s answers" % address[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.sendto(b"x", ("8.8.8.8", 53))
        faults.append("a datagram to 8.8.8.8 was sent")
    except OSError:
        pass
    verdict("outside", faults, "no address outside can be reached")


def names():
    faults = []
    for name in ("example.com", "host.docker.internal", "metadata.google.internal"):
        try:
            for found in socket.getaddrinfo(name, 80):
                address = found[4][0]
                if not (address.startswith("127.") or address == "::1"):
                    faults.append("%s is %s" % (name, address))
        except OSError:
            pass
    verdict("names", sorted(set(faults)), "names do not resolve to addresses outside")


def processes():
    faults = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry == "1":
            continue
        try:
            if os.stat("/proc/" + entry).st_uid != os.getuid():
                faults.append("process %s of another user is visible" % entry)
        except OSError:
            continue
    for name in ("environ", "maps", "mem", "auxv", "stack", "syscall"):
        try:
            with open("/proc/1/" + name, "rb") as f:
                if name in ("environ", "maps", "auxv", "stack") and f.read(1) == b"":
                    continue
            faults.append("/proc/1/%s can be read" % name)
        except OSError:
            pass
    for name in ("fd", "root/etc", "cwd", "map_files"):
        try:
            os.listdir("/proc/1/" + name)
            faults.append("/proc/1/%s can be listed" % name)
        except OSError:
            pass
    verdict("processes", faults, "the first process shows nothing of itself")


def signals():
    faults = []
    refused(lambda: os.kill(1, 0), faults, "signalling the first process")
    refused(lambda: resource.prlimit(1, resource.RLIMIT_CPU), faults, "reading the first process's limits")
    refused(lambda: os.setpriority(os.PRIO_PROCESS, 1, 0), faults, "changing the first process's priority")
    refused(lambda: os.sched_setaffinity(1, {0}), faults, "binding the first process to a core")
    verdict("signals", faults, "the first process cannot be signalled, limited or re-scheduled")


def ptrace():
    faults = []
    refused(lambda: call("ptrace", 0x4206, 1, None, None), faults, "attaching to the first process")
    process_vm_readv = {"x86_64": 310, "aarch64": 270}.get(platform.machine())
    if process_vm_readv:
        buffer = ctypes.create_string_buffer(16)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)
        at = ctypes.addressof(vector)
        refused(lambda: syscall(process_vm_readv, 1, at, 1, at, 1, 0), faults, "reading the first process's memory", (errno.EFAULT,) if GVISOR else ())
    verdict("ptrace", faults, "the first process cannot be traced")


def mount():
    faults = []
    refused(lambda: call("mount", b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None), faults, "mount")
    refused(lambda: call("umount2", b"/proc", 4), faults, "umount")
    number = in_child(lambda: call("chroot", b"/tmp"))
    if number not in REFUSED:
        faults.append("chroot worked" if number == 0 else "chroot: " + errno.errorcode.get(number, str(number)))
    verdict("mount", faults, "refused")


def unshare():
    faults = []
    for name, flag in (("user", 0x10000000), ("mount", 0x00020000), ("network", 0x40000000), ("pid", 0x20000000),
                       ("uts", 0x04000000), ("ipc", 0x08000000), ("cgroup", 0x02000000)):
        number = in_child(lambda f=flag: call("unshare", ctypes.c_int(f)))
        if number not in REFUSED and not (number == errno.EINVAL and GVISOR):
            faults.append("a %s namespace: %s" % (name, "made" if number == 0 else errno.errorcode.get(number, number)))
    verdict("unshare", faults, "no namespace can be made")


def sockets():
    refusals = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EINVAL)
    faults = []
    for name, family, kind, protocol in (
        ("vsock", 40, socket.SOCK_STREAM, 0), ("packet", 17, socket.SOCK_RAW, 0), ("alg", 38, socket.SOCK_SEQPACKET, 0),
        ("key", 15, socket.SOCK_RAW, 2), ("bluetooth", 31, socket.SOCK_RAW, 1), ("can", 29, socket.SOCK_RAW, 1),
        ("tipc", 30, socket.SOCK_SEQPACKET, 0), ("xdp", 44, socket.SOCK_RAW, 0), ("raw IP", 2, socket.SOCK_RAW, 1),
        ("netfilter netlink", 16, socket.SOCK_RAW, 12), ("uevent netlink", 16, socket.SOCK_RAW, 15), ("audit netlink", 16, socket.SOCK_RAW, 9),
    ):
        refused(lambda f=family, k=kind, p=protocol: socket.socket(f, k, p).close(), faults, "a %s socket" % name, refusals)
    verdict("sockets", faults, "only Unix, IP and route sockets can be made")


def vsock():
    try:
        socket.socket(40, socket.SOCK_STREAM).close()
    except OSError as e:
        return report("vsock", "ok", "refused: " + code(e))
    report("vsock", "failed", "an AF_VSOCK socket can be made: it ignores network namespaces")


def system_calls():
    machine = platform.machine()
    numbers = {
        "x86_64": {"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246, "init_module": 175, "delete_module": 176,
                   "open_by_handle_at": 304, "io_uring_setup": 425, "reboot": 169, "swapon": 167, "acct": 163, "setns": 308,
                   "pivot_root": 155, "iopl": 172, "quotactl": 179, "fsopen": 430, "move_mount": 429, "open_tree": 428},
        "aarch64": {"bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104, "init_module": 105, "delete_module": 106,
                    "open_by_handle_at": 265, "io_uring_setup": 425, "reboot": 142, "swapon": 224, "acct": 89, "setns": 268,
                    "pivot_root": 41, "quotactl": 60, "fsopen": 430, "move_mount": 429, "open_tree": 428},
    }.get(machine)
    if numbers is None:
        return report("system_calls", "skipped", "no numbers for " + machine)
    if GVISOR:
        return report("system_calls", "skipped", "gVisor answers system calls itself")
    faults = []
    for name, number in numbers.items():
        # The arguments are bad, so a call that is let through fails as well, in another way.
        refused(lambda n=number: syscall(n, -1, 0, 0, 0, 0, 0), faults, name)
    verdict("system_calls", faults, "%d dangerous ones are refused" % len(numbers))


def devices():
    usual = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "mqueue", "fd", "stdin", "stdout",
             "stderr", "core", "net"}
    faults = ["/dev/%s is there" % n for n in sorted(os.listdir("/dev")) if n not in usual]
    for directory, _, files in os.walk("/dev"):
        for name in files:
            try:
                if stat.S_ISBLK(os.lstat(os.path.join(directory, name)).st_mode):
                    faults.append("%s/%s is a block device" % (directory, name))
            except OSError:
                continue
    verdict("devices", faults, "only the usual ones")


def kernel_files():
    faults = []
    for path in ("/proc/kcore", "/proc/kmsg", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/hostname",
                 "/sys/kernel/uevent_helper", "/dev/mem", "/dev/kmsg"):
        try:
            fd = os.open(path, os.O_WRONLY)
            # Runtimes mask a file by mounting /dev/null over it.
            if os.fstat(fd).st_rdev != os.stat("/dev/null").st_rdev:
                faults.append(path + " can be opened for writing")
            os.close(fd)
        except OSError:
            pass
    for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug"):
        try:
            with open(path, "rb") as f:
                if f.read(1) != b"":
                    faults.append(path + " can be read")
        except OSError:
            pass
    for directory in ("/sys/firmware", "/proc/acpi", "/proc/scsi"):
        try:
            if os.listdir(directory):
                faults.append(directory + " is not masked")
        except OSError:
            pass
    for directory, _, _ in os.walk("/sys/fs/cgroup"):
        if os.access(directory, os.W_OK):
            faults.append(directory + " can be written to")
            break
    verdict("kernel_files", faults, "masked or read-only")


def first_number(*paths):
    for path in paths:
        try:
            value = text(path).strip()
        except OSError:
            continue
        return None if value == "max" else int(value)
    return -1


def limits():
    faults = []
    want = int(os.environ.get("SMOKE_MEMORY", "0"))
    memory = first_number("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if memory is None or (memory > 0 and want > 0 and memory > want):
        faults.append("memory is limited to %s, not %d" % (memory, want))
    swap = first_number("/sys/fs/cgroup/memory.swap.max")
    if swap is None or swap > 0:
        faults.append("there is swap")
    pids = first_number("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")
    nproc = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if (pids is None or pids < 0) and nproc == resource.RLIM_INFINITY:
        faults.append("the number of processes has no limit")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    want = int(os.environ.get("SMOKE_FILES", "0"))
    if files == resource.RLIM_INFINITY or (want and files > want):
        faults.append("open files are limited to %d, not %d" % (files, want))
    if resource.getrlimit(resource.RLIMIT_CORE)[1] not in (0,):
        faults.append("core dumps are on")
    verdict("limits", faults, "memory, processes, open files and core dumps are limited")


CHECKS = (uid, capabilities, no_new_privs, seccomp, read_only_root, tmpfs, host_paths, engine_socket, agent_socket, interfaces,
          outside, names, processes, signals, ptrace, mount, unshare, vsock, sockets, system_calls, devices, kernel_files, limits)

for check in CHECKS:
    try:
        check()
    except Exception as e:  # a check that breaks has shown nothing
        report(check.__name__, "failed", "the check itself broke: %s: %s" % (type(e).__name__, e))
sys.exit(0)
