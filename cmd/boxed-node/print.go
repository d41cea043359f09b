package main

//go:generate go test . -run Reference -update

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// hidden stands for a secret that is set.
const hidden = "(set)"

// printed is one setting as `config print -o json` has it.
type printed struct {
	Setting string `json:"setting"`
	Value   any    `json:"value"`
	Origin  string `json:"origin"`
}

func (l *Loaded) origin(s setting) string {
	if origin := l.Origins[s.path]; origin != "" {
		return origin
	}
	return "default"
}

// print writes every setting, its value and where that comes from.
func (l *Loaded) print(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SETTING\tVALUE\tORIGIN")
	for _, s := range l.settings() {
		text := s.text()
		if s.secret && text != "" {
			text = hidden
		}
		if text == "" {
			text = "-"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", s.path, oneLine(text), l.origin(s))
	}
	return table.Flush()
}

// printJSON is print for programs.
func (l *Loaded) printJSON(w io.Writer) error {
	list := []printed{}
	for _, s := range l.settings() {
		value := s.json()
		if s.secret && s.text() != "" {
			value = hidden
		}
		list = append(list, printed{Setting: s.path, Value: value, Origin: l.origin(s)})
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(list)
}

// oneLine keeps a value from breaking the table.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}

// reference is docs/configuration.md: every setting with its default.
func reference() string {
	var b strings.Builder
	b.WriteString(referenceHead)
	group := "?"
	for _, s := range referenceSettings() {
		if g := referenceGroup(s); g != group {
			group = g
			title := "`" + group + "`"
			if group == "" {
				title = "The node"
			}
			fmt.Fprintf(&b, "\n## %s\n\n| setting | type | default | what it is |\n|---|---|---|---|\n", title)
		}
		text := s.text()
		if text == "" {
			text = "–"
		} else {
			text = "`" + text + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", s.path, s.kind(), text, strings.ReplaceAll(s.help, "|", "\\|"))
	}
	b.WriteString(referenceFoot)
	return b.String()
}

// referenceSettings is the settings of the defaults, with one owner to show.
// Grouped ones come after the others.
func referenceSettings() []setting {
	c := Default()
	c.Quotas.Owners["OWNER"] = &Quota{}
	var top, grouped []setting
	for _, s := range c.settings() {
		if s.group() == "" {
			top = append(top, s)
		} else {
			grouped = append(grouped, s)
		}
	}
	return append(top, grouped...)
}

func referenceGroup(s setting) string {
	if strings.HasPrefix(s.path, "limits.") {
		return strings.Join(strings.Split(s.path, ".")[:2], ".")
	}
	return s.group()
}

const referenceHead = `# Configuration of boxed-node

<!-- Made from the code by "make docs". -->

A node needs no configuration. What there is to set can be set in a YAML file (` + "`--config FILE`" + ` or
` + "`BOXED_CONFIG`" + `), by the environment and by flags. A flag wins over the environment, which wins over the file,
which wins over the default.

The name of a setting tells the others: ` + "`docker.pull_timeout`" + ` below is

` + "```yaml" + `
docker:
  pull_timeout: 15m
` + "```" + `

in the file, ` + "`BOXED_DOCKER_PULL_TIMEOUT=15m`" + ` in the environment (an empty value counts as unset), and
` + "`--docker-pull-timeout 15m`" + ` on the command line. Lists are separated by commas there. Durations are written
` + "`90s`, `10m`, `1h30m`, `2d` or `never`" + `, sizes ` + "`512MiB` or `1.5GiB`" + `.

The file is read strictly: a name that does not exist, or one that is set twice, is a mistake. A node that finds mistakes
does not start, and names all of them with file and line. ` + "`boxed-node config check`" + ` finds them without starting one,
and ` + "`boxed-node config print`" + ` shows every value and where it comes from.

**Reaching a node from other machines.** A node listens on 127.0.0.1 and makes itself an API key at its first start. It
refuses to listen on another address unless an API key is there *and* TLS is set (` + "`tls.cert_file` and `tls.key_file`," + `
or ` + "`tls.auto`" + `, whose fingerprint ` + "`boxedctl context add --pin`" + ` takes), or ` + "`insecure_listen`" + ` says that it
may be in the open.

` + "`SIGHUP`" + ` has a running node read its certificate and ` + "`log.level`" + ` again; the rest needs a restart, which ends no
sandbox.
`

const referenceFoot = `
Further templates are named likewise: ` + "`templates.NAME.image`" + ` and so on, where NAME is ` + "`[a-z0-9-]{1,40}`" + `. They and
the quotas of single owners are set in the file.
`
