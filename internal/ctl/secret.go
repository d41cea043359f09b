package ctl

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// presets are the kinds of secrets.
var presets = []string{"anthropic", "aws", "generic", "github", "gitlab", "npm", "openai", "pypi"}

func (a *app) cmdSecret() *cli.Command {
	return &cli.Command{
		Name: "secret", Category: catReach,
		Usage:     "keep secrets that programs use and never see",
		UsageText: "boxedctl secret COMMAND",
		Description: "A program in a sandbox has a placeholder in place of the secret. The node puts the secret into requests to the hosts that it is for, and to no others. " +
			"It can never be read back." + examples("boxedctl secret set github", "boxedctl run --secret github job.py", "boxedctl secret ls", "boxedctl secret revoke github"),
		Subcommands: []*cli.Command{a.cmdSecretSet(), a.cmdSecretLs(), a.cmdSecretRevoke()},
	}
}

func (a *app) cmdSecretSet() *cli.Command {
	return &cli.Command{
		Name:  "set",
		Usage: "set a secret, or give it a new value",
		UsageText: "boxedctl secret set NAME [--preset PRESET] [--host HOST…] [OPTIONS] < FILE\n" +
			"boxedctl secret set NAME [OPTIONS] --file FILE",
		Description: "The value comes from stdin or a file, never from the command line; on a terminal it is asked for. One newline at its end is not part of it. That of aws is KEY_ID:SECRET_KEY. " +
			"A preset knows the hosts, the place in a request and the variables of a kind of secret; where NAME is a preset's and no other is given, it is that one. " +
			"What is not given of a secret that there is stays as it was: sandboxes that use it go on with the new value. " +
			"It is sealed to the node that answers unless you say otherwise." +
			examples("boxedctl secret set github < token", "boxedctl secret set work --preset github --author 'Ada <ada@example.com>' --file token",
				"boxedctl secret set crm --host api.crm.example.com --slot header:X-Api-Key --env CRM_KEY < key", "boxedctl secret set github --may bob --keep-value"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "preset", Usage: "it is of the kind `PRESET`: " + oneOf(presets) + " (generic, unless NAME is one)"},
			&cli.StringSliceFlag{Name: "host", Usage: "use it for `HOST`, in place of the preset's; may be repeated"},
			&cli.StringFlag{Name: "slot", Usage: "where it stands in a request, `SLOT`: bearer, basic, basic:USER, header:NAME, query:NAME or sigv4"},
			&cli.StringSliceFlag{Name: "path", Usage: "use it only for `PATH`, and what is below one that ends with /; may be repeated"},
			&cli.StringSliceFlag{Name: "method", Usage: "use it only for requests with `METHOD`; may be repeated"},
			&cli.StringSliceFlag{Name: "env", Usage: "programs find the placeholder in the variable `VAR`; may be repeated"},
			&cli.StringFlag{Name: "author", Usage: "commits are by `'NAME <MAIL>'`"},
			&cli.StringSliceFlag{Name: "may", Usage: "`OWNER` may use it too, as YOU/NAME; * is everybody, administrators only; may be repeated"},
			&cli.StringFlag{Name: "owner", Usage: "for `OWNER` instead of yourself; administrators only"},
			&cli.StringFlag{Name: "file", Usage: "read the value from `FILE`, - is stdin", Category: catValue},
			&cli.BoolFlag{Name: "keep-value", Usage: "change the rest only", Category: catValue},
			&cli.StringFlag{Name: "from-env", Usage: "the node reads it from its own variable `VAR`; administrators only, where egress.sources lets them", Category: catValue},
			&cli.StringFlag{Name: "from-command", Usage: "the node reads it from what `COMMAND` prints there; administrators only, where egress.sources lets them", Category: catValue},
			&cli.BoolFlag{Name: "all", Usage: "seal it to every node that is known, not to the one that answers alone", Category: catSealed},
			&cli.StringFlag{Name: "held-by", Usage: "`NODE` alone has it, and uses it for the others", Category: catSealed},
		},
		Action: a.setSecret,
	}
}

// The groups of the flags of secret set.
const (
	catValue  = "The value"
	catSealed = "Where it is"
)

func (a *app) setSecret(c *cli.Context) error {
	name, err := a.secretName(c)
	if err != nil {
		return err
	}
	req, err := parseSecret(c, name)
	if err != nil {
		return err
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if ref := c.String("held-by"); ref != "" {
		if req.HeldBy, err = nodeID(c.Context, svc, ref); err != nil {
			return wrapf(err, "--held-by")
		}
	}
	if req.Source == "" && !c.Bool("keep-value") {
		if req.Value, err = a.secretValue(name, c.String("file")); err != nil {
			return err
		}
	}
	s, err := svc.SetSecret(c.Context, req)
	if err != nil {
		return err
	}
	if err := a.printFields(s, []string{s.Name}, secretFields(s)); err != nil {
		return err
	}
	a.notice("programs use it by: boxedctl run --secret %s …", s.Name)
	return nil
}

// secretName is the one operand. What could be a secret is not shown: whoever put it there
// has it in too many places already.
func (a *app) secretName(c *cli.Context) (string, error) {
	switch name := c.Args().First(); {
	case c.NArg() == 0:
		return "", usagef("NAME is missing").hint("%s", usageLine(a.line.command))
	case c.NArg() > 1, strings.Contains(name, "="):
		return "", usagef("the value of a secret does not belong on the command line: others can see it in the list of processes, and your shell keeps it").
			hint("boxedctl secret set NAME asks for it, boxedctl secret set NAME < FILE reads it")
	case !boxed.ValidName(name):
		return "", usagef("that is no name of a secret: up to 40 of a-z, 0-9 and -, not at the ends").hint("the value comes from stdin: boxedctl secret set NAME < FILE")
	default:
		return name, nil
	}
}

// parseSecret reads what is said of a secret, but for its value and its holder.
func parseSecret(c *cli.Context, name string) (boxed.SecretRequest, error) {
	req := boxed.SecretRequest{Secret: boxed.Secret{
		Name: name, Owner: c.String("owner"), Preset: strings.ToLower(c.String("preset")), Hosts: c.StringSlice("host"), Slot: c.String("slot"),
		Paths: c.StringSlice("path"), Methods: upper(c.StringSlice("method")), Env: c.StringSlice("env"), Author: c.String("author"),
		May: c.StringSlice("may"), All: c.Bool("all"),
	}}
	if req.Preset == "" && slices.Contains(presets, name) && !c.Bool("keep-value") {
		req.Preset = name
	}
	var given []string
	for _, flag := range []string{"file", "keep-value", "from-env", "from-command"} {
		if c.IsSet(flag) {
			given = append(given, "--"+flag)
		}
	}
	fromNode := c.IsSet("from-env") || c.IsSet("from-command")
	switch {
	case req.Preset != "" && !slices.Contains(presets, req.Preset):
		return req, usagef("--preset is %s, not %q", oneOf(presets), c.String("preset"))
	case req.Author != "" && !strings.Contains(req.Author, "<"):
		return req, usagef("--author %q has no address", req.Author).hint("write it like --author 'Ada <ada@example.com>'")
	case len(given) > 1:
		return req, usagef("%s exclude each other: each says where the value is from", strings.Join(given, " and "))
	case fromNode && c.String("from-env")+c.String("from-command") == "":
		return req, usagef("%s is empty", given[0])
	case req.All && c.IsSet("held-by"):
		return req, usagef("--all and --held-by exclude each other")
	case fromNode && (req.All || c.IsSet("held-by")):
		return req, usagef("%s is read by the node that answers and stays there; it cannot be sealed to others", given[0])
	case c.IsSet("from-env"):
		req.Source = "env:" + c.String("from-env")
	case c.IsSet("from-command"):
		req.Source = "command:" + c.String("from-command")
	}
	return req, nil
}

func upper(words []string) []string {
	for i := range words {
		words[i] = strings.ToUpper(words[i])
	}
	return words
}

// secretFields are those of one secret.
func secretFields(s *boxed.Secret) *table.Table {
	t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
	version := fmt.Sprint(s.Version)
	if s.Version > 1 {
		version += ", sandboxes that use it have it already"
	}
	for _, f := range [][2]string{
		{"Secret:", s.Name},
		{"Owner:", s.Owner},
		{"Preset:", s.Preset},
		{"Hosts:", secretHosts(s)},
		{"Slot:", s.Slot},
		{"Paths:", strings.Join(s.Paths, ", ")},
		{"Methods:", strings.Join(s.Methods, ", ")},
		{"Variables:", strings.Join(s.Env, ", ")},
		{"Author:", s.Author},
		{"May use it:", strings.Join(s.May, ", ")},
		{"Sealed to:", sealedTo(s)},
		{"Version:", version},
	} {
		if f[1] != "" {
			t.Row(f[0], f[1])
		}
	}
	return t
}

func secretHosts(s *boxed.Secret) string {
	return firstOf(strings.Join(s.Hosts, ", "), "those of "+s.Preset)
}

// sealedTo says who can use a secret.
func sealedTo(s *boxed.Secret) string {
	switch {
	case s.Source != "" && s.Source != "value":
		return "nobody: " + firstOf(joinNodes(s.Nodes), "its node") + " reads it from " + s.Source
	case s.HeldBy != "":
		return string(s.HeldBy) + ", which uses it for the others"
	case s.All:
		return fmt.Sprintf("every node that was known: %d", len(s.Nodes))
	case s.Here && len(s.Nodes) == 1:
		return "this node, " + string(s.Nodes[0])
	}
	return firstOf(joinNodes(s.Nodes), "no node")
}

func (a *app) cmdSecretLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list secrets",
		UsageText:   "boxedctl secret ls",
		Description: "Yours, and those that you may use; everybody's for administrators. Never their values." + examples("boxedctl secret ls", "boxedctl secret ls -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			list, err := svc.ListSecrets(c.Context)
			if err != nil {
				return err
			}
			if list == nil {
				list = []boxed.Secret{}
			}
			t := table.New(table.Column{Name: "SECRET", Keep: true}, table.Column{Name: "OWNER"}, table.Column{Name: "PRESET"}, table.Column{Name: "HOSTS"},
				table.Column{Name: "VERSION", Right: true}, table.Column{Name: "AGE", Right: true}, table.Column{Name: "STATE"}, table.Column{Name: "SEALED TO"})
			now := time.Now()
			names := make([]string, len(list))
			for i := range list {
				s := &list[i]
				names[i] = s.Name
				t.Add(table.Cell{Text: s.Name}, table.Cell{Text: s.Owner}, table.Cell{Text: s.Preset}, table.Cell{Text: secretHosts(s)},
					table.Cell{Text: fmt.Sprint(s.Version)}, table.Cell{Text: table.Age(s.UpdatedAt, now)}, secretState(s), table.Cell{Text: sealedTo(s)})
			}
			return a.print(map[string]any{"secrets": list}, names, t)
		},
	}
}

// secretState says whether a secret is of use.
func secretState(s *boxed.Secret) table.Cell {
	switch {
	case !s.RevokedAt.IsZero():
		return table.Cell{Text: "revoked", Style: table.Bad}
	case s.Here:
		return table.Cell{Text: "usable here", Style: table.Good}
	}
	return table.Cell{Text: "not here", Style: table.Warn}
}

func (a *app) cmdSecretRevoke() *cli.Command {
	return &cli.Command{
		Name: "revoke", Aliases: []string{"rm"},
		Usage:     "revoke secrets, for good",
		UsageText: "boxedctl secret revoke NAME…",
		Description: "Its use ends on every node that is connected. Revoke it where it was issued too: a node that is cut off has it still. An administrator revokes another owner's as OWNER/NAME." +
			examples("boxedctl secret revoke github"),
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 1, -1)
			if err != nil {
				return err
			}
			for _, name := range words {
				if !isOwned(name) {
					return usagef("%q names no secret", name).hint("boxedctl secret ls lists them")
				}
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			for _, name := range words {
				err := svc.RevokeSecret(c.Context, name)
				if boxed.CodeOf(err) == boxed.CodeNotFound {
					return (&problem{err: err}).hint("boxedctl secret ls lists them")
				}
				if err != nil {
					return err
				}
				a.notice("%s is revoked here; revoke it where it was issued too", name)
			}
			return nil
		},
	}
}
