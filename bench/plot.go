package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strings"
	"text/template"
)

// plot is a picture of horizontal bars in panels, each with an axis of its own.
type plot struct {
	title  string
	panels []panel
}

type panel struct {
	title  string
	unit   string
	better string // which end of the axis is good
	groups []group
}

// group is bars that belong together, below a heading if it has one.
type group struct {
	heading string
	bars    []bar
}

type bar struct {
	label string
	v     interval
}

// Measures of a picture, in its own units.
const (
	plotWidth   = 760
	labelWidth  = 170
	rightMargin = 100 // for the numbers
	barHeight   = 16
	barStep     = 24
	headingStep = 24
)

// svgBar and the others are a picture as the template wants it.
type svgBar struct {
	Label, Value, Class      string
	Y, Width, Middle         float64
	Low, High, ValueX        float64
	Whisker                  bool
	TextY, CapTop, CapBottom float64
}

type svgTick struct {
	X     float64
	Label string
}

type svgHeading struct {
	Y    float64
	Text string
}

type svgPanel struct {
	Title             string
	TitleY, Top, Base float64
	TickY             float64
	Bars              []svgBar
	Ticks             []svgTick
	Headings          []svgHeading
}

// The colours are chosen on light and on dark, each with its own background: a
// page that shows the picture may be either.
var svg = template.Must(template.New("svg").Funcs(template.FuncMap{
	"text": html.EscapeString, "n": func(v float64) string { return decimal(v, 1) },
}).Parse(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{.Width}} {{n .Height}}" width="{{.Width}}" height="{{n .Height}}" role="img" aria-label="{{text .Title}}">
<style>
  svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; }
  .back { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .title { font-size: 16px; font-weight: 600; }
  .panel { font-weight: 600; } .quiet { fill: #59636e; font-size: 12px; } .grid { stroke: #d8dee4; } .axis { stroke: #818b98; }
  .docker { fill: #9aa4b2; } .boxed { fill: #2da27c; } .whisker { stroke: #1f2328; stroke-width: 1.25; } .strong { font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; } .grid { stroke: #262c36; }
    .axis { stroke: #656c76; } .docker { fill: #6e7986; } .boxed { fill: #2b9a76; } .whisker { stroke: #f0f6fc; }
  }
</style>
<rect class="back" x="0.5" y="0.5" width="{{n .InnerWidth}}" height="{{n .InnerHeight}}" rx="6"/>
<text class="title" x="16" y="28">{{text .Title}}</text>
{{range $p := .Panels -}}
<text class="panel" x="16" y="{{n .TitleY}}">{{text .Title}}</text>
{{range .Ticks -}}
<line class="grid" x1="{{n .X}}" x2="{{n .X}}" y1="{{n $p.Top}}" y2="{{n $p.Base}}"/><text class="quiet" x="{{n .X}}" y="{{n $p.TickY}}" text-anchor="middle">{{.Label}}</text>
{{end}}{{range .Headings -}}
<text class="quiet" x="16" y="{{n .Y}}">{{text .Text}}</text>
{{end}}{{range .Bars -}}
<text class="{{if eq .Class "boxed"}}strong{{end}}" x="{{$.BarX}}" dx="-8" y="{{n .TextY}}" text-anchor="end">{{text .Label}}</text>
<rect class="{{.Class}}" x="{{$.BarX}}" y="{{n .Y}}" width="{{n .Width}}" height="{{$.BarHeight}}" rx="2"/>
{{if .Whisker -}}
<path class="whisker" fill="none" d="M{{n .Low}} {{n .CapTop}}V{{n .CapBottom}}M{{n .Low}} {{n .Middle}}H{{n .High}}M{{n .High}} {{n .CapTop}}V{{n .CapBottom}}"/>
{{end -}}
<text x="{{n .ValueX}}" y="{{n .TextY}}">{{text .Value}}</text>
{{end -}}
<line class="axis" x1="{{$.BarX}}" x2="{{$.BarX}}" y1="{{n .Top}}" y2="{{n .Base}}"/>
{{end -}}
</svg>
`))

// render draws the picture.
func (p plot) render() ([]byte, error) {
	y := 44.0
	var panels []svgPanel
	for _, panel := range p.panels {
		drawn, end := panel.draw(y)
		panels = append(panels, drawn)
		y = end
	}
	var out bytes.Buffer
	err := svg.Execute(&out, map[string]any{
		"Title": p.title, "Width": plotWidth, "Height": y + 4, "InnerWidth": float64(plotWidth - 1), "InnerHeight": y + 3,
		"Panels": panels, "BarX": labelWidth, "BarHeight": barHeight,
	})
	return out.Bytes(), err
}

// draw places a panel below y and says where it ends.
func (p panel) draw(y float64) (svgPanel, float64) {
	out := svgPanel{Title: p.title + ", " + p.unit, TitleY: y + 16, Top: y + 28}
	if p.better != "" {
		out.Title += " (" + p.better + " is better)"
	}
	highest := 0.0
	for _, g := range p.groups {
		for _, b := range g.bars {
			highest = max(highest, b.v.value)
			if !math.IsNaN(b.v.high) {
				highest = max(highest, b.v.high)
			}
		}
	}
	step := niceStep(highest)
	scale := (plotWidth - labelWidth - rightMargin) / max(highest, step)
	at := out.Top + 6
	for _, g := range p.groups {
		if g.heading != "" {
			out.Headings = append(out.Headings, svgHeading{at + 14, g.heading})
			at += headingStep
		}
		for _, b := range g.bars {
			out.Bars = append(out.Bars, b.draw(at, scale))
			at += barStep
		}
	}
	out.Base = at
	for i := 0; float64(i)*step <= highest*1.0001; i++ {
		out.Ticks = append(out.Ticks, svgTick{labelWidth + float64(i)*step*scale, thousands(decimal(float64(i)*step, 3))})
	}
	out.TickY = at + 14
	return out, at + 26
}

func (b bar) draw(y, scale float64) svgBar {
	out := svgBar{
		Label: b.label, Value: figures(b.v.value), Class: "docker", Y: y, Width: max(1, b.v.value*scale),
		Middle: y + barHeight/2, TextY: y + barHeight - 3.5, CapTop: y + 4, CapBottom: y + barHeight - 4,
	}
	if strings.HasPrefix(b.label, "boxed") {
		out.Class = "boxed"
	}
	end := labelWidth + out.Width
	if !math.IsNaN(b.v.low) && !math.IsNaN(b.v.high) && b.v.high > b.v.low {
		out.Whisker, out.Low, out.High = true, labelWidth+b.v.low*scale, labelWidth+b.v.high*scale
		end = max(end, out.High)
	}
	out.ValueX = end + 8
	return out
}

// niceStep is a distance between ticks that gives four to eight of them.
func niceStep(highest float64) float64 {
	if !(highest > 0) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(highest/4)))
	for _, m := range []float64{1, 2, 5} {
		if highest/(m*power) <= 8 {
			return m * power
		}
	}
	return 10 * power
}

// bars are those of one metric, one for each system that has it.
func (rs results) bars(experiment, metric string) (list []bar) {
	for _, r := range rs.rows[experiment] {
		if r.Metric == metric {
			list = append(list, bar{label: r.System, v: interval{r.P50, r.Low, r.High}})
		}
	}
	return list
}

// plots are the pictures that the results give, by the name of the file.
func (rs results) plots() map[string]plot {
	all := map[string]plot{}
	add := func(name, title string, panels ...panel) {
		var kept []panel
		for _, p := range panels {
			if len(p.groups) > 0 && len(p.groups[0].bars) > 0 {
				kept = append(kept, p)
			}
		}
		if len(kept) > 0 {
			all[name+".svg"] = plot{title, kept}
		}
	}
	simple := func(title, unit, better, experiment, metric string) panel {
		return panel{title, unit, better, []group{{"", rs.bars(experiment, metric)}}}
	}
	add("lifecycle", "From nothing to a first result of python and back",
		simple("Quiet machine", "ms", "less", "lifecycle", "total"),
		simple("Busy machine", "ms", "less", "lifecycle"+busySuffix, "total"))
	add("exec", "Running a program in what is there already",
		simple("true", "ms", "less", "exec", "exec_true"),
		simple("python, print('ok')", "ms", "less", "exec", "python_print"))
	add("stdout", "Standard output of a program",
		simple("100 MiB", "MB/s", "more", "stdout", "stdout_mb_s"))
	add("throughput", "Sandboxes per second, with a first result of python in each", panel{"By callers at once", "1/s", "more", rs.rateGroups()})
	add("burst", "A burst of callers at the same moment: the first result of python",
		simple("Median", "ms", "less", "burst", "first_exec"))
	add("memory", "What a sandbox costs that does nothing",
		simple("Resident memory of the agent", "KiB", "less", "memory", "agent_rss_kib"),
		simple("Counted against the sandbox's limit, the agent included", "KiB", "less", "memory", "memcg_kib"),
		simple("The engine's shim, its share", "KiB", "less", "memory", "shim_pss_kib"))
	add("files", "One large file",
		simple("In", "MB/s", "more", "files", "upload_mb_s"), simple("Out", "MB/s", "more", "files", "download_mb_s"))
	return all
}

// rateMetrics are the rates that throughput may have found.
func rateMetrics() (list []string) {
	for _, level := range levels {
		list = append(list, fmt.Sprintf("rate_c%d", level))
	}
	return list
}

func (rs results) rateGroups() (groups []group) {
	for _, level := range levels {
		if bars := rs.bars("throughput", fmt.Sprintf("rate_c%d", level)); len(bars) > 0 {
			groups = append(groups, group{fmt.Sprintf("%d at once", level), bars})
		}
	}
	if bars := rs.bars("throughput", "rate_sustained"); len(bars) > 0 {
		groups = append(groups, group{"sustained", bars})
	}
	return groups
}
