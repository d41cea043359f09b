package e2e_test

import (
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// The main file of a program lies in a directory named for its exec, unless an
// interpreter waited for it there before there was an exec.
const whereAmI = `import os; print(os.path.basename(os.path.dirname(__file__)))`

// waited reports whether the first Python program of a fresh sandbox ran in an
// interpreter that had waited for it.
func (n *node) waited(t *testing.T) bool {
	t.Helper()
	sb, err := n.Create(t.Context(), boxed.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Destroy(t.Context(), sb.ID)
	var out strings.Builder
	var exec boxed.ExecID
	status, err := n.Exec(t.Context(), sb.ID, boxed.ExecRequest{
		Language: "python", Code: whereAmI, Stdout: &out, Started: func(id boxed.ExecID) { exec = id },
	})
	if err != nil || status.Code != 0 {
		t.Fatal(status, err)
	}
	return strings.TrimSpace(out.String()) != "boxed-"+string(exec)
}

func TestAWarmSandboxHasAPythonWaiting(t *testing.T) {
	n := startNode(t)
	within(t, 60*time.Second, "a warm sandbox's first program finds a Python that waits", func() bool { return n.waited(t) })
}

func TestAWarmSandboxHasNoPythonWaitingIfNoneIsWanted(t *testing.T) {
	n := startNode(t, "--templates-default-warm", "none")
	for range 4 {
		if n.waited(t) {
			t.Fatal("one waited")
		}
	}
}
