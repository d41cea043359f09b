package ctl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// print writes a result in the form that --output asks for: v as JSON, the
// names one a line, or the table.
func (a *app) print(v any, names []string, t *table.Table) error {
	return a.write(v, names, t, false)
}

// printFields is print for a table of labels and values.
func (a *app) printFields(v any, names []string, t *table.Table) error {
	return a.write(v, names, t, true)
}

func (a *app) write(v any, names []string, t *table.Table, noHeader bool) error {
	switch a.output {
	case outputJSON:
		return a.printJSON(v)
	case outputName:
		for _, name := range names {
			if _, err := fmt.Fprintln(a.stdout, table.Inert(name)); err != nil {
				return err
			}
		}
		return nil
	}
	return t.Write(a.stdout, table.Layout{Width: terminalWidth(a.stdout), Color: a.color, NoHeader: noHeader})
}

// printJSON writes v with the API's field names. What a terminal would obey is
// escaped inside the strings.
func (a *app) printJSON(v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := a.stdout.Write(table.InertJSON(b.Bytes()))
	return err
}

// printJSONLine writes v on one line, for streams.
func (a *app) printJSONLine(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(append(table.InertJSON(line), '\n'))
	return err
}

// printSandboxes writes sandboxes as a table, one a row.
func (a *app) printSandboxes(v any, list []boxed.Sandbox, owners bool) error {
	columns := []table.Column{{Name: "ID", Keep: true}, {Name: "NAME", Keep: true}, {Name: "STATE"}, {Name: "IMAGE"}, {Name: "AGE", Right: true}, {Name: "EXPIRES", Right: true}, {Name: "LABELS"}}
	if owners {
		columns = append(columns[:2:2], append([]table.Column{{Name: "OWNER"}}, columns[2:]...)...)
	}
	t := table.New(columns...)
	now := time.Now()
	names := make([]string, 0, len(list))
	for i := range list {
		sb := &list[i]
		names = append(names, string(sb.ID))
		expires := table.Until(sb.ExpiresAt, now)
		switch {
		case sb.State.Ended():
			expires = "-"
		case sb.State == boxed.StatePaused && sb.ExpiresAt.IsZero():
			expires = "paused"
		}
		image := firstOf(sb.Template, sb.Image)
		cells := []table.Cell{{Text: sb.ID.Random()}, {Text: firstOf(sb.Name, "-")}, table.State(sb), {Text: image}, {Text: table.Age(sb.CreatedAt, now)}, {Text: expires}, {Text: pairs(sb.Labels)}}
		if owners {
			cells = append(cells[:2:2], append([]table.Cell{{Text: sb.Owner}}, cells[2:]...)...)
		}
		t.Add(cells...)
	}
	return a.print(v, names, t)
}

// pairs writes labels as k=v,k=v in order.
func pairs(m map[string]string) string {
	var parts []string
	for _, k := range sortedKeys(m) {
		if k == callLabel {
			continue
		}
		if m[k] == "" {
			parts = append(parts, k)
		} else {
			parts = append(parts, k+"="+m[k])
		}
	}
	return strings.Join(parts, ",")
}

// when is a time for people, "-" if there is none.
func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05 -0700")
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// discardAfterError writes to w until that fails once, tells failed, and
// swallows the rest: a program's output that nobody reads any more must not
// look like a broken link to it.
type discardAfterError struct {
	w      io.Writer
	failed func(error)
	dead   bool
}

func (d *discardAfterError) Write(p []byte) (int, error) {
	if !d.dead {
		if _, err := d.w.Write(p); err != nil {
			d.dead = true
			d.failed(err)
		}
	}
	return len(p), nil
}
