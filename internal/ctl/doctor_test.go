//go:build linux

package ctl

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

// fakeHost is a host whose files are given, and whose engine answers with info
// ("" if nobody does).
func fakeHost(t *testing.T, files map[string]string, info string) host {
	t.Helper()
	h := host{root: t.TempDir(), socket: "/engine.sock", data: "/var/lib/boxed"}
	for name, content := range files {
		if err := os.MkdirAll(filepath.Dir(h.path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(h.path(name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if info != "" {
		l, err := net.Listen("unix", h.path(h.socket))
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/info" {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = w.Write([]byte(info))
		})}
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { s.Close() })
	}
	return h
}

const goodEngine = `{"ServerVersion":"20.10.24","Runtimes":{"runc":{},"runsc":{}},"DefaultRuntime":"runc","SecurityOptions":["name=seccomp,profile=default"],
	"LiveRestoreEnabled":true,"MemoryLimit":true,"CpuCfsQuota":true,"PidsLimit":true,"DockerRootDir":"/"}`

func TestDoctorFindsWhatIsWrongWithAHost(t *testing.T) {
	healthy := map[string]string{
		"/proc/sys/kernel/osrelease": "6.1.0-18-amd64", "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids",
		"/proc/sys/kernel/seccomp/actions_avail": "kill_process errno allow", "/proc/sys/kernel/core_pattern": "core",
		"/proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 8000000 kB\n", "/etc/subuid": "ada:100000:65536\n", "/etc/passwd": "ada:x:1000:1000::/:/bin/sh\n",
	}
	tests := map[string]struct {
		name, path, content string
		engine              string
		check, want         string
	}{
		"healthy kernel":         {check: "kernel", want: resultOK},
		"old kernel":             {path: "/proc/sys/kernel/osrelease", content: "4.19.0", check: "kernel", want: resultWarning},
		"cgroups v2":             {check: "cgroups", want: resultOK},
		"no memory controller":   {path: "/sys/fs/cgroup/cgroup.controllers", content: "cpu pids", check: "cgroups", want: resultFailed},
		"no seccomp":             {path: "/proc/sys/kernel/seccomp/actions_avail", content: "", check: "seccomp", want: resultFailed},
		"a handler of crashes":   {path: "/proc/sys/kernel/core_pattern", content: "|/usr/share/apport", check: "core_pattern", want: resultWarning},
		"little memory":          {path: "/proc/meminfo", content: "MemAvailable: 1000 kB", check: "memory", want: resultWarning},
		"subordinate uids":       {path: "/etc/subuid", content: "ada:165536:65536", check: "uids", want: resultWarning},
		"a user in the range":    {path: "/etc/passwd", content: "eve:x:200001:1::/:/bin/sh", check: "uids", want: resultWarning},
		"free uids":              {check: "uids", want: resultOK},
		"no engine":              {engine: "none", check: "engine", want: resultFailed},
		"an engine":              {check: "engine", want: resultOK},
		"an engine in pieces":    {engine: "not json", check: "engine", want: resultFailed},
		"an old engine":          {engine: `{"ServerVersion":"19.03.1"}`, check: "engine_version", want: resultFailed},
		"an engine without":      {engine: `{"ServerVersion":"24.0.1"}`, check: "engine_limits", want: resultFailed},
		"an engine's runtimes":   {check: "engine_runtimes", want: resultOK},
		"an engine's filter":     {engine: `{"ServerVersion":"24.0.1"}`, check: "engine_seccomp", want: resultFailed},
		"an engine's restart":    {engine: `{"ServerVersion":"24.0.1"}`, check: "engine_live_restore", want: resultWarning},
		"an engine without root": {engine: `{"ServerVersion":"24.0.1","SecurityOptions":["name=rootless"]}`, check: "engine_mode", want: resultWarning},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{}
			for k, v := range healthy {
				files[k] = v
			}
			if tt.path != "" {
				files[tt.path] = tt.content
			}
			engine := firstOf(tt.engine, goodEngine)
			if engine == "none" {
				engine = ""
			}
			for _, c := range hostChecks(t.Context(), fakeHost(t, files, engine)) {
				if (c.Result == resultFailed || c.Result == resultWarning) != (c.Remedy != "") {
					t.Errorf("%s is %s with the remedy %q", c.Name, c.Result, c.Remedy)
				}
				if c.Name == tt.check {
					if c.Result != tt.want {
						t.Errorf("%s is %s (%s), want %s", c.Name, c.Result, c.Detail, tt.want)
					}
					return
				}
			}
			t.Errorf("there is no check %s", tt.check)
		})
	}
}
