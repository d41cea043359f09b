package ctl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// egressText begins the page of egress.
const egressText = "A sandbox reaches what its egress profile, its secrets and --allow name, and nothing else. " +
	"Whatever it asks for is on the audit log, with the reason why it got it or not."

func (a *app) cmdEgress() *cli.Command {
	return &cli.Command{
		Name: "egress", Category: catReach,
		Usage:     "see and change what sandboxes may reach",
		UsageText: "boxedctl egress COMMAND",
		Description: egressText + examples("boxedctl egress show build", "boxedctl egress allow build pypi.org --for 10m",
			"boxedctl egress log build --denied", "boxedctl egress profile ls"),
		Subcommands: []*cli.Command{
			a.cmdEgressShow(), a.cmdEgressSet(), a.cmdEgressAllow(), a.cmdEgressCheck(), a.cmdEgressLog(), a.cmdEgressSuggest(),
			a.cmdEgressAsk(), a.cmdEgressAnswer(), a.cmdProfile(), a.cmdFreeze(), a.cmdFreezes(), a.cmdThaw(),
		},
	}
}

func (a *app) cmdEgressShow() *cli.Command {
	return &cli.Command{
		Name: "show", Aliases: []string{"get"},
		Usage:     "show what a sandbox may reach",
		UsageText: "boxedctl egress show SANDBOX",
		Description: "Whether it is open, and every rule in force: those of its profile, of its secrets and of what was allowed since. " +
			"With -o name the hosts." + examples("boxedctl egress show build", "boxedctl egress show build -o json"),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			st, err := svc.GetEgress(c.Context, id)
			if err != nil {
				return err
			}
			return a.printEgress(st)
		},
	}
}

func (a *app) cmdEgressSet() *cli.Command {
	return &cli.Command{
		Name:      "set",
		Usage:     "change what a running sandbox may reach",
		UsageText: "boxedctl egress set SANDBOX [--egress PROFILE] [--allow HOST…] [--secret NAME…] [OPTIONS]",
		Description: "Takes the options of run, and puts them in the place of those that it was made with. It is in force at once: " +
			"connections that are no longer allowed end. Programs that run already keep the environment that they have." +
			examples("boxedctl egress set build --egress packages --allow api.example.com", "boxedctl egress set build --secret github --repo acme/app",
				"boxedctl egress set build --egress none"),
		Flags: egressFlags(),
		Action: func(c *cli.Context) error {
			ref, err := a.oneOperand(c, "SANDBOX")
			if err != nil {
				return err
			}
			spec, err := parseEgress(c)
			if err != nil {
				return err
			}
			if spec == nil {
				return usagef("say what it may reach").hint("--egress PROFILE, --allow HOST or --secret NAME; --egress none: nothing")
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			if err := a.limitSecrets(c.Context, svc, spec); err != nil {
				return err
			}
			st, err := svc.SetEgress(c.Context, id, *spec)
			if err != nil {
				return err
			}
			return a.printEgress(st)
		},
	}
}

// printEgress prints a sandbox's egress: how it stands, and the rules.
func (a *app) printEgress(st *boxed.EgressStatus) error {
	hosts := make([]string, len(st.Rules))
	rules := rulesTable()
	for i, r := range st.Rules {
		hosts[i] = r.Host
		addRule(rules, r)
	}
	fields := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	styles := map[boxed.EgressState]table.Style{boxed.EgressOpen: table.Good, boxed.EgressDegraded: table.Warn, boxed.EgressClosed: table.Bad}
	fields.Add(table.Cell{Text: "Egress:"}, table.Cell{Text: string(st.State), Style: styles[st.State]})
	if st.Reason != "" {
		fields.Add(table.Cell{Text: "Reason:"}, table.Cell{Text: st.Reason, Style: table.Warn})
	}
	for _, f := range [][2]string{
		{"Profile:", st.Profile},
		{"Secrets:", strings.Join(st.Secrets, ", ")},
		{"Not there:", strings.Join(st.Untranslated, ", ")},
		{"Flags:", strings.Join(st.Flags, ", ")},
	} {
		if f[1] != "" {
			fields.Row(f[0], f[1])
		}
	}
	for _, g := range st.Allowed {
		until := "for as long as it lives"
		if !g.Until.IsZero() {
			until = "until " + when(g.Until)
		}
		fields.Row("Allowed:", g.Host+" "+until)
	}
	if err := a.printFields(st, hosts, fields); err != nil {
		return err
	}
	a.warnFlags(st.Flags)
	if a.output != outputTable || rules.Len() == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(a.stdout); err != nil {
		return err
	}
	return a.print(st, hosts, rules)
}

func rulesTable() *table.Table {
	return table.New(table.Column{Name: "HOST", Keep: true}, table.Column{Name: "PORTS"}, table.Column{Name: "MODE"}, table.Column{Name: "SECRET"},
		table.Column{Name: "METHODS"}, table.Column{Name: "PATHS"}, table.Column{Name: "NOTE"})
}

func addRule(t *table.Table, r boxed.EgressRule) {
	ports := "443"
	if len(r.Ports) > 0 {
		ports = strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Ports), " ", ","), "[]")
	}
	secret := firstOf(r.Credential, "-")
	if r.Credential != "" && r.Need == boxed.CredentialOptional {
		secret += " (optional)"
	}
	var notes []string
	for _, n := range []struct {
		is   bool
		text string
	}{
		{r.Raw, "any protocol"},
		{r.AllowECH, "encrypted ClientHello"},
		{r.WebSocket != nil && *r.WebSocket, "websocket"},
		{r.WebSocket != nil && !*r.WebSocket, "no websocket"},
	} {
		if n.is {
			notes = append(notes, n.text)
		}
	}
	t.Row(r.Host, ports, firstOf(string(r.Mode), string(boxed.EgressTunnel)), secret,
		firstOf(strings.Join(r.Methods, ","), "any"), firstOf(strings.Join(r.Paths, ","), "any"), strings.Join(notes, ", "))
}

// warnFlags says what to know of a profile.
func (a *app) warnFlags(flags []string) {
	if slices.Contains(flags, boxed.FlagExfiltration) {
		a.notice("by this, data can go to anybody")
	}
}

func (a *app) cmdEgressAllow() *cli.Command {
	return &cli.Command{
		Name:      "allow",
		Usage:     "let a sandbox reach one host more",
		UsageText: "boxedctl egress allow SANDBOX HOST [--for DURATION]",
		Description: "HOST is on port 443, or HOST:PORT; *.HOST is every name with exactly one label more. At once, and for as long as the sandbox lives, or --for so long." +
			examples("boxedctl egress allow build pypi.org", "boxedctl egress allow build db.example.com:5432 --for 10m"),
		Flags:  []cli.Flag{&cli.StringFlag{Name: "for", Usage: "only for `DURATION`, like 10m"}},
		Action: a.allowEgress,
	}
}

func (a *app) allowEgress(c *cli.Context) error {
	words, err := a.operands(c, 2, 2)
	if err != nil {
		return err
	}
	span, err := parseSpan(c)
	if err != nil {
		return err
	}
	svc, id, err := a.reach(c.Context, words[0])
	if err != nil {
		return err
	}
	st, err := svc.AllowEgress(c.Context, id, boxed.EgressAllowance{Host: words[1], For: span})
	if err != nil {
		return err
	}
	switch a.output {
	case outputJSON:
		return a.printJSON(st)
	case outputName:
		_, err = fmt.Fprintln(a.stdout, table.Inert(words[1]))
		return err
	}
	if _, err = fmt.Fprintf(a.stdout, "%s may reach %s %s\n", table.Inert(words[0]), table.Inert(words[1]), spanText(span)); err != nil {
		return err
	}
	a.warnFlags(st.Flags)
	return nil
}

// parseSpan reads --for; 0 is for as long as the sandbox lives.
func parseSpan(c *cli.Context) (boxed.Duration, error) {
	span, err := parseDuration("for", c.String("for"))
	switch {
	case err != nil:
		return 0, err
	case span == boxed.Never:
		return 0, nil
	case span == 0 && c.IsSet("for"):
		return 0, usagef("--for says how long, more than 0").hint("write it like --for 10m; without it, it is for as long as the sandbox lives")
	}
	return span, nil
}

// spanText is how long something is allowed.
func spanText(span boxed.Duration) string {
	if span == 0 {
		return "for as long as it lives"
	}
	return "for " + span.String()
}

func (a *app) cmdEgressCheck() *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "say what would happen to a connection",
		UsageText: "boxedctl egress check SANDBOX HOST [--method METHOD] [--path PATH]",
		Description: "By which rule, and at which addresses; nothing is connected to. HOST is on port 443, or HOST:PORT. " +
			"Method and path are those of a request that the node can read: on port 80, or where a rule intercepts. " +
			fmt.Sprintf("The status is 0 if it would be allowed and %d if not.", exitFailed) +
			examples("boxedctl egress check build pypi.org", "boxedctl egress check build api.github.com --method GET --path /repos/acme/app"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "method", Usage: "of a request with this `METHOD`; GET if only a path is given"},
			&cli.StringFlag{Name: "path", Usage: "of a request for this `PATH`; / if only a method is given"},
		},
		Action: a.checkEgress,
	}
}

func (a *app) checkEgress(c *cli.Context) error {
	words, err := a.operands(c, 2, 2)
	if err != nil {
		return err
	}
	q := boxed.EgressQuery{Host: words[1], Method: strings.ToUpper(c.String("method")), Path: c.String("path")}
	switch {
	case q.Path != "" && q.Path[0] != '/':
		return usagef("--path %q does not begin with /", q.Path)
	case q.Path != "" && q.Method == "":
		q.Method = "GET"
	case q.Path == "" && q.Method != "":
		q.Path = "/"
	}
	svc, id, err := a.reach(c.Context, words[0])
	if err != nil {
		return err
	}
	ans, err := svc.CheckEgress(c.Context, id, q)
	if err != nil {
		return err
	}
	verdict := "refused"
	if ans.Allowed {
		verdict = "allowed"
	}
	if err := a.printFields(ans, []string{verdict}, a.answerFields(verdict, words[0], ans)); err != nil {
		return err
	}
	if !ans.Allowed {
		return exitStatus(exitFailed)
	}
	return nil
}

func (a *app) answerFields(verdict, ref string, ans *boxed.EgressAnswer) *table.Table {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	style := table.Bad
	if ans.Allowed {
		style = table.Good
	}
	t.Add(table.Cell{Text: "Verdict:"}, table.Cell{Text: verdict, Style: style})
	reason := string(ans.Reason)
	if ans.Allowed {
		reason = ""
	}
	// The node does not know how the sandbox was named here.
	hint := a.words(strings.Replace(ans.Hint, " SANDBOX ", " "+ref+" ", 1))
	for _, f := range [][2]string{
		{"Reason:", reason},
		{"Detail:", ans.Detail},
		{"Rule:", ans.Rule},
		{"Mode:", string(ans.Mode)},
		{"Secret:", ans.Credential},
		{"Addresses:", strings.Join(ans.Addresses, ", ")},
		{"Hint:", hint},
	} {
		if f[1] != "" {
			t.Row(f[0], f[1])
		}
	}
	return t
}
