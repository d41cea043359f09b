// Command sim asks how far a mesh of boxed goes: it runs the real scheduler and
// Ledger in meshes of 1,000 and 5,000 nodes in virtual time, the real membership
// and documents with up to 200 nodes in this process, and above that a model of
// gossip that is fitted to them. It writes bench/results/sim.csv, and from that
// docs/simulation.md with its pictures.
//
//	sim [-quick] [-only placement] [-out FILE]   simulates
//	sim report                                   writes docs/simulation.md and docs/bench/sim-*.svg
//
// It is no benchmark of this machine: what takes time here is either virtual, or a
// matter of timers. Start reading at parts; world.go has the mesh in virtual time,
// place.go how it places, gossip.go the model.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if err := program(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "sim:", err)
		}
		os.Exit(1)
	}
}

// part is one of the experiments. They run in this order: each may use the rows of
// those before it.
type part struct {
	name string
	run  func(ctx context.Context, o options, before []row, log io.Writer) ([]row, error)
}

// options are what a person may choose.
type options struct {
	quick  bool
	meshes string // of membership, as nodes/pace
}

func parts() []part {
	return []part{
		{"membership", func(ctx context.Context, o options, before []row, log io.Writer) ([]row, error) {
			return membershipPart(ctx, o, before, log)
		}},
		{"documents", func(ctx context.Context, o options, _ []row, log io.Writer) ([]row, error) {
			return documentsPart(ctx, o.quick, log)
		}},
		{"model", func(_ context.Context, o options, before []row, log io.Writer) ([]row, error) {
			return modelPart(before, o.quick, log)
		}},
		{"placement", func(ctx context.Context, o options, _ []row, log io.Writer) ([]row, error) {
			return runPoints(ctx, points(o.quick), log)
		}},
		{"scale", func(ctx context.Context, o options, before []row, log io.Writer) ([]row, error) {
			if o.quick {
				return nil, nil // half a minute is over
			}
			return runPoints(ctx, scalePoints(delaysOf(before)), log)
		}},
	}
}

// delaysOf are how late views are by the number of nodes, as the model has it.
func delaysOf(rows measured) map[int]float64 {
	delays := map[int]float64{}
	for _, n := range modelSizes {
		if r, ok := rows.get(sysModel, viewDelay(n, scalePublish)); ok {
			delays[n] = r.P50
		}
	}
	return delays
}

// scalePublish is how often a node of the simulated mesh tells of itself, about.
const scalePublish = 5 * time.Second

func viewDelay(nodes int, publish time.Duration) string {
	return named("view_delay", "nodes", nodes, "pace", "lan", "publish", publish.Seconds())
}

// program is main with everything that a test wants to replace.
func program(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "report" {
		return reportCommand(args[1:], stderr)
	}
	var o options
	var only, out string
	flags := flag.NewFlagSet("sim", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.BoolVar(&o.quick, "quick", false, "small meshes, half a minute: to see that it works; nothing is written without -out")
	flags.StringVar(&only, "only", "", "parts, separated by commas: membership, documents, model, placement, scale; rows of the others stay as they are")
	flags.StringVar(&o.meshes, "mesh", "", "meshes of membership as nodes/pace, separated by commas: 200/wan; the others stay as they are (default all)")
	flags.StringVar(&out, "out", "", "file of the results (default bench/results/sim.csv)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is no command; it may be report, or nothing", flags.Arg(0))
	}
	chosen, err := choose(only)
	if err != nil {
		return err
	}
	paths := at{csv: out, machine: out + ".json"}
	if out == "" && !o.quick {
		root, err := repository()
		if err != nil {
			return err
		}
		paths = placesIn(root)
	}
	return simulate(ctx, chosen, o, paths, stdout, stderr)
}

// at is where things lie.
type at struct{ csv, machine, docs string }

func placesIn(root string) at {
	return at{
		csv: filepath.Join(root, "bench", "results", "sim.csv"), machine: filepath.Join(root, "bench", "sim", "machine.json"),
		docs: filepath.Join(root, "docs"),
	}
}

func choose(only string) (list []part, err error) {
	for _, p := range parts() {
		if only == "" || slices.Contains(strings.Split(only, ","), p.name) {
			list = append(list, p)
		}
	}
	if only != "" && len(list) != len(strings.Split(only, ",")) {
		return nil, fmt.Errorf("-only %s names a part that is not there", only)
	}
	return list, nil
}

// simulate runs the parts, and writes what is there after each: the whole takes long.
func simulate(ctx context.Context, chosen []part, o options, paths at, stdout, log io.Writer) error {
	var rows []row
	runs := map[string]run{}
	if paths.csv != "" {
		var err error
		if rows, runs, err = readResults(paths); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	for _, p := range chosen {
		fmt.Fprintln(log, p.name)
		about := describe(o.quick)
		made, err := p.run(ctx, o, rows, log)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		about.Seconds = time.Since(about.Date).Round(time.Second).Seconds()
		for i := range made {
			made[i].Part = p.name
		}
		rows = merge(rows, p.name, made)
		runs[p.name] = about
		if paths.csv != "" {
			if err := writeResults(paths, rows, runs); err != nil {
				return err
			}
		}
	}
	return writeRows(stdout, rows)
}

// merge replaces a part's rows, in the order of the parts.
func merge(rows []row, name string, made []row) (all []row) {
	for _, p := range parts() {
		if p.name == name {
			all = append(all, made...)
			continue
		}
		for _, r := range rows {
			if r.Part == p.name {
				all = append(all, r)
			}
		}
	}
	return all
}

func readResults(paths at) ([]row, map[string]run, error) {
	runs := map[string]run{}
	f, err := os.Open(paths.csv)
	if err != nil {
		return nil, runs, err
	}
	defer f.Close()
	rows, err := readRows(f)
	if err != nil {
		return nil, runs, fmt.Errorf("%s: %w", paths.csv, err)
	}
	text, err := os.ReadFile(paths.machine)
	if err != nil {
		return nil, runs, err
	}
	return rows, runs, json.Unmarshal(text, &runs)
}

func writeResults(paths at, rows []row, runs map[string]run) error {
	var text strings.Builder
	if err := writeRows(&text, rows); err != nil {
		return err
	}
	if err := replace(paths.csv, []byte(text.String())); err != nil {
		return err
	}
	raw, err := json.MarshalIndent(runs, "", "  ")
	if err != nil {
		return err
	}
	return replace(paths.machine, append(raw, '\n'))
}
