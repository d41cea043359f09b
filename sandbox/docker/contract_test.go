package docker_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"testing"

	"github.com/boxed-mesh/boxed/sandbox/docker"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
)

// The contract suite, with the real agent, on every runtime.
func TestContract(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		r.skipUnlessAll(t, "half a minute")
		agent := realAgent(t)
		r.importImage(t, "boxed-test/contract:1", hostTools(t), "ENV PATH=/usr/bin:/bin")
		sandboxtest.Run(t, func(t *testing.T) sandboxtest.Fixture {
			return sandboxtest.Fixture{
				Driver: r.driver(t, func(c *docker.Config) { c.AgentPath, c.Runtimes = agent, []string{r.name} }),
				Node:   testNode, Agent: agent, Image: "boxed-test/contract:1",
				Languages: map[string]string{"bash": "echo hello"},
				Crash: func(t *testing.T, id string) {
					if err := r.client.ContainerKill(t.Context(), id, "KILL"); err != nil {
						t.Fatal(err)
					}
				},
			}
		})
	})
}

// builtAgent is the real agent, built once.
var builtAgent = sync.OnceValues(func() (string, error) {
	program := filepath.Join(filepath.Dir(guestProgram), "boxed-agent")
	build := exec.Command("go", "build", "-trimpath", "-o", program, "../../agent/boxed-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the agent: %w\n%s", err, out)
	}
	return program, nil
})

func realAgent(t *testing.T) string {
	t.Helper()
	program, err := builtAgent()
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// hostTools is the root of an image with this host's shells, coreutils and perl,
// and the libraries that they need.
func hostTools(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	add := func(from, to string) {
		t.Helper()
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(root+to), 0o755)
		}
		if err == nil {
			err = os.WriteFile(root+to, text, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	library := regexp.MustCompile(`(/\S+) \(0x`)
	for _, name := range []string{"sh", "bash", "cat", "sleep", "true", "echo", "env", "pwd", "id", "stty", "yes", "perl"} {
		program, err := exec.LookPath(name)
		if err != nil {
			t.Skipf("this host has no %s to put into an image", name)
		}
		add(program, "/usr/bin/"+name)
		out, err := exec.Command("ldd", program).Output()
		if err != nil {
			t.Fatalf("ldd %s: %v", program, err)
		}
		for _, m := range library.FindAllStringSubmatch(string(out), -1) {
			add(m[1], m[1])
		}
	}
	modules, _ := filepath.Glob("/usr/lib/*/perl-base")
	for _, dir := range modules {
		if err := os.CopyFS(root+dir, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}
