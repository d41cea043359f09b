package ctl

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// quietAfter ends `events` without -f: the kept events have come when nothing
// came for so long.
const quietAfter = time.Second

func (a *app) cmdEvents() *cli.Command {
	return &cli.Command{
		Name: "events", Category: catWatch,
		Usage:     "show what happened to sandboxes",
		UsageText: "boxedctl events [-f] [--after CURSOR] [--sandbox SANDBOX]",
		Description: "Shows the events that are kept. With -f it starts now, or at --after, and goes on. -o json prints one event a line, with its cursor: " +
			"give the last one to --after to miss none." +
			examples("boxedctl events", "boxedctl events -f", "boxedctl events -f --after oldest -o json"),
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until interrupted"},
			&cli.StringFlag{Name: "after", Usage: "start behind `CURSOR`, or with the oldest"},
			&cli.StringFlag{Name: "sandbox", Usage: "only those of `SANDBOX`"},
		},
		Action: a.events,
	}
}

func (a *app) events(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	var only boxed.ID
	if ref := c.String("sandbox"); ref != "" {
		if only, err = sandboxID(c.Context, svc, ref); err != nil {
			return err
		}
	}
	after := boxed.Cursor(c.String("after"))
	ctx, cancel := context.WithCancel(c.Context)
	defer cancel()
	if !c.Bool("follow") {
		if after == "" {
			after = boxed.CursorOldest
		}
	}
	silence := time.AfterFunc(time.Hour, cancel)
	defer silence.Stop()
	if !c.Bool("follow") {
		silence.Reset(4 * quietAfter) // the first may take the time of a connection
	} else {
		silence.Stop()
	}
	for event, err := range svc.Events(ctx, after) {
		if err != nil {
			if ctx.Err() != nil {
				return nil // all that is kept has come
			}
			return err
		}
		if !c.Bool("follow") {
			silence.Reset(quietAfter)
		}
		if only != "" && event.Sandbox != only {
			continue
		}
		if err := a.printEvent(event); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printEvent(e boxed.Event) error {
	switch a.output {
	case outputJSON:
		return a.printJSONLine(e)
	case outputName:
		_, err := fmt.Fprintln(a.stdout, table.Inert(string(e.Cursor)))
		return err
	}
	subject := firstOf(e.Sandbox.Random(), string(e.Node))
	var words []string
	if e.Exec != "" {
		words = append(words, string(e.Exec))
	}
	if e.Reason != "" {
		words = append(words, e.Reason)
	}
	if e.Status != nil {
		words = append(words, statusCell(e.Status).Text)
	}
	if e.Message != "" {
		words = append(words, e.Message)
	}
	style := table.Plain
	switch e.Type {
	case boxed.EventFailed, boxed.EventNodeWarn:
		style = table.Bad
	case boxed.EventStarted:
		style = table.Good
	case boxed.EventStopped:
		style = table.Dim
	}
	kind := fmt.Sprintf("%-16s", table.Inert(string(e.Type)))
	_, err := fmt.Fprintf(a.stdout, "%s  %s  %-16s  %s\n", e.At.Local().Format("15:04:05.000"),
		table.Paint(kind, style, a.color), table.Inert(subject), table.Inert(strings.Join(words, " ")))
	return err
}
