package ctl

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// The scripts ask `boxedctl __complete WORDS…` for candidates, so that they
// never have to change with the commands.
var (
	//go:embed completion.bash
	completionBash string
	//go:embed completion.zsh
	completionZsh string
	//go:embed completion.fish
	completionFish string
)

func (a *app) cmdCompletion() *cli.Command {
	scripts := map[string]string{"bash": completionBash, "zsh": completionZsh, "fish": completionFish}
	return &cli.Command{
		Name: "completion", Category: catOther,
		Usage:       "print a shell's completion script",
		UsageText:   "boxedctl completion bash|zsh|fish",
		Description: "Completes commands, flags, their values, and the names of sandboxes, nodes, profiles, secrets and contexts." + examples("source <(boxedctl completion bash)", "boxedctl completion zsh > ~/.zfunc/_boxedctl", "boxedctl completion fish > ~/.config/fish/completions/boxedctl.fish"),
		Action: func(c *cli.Context) error {
			shell, err := a.oneOperand(c, "the shell")
			if err != nil {
				return err
			}
			script, ok := scripts[shell]
			if !ok {
				return usagef("there is a script for %s, not for %q", oneOf(sortedKeys(scripts)), shell)
			}
			_, err = fmt.Fprint(a.stdout, script)
			return err
		},
	}
}

func (a *app) cmdComplete() *cli.Command {
	return &cli.Command{
		Name: "__complete", Category: catOther, Hidden: true,
		Usage:       "print the candidates for the last word",
		UsageText:   "boxedctl __complete WORDS…",
		Description: "For completion scripts." + examples("boxedctl __complete run --la"),
		Action: func(c *cli.Context) error {
			for _, word := range a.complete(c.Context, c.Args().Slice()) {
				if _, err := fmt.Fprintln(a.stdout, table.Inert(word)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// completeWithin is how long a person waits for a TAB.
const completeWithin = 1500 * time.Millisecond

// complete lists what the last word may become.
func (a *app) complete(ctx context.Context, words []string) []string {
	if len(words) == 0 {
		return nil
	}
	last := words[len(words)-1]
	line, f := a.beforeLast(words[:len(words)-1])
	var candidates []string
	switch {
	case line == nil:
		return nil
	case f != nil:
		candidates = a.flagValues(ctx, line, f.Names()[0])
	case strings.HasPrefix(last, "-"):
		for _, f := range slices.Concat(line.command.Flags, globalFlags()) {
			if head, _ := flagHelp(f); head != "" {
				candidates = append(candidates, "--"+f.Names()[0])
			}
		}
		candidates = append(candidates, "--help")
	case len(line.command.Subcommands) > 0:
		for _, sub := range line.command.Subcommands {
			if !sub.Hidden {
				candidates = append(candidates, sub.Name)
			}
		}
	default:
		candidates = a.operandValues(ctx, line)
	}
	candidates = slices.DeleteFunc(candidates, func(c string) bool { return !strings.HasPrefix(c, last) })
	slices.Sort(candidates)
	return slices.Compact(candidates)
}

// beforeLast reads the words in front of the one to complete. f is the flag
// whose value that one is, if it is one.
func (a *app) beforeLast(words []string) (line *commandLine, f cli.Flag) {
	root := a.commands()
	line, err := arrange(root, words)
	if err == nil {
		return line, nil
	}
	if len(words) == 0 || !strings.HasPrefix(words[len(words)-1], "-") {
		return nil, nil
	}
	if line, err = arrange(root, words[:len(words)-1]); err != nil {
		return nil, nil
	}
	f, _ = line.lookup(root, strings.TrimLeft(words[len(words)-1], "-"))
	return line, f
}

// flagValues are the values of a flag that can be known.
func (a *app) flagValues(ctx context.Context, line *commandLine, name string) []string {
	switch name {
	case "lang":
		return boxed.Languages()
	case "output":
		return outputs
	case "state":
		return states
	case "for":
		if line.command.Name == "wait" {
			return states
		}
	case "preset":
		return presets
	case "egress":
		return a.listed(ctx, line, profileNames)
	case "secret":
		return a.listed(ctx, line, secretNames)
	case "role":
		return roles
	case "context":
		if s, err := a.loadSettings(); err == nil {
			return s.names()
		}
	case "sandbox", "near", "apart":
		return a.sandboxNames(ctx, line)
	case "node", "held-by":
		return a.fleetNames(ctx, line)
	case "isolation":
		return isolations
	case "runtime", "template":
		return a.nodeNames(ctx, line, name)
	}
	return nil
}

// operandValues are the operands of a command that can be known.
func (a *app) operandValues(ctx context.Context, line *commandLine) []string {
	switch strings.Join(line.path, " ") {
	case "completion":
		return []string{"bash", "fish", "zsh"}
	case "context use", "context rm", "context show":
		if s, err := a.loadSettings(); err == nil {
			return s.names()
		}
	case "node info", "node cordon", "node uncordon", "node drain", "cluster remove":
		if len(line.operands) == 0 {
			return a.fleetNames(ctx, line)
		}
	case "egress profile show", "egress profile rm":
		return a.listed(ctx, line, profileNames)
	case "egress thaw":
		return a.listed(ctx, line, freezeIDs)
	case "egress answer":
		if len(line.operands) == 2 {
			return verdicts
		}
		fallthrough
	case "egress show", "egress set", "egress allow", "egress check", "egress log", "egress suggest", "egress ask":
		if len(line.operands) == 0 {
			return a.sandboxNames(ctx, line)
		}
	case "secret set":
		if len(line.operands) == 0 {
			return append(a.listed(ctx, line, secretNames), presets...)
		}
	case "secret revoke":
		return a.listed(ctx, line, secretNames)
	case "get", "rm":
		return a.sandboxNames(ctx, line)
	case "exec", "shell", "repl", "ps", "logs", "kill", "inspect", "wait", "renew", "update", "pause", "resume", "stats",
		"ports", "forward", "fs ls", "fs cat", "fs stat", "fs mkdir", "fs rm", "fs mv":
		if len(line.operands) == 0 {
			return a.sandboxNames(ctx, line)
		}
	}
	return nil
}

// connectFor connects with the global flags of a line that is being typed.
func (a *app) connectFor(line *commandLine) (service, error) {
	flags := map[string]string{}
	for _, g := range line.globals {
		name, value, _ := strings.Cut(strings.TrimPrefix(g, "--"), "=")
		flags[name] = value
	}
	a.quiet = true
	a.node = targetFlags{
		context: flags["context"], endpoint: flags["endpoint"], key: flags["api-key"], keyFile: flags["api-key-file"], pin: flags["pin"],
	}
	return a.connect()
}

func (a *app) sandboxNames(ctx context.Context, line *commandLine) []string {
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	svc, err := a.connectFor(line)
	if err != nil {
		return nil
	}
	list, err := svc.List(ctx, boxed.Filter{Limit: pageSize})
	if err != nil {
		return nil
	}
	var names []string
	for _, sb := range list.Sandboxes {
		names = append(names, firstOf(sb.Name, sb.ID.Random()))
	}
	return names
}

// listed asks the node for names; nil if it does not answer in time.
func (a *app) listed(ctx context.Context, line *commandLine, names func(context.Context, service) ([]string, error)) []string {
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	svc, err := a.connectFor(line)
	if err != nil {
		return nil
	}
	list, err := names(ctx, svc)
	if err != nil {
		return nil
	}
	return list
}

func profileNames(ctx context.Context, svc service) (names []string, err error) {
	list, err := svc.ListProfiles(ctx)
	for _, p := range list {
		names = append(names, p.Name)
	}
	return names, err
}

func secretNames(ctx context.Context, svc service) (names []string, err error) {
	list, err := svc.ListSecrets(ctx)
	for _, s := range list {
		if s.RevokedAt.IsZero() {
			names = append(names, s.Name)
		}
	}
	return names, err
}

func freezeIDs(ctx context.Context, svc service) (ids []string, err error) {
	list, err := svc.Freezes(ctx)
	for _, f := range list {
		ids = append(ids, f.ID)
	}
	return ids, err
}

// fleetNames are the nodes of the mesh.
func (a *app) fleetNames(ctx context.Context, line *commandLine) []string {
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	svc, err := a.connectFor(line)
	if err != nil {
		return nil
	}
	list, err := svc.ListNodes(ctx)
	if err != nil {
		return nil
	}
	var names []string
	for _, n := range list.Nodes {
		names = append(names, firstOf(n.Name, string(n.ID)))
	}
	return names
}

// nodeNames are the runtimes or templates of the node that answers.
func (a *app) nodeNames(ctx context.Context, line *commandLine, what string) []string {
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	svc, err := a.connectFor(line)
	if err != nil {
		return nil
	}
	n, err := svc.NodeInfo(ctx)
	if err != nil {
		return nil
	}
	if what == "runtime" {
		return n.Runtimes
	}
	var names []string
	for _, t := range n.Templates {
		names = append(names, t.Name)
	}
	return names
}
