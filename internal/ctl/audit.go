package ctl

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdAudit() *cli.Command {
	return &cli.Command{
		Name: "audit", Category: catReach,
		Usage:       "check the audit log",
		UsageText:   "boxedctl audit COMMAND",
		Description: "boxedctl egress log reads it." + examples("boxedctl audit verify"),
		Subcommands: []*cli.Command{a.cmdAuditVerify()},
	}
}

func (a *app) cmdAuditVerify() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "check that the audit log is as it was written",
		UsageText: "boxedctl audit verify",
		Description: "Every record has the hash of the one before: what was changed, taken out or put in shows. It is about the log of the node that answers. " +
			fmt.Sprintf("The status is %d if it is not as it was written. Only for administrators.", exitFailed) +
			examples("boxedctl audit verify", "boxedctl audit verify -o json"),
		Action: a.verifyAudit,
	}
}

func (a *app) verifyAudit(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	svc, err := a.connectToOne()
	if err != nil {
		return err
	}
	report, err := svc.VerifyAudit(c.Context)
	if err != nil {
		return err
	}
	if err := a.printAudit(report); err != nil {
		return err
	}
	if len(report.Broken) > 0 {
		return exitStatus(exitFailed)
	}
	return nil
}

// printAudit prints what was found, and each place that is broken.
func (a *app) printAudit(r *boxed.AuditReport) error {
	files := make([]string, len(r.Broken))
	broken := table.New(table.Column{Name: "FILE", Keep: true}, table.Column{Name: "LINE", Right: true}, table.Column{Name: "WHY"})
	for i, b := range r.Broken {
		files[i] = b.File
		line := "-"
		if b.Line > 0 {
			line = fmt.Sprint(b.Line)
		}
		files[i] = firstOf(b.File, "-")
		broken.Row(files[i], line, b.Why)
	}
	fields := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	fields.Row("Records:", fmt.Sprint(r.Records))
	if r.Records > 0 {
		fields.Row("Range:", fmt.Sprintf("%d to %d", r.First, r.Last))
	}
	fields.Row("Files:", fmt.Sprint(r.Files))
	state := table.Cell{Text: "as it was written", Style: table.Good}
	if len(r.Broken) > 0 {
		state = table.Cell{Text: fmt.Sprintf("broken in %d places", len(r.Broken)), Style: table.Bad}
	}
	if len(r.Broken) == 1 {
		state.Text = "broken in 1 place"
	}
	fields.Add(table.Cell{Text: "Log:"}, state)
	if err := a.printFields(r, files, fields); err != nil || a.output != outputTable || len(r.Broken) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(a.stdout); err != nil {
		return err
	}
	return a.print(r, files, broken)
}
