package ctl

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdStats() *cli.Command {
	return &cli.Command{
		Name: "stats", Aliases: []string{"top"}, Category: catLife,
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
