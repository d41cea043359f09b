package ctl

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// The programs that look from inside. Their output lines are
// "check\tok|failed|skipped\tdetail".
var (
	//go:embed smoke.py
	smokePython string
	//go:embed smoke.sh
	smokeShell string
)

// check is the outcome of one check of smoke or doctor.
type check struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Result string `json:"result"` // ok, warning, failed or skipped
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"` // what to do; only where something is wrong
}

// The results of a check.
const (
	resultOK      = "ok"
	resultWarning = "warning"
	resultFailed  = "failed"
	resultSkipped = "skipped"
)

// smokeChecks are what the programs report on, with what to do about a failure.
// A remedy is for who runs the node: a sandbox that fails one of these must not
// run code that is not trusted.
var smokeChecks = []check{
	{Name: "uid", Title: "programs are not root", Remedy: "boxed-node starts programs under a user of the sandbox's own: is this its agent, and is the runtime one that it probed?"},
	{Name: "capabilities", Title: "programs have no capability", Remedy: "the runtime ignores the capabilities that boxed-node asks for: use another (boxedctl node lists them)"},
	{Name: "no_new_privs", Title: "setuid programs gain nothing", Remedy: "the runtime ignores no-new-privileges: use another"},
	{Name: "seccomp", Title: "a system call filter is on", Remedy: "the engine or the kernel has no seccomp (docker info shows it under Security Options)"},
	{Name: "read_only_root", Title: "the image cannot be changed", Remedy: "the engine ignores the read-only root: look at its storage driver and the runtime"},
	{Name: "tmpfs", Title: "writable places have their limits", Remedy: "compare boxedctl inspect with mount inside; an engine older than 20.10 ignores some options of tmpfs"},
	{Name: "host_paths", Title: "no directory of the host is there", Remedy: "look for mounts that the engine's configuration adds to every container (daemon.json, hooks of the runtime)"},
	{Name: "engine_socket", Title: "no socket of the host's services is there", Remedy: "look for mounts that the engine's configuration adds to every container"},
	{Name: "agent_socket", Title: "the way to the node is closed to programs", Remedy: "the agent's socket must be of another user, mode 0600, in a read-only mount: is boxed-node's data directory on a file system that keeps owners?"},
	{Name: "interfaces", Title: "no network interface but loopback", Remedy: "the container is in another network than none: look for a plugin or hook that attaches networks"},
	{Name: "outside", Title: "no address outside can be reached", Remedy: "as for interfaces"},
	{Name: "names", Title: "names do not resolve outside", Remedy: "as for interfaces; /etc/resolv.conf inside must be boxed-node's"},
	{Name: "processes", Title: "the first process is not to be looked into", Remedy: "programs must not have the first process's user: see uid"},
	{Name: "signals", Title: "the first process is not to be signalled", Remedy: "programs must not have the first process's user: see uid"},
	{Name: "ptrace", Title: "the first process is not to be traced", Remedy: "programs must not have the first process's user: see uid"},
	{Name: "mount", Title: "nothing can be mounted", Remedy: "the filter of system calls is not boxed's: see seccomp"},
	{Name: "unshare", Title: "no namespace can be made", Remedy: "the filter of system calls is not boxed's: see seccomp"},
	{Name: "vsock", Title: "AF_VSOCK is refused", Remedy: "the filter of system calls is not boxed's: on a virtual machine this socket reaches its host"},
	{Name: "sockets", Title: "only Unix, IP and route sockets", Remedy: "the filter of system calls is not boxed's: see seccomp"},
	{Name: "system_calls", Title: "dangerous system calls are refused", Remedy: "the filter of system calls is not boxed's: see seccomp"},
	{Name: "devices", Title: "only the usual devices", Remedy: "look for devices that the engine's configuration adds (daemon.json, CDI, hooks of the runtime)"},
	{Name: "kernel_files", Title: "the kernel's files are masked", Remedy: "the runtime ignores masked and read-only paths: use another"},
	{Name: "limits", Title: "memory, processes and files are limited", Remedy: "the host lacks a cgroup controller: boxedctl doctor, on the host, says which"},
}

func (a *app) cmdSmoke() *cli.Command {
	return &cli.Command{
		Name: "smoke", Category: catWatch,
		Usage:     "check the isolation from inside a throwaway sandbox",
		UsageText: "boxedctl smoke [--runtime RUNTIME] [--image IMAGE | --template TEMPLATE]",
		Description: fmt.Sprintf("Makes a sandbox, tries inside what must not be possible, then lets it out and tries again, and destroys it. The status is %d if anything was possible. ", exitFailed) +
			"Needs python3 with ctypes in the image for all checks; with a shell alone some are left out." +
			examples("boxedctl smoke", "boxedctl smoke --runtime runsc -o json", "boxedctl smoke --image alpine:3"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "runtime", Usage: "isolate with this OCI `RUNTIME`"},
			&cli.StringFlag{Name: "image", Usage: "start from this `IMAGE`"},
			&cli.StringFlag{Name: "template", Usage: "start from this `TEMPLATE`"},
		},
		Action: a.smoke,
	}
}

// smokeTimeout bounds the program inside.
const smokeTimeout = boxed.Duration(time.Minute)

func (a *app) smoke(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	spec := boxed.Spec{Image: c.String("image"), Template: c.String("template"), Runtime: c.String("runtime")}
	return a.throwaway(svc, spec, nil, false, func(in *interrupts, sb *boxed.Sandbox) (int, error) {
		ctx, release := in.cancelling(context.Background())
		defer release()
		out, how, err := smokeInside(ctx, svc, sb)
		if ctx.Err() != nil {
			return 0, in.err()
		}
		if err != nil {
			return 0, err
		}
		checks := judgeSmoke(out, how == "python3")
		if how == "python3" {
			checks = append(checks, smokeEgress(ctx, svc, sb)...)
		}
		failed := countResults(checks)[resultFailed]
		err = a.printChecks(map[string]any{
			"ok": failed == 0, "sandbox": sb.ID, "image": sb.Image, "runtime": sb.Runtime, "checked_with": how, "checks": checks,
		}, fmt.Sprintf("%s on %s, looked at with %s", sb.Image, sb.Runtime, how), checks)
		if failed > 0 {
			return exitFailed, err
		}
		return exitOK, err
	})
}

// smokeInside runs the checks and returns their lines.
func smokeInside(ctx context.Context, svc service, sb *boxed.Sandbox) (out []byte, how string, err error) {
	l := sb.Limits
	env := map[string]string{
		"SMOKE_RUNTIME": sb.Runtime,
		"SMOKE_MEMORY":  fmt.Sprint(l.MemoryBytes),
		"SMOKE_FILES":   fmt.Sprint(l.OpenFiles),
		"SMOKE_TMPFS": fmt.Sprintf("/workspace=%d|HOME=%d|/tmp=%d|/output=%d|/dev/shm=%d",
			l.WorkspaceBytes, l.HomeBytes, l.TmpBytes, l.OutputBytes, l.ShmBytes),
	}
	for _, try := range []struct {
		how string
		req boxed.ExecRequest
	}{
		{"python3", boxed.ExecRequest{Args: []string{"python3", "-c", "import ctypes"}}},
		{"sh", boxed.ExecRequest{Args: []string{"sh", "-c", ":"}}},
	} {
		st, err := svc.Exec(ctx, sb.ID, try.req)
		if boxed.CodeOf(err) == boxed.CodeStartFailed || err == nil && st.Code != 0 {
			continue
		}
		if err != nil {
			return nil, "", err
		}
		var stdout, stderr bytes.Buffer
		req := boxed.ExecRequest{
			Args: []string{try.how, "-c", map[string]string{"python3": smokePython, "sh": smokeShell}[try.how]},
			Env:  env, Timeout: smokeTimeout, MaxOutput: boxed.CollectedOutput, Stdout: &stdout, Stderr: &stderr,
		}
		st, err = svc.Exec(ctx, sb.ID, req)
		if err == nil && (st.Reason != boxed.ReasonExited || st.Code != 0) {
			err = boxed.Errorf(boxed.CodeInternal, "the checks broke off (%s %d): %s", st.Reason, st.Code, lastLine(stderr.String()))
		}
		return stdout.Bytes(), try.how, err
	}
	return nil, "", (&problem{err: boxed.Errorf(boxed.CodeStartFailed, "the image has neither python3 nor sh").With("reason", "not_found")}).
		hint("boxedctl smoke --image IMAGE, with one that has")
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// judgeSmoke turns the program's lines into checks. What the python program did
// not report on has failed; the shell's does not know all of them.
func judgeSmoke(out []byte, all bool) []check { return judge(smokeChecks, nil, out, all) }

// judge does so for some checks. What special has for one reads its line otherwise.
func judge(list []check, special map[string]func(result, detail string) (string, string), out []byte, all bool) []check {
	reported := map[string][2]string{}
	for line := range strings.Lines(string(out)) {
		fields := strings.SplitN(strings.TrimRight(line, "\r\n"), "\t", 3)
		if len(fields) < 2 {
			continue
		}
		detail := ""
		if len(fields) == 3 {
			detail = strings.TrimSpace(fields[2])
		}
		if read := special[fields[0]]; read != nil {
			fields[1], detail = read(fields[1], detail)
		}
		reported[fields[0]] = [2]string{fields[1], detail}
	}
	checks := make([]check, len(list))
	for i, c := range list {
		r, ok := reported[c.Name]
		switch {
		case ok && (r[0] == resultOK || r[0] == resultSkipped):
			c.Result, c.Detail, c.Remedy = r[0], r[1], ""
		case ok:
			c.Result, c.Detail = resultFailed, r[1]
		case all:
			c.Result, c.Detail = resultFailed, "the check did not report"
		default:
			c.Result, c.Detail, c.Remedy = resultSkipped, "needs python3 with ctypes in the image", ""
		}
		checks[i] = c
	}
	return checks
}

func countResults(checks []check) map[string]int {
	n := map[string]int{}
	for _, c := range checks {
		n[c.Result]++
	}
	return n
}

// printChecks prints checks with a summary; on --output name the names of those
// that failed.
func (a *app) printChecks(v any, subject string, checks []check) error {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true}, table.Column{Keep: true})
	styles := map[string]table.Style{resultOK: table.Good, resultWarning: table.Warn, resultFailed: table.Bad, resultSkipped: table.Dim}
	var failed []string
	for _, c := range checks {
		t.Add(table.Cell{Text: c.Result, Style: styles[c.Result]}, table.Cell{Text: c.Title}, table.Cell{Text: c.Detail, Style: table.Dim})
		if c.Remedy != "" {
			t.Row("", "", "-> "+c.Remedy)
		}
		if c.Result == resultFailed {
			failed = append(failed, c.Name)
		}
	}
	if err := a.printFields(v, failed, t); err != nil || a.output != outputTable {
		return err
	}
	n := countResults(checks)
	summary := fmt.Sprintf("%d checks: %d ok, %d failed", len(checks), n[resultOK], n[resultFailed])
	if n[resultWarning] > 0 {
		summary += fmt.Sprintf(", %d warnings", n[resultWarning])
	}
	if n[resultSkipped] > 0 {
		summary += fmt.Sprintf(", %d skipped", n[resultSkipped])
	}
	_, err := fmt.Fprintf(a.stdout, "\n%s (%s)\n", summary, table.Inert(subject))
	return err
}
