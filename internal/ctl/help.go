package ctl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed/internal/table"
)

// helpWidth is where help texts wrap.
const helpWidth = 96

func (a *app) cmdHelp() *cli.Command {
	return &cli.Command{
		Name: "help", Category: catOther,
		Usage:       "show the help of a command",
		UsageText:   "boxedctl help [COMMAND…]",
		Description: "Shows what --help shows." + examples("boxedctl help run", "boxedctl help key create", "boxedctl help exit-codes"),
		Action: func(c *cli.Context) error {
			command, path := a.root(), []string(nil)
			for _, name := range c.Args().Slice() {
				sub := find(command.Subcommands, name)
				if sub == nil {
					a.line = &commandLine{command: command, path: path, operands: []string{name}}
					return a.noSuchCommand(command)
				}
				command, path = sub, append(path, sub.Name)
			}
			return a.help(command, path)
		},
	}
}

// help prints a command's page to stdout.
func (a *app) help(c *cli.Command, path []string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s - %s\n\nUsage:\n", strings.Join(append([]string{"boxedctl"}, path...), " "), c.Usage)
	usage := c.UsageText
	if len(path) == 0 {
		usage = "boxedctl COMMAND [OPTIONS] [OPERANDS…]"
	}
	for line := range strings.Lines(usage) {
		b.WriteString("  " + strings.TrimSuffix(line, "\n") + "\n")
	}
	text, example, _ := strings.Cut(c.Description, "\n\nExamples:\n")
	if text != "" {
		b.WriteString("\n" + wrap(text, helpWidth) + "\n")
	}
	if c.Name == "exit-codes" {
		b.WriteString("\n" + exitCodes(false))
	}
	a.helpCommands(&b, c)
	if example != "" {
		b.WriteString("\nExamples:\n" + example + "\n")
	}
	a.helpFlags(&b, c)
	if len(path) == 0 && a.lobby != nil {
		b.WriteString("\nA SANDBOX is an ID, a name, or the first characters of an ID.\nA shell in it: ssh SANDBOX@boxed; in a new one: ssh new@boxed\n")
	} else if len(path) == 0 {
		b.WriteString("\nA SANDBOX is an ID, a name, or the first characters of an ID.\n" +
			"Flags may stand anywhere in front of a program's own arguments.\n" +
			"The node is chosen by --endpoint, else --context, else BOXED_ENDPOINT, else the current context,\n" +
			"else " + defaultEndpoint + " with the key in " + localKeyName + " beside the contexts.\n" +
			"Exit statuses: boxedctl help exit-codes\n")
	} else {
		b.WriteString("\nGlobal options: boxedctl --help\n")
	}
	_, err := fmt.Fprint(a.stdout, a.words(b.String()))
	return err
}

func (a *app) helpCommands(b *strings.Builder, c *cli.Command) {
	if len(c.Subcommands) == 0 {
		return
	}
	groups := map[string]*table.Table{}
	order := categories
	for _, sub := range c.Subcommands {
		if sub.Hidden {
			continue
		}
		if groups[sub.Category] == nil {
			groups[sub.Category] = table.New(table.Column{}, table.Column{})
		}
		groups[sub.Category].Row(fmt.Sprintf("  %-12s", strings.Join(sub.Names(), ", ")), sub.Usage)
	}
	if len(groups) == 1 && groups[""] != nil {
		order = []string{""}
	}
	for _, name := range order {
		if groups[name] == nil {
			continue
		}
		if name == "" {
			name = "Commands"
			groups[name] = groups[""]
		}
		fmt.Fprintf(b, "\n%s:\n", name)
		_ = groups[name].Write(b, table.Layout{NoHeader: true}) // a Builder does not fail
	}
}

func (a *app) helpFlags(b *strings.Builder, c *cli.Command) {
	var names []string
	groups := map[string][][2]string{}
	longest := 0
	for _, f := range c.Flags {
		head, text := flagHelp(f)
		if text == "" {
			continue
		}
		category := "Options"
		if cf, ok := f.(cli.CategorizableFlag); ok && cf.GetCategory() != "" {
			category = cf.GetCategory()
		}
		if !slices.Contains(names, category) {
			names = append(names, category)
		}
		groups[category] = append(groups[category], [2]string{head, text})
		longest = max(longest, table.Width(head))
	}
	for _, name := range names {
		fmt.Fprintf(b, "\n%s:\n", name)
		for _, row := range groups[name] {
			lines := strings.Split(wrap(row[1], helpWidth-longest-4), "\n")
			fmt.Fprintf(b, "  %-*s  %s\n", longest, row[0], lines[0])
			for _, line := range lines[1:] {
				fmt.Fprintf(b, "  %-*s  %s\n", longest, "", line)
			}
		}
	}
}

// flagHelp is how a flag is written and what it does; "" for hidden ones. The
// word in backquotes in its Usage names its value.
func flagHelp(f cli.Flag) (head, text string) {
	if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
		return "", ""
	}
	var forms []string
	for _, name := range f.Names() {
		dash := "--"
		if len(name) == 1 {
			dash = "-"
		}
		forms = append(forms, dash+name)
	}
	slices.SortStableFunc(forms, func(x, y string) int { return min(len(x), 3) - min(len(y), 3) })
	head = strings.Join(forms, ", ")
	if len(forms[0]) > 2 {
		head = "    " + head
	}
	value, usage := "", ""
	if d, ok := f.(cli.DocGenerationFlag); ok {
		usage = d.GetUsage()
		if before, rest, found := strings.Cut(usage, "`"); found {
			word, after, _ := strings.Cut(rest, "`")
			value, usage = word, before+word+after
		}
		if d.TakesValue() {
			head += " " + value
		}
		if env := d.GetEnvVars(); len(env) > 0 {
			usage += " [" + strings.Join(env, ", ") + "]"
		}
	}
	return head, usage
}

// flagUsage is a flag with its explanation, on one line.
func flagUsage(f cli.Flag) string {
	head, text := flagHelp(f)
	return strings.TrimSpace(head) + ": " + text
}

// wrap breaks each line of text at width, keeping its indentation.
func wrap(text string, width int) string {
	var out []string
	for _, line := range strings.Split(text, "\n") {
		indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
		current := indent
		for _, word := range strings.Fields(line) {
			if current != indent && table.Width(current)+1+table.Width(word) > width {
				out = append(out, current)
				current = indent
			}
			if current != indent {
				current += " "
			}
			current += word
		}
		out = append(out, current)
	}
	return strings.Join(out, "\n")
}
