package ctl

import (
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdContext() *cli.Command {
	return &cli.Command{
		Name: "context", Category: catAccess, Aliases: []string{"ctx"},
		Usage:     "keep addresses and keys of several nodes",
		UsageText: "boxedctl context COMMAND",
		Description: "A context is a node's address, the file that has the key, and the certificate to trust, under a name. " +
			"One with the addresses of several nodes of a cluster goes to the first of them that answers. " +
			"They are kept in $XDG_CONFIG_HOME/boxed/config.yaml, or ~/.config/boxed/config.yaml; keys stay in their own files." +
			examples("boxedctl context add lab --endpoint https://lab:8443 --api-key-file ~/lab.key --use", "boxedctl context ls"),
		Subcommands: []*cli.Command{a.cmdContextAdd(), a.cmdContextLs(), a.cmdContextUse(), a.cmdContextRm(), a.cmdContextShow()},
	}
}

func (a *app) cmdContextAdd() *cli.Command {
	return &cli.Command{
		Name:      "add",
		Usage:     "add a context, or change it",
		UsageText: "boxedctl context add NAME --endpoint URL… [--api-key-file FILE] [--pin SHA256…] [--use]",
		Description: "The first context that is added is the current one. Adding one that exists replaces it; adding the same again changes nothing.\n" +
			"With the endpoints of several nodes of one cluster, commands go to the first to which a connection can be made: any node takes any call. " +
			"They go on to the next only while nothing has been sent, so nothing is done twice; a certificate that is not trusted is an error and not passed over. " +
			"The key is sent to all of them." +
			examples("boxedctl context add lab --endpoint https://lab:8443 --api-key-file ~/lab.key --pin 3f…a0 --use",
				"boxedctl context add mesh --endpoint http://10.0.0.1:8080 --endpoint http://10.0.0.2:8080 --api-key-file ~/mesh.key"),
		Flags: []cli.Flag{
			// The global flags of the same name choose a node to speak to; here they are what to keep.
			&cli.StringSliceFlag{Name: "endpoint", Usage: "the node's `URL`; may be repeated, for more nodes of its cluster"},
			&cli.StringFlag{Name: "api-key-file", Usage: "the `FILE` that has the key"},
			&cli.StringSliceFlag{Name: "pin", Usage: "trust the certificate with this `SHA256` and no other; repeated, one for each endpoint"},
			&cli.BoolFlag{Name: "use", Usage: "make it the current context"},
		},
		Action: func(c *cli.Context) error {
			name, err := a.oneOperand(c, "NAME")
			if err != nil {
				return err
			}
			node, err := newContext(name, c.StringSlice("endpoint"), c.StringSlice("pin"))
			if err != nil {
				return err
			}
			node.APIKeyFile = c.String("api-key-file")
			return a.addContext(name, node, c.Bool("use"))
		},
	}
}

// newContext checks the addresses and pins of a context.
func newContext(name string, urls, pins []string) (nodeContext, error) {
	if !boxed.ValidName(name) {
		return nodeContext{}, usagef("%q cannot be a context's name", name).hint("up to 40 of a-z, 0-9 and -, not at the ends")
	}
	if len(urls) == 0 {
		return nodeContext{}, usagef("--endpoint is missing").hint("boxedctl context add %s --endpoint %s", name, defaultEndpoint)
	}
	node := nodeContext{Endpoint: urls[0], Endpoints: urls}
	switch {
	case len(pins) == 1:
		node.Pin = pins[0]
	case len(pins) > 1 && len(pins) != len(urls):
		return nodeContext{}, usagef("there are %d pins for %d endpoints", len(pins), len(urls)).hint("give one --pin for all, or one for each --endpoint in the same order")
	case len(pins) > 1:
		node.Pins = pins
	}
	list, err := node.checked()
	if err != nil {
		return nodeContext{}, err
	}
	node = nodeContext{Endpoint: list[0].url, Pin: list[0].pin}
	if len(list) == 1 {
		return node, nil
	}
	for _, e := range list {
		if slices.Contains(node.Endpoints, e.url) {
			return nodeContext{}, usagef("the endpoint %s is there twice", e.url)
		}
		if len(pins) > 1 && !strings.HasPrefix(e.url, "https://") {
			return nodeContext{}, usagef("--pin is for https, the endpoint is %s", e.url)
		}
		node.Endpoints = append(node.Endpoints, e.url)
		node.Pins = append(node.Pins, e.pin)
	}
	if len(pins) == 0 {
		node.Pins = nil
	}
	return node, nil
}

func (a *app) addContext(name string, node nodeContext, use bool) error {
	var err error
	if node.APIKeyFile != "" {
		if node.APIKeyFile, err = filepath.Abs(node.APIKeyFile); err != nil {
			return err
		}
		if _, err := a.readKey(node.APIKeyFile); err != nil {
			return err
		}
	}
	s, err := a.loadSettings()
	if err != nil {
		return err
	}
	old, known := s.Contexts[name]
	if known && reflect.DeepEqual(old, node) && (s.Current == name || !use) {
		return nil
	}
	if s.Contexts == nil {
		s.Contexts = map[string]nodeContext{}
	}
	s.Contexts[name] = node
	if use || len(s.Contexts) == 1 {
		s.Current = name
	}
	return a.saveSettings(s)
}

func (a *app) cmdContextLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list the contexts",
		UsageText:   "boxedctl context ls",
		Description: "The current one has a star." + examples("boxedctl context ls", "boxedctl context ls -o json"),
		Action: func(*cli.Context) error {
			s, err := a.loadSettings()
			if err != nil {
				return err
			}
			type named struct {
				Name    string `json:"name"`
				Current bool   `json:"current"`
				nodeContext
			}
			list := []named{}
			t := table.New(table.Column{}, table.Column{Name: "NAME", Keep: true}, table.Column{Name: "ENDPOINT", Keep: true},
				table.Column{Name: "KEY FILE"}, table.Column{Name: "PIN"})
			for _, name := range s.names() {
				node := s.Contexts[name]
				list = append(list, named{name, name == s.Current, node})
				star := ""
				if name == s.Current {
					star = "*"
				}
				var urls, pins []string
				for _, e := range node.all() {
					urls = append(urls, e.url)
					if e.pin != "" {
						pins = append(pins, table.Clip(e.pin, 13))
					}
				}
				t.Row(star, name, strings.Join(urls, ", "), node.APIKeyFile, strings.Join(slices.Compact(pins), ", "))
			}
			return a.print(map[string]any{"contexts": list}, s.names(), t)
		},
	}
}

func (a *app) cmdContextUse() *cli.Command {
	return &cli.Command{
		Name:        "use",
		Usage:       "make a context the current one",
		UsageText:   "boxedctl context use NAME",
		Description: "Commands speak to its node from now on." + examples("boxedctl context use lab"),
		Action: func(c *cli.Context) error {
			name, err := a.oneOperand(c, "NAME")
			if err != nil {
				return err
			}
			s, err := a.loadSettings()
			if err != nil {
				return err
			}
			if _, err := s.byName(name); err != nil {
				return err
			}
			s.Current = name
			return a.saveSettings(s)
		},
	}
}

func (a *app) cmdContextRm() *cli.Command {
	return &cli.Command{
		Name: "rm", Aliases: []string{"remove"},
		Usage:       "forget a context",
		UsageText:   "boxedctl context rm NAME",
		Description: "The key's file stays. If it was the current context, there is none then." + examples("boxedctl context rm lab"),
		Action: func(c *cli.Context) error {
			name, err := a.oneOperand(c, "NAME")
			if err != nil {
				return err
			}
			s, err := a.loadSettings()
			if err != nil {
				return err
			}
			if _, err := s.byName(name); err != nil {
				return err
			}
			s.Contexts = maps.Clone(s.Contexts)
			delete(s.Contexts, name)
			if s.Current == name {
				s.Current = ""
			}
			return a.saveSettings(s)
		},
	}
}

func (a *app) cmdContextShow() *cli.Command {
	return &cli.Command{
		Name:      "show",
		Usage:     "show which node commands speak to, and why",
		UsageText: "boxedctl context show [NAME]",
		Description: "With a NAME that context, without one the choice that flags, environment and contexts lead to. The key itself is never shown." +
			examples("boxedctl context show", "BOXED_ENDPOINT=http://127.0.0.1:9090 boxedctl context show"),
		Action: func(c *cli.Context) error {
			flags := a.node
			switch c.NArg() {
			case 0:
			case 1:
				flags = targetFlags{context: c.Args().First()}
			default:
				return a.tooMany(c, 1)
			}
			t, err := a.resolve(flags)
			if err != nil {
				return err
			}
			fields := table.New(table.Column{}, table.Column{})
			fields.Row("Context:", firstOf(t.Context, "-"))
			for _, e := range t.all() {
				fields.Row("Endpoint:", e.url)
				if len(t.Others) > 0 && e.pin != "" {
					fields.Row("", "pinned to "+e.pin)
				}
			}
			fields.Row("Chosen by:", t.Origin)
			fields.Row("Key:", map[bool]string{true: "yes", false: "none"}[t.Key != ""])
			if len(t.Others) == 0 {
				fields.Row("Pin:", firstOf(t.Pin, "-"))
			}
			return a.printFields(map[string]any{
				"context": t.Context, "endpoint": t.Endpoint, "endpoints": t.urls(), "origin": t.Origin, "has_key": t.Key != "", "pin": t.Pin,
			}, []string{t.Context}, fields)
		},
	}
}

// oneOperand is the command's only operand.
func (a *app) oneOperand(c *cli.Context, what string) (string, error) {
	switch c.NArg() {
	case 0:
		return "", usagef("%s is missing", what).hint("%s", usageLine(a.line.command))
	case 1:
		return c.Args().First(), nil
	}
	return "", a.tooMany(c, 1)
}

func (a *app) tooMany(c *cli.Context, n int) error {
	return usagef("there is one operand too many: %q", c.Args().Get(n)).hint("%s", usageLine(a.line.command))
}

// operands checks how many operands there are: at least low, at most high (or
// any number if that is negative).
func (a *app) operands(c *cli.Context, low, high int) ([]string, error) {
	switch n := c.NArg(); {
	case n < low:
		return nil, usagef("an operand is missing").hint("%s", usageLine(a.line.command))
	case high >= 0 && n > high:
		return nil, a.tooMany(c, high)
	}
	return c.Args().Slice(), nil
}

func usageLine(c *cli.Command) string {
	return fmt.Sprintf("usage: %s", firstLine(c.UsageText))
}
