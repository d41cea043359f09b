package ctl

import (
	"context"
	_ "embed"
	"fmt"
	"path"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// unitText is the unit that `make install` installs; a test holds the two equal.
//
//go:generate cp ../../deploy/boxed-node.service.in boxed-node.service.in
//go:embed boxed-node.service.in
var unitText string

// Where things lie on a host when nothing else is said.
const (
	addPrefix  = "/usr/local"
	addDataDir = "/var/lib/boxed"
)

func (a *app) cmdClusterAdd() *cli.Command {
	return &cli.Command{
		Name:      "add",
		Usage:     "make another host a node of this cluster, over ssh",
		UsageText: "boxedctl cluster add USER@HOST [OPTIONS]",
		Description: "Copies boxed-node and boxedctl to the host, checks it as boxedctl doctor does, starts the node (under systemd where that runs), and joins it. " +
			"It logs in by the system's ssh and asks for no password: a key or an agent must do, and the user must be root or may use sudo without a password. " +
			"The host needs Linux on amd64 or arm64 and the Docker engine; for another architecture than this machine's give --node-binary and --ctl-binary. " +
			"Repeating it does what is left to do." +
			examples("boxedctl cluster add root@192.168.1.12", "boxedctl cluster add ada@attic --identity ~/.ssh/lab --port 2222",
				"boxedctl cluster add root@pi --node-binary bin/arm64/boxed-node --ctl-binary bin/arm64/boxedctl"),
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "identity", Aliases: []string{"i"}, Usage: "log in with the key in `FILE`"},
			&cli.IntFlag{Name: "port", Usage: "the host's ssh is at port `N`"},
			&cli.StringSliceFlag{Name: "ssh-option", Usage: "give ssh the `OPTION`, like ProxyJump=gate; may be repeated"},
			&cli.StringFlag{Name: "node-binary", Usage: "copy this `FILE` as boxed-node; without, the one beside boxedctl or on the PATH"},
			&cli.StringFlag{Name: "ctl-binary", Usage: "copy this `FILE` as boxedctl; without, this program"},
			&cli.StringFlag{Name: "prefix", Value: addPrefix, Usage: "install the programs there below `DIR`/bin"},
			&cli.StringFlag{Name: "data-dir", Value: addDataDir, Usage: "the node keeps its data there in `DIR`"},
			&cli.BoolFlag{Name: "background", Usage: "start the node in the background, although systemd runs there"},
		}, addressFlags()...),
		Action: a.clusterAdd,
	}
}

func (a *app) clusterAdd(c *cli.Context) error {
	where, err := a.oneOperand(c, "USER@HOST")
	if err != nil {
		return err
	}
	host, err := newSSH(where, c.String("identity"), c.Int("port"), c.StringSlice("ssh-option"))
	if err != nil {
		return err
	}
	j := &addition{
		host: host, say: a.sayStep,
		nodeBinary: c.String("node-binary"), ctlBinary: c.String("ctl-binary"),
		prefix: path.Clean(c.String("prefix")), dataDir: path.Clean(c.String("data-dir")),
		background: c.Bool("background"), listen: c.String("listen"), advertise: c.String("advertise"),
	}
	for flag, dir := range map[string]string{"prefix": j.prefix, "data-dir": j.dataDir} {
		if !path.IsAbs(dir) || strings.Trim(dir, plainPathLetters) != "" {
			return usagef("--%s %q is not an absolute path of plain letters, digits, / . _ and -", flag, dir)
		}
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(context.Background())
	defer release()
	if err := j.run(ctx, svc); err != nil {
		if ctx.Err() != nil {
			return in.err()
		}
		return err
	}
	return a.printAddition(j)
}

// plainPathLetters are those of paths that no unit file and no shell reads in
// another way.
const plainPathLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-"

// sayStep prints a step that is done. The steps are the result for people; in
// front of one for programs they are on stderr.
func (a *app) sayStep(s addStep) {
	line := fmt.Sprintf("%s  %-22s %s\n", table.Paint("ok", table.Good, a.color), s.Step, table.Inert(s.Result))
	switch {
	case a.output == outputTable:
		fmt.Fprint(a.stdout, line)
	case !a.quiet:
		fmt.Fprint(a.stderr, line)
	}
}

func (a *app) printAddition(j *addition) error {
	switch a.output {
	case outputJSON:
		return a.printJSON(map[string]any{"host": j.host.name(), "node": j.node, "cluster": j.cluster, "steps": j.steps})
	case outputName:
		_, err := fmt.Fprintln(a.stdout, j.node)
		return err
	}
	a.notice("boxedctl node ls shows it; boxedctl cluster status, what is between the nodes")
	return nil
}

// addStep is one thing that was done.
type addStep struct {
	Step   string `json:"step"`
	Result string `json:"result"`
}

// addition makes one host a node, step by step. Each step finds out whether it
// is done already, so that all of it can be repeated.
type addition struct {
	host                  remote
	say                   func(addStep)
	nodeBinary, ctlBinary string
	prefix, dataDir       string
	background            bool
	listen, advertise     string

	token   string
	cluster string
	facts   hostFacts
	node    boxed.NodeID
	fresh   bool // boxed-node was copied: one that runs is the old one
	steps   []addStep
}

func (j *addition) run(ctx context.Context, svc service) error {
	if err := j.ownCluster(ctx, svc); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) (string, error)
	}{
		{"the host", j.look},
		{"boxed-node", func(ctx context.Context) (string, error) { return j.install(ctx, "boxed-node", j.nodeBinary) }},
		{"boxedctl", func(ctx context.Context) (string, error) { return j.install(ctx, "boxedctl", j.ctlBinary) }},
		{"its checks", j.check},
		{"the node starts", j.start},
		{"the node answers", j.await},
		{"the cluster", j.join},
	} {
		result, err := step.do(ctx)
		if err != nil {
			return wrapf(err, "%s: %s", j.host.name(), step.name)
		}
		done := addStep{step.name, result}
		j.steps = append(j.steps, done)
		j.say(done)
	}
	return nil
}

// ownCluster is first: without it nothing is to be done there.
func (j *addition) ownCluster(ctx context.Context, svc service) error {
	s, err := svc.ClusterStatus(ctx)
	if err != nil {
		return err
	}
	if s.ID == "" {
		return (&problem{err: boxed.Errorf(boxed.CodeConflict, "this node is in no cluster yet")}).
			hint("boxedctl cluster init makes one of it; then add hosts")
	}
	j.cluster = s.ID
	j.token, err = svc.ClusterToken(ctx)
	return err
}
