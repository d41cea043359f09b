package ctl

import (
	"context"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

// throwawayFlags are for shell and repl without a SANDBOX.
func throwawayFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "image", Usage: "without SANDBOX: start one from this `IMAGE`"},
		&cli.StringFlag{Name: "template", Usage: "without SANDBOX: start one from this `TEMPLATE`"},
		&cli.BoolFlag{Name: "keep", Usage: "without SANDBOX: keep it and print its ID on stderr"},
	}
}

func (a *app) cmdShell() *cli.Command {
	return &cli.Command{
		Name: "shell", Aliases: []string{"sh"}, Category: catRun,
		Usage:     "open a shell in a sandbox",
		UsageText: "boxedctl shell [SANDBOX]",
		Description: "Starts bash, else sh. Without SANDBOX it makes one that ends with the shell. On a terminal the shell is interactive; " +
			"else it reads its commands from stdin." +
			examples("boxedctl shell build", "boxedctl shell --image debian:12", "boxedctl shell build < script.sh"),
		Flags: append(throwawayFlags(), &cli.StringFlag{Name: "dir", Aliases: []string{"w"}, Usage: "start in `DIR`"}),
		Action: func(c *cli.Context) error {
			return a.interact(c, [][]string{{"bash"}, {"sh"}}, "a shell (neither bash nor sh)",
				"its programs can be run one by one: boxedctl exec SANDBOX PROGRAM")
		},
	}
}

func (a *app) cmdRepl() *cli.Command {
	return &cli.Command{
		Name: "repl", Category: catRun,
		Usage:     "talk to an interpreter in a sandbox",
		UsageText: "boxedctl repl [SANDBOX] [--lang LANGUAGE]",
		Description: "Without SANDBOX it makes one that ends with the interpreter. It works over a pipe as well.\n" +
			"Earlier spelling: boxed repl ID --lang LANGUAGE, the same." +
			examples("boxedctl repl", "boxedctl repl build --lang javascript", "echo '6*7' | boxedctl repl build"),
		Flags: append(throwawayFlags(), &cli.StringFlag{Name: "lang", Aliases: []string{"l"}, Value: "python", Usage: "`LANGUAGE`: " + oneOf(boxed.Languages())},
			&cli.StringFlag{Name: "dir", Aliases: []string{"w"}, Usage: "start in `DIR`"}),
		Action: func(c *cli.Context) error {
			lang, err := parseLanguage(c.String("lang"))
			if err != nil {
				return err
			}
			return a.interact(c, boxed.Interpreters(lang), lang, "choose an image that has it: boxedctl repl --image IMAGE")
		},
	}
}

// interact runs the first of the candidates that the sandbox has, joined with
// our stdin: on a terminal if we are on one.
func (a *app) interact(c *cli.Context, candidates [][]string, what, hint string) error {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return err
	}
	if len(words) == 1 && (c.IsSet("image") || c.IsSet("template") || c.Bool("keep")) {
		return usagef("--image, --template and --keep are for a sandbox to be made; %s is there", words[0])
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	talk := func(in *interrupts, id boxed.ID, ref string) (int, error) {
		s := streams{stdin: true, tty: isTerminal(a.stdin) && isTerminal(a.stdout), grace: runGrace}
		for _, argv := range candidates {
			status, err := a.attach(context.Background(), in, s, func(ctx context.Context, with boxed.ExecRequest) (boxed.ExitStatus, error) {
				with.Args, with.Dir = argv, c.String("dir")
				return svc.Exec(ctx, id, with)
			})
			if boxed.CodeOf(err) != boxed.CodeStartFailed {
				return status, err
			}
		}
		return 0, (&problem{err: boxed.Errorf(boxed.CodeStartFailed, "%s does not have %s", ref, what).With("reason", "not_found")}).hint("%s", hint)
	}
	if len(words) == 0 {
		spec := boxed.Spec{Image: c.String("image"), Template: c.String("template")}
		return a.throwaway(svc, spec, nil, c.Bool("keep"), func(in *interrupts, sb *boxed.Sandbox) (int, error) {
			return talk(in, sb.ID, "the image "+firstOf(sb.Image, sb.Template))
		})
	}
	id, err := sandboxID(c.Context, svc, words[0])
	if err != nil {
		return err
	}
	in := catchInterrupts()
	defer in.stop()
	status, err := talk(in, id, words[0])
	if err != nil {
		return err
	}
	return asStatus(status)
}
