package ctl

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdFs() *cli.Command {
	cp := a.cmdCp()
	cp.Category = ""
	cp.UsageText = strings.ReplaceAll(cp.UsageText, "boxedctl cp", "boxedctl fs cp")
	cp.Usage = "copy files and directories in or out, as boxedctl cp does"
	return &cli.Command{
		Name: "fs", Category: catFiles,
		Usage:     "look at and change the files in a sandbox",
		UsageText: "boxedctl fs COMMAND SANDBOX:PATH\nboxedctl fs COMMAND SANDBOX PATH",
		Description: "Paths are absolute or relative to the sandbox's working directory, and are used with its user's rights.\n" +
			"Earlier spelling: boxed fs ls|cat|cp, the same." +
			examples("boxedctl fs ls build", "boxedctl fs cat build:log.txt", "boxedctl fs rm -r build:/tmp/work"),
		Subcommands: []*cli.Command{a.cmdFsLs(), a.cmdFsCat(), a.cmdFsStat(), a.cmdFsMkdir(), a.cmdFsMv(), a.cmdFsRm(), cp},
	}
}

// remote reads the operands of a command on one path and connects. Without a
// fallback the path must be given.
func (a *app) remote(c *cli.Context, fallback string) (service, boxed.ID, string, error) {
	words, err := a.operands(c, 1, 2)
	if err != nil {
		return nil, "", "", err
	}
	ref, p, err := parseRemote(words, fallback)
	if err != nil {
		return nil, "", "", err
	}
	svc, err := a.connect()
	if err != nil {
		return nil, "", "", err
	}
	id, err := sandboxID(c.Context, svc, ref)
	return svc, id, p, err
}

func (a *app) cmdFsLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list a directory",
		UsageText:   "boxedctl fs ls SANDBOX[:PATH]\nboxedctl fs ls SANDBOX [PATH]",
		Description: "Without PATH the working directory. -o name prints the names alone." + examples("boxedctl fs ls build", "boxedctl fs ls build:/output -o json"),
		Action: func(c *cli.Context) error {
			svc, id, p, err := a.remote(c, ".")
			if err != nil {
				return err
			}
			files, err := svc.ListFiles(c.Context, id, p)
			if err != nil {
				return err
			}
			slices.SortFunc(files, func(x, y boxed.FileInfo) int { return strings.Compare(x.Name, y.Name) })
			if files == nil {
				files = []boxed.FileInfo{}
			}
			return a.printFiles(map[string]any{"files": files}, files)
		},
	}
}

func (a *app) printFiles(v any, files []boxed.FileInfo) error {
	t := table.New(table.Column{Name: "MODE", Keep: true}, table.Column{Name: "SIZE", Right: true}, table.Column{Name: "MODIFIED", Keep: true}, table.Column{Name: "NAME", Keep: true})
	names := make([]string, len(files))
	for i, f := range files {
		names[i] = f.Name
		name := f.Name
		if f.Type == "symlink" {
			name += " -> " + f.Target
		}
		style := table.Plain
		if f.Type == "dir" {
			style = table.Head
			name += "/"
		}
		t.Add(table.Cell{Text: modeText(f)}, table.Cell{Text: table.Size(f.Size)},
			table.Cell{Text: f.ModifiedAt.Local().Format("2006-01-02 15:04")}, table.Cell{Text: name, Style: style})
	}
	return a.print(v, names, t)
}

// modeText is "drwxr-xr-x".
func modeText(f boxed.FileInfo) string {
	letter := map[string]string{"dir": "d", "symlink": "l", "fifo": "p", "socket": "s", "device": "b"}[f.Type]
	return firstOf(letter, "-") + fs.FileMode(f.Mode).Perm().String()[1:]
}

func (a *app) cmdFsCat() *cli.Command {
	return &cli.Command{
		Name:        "cat",
		Usage:       "print a file",
		UsageText:   "boxedctl fs cat SANDBOX:PATH\nboxedctl fs cat SANDBOX PATH",
		Description: "The bytes come out as they are." + examples("boxedctl fs cat build:log.txt", "boxedctl fs cat build /output/plot.png > plot.png"),
		Action: func(c *cli.Context) error {
			svc, id, p, err := a.remote(c, "")
			if err != nil {
				return err
			}
			return a.fetchFile(c.Context, svc, id, p, a.stdout, 1<<62)
		},
	}
}

func (a *app) cmdFsStat() *cli.Command {
	return &cli.Command{
		Name:        "stat",
		Usage:       "describe a file",
		UsageText:   "boxedctl fs stat SANDBOX:PATH\nboxedctl fs stat SANDBOX PATH",
		Description: "A link is described, not followed." + examples("boxedctl fs stat build:log.txt -o json"),
		Action: func(c *cli.Context) error {
			svc, id, p, err := a.remote(c, "")
			if err != nil {
				return err
			}
			info, err := svc.Stat(c.Context, id, p)
			if err != nil {
				return err
			}
			t := table.New(table.Column{Keep: true}, table.Column{Keep: true})
			t.Row("Path:", info.Path)
			t.Row("Type:", info.Type)
			if info.Target != "" {
				t.Row("Target:", info.Target)
			}
			t.Row("Size:", fmt.Sprintf("%d", info.Size))
			t.Row("Mode:", modeText(*info))
			t.Row("Modified:", when(info.ModifiedAt))
			return a.printFields(info, []string{info.Path}, t)
		},
	}
}

func (a *app) cmdFsMkdir() *cli.Command {
	return &cli.Command{
		Name:        "mkdir",
		Usage:       "make a directory",
		UsageText:   "boxedctl fs mkdir [-p] SANDBOX:PATH\nboxedctl fs mkdir [-p] SANDBOX PATH",
		Description: "With -p also those above it, and one that is there is no error." + examples("boxedctl fs mkdir -p build:src/deep/er"),
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "parents", Aliases: []string{"p"}, Usage: "make missing directories above it"}},
		Action: func(c *cli.Context) error {
			svc, id, p, err := a.remote(c, "")
			if err != nil {
				return err
			}
			return svc.Mkdir(c.Context, id, p, c.Bool("parents"))
		},
	}
}

func (a *app) cmdFsRm() *cli.Command {
	return &cli.Command{
		Name: "rm", Aliases: []string{"remove"},
		Usage:       "remove a file or directory",
		UsageText:   "boxedctl fs rm [-r] SANDBOX:PATH\nboxedctl fs rm [-r] SANDBOX PATH",
		Description: "A directory that is not empty needs -r." + examples("boxedctl fs rm build:log.txt", "boxedctl fs rm -r build:/tmp/work"),
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "recursive", Aliases: []string{"r"}, Usage: "with all that is in it"}},
		Action: func(c *cli.Context) error {
			svc, id, p, err := a.remote(c, "")
			if err != nil {
				return err
			}
			err = svc.Remove(c.Context, id, p, c.Bool("recursive"))
			if boxed.CodeOf(err) == boxed.CodeConflict && !c.Bool("recursive") {
				return (&problem{err: err}).hint("-r removes a directory with all that is in it")
			}
			return err
		},
	}
}

func (a *app) cmdFsMv() *cli.Command {
	return &cli.Command{
		Name: "mv", Aliases: []string{"move"},
		Usage:       "rename a file or directory",
		UsageText:   "boxedctl fs mv SANDBOX:FROM TO\nboxedctl fs mv SANDBOX FROM TO",
		Description: "Both are in the same sandbox." + examples("boxedctl fs mv build:a.txt b.txt"),
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 2, 3)
			if err != nil {
				return err
			}
			ref, from, err := parseRemote(words[:len(words)-1], "")
			if err != nil {
				return err
			}
			to := words[len(words)-1]
			if pl := parsePlace(to); pl.ref == ref {
				to = pl.path
			}
			svc, id, err := a.reach(c.Context, ref)
			if err != nil {
				return err
			}
			return svc.Move(c.Context, id, from, to)
		},
	}
}
