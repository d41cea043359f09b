package scheduler_test

import (
	"testing"

	"github.com/boxed-mesh/boxed/scheduler"
)

func TestIsolationByTheNameOfARuntime(t *testing.T) {
	for runtime, want := range map[string]string{
		"runc": "container", "crun": "container", "youki": "container", "io.containerd.runc.v2": "container", "": "container",
		"runsc": "gvisor", "runsc-kvm": "gvisor", "io.containerd.runsc.v1": "gvisor", "gvisor": "gvisor",
		"kata": "vm", "kata-fc": "vm", "kata-runtime": "vm", "io.containerd.kata.v2": "vm", "io.containerd.kata-qemu.v2": "vm",
		"mine": "container", "notkata": "container",
	} {
		if got := scheduler.IsolationOf(runtime); got != want {
			t.Errorf("%s gives %s, want %s", runtime, got, want)
		}
	}
}

func TestRuntimeThatANodeWouldUse(t *testing.T) {
	all := []string{"kata", "runsc", "runc", "crun"}
	for name, tc := range map[string]struct {
		runtimes  []string
		def       string
		runtime   string
		isolation string
		want      string
	}{
		"the one asked for":               {all, "runc", "crun", "", "crun"},
		"the one asked for, not there":    {all, "runc", "youki", "", ""},
		"the default":                     {all, "crun", "", "", "crun"},
		"a default that does not work":    {all, "youki", "", "", ""},
		"no default":                      {all, "", "", "", ""},
		"the default isolates enough":     {all, "runc", "", "container", "runc"},
		"the default isolates more":       {all, "kata", "", "container", "kata"},
		"the weakest that is enough":      {all, "runc", "", "gvisor", "runsc"},
		"a stronger one will do":          {[]string{"runc", "kata"}, "runc", "", "gvisor", "kata"},
		"the first of equals":             {[]string{"runsc-kvm", "runsc"}, "runc", "", "gvisor", "runsc-kvm"},
		"any container, none by default":  {all, "", "", "container", "runc"},
		"none isolates enough":            {[]string{"runc", "runsc"}, "runc", "", "vm", ""},
		"asked for and isolates more":     {all, "runc", "kata", "gvisor", "kata"},
		"asked for and isolates less":     {all, "runc", "runc", "gvisor", ""},
		"an isolation that nobody gives":  {all, "runc", "", "faraday", ""},
		"nothing works":                   {nil, "", "", "", ""},
		"a name that is empty is no name": {[]string{""}, "", "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := scheduler.NodeState{Runtimes: tc.runtimes, Default: tc.def}
			if got := scheduler.RuntimeFor(n, scheduler.Ask{Runtime: tc.runtime, Isolation: tc.isolation}); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}
