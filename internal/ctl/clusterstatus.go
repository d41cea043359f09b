package ctl

import (
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// skewWarning is how far apart clocks may be before that is worth a word. The
// cluster's documents bear [boxed.MaxClockSkew].
const skewWarning = time.Second

func (a *app) cmdClusterStatus() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "show the cluster as this node sees it",
		UsageText: "boxedctl cluster status",
		Description: "Its nodes, the one that answers with a star, how long a question to each takes, and what is wrong between them: " +
			"who is kept out and why, clocks that disagree, documents that are held back for it. With -o name the cluster's ID." +
			examples("boxedctl cluster status", "boxedctl cluster status -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			s, err := svc.ClusterStatus(c.Context)
			if err != nil {
				return err
			}
			return a.printCluster(s)
		},
	}
}

// printCluster prints a cluster in the form that --output asks for.
func (a *app) printCluster(s *boxed.ClusterStatus) error {
	switch a.output {
	case outputJSON:
		return a.printJSON(s)
	case outputName:
		if s.ID == "" {
			return nil
		}
		_, err := fmt.Fprintln(a.stdout, table.Inert(s.ID))
		return err
	}
	if s.ID == "" {
		name := "this node"
		if len(s.Nodes) > 0 {
			name = "the node " + firstOf(s.Nodes[0].Name, string(s.Nodes[0].ID))
		}
		if _, err := fmt.Fprintf(a.stdout, "%s is in no cluster\n", table.Inert(name)); err != nil {
			return err
		}
		a.notice("boxedctl cluster init makes one of it, boxedctl cluster join enters one that is there")
		return nil
	}
	now := time.Now()
	fields := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	fields.Row("Cluster:", s.ID)
	fields.Row("Key:", s.Key)
	fields.Row("Network:", s.Network)
	if t := s.Tailnet; t != nil {
		tailnetFields(fields, t)
	}
	if len(s.Removed) > 0 {
		fields.Row("Removed:", joinNodes(s.Removed))
	}
	parts := []*table.Table{clusterNodes(s, now), clusterWarnings(s, now)}
	if err := a.printFields(s, nil, fields); err != nil {
		return err
	}
	for i, part := range parts {
		if part.Len() == 0 {
			continue
		}
		if _, err := fmt.Fprintln(a.stdout); err != nil {
			return err
		}
		if err := a.write(s, nil, part, i > 0); err != nil {
			return err
		}
	}
	return nil
}

// tailnetFields say how the node stands on its tailnet, and what to do about it.
func tailnetFields(t *table.Table, n *boxed.Tailnet) {
	style := table.Warn
	if n.State == "running" {
		style = table.Good
	}
	t.Add(table.Cell{Text: "Tailnet:"}, table.Cell{Text: strings.TrimSpace(strings.ReplaceAll(n.State, "_", " ") + " " + n.Name), Style: style})
	for _, f := range []struct{ name, value string }{
		{"Problem:", n.Problem}, {"Next:", n.Next}, {"Log in at:", n.LoginURL}, {"Blocked:", strings.Join(n.Blocked, ", ")},
	} {
		if f.value != "" {
			t.Add(table.Cell{Text: f.name}, table.Cell{Text: f.value, Style: table.Warn})
		}
	}
	if len(n.Blocked) > 0 {
		t.Add(table.Cell{}, table.Cell{Text: "they have the node tag and do not answer: boxedctl cluster policy prints what the tailnet's policy must allow", Style: table.Warn})
	}
}

func clusterNodes(s *boxed.ClusterStatus, now time.Time) *table.Table {
	t := table.New(table.Column{}, table.Column{Name: "NODE", Keep: true}, table.Column{Name: "ID", Keep: true}, table.Column{Name: "STATE"},
		table.Column{Name: "ADDRESS"}, table.Column{Name: "RTT", Right: true}, table.Column{Name: "NOTE"})
	for i, n := range s.Nodes {
		rtt := "-"
		if n.RTT > 0 {
			rtt = fmt.Sprintf("%.1f ms", n.RTT)
		}
		t.Add(star(i == 0), table.Cell{Text: firstOf(n.Name, "-")}, table.Cell{Text: string(n.ID)}, nodeState(n),
			table.Cell{Text: firstOf(n.Address, "-")}, table.Cell{Text: rtt}, table.Cell{Text: nodeNote(n, now), Style: table.Warn})
	}
	return t
}

// clusterWarnings are what is wrong between nodes, one a row.
func clusterWarnings(s *boxed.ClusterStatus, now time.Time) *table.Table {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true}, table.Column{Keep: true})
	row := func(what, who, text string) {
		t.Add(table.Cell{Text: what, Style: table.Warn}, table.Cell{Text: who}, table.Cell{Text: text})
	}
	for _, n := range s.Nodes {
		skew := time.Duration(n.Ahead) * time.Millisecond
		if skew.Abs() <= skewWarning {
			continue
		}
		which := "ahead of"
		if skew < 0 {
			which = "behind"
		}
		row("clock", firstOf(n.Name, string(n.ID)), fmt.Sprintf("%v %s this node's: timedatectl set-ntp true, on both", skew.Abs().Round(100*time.Millisecond), which))
	}
	for _, f := range s.Faults {
		row("fault", f.Peer, f.Message+" ("+table.Age(f.At, now)+" ago)")
	}
	for _, h := range s.Held {
		author := string(h.Author)
		for _, n := range s.Nodes {
			if n.ID == h.Author && n.Name != "" {
				author = n.Name
			}
		}
		row("held", strings.TrimSuffix(h.Kind+"/"+h.Key, "/"), fmt.Sprintf("of %s, stamped %s: not taken until then; set that node's clock", author, when(h.Stamp)))
	}
	return t
}
