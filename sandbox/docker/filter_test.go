package docker_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed/sandbox"
)

// I6: what the filter refuses, by really making the calls. The errno matters:
// programs take ENOSYS, EAFNOSUPPORT and EPROTONOSUPPORT for a kernel without
// the thing and go on.
func TestSystemCallsRefused(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
		for call, want := range refusedCalls() {
			if !r.shares && ownKernelDoes[call] {
				continue
			}
			if got := g.user("call", call); !r.refuses(got, want) {
				t.Errorf("%s: %s, want %s", call, got, want)
			}
			if strings.HasPrefix(call, "socket:") || strings.HasPrefix(call, "clone") { // the filter is the agent's as well
				if got := strings.TrimSpace(g.run(0, "self", "call", call).Out); !r.refuses(got, want) {
					t.Errorf("as root, %s: %s, want %s", call, got, want)
				}
			}
		}
	})
}

// refuses reports whether an answer is the refusal that was meant. crun 1.8 has
// no ENOSYS for calls that are newer than its list. gVisor has a kernel and
// errnos of its own: there it is enough that nothing is done.
func (r *oci) refuses(got, want string) bool {
	return got == want || (r.name == "crun" && want == "ENOSYS" && got == "EPERM") || (!r.shares && got != "ok")
}

// ownKernelDoes are calls that gVisor's kernel carries out for anybody, inside
// itself: its namespaces, memory policies and asynchronous input and output are
// programs' data to the host. Its --oci-seccomp would refuse them, and breaks
// programs: it turns an answer of success into EPERM, and does not know fchmodat2.
var ownKernelDoes = map[string]bool{
	"unshare": true, "unshare:0": true, "clone:0x20000": true, "clone:0x10020000": true, "mbind": true, "set_mempolicy": true,
	"get_mempolicy": true, "io_submit": true, "io_setup": true, "io_getevents": true,
}

// refusedCalls are calls with arguments, and their answers.
func refusedCalls() map[string]string {
	refused := map[string]string{
		// Socket families and protocols; types carry flags, and arguments may carry garbage that the kernel ignores.
		"socket:40,1,0":                    "EAFNOSUPPORT", // AF_VSOCK knows no network namespace
		"socket:0x10000000028,1,0":         "EAFNOSUPPORT",
		"socket:15,3,2":                    "EAFNOSUPPORT",    // AF_KEY
		"socket:16,3,0x100000009":          "EPROTONOSUPPORT", // NETLINK_AUDIT
		"socket:2,1,262":                   "EPROTONOSUPPORT", // MPTCP, as Go asks for it
		"socket:10,0x80801,262":            "EPROTONOSUPPORT",
		"socket:0x100000002,1,0x100000106": "EAFNOSUPPORT",
		"socket:2,1,0x100000106":           "EPERM",
		"socketpair:40,1,0,0":              "EPERM",
		"socketpair:30,1,0,0":              "EPERM",
		// Namespaces; all combinations are TestNoNewNamespaces.
		"clone:0x20000": "EPERM", "clone:0x10020000": "EPERM", "clone3": "ENOSYS", "unshare:0": "EPERM", "setns:0,0": "EPERM",
		// Arguments.
		"personality:0x400000": "EPERM", "personality:0x440000": "EPERM",
		"tiocsti:0x5412": "EPERM", "tiocsti:0x100005412": "EPERM", "tiocsti:0x541c": "EPERM", "tiocsti:0x5423": "EPERM",
		// Newer than any list.
		"unknown_new": "ENOSYS",
	}
	if runtime.GOARCH == "amd64" { // the other two ways into the kernel
		for _, call := range []string{"getpid", "socket", "clone", "mount"} {
			refused["int80_"+call] = "SIGSYS"
		}
		for _, call := range []string{"getpid", "socket", "clone", "ioctl"} {
			refused["x32_"+call] = "SIGSYS"
		}
	}
	return refused
}

// I6: every number that is not allowed is refused, by calling it, as the profile
// says; and by the two other ways into the kernel every number is.
func TestEveryNumberThatIsNotAllowedIsRefused(t *testing.T) {
	numbers := callNumbers(t)
	names := map[int]string{}
	for name, n := range numbers {
		names[n] = name
	}
	answers, conditional := profileAnswers(t)
	var refused []string
	for n := range maxCall {
		name := names[n]
		if name == "" && n < lastLegacy(numbers) { // a hole, or retired
			name = "unused " + strconv.Itoa(n)
		}
		if answers[name] != "allow" && !conditional[name] && !pastAnyFilter[n] {
			refused = append(refused, strconv.Itoa(n))
		}
	}
	if len(refused) < 60 || slices.Contains(refused, strconv.Itoa(numbers["read"])) || !slices.Contains(refused, strconv.Itoa(numbers["mount"])) {
		t.Fatalf("this test reads the profile wrong: %v", refused)
	}
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
		got := linesOf(g.user(append([]string{"calls", "native"}, refused...)...))
		if len(got) != len(refused) {
			t.Fatalf("%d answers to %d calls", len(got), len(refused))
		}
		for _, f := range got {
			n, _ := strconv.Atoi(f[0])
			want := answers[names[n]]
			if want == "" {
				want = "EPERM"
			}
			if !r.shares && ownKernelDoes[names[n]] {
				continue
			}
			newer := n > numbers["close_range"] && f[1] == "ENOSYS" // the runtime's answer to what is younger than its list
			if !r.refuses(f[1], want) && !newer && !(names[n] == "" && f[1] == "ENOSYS") {
				t.Errorf("%d %s: %s, want %s", n, names[n], f[1], want)
			}
		}
		if runtime.GOARCH != "amd64" {
			return
		}
		last := maxCall
		if !r.shares {
			last = 40 // each takes long there
		}
		for _, entry := range []string{"int80", "x32"} {
			got := linesOf(g.user("calls", entry, fmt.Sprint("0-", last)))
			if len(got) != last+1 {
				t.Errorf("%s: %d answers", entry, len(got))
			}
			for _, f := range got {
				if !r.refuses(f[1], "SIGSYS") {
					t.Errorf("%s %s: %s", entry, f[0], f[1])
				}
			}
		}
	})
}

// pastAnyFilter are numbers that x86 kernels since 6.14 let pass every filter:
// uretprobe and uprobe, which end whoever calls them from anywhere but the
// kernel's own trampolines.
var pastAnyFilter = map[int]bool{335: runtime.GOARCH == "amd64", 336: runtime.GOARCH == "amd64"}

// maxCall is above every number there is yet.
const maxCall = 480

// lastLegacy is where numbers are the same on all architectures: what lies above
// and has no name is not there yet.
func lastLegacy(numbers map[string]int) int { return numbers["pidfd_send_signal"] }

func linesOf(out string) (fields [][]string) {
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 1 {
			fields = append(fields, f)
		}
	}
	return fields
}

// callNumbers are all that golang.org/x/sys knows, by name.
func callNumbers(t *testing.T) map[string]int {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+runtime.GOARCH+".go"))
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^\tSYS_(\w+)\s+= (\d+)`).FindAllStringSubmatch(string(source), -1) {
		n, _ := strconv.Atoi(m[2]) // digits
		numbers[strings.ToLower(m[1])] = n
	}
	return numbers
}

// profileAnswers reads what the profile answers to each name whatever its
// arguments: "allow" or an errno. Names with conditions are apart.
func profileAnswers(t *testing.T) (answers map[string]string, conditional map[string]bool) {
	t.Helper()
	raw, err := sandbox.Seccomp(runtime.GOARCH)
	var p struct {
		Syscalls []struct {
			Names    []string
			Action   string
			ErrnoRet int
			Args     []any
		}
	}
	if err == nil {
		err = json.Unmarshal(raw, &p)
	}
	if err != nil {
		t.Fatal(err)
	}
	answers, conditional = map[string]string{}, map[string]bool{}
	for _, s := range p.Syscalls {
		for _, name := range s.Names {
			switch {
			case len(s.Args) > 0:
				conditional[name] = true
			case s.Action == "SCMP_ACT_ALLOW":
				answers[name] = "allow"
			default:
				answers[name] = map[int]string{0: "ok", 1: "EPERM", 38: "ENOSYS"}[s.ErrnoRet]
			}
		}
	}
	return answers, conditional
}

// I6: the table of sockets: every family, type and common protocol.
func TestSocketsThatCanBeMade(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
		rows := linesOf(g.user("sockets"))
		if len(rows) != 46*11*16 {
			t.Fatalf("%d answers", len(rows))
		}
		made := 0
		for _, f := range rows {
			var family, typ, protocol int
			if _, err := fmt.Sscan(strings.Join(f[:3], " "), &family, &typ, &protocol); err != nil {
				t.Fatal(err)
			}
			got := f[3]
			switch want := socketAnswer(family, typ, protocol); {
			case want == "":
				if got == "ok" {
					made++
				}
			case !r.shares && family == 16 && protocol == 15: // gVisor has uevents, and sends none
			case !r.refuses(got, want):
				t.Errorf("family %d, type %d, protocol %d: %s, want %s", family, typ, protocol, got, want)
			}
		}
		if made < 14 { // a table that refuses everything would pass as well
			t.Errorf("only %d kinds of socket can be made", made)
		}
	})
}

// socketAnswer is what asking for a socket gets; "" is up to the kernel.
func socketAnswer(family, typ, protocol int) string {
	switch family {
	case 1:
		return ""
	case 2, 10:
		switch {
		case protocol == 262:
			return "EPROTONOSUPPORT"
		case typ == 1 && (protocol == 0 || protocol == 6), typ == 2 && (protocol == 0 || protocol == 17),
			typ == 2 && family == 2 && protocol == 1, typ == 2 && family == 10 && protocol == 58:
			return ""
		}
		return "EPERM"
	case 16:
		if protocol == 0 {
			return ""
		}
		return "EPROTONOSUPPORT"
	}
	return "EAFNOSUPPORT"
}

// I6: no combination of new namespaces, by clone or by unshare.
func TestNoNewNamespaces(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		if !r.shares {
			t.Skip("gVisor's namespaces are its own kernel's; what a root of one may do is TestUserCodeCannotTouchTheAgent")
		}
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
		if got := g.user("clones"); got != "tried 127" {
			t.Errorf("%s", got)
		}
	})
}

// I6: what programs need goes through.
func TestSystemCallsAllowed(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
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
			got := g.user("call", call)
			missing := got == "EOPNOTSUPP" && strings.HasPrefix(call, "landlock")
			if got != want && !missing && (r.shares || got == "EPERM") { // gVisor does not have all of them
				t.Errorf("%s: %s, want %s", call, got, want)
			}
		}
		if got := g.user("ptrace"); got != "ok" {
			t.Errorf("a debugger on its own child: %s", got)
		}
	})
}
