// Command boxed-node is the daemon of boxed: it runs the sandboxes of one host and
// serves the API.
//
// Here are its configuration (config.go, settings.go, load.go), what it needs
// on the disk before anything else (secret.go, tls.go, agent.go), and wire.go,
// which joins the parts. Start reading there.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
)

// Exit statuses.
const (
	exitFailed = 1 // it could not start, or a part of it failed
	exitUsage  = 2 // the command line or the configuration is wrong
)

func main() {
	os.Exit(Main(context.Background(), os.Args, os.Environ(), os.Stdout, os.Stderr))
}

// Main runs one invocation and returns its exit status.
func Main(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	p := &program{environ: environ, stdout: stdout, stderr: stderr}
	err := p.app().RunContext(ctx, args)
	var usage usageError
	var problems Problems
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage), errors.As(err, &problems):
		fmt.Fprintf(stderr, "boxed-node: %v\n", err)
		return exitUsage
	}
	fmt.Fprintf(stderr, "boxed-node: %v\n", err)
	return exitFailed
}

// program is one invocation.
type program struct {
	environ        []string
	stdout, stderr io.Writer
}

// usageError is a command line that makes no sense.
type usageError struct{ error }

func (p *program) app() *cli.App {
	cli.VersionFlag = nil
	app := &cli.App{
		Name:            "boxed-node",
		Usage:           "run sandboxes for AI agents on this host",
		Version:         versionText(),
		HideVersion:     true,
		HideHelpCommand: true,
		Suggest:         true,
		Writer:          p.stdout,
		ErrWriter:       p.stderr,
		ExitErrHandler:  func(*cli.Context, error) {}, // Main prints it and chooses the status
		Flags:           settingFlags(),
		Action:          p.run,
		Commands: []*cli.Command{
			{Name: "run", Usage: "run the node (what boxed-node does when told nothing else)", Flags: settingFlags(), Action: p.run},
			{Name: "config", Usage: "look at the configuration", Action: needCommand, Subcommands: []*cli.Command{
				{Name: "check", Usage: "find every mistake, without starting a node", Flags: settingFlags(), Action: p.configCheck},
				{Name: "print", Usage: "show every setting, its value and where that comes from", Flags: append(settingFlags(), outputFlag()), Action: p.configPrint},
			}},
			{Name: "key", Usage: "API keys of the configuration", Action: needCommand, Subcommands: []*cli.Command{
				{Name: "generate", Usage: "print a new secret, for api_key_file", Action: p.keyGenerate},
			}},
			{Name: "fingerprint", Usage: "print the SHA-256 of the certificate, for clients that pin it", Flags: settingFlags(), Action: p.fingerprint},
			{Name: "store", Usage: "the node's database, while the node is stopped", Action: needCommand, Subcommands: []*cli.Command{
				{Name: "salvage", Usage: "make a damaged database usable, keeping a copy", Flags: settingFlags(), Action: p.salvage},
			}},
			{Name: "version", Usage: "print the version", Flags: []cli.Flag{outputFlag()}, Action: p.version},
		},
	}
	strict(app.Commands)
	app.OnUsageError = onUsageError
	return app
}

// strict makes every command refuse what it does not know.
func strict(commands []*cli.Command) {
	for _, c := range commands {
		c.OnUsageError = onUsageError
		c.HideHelpCommand = true
		strict(c.Subcommands)
	}
}

func onUsageError(_ *cli.Context, err error, _ bool) error {
	return usageError{fmt.Errorf("%w; boxed-node --help shows what there is", err)}
}

func needCommand(ctx *cli.Context) error {
	if ctx.Args().Present() {
		return usageError{fmt.Errorf("there is no command %q; boxed-node %s --help shows what there is", ctx.Args().First(), ctx.Command.Name)}
	}
	return usageError{fmt.Errorf("boxed-node %s needs a command; --help shows what there is", ctx.Command.Name)}
}

func noArguments(ctx *cli.Context) error {
	if ctx.Args().Present() {
		return usageError{fmt.Errorf("%q is neither a command nor a flag; boxed-node --help shows what there is", ctx.Args().First())}
	}
	return nil
}

// settingFlags are the flags of a command that reads the configuration. All
// take text, and load.go reads it: so mistakes are reported together.
func settingFlags() []cli.Flag {
	flags := []cli.Flag{&cli.StringFlag{Name: "config", Usage: "YAML `FILE` with settings (BOXED_CONFIG)"}}
	for _, s := range Default().settings() {
		usage := s.help
		if text := s.text(); text != "" && text != "false" {
			usage += " (default " + text + ")"
		}
		switch {
		case s.kind() == "true or false":
			flags = append(flags, &cli.BoolFlag{Name: s.flag(), Usage: usage, Category: s.group()})
		default:
			flags = append(flags, &cli.StringFlag{Name: s.flag(), Usage: usage, Category: s.group()})
		}
	}
	return flags
}

func outputFlag() cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "text", Usage: "text or json"}
}

func wantsJSON(ctx *cli.Context) (bool, error) {
	switch o := ctx.String("output"); o {
	case "text":
		return false, nil
	case "json":
		return true, nil
	default:
		return false, usageError{fmt.Errorf("--output is text or json, not %q", o)}
	}
}

// load reads the configuration that the invocation means. Flags may stand
// before or after the command's name; the one nearest to the end wins.
func (p *program) load(ctx *cli.Context) (*Loaded, error) {
	if err := noArguments(ctx); err != nil {
		return nil, err
	}
	flags := map[string]string{}
	for _, c := range ctx.Lineage() {
		for _, name := range c.LocalFlagNames() {
			if _, set := flags[name]; !set {
				flags[name] = fmt.Sprint(c.Value(name))
			}
		}
	}
	file, ok := flags["config"]
	if !ok {
		file = p.getenv("BOXED_CONFIG")
	}
	return Load(Sources{File: file, Environ: p.environ, Flags: flags})
}

func (p *program) getenv(name string) string {
	for _, pair := range p.environ {
		if value, ok := strings.CutPrefix(pair, name+"="); ok {
			return value
		}
	}
	return ""
}
