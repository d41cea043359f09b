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

func (a *app) cmdNode() *cli.Command {
	return &cli.Command{
		Name: "node", Category: catMesh,
		Usage:     "describe nodes, and keep sandboxes away from them",
		UsageText: "boxedctl node\nboxedctl node COMMAND",
		Description: "Without a command it describes the node that answers: what it can hold and holds, its runtimes and templates, its warm sandboxes, and what it lacks. " +
			"A NODE is an ID, its first characters, or a name." + examples("boxedctl node", "boxedctl node -o json", "boxedctl node ls"),
		Subcommands: []*cli.Command{a.cmdNodeLs(), a.cmdNodeInfo(), a.cmdNodeCordon(), a.cmdNodeUncordon(), a.cmdNodeDrain()},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return a.noSuchCommand(a.line.command)
			}
			return a.nodeInfo(c.Context, "")
		},
	}
}

func (a *app) cmdNodeInfo() *cli.Command {
	return &cli.Command{
		Name: "info", Aliases: []string{"show", "inspect"},
		Usage:       "describe a node",
		UsageText:   "boxedctl node info [NODE]",
		Description: "By the node's own word. Without NODE it is the one that answers." + examples("boxedctl node info", "boxedctl node info attic -o json"),
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 0, 1)
			if err != nil {
				return err
			}
			if len(words) == 0 {
				return a.nodeInfo(c.Context, "")
			}
			if err := checkNodeRef(words[0]); err != nil {
				return err
			}
			return a.nodeInfo(c.Context, words[0])
		},
	}
}

// nodeInfo describes the node that answers, or the one that ref names.
func (a *app) nodeInfo(ctx context.Context, ref string) error {
	svc, err := a.connect()
	if err != nil {
		return err
	}
	var n *boxed.NodeInfo
	if ref == "" {
		n, err = svc.NodeInfo(ctx)
	} else {
		n, err = svc.GetNode(ctx, ref)
	}
	if err != nil {
		return nodeError(err)
	}
	return a.printNode(n)
}

func (a *app) printNode(n *boxed.NodeInfo) error {
	return a.printFields(n, []string{string(n.ID)}, nodeFields(n))
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
	meshFields(t, n)
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

// placeRules says in words what a node takes.
var placeRules = map[boxed.PlaceRule]string{
	boxed.PlaceOwn: "own: only what is asked of this node itself", boxed.PlaceNever: "never: it takes no sandboxes",
}

// meshFields are those of a node among others.
func meshFields(t *table.Table, n *boxed.NodeInfo) {
	if n.Cordoned {
		t.Add(table.Cell{Text: "Cordoned:"}, table.Cell{Text: "yes: it takes no new sandboxes", Style: table.Warn})
	}
	if n.Drain != nil {
		t.Add(table.Cell{Text: "Drain:"}, table.Cell{Text: drainText(n.Drain, time.Now()), Style: table.Warn})
		for i, id := range n.Drain.Waiting {
			if i == shownWaiting {
				t.Row("", fmt.Sprintf("and %d more", len(n.Drain.Waiting)-i))
				break
			}
			t.Row("", string(id))
		}
	}
	if rule, ok := placeRules[n.Place]; ok {
		t.Row("Places:", rule)
	}
	for _, k := range sortedKeys(n.Labels) {
		t.Row("Label:", pairs(map[string]string{k: n.Labels[k]}))
	}
}
