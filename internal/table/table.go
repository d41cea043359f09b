package table

import (
	"io"
	"strings"
)

// Style is a cell's colour, used only where the caller allows colours.
type Style int

// The styles.
const (
	Plain Style = iota
	Head        // bold
	Good        // green
	Warn        // yellow
	Bad         // red
	Dim         // grey
)

// sgr has the parameter of the escape sequence that starts each style.
var sgr = [...]string{Plain: "", Head: "1", Good: "32", Warn: "33", Bad: "31", Dim: "90"}

// Paint puts text, which must be inert, in a style. Without color it is text.
func Paint(text string, style Style, color bool) string {
	if !color || style == Plain || text == "" {
		return text
	}
	return "\x1b[" + sgr[style] + "m" + text + "\x1b[0m"
}

// Column is one column of a table.
type Column struct {
	Name  string
	Right bool // numbers: aligned to the right
	Keep  bool // never shortened: what people copy, like an ID
}

// Cell is one field. Text may come from anybody: the table makes it inert.
type Cell struct {
	Text  string
	Style Style
}

// Table collects rows. The zero Table has no columns; use New.
type Table struct {
	columns []Column
	rows    [][]Cell
}

// New is a table without rows.
func New(columns ...Column) *Table { return &Table{columns: columns} }

// Row adds a row of plain cells; missing ones are empty, an excess is dropped.
func (t *Table) Row(texts ...string) {
	cells := make([]Cell, len(texts))
	for i, text := range texts {
		cells[i].Text = text
	}
	t.Add(cells...)
}

// Add adds a row of styled cells, as Row does.
func (t *Table) Add(cells ...Cell) {
	row := make([]Cell, len(t.columns))
	for i := range min(len(cells), len(row)) {
		row[i] = Cell{Inert(cells[i].Text), cells[i].Style}
	}
	t.rows = append(t.rows, row)
}

// Len is the number of rows.
func (t *Table) Len() int { return len(t.rows) }

// Layout says how to write a table.
type Layout struct {
	Width    int    // columns of the terminal; 0: nothing is shortened
	Color    bool   // styles are shown
	NoHeader bool   // rows only
	Newline  string // "" means "\n"; a raw terminal needs "\r\n"
}

// gap separates columns.
const gap = "  "

// minWidth is the least to which a column is shortened, or its name if that is longer.
const minWidth = 8

// Write writes the table with a single call of w.Write.
func (t *Table) Write(w io.Writer, l Layout) error {
	if l.Newline == "" {
		l.Newline = "\n"
	}
	widths := t.widths(l)
	var b strings.Builder
	if !l.NoHeader {
		head := make([]Cell, len(t.columns))
		for i, c := range t.columns {
			head[i] = Cell{c.Name, Head}
		}
		t.line(&b, head, widths, l)
	}
	for _, row := range t.rows {
		t.line(&b, row, widths, l)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (t *Table) line(b *strings.Builder, row []Cell, widths []int, l Layout) {
	last := len(row) - 1
	for last > 0 && row[last].Text == "" {
		last--
	}
	for i := range last + 1 {
		text := Clip(row[i].Text, widths[i])
		pad := strings.Repeat(" ", max(0, widths[i]-Width(text)))
		if t.columns[i].Right {
			b.WriteString(pad)
		}
		b.WriteString(Paint(text, row[i].Style, l.Color))
		if i < last {
			if !t.columns[i].Right {
				b.WriteString(pad)
			}
			b.WriteString(gap)
		}
	}
	b.WriteString(l.Newline)
}

// widths are those of the longest cells, and then, if the terminal is narrower,
// of the widest columns less what is needed.
func (t *Table) widths(l Layout) []int {
	widths := make([]int, len(t.columns))
	total := len(gap) * max(0, len(widths)-1)
	for i, c := range t.columns {
		if !l.NoHeader {
			widths[i] = Width(c.Name)
		}
		for _, row := range t.rows {
			widths[i] = max(widths[i], Width(row[i].Text))
		}
		total += widths[i]
	}
	for l.Width > 0 && total > l.Width {
		widest := -1
		for i, c := range t.columns {
			if !c.Keep && widths[i] > max(minWidth, Width(c.Name)) && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break // every column is as short as it gets: the terminal wraps the lines
		}
		widths[widest]--
		total--
	}
	return widths
}
