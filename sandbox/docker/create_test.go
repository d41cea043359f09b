package docker_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/system"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

// facts.md: gVisor has no loopback with NetworkDisabled, and runs its own
// threads in the container's cgroup.
func TestRuntimesWithAKernelOfTheirOwn(t *testing.T) {
	box := sandbox.Box{ID: boxed.NewID(testNode), Nonce: "n", Limits: boxed.DefaultLimits(), UID: 200000, Mount: "/m", Agent: "/a"}
	shared, sharedHost := docker.SpecOf(box, true, nil, nil, nil)
	own, ownHost := docker.SpecOf(box, false, nil, nil, nil)
	if !shared.NetworkDisabled || own.NetworkDisabled || ownHost.NetworkMode != "none" {
		t.Error("network")
	}
	if *sharedHost.PidsLimit != 256+32 || *ownHost.PidsLimit < 6*256+76 {
		t.Errorf("pids %d, %d", *sharedHost.PidsLimit, *ownHost.PidsLimit)
	}
	if len(sharedHost.Sysctls) == 0 || len(ownHost.Sysctls) != 0 {
		t.Error("sysctls")
	}
	for _, u := range ownHost.Ulimits {
		if u.Name == "nproc" && u.Hard != 128 { // at 512 MiB
			t.Errorf("nproc %d", u.Hard)
		}
	}
}

// Case I5: each variable and label of the image is taken away, ours stay.
func TestImageVariablesAndLabelsAreTakenAway(t *testing.T) {
	box := sandbox.Box{ID: boxed.NewID(testNode), Nonce: "n", Limits: boxed.DefaultLimits(), UID: 200000, Mount: "/m", Agent: "/a"}
	c, h := docker.SpecOf(box, true, []string{"LD_PRELOAD", "GOGC", "A B", "LD_PRELOAD"}, []string{"x", "sh.boxed.nonce"}, []string{"/tmp", "/data"})
	want := append(sandbox.AgentEnv(), "PATH", "HOSTNAME", "TERM", "LD_PRELOAD", "A B")
	if !slices.Equal(c.Env, want) {
		t.Errorf("%q", c.Env)
	}
	if c.Labels["x"] != "" || c.Labels["sh.boxed.nonce"] != "n" {
		t.Errorf("%v", c.Labels)
	}
	if !strings.Contains(h.Tmpfs["/tmp"], "mode=1777,uid=200000") || !strings.Contains(h.Tmpfs["/data"], "nodev") || len(h.Tmpfs) != 6 {
		t.Errorf("%v", h.Tmpfs)
	}
}

func TestEnginesAsTheyDescribeThemselves(t *testing.T) {
	info := system.Info{
		Architecture: "aarch64", CgroupVersion: "2", CgroupDriver: "systemd", OSType: "linux", SecurityOptions: []string{"name=rootless"},
		Runtimes: map[string]system.RuntimeWithStatus{
			"runc": {Runtime: system.Runtime{Path: "runc"}}, "io.containerd.runc.v2": {}, "crun": {Runtime: system.Runtime{Path: "/usr/bin/crun-1.8"}},
			"gvisor": {Runtime: system.Runtime{Path: "/usr/local/bin/runsc"}}, "runsc": {Runtime: system.Runtime{Type: "io.containerd.runsc.v1"}},
			"kata": {Runtime: system.Runtime{Type: "io.containerd.kata.v2"}},
			"odd":  {Runtime: system.Runtime{Type: "io.containerd.runc.v2", Options: map[string]any{"BinaryName": "/x/runsc"}}},
		},
	}
	arch, cgroup, systemd, shares, problems := docker.Describe(info)
	if arch != "arm64" || cgroup != 2 || !systemd {
		t.Errorf("%s %d %v", arch, cgroup, systemd)
	}
	for name, want := range map[string]bool{"runc": true, "io.containerd.runc.v2": true, "crun": true, "gvisor": false, "runsc": false, "kata": false, "odd": false} {
		if shares[name] != want {
			t.Errorf("%s shares this kernel: %v", name, shares[name])
		}
	}
	all := strings.Join(problems, "\n")
	for _, say := range []string{"seccomp", "rootless", "memory is not limited", "live-restore", "pids"} {
		if !strings.Contains(all, say) {
			t.Errorf("does not say %q:\n%s", say, all)
		}
	}
}

// Texts that engines and registries really write.
func TestReasonsOfFailedPulls(t *testing.T) {
	for text, want := range map[string]boxed.ImageReason{
		`manifest for 127.0.0.1:5000/team/image:2 not found: manifest unknown: manifest unknown`:                                                     boxed.ImageNotFound,
		`pull access denied for nosuch, repository does not exist or may require 'docker login': denied: requested access to the resource is denied`: boxed.ImageNotFound,
		`unauthorized: authentication required`: boxed.ImageUnauthorized,
		`Get "https://ghcr.io/v2/x/y/manifests/1": denied: denied: requested access to the resource is denied`:                          boxed.ImageUnauthorized,
		`Head "https://reg.example/v2/x/manifests/1": no basic auth credentials`:                                                        boxed.ImageUnauthorized,
		`Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io on 127.0.0.11:53: no such host`:                  boxed.ImageNoRoute,
		`Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io: Temporary failure in name resolution`:           boxed.ImageNoRoute,
		`Get "https://registry-1.docker.io/v2/": dial tcp 1.2.3.4:443: connect: network is unreachable`:                                 boxed.ImageNoRoute,
		`Get "https://registry-1.docker.io/v2/": dial tcp 1.2.3.4:443: i/o timeout`:                                                     boxed.ImageNoRoute,
		`Get "https://r/v2/": net/http: request canceled while waiting for connection (Client.Timeout exceeded while awaiting headers)`: boxed.ImageTimeout,
		`Get "https://r/v2/": net/http: TLS handshake timeout`:                                                                          boxed.ImageTimeout,
		`failed to register layer: write /usr/lib/x: no space left on device`:                                                           boxed.ImageNoSpace,
		`no matching manifest for linux/arm64/v8 in the manifest list entries: no match for platform in manifest: not found`:            boxed.ImageUnusable,
		`image operating system "windows" cannot be used on this platform`:                                                              boxed.ImageUnusable,
		`failed to resolve reference "docker.io/library/nosuch:1": docker.io/library/nosuch:1: not found`:                               boxed.ImageNotFound,
		`something nobody foresaw`: "",
	} {
		if got := docker.PullReason(errors.New(text)); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

// Case I20: what an engine or a registry writes is inert in a message.
func TestMessagesAreOneInertLine(t *testing.T) {
	got := docker.OneLine(errors.New("Error response from daemon: a\nb\x1b[31mc\u009b1m\xff" + strings.Repeat("x", 1000)))
	if strings.ContainsAny(got, "\n\x1b\u009b") || len(got) > 420 || !strings.HasPrefix(got, "a b") {
		t.Errorf("%q", got)
	}
}

func TestConfigurationMistakes(t *testing.T) {
	for name, cfg := range map[string]docker.Config{
		"no node": {DataDir: "/x"}, "no directory": {NodeID: testNode}, "a bad address": {NodeID: testNode, DataDir: "/x", Host: "nonsense"},
	} {
		if _, err := docker.New(cfg); err == nil {
			t.Errorf("%s passes", name)
		}
	}
	a, err := docker.New(docker.Config{NodeID: testNode, DataDir: "/x"})
	b, err2 := docker.New(docker.Config{NodeID: testNode, DataDir: "/x/../y"})
	if err != nil || err2 != nil || a.Instance() == b.Instance() {
		t.Errorf("two data directories have one name: %v %v", err, err2)
	}
}
