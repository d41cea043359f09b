package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdProfile() *cli.Command {
	return &cli.Command{
		Name:      "profile",
		Usage:     "apply, list and delete egress profiles",
		UsageText: "boxedctl egress profile COMMAND",
		Description: "A profile says what sandboxes that name it may connect to. It is a file in YAML that you keep, and is known on every node of the cluster. " +
			"Those of administrators are for everybody to name; some are ready on every node." +
			examples("boxedctl egress profile ls", "boxedctl egress profile show packages", "boxedctl egress profile apply web.yaml", "boxedctl run --egress web job.py"),
		Subcommands: []*cli.Command{a.cmdProfileApply(), a.cmdProfileDiff(), a.cmdProfileLs(), a.cmdProfileShow(), a.cmdProfileRm()},
	}
}

func (a *app) cmdProfileApply() *cli.Command {
	return &cli.Command{
		Name:      "apply",
		Usage:     "apply an egress profile",
		UsageText: "boxedctl egress profile apply FILE|- [--dry-run]",
		Description: "FILE is a profile in YAML or JSON, - is stdin. Prints what it allows that was not allowed before, with a +, and what it no longer allows, with a -. " +
			"Sandboxes that use it change at once. A file with a mistake changes nothing, and the error names the line." +
			examples("boxedctl egress profile apply web.yaml --dry-run", "boxedctl egress profile apply web.yaml", "boxedctl egress suggest build | boxedctl egress profile apply -"),
		Flags:  []cli.Flag{&cli.BoolFlag{Name: "dry-run", Usage: "only print what would change"}},
		Action: func(c *cli.Context) error { return a.applyProfile(c, c.Bool("dry-run")) },
	}
}

func (a *app) cmdProfileDiff() *cli.Command {
	return &cli.Command{
		Name:        "diff",
		Usage:       "show what applying a profile would change",
		UsageText:   "boxedctl egress profile diff FILE|-",
		Description: "The same as apply with --dry-run." + examples("boxedctl egress profile diff web.yaml"),
		Action:      func(c *cli.Context) error { return a.applyProfile(c, true) },
	}
}

func (a *app) applyProfile(c *cli.Context, dry bool) error {
	file, err := a.oneOperand(c, "FILE")
	if err != nil {
		return err
	}
	text, err := a.readProfile(file)
	if err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	change, err := svc.ApplyProfile(c.Context, text, dry)
	if err != nil {
		return wrapf(withoutField(err), "%s", inputName(file))
	}
	return a.printChange(change)
}

// maxProfile bounds a profile's file, in bytes: the API takes no more.
const maxProfile = 32 << 10

func (a *app) readProfile(file string) (text []byte, err error) {
	if file == "-" {
		if isTerminal(a.stdin) {
			a.notice("reading the profile from the terminal; Ctrl-D ends it")
		}
		text, err = io.ReadAll(io.LimitReader(a.stdin, maxProfile+1))
	} else {
		text, err = readSmall(file, maxProfile)
	}
	switch {
	case err != nil:
		return nil, wrapf(plainPath(err), "read the profile")
	case len(text) > maxProfile:
		return nil, boxed.Errorf(boxed.CodeTooLarge, "%s has more than %d bytes", inputName(file), maxProfile)
	case len(bytes.TrimSpace(text)) == 0:
		return nil, usagef("%s is empty", inputName(file)).hint("boxedctl egress profile show packages prints one to begin with")
	}
	return text, nil
}

// inputName is a file, or stdin, for people.
func inputName(file string) string {
	if file == "-" {
		return "stdin"
	}
	return file
}

// withoutField is err without the field that it names: in a file, that is no flag.
func withoutField(err error) error {
	var e *boxed.Error
	if !errors.As(err, &e) || e.Field() == "" {
		return err
	}
	plain := *e
	plain.Detail = maps.Clone(e.Detail)
	delete(plain.Detail, "field")
	return &plain
}

// printChange prints what applying a profile does, or would do.
func (a *app) printChange(ch *boxed.EgressChange) error {
	name := ""
	if ch.Profile != nil {
		name = ch.Profile.Name
		a.warnFlags(ch.Profile.Flags)
	}
	switch a.output {
	case outputJSON:
		return a.printJSON(ch)
	case outputName:
		_, err := fmt.Fprintln(a.stdout, table.Inert(name))
		return err
	}
	var b strings.Builder
	for _, w := range ch.Widened {
		b.WriteString(table.Paint("+ "+table.Inert(w), table.Warn, a.color) + "\n")
	}
	for _, n := range ch.Narrowed {
		b.WriteString(table.Paint("- "+table.Inert(n), table.Good, a.color) + "\n")
	}
	if len(ch.Widened)+len(ch.Narrowed) == 0 {
		b.WriteString("it allows what it did before\n")
	}
	verdict := "is applied"
	if !ch.Applied {
		verdict = "is not applied: this only says what would change"
	}
	fmt.Fprintf(&b, "the profile %s %s\n", table.Inert(name), verdict)
	_, err := io.WriteString(a.stdout, b.String())
	return err
}

func (a *app) cmdProfileLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list egress profiles",
		UsageText:   "boxedctl egress profile ls",
		Description: "Yours, the operator's, and those that are ready on every node." + examples("boxedctl egress profile ls", "boxedctl egress profile ls -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list, err := svc.ListProfiles(c.Context)
			if err != nil {
				return err
			}
			if list == nil {
				list = []boxed.EgressProfile{}
			}
			t := table.New(table.Column{Name: "PROFILE", Keep: true}, table.Column{Name: "OWNER"}, table.Column{Name: "RULES", Right: true},
				table.Column{Name: "OTHERS"}, table.Column{Name: "AGE", Right: true}, table.Column{Name: "FLAGS"})
			now := time.Now()
			names := make([]string, len(list))
			for i, p := range list {
				names[i] = p.Name
				t.Add(table.Cell{Text: p.Name}, table.Cell{Text: profileOwner(&p)}, table.Cell{Text: fmt.Sprint(len(p.Rules))},
					table.Cell{Text: firstOf(string(p.OnDeny), string(boxed.DenyRefuse))}, table.Cell{Text: table.Age(p.UpdatedAt, now)},
					table.Cell{Text: strings.Join(p.Flags, ","), Style: table.Warn})
			}
			return a.print(map[string]any{"profiles": list}, names, t)
		},
	}
}

// profileOwner says whose a profile is.
func profileOwner(p *boxed.EgressProfile) string {
	if p.Ready {
		return "ready"
	}
	return firstOf(p.Owner, "operator")
}

func (a *app) cmdProfileShow() *cli.Command {
	return &cli.Command{
		Name: "show", Aliases: []string{"get"},
		Usage:       "print an egress profile",
		UsageText:   "boxedctl egress profile show NAME",
		Description: "As YAML, ready to be changed and applied." + examples("boxedctl egress profile show packages", "boxedctl egress profile show web > web.yaml"),
		Action: func(c *cli.Context) error {
			name, err := a.profileOperand(c)
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			p, err := svc.GetProfile(c.Context, name)
			if err != nil {
				return profileError(err)
			}
			return a.printProfile(p)
		},
	}
}

// profileOperand is the one operand, a profile's name.
func (a *app) profileOperand(c *cli.Context) (string, error) {
	name, err := a.oneOperand(c, "NAME")
	if err == nil && !isOwned(name) {
		err = usagef("%q names no profile", name).hint("boxedctl egress profile ls lists them")
	}
	return name, err
}

// profileError adds where a profile's name is to be found.
func profileError(err error) error {
	if boxed.CodeOf(err) == boxed.CodeNotFound {
		return (&problem{err: withoutField(err)}).hint("boxedctl egress profile ls lists them")
	}
	return withoutField(err)
}

func (a *app) cmdProfileRm() *cli.Command {
	return &cli.Command{
		Name: "rm", Aliases: []string{"delete"},
		Usage:       "delete an egress profile",
		UsageText:   "boxedctl egress profile rm NAME",
		Description: "Sandboxes that use it reach nothing from then on, unless there is another of that name: the operator's, or a ready one. An administrator deletes another owner's as OWNER/NAME." + examples("boxedctl egress profile rm web"),
		Action: func(c *cli.Context) error {
			name, err := a.profileOperand(c)
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			if err := svc.DeleteProfile(c.Context, name); err != nil {
				return profileError(err)
			}
			return a.noticeGone(c.Context, svc, name)
		},
	}
}

// noticeGone says what a deleted profile's sandboxes have now.
func (a *app) noticeGone(ctx context.Context, svc service, name string) error {
	next, err := svc.GetProfile(ctx, name)
	switch {
	case boxed.CodeOf(err) == boxed.CodeNotFound:
		a.notice("the profile %s is gone; sandboxes that use it reach nothing now", name)
		return nil
	case err != nil:
		return err
	case next.Ready:
		a.notice("the profile %s is gone; sandboxes that use it have the ready one of that name now", name)
	default:
		a.notice("the profile %s is gone; sandboxes that use it have the operator's of that name now", name)
	}
	return nil
}

func (a *app) cmdEgressSuggest() *cli.Command {
	return &cli.Command{
		Name:      "suggest",
		Usage:     "print a profile of what a sandbox asked for",
		UsageText: "boxedctl egress suggest SANDBOX",
		Description: "The narrowest that would have let it all through, of what the audit log still has, as YAML that egress profile apply takes. " +
			"What a sandbox asked for is not what it ought to have: read it first." +
			examples("boxedctl egress suggest build", "boxedctl egress suggest build > web.yaml"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			p, err := svc.SuggestEgress(c.Context, id)
			if err != nil {
				return err
			}
			if len(p.Rules) == 0 {
				a.notice("it asked for nothing that a rule would let through")
			}
			return a.printProfile(p)
		},
	}
}

// printProfile prints a profile as a person writes it.
func (a *app) printProfile(p *boxed.EgressProfile) error {
	switch a.output {
	case outputJSON:
		return a.printJSON(p)
	case outputName:
		_, err := fmt.Fprintln(a.stdout, table.Inert(p.Name))
		return err
	}
	text, err := profileYAML(p)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(a.stdout, text); err != nil {
		return err
	}
	a.warnFlags(p.Flags)
	return nil
}

// profileYAML is the file of a profile.
func profileYAML(p *boxed.EgressProfile) (string, error) {
	rules := make([]ruleText, len(p.Rules))
	for i, r := range p.Rules {
		if slices.Equal(r.Ports, []uint16{443}) {
			r.Ports = nil // the default
		}
		rules[i] = ruleText(r)
	}
	text, err := yaml.MarshalWithOptions(profileText{p.Version, p.Name, p.Owner, p.OnDeny, p.Exit, p.Deny, rules}, yaml.Indent(2))
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		b.WriteString(table.Inert(strings.TrimSuffix(line, "\n")) + "\n")
	}
	return b.String(), nil
}

// profileText is what a person writes of a profile.
type profileText struct {
	Version int          `yaml:"version"`
	Name    string       `yaml:"name"`
	Owner   string       `yaml:"owner,omitempty"`
	OnDeny  boxed.OnDeny `yaml:"on_deny,omitempty"`
	Exit    boxed.NodeID `yaml:"exit,omitempty"`
	Deny    []string     `yaml:"deny,flow,omitempty"`
	Rules   []ruleText   `yaml:"rules"`
}

// ruleText is a boxed.EgressRule with its lists on one line each.
type ruleText struct {
	Host       string               `yaml:"host"`
	Ports      []uint16             `yaml:"ports,flow,omitempty"`
	Mode       boxed.EgressMode     `yaml:"mode,omitempty"`
	Methods    []string             `yaml:"methods,flow,omitempty"`
	Paths      []string             `yaml:"paths,flow,omitempty"`
	Credential string               `yaml:"credential,omitempty"`
	Need       boxed.CredentialNeed `yaml:"need,omitempty"`
	Raw        bool                 `yaml:"raw,omitempty"`
	AllowECH   bool                 `yaml:"allow_ech,omitempty"`
	WebSocket  *bool                `yaml:"websocket,omitempty"`
}
