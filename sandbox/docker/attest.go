package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// attestTimeout bounds the wait for the runtime to become the agent.
const attestTimeout = 10 * time.Second

// errAgentEnded: there is no such process (any more).
var errAgentEnded = errors.New("the agent's process is not there")

// attest looks at PID 1 of a started container from the host and refuses it
// unless it is the agent, as root with our capabilities, filtered, in
// namespaces of its own, on the mounts that were asked for. The image can bend
// some of that: engines look user 0 up in the image's /etc/passwd, where a line
// may give the name "0" to any uid, and mount at the target of the image's
// links, where a link may lead our socket into a directory of the user's.
// Nothing of the user's has run yet. It applies to runtimes whose processes are
// this kernel's.
func attest(ctx context.Context, c container.InspectResponse) error {
	proc := "/proc/" + strconv.Itoa(c.State.Pid)
	if c.State.Pid == 0 {
		return errAgentEnded
	}
	if err := awaitAgent(ctx, proc, bindSource(c, sandbox.GuestAgent)); err != nil {
		return err
	}
	status, err := os.ReadFile(proc + "/status")
	if err != nil {
		return errAgentEnded
	}
	mounts, err := os.ReadFile(proc + "/mountinfo")
	if err != nil {
		return errAgentEnded
	}
	for _, why := range []string{
		checkCredentials(string(status)), checkNamespaces(proc, "/proc/self"), checkMounts(string(mounts), wantedMounts(c)),
	} {
		if why != "" {
			return boxed.Errorf(boxed.CodeStartFailed, "the container was started and ended again, as %s: use another image", why).
				With("reason", string(boxed.ImageUnusable))
		}
	}
	return nil
}

// awaitAgent waits until the process has become the agent: the engine answers
// when the runtime is about to execute it.
func awaitAgent(ctx context.Context, proc, program string) error {
	agent, err := os.Stat(program)
	if err != nil {
		return fmt.Errorf("look at the agent program: %w", err)
	}
	deadline := time.Now().Add(attestTimeout)
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		exe, err := os.Stat(proc + "/exe") // through the link: the file, whatever its name in there
		if err != nil {
			return errAgentEnded
		}
		if os.SameFile(exe, agent) {
			return nil
		}
		if time.Now().After(deadline) {
			return boxed.Errorf(boxed.CodeStartFailed, "the container's first process did not become the agent within %v", attestTimeout)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// bindSource is what is bind-mounted at target.
func bindSource(c container.InspectResponse, target string) string {
	for _, m := range c.HostConfig.Mounts {
		if m.Target == target {
			return m.Source
		}
	}
	return ""
}

// keptCapabilities is the set of sandbox.Capabilities as the kernel writes it.
const keptCapabilities = 1<<5 | 1<<6 | 1<<7 // KILL, SETGID, SETUID

// checkCredentials reads a /proc/<pid>/status and says what is wrong, or "".
func checkCredentials(status string) string {
	field := map[string]string{}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		field[name] = strings.Join(strings.Fields(value), " ")
	}
	switch {
	case !rootIDs(field["Uid"]) || !rootIDs(field["Gid"]):
		return "the image's /etc/passwd or /etc/group makes its root another user (" + field["Uid"] + ")"
	case field["Groups"] != "" && field["Groups"] != "0":
		return "the image's /etc/group puts its root into groups " + field["Groups"]
	case field["NoNewPrivs"] != "1":
		return "the runtime ignores no-new-privileges"
	case field["Seccomp"] != "2":
		return "the runtime ignores seccomp"
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		caps, err := strconv.ParseUint(field[set], 16, 64)
		if err != nil || caps&^keptCapabilities != 0 {
			return "the runtime gives it capabilities " + set + "=" + field[set]
		}
	}
	return ""
}

// rootIDs reports whether the real, effective and saved ID are root's. The
// fourth, for files, is a thread's own affair: the agent has some that act for
// the user.
func rootIDs(ids string) bool { return strings.HasPrefix(ids, "0 0 0 ") }

// checkNamespaces says which namespace a process shares with the host's, or "".
func checkNamespaces(proc, host string) string {
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		theirs, err := os.Readlink(proc + "/ns/" + ns)
		ours, err2 := os.Readlink(host + "/ns/" + ns)
		if err != nil || err2 != nil || theirs == ours {
			return "the runtime gives it no " + ns + " namespace of its own"
		}
	}
	return ""
}

// wantedMounts are the mount points that were asked for, and of which kind.
func wantedMounts(c container.InspectResponse) map[string]mount.Type {
	want := map[string]mount.Type{}
	for target := range c.HostConfig.Tmpfs {
		want[target] = mount.TypeTmpfs
	}
	for _, m := range c.HostConfig.Mounts {
		want[m.Target] = mount.TypeBind
	}
	return want
}

// checkMounts reads a /proc/<pid>/mountinfo and says what is wrong, or "":
// each wanted mount is there once, under its own name, a read-only bind or a
// tmpfs without devices and set-uid programs, and nothing else can be written
// to but what the runtime puts into /dev and /proc.
func checkMounts(mountinfo string, want map[string]mount.Type) string {
	seen := map[string]int{}
	for line := range strings.Lines(mountinfo) {
		m, ok := parseMount(line)
		if !ok {
			return "its list of mounts cannot be read"
		}
		seen[m.point]++
		switch kind := want[m.point]; {
		case kind == mount.TypeBind && !m.has("ro"):
			return m.point + " can be written to"
		case kind == mount.TypeTmpfs && (m.fstype != "tmpfs" || !m.has("nosuid") || !m.has("nodev")):
			return m.point + " is not the tmpfs that it should be"
		case kind == "" && !m.has("ro") && !under(m.point, "/dev") && !under(m.point, "/proc") && !m.isCgroupRoot():
			return m.point + " can be written to"
		}
	}
	if seen["/"] != 1 {
		return "its root is not a mount of its own"
	}
	for _, point := range slices.Sorted(maps.Keys(want)) {
		if seen[point] != 1 {
			return "in the image " + point + " is, or lies behind, a link"
		}
	}
	return ""
}

func under(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// mountLine is one line of a mountinfo.
type mountLine struct {
	root, point string // of the file system, and where it is mounted
	options     []string
	fstype      string
	super       []string // options of the file system, for cgroups their controllers
}

func (m mountLine) has(option string) bool { return slices.Contains(m.options, option) }

// isCgroupRoot: on cgroup v1 the trees hang in a small tmpfs that runc leaves
// writable for root; the trees themselves are read-only.
func (m mountLine) isCgroupRoot() bool { return m.point == "/sys/fs/cgroup" && m.fstype == "tmpfs" }

// parseMount reads one line of a mountinfo.
func parseMount(line string) (mountLine, bool) {
	before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
	f, g := strings.Fields(before), strings.Fields(after)
	if !ok || len(f) < 6 || len(g) < 3 {
		return mountLine{}, false
	}
	return mountLine{
		root: unescapeMount(f[3]), point: unescapeMount(f[4]), options: strings.Split(f[5], ","),
		fstype: g[0], super: strings.Split(g[2], ","),
	}, true
}

// unescapeMount undoes the kernel's octal escapes of blanks and backslashes.
func unescapeMount(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
