package e2e_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// Every command that a document shows in a console block is run, in order, on
// a real node; where it shows several hosts, on as many.
func TestCommandsInDocumentsWork(t *testing.T) {
	alone, ssh := startSSH(t)
	// A node with all that the documents reach outside.
	world := sync.OnceValue(func() *node {
		in := newInternet(t)
		for _, name := range []string{"pypi.org", "api.github.com"} {
			in.name(name)
		}
		return in.node("--templates-default-pool", "1")
	})
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
			dir, hosts, token := t.TempDir(), documentHosts(t, alone, commands), ""
			if err := os.WriteFile(filepath.Join(dir, "token"), []byte("ghp_0123456789abcdefghijklmnopqrstuvwxyz\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, c := range commands {
				line := strings.ReplaceAll(c.line, "boxedjoin_…", token)
				cmd, on := exec.Command("bash", "-o", "pipefail", "-c", line), hosts[c.host]
				if outward(document, line) {
					on = world()
					cmd = on.host.command(t.Context(), "bash", "-o", "pipefail", "-c", line)
				}
				cmd.Dir, cmd.Env = dir, append(on.env(), "PATH="+ssh.onPath()+":"+bin+":"+os.Getenv("PATH"))
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Errorf("%s$ %s\n%s%v", c.host, c.line, out, err)
				}
				if found := joinToken.FindString(string(out)); found != "" {
					token = found
				}
				if strings.HasPrefix(c.line, "boxedctl cluster join ") {
					acquainted(t, hosts)
				}
			}
		})
	}
}

// outward reports whether a command needs the world outside.
func outward(document, line string) bool {
	base := filepath.Base(document)
	return base == "egress.md" || base == "egress-tls.md" || strings.Contains(line, "boxedctl secret ") || strings.Contains(line, "--secret ") || strings.Contains(line, "--allow ")
}

var joinToken = regexp.MustCompile(`boxedjoin_[A-Za-z0-9_-]+`)

// documentHosts are the nodes that commands are run on, by the hosts' names: alone,
// unless there are prompts of other hosts.
func documentHosts(t *testing.T, alone *node, commands []command) map[string]*node {
	t.Helper()
	hosts := map[string]*node{"": alone}
	for _, c := range commands {
		if hosts[c.host] != nil {
			continue
		}
		if hosts[""] == alone {
			hosts[""] = startNode(t, hostArgs(t, 0, "first")...)
		}
		hosts[c.host] = startNode(t, hostArgs(t, len(hosts), c.host)...)
	}
	return hosts
}

// hostArgs are of nodes that share a host and are to be hosts of their own. All but
// the first have the label that the documents ask for.
func hostArgs(t *testing.T, number int, name string) []string {
	t.Helper()
	args := []string{
		"--name", name, "--mesh-listen", "127.0.0.1:0", "--templates-default-pool", "1",
		"--uid-range-first", fmt.Sprint(240_000 + 1000*number), "--uid-range-last", fmt.Sprint(240_999 + 1000*number),
	}
	if number > 0 {
		config := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(config, []byte("labels:\n  disk: fast\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", config)
	}
	return args
}

// acquainted waits for what takes less time than a person to type the next line:
// that the nodes know each other's keys.
func acquainted(t *testing.T, hosts map[string]*node) {
	t.Helper()
	within(t, 10*time.Second, "the nodes to know each other", func() bool {
		for _, by := range hosts {
			list, err := by.ListNodes(t.Context())
			if err != nil || len(list.Nodes) < len(hosts) {
				return false
			}
			keys, err := by.ListKeys(t.Context())
			if err != nil || len(keys) < len(hosts) {
				return false
			}
		}
		return true
	})
}

// What a document shows of a node's configuration is one that a node takes.
func TestSettingsInDocumentsExist(t *testing.T) {
	documents, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range append(documents, "../README.md") {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(document) == "api.md" { // its YAML is not a node's
			continue
		}
		for _, m := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllSubmatch(text, -1) {
			config := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(config, m[1], 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(filepath.Join(bin, "boxed-node"), "config", "check", "--data-dir", t.TempDir(), "--config", config).CombinedOutput()
			if err != nil {
				t.Errorf("%s:\n%s%s", document, m[1], out)
			}
		}
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

// command is a line of a document. The prompt is the host's: "$ " that of the first
// one, "attic$ " that of one called attic.
type command struct{ host, line string }

var prompted = regexp.MustCompile(`^([a-z]*)\$ (.+)$`)

// consoleCommands are the lines with a prompt in ```console blocks.
func consoleCommands(t *testing.T, document string) (commands []command) {
	t.Helper()
	f, err := os.Open(document)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inside := false
	for scanner := bufio.NewScanner(f); scanner.Scan(); {
		line := scanner.Text()
		if strings.HasPrefix(line, "```") {
			inside = line == "```console"
		} else if m := prompted.FindStringSubmatch(line); inside && m != nil {
			commands = append(commands, command{m[1], m[2]})
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
