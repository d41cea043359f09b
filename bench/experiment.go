package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// options are what the command line says.
type options struct {
	quick  bool
	out    string
	image  string
	bin    string
	trials int
}

// experiment is one question, with its files <name>.csv, raw/<name>.csv.gz and
// <name>.env.json.
type experiment struct {
	name    string
	columns []string // of the raw trials, between "system" and "ok"
	run     func(ctx context.Context, r *rig, s *sheet) error
	busy    bool // with a load of processes that only compute
}

// experiments in the order in which they are run and shown. Those with a load
// come last: a machine that still cools down from it disturbs nobody.
func experiments() []experiment {
	list := []experiment{
		{name: "lifecycle", columns: lifecycleColumns, run: lifecycle},
		{name: "exec", columns: execColumns, run: execs},
		{name: "stdout", columns: stdoutColumns, run: stdout},
		{name: "throughput", columns: throughputColumns, run: throughput},
		{name: "burst", columns: burstColumns, run: burst},
		{name: "memory", columns: memoryColumns, run: memory},
		{name: "files", columns: filesColumns, run: files},
		{name: "mesh", columns: meshColumns, run: mesh},
		{name: "ssh", columns: sshColumns, run: front},
		{name: "egress", columns: egressColumns, run: leaving},
	}
	for _, e := range list {
		if slices.Contains(alsoBusy, e.name) {
			e.name, e.busy = e.name+busySuffix, true
			list = append(list, e)
		}
	}
	return list
}

// alsoBusy are the experiments that are done again on a machine that is busy.
var alsoBusy = []string{"lifecycle", "exec", "stdout", "throughput", "burst", "files"}

const busySuffix = "-busy"

func names() (list []string) {
	for _, e := range experiments() {
		list = append(list, e.name)
	}
	return list
}

// choose finds experiments by their names; "" is all of them, or in a quick run
// those that take seconds.
func choose(only string, quick bool) ([]experiment, error) {
	all := experiments()
	if only == "" {
		return slices.DeleteFunc(all, func(e experiment) bool { return quick && e.busy && e.name != "lifecycle"+busySuffix }), nil
	}
	var chosen []experiment
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(e experiment) bool { return e.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("there is no experiment %q; there are %s", name, strings.Join(names(), ", "))
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// measure runs the experiments. One that fails loses no other: its error is
// said, its old files stay, and the next begins.
func measure(ctx context.Context, root string, o options, chosen []experiment, stdout, stderr io.Writer) error {
	r, err := newRig(ctx, root, o, stderr)
	if err != nil {
		return err
	}
	defer r.close()
	var failed []string
	for i, e := range chosen {
		if ctx.Err() != nil {
			break
		}
		r.say("%s (%d of %d)", e.name, i+1, len(chosen))
		began := time.Now()
		if err := r.conduct(ctx, e, stdout); err != nil {
			r.say("%s failed: %v", e.name, err)
			failed = append(failed, e.name)
			continue
		}
		r.say("%s took %s", e.name, time.Since(began).Round(100*time.Millisecond))
	}
	if err := printAims(stdout, o.out); err != nil {
		return err
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted; what had ended is in %s", o.out)
	case len(failed) > 0:
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// conduct runs one experiment and writes its files.
func (r *rig) conduct(ctx context.Context, e experiment, stdout io.Writer) error {
	host, err := describeHost(ctx, r)
	if err != nil {
		return fmt.Errorf("describe the host: %w", err)
	}
	host.Experiment, host.Condition = e.name, "quiet"
	if e.busy {
		load, err := startLoad(2 * host.Cores)
		if err != nil {
			return err
		}
		defer load.stop()
		host.Condition = fmt.Sprintf("busy: %d processes that only compute", 2*host.Cores)
		host.LoadProcesses = 2 * host.Cores
	} else if host.disturbed() {
		r.say("the load average is %.2f before %s: not a quiet machine", host.LoadBefore, e.name)
	}
	r.busy = e.busy
	s := newSheet(e.name, r.started.UTC().Format("20060102T150405Z"), e.columns)
	if err := e.run(ctx, r, s); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	slices.SortStableFunc(s.rows, func(a, b row) int { return bySystem(a.System, b.System) })
	host.finish(s)
	if err := s.write(r.options.out, host); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	printRows(stdout, s.rows)
	return nil
}
