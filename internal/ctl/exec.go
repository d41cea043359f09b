package ctl

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdExec() *cli.Command {
	return &cli.Command{
		Name: "exec", Category: catRun,
		Usage: "run a program in a sandbox that is there",
		UsageText: "boxedctl exec [OPTIONS] SANDBOX PROGRAM [ARGS…]\n" +
			"boxedctl exec [OPTIONS] SANDBOX -c CODE",
		Description: "Passes the program's output and exit status on. What follows PROGRAM belongs to it. " +
			"Ctrl-C and TERM go to the program; a second one kills it, and so does losing boxedctl. " +
			"A detached program lives on: boxedctl ps lists it, logs shows its output, kill ends it." +
			examples(
				"boxedctl exec build ls -la /workspace",
				"boxedctl exec -it build bash",
				"boxedctl exec --detach build sh -c 'make > build.log 2>&1'",
				"tar c . | boxedctl exec -i build tar x -C /workspace",
				"boxedctl exec build -c 'import sys; print(sys.version)'",
			),
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "interactive", Aliases: []string{"i"}, Usage: "pass stdin to the program, which has none otherwise"},
			&cli.BoolFlag{Name: "tty", Aliases: []string{"t"}, Usage: "run it on a terminal"},
			&cli.BoolFlag{Name: "detach", Aliases: []string{"d"}, Usage: "print the exec's ID and leave it running"},
			&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "set `K=V`; K alone takes it from your environment; may be repeated"},
			&cli.StringSliceFlag{Name: "env-file", Usage: "read such lines from `FILE`"},
			&cli.StringFlag{Name: "dir", Aliases: []string{"w"}, Usage: "run it in `DIR`"},
			timeoutFlag(),
			&cli.StringFlag{Name: "output-limit", Usage: "end it when it wrote more than `SIZE`"},
			&cli.StringFlag{Name: "code", Aliases: []string{"c"}, Usage: "the program is `CODE`"},
			langFlag(),
		},
		Action: a.exec,
	}
}

func (a *app) exec(c *cli.Context) error {
	words := c.Args().Slice()
	if len(words) == 0 {
		return usagef("SANDBOX is missing").hint("%s", usageLine(a.line.command))
	}
	ref, words := words[0], words[1:]
	var p *program
	switch {
	case c.IsSet("code"):
		var err error
		if p, err = codeProgram(c.String("code"), c.String("lang"), words); err != nil {
			return err
		}
	case len(words) == 0:
		return usagef("PROGRAM is missing").hint("boxedctl shell %s starts a shell", ref)
	default:
		p = &program{argv: words}
	}
	o, err := parseExecOptions(c)
	if err != nil {
		return err
	}
	o.dir = c.String("dir")
	if o.env, err = a.parseEnv(c.StringSlice("env"), c.StringSlice("env-file")); err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if c.Bool("detach") {
		return a.detach(c.Context, svc, ref, p, o)
	}
	if err := o.streams.check(a); err != nil {
		return err
	}
	id, err := sandboxID(c.Context, svc, ref)
	if err != nil {
		return err
	}
	in := catchInterrupts()
	defer in.stop()
	status, err := a.runProgram(in, svc, id, p, o)
	if err != nil {
		return err
	}
	return asStatus(status)
}

// detach starts a program and leaves it running.
func (a *app) detach(ctx context.Context, svc service, ref string, p *program, o execOptions) error {
	id, err := sandboxID(ctx, svc, ref)
	if err != nil {
		return err
	}
	req, err := a.prepare(ctx, svc, id, p)
	if err != nil {
		return err
	}
	o.apply(&req)
	req.TTY, req.OpenStdin = o.streams.tty, o.streams.stdin
	x, err := svc.StartExec(ctx, id, req)
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		return a.printJSON(x)
	}
	_, err = fmt.Fprintln(a.stdout, x.ID)
	return err
}

func (a *app) cmdPs() *cli.Command {
	return &cli.Command{
		Name: "ps", Category: catRun,
		Usage:       "list the programs that were started in a sandbox",
		UsageText:   "boxedctl ps SANDBOX [--all]",
		Description: "Lists the running ones; --all also those that have ended and are still known." + examples("boxedctl ps build", "boxedctl ps build --all -o json"),
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "all", Aliases: []string{"a"}, Usage: "also those that have ended"}},
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			execs, err := svc.ListExecs(c.Context, id)
			if err != nil {
				return err
			}
			shown := []boxed.Exec{}
			for _, x := range execs {
				// What a leader left in the background runs although the exec has ended.
				if c.Bool("all") || x.Running || x.Processes > 0 {
					shown = append(shown, x)
				}
			}
			return a.printExecs(shown)
		},
	}
}

func (a *app) printExecs(execs []boxed.Exec) error {
	t := table.New(table.Column{Name: "EXEC", Keep: true}, table.Column{Name: "PID", Right: true}, table.Column{Name: "PROCS", Right: true},
		table.Column{Name: "KIND"}, table.Column{Name: "AGE", Right: true}, table.Column{Name: "STATUS"}, table.Column{Name: "PROGRAM"})
	var names []string
	now := time.Now()
	for _, x := range execs {
		names = append(names, string(x.ID))
		kind := "attached"
		if x.Detached {
			kind = "detached"
		}
		if x.TTY {
			kind += ", tty"
		}
		status := table.Cell{Text: "running", Style: table.Good}
		if !x.Running {
			status = statusCell(x.Status)
		}
		program := strings.Join(x.Args, " ")
		if x.Language != "" {
			program = x.Language + " code"
		}
		t.Add(table.Cell{Text: string(x.ID)}, table.Cell{Text: number(x.PID)}, table.Cell{Text: number(x.Processes)}, table.Cell{Text: kind},
			table.Cell{Text: table.Age(x.StartedAt, now)}, status, table.Cell{Text: program})
	}
	return a.print(map[string]any{"execs": execs}, names, t)
}

// statusCell says how an exec ended.
func statusCell(st *boxed.ExitStatus) table.Cell {
	switch {
	case st == nil:
		return table.Cell{Text: "ended", Style: table.Dim}
	case st.Reason == boxed.ReasonExited && st.Code == 0:
		return table.Cell{Text: "exited 0", Style: table.Dim}
	case st.Reason == boxed.ReasonExited:
		return table.Cell{Text: fmt.Sprintf("exited %d", st.Code), Style: table.Bad}
	case st.Reason == boxed.ReasonSignaled:
		return table.Cell{Text: "signal " + st.Signal, Style: table.Bad}
	}
	return table.Cell{Text: string(st.Reason), Style: table.Bad}
}

func number(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func (a *app) cmdKill() *cli.Command {
	return &cli.Command{
		Name: "kill", Category: catRun,
		Usage:     "end a program in a sandbox, or send it a signal",
		UsageText: "boxedctl kill SANDBOX EXEC… [--signal NAME [--tree]]",
		Description: "Without --signal it kills the program with everything that it started, also what it left in the background. " +
			"With it the program itself gets the signal, or with --tree each of its processes." +
			examples("boxedctl kill build k3v7q2mzt5ab", "boxedctl kill build k3v7q2mzt5ab --signal HUP"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "signal", Aliases: []string{"s"}, Usage: "send signal `NAME`, like TERM, INT or USR1"},
			&cli.BoolFlag{Name: "tree", Usage: "to each process of it"},
		},
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 2, -1)
			if err != nil {
				return err
			}
			name := strings.TrimPrefix(strings.ToUpper(c.String("signal")), "SIG")
			if c.Bool("tree") && name == "" {
				return usagef("--tree goes with --signal; without one kill ends the whole tree")
			}
			svc, id, err := a.reach(c.Context, words[0])
			if err != nil {
				return err
			}
			for _, exec := range words[1:] {
				x, err := parseExecID(exec)
				if err != nil {
					return err
				}
				if name != "" {
					err = svc.SignalExec(c.Context, id, x, name, c.Bool("tree"))
				} else {
					err = svc.KillExec(c.Context, id, x)
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func parseExecID(s string) (boxed.ExecID, error) {
	if x := boxed.ExecID(s); x.Valid() {
		return x, nil
	}
	return "", usagef("%q is not an exec's ID", s).hint("boxedctl ps SANDBOX lists them")
}
