package ctl

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdExplain() *cli.Command {
	return &cli.Command{
		Name: "explain", Category: catMesh,
		Usage:     "say where a sandbox would go, and why not elsewhere",
		UsageText: "boxedctl explain [OPTIONS]",
		Description: "Takes the options of create, asks where such a sandbox would be placed now, and makes none. " +
			fmt.Sprintf("The status is %d if no node would take it. With -o name it prints the node that would be chosen.", exitNowhere()) +
			examples("boxedctl explain", "boxedctl explain --memory 16g --node-label disk=fast", "boxedctl explain --isolation vm -o json"),
		Flags:  specFlags(),
		Action: a.explainPlacement,
	}
}

// exitNowhere is the status of a create that no node takes.
func exitNowhere() int { return exitOf(boxed.CodeExhausted) }

func (a *app) explainPlacement(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	spec, _, err := a.parseSpec(c)
	if err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if err := a.place(c.Context, svc, c, &spec); err != nil {
		return err
	}
	e, err := svc.Explain(c.Context, spec)
	if err != nil {
		return err
	}
	t := table.New(table.Column{Name: "NODE", Keep: true}, table.Column{Name: "ID", Keep: true}, table.Column{Name: "VERDICT"},
		table.Column{Name: "REASON"}, table.Column{Name: "WHY"})
	var chosen []string
	taken := false
	for _, v := range e.Verdicts {
		verdict := table.Cell{Text: "no", Style: table.Bad}
		switch {
		case v.Chosen:
			verdict = table.Cell{Text: "chosen", Style: table.Good}
			chosen = append(chosen, string(v.Node))
		case v.Fits:
			verdict = table.Cell{Text: "fits"}
		}
		taken = taken || v.Chosen || v.Fits
		t.Add(table.Cell{Text: firstOf(v.Name, "-")}, table.Cell{Text: string(v.Node)}, verdict,
			table.Cell{Text: firstOf(v.Reason, "-")}, table.Cell{Text: v.Message})
	}
	if err := a.print(e, chosen, t); err != nil {
		return err
	}
	if !taken {
		a.notice("no node would take it now")
		return exitStatus(exitNowhere())
	}
	return nil
}
