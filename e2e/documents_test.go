package e2e_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every command that a document shows in a console block is run, in order, on
// a real node.
func TestCommandsInDocumentsWork(t *testing.T) {
	n := startNode(t)
	documents, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range append(documents, "../README.md", "../CONTRIBUTING.md", "../examples/README.md") {
		commands := consoleCommands(t, document)
		if len(commands) == 0 {
			continue
		}
		t.Run(filepath.Base(document), func(t *testing.T) {
			dir := t.TempDir()
			for _, line := range commands {
				cmd := exec.Command("bash", "-o", "pipefail", "-c", line)
				cmd.Dir, cmd.Env = dir, n.env()
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("$ %s\n%s%v", line, out, err)
				}
			}
		})
	}
}

// Each make target that a document names is there.
func TestMakeTargetsInDocumentsExist(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`?make ([a-z]+)")
	documents, _ := filepath.Glob("../docs/*.md")
	for _, document := range append(documents, "../README.md", "../CONTRIBUTING.md") {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !strings.Contains(line, "`make ") && !strings.HasPrefix(line, "make ") {
				continue
			}
			for _, m := range named.FindAllStringSubmatch(line, -1) {
				if strings.Contains(line, "`make "+m[1]) || strings.HasPrefix(line, "make "+m[1]) {
					if !regexp.MustCompile(`(?m)^` + m[1] + `( [a-z ]*)?:`).Match(makefile) {
						t.Errorf("%s names make %s, which is not a target", document, m[1])
					}
				}
			}
		}
	}
}

// consoleCommands are the lines that start with "$ " in ```console blocks.
func consoleCommands(t *testing.T, document string) (commands []string) {
	t.Helper()
	f, err := os.Open(document)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inside := false
	for scanner := bufio.NewScanner(f); scanner.Scan(); {
		line := scanner.Text()
		switch {
		case strings.HasPrefix(line, "```"):
			inside = line == "```console"
		case inside && strings.HasPrefix(line, "$ "):
			commands = append(commands, strings.TrimPrefix(line, "$ "))
		}
	}
	return commands
}

// The examples run, and say what they should.
func TestExamples(t *testing.T) {
	n := startNode(t)
	for name, c := range map[string]struct {
		cmd  *exec.Cmd
		want string
	}{
		"agent-loop": {exec.Command("go", "run", "./agent-loop"), "attempt 2: total 12"},
		"map-files":  {exec.Command("go", "run", "./map-files"), "1 2 3 4"},
		"curl.sh":    {exec.Command("./curl.sh"), "SOME TEXT"},
	} {
		t.Run(name, func(t *testing.T) {
			c.cmd.Dir = "../examples"
			c.cmd.Env = append(n.env(), "HOME="+os.Getenv("HOME"))
			out, err := c.cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), c.want) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

func TestEveryExampleIsListed(t *testing.T) {
	text, err := os.ReadFile("../examples/README.md")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("../examples")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "README.md" && !strings.Contains(string(text), "("+e.Name()+")") {
			t.Errorf("examples/README.md does not list %s", e.Name())
		}
	}
}
