package node

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

// Bounds of a spec.
const (
	maxPath      = 4096
	maxFileBytes = 8 << 20 // of all files of a spec; more goes as tar
	minMemory    = boxed.MemoryHeadroom + 16*boxed.MiB
	minCPUs      = 0.05
	maxLimit     = 1 << 48 // of any limit, so that sums of them do not overflow
	minIdle      = boxed.Duration(time.Second)
)

func invalid(field, format string, args ...any) error {
	return boxed.Errorf(boxed.CodeInvalid, "%s: %s", field, fmt.Sprintf(format, args...)).WithField(field)
}

// check judges a completed spec, and says in its egress who asks.
func (h *host) check(spec *boxed.Spec, who boxed.Principal) error {
	if err := h.checkEgress(spec, who); err != nil {
		return err
	}
	if w := spec.Workspace; w != nil && w.Kind != "memory" {
		return boxed.Errorf(boxed.CodeUnavailable, "workspace.kind: this release has memory only, not %q", w.Kind).WithField("workspace.kind")
	}
	for _, err := range []error{
		checkName(spec.Name), checkLabels(spec.Labels), checkEnv(spec.Env), checkPath("dir", spec.Dir),
		h.checkTTL("ttl", spec.TTL, who), checkIdle(spec.IdleTimeout), h.checkLimits(spec.Limits), checkFiles(spec.Files),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

func checkName(name string) error {
	if name != "" && !boxed.ValidName(name) {
		return invalid("name", "a name is 1 to 40 of a-z, 0-9 and -, and neither starts nor ends with -")
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > boxed.MaxLabels {
		return invalid("labels", "%d labels, at most %d are allowed", len(labels), boxed.MaxLabels)
	}
	for key, value := range labels {
		if key == "" || len(key) > boxed.MaxLabelKey || !utf8.ValidString(key) || strings.ContainsAny(key, "=\x00\n") {
			return invalid("labels", "the key %.80q must have 1 to %d bytes, and no = in it", key, boxed.MaxLabelKey)
		}
		if len(value) > boxed.MaxLabelValue || !utf8.ValidString(value) || strings.ContainsRune(value, 0) {
			return invalid("labels."+key, "a value has at most %d bytes", boxed.MaxLabelValue)
		}
	}
	return nil
}

func checkEnv(env map[string]string) error {
	if len(env) > boxed.MaxEnv {
		return invalid("env", "%d variables, at most %d are allowed", len(env), boxed.MaxEnv)
	}
	size := 0
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return invalid("env", "the variable %.80q has an empty name, an = in its name, or a zero byte", name)
		}
		size += len(name) + len(value)
	}
	if size > boxed.MaxEnvBytes {
		return invalid("env", "%d bytes of variables, at most %d are allowed", size, boxed.MaxEnvBytes)
	}
	return nil
}

// checkRecorded judges what a record will hold, the template's variables
// included: as JSON a byte may take six.
func checkRecorded(env map[string]string) error {
	encoded, err := json.Marshal(env)
	if err != nil {
		return err
	}
	if len(encoded) > boxed.MaxEnvJSON {
		return invalid("env", "%d bytes of variables as JSON, the template's included; at most %d are allowed", len(encoded), boxed.MaxEnvJSON)
	}
	return nil
}

func checkPath(field, p string) error {
	if !path.IsAbs(p) || len(p) > maxPath || strings.ContainsRune(p, 0) || path.Clean(p) != strings.TrimSuffix(p, "/") && p != "/" {
		return invalid(field, "%.80q must be an absolute path without . and .. in it, of at most %d bytes", p, maxPath)
	}
	return nil
}

func (h *host) checkTTL(field string, ttl boxed.Duration, who boxed.Principal) error {
	switch {
	case ttl == boxed.Never && !who.Admin():
		return boxed.Errorf(boxed.CodeForbidden, "%s: only an admin's sandboxes may live for ever; the highest is %s", field, h.cfg.MaxTTL).WithField(field)
	case ttl == boxed.Never:
		return nil
	case ttl < boxed.Duration(time.Second) || ttl > h.cfg.MaxTTL:
		return invalid(field, "%s must be between 1s and %s", ttl, h.cfg.MaxTTL)
	}
	return nil
}

func checkIdle(idle boxed.Duration) error {
	if idle != 0 && idle < minIdle {
		return invalid("idle_timeout", "%s is too short; the shortest is %s", idle, minIdle)
	}
	return nil
}

func (h *host) checkLimits(l boxed.Limits) error {
	for _, c := range []struct {
		field              string
		value, low, highst int64
	}{
		{"memory_bytes", l.MemoryBytes, minMemory, h.cfg.Highest.MemoryBytes},
		{"processes", l.Processes, 4, h.cfg.Highest.Processes},
		{"open_files", l.OpenFiles, 32, h.cfg.Highest.OpenFiles},
		{"workspace_bytes", l.WorkspaceBytes, boxed.MiB, h.cfg.Highest.WorkspaceBytes},
		{"home_bytes", l.HomeBytes, boxed.MiB, h.cfg.Highest.HomeBytes},
		{"tmp_bytes", l.TmpBytes, boxed.MiB, h.cfg.Highest.TmpBytes},
		{"output_bytes", l.OutputBytes, boxed.MiB, h.cfg.Highest.OutputBytes},
		{"shm_bytes", l.ShmBytes, boxed.MiB, h.cfg.Highest.ShmBytes},
	} {
		if highest := cmp.Or(c.highst, maxLimit); c.value < c.low || c.value > highest {
			return invalid("limits."+c.field, "%d must be between %d and %d", c.value, c.low, highest)
		}
	}
	if !(l.CPUs >= minCPUs) || (h.cfg.Highest.CPUs > 0 && l.CPUs > h.cfg.Highest.CPUs) {
		return invalid("limits.cpus", "%g must be at least %g, and at most what the operator allows", l.CPUs, minCPUs)
	}
	if sum := l.TmpfsBytes(); sum > l.MemoryBytes-boxed.MemoryHeadroom {
		return invalid("limits.memory_bytes", "%d MiB leave no room for %d MiB of tmpfs and %d MiB besides; ask for more memory or smaller ones",
			l.MemoryBytes/boxed.MiB, sum/boxed.MiB, boxed.MemoryHeadroom/boxed.MiB)
	}
	return nil
}

func checkFiles(files []boxed.File) error {
	if len(files) > boxed.MaxFiles {
		return invalid("files", "%d files, at most %d are allowed; send more as tar", len(files), boxed.MaxFiles)
	}
	size := 0
	for i, f := range files {
		field := fmt.Sprintf("files[%d]", i)
		if f.Path == "" || len(f.Path) > maxPath || strings.ContainsRune(f.Path, 0) || slices.Contains(strings.Split(f.Path, "/"), "..") {
			return invalid(field+".path", "%.80q must be a path without .. in it, of at most %d bytes", f.Path, maxPath)
		}
		if f.Mode > 0o777 {
			return invalid(field+".mode", "%#o has more than permission bits", f.Mode)
		}
		size += len(f.Content)
	}
	if size > maxFileBytes {
		return boxed.Errorf(boxed.CodeTooLarge, "files of %d bytes, at most %d are allowed in a create; send them as tar", size, maxFileBytes).WithField("files")
	}
	return nil
}

// checkExec judges what is checked before the sandbox is looked at.
func checkExec(req boxed.ExecRequest) error {
	if err := checkEnv(req.Env); err != nil {
		return err
	}
	if req.MaxOutput < 0 {
		return invalid("output_limit", "%d is negative", req.MaxOutput)
	}
	return nil
}
