package ctl

import (
	"context"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
	"github.com/boxed-mesh/boxed/internal/table"
)

// LobbyService is what the lobby needs of a node. The caller is the context's
// principal.
type LobbyService interface {
	boxed.API
	ListSSHKeys(ctx context.Context) ([]boxed.SSHKey, error)
	RevokeSSHKey(ctx context.Context, id string) error
	SSHInfo(ctx context.Context) (*boxed.SSHInfo, error)
}

// Lobby is what the SSH front door has without a sandbox: the commands of boxedctl
// that are about sandboxes and keys. Nothing that it does reads or writes anything of
// the host that it runs on.
type Lobby struct {
	Service LobbyService
	Color   bool
}

// Run runs a command line and returns the exit status: 0, or 255 where it could not be
// done. No words are help.
func (l Lobby) Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	a := &app{
		ctx: ctx, stdout: stdout, stderr: stderr, getenv: func(string) string { return "" },
		lobby: inProcess{LobbyService: l.Service}, forceColor: l.Color,
	}
	if len(args) == 0 {
		args = []string{"help"}
	}
	if a.main(args) != exitOK {
		return lobbyFailed
	}
	return exitOK
}

// lobbyFailed is the status of what is not a program's.
const lobbyFailed = 255

// lobbyProgram is how a command of the lobby is written.
const lobbyProgram = "ssh boxed"

// inProcess is a node as a service. What the lobby has no command for is not there.
type inProcess struct {
	LobbyService
	boxed.Admin
	boxed.Cluster
	boxed.Policies
	noSSH
}

type noSSH struct{ boxed.SSH }

func (p inProcess) ListSSHKeys(ctx context.Context) ([]boxed.SSHKey, error) {
	return p.LobbyService.ListSSHKeys(ctx)
}

func (p inProcess) RevokeSSHKey(ctx context.Context, id string) error {
	return p.LobbyService.RevokeSSHKey(ctx, id)
}

func (p inProcess) SSHInfo(ctx context.Context) (*boxed.SSHInfo, error) {
	return p.LobbyService.SSHInfo(ctx)
}

func (inProcess) Run(context.Context, boxed.ID, boxed.ExecRequest) (*client.ExecResult, error) {
	return nil, boxed.Errorf(boxed.CodeUnavailable, "not in the lobby")
}

func (inProcess) Version(context.Context) (string, error) { return versionText(), nil }

// lobbyCommands are those of the lobby.
func (a *app) lobbyCommands() *cli.Command {
	nodes := a.cmdNodeLs()
	nodes.Name, nodes.Aliases, nodes.Category, nodes.UsageText = "nodes", nil, catMesh, "boxedctl nodes"
	nodes.Description = strings.ReplaceAll(nodes.Description, "boxedctl node ls", "boxedctl nodes")
	keys := a.cmdSSHKeyLs()
	keys.Name, keys.Aliases, keys.Category, keys.UsageText = "keys", nil, catAccess, "boxedctl keys\nboxedctl keys revoke KEY…"
	keys.Description = strings.ReplaceAll(keys.Description, "boxedctl ssh-key ls", "boxedctl keys")
	keys.Subcommands = []*cli.Command{a.cmdSSHKeyRevoke()}
	keys.Subcommands[0].UsageText = "boxedctl keys revoke KEY…"
	top := a.cmdStats()
	top.Name, top.Aliases, top.UsageText = "top", nil, "boxedctl top [SANDBOX…]"
	top.Description = strings.ReplaceAll(top.Description, "boxedctl stats", "boxedctl top")
	return &cli.Command{
		Name: "boxedctl", Usage: "sandboxes, over SSH",
		Flags: slices.DeleteFunc(globalFlags(), func(f cli.Flag) bool { return !slices.Contains(lobbyFlags, f.Names()[0]) }),
		Subcommands: []*cli.Command{
			a.cmdHelp(), a.cmdLs(), a.cmdNew(), a.cmdLobbyRm(), a.cmdKeep(), a.cmdRenew(), top, a.cmdLobbyEgress(), nodes, keys, a.cmdWhoami(),
		},
	}
}

// lobbyFlags are the global flags of the lobby.
var lobbyFlags = []string{"output", "no-color", "quiet"}

// The lobby's rm ends what is named whole, and takes no options: `ssh boxed rm` is typed
// into the shell of another machine, whose globs and variables fill it in.
func (a *app) cmdLobbyRm() *cli.Command {
	return &cli.Command{
		Name: "rm", Category: catLife,
		Usage:       "end sandboxes",
		UsageText:   "boxedctl rm ID…",
		Description: "Ends every program in them, and their files are gone. It takes whole IDs, and no options." + examples("boxedctl rm 2jq4w7xk3c-mfrggzdfmztwq2lk"),
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 1, -1)
			if err != nil {
				return err
			}
			var ids []boxed.ID
			for _, w := range words {
				id, err := boxed.ParseID(w)
				if err != nil {
					return usagef("%q is not a whole ID", w).hint("boxedctl ls -o name has them")
				}
				ids = append(ids, id)
			}
			return a.removeAll(c.Context, a.lobby, ids)
		},
	}
}

// The lobby's egress has what is about one sandbox, and needs neither a file nor a person
// who answers.
func (a *app) cmdLobbyEgress() *cli.Command {
	c := a.cmdEgress()
	c.Usage = "see what sandboxes may reach, and let them reach more"
	c.Description = egressText + examples("boxedctl egress show build", "boxedctl egress allow build pypi.org --for 10m", "boxedctl egress log build --denied")
	c.Subcommands = []*cli.Command{a.cmdEgressShow(), a.cmdEgressAllow(), a.cmdEgressCheck(), a.cmdEgressLog(), a.cmdEgressSuggest()}
	return c
}

var lobbyWords = regexp.MustCompile(`boxedctl(?: ([a-z][a-z-]*))?(?: ([a-z][a-z-]*))?`)

// words writes commands as they are typed here: in the lobby those that it has begin
// with `ssh boxed`, and the others are boxedctl's still.
func (a *app) words(text string) string {
	if a.lobby == nil {
		return text
	}
	here, all := a.lobbyCommands().Subcommands, a.commands().Subcommands
	return lobbyWords.ReplaceAllStringFunc(text, func(found string) string {
		m := lobbyWords.FindStringSubmatch(found)
		if m[1] != "" {
			c, whole := find(here, m[1]), find(all, m[1])
			if c == nil || whole != nil && find(whole.Subcommands, m[2]) != nil && find(c.Subcommands, m[2]) == nil {
				return found
			}
		}
		return lobbyProgram + strings.TrimPrefix(found, "boxedctl")
	})
}

func (a *app) cmdKeep() *cli.Command {
	return &cli.Command{
		Name: "keep", Category: catLife,
		Usage:     "keep a sandbox of ssh new@… beyond its shell",
		UsageText: "boxedctl keep SANDBOX [--ttl DURATION]",
		Description: "It does not end with its shell any more, nor when it is idle, but at the end of its ttl." +
			examples("boxedctl keep build", "boxedctl keep build --ttl 24h"),
		Flags: []cli.Flag{&cli.StringFlag{Name: "ttl", Usage: "end it `DURATION` from now; without, as it was"}},
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			ttl, err := parseDuration("ttl", c.String("ttl"))
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			sb, err := sandbox(c.Context, svc, ref)
			if err != nil {
				return err
			}
			labels, never := maps.Clone(sb.Labels), boxed.Never
			delete(labels, boxed.SSHLabel)
			u := boxed.Update{Labels: &labels, IdleTimeout: &never}
			if ttl > 0 {
				u.TTL = &ttl
			}
			return a.update(c.Context, string(sb.ID), u)
		},
	}
}

func (a *app) cmdNew() *cli.Command {
	return &cli.Command{
		Name: "new", Category: catLife,
		Usage:       "make a sandbox",
		UsageText:   "boxedctl new [TEMPLATE] [--name NAME] [--ttl DURATION]",
		Description: "Prints its ID. It stays until the end of its ttl. ssh new@… makes one that ends with its shell." + examples("boxedctl new", "boxedctl new python --name build --ttl 8h"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "name", Usage: "call it `NAME`"},
			&cli.StringFlag{Name: "ttl", Usage: "end it after `DURATION`, like 10m, 8h, 2d"},
		},
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 0, 1)
			if err != nil {
				return err
			}
			spec := boxed.Spec{Name: c.String("name")}
			if len(words) == 1 {
				spec.Template = words[0]
			}
			if spec.TTL, err = parseDuration("ttl", c.String("ttl")); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			sb, err := svc.Create(c.Context, spec)
			if err != nil {
				return err
			}
			if a.output == outputJSON {
				return a.printJSON(sb)
			}
			a.notice("ssh %s@boxed is a shell in it", sb.ID.Random())
			_, err = fmt.Fprintln(a.stdout, sb.ID)
			return err
		},
	}
}

func (a *app) cmdWhoami() *cli.Command {
	return &cli.Command{
		Name: "whoami", Category: catAccess,
		Usage:       "say who you are to boxed",
		UsageText:   "boxedctl whoami",
		Description: "The owner whose sandboxes you have, and the role." + examples("boxedctl whoami", "boxedctl whoami -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			info, err := svc.SSHInfo(c.Context)
			if err != nil {
				return err
			}
			t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
			t.Row("Owner:", info.Owner)
			t.Row("Role:", string(info.Role))
			return a.printFields(info, []string{info.Owner}, t)
		},
	}
}
