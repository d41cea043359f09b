package ctl

import (
	"regexp"
	"strings"
	"testing"
)

// Each check that the programs report on is known here, with a remedy, and the
// python program knows all of them.
func TestSmokeProgramsReportOnKnownChecks(t *testing.T) {
	known := map[string]bool{}
	for _, c := range smokeChecks {
		known[c.Name] = true
		if c.Title == "" || c.Remedy == "" {
			t.Errorf("%s lacks a title or a remedy", c.Name)
		}
		if !strings.Contains(smokePython, "\ndef "+c.Name+"():") {
			t.Errorf("smoke.py has no check %s", c.Name)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)\b(?:report|verdict) ([a-z_]+) `).FindAllStringSubmatch(smokeShell, -1) {
		if !known[m[1]] {
			t.Errorf("smoke.sh reports on %s, which nobody knows", m[1])
		}
	}
}

func TestWhatSmokeDidNotReportHasFailed(t *testing.T) {
	results := func(out string, all bool) map[string]string {
		m := map[string]string{}
		for _, c := range judgeSmoke([]byte(out), all) {
			m[c.Name] = c.Result
			if (c.Result == resultFailed) != (c.Remedy != "") {
				t.Errorf("%s is %s with the remedy %q", c.Name, c.Result, c.Remedy)
			}
		}
		return m
	}
	out := "uid\tok\tuid 200000\nseccomp\tskipped\tgVisor\nvsock\tfailed\tit worked\nmount\tnonsense\nnot a check\n\n"
	for name, want := range map[string]string{"uid": resultOK, "seccomp": resultSkipped, "vsock": resultFailed, "mount": resultFailed, "ptrace": resultFailed} {
		if got := results(out, true)[name]; got != want {
			t.Errorf("with python, %s is %s, want %s", name, got, want)
		}
	}
	if got := results(out, false)["ptrace"]; got != resultSkipped {
		t.Errorf("with a shell, ptrace is %s", got)
	}
	if got := results("", true)["uid"]; got != resultFailed {
		t.Errorf("a program that says nothing passes: uid is %s", got)
	}
}
