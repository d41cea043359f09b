package ctl

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// states are those that --state takes.
var states = []string{
	string(boxed.StatePending), string(boxed.StateStarting), string(boxed.StateRunning), string(boxed.StatePaused),
	string(boxed.StateStopping), string(boxed.StateStopped), string(boxed.StateFailed),
}

// selectFlags choose sandboxes.
func selectFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "label", Usage: "only with the label `K=V`; repeated, with all of them"},
		&cli.StringFlag{Name: "owner", Usage: "of this `OWNER`, * for everybody's; administrators only"},
	}
}

func (a *app) cmdLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"}, Category: catLife,
		Usage:     "list sandboxes",
		UsageText: "boxedctl ls [OPTIONS]",
		Description: "Lists your living sandboxes, newest first. The first characters of an ID are enough to name a sandbox; -o name prints whole IDs." +
			examples("boxedctl ls", "boxedctl ls --all --label job=nightly", "boxedctl ls -o json", "boxedctl rm $(boxedctl ls --state paused -o name)"),
		Flags: append(selectFlags(),
			&cli.BoolFlag{Name: "all", Aliases: []string{"a"}, Usage: "also those that have ended"},
			&cli.StringSliceFlag{Name: "state", Usage: "only in `STATE`: " + oneOf(states)},
			&cli.StringFlag{Name: "name", Usage: "only with this `NAME`"},
			&cli.IntFlag{Name: "limit", Aliases: []string{"n"}, Usage: "at most `N`"},
		),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			f, err := parseFilter(c)
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list, err := listAll(c.Context, svc, f, c.Int("limit"))
			if err != nil {
				return err
			}
			if len(list.Incomplete) > 0 {
				a.notice("not all: no answer from %s", joinNodes(list.Incomplete))
			}
			return a.printSandboxes(list, list.Sandboxes, f.Owner != "")
		},
	}
}

func parseFilter(c *cli.Context) (boxed.Filter, error) {
	f := boxed.Filter{Owner: c.String("owner"), Name: c.String("name")}
	var err error
	if f.Labels, err = parseLabels(c.StringSlice("label")); err != nil {
		return f, err
	}
	for _, s := range c.StringSlice("state") {
		if !containsFold(states, s) {
			return f, usagef("--state is %s, not %q", oneOf(states), s)
		}
		f.States = append(f.States, boxed.State(strings.ToLower(s)))
	}
	if c.Bool("all") && len(f.States) == 0 {
		for _, s := range states {
			f.States = append(f.States, boxed.State(s))
		}
	}
	if c.Int("limit") < 0 {
		return f, usagef("--limit must not be negative")
	}
	return f, nil
}

// pageSize is the most that one call lists.
const pageSize = 1000

// listAll reads all pages, up to limit sandboxes (0: all).
func listAll(ctx context.Context, svc service, f boxed.Filter, limit int) (boxed.List, error) {
	all := boxed.List{Sandboxes: []boxed.Sandbox{}}
	missing := map[boxed.NodeID]bool{}
	for {
		f.Limit = pageSize
		if limit > 0 {
			f.Limit = min(pageSize, limit-len(all.Sandboxes))
		}
		page, err := svc.List(ctx, f)
		if err != nil {
			return all, err
		}
		all.Sandboxes = append(all.Sandboxes, page.Sandboxes...)
		for _, node := range page.Incomplete {
			if !missing[node] {
				missing[node] = true
				all.Incomplete = append(all.Incomplete, node)
			}
		}
		if page.Next == "" || page.Next == f.Cursor || limit > 0 && len(all.Sandboxes) >= limit {
			return all, nil
		}
		f.Cursor = page.Next
	}
}

func (a *app) cmdGet() *cli.Command {
	return &cli.Command{
		Name: "get", Category: catLife,
		Usage:     "show sandboxes, one a line",
		UsageText: "boxedctl get SANDBOX…",
		Description: "Also finds those that ended not long ago." +
			examples("boxedctl get build", "boxedctl get build -o json", "boxedctl get build -o name"),
		Action: func(c *cli.Context) error {
			refs, err := a.operands(c, 1, -1)
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list := make([]boxed.Sandbox, 0, len(refs))
			for _, ref := range refs {
				sb, err := getSandbox(c.Context, svc, ref)
				if err != nil {
					return err
				}
				list = append(list, *sb)
			}
			if len(list) == 1 {
				return a.printSandboxes(list[0], list, false)
			}
			return a.printSandboxes(boxed.List{Sandboxes: list}, list, false)
		},
	}
}

// getSandbox looks one sandbox up.
func getSandbox(ctx context.Context, svc service, ref string) (*boxed.Sandbox, error) {
	if id, err := boxed.ParseID(ref); err == nil {
		return svc.Get(ctx, id)
	}
	return sandbox(ctx, svc, ref)
}

func (a *app) cmdInspect() *cli.Command {
	return &cli.Command{
		Name: "inspect", Category: catLife,
		Usage:     "show all that is known of a sandbox",
		UsageText: "boxedctl inspect SANDBOX",
		Description: "-o json prints the API's own record. Values of environment variables are shown: anybody who may use the sandbox can read them." +
			examples("boxedctl inspect build", "boxedctl inspect build -o json"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			sb, err := getSandbox(c.Context, svc, ref)
			if err != nil {
				return err
			}
			return a.printFields(sb, []string{string(sb.ID)}, sandboxFields(sb))
		},
	}
}

func sandboxFields(sb *boxed.Sandbox) *table.Table {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	row := func(name, value string) {
		if value != "" && value != "-" {
			t.Row(name+":", value)
		}
	}
	row("ID", string(sb.ID))
	row("Name", sb.Name)
	row("Owner", sb.Owner)
	row("Node", string(sb.Node))
	state := table.State(sb)
	t.Add(table.Cell{Text: "State:"}, state)
	row("Message", sb.Message)
	row("Template", sb.Template)
	row("Image", sb.Image)
	row("Digest", sb.ImageDigest)
	row("Runtime", sb.Runtime)
	row("Directory", sb.Dir)
	l := sb.Limits
	row("Limits", fmt.Sprintf("%s memory, %g cores, %d processes, %d open files", table.Size(l.MemoryBytes), l.CPUs, l.Processes, l.OpenFiles))
	row("Files", fmt.Sprintf("%s workspace, %s home, %s /tmp, %s /output, %s /dev/shm", table.Size(l.WorkspaceBytes),
		table.Size(l.HomeBytes), table.Size(l.TmpBytes), table.Size(l.OutputBytes), table.Size(l.ShmBytes)))
	for _, k := range sortedKeys(sb.Labels) {
		row("Label", k+"="+sb.Labels[k])
	}
	for _, k := range sortedKeys(sb.Env) {
		row("Environment", k+"="+sb.Env[k])
	}
	if e := sb.Egress; e != nil {
		row("Egress", strings.TrimSpace(strings.Join([]string{string(e.State), e.Profile, strings.Join(e.Secrets, " "), e.Reason}, " ")))
	}
	row("Created", when(sb.CreatedAt))
	row("Started", when(sb.StartedAt))
	row("Paused", when(sb.PausedAt))
	row("Ended", when(sb.EndedAt))
	if !sb.State.Ended() {
		row("TTL", sb.TTL.String())
		row("Expires", when(sb.ExpiresAt))
		if sb.IdleTimeout != 0 {
			row("Idle timeout", sb.IdleTimeout.String())
		}
		row("Last active", when(sb.ActiveAt))
	}
	if sb.Warm {
		row("Warm", "yes")
	} else {
		row("Warm", "no: "+firstOf(sb.WarmMiss, "unknown"))
	}
	return t
}

func joinNodes(ids []boxed.NodeID) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = string(id)
	}
	return strings.Join(words, ", ")
}

func containsFold(words []string, s string) bool {
	for _, w := range words {
		if strings.EqualFold(w, s) {
			return true
		}
	}
	return false
}
