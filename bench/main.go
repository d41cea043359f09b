// Command bench measures boxed against the Docker engine below it, on one
// machine and in one run, and writes what docs/benchmarks.md is made from.
//
// It starts a boxed-node of its own with a data directory of its own on the
// engine that is there, takes the systems in turn so that whatever the machine
// does hits all alike, checks output and status of every trial, and removes
// what it made. What is aimed at is in aims.go; no test fails for a slow machine.
//
//	bench [-quick] [-only lifecycle,exec] [-out DIR]   measures
//	bench report                                       writes docs/benchmarks.md and its plots
//	bench client                                       is what egress runs in a sandbox and beside it
//
// Start reading at experiments in experiment.go; systems.go has what is compared.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if err := program(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
		os.Exit(1)
	}
}

// program is main with everything that a test wants to replace.
func program(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "report" {
		return reportCommand(args[1:], stderr)
	}
	if len(args) > 0 && args[0] == clientProgram {
		return clientCommand(args[1:], os.Stdin, stdout)
	}
	root, err := repository()
	if err != nil {
		return err
	}
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	only := flags.String("only", "", "experiments, separated by commas (default all: "+strings.Join(names(), ", ")+")")
	flags.BoolVar(&o.quick, "quick", false, "few trials: to see that it works, not to be believed")
	flags.StringVar(&o.out, "out", "", "directory of the results (default bench/results, with -quick bench/results/quick)")
	flags.StringVar(&o.image, "image", "boxed/default:latest", "image of all systems alike; it needs python3 and coreutils")
	flags.StringVar(&o.bin, "bin", "", "directory of boxed-agent and boxed-node (default: they are built)")
	flags.IntVar(&o.trials, "n", 0, "trials of each system in the experiments that take turns (default: the experiment's own)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is no command; it may be report, or nothing", flags.Arg(0))
	}
	if o.out == "" {
		o.out = filepath.Join(root, "bench", "results")
		if o.quick {
			o.out = filepath.Join(o.out, "quick")
		}
	}
	chosen, err := choose(*only, o.quick)
	if err != nil {
		return err
	}
	return measure(ctx, root, o, chosen, stdout, stderr)
}

// repository is the root of the module: where the programs are built, and the
// results belong.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		text, err := os.ReadFile(filepath.Join(at, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module github.com/boxed-mesh/boxed\n") {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("%s is not in a clone of boxed: run this from one", dir)
		}
	}
}
