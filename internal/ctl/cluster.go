package ctl

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

func (a *app) cmdCluster() *cli.Command {
	return &cli.Command{
		Name: "cluster", Category: catMesh,
		Usage:     "make nodes of several hosts into one cluster",
		UsageText: "boxedctl cluster COMMAND",
		Description: "Each host runs a boxed-node. init makes a cluster of the first; what it prints is run on each further host, or add does all of it over ssh. " +
			"Then every node takes every call. Only for administrators, and each command is about the node that boxedctl speaks to." +
			examples("boxedctl cluster init", "boxedctl cluster add root@attic", "boxedctl cluster status"),
		Subcommands: []*cli.Command{
			a.cmdClusterInit(), a.cmdClusterJoin(), a.cmdClusterToken(), a.cmdClusterAdd(), a.cmdClusterStatus(),
			a.cmdClusterRemove(), a.cmdClusterRotate(), a.cmdClusterLeave(), a.cmdClusterPolicy(),
		},
	}
}

// addressFlags are where a node is reached by others.
func addressFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "listen", Usage: "listen for other nodes at `ADDR:PORT`, TCP and UDP, instead of where the node's configuration says"},
		&cli.StringFlag{Name: "advertise", Usage: "other nodes reach it at `ADDR:PORT`; without, the node finds it out"},
	}
}

func (a *app) cmdClusterInit() *cli.Command {
	return &cli.Command{
		Name:      "init",
		Usage:     "make a cluster of this node",
		UsageText: "boxedctl cluster init [--listen ADDR:PORT] [--advertise ADDR:PORT]",
		Description: "Prints the command to run on the next host. Sandboxes that are there stay. With -o name it prints the bare token." +
			examples("boxedctl cluster init", "boxedctl cluster init --advertise 192.168.1.10:7946"),
		Flags: addressFlags(),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connectToOne()
			if err != nil {
				return err
			}
			s, err := svc.StartCluster(c.Context, boxed.ClusterRequest{Listen: c.String("listen"), Advertise: c.String("advertise")})
			if err != nil {
				return startError(err)
			}
			a.notice("the cluster %s is made, of this node alone so far", s.ID)
			token, err := svc.ClusterToken(c.Context)
			if err != nil {
				return wrapf(err, "the cluster is made; read its token").hint("boxedctl cluster token")
			}
			return a.printToken(token, s)
		},
	}
}

// startError says what to do where a cluster was not made or joined.
func startError(err error) error {
	if boxed.CodeOf(err) == boxed.CodeConflict {
		return (&problem{err: err}).hint("boxedctl cluster status shows it, boxedctl cluster token prints what the next host runs")
	}
	return err
}

// joinCommand is what the next host runs.
func joinCommand(token string) string { return "boxedctl cluster join " + token }

// printToken prints how the next host joins, with what to know about it.
func (a *app) printToken(token string, s *boxed.ClusterStatus) error {
	switch a.output {
	case outputJSON:
		out := map[string]any{"token": token, "join": joinCommand(token)}
		if s != nil {
			out["cluster"] = s
		}
		return a.printJSON(out)
	case outputName:
		_, err := fmt.Fprintln(a.stdout, token)
		return err
	}
	if s != nil {
		a.notice("run this on the next host, where boxed-node runs:")
	}
	if _, err := fmt.Fprintln(a.stdout, joinCommand(token)); err != nil {
		return err
	}
	where := "this node"
	if s != nil && len(s.Nodes) > 0 && s.Nodes[0].Address != "" {
		where = s.Nodes[0].Address
	}
	a.notice("the token is a secret: whoever has it can be a node. Hosts must reach %s over TCP and UDP", where)
	if s != nil {
		a.notice("next: boxedctl cluster status shows who has joined")
	}
	return nil
}

func (a *app) cmdClusterJoin() *cli.Command {
	return &cli.Command{
		Name:      "join",
		Usage:     "make this node one of a cluster",
		UsageText: "boxedctl cluster join TOKEN|- [--listen ADDR:PORT] [--advertise ADDR:PORT]\nboxedctl cluster join --token-file FILE",
		Description: "TOKEN is what boxedctl cluster token prints on a node of the cluster. On a command line other users of the host can see it: " +
			"- reads it from stdin, --token-file from a file. A join that fails leaves the node as it was. Sandboxes that are there stay." +
			examples("boxedctl cluster join -", "boxedctl cluster join --token-file /root/token", "ssh root@first boxedctl cluster token -o name | boxedctl cluster join -"),
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "token-file", Usage: "read the token from `FILE`"},
		}, addressFlags()...),
		Action: func(c *cli.Context) error {
			token, err := a.readToken(c)
			if err != nil {
				return err
			}
			svc, err := a.connectToOne()
			if err != nil {
				return err
			}
			s, err := svc.StartCluster(c.Context, boxed.ClusterRequest{Token: token, Listen: c.String("listen"), Advertise: c.String("advertise")})
			if err != nil {
				return startError(err)
			}
			if a.output == outputTable {
				a.notice("joined; these are the nodes, as this one sees them:")
			}
			return a.printCluster(s)
		},
	}
}

// maxToken bounds a join token, in bytes.
const maxToken = 16 << 10

// readToken is the token of a command line: the operand, stdin or a file. The
// whole command that `cluster token` prints does as well.
func (a *app) readToken(c *cli.Context) (string, error) {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return "", err
	}
	file := c.String("token-file")
	switch {
	case len(words) == 0 && file == "":
		return "", usagef("the token is missing").hint("boxedctl cluster token, on a node of the cluster, prints the command with it")
	case len(words) > 0 && file != "":
		return "", usagef("give TOKEN or --token-file, not both")
	}
	var text string
	switch {
	case file != "":
		data, err := readSmall(file, maxToken)
		if err != nil {
			return "", wrapf(plainPath(err), "--token-file")
		}
		text = string(data)
	case words[0] == "-":
		if text, err = a.tokenFromStdin(); err != nil {
			return "", err
		}
	default:
		text = words[0]
	}
	fields := strings.Fields(text)
	if len(fields) == 0 {
		return "", usagef("there is no token in it").hint("boxedctl cluster token, on a node of the cluster, prints it")
	}
	return fields[len(fields)-1], nil
}

func (a *app) tokenFromStdin() (string, error) {
	if isTerminal(a.stdin) {
		a.notice("paste the token, then press Enter and Ctrl-D")
	}
	data, err := io.ReadAll(io.LimitReader(a.stdin, maxToken))
	if err != nil {
		return "", wrapf(err, "read the token")
	}
	return string(data), nil
}

func (a *app) cmdClusterToken() *cli.Command {
	return &cli.Command{
		Name:      "token",
		Usage:     "print the command that makes the next host a node",
		UsageText: "boxedctl cluster token",
		Description: "With -o name the bare token, for a file or a pipe. It is good until the cluster's key is replaced, by rotate-key or remove." +
			examples("boxedctl cluster token", "boxedctl cluster token -o name"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			token, err := svc.ClusterToken(c.Context)
			if err != nil {
				return clusterError(err)
			}
			return a.printToken(token, nil)
		},
	}
}

// clusterError says how to be in a cluster, where that is what lacks.
func clusterError(err error) error {
	if boxed.CodeOf(err) == boxed.CodeConflict {
		return (&problem{err: err}).hint("boxedctl cluster init makes a cluster, boxedctl cluster join enters one")
	}
	return err
}

func (a *app) cmdClusterRemove() *cli.Command {
	return &cli.Command{
		Name:      "remove",
		Usage:     "shut a node out of the cluster, for good",
		UsageText: "boxedctl cluster remove NODE [--yes]",
		Description: "For a host that is lost or no longer trusted. It cannot be undone: that node's ID never gets in again. " +
			"The cluster's key is replaced, so earlier tokens are void. Nothing is ended: the node's sandboxes go on there, out of reach from here. " +
			"For a node that is to go in peace: drain it, then leave on the node itself." +
			examples("boxedctl cluster remove attic", "boxedctl cluster remove bbbbbbbbbbbbbbbb --yes"),
		Flags:  []cli.Flag{yesFlag()},
		Action: a.removeNode,
	}
}

func yesFlag() cli.Flag {
	return &cli.BoolFlag{Name: "yes", Aliases: []string{"y"}, Usage: "do not ask"}
}

func (a *app) removeNode(c *cli.Context) error {
	svc, ref, err := a.nodeOperand(c)
	if err != nil {
		return err
	}
	s, err := svc.ClusterStatus(c.Context)
	if err != nil {
		return err
	}
	if s.ID == "" {
		return clusterError(boxed.Errorf(boxed.CodeConflict, "this node is in no cluster"))
	}
	// One that was never seen from here can be named by its whole ID.
	id, err := findNode(s.Nodes, ref)
	if boxed.CodeOf(err) == boxed.CodeNotFound && boxed.NodeID(ref).Valid() {
		id, err = boxed.NodeID(ref), nil
	}
	if err != nil {
		return err
	}
	if !c.Bool("yes") {
		name := string(id)
		for _, n := range s.Nodes {
			if n.ID == id && n.Name != "" {
				name = n.Name + " (" + name + ")"
			}
		}
		if err := a.confirm(fmt.Sprintf("Remove the node %s for good, with its sandboxes out of reach?", name)); err != nil {
			return err
		}
	}
	if s, err = svc.RemoveNode(c.Context, string(id)); err != nil {
		return err
	}
	if a.output == outputTable {
		a.notice("%s is removed, and the cluster has a new key: earlier tokens are void", id)
	}
	return a.printCluster(s)
}

func (a *app) cmdClusterRotate() *cli.Command {
	return &cli.Command{
		Name:      "rotate-key",
		Usage:     "replace the cluster's key",
		UsageText: "boxedctl cluster rotate-key",
		Description: "The nodes tell each other the new one; those that are silent now get it when they are back. Earlier tokens are void." +
			examples("boxedctl cluster rotate-key", "boxedctl cluster token"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			s, err := svc.RotateClusterKey(c.Context)
			if err != nil {
				return clusterError(err)
			}
			if a.output == outputTable {
				a.notice("the cluster has a new key: earlier tokens are void; boxedctl cluster token prints one that is good")
			}
			return a.printCluster(s)
		},
	}
}

func (a *app) cmdClusterLeave() *cli.Command {
	return &cli.Command{
		Name:      "leave",
		Usage:     "take this node out of its cluster",
		UsageText: "boxedctl cluster leave [--yes]",
		Description: "The node that boxedctl speaks to is alone then. Its sandboxes stay, and are reached through it alone. It may join again with a token." +
			examples("boxedctl cluster leave", "boxedctl cluster leave --yes"),
		Flags: []cli.Flag{yesFlag()},
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connectToOne()
			if err != nil {
				return err
			}
			return a.leave(c.Context, svc, c.Bool("yes"))
		},
	}
}

func (a *app) leave(ctx context.Context, svc service, yes bool) error {
	s, err := svc.ClusterStatus(ctx)
	if err != nil {
		return err
	}
	if s.ID == "" {
		return clusterError(boxed.Errorf(boxed.CodeConflict, "this node is in no cluster"))
	}
	name := "this node"
	if len(s.Nodes) > 0 {
		name = "the node " + firstOf(s.Nodes[0].Name, string(s.Nodes[0].ID))
	}
	if !yes {
		if err := a.confirm(fmt.Sprintf("Take %s out of the cluster %s?", name, s.ID)); err != nil {
			return err
		}
	}
	if err := svc.LeaveCluster(ctx); err != nil {
		return clusterError(err)
	}
	switch a.output {
	case outputJSON:
		return a.printJSON(map[string]any{"left": s.ID})
	case outputName:
		_, err = fmt.Fprintln(a.stdout, s.ID)
		return err
	}
	a.notice("%s has left the cluster %s", name, s.ID)
	return nil
}
