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

func (a *app) cmdNodeLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:     "list the nodes of the mesh",
		UsageText: "boxedctl node ls",
		Description: "As the node that answers, which has a star, sees them: what it knows of others is some seconds old. " +
			"Used and whole memory and cores are those promised to sandboxes." +
			examples("boxedctl node ls", "boxedctl node ls -o json", "boxedctl node ls -o name"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list, err := svc.ListNodes(c.Context)
			if err != nil {
				return err
			}
			t := table.New(table.Column{}, table.Column{Name: "NODE", Keep: true}, table.Column{Name: "ID", Keep: true}, table.Column{Name: "STATE"},
				table.Column{Name: "READY"}, table.Column{Name: "SANDBOXES", Right: true}, table.Column{Name: "MEMORY", Right: true},
				table.Column{Name: "CPUS", Right: true}, table.Column{Name: "VERSION"}, table.Column{Name: "LABELS"}, table.Column{Name: "NOTE"})
			var names []string
			now := time.Now()
			for i, n := range list.Nodes {
				names = append(names, string(n.ID))
				t.Add(nodeCells(n, i == 0, now)...)
			}
			return a.print(list, names, t)
		},
	}
}

// nodeCells is a node's row of node ls.
func nodeCells(n boxed.NodeSummary, answers bool, now time.Time) []table.Cell {
	ready := table.Cell{Text: "yes", Style: table.Good}
	switch {
	case n.State != boxed.NodeAlive:
		ready = table.Cell{Text: "-"}
	case !n.Ready:
		ready = table.Cell{Text: "no", Style: table.Bad}
	}
	count := fmt.Sprint(n.Used.Sandboxes)
	if n.Capacity.Sandboxes > 0 {
		count += fmt.Sprintf("/%d", n.Capacity.Sandboxes)
	}
	return []table.Cell{
		star(answers),
		{Text: firstOf(n.Name, "-")},
		{Text: string(n.ID)},
		nodeState(n),
		ready,
		{Text: count},
		{Text: table.Size(n.Used.MemoryBytes) + "/" + table.Size(n.Capacity.MemoryBytes)},
		{Text: fmt.Sprintf("%g/%g", n.Used.CPUs, n.Capacity.CPUs)},
		{Text: firstOf(n.Version, "-")},
		{Text: pairs(n.Labels)},
		{Text: nodeNote(n, now), Style: table.Warn},
	}
}

func star(on bool) table.Cell {
	if on {
		return table.Cell{Text: "*"}
	}
	return table.Cell{}
}

// nodeState is a node's state as a cell.
func nodeState(n boxed.NodeSummary) table.Cell {
	style := map[boxed.NodeState]table.Style{boxed.NodeAlive: table.Good, boxed.NodeSilent: table.Bad}[n.State]
	return table.Cell{Text: string(n.State), Style: style}
}

// nodeNote is what is out of the ordinary about a node.
func nodeNote(n boxed.NodeSummary, now time.Time) string {
	var notes []string
	if n.State != boxed.NodeAlive && !n.Since.IsZero() {
		notes = append(notes, fmt.Sprintf("%s for %s", n.State, table.Age(n.Since, now)))
	}
	if n.Cordoned {
		notes = append(notes, "cordoned")
	}
	if n.Draining && n.State == boxed.NodeAlive {
		notes = append(notes, "stopping")
	}
	if n.Place == boxed.PlaceOwn || n.Place == boxed.PlaceNever {
		notes = append(notes, "places "+string(n.Place))
	}
	if n.Problem != "" {
		notes = append(notes, n.Problem)
	}
	return strings.Join(notes, "; ")
}

// checkNodeRef refuses what can name no node.
func checkNodeRef(ref string) error {
	hint := fmt.Sprintf("an ID, its first %d or more characters, or a name do: boxedctl node ls lists them", boxed.MinPrefixLen)
	if ref == "" {
		return usagef("an empty word names no node").hint("%s", hint)
	}
	if strings.Trim(ref, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") != "" || strings.Trim(ref, ".") == "" || len(ref) > 255 {
		return usagef("%q names no node", ref).hint("%s", hint)
	}
	return nil
}

// nodeError says where to look for a node that was not found.
func nodeError(err error) error {
	if boxed.CodeOf(err) == boxed.CodeNotFound {
		return (&problem{err: err}).hint("boxedctl node ls lists the nodes")
	}
	return err
}

// nodeID finds the node that an ID, a prefix or a name means. A whole ID costs no
// request.
func nodeID(ctx context.Context, svc service, ref string) (boxed.NodeID, error) {
	if err := checkNodeRef(ref); err != nil {
		return "", err
	}
	if boxed.NodeID(ref).Valid() {
		return boxed.NodeID(ref), nil
	}
	list, err := svc.ListNodes(ctx)
	if err != nil {
		return "", err
	}
	return findNode(list.Nodes, ref)
}

// findNode is the node among nodes that ref means: by its ID, else by its name,
// else by the ID's first characters.
func findNode(nodes []boxed.NodeSummary, ref string) (boxed.NodeID, error) {
	var ids, named, prefixed []boxed.NodeID
	for _, n := range nodes {
		switch {
		case ref == string(n.ID):
			ids = append(ids, n.ID)
		case ref == n.Name:
			named = append(named, n.ID)
		case len(ref) >= boxed.MinPrefixLen && strings.HasPrefix(string(n.ID), ref):
			prefixed = append(prefixed, n.ID)
		}
	}
	for _, found := range [][]boxed.NodeID{ids, named, prefixed} {
		if len(found) == 1 {
			return found[0], nil
		}
		if len(found) > 1 {
			return "", (&problem{err: boxed.Errorf(boxed.CodeConflict, "%q could be %d nodes", ref, len(found))}).hint("give the ID: %s", joinNodes(found))
		}
	}
	return "", nodeError(boxed.Errorf(boxed.CodeNotFound, "there is no node %q", ref))
}

func (a *app) cmdNodeCordon() *cli.Command {
	return &cli.Command{
		Name:      "cordon",
		Usage:     "keep new sandboxes away from a node",
		UsageText: "boxedctl node cordon NODE",
		Description: "What is on it stays and can be used. It lasts until uncordon, also when the node is started again. Only for administrators." +
			examples("boxedctl node cordon attic", "boxedctl node uncordon attic"),
		Action: func(c *cli.Context) error { return a.cordon(c, true) },
	}
}

func (a *app) cmdNodeUncordon() *cli.Command {
	return &cli.Command{
		Name:        "uncordon",
		Usage:       "let a node take new sandboxes again",
		UsageText:   "boxedctl node uncordon NODE",
		Description: "Also ends a drain: what has not ended by then stays. Only for administrators." + examples("boxedctl node uncordon attic"),
		Action:      func(c *cli.Context) error { return a.cordon(c, false) },
	}
}

func (a *app) cordon(c *cli.Context, on bool) error {
	svc, ref, err := a.nodeOperand(c)
	if err != nil {
		return err
	}
	n, err := svc.CordonNode(c.Context, ref, on)
	if err != nil {
		return nodeError(err)
	}
	what := "takes new sandboxes again"
	if on {
		what = "takes no new sandboxes"
		if n.Sandboxes > 0 {
			what += fmt.Sprintf("; it holds %d", n.Sandboxes)
		}
	}
	return a.printNodeLine(n, what)
}

// nodeOperand is the command's only operand, a node, with a connection.
func (a *app) nodeOperand(c *cli.Context) (service, string, error) {
	ref, err := a.oneOperand(c, "NODE")
	if err != nil {
		return nil, "", err
	}
	if err := checkNodeRef(ref); err != nil {
		return nil, "", err
	}
	svc, err := a.connect()
	return svc, ref, err
}

// printNodeLine prints what has become of a node on one line, or in the form that
// --output asks for.
func (a *app) printNodeLine(n *boxed.NodeInfo, what string) error {
	if a.output != outputTable {
		return a.printNode(n)
	}
	_, err := fmt.Fprintf(a.stdout, "%s %s\n", table.Inert(firstOf(n.Name, string(n.ID))), table.Inert(what))
	return err
}
