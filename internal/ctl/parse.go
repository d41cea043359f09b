package ctl

import (
	"bufio"
	"maps"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// parseSize reads a number of bytes: "512m", "1.5g", "64MiB", "4096". Units are
// binary, as docker's are.
func parseSize(s string) (int64, error) {
	bad := usagef("%q is not a size", s).hint("write it like 512m, 1.5g or a number of bytes")
	text := strings.ToLower(strings.TrimSpace(s))
	text = strings.TrimSuffix(strings.TrimSuffix(text, "b"), "i")
	unit := 1.0
	if text != "" {
		if i := strings.IndexByte("kmgt", text[len(text)-1]); i >= 0 {
			unit = float64(int64(1) << (10 * (i + 1)))
			text = text[:len(text)-1]
		}
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || math.IsNaN(n) || n < 0 || n*unit > 1<<60 || strings.ContainsAny(text, "xp_") {
		return 0, bad
	}
	return int64(n * unit), nil
}

// parseEnv reads --env and --env-file. A name without "=" takes its value from
// the caller's environment, if it has one. Flags win over files.
func (a *app) parseEnv(flags, files []string) (map[string]string, error) {
	env := map[string]string{}
	for _, file := range files {
		if err := a.envFile(env, file); err != nil {
			return nil, err
		}
	}
	for _, entry := range flags {
		if err := a.setEnv(env, entry); err != nil {
			return nil, wrapf(err, "--env")
		}
	}
	if len(env) == 0 {
		return nil, nil
	}
	return env, nil
}

func (a *app) envFile(env map[string]string, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return wrapf(plainPath(err), "--env-file")
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, boxed.MaxArgBytes)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimLeft(lines.Text(), " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		if err := a.setEnv(env, strings.TrimSuffix(line, "\r")); err != nil {
			return wrapf(err, "%s:%d", file, n)
		}
	}
	if err := lines.Err(); err != nil {
		return wrapf(plainPath(err), "%s", file)
	}
	return nil
}

func (a *app) setEnv(env map[string]string, entry string) error {
	name, value, ok := strings.Cut(entry, "=")
	if name == "" || strings.ContainsAny(name, " \t\x00") {
		return usagef("%q is not NAME=VALUE", entry)
	}
	if !ok {
		if value = a.getenv(name); value == "" {
			return nil
		}
	}
	env[name] = value
	return nil
}

// parseLabels reads --label: k=v, or k alone.
func parseLabels(flags []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, entry := range flags {
		k, v, _ := strings.Cut(entry, "=")
		if k == "" {
			return nil, usagef("--label %q has no name", entry).hint("write it like --label job=nightly")
		}
		labels[k] = v
	}
	if len(labels) == 0 {
		return nil, nil
	}
	return labels, nil
}

// parseDuration reads a duration flag.
func parseDuration(flag, s string) (boxed.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := boxed.ParseDuration(s)
	if err != nil {
		return 0, wrapf(err, "--%s", flag)
	}
	return d, nil
}

// parseLanguage reads --lang.
func parseLanguage(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	if lang := boxed.CanonicalLanguage(strings.ToLower(s)); lang != "" {
		return lang, nil
	}
	return "", usagef("--lang is %s, not %q", oneOf(boxed.Languages()), s).
		hint("for other languages run the program itself: boxedctl run -- PROGRAM ARGS…")
}

// upload is one --file local:remote.
type upload struct{ local, remote string }

// parseUpload reads "local:remote"; without a remote path the file keeps its
// name, in the working directory.
func parseUpload(s string) (upload, error) {
	local, remote := s, ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !isDrive(s[:i]) {
		local, remote = s[:i], s[i+1:]
	}
	if local == "" {
		return upload{}, usagef("--file %q names no local file", s).hint("write it like --file data.csv:/workspace/data.csv")
	}
	if remote == "" {
		remote = filepath.Base(local)
	}
	if _, err := os.Stat(local); err != nil {
		return upload{}, wrapf(plainPath(err), "--file")
	}
	return upload{local, remote}, nil
}

// place is an operand of cp: a path here or in a sandbox.
type place struct {
	ref  string // the sandbox; "" for a path here
	path string
}

// parsePlace reads "sandbox:path" or a local path. As for scp, a colon behind a
// slash belongs to a local path; so does one behind a drive's letter on Windows.
func parsePlace(s string) place {
	ref, p, ok := strings.Cut(s, ":")
	if !ok || ref == "" || strings.ContainsAny(ref, `/\.`) || isDrive(ref) {
		return place{path: s}
	}
	return place{ref, p}
}

func isDrive(s string) bool {
	return filepath.Separator == '\\' && len(s) == 1 && (s[0]|0x20) >= 'a' && (s[0]|0x20) <= 'z'
}

// parseRemote reads the operands "SANDBOX PATH" or "SANDBOX:PATH".
func parseRemote(operands []string, fallback string) (ref, p string, err error) {
	if len(operands) == 1 {
		if pl := parsePlace(operands[0]); pl.ref != "" {
			return pl.ref, firstOf(pl.path, fallback), nil
		}
		if fallback == "" {
			return "", "", usagef("the path is missing").hint("write it like SANDBOX:PATH or SANDBOX PATH")
		}
		return operands[0], fallback, nil
	}
	return operands[0], operands[1], nil
}

// baseName is the last element of a sandbox's path, "" where it has none that
// could be a file's name here ("/", ".", "..").
func baseName(p string) string {
	base := path.Base(p)
	if base == "/" || base == "." || base == ".." || strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/..") {
		return ""
	}
	return base
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
