package ctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/boxed-mesh/boxed/internal/table"
)

// engineInfo is the part of the engine's own description that doctor judges.
type engineInfo struct {
	ServerVersion      string
	OSType             string
	Architecture       string
	DockerRootDir      string
	Driver             string
	CgroupVersion      string
	CgroupDriver       string
	DefaultRuntime     string
	Runtimes           map[string]json.RawMessage
	SecurityOptions    []string
	LiveRestoreEnabled bool
	MemoryLimit        bool
	PidsLimit          *bool // absent before 20.10
	CPUCfsQuota        bool  `json:"CpuCfsQuota"`
	Warnings           []string
	NCPU               int
	MemTotal           int64
}

// askEngine asks the engine over its socket, without its library.
func askEngine(ctx context.Context, socket, path string, out any) error {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	ctx, cancel := context.WithTimeout(ctx, doctorWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://engine"+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return json.Unmarshal(body, out)
}

// engine looks at the engine. What it says of itself is zero if it does not
// answer.
func (h host) engine(ctx context.Context) (engineInfo, []check) {
	var info engineInfo
	c := ok("engine", "the engine answers", "")
	socket := h.path(h.socket)
	if strings.Contains(h.socket, "://") {
		return info, []check{c.fail(h.socket+" is not on this host", "boxed-node needs the engine of its own host: unset DOCKER_HOST")}
	}
	err := askEngine(ctx, socket, "/info", &info)
	switch {
	case err == nil:
	case errors.Is(err, os.ErrNotExist):
		return info, []check{c.fail("there is no "+h.socket, "install Docker (apt-get install docker.io) and start it; make up does both")}
	case errors.Is(err, syscall.EACCES):
		return info, []check{c.fail(h.socket+" is not open to you", "run this with sudo, or join the group docker: that is as much as being root")}
	case errors.Is(err, syscall.ECONNREFUSED):
		return info, []check{c.fail("nobody answers at "+h.socket, "start it: systemctl start docker, or make up where there is no systemd")}
	default:
		return info, []check{c.fail(oneLine(err.Error()), "its own log says more: journalctl -u docker")}
	}
	c.Detail = fmt.Sprintf("version %s, %s, %s on %s", info.ServerVersion, info.Architecture, info.Driver, info.DockerRootDir)
	return info, append([]check{c}, judgeEngine(info)...)
}

// oldestEngine is that of Debian 11 and 12.
var oldestEngine = [2]int{20, 10}

// judgeEngine says what is wrong with an engine that answers.
func judgeEngine(info engineInfo) []check {
	version := ok("engine_version", "the engine is new enough", info.ServerVersion)
	var major, minor int
	if n, _ := fmt.Sscanf(info.ServerVersion, "%d.%d", &major, &minor); n == 2 &&
		(major < oldestEngine[0] || major == oldestEngine[0] && minor < oldestEngine[1]) {
		version = version.fail(info.ServerVersion, fmt.Sprintf("upgrade it to %d.%d or newer", oldestEngine[0], oldestEngine[1]))
	}
	isolation := ok("engine_seccomp", "the engine filters system calls", "yes")
	if !slices.ContainsFunc(info.SecurityOptions, func(s string) bool { return strings.HasPrefix(s, "name=seccomp") }) {
		isolation = isolation.fail("no", "start dockerd on a kernel with seccomp, and use an engine that was built with it")
	}
	limits := ok("engine_limits", "the engine can limit sandboxes", "memory, processor, processes")
	var lacking []string
	for what, has := range map[string]bool{"memory": info.MemoryLimit, "processor": info.CPUCfsQuota, "processes": info.PidsLimit == nil || *info.PidsLimit} {
		if !has {
			lacking = append(lacking, what)
		}
	}
	if slices.Sort(lacking); len(lacking) > 0 {
		limits = limits.fail("not "+strings.Join(lacking, ", "), "see cgroups above")
	}
	checks := []check{version, judgeRuntimes(info), isolation, limits}
	live := ok("engine_live_restore", "sandboxes outlive a restart of the engine", "yes")
	if !info.LiveRestoreEnabled {
		live = live.warn("no", `put {"live-restore": true} into /etc/docker/daemon.json and reload dockerd (kill -HUP)`)
	}
	checks = append(checks, live)
	for _, option := range info.SecurityOptions {
		if option == "name=rootless" || option == "name=userns" {
			checks = append(checks, ok("engine_mode", "the engine runs as usual", "").
				warn(strings.TrimPrefix(option, "name=")+" mode", "boxed is tried with an engine that runs as root without user namespaces"))
		}
	}
	return checks
}

func judgeRuntimes(info engineInfo) check {
	names := sortedKeys(info.Runtimes)
	c := ok("engine_runtimes", "the engine has a runtime", strings.Join(names, ", ")+" (default: "+info.DefaultRuntime+")")
	if len(names) == 0 {
		return c.fail("none", "install runc")
	}
	return c
}

func oneLine(s string) string { return table.Clip(strings.Join(strings.Fields(s), " "), 300) }
