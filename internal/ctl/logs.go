package ctl

import (
	"context"
	"fmt"
	"slices"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdLogs() *cli.Command {
	return &cli.Command{
		Name: "logs", Category: catRun,
		Usage:     "show the output of a detached program",
		UsageText: "boxedctl logs SANDBOX [EXEC] [-f] [--since-byte N]",
		Description: fmt.Sprintf("The last %s of each stream are kept; stdout and stderr come out as such. ", table.Size(boxed.OutputRing)) +
			"With -f it goes on until the program ends and has its exit status. EXEC may be left out where there is one detached program." +
			examples("boxedctl logs build", "boxedctl logs -f build k3v7q2mzt5ab"),
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until the program ends"},
			&cli.Int64Flag{Name: "since-byte", Usage: "start at byte `N` of each stream"},
		},
		Action: a.logs,
	}
}

func (a *app) logs(c *cli.Context) error {
	words, err := a.operands(c, 1, 2)
	if err != nil {
		return err
	}
	if c.Int64("since-byte") < 0 {
		return usagef("--since-byte must not be negative")
	}
	svc, id, err := a.reach(c.Context, words[0])
	if err != nil {
		return err
	}
	var exec boxed.ExecID
	if len(words) == 2 {
		exec, err = parseExecID(words[1])
	} else {
		exec, err = a.onlyDetached(c.Context, svc, id)
	}
	if err != nil {
		return err
	}
	from := c.Int64("since-byte")
	// Leaving a detached exec does not end it, so here signals do what they always do.
	st, err := svc.Attach(c.Context, id, exec, boxed.AttachRequest{
		StdoutOffset: from, StderrOffset: from, NoFollow: !c.Bool("follow"),
		Stdout: a.stdout, Stderr: a.stderr,
		Gap: func(stream string, n int64) { a.notice("%s of %s are no longer kept", table.Size(n), stream) },
	})
	if err != nil || !c.Bool("follow") {
		return err
	}
	if text := explain(st); text != "" {
		fmt.Fprintf(a.stderr, "boxedctl: %s\n", table.Inert(text))
	}
	return asStatus(exitOfProgram(st))
}

// onlyDetached is the sandbox's one detached exec; of several the only one that
// runs.
func (a *app) onlyDetached(ctx context.Context, svc service, id boxed.ID) (boxed.ExecID, error) {
	execs, err := svc.ListExecs(ctx, id)
	if err != nil {
		return "", err
	}
	execs = slices.DeleteFunc(execs, func(x boxed.Exec) bool { return !x.Detached })
	if len(execs) > 1 {
		if running := slices.DeleteFunc(slices.Clone(execs), func(x boxed.Exec) bool { return !x.Running }); len(running) > 0 {
			execs = running
		}
	}
	switch len(execs) {
	case 0:
		return "", boxed.Errorf(boxed.CodeNotFound, "no detached program is known in this sandbox")
	case 1:
		return execs[0].ID, nil
	}
	ids := make([]string, len(execs))
	for i, x := range execs {
		ids[i] = string(x.ID)
	}
	return "", usagef("there are %d detached programs; name one", len(execs)).hint("one of %s", oneOf(ids))
}
