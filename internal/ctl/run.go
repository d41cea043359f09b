package ctl

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

var errIsDirectory = errors.New("it is a directory")

// runGrace is how long a program may go on after boxedctl was told to end.
const runGrace = 5 * time.Second

func (a *app) cmdRun() *cli.Command {
	return &cli.Command{
		Name: "run", Category: catRun,
		Usage: "run a program in a sandbox of its own",
		UsageText: "boxedctl run [OPTIONS] -c CODE [ARGS…]\n" +
			"boxedctl run [OPTIONS] FILE|- [ARGS…]\n" +
			"boxedctl run [OPTIONS] -- PROGRAM [ARGS…]",
		Description: "Makes a sandbox, runs the program, passes its output and its exit status on, and destroys the sandbox, " +
			"also when it is interrupted. What follows FILE belongs to the program. The language is that of --lang, " +
			"else of the file's extension or #! line; -c and - are python by default.\n" +
			"With -o json it prints one object with the output (up to " + fmt.Sprint(boxed.CollectedOutput/boxed.MiB) + " MiB of each stream) and how the program ended.\n" +
			"Earlier spelling: boxed run CODE, which is boxedctl run -c CODE and works as well." +
			examples(
				"boxedctl run -c 'print(6*7)'",
				"boxedctl run --lang bash -c 'echo $1' hello",
				"boxedctl run --file data.csv --timeout 30s ./report.py data.csv",
				"boxedctl run --image node:22-slim -- node --version",
				"echo '{\"n\": 1}' | boxedctl run -i -c 'import json, sys; print(json.load(sys.stdin))'",
			),
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "code", Aliases: []string{"c"}, Usage: "the program is `CODE`"},
			langFlag(),
			&cli.BoolFlag{Name: "interactive", Aliases: []string{"i"}, Usage: "pass stdin to the program, which has none otherwise"},
			&cli.BoolFlag{Name: "tty", Aliases: []string{"t"}, Usage: "run it on a terminal"},
			timeoutFlag(),
			&cli.StringFlag{Name: "output-limit", Usage: "end it when it wrote more than `SIZE`"},
			&cli.BoolFlag{Name: "keep", Usage: "keep the sandbox and print its ID on stderr"},
		}, specFlags()...),
		Action: a.run,
	}
}

func langFlag() cli.Flag {
	return &cli.StringFlag{Name: "lang", Aliases: []string{"l"}, Usage: "`LANGUAGE`: " + oneOf(boxed.Languages())}
}

func timeoutFlag() cli.Flag {
	return &cli.StringFlag{Name: "timeout", Usage: fmt.Sprintf("end the program and all it started after `DURATION`; boxedctl's status is %d then", exitTimeout)}
}

func (a *app) run(c *cli.Context) error {
	p, err := a.parseProgram(c)
	if err != nil {
		return err
	}
	spec, uploads, err := a.parseSpec(c)
	if err != nil {
		return err
	}
	o, err := parseExecOptions(c)
	if err != nil {
		return err
	}
	o.streams.grace = runGrace
	if err := o.streams.check(a); err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if err := a.place(c.Context, svc, c, &spec); err != nil {
		return err
	}
	return a.throwaway(svc, spec, uploads, c.Bool("keep"), func(in *interrupts, sb *boxed.Sandbox) (int, error) {
		return a.runProgram(in, svc, sb.ID, p, o)
	})
}

// throwaway makes a sandbox, does something in it, and destroys it.
func (a *app) throwaway(svc service, spec boxed.Spec, uploads []upload, keep bool, do func(*interrupts, *boxed.Sandbox) (int, error)) error {
	in := catchInterrupts()
	defer in.stop()
	sb, err := a.makeSandbox(in, svc, spec, uploads, boxed.NewToken(16))
	if err != nil {
		return err
	}
	if keep {
		fmt.Fprintln(a.stderr, sb.ID)
	} else {
		defer a.destroy(svc, sb.ID)
	}
	status, err := do(in, sb)
	if err != nil {
		return err
	}
	return asStatus(status)
}

// parseProgram finds out what run is to run.
func (a *app) parseProgram(c *cli.Context) (*program, error) {
	words := c.Args().Slice()
	lang := c.String("lang")
	switch {
	case c.IsSet("code"):
		return codeProgram(c.String("code"), lang, words)
	case a.line.dash == 0 && len(words) > 0:
		if lang != "" {
			return nil, usagef("--lang is for code; behind -- is a command line")
		}
		return &program{argv: words}, nil
	case len(words) == 0:
		return nil, usagef("there is nothing to run").hint("%s", strings.ReplaceAll("usage: "+a.line.command.UsageText, "\n", "; or "))
	}
	if _, err := os.Stat(words[0]); errors.Is(err, os.ErrNotExist) && words[0] != "-" {
		if len(words) == 1 && looksLikeCode(words[0]) {
			return codeProgram(words[0], lang, nil)
		}
		return nil, usagef("there is no file %s", words[0]).hint("code goes behind -c, a program of the sandbox behind --")
	}
	if words[0] == "-" && c.Bool("interactive") {
		return nil, usagef("stdin cannot be both the program (-) and what it reads (-i)")
	}
	return a.fileProgram(words[0], lang, words[1:])
}

// execOptions are the options that run and exec share.
type execOptions struct {
	streams   streams
	timeout   boxed.Duration
	maxOutput int64
	env       map[string]string
	dir       string
}

func parseExecOptions(c *cli.Context) (execOptions, error) {
	o := execOptions{streams: streams{stdin: c.Bool("interactive"), tty: c.Bool("tty")}}
	var err error
	if o.timeout, err = parseDuration("timeout", c.String("timeout")); err != nil {
		return o, err
	}
	if o.timeout == boxed.Never {
		o.timeout = 0
	}
	if s := c.String("output-limit"); s != "" {
		if o.maxOutput, err = parseSize(s); err != nil {
			return o, wrapf(err, "--output-limit")
		}
	}
	return o, nil
}

func (o execOptions) apply(req *boxed.ExecRequest) {
	req.Timeout, req.MaxOutput, req.Env, req.Dir = o.timeout, o.maxOutput, o.env, o.dir
}

// runProgram runs p in a sandbox and returns the exit status.
func (a *app) runProgram(in *interrupts, svc service, id boxed.ID, p *program, o execOptions) (int, error) {
	ctx, release := in.cancelling(context.Background())
	req, err := a.prepare(ctx, svc, id, p)
	release()
	if err != nil {
		return 0, err
	}
	o.apply(&req)
	if a.output == outputJSON {
		return a.collect(in, svc, id, req, o)
	}
	return a.attach(context.Background(), in, o.streams, func(ctx context.Context, with boxed.ExecRequest) (boxed.ExitStatus, error) {
		return svc.Exec(ctx, id, withStreams(req, with))
	})
}

// withStreams is what to run with the streams it runs on.
func withStreams(req, with boxed.ExecRequest) boxed.ExecRequest {
	with.Args, with.Language, with.Code = req.Args, req.Language, req.Code
	with.Env, with.Dir, with.Timeout, with.MaxOutput = req.Env, req.Dir, req.Timeout, req.MaxOutput
	return with
}

// collect runs a program as one call and prints the result as JSON.
func (a *app) collect(in *interrupts, svc service, id boxed.ID, req boxed.ExecRequest, o execOptions) (int, error) {
	if o.streams.tty {
		return 0, usagef("-t and -o json exclude each other")
	}
	ctx, release := in.cancelling(context.Background())
	defer release()
	if o.streams.stdin {
		req.Stdin = a.stdin
	}
	if req.Timeout == 0 {
		req.Timeout = boxed.Never // as without -o json
	}
	result, err := svc.Run(ctx, id, req)
	if ctx.Err() != nil {
		return 0, in.err()
	}
	if err != nil {
		return 0, err
	}
	if err := a.printJSON(newResult(result)); err != nil {
		return 0, err
	}
	return exitOfProgram(result.ExitStatus), nil
}

// execResult is the API's ExecResult, as its clients see it.
type execResult struct {
	ExecID boxed.ExecID `json:"exec_id"`
	boxed.ExitStatus
	Stdout          string `json:"stdout"`
	StdoutEncoding  string `json:"stdout_encoding"`
	StdoutTruncated bool   `json:"stdout_truncated"`
	Stderr          string `json:"stderr"`
	StderrEncoding  string `json:"stderr_encoding"`
	StderrTruncated bool   `json:"stderr_truncated"`
}

func newResult(r *client.ExecResult) execResult {
	out := execResult{ExecID: r.ID, ExitStatus: r.ExitStatus, StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated}
	out.Stdout, out.StdoutEncoding = encoded(r.Stdout)
	out.Stderr, out.StderrEncoding = encoded(r.Stderr)
	return out
}

func encoded(b []byte) (text, encoding string) {
	if utf8.Valid(b) {
		return string(b), "utf-8"
	}
	return base64.StdEncoding.EncodeToString(b), "base64"
}

// scratch is where a program's file goes that cannot be sent as code.
const scratch = "/tmp"

// prepare turns a program into a request. The API takes either code or
// arguments: code with arguments, and a file that runs by itself, is copied in.
func (a *app) prepare(ctx context.Context, svc service, id boxed.ID, p *program) (boxed.ExecRequest, error) {
	switch {
	case p.source == nil:
		return boxed.ExecRequest{Args: p.argv}, nil
	case p.language != "" && len(p.args) == 0:
		return boxed.ExecRequest{Language: p.language, Code: string(p.source)}, nil
	}
	file := scratch + "/" + boxed.NewToken(8) + "/" + p.name
	if _, err := svc.WriteFile(ctx, id, boxed.WriteRequest{Path: file, Content: strings.NewReader(string(p.source)), Mode: 0o755, Parents: true}); err != nil {
		return boxed.ExecRequest{}, wrapf(err, "copy the program")
	}
	argv := append([]string{file}, p.args...)
	switch p.language {
	case "python":
		argv = append([]string{"python3"}, argv...)
	case "javascript":
		argv = append([]string{"node"}, argv...)
	case "bash":
		argv = append([]string{"bash"}, argv...)
	}
	return boxed.ExecRequest{Args: argv}, nil
}
