package ctl

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// commandLine is a command line taken apart.
type commandLine struct {
	command  *cli.Command // the last one named; the root if none was
	path     []string     // the names that lead to it, canonical
	globals  []string     // the root's flags with their values
	flags    []string     // the command's flags with their values
	operands []string
	dash     int  // how many operands stood before "--"; -1 without one
	help     bool // -h or --help
	version  bool // --version in front of any command
}

// argv is the command line in the one order that urfave/cli reads.
func (l *commandLine) argv() []string {
	argv := slices.Concat([]string{"boxedctl"}, l.globals, l.path, l.flags, []string{"--"}, l.operands)
	return argv
}

// verbatim says after how many operands a command's line belongs to the program
// that it runs: `boxedctl exec box ls -l` lists long, in the sandbox.
var verbatim = map[string]int{"run": 1, "exec": 2, "ssh": 1, "__complete": 0}

// arrange reads a command line. Flags may stand anywhere, global ones too, up
// to "--" or to where the line is the program's own.
func arrange(root *cli.Command, args []string) (*commandLine, error) {
	l := &commandLine{command: root, dash: -1}
	for i := 0; i < len(args); i++ {
		arg := args[i]
		limit, limited := verbatim[l.command.Name]
		if limited && len(l.operands) >= limit {
			l.rest(args[i:])
			return l, nil
		}
		switch {
		case arg == "--":
			l.dash = len(l.operands)
			l.operands = append(l.operands, args[i+1:]...)
			return l, nil
		case len(arg) > 1 && arg[0] == '-' && !isNumber(arg):
			used, err := l.flag(root, args[i:])
			if err != nil {
				return nil, err
			}
			i += used
		default:
			sub := find(l.command.Subcommands, arg)
			if sub == nil || len(l.operands) > 0 {
				l.operands = append(l.operands, arg)
				continue
			}
			l.command = sub
			l.path = append(l.path, sub.Name)
		}
	}
	return l, nil
}

// rest takes over what belongs to the program. `run FILE -- ARGS` means the
// same as `run FILE ARGS`.
func (l *commandLine) rest(args []string) {
	if l.command.Name == "run" && args[0] == "--" {
		args = args[1:]
	}
	l.operands = append(l.operands, args...)
}

// flag takes the flag at args[0] and returns how many further arguments are its
// value. Short flags may be joined (-it) and hold their value (-ojson).
func (l *commandLine) flag(root *cli.Command, args []string) (int, error) {
	name, value, hasValue := strings.Cut(args[0], "=")
	name = strings.TrimLeft(name, "-")
	switch {
	case name == "help" || args[0] == "-h":
		l.help = true
		return 0, nil
	case name == "version" && l.command == root:
		l.version = true
		return 0, nil
	}
	if f, global := l.lookup(root, name); f != nil {
		next := args[1:]
		if !takesValue(f) || hasValue {
			next = nil
		}
		return l.add(f, global, value, hasValue, next)
	}
	if args[0][1] == '-' {
		return 0, unknownFlag(l, root, args[0])
	}
	letters := args[0][1:]
	for j, r := range letters {
		f, global := l.lookup(root, string(r))
		if f == nil {
			return 0, unknownFlag(l, root, args[0])
		}
		if !takesValue(f) {
			if _, err := l.add(f, global, "", false, nil); err != nil {
				return 0, err
			}
			continue
		}
		rest := strings.TrimPrefix(letters[j+len(string(r)):], "=")
		return l.add(f, global, rest, rest != "", args[1:])
	}
	return 0, nil
}

// lookup finds a flag of the command, else a global one.
func (l *commandLine) lookup(root *cli.Command, name string) (f cli.Flag, global bool) {
	for _, c := range []*cli.Command{l.command, root} {
		for _, f := range c.Flags {
			if slices.Contains(f.Names(), name) {
				return f, c == root
			}
		}
	}
	return nil, false
}

// add appends a flag under its first name; without a value of its own it takes
// next[0].
func (l *commandLine) add(f cli.Flag, global bool, value string, hasValue bool, next []string) (int, error) {
	used := 0
	token := "--" + f.Names()[0]
	if takesValue(f) && !hasValue {
		if len(next) == 0 {
			return 0, usagef("%s needs a value", token).hint("%s", flagUsage(f))
		}
		value, hasValue, used = next[0], true, 1
	}
	if hasValue {
		token += "=" + value
	}
	if global {
		l.globals = append(l.globals, token)
	} else {
		l.flags = append(l.flags, token)
	}
	return used, nil
}

func takesValue(f cli.Flag) bool {
	d, ok := f.(cli.DocGenerationFlag)
	return ok && d.TakesValue()
}

// isNumber tells "-5", an operand, from a flag.
func isNumber(arg string) bool { return arg[1] >= '0' && arg[1] <= '9' }

func find(commands []*cli.Command, name string) *cli.Command {
	for _, c := range commands {
		if c.HasName(name) {
			return c
		}
	}
	return nil
}
