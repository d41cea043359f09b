package ctl

import (
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdFreeze() *cli.Command {
	return &cli.Command{
		Name:      "freeze",
		Usage:     "shut the egress of sandboxes, now, on all nodes",
		UsageText: "boxedctl egress freeze [--label K=V…] [--owner OWNER | --all]",
		Description: "What is open ends, and nothing opens until it is thawed, in sandboxes that are yet to be made too. Without options it is all of yours. " +
			"A node that is cut off learns of it when it is connected again. It does not ask first. Others' sandboxes are for administrators." +
			examples("boxedctl egress freeze", "boxedctl egress freeze --label task=nightly", "boxedctl egress freeze --all"),
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "label", Usage: "only those with the label `K=V`; repeated, with all of them"},
			&cli.StringFlag{Name: "owner", Usage: "those of `OWNER`; administrators only"},
			&cli.BoolFlag{Name: "all", Usage: "everybody's; administrators only"},
		},
		Action: a.freeze,
	}
}

func (a *app) freeze(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	f := boxed.EgressFreeze{Owner: c.String("owner"), All: c.Bool("all")}
	if f.All && f.Owner != "" {
		return usagef("--all and --owner exclude each other")
	}
	var err error
	if f.Labels, err = parseLabels(c.StringSlice("label")); err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	frozen, err := svc.Freeze(c.Context, f)
	if err != nil {
		return err
	}
	if err := a.printFreezes(frozen, []boxed.EgressFreeze{*frozen}); err != nil {
		return err
	}
	a.notice("boxedctl egress thaw %s opens them again", frozen.ID)
	return nil
}

// frozenText is what a freeze shuts.
func frozenText(f boxed.EgressFreeze) string {
	text := "those of " + f.Owner
	if f.All {
		text = "everybody's"
	}
	if len(f.Labels) > 0 {
		text += " with " + pairs(f.Labels)
	}
	return text
}

func (a *app) printFreezes(v any, list []boxed.EgressFreeze) error {
	t := table.New(table.Column{Name: "FREEZE", Keep: true}, table.Column{Name: "SANDBOXES"}, table.Column{Name: "BY"}, table.Column{Name: "AGE", Right: true})
	now := time.Now()
	ids := make([]string, len(list))
	for i, f := range list {
		ids[i] = f.ID
		t.Row(f.ID, frozenText(f), f.By, table.Age(f.At, now))
	}
	return a.print(v, ids, t)
}

func (a *app) cmdFreezes() *cli.Command {
	return &cli.Command{
		Name:        "freezes",
		Usage:       "list what is frozen",
		UsageText:   "boxedctl egress freezes",
		Description: "Those that you may thaw." + examples("boxedctl egress freezes", "boxedctl egress freezes -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list, err := svc.Freezes(c.Context)
			if err != nil {
				return err
			}
			if list == nil {
				list = []boxed.EgressFreeze{}
			}
			return a.printFreezes(map[string]any{"freezes": list}, list)
		},
	}
}

func (a *app) cmdThaw() *cli.Command {
	return &cli.Command{
		Name:        "thaw",
		Usage:       "open what was frozen",
		UsageText:   "boxedctl egress thaw FREEZE…",
		Description: "FREEZE is the ID that egress freezes shows. What another freeze shuts too stays shut." + examples("boxedctl egress thaw k7m2xqabcd"),
		Action: func(c *cli.Context) error {
			for _, id := range c.Args().Slice() {
				if !boxed.ValidName(id) {
					return usagef("%q is the ID of no freeze", id).hint("boxedctl egress freezes lists them")
				}
			}
			return a.revokeEach(service.Thaw)(c)
		},
	}
}
