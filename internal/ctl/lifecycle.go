package ctl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

func (a *app) cmdRm() *cli.Command {
	return &cli.Command{
		Name: "rm", Aliases: []string{"destroy", "delete"}, Category: catLife,
		Usage:     "end sandboxes",
		UsageText: "boxedctl rm SANDBOX…\nboxedctl rm --all | --label K=V [--yes]",
		Description: "Ends every program in them, and their files are gone. Returns when they are. One that has ended already is no error." +
			examples("boxedctl rm build", "boxedctl rm --label job=nightly --yes", "boxedctl rm --all"),
		Flags: append(selectFlags(),
			&cli.BoolFlag{Name: "all", Aliases: []string{"a"}, Usage: "all of yours"},
			&cli.BoolFlag{Name: "yes", Aliases: []string{"y"}, Usage: "do not ask"},
			&cli.BoolFlag{Name: "force", Aliases: []string{"f"}, Usage: "a sandbox that does not exist is no error"},
		),
		Action: a.rm,
	}
}

func (a *app) rm(c *cli.Context) error {
	refs := c.Args().Slice()
	labels := c.StringSlice("label")
	switch {
	case len(refs) > 0 && (c.Bool("all") || len(labels) > 0):
		return usagef("name sandboxes, or choose them by --all or --label; not both")
	case len(refs) == 0 && !c.Bool("all") && len(labels) == 0:
		return usagef("name the sandboxes to end").hint("boxedctl rm --all ends all of yours")
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if len(refs) > 0 {
		ids, err := a.idsOf(c.Context, svc, refs, c.Bool("force"))
		return errors.Join(err, a.removeAll(c.Context, svc, ids))
	}
	f, err := parseFilter(c)
	if err != nil {
		return err
	}
	f.States = nil // parseFilter reads --all as that of ls
	list, err := listAll(c.Context, svc, f, 0)
	if err != nil {
		return err
	}
	if len(list.Incomplete) > 0 {
		a.notice("not all: no answer from %s", joinNodes(list.Incomplete))
	}
	ids := make([]boxed.ID, len(list.Sandboxes))
	for i := range list.Sandboxes {
		ids[i] = list.Sandboxes[i].ID
	}
	if len(ids) > 0 && !c.Bool("yes") {
		if err := a.confirm(fmt.Sprintf("End %d sandboxes?", len(ids))); err != nil {
			return err
		}
	}
	return a.removeAll(c.Context, svc, ids)
}

// idsOf resolves refs. It goes on after a ref that names nothing: the others
// are still to be removed.
func (a *app) idsOf(ctx context.Context, svc service, refs []string, force bool) ([]boxed.ID, error) {
	var ids []boxed.ID
	var failed error
	for _, ref := range refs {
		id, err := sandboxID(ctx, svc, ref)
		switch {
		case err == nil:
			ids = append(ids, id)
		case force && boxed.CodeOf(err) == boxed.CodeNotFound:
		case failed == nil:
			failed = err
		default:
			a.notice("%s", message(err))
		}
	}
	return ids, failed
}

// removers is how many sandboxes are ended at a time.
const removers = 8

// removeAll ends sandboxes and prints each ID once it is gone.
func (a *app) removeAll(ctx context.Context, svc service, ids []boxed.ID) error {
	errs := make([]error, len(ids))
	var wg sync.WaitGroup
	slots := make(chan struct{}, removers)
	for i, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			errs[i] = svc.Destroy(ctx, id)
		})
	}
	wg.Wait()
	removed := []boxed.ID{}
	var failed error
	for i, id := range ids {
		switch {
		case errs[i] == nil:
			removed = append(removed, id)
			if a.output != outputJSON {
				fmt.Fprintln(a.stdout, id)
			}
		case failed == nil:
			failed = errs[i]
		default:
			a.notice("%s: %s", id, message(errs[i]))
		}
	}
	if a.output == outputJSON {
		return errors.Join(failed, a.printJSON(map[string]any{"removed": removed}))
	}
	return failed
}

// confirm asks a person; where there is none it is an error.
func (a *app) confirm(question string) error {
	if !isTerminal(a.stdin) {
		return usagef("%s Nobody is there to answer", question).hint("--yes answers it")
	}
	fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	answer, _ := bufio.NewReader(a.stdin).ReadString('\n')
	answer = strings.ToLower(strings.TrimSpace(answer))
	if answer != "y" && answer != "yes" {
		return boxed.Errorf(boxed.CodeCanceled, "nothing was done")
	}
	return nil
}

func (a *app) cmdWait() *cli.Command {
	return &cli.Command{
		Name: "wait", Category: catLife,
		Usage:     "wait until a sandbox is in a state",
		UsageText: "boxedctl wait SANDBOX [--for STATE] [--timeout DURATION]",
		Description: fmt.Sprintf("Ends with status %d when the sandbox ended in another state first, and with %d when the timeout passed.", exitFailed, exitTimeout) +
			examples("boxedctl wait build", "boxedctl wait build --for running --timeout 30s"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "for", Value: string(boxed.StateStopped), Usage: "the `STATE`: " + oneOf(states)},
			&cli.StringFlag{Name: "timeout", Usage: "for at most `DURATION`"},
		},
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			until := c.String("for")
			if !containsFold(states, until) {
				return usagef("--for is %s, not %q", oneOf(states), until)
			}
			timeout, err := parseDuration("timeout", c.String("timeout"))
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			ctx := c.Context
			if timeout > 0 && timeout != boxed.Never {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout.D())
				defer cancel()
			}
			return a.wait(ctx, svc, ref, boxed.State(strings.ToLower(until)))
		},
	}
}

func (a *app) wait(ctx context.Context, svc service, ref string, until boxed.State) error {
	id, err := sandboxID(ctx, svc, ref)
	if err != nil {
		return err
	}
	sb, err := svc.Wait(ctx, id, until)
	if ctx.Err() != nil {
		return boxed.Errorf(boxed.CodeDeadline, "%s was not %s in time", ref, until)
	}
	if err != nil {
		return err
	}
	if err := a.printSandboxes(sb, []boxed.Sandbox{*sb}, false); err != nil {
		return err
	}
	if sb.State != until {
		a.notice("%s is %s: %s", ref, sb.State, firstOf(sb.Message, string(sb.Reason)))
		return exitStatus(exitFailed)
	}
	return nil
}

func (a *app) cmdRenew() *cli.Command {
	return &cli.Command{
		Name: "renew", Category: catLife,
		Usage:     "move the end of a sandbox's life",
		UsageText: "boxedctl renew SANDBOX [--ttl DURATION]",
		Description: "The ttl counts from now; without one it is the sandbox's own again." +
			examples("boxedctl renew build", "boxedctl renew build --ttl 2h", "boxedctl renew build --ttl never"),
		Flags: []cli.Flag{&cli.StringFlag{Name: "ttl", Usage: "end it `DURATION` from now, like 90s, 10m, 2d; admins may say never"}},
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			ttl, err := parseDuration("ttl", c.String("ttl"))
			if err != nil {
				return err
			}
			if ttl <= 0 && c.IsSet("ttl") {
				return usagef("--ttl says how long from now, more than 0").hint("boxedctl renew %s --ttl 1h", ref)
			}
			return a.change(c.Context, ref, func(svc service, id boxed.ID) (*boxed.Sandbox, error) {
				if !c.IsSet("ttl") {
					sb, err := svc.Get(c.Context, id)
					if err != nil {
						return nil, err
					}
					ttl = sb.TTL
				}
				return svc.Update(c.Context, id, boxed.Update{TTL: &ttl})
			})
		},
	}
}

func (a *app) cmdUpdate() *cli.Command {
	return &cli.Command{
		Name: "update", Category: catLife,
		Usage:       "change a sandbox's name, labels or deadlines",
		UsageText:   "boxedctl update SANDBOX [--name NAME] [--label K=V…] [--ttl DURATION] [--idle-timeout DURATION]",
		Description: "Labels replace all that were there." + examples("boxedctl update build --name old-build --label keep=yes"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "name", Usage: "the new `NAME`"},
			&cli.StringSliceFlag{Name: "label", Usage: "a label `K=V`; may be repeated"},
			&cli.StringFlag{Name: "ttl", Usage: "end it `DURATION` from now"},
			&cli.StringFlag{Name: "idle-timeout", Usage: "end it after it was idle for `DURATION`; 0s: never"},
		},
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			var u boxed.Update
			if c.IsSet("name") {
				name := c.String("name")
				u.Name = &name
			}
			if c.IsSet("label") {
				labels, err := parseLabels(c.StringSlice("label"))
				if err != nil {
					return err
				}
				u.Labels = &labels
			}
			for name, to := range map[string]**boxed.Duration{"ttl": &u.TTL, "idle-timeout": &u.IdleTimeout} {
				if c.IsSet(name) {
					d, err := parseDuration(name, c.String(name))
					if err != nil {
						return err
					}
					*to = &d
				}
			}
			if u == (boxed.Update{}) {
				return usagef("nothing to change").hint("%s", usageLine(a.line.command))
			}
			return a.update(c.Context, ref, u)
		},
	}
}

func (a *app) update(ctx context.Context, ref string, u boxed.Update) error {
	return a.change(ctx, ref, func(svc service, id boxed.ID) (*boxed.Sandbox, error) { return svc.Update(ctx, id, u) })
}

// change does something to one sandbox and prints it as it is then.
func (a *app) change(ctx context.Context, ref string, do func(service, boxed.ID) (*boxed.Sandbox, error)) error {
	svc, id, err := a.reach(ctx, ref)
	if err != nil {
		return err
	}
	sb, err := do(svc, id)
	if err != nil {
		return err
	}
	return a.printSandboxes(sb, []boxed.Sandbox{*sb}, false)
}

func (a *app) cmdPause() *cli.Command {
	return &cli.Command{
		Name: "pause", Category: catLife,
		Usage:       "freeze a sandbox",
		UsageText:   "boxedctl pause SANDBOX",
		Description: "No program in it runs and its deadlines stand still until resume." + examples("boxedctl pause build"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			return a.change(c.Context, ref, func(svc service, id boxed.ID) (*boxed.Sandbox, error) { return svc.Pause(c.Context, id) })
		},
	}
}

func (a *app) cmdResume() *cli.Command {
	return &cli.Command{
		Name: "resume", Category: catLife,
		Usage:       "let a paused sandbox go on",
		UsageText:   "boxedctl resume SANDBOX",
		Description: "Its programs and its deadlines go on where they stopped." + examples("boxedctl resume build"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			return a.change(c.Context, ref, func(svc service, id boxed.ID) (*boxed.Sandbox, error) { return svc.Resume(c.Context, id) })
		},
	}
}
