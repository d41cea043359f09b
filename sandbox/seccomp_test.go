package sandbox_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// seccompProfile is Docker's form, as an engine reads it.
type seccompProfile struct {
	DefaultAction string
	Architectures []string
	Syscalls      []struct {
		Names    []string
		Action   string
		ErrnoRet *uint
		Args     []sandbox.SeccompArg
	}
}

func readProfile(t *testing.T, arch string) seccompProfile {
	t.Helper()
	raw, err := sandbox.Seccomp(arch)
	if err != nil {
		t.Fatal(err)
	}
	var p seccompProfile
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		t.Fatal(err)
	}
	return p
}

// holds evaluates conditions as the kernel's filter does, on all 64 bits.
func holds(conditions []sandbox.SeccompArg, args [6]uint64) bool {
	for _, c := range conditions {
		v := args[c.Index]
		switch c.Op {
		case "SCMP_CMP_EQ":
			if v != c.Value {
				return false
			}
		case "SCMP_CMP_GT":
			if v <= c.Value {
				return false
			}
		case "SCMP_CMP_MASKED_EQ":
			if v&c.Value != c.ValueTwo {
				return false
			}
		default:
			panic(c.Op)
		}
	}
	return true
}

// decide gives "allow", an errno, or "ambiguous" if two rules disagree.
func (p seccompProfile) decide(name string, args [6]uint64) any {
	var found any
	for _, s := range p.Syscalls {
		if !slices.Contains(s.Names, name) || !holds(s.Args, args) {
			continue
		}
		var this any = "allow"
		if s.Action == "SCMP_ACT_ERRNO" {
			this = int(*s.ErrnoRet)
		}
		if found != nil && found != this {
			return "ambiguous"
		}
		found = this
	}
	if found == nil {
		return 1
	}
	return found
}

func TestSeccompProfileIsStable(t *testing.T) {
	for arch, native := range map[string]string{"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"} {
		a, err := sandbox.Seccomp(arch)
		b, err2 := sandbox.Seccomp(arch)
		if err != nil || err2 != nil || !bytes.Equal(a, b) || len(a) > 64<<10 {
			t.Errorf("%s: %v %v, %d bytes", arch, err, err2, len(a))
		}
		p := readProfile(t, arch)
		if p.DefaultAction != "SCMP_ACT_ERRNO" || !slices.Equal(p.Architectures, []string{native}) {
			t.Errorf("%s: %s %v", arch, p.DefaultAction, p.Architectures)
		}
	}
	if _, err := sandbox.Seccomp("riscv64"); boxed.CodeOf(err) != boxed.CodeUnavailable {
		t.Errorf("an architecture without a profile: %v", err)
	}
}

func TestSeccompGroupsHaveReasons(t *testing.T) {
	seen := map[string]string{}
	for _, g := range sandbox.SeccompGroups() {
		if g.Name == "" || len(g.Reason) < 20 || len(g.Names)+len(g.Legacy) == 0 {
			t.Errorf("%q: reason %q, %d names", g.Name, g.Reason, len(g.Names))
		}
		for _, name := range append(slices.Clone(g.Names), g.Legacy...) {
			if other := seen[name]; other != "" && name != "socket" && name != "setsockopt" { // those that have several answers
				t.Errorf("%s is in %q and in %q", name, other, g.Name)
			}
			seen[name] = g.Name
		}
	}
	for _, arch := range []string{"amd64", "arm64"} {
		for _, s := range readProfile(t, arch).Syscalls {
			if (s.Action == "SCMP_ACT_ERRNO") != (s.ErrnoRet != nil) {
				t.Errorf("%v: %s %v", s.Names, s.Action, s.ErrnoRet)
			}
		}
	}
}

// An engine passes over a name that it does not know: a slip of the pen would
// refuse a call, and nothing would say so.
func TestSeccompNamesAreSystemCalls(t *testing.T) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+arch+".go"))
		if err != nil {
			t.Fatal(err)
		}
		known := map[string]bool{}
		for _, m := range regexp.MustCompile(`(?m)^\tSYS_(\w+)\s`).FindAllStringSubmatch(string(source), -1) {
			known[strings.ToLower(m[1])] = true
		}
		for _, s := range readProfile(t, arch).Syscalls {
			for _, name := range s.Names {
				if !known[name] {
					t.Errorf("%s has no system call %s", arch, name)
				}
			}
		}
	}
}

// Case I6, without a kernel: both architectures. sandbox/docker makes the calls.
func TestSeccompDecides(t *testing.T) {
	const garbage = 1 << 40 // above what the kernel looks at
	cases := []struct {
		name string
		args [6]uint64
		want any
	}{
		{"openat", [6]uint64{}, "allow"},
		{"clone3", [6]uint64{}, 38},
		{"clone", [6]uint64{17}, "allow"},
		{"clone", [6]uint64{0x3d0f00}, "allow"}, // a thread
		{"clone", [6]uint64{0x10000000 | 17}, 1},
		{"clone", [6]uint64{0x20000}, 1},
		{"unshare", [6]uint64{}, 1},
		{"mount", [6]uint64{}, 1},
		{"io_uring_setup", [6]uint64{}, 38},
		{"sync", [6]uint64{}, 0},
		{"ptrace", [6]uint64{}, "allow"},
		{"personality", [6]uint64{0x40000}, "allow"},
		{"personality", [6]uint64{0x400000}, 1},
		{"ioctl", [6]uint64{0, 0x5401}, "allow"},
		{"ioctl", [6]uint64{0, 0xffffffff80045430}, "allow"},
		{"ioctl", [6]uint64{0, 0x5412}, 1},
		{"ioctl", [6]uint64{0, 0x5412 | garbage}, 1},
		{"ioctl", [6]uint64{0, 0x541c}, 1},
		{"ioctl", [6]uint64{0, 0x5423}, 1},
		{"socket", [6]uint64{1, 1, 0}, "allow"},
		{"socket", [6]uint64{2, 1 | 0x80800, 6}, "allow"},
		{"socket", [6]uint64{10, 2, 17}, "allow"},
		{"socket", [6]uint64{16, 3, 0}, "allow"},
		{"socket", [6]uint64{16, 3, 9}, 93},
		{"socket", [6]uint64{2, 1, 262}, 93},
		{"socket", [6]uint64{10, 1 | 0x80800, 262}, 93},
		{"socket", [6]uint64{40, 1, 0}, 97},
		{"socket", [6]uint64{40 | garbage, 1, 0}, 97},
		{"socket", [6]uint64{2 | garbage, 1, 0}, 97},
		{"socket", [6]uint64{2, 1, 262 | garbage}, 1},
		{"socket", [6]uint64{16, 3, garbage | 9}, 93},
		{"socket", [6]uint64{2, 5, 132}, 1},
		{"socket", [6]uint64{2, 3, 1}, 1},
		{"socketpair", [6]uint64{1, 1, 0}, "allow"},
		{"setsockopt", [6]uint64{3, 1, 2}, "allow"}, // SO_REUSEADDR
		{"setsockopt", [6]uint64{3, 6, 7}, "allow"}, // of TCP
		{"setsockopt", [6]uint64{3, 41, 18}, "allow"},
		{"setsockopt", [6]uint64{3, 1, 7}, 0},
		{"setsockopt", [6]uint64{3, 1, 8}, 0},
		{"setsockopt", [6]uint64{3, 1 | garbage, 8 | garbage}, 0},
		{"setsockopt", [6]uint64{3, 1, 18}, 92},
		{"socketpair", [6]uint64{40, 1, 0}, 1},
	}
	for _, arch := range []string{"amd64", "arm64"} {
		p := readProfile(t, arch)
		for _, c := range cases {
			if got := p.decide(c.name, c.args); got != c.want {
				t.Errorf("%s %s %x: %v, want %v", arch, c.name, c.args[:3], got, c.want)
			}
		}
		// The agent's own, by the system calls of its work.
		for _, name := range strings.Fields(`execve wait4 waitid setuid setgid setgroups setresuid setresgid prlimit64 kill
			tgkill pidfd_send_signal pidfd_open bind listen connect accept4 epoll_create1 epoll_ctl epoll_pwait eventfd2 pipe2 splice
			tee sendfile openat openat2 renameat2 unlinkat memfd_create sched_setaffinity sched_getaffinity prctl getrandom fallocate
			statx mremap madvise fcntl recvmsg sendmsg setsid setpgid utimensat fchownat readlinkat getdents64 faccessat2 close_range`) {
			if got := p.decide(name, [6]uint64{}); got != "allow" {
				t.Errorf("%s %s: %v", arch, name, got)
			}
		}
	}
	legacy := readProfile(t, "arm64").decide("fork", [6]uint64{})
	if legacy != 1 || readProfile(t, "amd64").decide("fork", [6]uint64{}) != "allow" {
		t.Errorf("fork on arm64: %v", legacy)
	}
}

// No two rules disagree about any socket, and nothing but the four families passes.
func TestSeccompSocketsAreDecidedOnce(t *testing.T) {
	p := readProfile(t, runtime.GOARCH)
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.OneOf(rapid.Uint64Range(0, 48), rapid.Uint64Range(250, 270), rapid.Uint64())
		args := [6]uint64{word.Draw(t, "family"), word.Draw(t, "type"), word.Draw(t, "protocol")}
		got := p.decide("socket", args)
		if got == "ambiguous" {
			t.Fatalf("%x: two answers", args)
		}
		family, proto := uint32(args[0]), uint32(args[2]) // as the kernel reads them
		netlink := family == 16 && proto == 0
		inet := (family == 2 || family == 10) && (proto == 0 || proto == 1 || proto == 6 || proto == 17 || proto == 58)
		if got == "allow" && family != 1 && !netlink && !inet {
			t.Fatalf("%x is allowed", args)
		}
	})
}

// What except32 admits is what the kernel takes for something else.
func TestSeccompExceptions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		refused := rapid.SliceOfN(rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(0x5400, 0x5430)), 1, 4).Draw(t, "refused")
		v := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0x5400, 0x5430), rapid.Map(rapid.Uint32(), func(hi uint32) uint64 {
			return uint64(hi)<<32 | uint64(refused[0])
		})).Draw(t, "value")
		admitted := 0
		for _, match := range sandbox.Except32(1, refused...) {
			if holds(match, [6]uint64{0, v}) {
				admitted++
			}
		}
		want := 1
		if slices.Contains(refused, uint32(v)) {
			want = 0
		}
		if admitted != want {
			t.Fatalf("%#x is admitted by %d alternatives, refused are %#x", v, admitted, refused)
		}
	})
}
