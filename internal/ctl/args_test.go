package ctl

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

func testApp() *app {
	return &app{getenv: func(string) string { return "" }, output: outputTable}
}

func TestFlagsMayStandAnywhereButInAProgramsLine(t *testing.T) {
	tests := map[string]struct{ line, want string }{
		"global flag behind the command":      {"ls -o json", "--output=json ls --"},
		"flag behind the operand":             {"repl box --lang python", "repl --lang=python -- box"},
		"joined short flags":                  {"exec -it box bash", "exec --interactive --tty -- box bash"},
		"value in a short flag":               {"ls -ojson -n5", "--output=json ls --limit=5 --"},
		"joined with a value at the end":      {"exec -ie A=1 box env", "exec --interactive --env=A=1 -- box env"},
		"a program's own flags":               {"exec box ls -la --color", "exec -- box ls -la --color"},
		"flags between sandbox and program":   {"exec box -i cat -n", "exec --interactive -- box cat -n"},
		"two dashes end flags":                {"exec box -- -odd -i", "exec -- box -odd -i"},
		"a file's own flags":                  {"run -i x.py --lang go -v", "run --interactive -- x.py --lang go -v"},
		"two dashes behind the file":          {"run x.py -- -v", "run -- x.py -v"},
		"a dash is an operand":                {"cp - box:x", "cp -- - box:x"},
		"a negative number is an operand":     {"get -5", "get -- -5"},
		"subcommands":                         {"key create --owner ada -o json", "--output=json key create --owner=ada --"},
		"alias of a command":                  {"list -a", "ls --all --"},
		"alias of a subcommand":               {"fs list box", "fs ls -- box"},
		"a command's flag beats a global":     {"context add x --endpoint http://a", "context add --endpoint=http://a -- x"},
		"a global flag in front":              {"--endpoint http://a ls", "--endpoint=http://a ls --"},
		"equals sign":                         {"ls --state=running", "ls --state=running --"},
		"one dash and a long name":            {"ls -state running", "ls --state=running --"},
		"an operand that is a command's name": {"exec run ls", "exec -- run ls"},
		"a value that looks like a flag":      {"run -c --x", "run --code=--x --"},
		"a unicode operand":                   {"get ü -a", "!"},
		"unknown flag":                        {"ls --nope", "!"},
		"unknown short flag":                  {"exec -ix box", "!"},
		"missing value":                       {"ls --state", "!"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l, err := arrange(testApp().commands(), strings.Fields(tt.line))
			got := "!"
			if err == nil {
				got = strings.TrimPrefix(strings.Join(l.argv(), " "), "boxedctl ")
			}
			if got != tt.want {
				t.Errorf("%s\n got %s (%v)\nwant %s", tt.line, got, err, tt.want)
			}
		})
	}
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{
		"512m": 512 << 20, "1.5g": 3 << 29, "64MiB": 64 << 20, "64MB": 64 << 20, "1k": 1024, "4096": 4096, " 2 G ": 2 << 30, "0": 0, "1t": 1 << 40,
		"": -1, "m": -1, "-1": -1, "12x": -1, "1e3": 1000, "nan": -1, "inf": -1, "0x10": -1, "9999999t": -1, "1_0": -1,
	} {
		got, err := parseSize(in)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("parseSize(%q) = %d (%v), want %d", in, got, err, want)
		}
	}
}

func TestPlaces(t *testing.T) {
	for in, want := range map[string]place{
		"box:/a/b": {"box", "/a/b"}, "box:": {"box", ""}, "box:a:b": {"box", "a:b"}, "./a:b": {"", "./a:b"},
		"dir/a:b": {"", "dir/a:b"}, "file": {"", "file"}, "-": {"", "-"}, ":x": {"", ":x"}, "x.txt:y": {"", "x.txt:y"},
	} {
		if got := parsePlace(in); got != want {
			t.Errorf("parsePlace(%q) = %+v, want %+v", in, got, want)
		}
	}
	for in, want := range map[string]string{"/a/b": "b", "a/": "a", "/": "", ".": "", "..": "", "a/.": "", "a/..": ""} {
		if got := baseName(in); got != want {
			t.Errorf("baseName(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestPorts(t *testing.T) {
	for in, want := range map[string]portPair{
		"8000": {8000, 8000}, "9000:80": {9000, 80}, "0:80": {0, 80},
		"": {}, "0": {}, "x": {}, "1:2:3": {}, "65536": {}, "-1": {}, "80:": {},
	} {
		if got, _ := parsePortPair(in); got != want {
			t.Errorf("parsePortPair(%q) = %v, want %v", in, got, want)
		}
	}
}

func TestTheFirstLineSaysTheLanguage(t *testing.T) {
	for source, want := range map[string]string{
		"#!/usr/bin/env python3\nprint(1)": "python", "#!/usr/bin/python3.11": "python", "#!/bin/sh\n": "bash", "#!/usr/bin/env node": "javascript",
		"#!/usr/bin/env -S bash": "bash", "#!/usr/bin/perl -w": "itself", "#!/usr/bin/python3 -I": "itself", "\x7fELF\x02": "itself",
		"print(1)": "", "#!": "", "# !/bin/sh": "",
	} {
		got, itself := interpreter([]byte(source))
		if itself {
			got = "itself"
		}
		if got != want {
			t.Errorf("%q: %q, want %q", source, got, want)
		}
	}
}

func TestCodeIsToldFromAFileName(t *testing.T) {
	for s, want := range map[string]bool{
		"print(1)": true, "echo hi": true, "x=1": true, "script.py": false, "my script.py": false, "hello": false, "a/b/c": false, "print(1).py": true,
	} {
		if got := looksLikeCode(s); got != want {
			t.Errorf("looksLikeCode(%q) = %v", s, got)
		}
	}
}

func TestEveryErrorHasAnExitStatus(t *testing.T) {
	want := map[boxed.Code]int{boxed.CodeDeadline: 124, boxed.CodeStartFailed: 126, boxed.CodeCanceled: 130}
	for _, code := range []boxed.Code{
		boxed.CodeInvalid, boxed.CodeUnavailable, boxed.CodeUnauthenticated, boxed.CodeForbidden, boxed.CodeNotFound, boxed.CodeConflict,
		boxed.CodeGone, boxed.CodeTooLarge, boxed.CodeImage, boxed.CodeQuota, boxed.CodeRateLimited, boxed.CodeExhausted, boxed.CodeNotReady,
		boxed.CodeNoSpace, boxed.CodeDeadline, boxed.CodeCanceled, boxed.CodeLost, boxed.CodeStartFailed, boxed.CodeCursorExpired,
		boxed.CodeRange, boxed.CodeMethod, boxed.CodeMediaType, boxed.CodeInternal,
	} {
		status := exitBoxed
		if w, ok := want[code]; ok {
			status = w
		}
		if got := exitOf(boxed.Errorf(code, "x")); got != status {
			t.Errorf("%s exits with %d, want %d", code, got, status)
		}
	}
	if got := exitOf(wrapf(boxed.Errorf(boxed.CodeStartFailed, "x").With("reason", "not_found"), "run")); got != exitNotFound {
		t.Errorf("a missing program exits with %d", got)
	}
}

// X14, X15: how a program ended is never confused with what boxed did.
func TestEveryEndOfAProgramHasAnExitStatus(t *testing.T) {
	tests := []struct {
		st   boxed.ExitStatus
		want int
		said bool
	}{
		{boxed.ExitStatus{Reason: boxed.ReasonExited, Code: 0}, 0, false},
		{boxed.ExitStatus{Reason: boxed.ReasonExited, Code: 125}, 125, false},
		{boxed.ExitStatus{Reason: boxed.ReasonSignaled, Code: 143, Signal: "TERM"}, 143, false},
		{boxed.ExitStatus{Reason: boxed.ReasonTimeout, Code: 137}, 124, true},
		{boxed.ExitStatus{Reason: boxed.ReasonOOM, Code: 137}, 137, true},
		{boxed.ExitStatus{Reason: boxed.ReasonOutputLimit, Code: 137}, 137, true},
		{boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, 137, false},
		{boxed.ExitStatus{Reason: boxed.ReasonLost, Code: -1}, 125, true},
		{boxed.ExitStatus{Reason: boxed.ReasonExited, Code: -1}, 125, false},
	}
	for _, tt := range tests {
		if got := exitOfProgram(tt.st); got != tt.want {
			t.Errorf("%+v exits with %d, want %d", tt.st, got, tt.want)
		}
		if said := explain(tt.st) != ""; said != tt.said {
			t.Errorf("%+v is explained: %v, want %v", tt.st, said, tt.said)
		}
	}
}

func TestErrorsSayWhichFlagAndWhatNext(t *testing.T) {
	tests := []struct {
		err        error
		line, hint string
	}{
		{boxed.Errorf(boxed.CodeInvalid, "limits.memory_bytes: must be at least 1").WithField("limits.memory_bytes"), "--memory: must be at least 1", ""},
		{boxed.Errorf(boxed.CodeConflict, "the name build is taken").WithField("name"), "--name: the name build is taken", ""},
		{boxed.Errorf(boxed.CodeConflict, "ambiguous").With("ids", []any{"a", "b"}), "ambiguous", "it may be any of a, b"},
		{boxed.Errorf(boxed.CodeExhausted, "no room").With("nodes", map[string]any{"n2": "full", "n1": "cordoned"}), "no room", "n1: cordoned; n2: full"},
		{boxed.Errorf(boxed.CodeInternal, "internal error").With("request_id", "r1"), "internal error (request r1)", ""},
	}
	for _, tt := range tests {
		if got := message(tt.err); got != tt.line {
			t.Errorf("message %q, want %q", got, tt.line)
		}
		if got := nextStep(tt.err); got != tt.hint {
			t.Errorf("hint %q, want %q", got, tt.hint)
		}
	}
}

func TestNearbyNamesAreSuggested(t *testing.T) {
	names := []string{"name", "label", "image", "env", "env-file", "ls", "rm"}
	for word, want := range map[string]string{"nmae": "name", "lable": "label", "imag": "image", "envfile": "env-file", "zzz": "", "l": "", "completely": ""} {
		if got := nearest(word, names); got != want {
			t.Errorf("nearest(%q) = %q, want %q", word, got, want)
		}
	}
}

// Every command says what it does, how it is written, and gives an example
// that it would itself understand.
func TestEveryCommandIsExplained(t *testing.T) {
	root := testApp().commands()
	var walk func(c *cli.Command, path []string)
	walk = func(c *cli.Command, path []string) {
		name := strings.Join(path, " ")
		if c.Usage == "" || strings.HasSuffix(c.Usage, ".") || strings.Contains(c.Usage, "\n") {
			t.Errorf("%s: the summary %q is not one line without a full stop", name, c.Usage)
		}
		for line := range strings.Lines(c.UsageText) {
			if !strings.HasPrefix(line, name) {
				t.Errorf("%s: the usage %q does not begin with its name", name, line)
			}
		}
		if c.UsageText == "" {
			t.Errorf("%s has no usage", name)
		}
		text, list, ok := strings.Cut(c.Description, "\n\nExamples:\n")
		if !ok || text == "" {
			t.Errorf("%s has no description with an example", name)
		}
		if !strings.Contains(list, name) && !strings.Contains(list, path[len(path)-1]) {
			t.Errorf("%s: no example shows it", name)
		}
		for line := range strings.Lines(list) {
			checkExample(t, name, strings.TrimSpace(line))
		}
		for _, f := range c.Flags {
			if head, text := flagHelp(f); text == "" || strings.HasSuffix(head, " ") {
				t.Errorf("%s: the flag %s has no text, or its value no name", name, head)
			}
		}
		for _, sub := range c.Subcommands {
			walk(sub, append(path[:len(path):len(path)], sub.Name))
		}
	}
	for _, c := range root.Subcommands {
		if c.Category == "" {
			t.Errorf("%s is in no category", c.Name)
		}
		walk(c, []string{"boxedctl", c.Name})
	}
}

// checkExample reads an example's command line, if it is plain enough.
func checkExample(t *testing.T, name, line string) {
	t.Helper()
	if strings.ContainsAny(line, "|<>$'\"") || !strings.HasPrefix(line, "boxedctl ") {
		return
	}
	if l, err := arrange(testApp().commands(), strings.Fields(line)[1:]); err != nil || len(l.path) == 0 {
		t.Errorf("%s: the example %q is not understood: %v", name, line, err)
	}
}

func TestHelpPagesFitATerminal(t *testing.T) {
	var walk func(c *cli.Command, path []string)
	walk = func(c *cli.Command, path []string) {
		var out stringWriter
		a := testApp()
		a.stdout = &out
		if err := a.help(c, path); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			if n := len([]rune(line)); n > 125 {
				t.Errorf("%v: a line of %d characters: %s", path, n, line)
			}
		}
		for _, sub := range c.Subcommands {
			walk(sub, append(path[:len(path):len(path)], sub.Name))
		}
	}
	walk(testApp().commands(), nil)
}

func TestExplicitEnvironmentBeatsFiles(t *testing.T) {
	a := testApp()
	a.getenv = func(k string) string { return map[string]string{"HERE": "yes"}[k] }
	got, err := a.parseEnv([]string{"A=1", "HERE", "NOT_HERE", "EMPTY="}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"A": "1", "HERE": "yes", "EMPTY": ""}, got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"", "=x", "A B=1"} {
		if _, err := a.parseEnv([]string{bad}, nil); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
