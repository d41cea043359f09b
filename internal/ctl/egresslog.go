package ctl

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdEgressLog() *cli.Command {
	return &cli.Command{
		Name:      "log",
		Usage:     "show what sandboxes asked for, and what became of it",
		UsageText: "boxedctl egress log [SANDBOX] [-f] [--denied] [--limit N] [--owner OWNER]",
		Description: "One line a record, the oldest first: when, the sandbox, the verdict, the way it came, the host and port, the request if the node could read it, " +
			"the reason of a refusal, and the bytes out of the sandbox and into it. Without SANDBOX it is yours on the node that answers. " +
			"-o json prints the records, one a line; they never hold a header, a query, a body or a secret." +
			examples("boxedctl egress log", "boxedctl egress log build -f --denied", "boxedctl egress log --owner '*' --limit 1000 -o json"),
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until interrupted"},
			&cli.BoolFlag{Name: "denied", Usage: "only what was refused"},
			&cli.IntFlag{Name: "limit", Aliases: []string{"n"}, Value: 100, Usage: "the newest `N`"},
			&cli.StringFlag{Name: "owner", Usage: "of this `OWNER`, * for everybody's; administrators only"},
		},
		Action: a.egressLog,
	}
}

func (a *app) egressLog(c *cli.Context) error {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return err
	}
	f := boxed.EgressFilter{Denied: c.Bool("denied"), Limit: c.Int("limit"), Follow: c.Bool("follow"), Owner: c.String("owner")}
	if f.Limit < 1 {
		return usagef("--limit must be more than 0")
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if len(words) == 1 {
		if f.Sandbox, err = sandboxID(c.Context, svc, words[0]); err != nil {
			return err
		}
	}
	for rec, err := range svc.EgressLog(c.Context, f) {
		if err == nil {
			err = a.printRecord(&rec)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// printRecord prints one record of the audit log.
func (a *app) printRecord(r *boxed.EgressRecord) error {
	switch a.output {
	case outputJSON:
		return a.printJSONLine(r)
	case outputName:
		_, err := fmt.Fprintln(a.stdout, r.Seq)
		return err
	}
	verdict, style := "refused", table.Bad
	switch {
	case r.End && r.Allowed:
		verdict, style = "ended", table.Dim
	case r.End:
		verdict = "cut" // it was allowed once
	case r.Allowed:
		verdict, style = "allowed", table.Good
	}
	_, err := fmt.Fprintf(a.stdout, "%s  %-10s  %s  %-6s  %s\n", r.At.Local().Format("2006-01-02 15:04:05"), table.Inert(r.Sandbox.Random()),
		table.Paint(fmt.Sprintf("%-7s", verdict), style, a.color), table.Inert(string(r.Entry)), table.Inert(recordText(r)))
	return err
}

// recordText is what was asked for, why it was refused, and how much went.
func recordText(r *boxed.EgressRecord) string {
	target := firstOf(r.Host, r.SNI, r.Address, "-")
	if r.Port > 0 {
		target = net.JoinHostPort(target, strconv.Itoa(int(r.Port)))
	}
	words := []string{target}
	if r.Method != "" {
		words = append(words, strings.TrimSpace(r.Method+" "+r.Path))
	}
	if r.Status > 0 {
		words = append(words, strconv.Itoa(r.Status))
	}
	if r.Reason != boxed.EgressAllowed {
		reason := string(r.Reason)
		if r.Detail != "" {
			reason += ": " + r.Detail
		}
		words = append(words, reason)
	}
	if r.Up > 0 || r.Down > 0 {
		words = append(words, table.Size(r.Up)+" out, "+table.Size(r.Down)+" in")
	}
	if r.Count > 1 {
		words = append(words, fmt.Sprintf("× %d", r.Count))
	}
	return strings.Join(words, "  ")
}
