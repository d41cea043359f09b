package ctl

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
)

// app is one invocation of boxedctl.
type app struct {
	stdin  *os.File
	stdout io.Writer
	stderr io.Writer
	getenv func(string) string

	line   *commandLine // as read by arrange
	output string       // one of outputs
	quiet  bool
	color  bool // styles on stdout
	node   targetFlags

	// lobby is the node in whose process this is, for a caller by SSH; nil in boxedctl.
	lobby service
	// ctx is what commands run in; nil: the background.
	ctx context.Context
	// forceColor says that stdout is a terminal, which it does not look like.
	forceColor bool

	// dial connects to a node; nil means over HTTP. Tests replace it.
	dial func(target) (service, error)
}

// The values of --output.
const (
	outputTable = "table"
	outputJSON  = "json"
	outputName  = "name"
)

var outputs = []string{outputTable, outputJSON, outputName}

// main runs the command line args and returns the exit status.
func (a *app) main(args []string) int {
	root := a.root()
	line, err := arrange(root, args)
	if err != nil {
		return a.fail(err)
	}
	a.line = line
	switch {
	case line.help || len(line.path) == 0 && len(line.operands) == 0 && !line.version:
		err = a.help(line.command, line.path)
	case line.version:
		err = a.printVersion()
	default:
		err = a.cli(root).RunContext(a.context(), line.argv())
	}
	if err != nil {
		return a.fail(err)
	}
	return exitOK
}

// root is the tree of commands that there are here.
func (a *app) root() *cli.Command {
	if a.lobby != nil {
		return a.lobbyCommands()
	}
	return a.commands()
}

func (a *app) context() context.Context {
	if a.ctx != nil {
		return a.ctx
	}
	return context.Background()
}

// cli hands flags and actions to urfave/cli. Its help, version, completion and
// error printing are all replaced: they print to stdout, take the flags of a
// command only in front of its operands, and end the process by themselves.
func (a *app) cli(root *cli.Command) *cli.App {
	var adapt func(*cli.Command)
	adapt = func(c *cli.Command) {
		c.HideHelp, c.HideHelpCommand = true, true
		c.OnUsageError = func(_ *cli.Context, err error, _ bool) error { return flagError(c, err) }
		if c.Action == nil {
			c.Action = func(*cli.Context) error { return a.noSuchCommand(c) }
		}
		for _, sub := range c.Subcommands {
			adapt(sub)
		}
	}
	adapt(root)
	return &cli.App{
		Name: root.Name, Flags: root.Flags, Commands: root.Subcommands, Action: root.Action,
		HideHelp: true, HideHelpCommand: true, HideVersion: true,
		DisableSliceFlagSeparator: true, // a comma in --env belongs to its value
		Writer:                    a.stdout, ErrWriter: a.stderr,
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   root.OnUsageError,
		Before:         a.before,
	}
}

// before takes in the global flags.
func (a *app) before(c *cli.Context) error {
	a.output = c.String("output")
	if !slices.Contains(outputs, a.output) {
		return usagef("--output is %s, not %q", oneOf(outputs), a.output)
	}
	a.quiet = c.Bool("quiet")
	a.node = targetFlags{
		context: c.String("context"), endpoint: c.String("endpoint"),
		key: c.String("api-key"), keyFile: c.String("api-key-file"), pin: c.String("pin"),
	}
	a.color = !c.Bool("no-color") && a.getenv("NO_COLOR") == "" && a.getenv("TERM") != "dumb" &&
		(a.forceColor || isTerminal(a.stdout) && enableEscapes(a.stdout))
	return nil
}

// The categories of commands, in the order of the help page.
const (
	catRun    = "Run programs"
	catLife   = "Sandboxes"
	catFiles  = "Files and ports"
	catReach  = "Egress and secrets"
	catMesh   = "Nodes and clusters"
	catWatch  = "Watch and check"
	catAccess = "Keys and contexts"
	catOther  = "Other"
)

var categories = []string{catRun, catLife, catFiles, catReach, catMesh, catWatch, catAccess, catOther}

// commands is the whole tree. A command's Usage is one line, its UsageText the
// forms of its command line, its Description ends with "Examples:".
func (a *app) commands() *cli.Command {
	return &cli.Command{
		Name:  "boxedctl",
		Usage: "run code in hardened sandboxes",
		Flags: globalFlags(),
		Subcommands: []*cli.Command{
			a.cmdRun(), a.cmdExec(), a.cmdShell(), a.cmdSSH(), a.cmdRepl(), a.cmdPs(), a.cmdLogs(), a.cmdKill(),
			a.cmdCreate(), a.cmdLs(), a.cmdGet(), a.cmdInspect(), a.cmdRm(), a.cmdWait(),
			a.cmdRenew(), a.cmdKeep(), a.cmdUpdate(), a.cmdPause(), a.cmdResume(), a.cmdStats(),
			a.cmdCp(), a.cmdFs(), a.cmdForward(), a.cmdPorts(),
			a.cmdEgress(), a.cmdSecret(), a.cmdAudit(),
			a.cmdNode(), a.cmdExplain(), a.cmdCluster(),
			a.cmdEvents(), a.cmdReplay(), a.cmdSmoke(), a.cmdDoctor(),
			a.cmdKey(), a.cmdSSHKey(), a.cmdSSHConfig(), a.cmdWhoami(), a.cmdContext(),
			a.cmdVersion(), a.cmdCompletion(), a.cmdComplete(), a.cmdSSHProxy(), a.cmdHelp(), a.cmdExitCodes(),
		},
	}
}

// globalFlags may stand anywhere. Their environment is read by resolve: it
// ranks the context between the two, which urfave/cli cannot.
func globalFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "context", Usage: "speak to the node that was added under this `NAME` [BOXED_CONTEXT]"},
		&cli.StringFlag{Name: "endpoint", Usage: "speak to the node at this `URL` [BOXED_ENDPOINT]"},
		&cli.StringFlag{Name: "api-key", Usage: "authenticate with `KEY`; others can see it in the list of processes, so prefer the next [BOXED_API_KEY]"},
		&cli.StringFlag{Name: "api-key-file", Usage: "authenticate with the key in `FILE` [BOXED_API_KEY_FILE]"},
		&cli.StringFlag{Name: "pin", Usage: "trust the server certificate with this `SHA256` and no other [BOXED_PIN]"},
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: outputTable, Usage: "print as `FORMAT`: table, json (the API's own fields) or name (identifiers only)"},
		&cli.BoolFlag{Name: "no-color", Usage: "print no colours (also: NO_COLOR in the environment)"},
		&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "print no hints and notices on stderr"},
	}
}

// examples ends a Description.
func examples(lines ...string) string {
	return "\n\nExamples:\n  " + strings.Join(lines, "\n  ")
}

// deadlineAfter is a context for cleaning up after the caller's has ended.
func deadlineAfter(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}
