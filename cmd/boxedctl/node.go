package main

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdNode() *cli.Command {
	return &cli.Command{
		Name: "node", Category: catWatch,
		Usage:       "describe the node",
		UsageText:   "boxedctl node",
		Description: "What it can hold and holds, its runtimes and templates, its warm sandboxes, and what it lacks." + examples("boxedctl node", "boxedctl node -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			n, err := svc.NodeInfo(c.Context)
			if err != nil {
				return err
			}
			return a.printFields(n, []string{string(n.ID)}, nodeFields(n))
		},
	}
}

func nodeFields(n *boxed.NodeInfo) *table.Table {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	t.Row("Node:", string(n.ID))
	t.Row("Name:", n.Name)
	ready := table.Cell{Text: "yes", Style: table.Good}
	if !n.Ready {
		ready = table.Cell{Text: "no", Style: table.Bad}
	}
	t.Add(table.Cell{Text: "Ready:"}, ready)
	if n.Draining {
		t.Add(table.Cell{Text: "Draining:"}, table.Cell{Text: "yes", Style: table.Warn})
	}
	for _, p := range n.Problems {
		t.Add(table.Cell{Text: "Problem:"}, table.Cell{Text: p, Style: table.Warn})
	}
	t.Row("Version:", n.Version)
	t.Row("Architecture:", n.Arch)
	t.Row("Engine:", n.Engine)
	t.Row("Cgroup:", fmt.Sprintf("v%d", n.Cgroup))
	t.Row("Runtimes:", strings.Join(n.Runtimes, ", ")+" (default: "+firstOf(n.Default, "none")+")")
	count := fmt.Sprint(n.Sandboxes)
	if n.Capacity.Sandboxes > 0 {
		count += fmt.Sprintf(" of %d", n.Capacity.Sandboxes)
	}
	t.Row("Sandboxes:", count)
	t.Row("Memory:", table.Size(n.Used.MemoryBytes)+" promised of "+table.Size(n.Capacity.MemoryBytes))
	t.Row("Cores:", fmt.Sprintf("%g promised of %g", n.Used.CPUs, n.Capacity.CPUs))
	for _, tp := range n.Templates {
		t.Row("Template:", fmt.Sprintf("%s: %s, %s memory, %g cores", tp.Name, tp.Image, table.Size(tp.Limits.MemoryBytes), tp.Limits.CPUs))
	}
	for _, p := range n.Pool {
		text := fmt.Sprintf("%s on %s: %d of %d ready", firstOf(p.Template, p.Image), p.Runtime, p.Ready, p.Size)
		if p.Problem != "" {
			t.Add(table.Cell{Text: "Pool:"}, table.Cell{Text: text + ": " + p.Problem, Style: table.Warn})
			continue
		}
		t.Row("Pool:", text)
	}
	misses := int64(0)
	for _, m := range n.WarmMisses {
		misses += m
	}
	t.Row("Warm:", fmt.Sprintf("%d hits, %d misses", n.WarmHits, misses))
	for _, why := range sortedKeys(n.WarmMisses) {
		t.Row("", fmt.Sprintf("%d × %s", n.WarmMisses[why], why))
	}
	t.Row("Up since:", when(n.StartedAt))
	return t
}

func (a *app) cmdStats() *cli.Command {
	return &cli.Command{
		Name: "stats", Category: catLife,
		Usage:       "show what sandboxes use",
		UsageText:   "boxedctl stats [SANDBOX…]",
		Description: "Without SANDBOX all of yours that run." + examples("boxedctl stats", "boxedctl stats build -o json"),
		Action: func(c *cli.Context) error {
			svc, err := a.connect()
			if err != nil {
				return err
			}
			boxes, err := sandboxes(c.Context, svc, c.Args().Slice())
			if err != nil {
				return err
			}
			type entry struct {
				ID   boxed.ID `json:"id"`
				Name string   `json:"name,omitempty"`
				*boxed.Stats
			}
			list := []entry{}
			t := table.New(table.Column{Name: "ID", Keep: true}, table.Column{Name: "NAME", Keep: true}, table.Column{Name: "MEMORY", Right: true},
				table.Column{Name: "LIMIT", Right: true}, table.Column{Name: "CPU", Right: true}, table.Column{Name: "PROCS", Right: true},
				table.Column{Name: "EXECS", Right: true}, table.Column{Name: "OOM", Right: true})
			var names []string
			for _, sb := range boxes {
				s, err := svc.Stats(c.Context, sb.ID)
				if err != nil {
					if len(boxes) > 1 && boxed.CodeOf(err) == boxed.CodeGone {
						continue // it ended since it was listed
					}
					return err
				}
				names = append(names, string(sb.ID))
				list = append(list, entry{sb.ID, sb.Name, s})
				t.Row(sb.ID.Random(), firstOf(sb.Name, "-"), table.Size(s.MemoryBytes), table.Size(s.MemoryLimit), fmt.Sprintf("%.1fs", s.CPUSeconds),
					fmt.Sprint(s.Processes), fmt.Sprint(s.Execs), fmt.Sprint(s.OOMKills))
			}
			if c.NArg() == 1 {
				return a.print(list[0].Stats, names, t)
			}
			return a.print(map[string]any{"stats": list}, names, t)
		},
	}
}

// sandboxes finds the sandboxes that refs name, or all that run.
func sandboxes(ctx context.Context, svc service, refs []string) ([]boxed.Sandbox, error) {
	if len(refs) == 0 {
		list, err := listAll(ctx, svc, boxed.Filter{States: []boxed.State{boxed.StateRunning, boxed.StatePaused}}, 0)
		return list.Sandboxes, err
	}
	var boxes []boxed.Sandbox
	for _, ref := range refs {
		sb, err := getSandbox(ctx, svc, ref)
		if err != nil {
			return nil, err
		}
		boxes = append(boxes, *sb)
	}
	return boxes, nil
}

func (a *app) cmdVersion() *cli.Command {
	return &cli.Command{
		Name: "version", Category: catOther,
		Usage:       "show the versions of boxedctl and of the node",
		UsageText:   "boxedctl version [--client]",
		Description: "A node that does not answer is no error." + examples("boxedctl version", "boxedctl version --client -o name"),
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "client", Usage: "only boxedctl's own, without a connection"}},
		Action: func(c *cli.Context) error {
			out := map[string]any{"client": versionText(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
			t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
			t.Row("boxedctl:", fmt.Sprintf("%s (%s, %s/%s)", versionText(), runtime.Version(), runtime.GOOS, runtime.GOARCH))
			if !c.Bool("client") {
				ctx, cancel := context.WithTimeout(c.Context, 5*time.Second)
				defer cancel()
				svc, err := a.connect()
				var server string
				if err == nil {
					server, err = svc.Version(ctx)
				}
				if err == nil {
					out["server"] = server
					t.Row("boxed-node:", server)
				} else {
					out["server_error"] = message(err)
					t.Row("boxed-node:", "no answer: "+message(err))
				}
			}
			return a.printFields(out, []string{versionText()}, t)
		},
	}
}

// printVersion is --version.
func (a *app) printVersion() error {
	_, err := fmt.Fprintln(a.stdout, "boxedctl "+versionText())
	return err
}
