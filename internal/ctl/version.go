package ctl

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdVersion() *cli.Command {
	return &cli.Command{
		Name: "version", Category: catOther,
		Usage:     "show the versions of boxedctl and of the nodes",
		UsageText: "boxedctl version [--client]",
		Description: "Of all nodes of the cluster, as the node that answers knows them; those of another version than boxedctl are marked. " +
			"A node that does not answer is no error." + examples("boxedctl version", "boxedctl version --client -o name"),
		Flags: []cli.Flag{&cli.BoolFlag{Name: "client", Usage: "only boxedctl's own, without a connection"}},
		Action: func(c *cli.Context) error {
			out := map[string]any{"client": versionText(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
			t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
			t.Row("boxedctl:", fmt.Sprintf("%s (%s, %s/%s)", versionText(), runtime.Version(), runtime.GOOS, runtime.GOARCH))
			if !c.Bool("client") {
				a.nodeVersions(c.Context, out, t)
			}
			return a.printFields(out, []string{versionText()}, t)
		},
	}
}

// versionsWithin bounds how long the nodes are asked for their versions.
const versionsWithin = 5 * time.Second

// nodeVersion is the version of one node.
type nodeVersion struct {
	Node    boxed.NodeID `json:"node"`
	Name    string       `json:"name"`
	Version string       `json:"version"`
	Differs bool         `json:"differs"` // from boxedctl's; for a boxedctl without one, from that of the node that answers
}

// nodeVersions adds those of the nodes to what is printed.
func (a *app) nodeVersions(ctx context.Context, out map[string]any, t *table.Table) {
	ctx, cancel := context.WithTimeout(ctx, versionsWithin)
	defer cancel()
	svc, err := a.connect()
	var server string
	if err == nil {
		server, err = svc.Version(ctx)
	}
	if err != nil {
		out["server_error"] = message(err)
		t.Row("boxed-node:", "no answer: "+message(err))
		return
	}
	out["server"] = server
	list, err := svc.ListNodes(ctx)
	if err != nil { // without a key the others are not known
		t.Row("boxed-node:", server)
		return
	}
	ours := versionText()
	if ours == "dev" && len(list.Nodes) > 0 {
		ours = list.Nodes[0].Version
	}
	nodes := []nodeVersion{}
	for _, n := range list.Nodes {
		v := nodeVersion{n.ID, n.Name, n.Version, n.Version != ours && n.Version != ""}
		nodes = append(nodes, v)
		cell := table.Cell{Text: firstOf(n.Version, "unknown")}
		if len(list.Nodes) > 1 {
			cell.Text += "  on " + firstOf(n.Name, string(n.ID))
		}
		if v.Differs {
			cell.Text += "  (another version)"
			cell.Style = table.Warn
		}
		t.Add(table.Cell{Text: "boxed-node:"}, cell)
	}
	out["nodes"] = nodes
}

// printVersion is --version.
func (a *app) printVersion() error {
	_, err := fmt.Fprintln(a.stdout, "boxedctl "+versionText())
	return err
}
