package sandbox

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
)

// Bounds of an image's environment. What lies beyond is dropped.
const (
	maxEnvVars  = 128
	maxEnvName  = 128      // bytes
	maxEnvValue = 32 << 10 // bytes of one
	maxEnvBytes = 64 << 10 // of all, names included
	maxPathDirs = 64
)

// DefaultPath is PATH where an image has none that can be used.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// ourEnv are variables that boxed sets for each exec, or that say where or as
// whom one is: the image's would be wrong.
var ourEnv = map[string]bool{
	"HOME": true, "USER": true, "LOGNAME": true, "USERNAME": true, "SHELL": true, "HOSTNAME": true, "PWD": true,
	"OLDPWD": true, "SHLVL": true, "_": true, "TERM": true, "MAIL": true, "TMPDIR": true, "TMP": true, "TEMP": true,
	"XDG_RUNTIME_DIR": true, "UID": true, "EUID": true, "PPID": true,
}

// hostileEnv are variables by which a program or the agent's own helpers would
// load or log something before they have begun.
var hostileEnv = map[string]bool{
	"LD_PRELOAD": true, "LD_AUDIT": true, "LD_PROFILE": true, "LD_PROFILE_OUTPUT": true, "LD_DEBUG": true,
	"LD_DEBUG_OUTPUT": true, "LD_ORIGIN_PATH": true, "GLIBC_TUNABLES": true, "MALLOC_TRACE": true, "GCONV_PATH": true,
	"BASH_ENV": true, "ENV": true, "SHELLOPTS": true, "BASHOPTS": true, "PS4": true, "PROMPT_COMMAND": true, "IFS": true,
	// Go's runtime reads these. What belongs to the tool chain (GOPATH, GOTOOLCHAIN, GOFLAGS, …) stays: images of Go need it.
	"GODEBUG": true, "GOGC": true, "GOMEMLIMIT": true, "GOMAXPROCS": true, "GOTRACEBACK": true, "GORACE": true,
	"GOCOVERDIR": true,
}

// VetEnv is the part of an image's environment that execs inherit; PID 1 gets
// nothing of it. Entries are "NAME=value" and the last of a name wins. Dropped
// are names that a shell could not set, values that are not text, what boxed
// sets itself, proxies (there is no network; egress brings its own) and what
// makes a program load something. PATH is always there, absolute entries only.
func VetEnv(env []string) map[string]string {
	all := map[string]string{}
	for _, entry := range env {
		name, value, ok := strings.Cut(entry, "=")
		if ok && len(value) <= maxEnvValue && keepEnv(name) && isText(value) {
			all[name] = value
		}
	}
	out := map[string]string{"PATH": vetPath(all["PATH"])}
	size := len(out["PATH"])
	for _, name := range slices.Sorted(maps.Keys(all)) { // sorted: what is dropped must not change from run to run
		if name == "PATH" || len(out) == maxEnvVars || size+len(name)+len(all[name]) > maxEnvBytes {
			continue
		}
		size += len(name) + len(all[name])
		out[name] = all[name]
	}
	return out
}

func keepEnv(name string) bool {
	if !validEnvName(name) || ourEnv[name] || hostileEnv[name] || strings.HasPrefix(name, "BOXED_") {
		return false
	}
	return !strings.HasSuffix(strings.ToUpper(name), "_PROXY")
}

// validEnvName reports whether a shell could set the name.
func validEnvName(name string) bool {
	if name == "" || len(name) > maxEnvName {
		return false
	}
	for i := range len(name) {
		c := name[i]
		letter := c == '_' || (c|0x20 >= 'a' && c|0x20 <= 'z')
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return true
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// vetPath keeps the absolute directories of a PATH, or gives the default.
func vetPath(path string) string {
	var dirs []string
	for _, dir := range strings.Split(path, ":") {
		if strings.HasPrefix(dir, "/") && len(dirs) < maxPathDirs {
			dirs = append(dirs, dir)
		}
	}
	if len(dirs) == 0 {
		return DefaultPath
	}
	return strings.Join(dirs, ":")
}
