package sandbox

import (
	"encoding/json"

	"github.com/boxed-mesh/boxed"
)

// Errnos of the profile. They are the kernel's numbers on amd64 and arm64, not
// this process's: boxed-node may be built on another system than it serves.
const (
	errnoEPERM           = 1
	errnoENOSYS          = 38
	errnoENOPROTOOPT     = 92
	errnoEPROTONOSUPPORT = 93
	errnoEAFNOSUPPORT    = 97
)

// Seccomp is the system-call filter of every process of a sandbox, the agent
// included, as the JSON that Docker's "seccomp=" option takes. arch is amd64 or
// arm64; another is CodeUnavailable. The text is the same for the same arch.
//
// What no rule names is refused with EPERM. ENOSYS would be the friendlier
// default, but engines before 23 do not know defaultErrnoRet, and one profile
// has to mean the same everywhere; runc answers ENOSYS by itself to calls that
// are newer than all of those named here, which is where libc's fall-backs
// matter (crun 1.8 does not). Older calls for which programs have a fall-back are
// in [absentGroups] and answer ENOSYS, as a kernel without them would.
//
// Only the native architecture is listed: 32-bit and x32 entry end the thread
// with SIGSYS, and every sandbox starts about 22 ms sooner.
func Seccomp(arch string) ([]byte, error) {
	native := map[string]string{"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}[arch]
	if native == "" {
		return nil, boxed.Errorf(boxed.CodeUnavailable, "no seccomp profile for %s: run boxed-node on amd64 or arm64", arch)
	}
	p := profile{DefaultAction: actErrno, Architectures: []string{native}}
	for _, g := range append(allowGroups(), answerGroups()...) {
		names := g.Names
		if arch == "amd64" {
			names = append(append([]string(nil), names...), g.Legacy...)
		}
		if len(names) == 0 {
			continue
		}
		for _, match := range g.matches() {
			p.Syscalls = append(p.Syscalls, rule{Names: names, Action: g.Action, Errno: g.errno(), Args: match})
		}
	}
	return json.Marshal(p)
}

// profile is Docker's form of a seccomp profile.
type profile struct {
	DefaultAction string   `json:"defaultAction"`
	Architectures []string `json:"architectures"`
	Syscalls      []rule   `json:"syscalls"`
}

type rule struct {
	Names  []string `json:"names"`
	Action string   `json:"action"`
	Errno  *uint    `json:"errnoRet,omitempty"`
	Args   []arg    `json:"args,omitempty"`
}

// Actions and comparisons of the profile.
const (
	actAllow = "SCMP_ACT_ALLOW"
	actErrno = "SCMP_ACT_ERRNO"

	opEqual  = "SCMP_CMP_EQ"
	opAbove  = "SCMP_CMP_GT"
	opMasked = "SCMP_CMP_MASKED_EQ" // (argument & Value) == ValueTwo
)

// arg is one condition on one argument. The kernel's filter compares all 64
// bits of an argument, while most calls look at the lower 32 only: a condition
// must hold for what it admits, never merely differ from what it refuses, or
// garbage in the upper half walks around it.
type arg struct {
	Index    uint   `json:"index"`
	Value    uint64 `json:"value"`
	ValueTwo uint64 `json:"valueTwo"`
	Op       string `json:"op"`
}

// group is a set of calls that share an answer and a reason for it.
type group struct {
	Name   string
	Reason string
	Action string
	Errno  uint     // of actErrno
	Names  []string // on every architecture
	Legacy []string // on amd64 only: arm64 never had them
	Match  [][]arg  // alternatives, each a conjunction; empty: whatever the arguments
}

func (g group) matches() [][]arg {
	if len(g.Match) == 0 {
		return [][]arg{nil}
	}
	return g.Match
}

func (g group) errno() *uint {
	if g.Action != actErrno {
		return nil
	}
	e := g.Errno
	return &e
}

// except32 gives alternatives that together admit every value of argument index
// whose lower 32 bits are none of refused: "differs from" in a form that looks
// at the bits which the kernel looks at. It walks the bits from the highest;
// whatever leaves all of refused behind is admitted.
func except32(index uint, refused ...uint32) [][]arg {
	var out [][]arg
	var walk func(bit int, mask, prefix uint32, left []uint32)
	walk = func(bit int, mask, prefix uint32, left []uint32) {
		if len(left) == 0 {
			out = append(out, []arg{{Index: index, Value: uint64(mask), ValueTwo: uint64(prefix), Op: opMasked}})
			return
		}
		if bit < 0 {
			return
		}
		b := uint32(1) << bit
		var ones, zeros []uint32
		for _, v := range left {
			if v&b != 0 {
				ones = append(ones, v)
			} else {
				zeros = append(zeros, v)
			}
		}
		walk(bit-1, mask|b, prefix, zeros)
		walk(bit-1, mask|b, prefix|b, ones)
	}
	walk(31, 0, 0, refused)
	return out
}
