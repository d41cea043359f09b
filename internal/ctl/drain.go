package ctl

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

// What drain does when it is told nothing else.
const (
	drainWithin   = "10m"
	drainEvery    = time.Second
	drainPatience = 30 // questions in a row that a node may leave unanswered
	shownWaiting  = 10 // sandboxes that are named
)

func (a *app) cmdNodeDrain() *cli.Command {
	return &cli.Command{
		Name:      "drain",
		Usage:     "empty a node",
		UsageText: "boxedctl node drain NODE [--within DURATION] [--wait]",
		Description: "Keeps new sandboxes away, waits for those that are there to end, and ends what is left when the time is over. " +
			"The node does it by itself: boxedctl may go away meanwhile. uncordon stops it. Only for administrators." +
			examples("boxedctl node drain attic", "boxedctl node drain attic --within 2h --wait", "boxedctl node drain attic --within 0s"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "within", Value: drainWithin, Usage: "end what is left after `DURATION`; 0s: at once"},
			&cli.BoolFlag{Name: "wait", Usage: "return when the node is empty; Ctrl-C leaves the drain going on"},
		},
		Action: a.drain,
	}
}

func (a *app) drain(c *cli.Context) error {
	within, err := parseDuration("within", c.String("within"))
	if err != nil {
		return err
	}
	if within == boxed.Never {
		return usagef("--within has an end").hint("boxedctl node cordon keeps new sandboxes away and ends none")
	}
	svc, ref, err := a.nodeOperand(c)
	if err != nil {
		return err
	}
	n, err := svc.DrainNode(c.Context, ref, within)
	if err != nil {
		return nodeError(err)
	}
	if c.Bool("wait") {
		if n, err = a.awaitDrain(svc, n); err != nil {
			return err
		}
		if n.Drain == nil {
			return boxed.Errorf(boxed.CodeConflict, "somebody ended the drain of %s; %d sandboxes are on it", ref, n.Sandboxes)
		}
		return a.printNodeLine(n, "is empty, and takes no new sandboxes until boxedctl node uncordon "+ref)
	}
	if n.Drain == nil {
		return a.printNodeLine(n, "is not drained: somebody ended it")
	}
	if err := a.printNodeLine(n, "is drained: "+drainText(n.Drain, time.Now())); err != nil {
		return err
	}
	if len(n.Drain.Waiting) > 0 {
		a.notice("boxedctl node info %s shows what it waits for; boxedctl node uncordon %s stops it", ref, ref)
	}
	return nil
}

// drainText says how far a drain has come.
func drainText(d *boxed.Drain, now time.Time) string {
	switch left := d.Deadline.Sub(now); {
	case len(d.Waiting) == 0:
		return "nothing is left on it"
	case left <= 0:
		return "it is ending " + sandboxCount(len(d.Waiting))
	default:
		return fmt.Sprintf("it waits for %s, and ends what is left in %s, at %s",
			sandboxCount(len(d.Waiting)), left.Round(time.Second), when(d.Deadline))
	}
}

func sandboxCount(n int) string {
	if n == 1 {
		return "1 sandbox"
	}
	return fmt.Sprintf("%d sandboxes", n)
}

// awaitDrain asks the node until it is empty, or its drain was ended.
func (a *app) awaitDrain(svc service, n *boxed.NodeInfo) (*boxed.NodeInfo, error) {
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(context.Background())
	defer release()
	tick := time.NewTicker(drainEvery)
	defer tick.Stop()
	id := string(n.ID)
	told, missed := -1, 0
	for n.Drain != nil && len(n.Drain.Waiting) > 0 {
		if left := len(n.Drain.Waiting); left != told && missed == 0 {
			a.notice("%s: %s", firstOf(n.Name, id), drainText(n.Drain, time.Now()))
			told = left
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		now, err := svc.GetNode(ctx, id)
		switch code := boxed.CodeOf(err); {
		case ctx.Err() != nil:
			a.notice("the drain of %s goes on; boxedctl node info %s shows how far it is, boxedctl node uncordon %s stops it", firstOf(n.Name, id), id, id)
			return nil, in.err()
		case err == nil:
			n, missed = now, 0
		case (code == boxed.CodeNotReady || code == boxed.CodeLost) && missed < drainPatience:
			missed++
			if missed == 1 {
				a.notice("%s; asking again", message(err))
			}
		default:
			return nil, err
		}
	}
	return n, nil
}
