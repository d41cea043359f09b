package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"text/template"
)

// chart is a picture of curves, in panels one below the other.
type chart struct {
	title  string
	panels []pane
}

type pane struct {
	title     string
	xName     string
	xs        []float64 // where the axis has ticks; between them it is as far as their logarithms
	even      bool      // the ticks stand evenly instead, whatever their numbers
	low, high float64   // of y
	tall      bool      // y is a logarithm; low and high are powers of ten
	ticks     int       // of y, where it is none
	share     bool      // y is a share, written in percent
	line      float64   // that is aimed at; NaN for none
	curves    []curve
	cut       float64 // an x from which on something is no longer as it was; NaN for none
	cutSays   string
}

// curve is points of one kind. Those that a model gives are drawn in dashes.
type curve struct {
	name  string
	class string // boxed, other, third or fourth
	model bool
	x, y  []float64
}

// Measures of a picture, in its own units.
const (
	chartWidth  = 760.0
	chartLeft   = 78.0
	chartRight  = 190.0 // for the names of curves
	paneHeight  = 190.0
	paneSpacing = 84.0
)

var svg = template.Must(template.New("svg").Funcs(template.FuncMap{
	"text": html.EscapeString, "n": func(v float64) string { return decimal(v, 1) },
}).Parse(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{n .Width}} {{n .Height}}" width="{{n .Width}}" height="{{n .Height}}" role="img" aria-label="{{text .Title}}">
<style>
  svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; }
  .back { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .title { font-size: 16px; font-weight: 600; }
  .panel { font-weight: 600; font-size: 13px; } .quiet { fill: #59636e; } .grid { stroke: #d8dee4; } .axis { stroke: #818b98; }
  .curve { fill: none; stroke-width: 2; } .model { stroke-dasharray: 5 4; } .aim { stroke: #cf222e; stroke-dasharray: 2 3; } .cut { stroke: #cf222e; }
  .boxed { stroke: #2da27c; fill: #2da27c; } .other { stroke: #9a6700; fill: #9a6700; } .third { stroke: #0969da; fill: #0969da; } .fourth { stroke: #818b98; fill: #818b98; }
  path.curve { fill: none; } .warn { fill: #cf222e; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; } .grid { stroke: #262c36; } .axis { stroke: #656c76; }
    .boxed { stroke: #3fb98f; fill: #3fb98f; } .other { stroke: #d29922; fill: #d29922; } .third { stroke: #4493f8; fill: #4493f8; }
    .fourth { stroke: #9198a1; fill: #9198a1; } .aim, .cut { stroke: #f85149; } .warn { fill: #f85149; } path.curve { fill: none; }
  }
</style>
<rect class="back" x="0.5" y="0.5" width="{{n .InnerWidth}}" height="{{n .InnerHeight}}" rx="6"/>
<text class="title" x="16" y="28">{{text .Title}}</text>
{{range $p := .Panels -}}
<text class="panel" x="16" y="{{n .TitleY}}">{{text .Title}}</text>
{{range .YTicks -}}
<line class="grid" x1="{{n $.Left}}" x2="{{n $.Right}}" y1="{{n .At}}" y2="{{n .At}}"/><text class="quiet" x="{{n $.Left}}" dx="-8" y="{{n .At}}" dy="4" text-anchor="end">{{text .Text}}</text>
{{end}}{{range .XTicks -}}
<line class="grid" x1="{{n .At}}" x2="{{n .At}}" y1="{{n $p.Top}}" y2="{{n $p.Base}}"/><text class="quiet" x="{{n .At}}" y="{{n $p.Base}}" dy="16" text-anchor="middle">{{text .Text}}</text>
{{end -}}
<text class="quiet" x="{{n .NameX}}" y="{{n .Base}}" dy="34" text-anchor="middle">{{text .XName}}</text>
<path class="axis" fill="none" d="M{{n $.Left}} {{n .Top}}V{{n .Base}}H{{n $.Right}}"/>
{{if .Aim -}}
<line class="aim" x1="{{n $.Left}}" x2="{{n $.Right}}" y1="{{n .Aim}}" y2="{{n .Aim}}"/>
{{end}}{{if .Cut -}}
<line class="cut" x1="{{n .Cut}}" x2="{{n .Cut}}" y1="{{n .Top}}" y2="{{n .Base}}"/><text class="warn" x="{{n .Cut}}" dx="{{.CutDX}}" y="{{n .Base}}" dy="-6" text-anchor="{{.CutAnchor}}">{{text .CutSays}}</text>
{{end}}{{range .Curves -}}
<path class="curve {{.Class}}{{if .Model}} model{{end}}" d="{{.Path}}"/>
{{$c := .}}{{range .Dots}}<circle class="{{$c.Class}}" cx="{{n .X}}" cy="{{n .Y}}" r="3"/>
{{end -}}
<path class="curve {{.Class}}{{if .Model}} model{{end}}" d="M{{n $.KeyX}} {{n .KeyY}}h22"/><text x="{{n $.KeyX}}" dx="28" y="{{n .KeyY}}" dy="4">{{text .Name}}</text>
{{end}}{{end -}}
</svg>
`))

type dot struct{ X, Y float64 }

type label struct {
	At   float64
	Text string
}

type drawnCurve struct {
	Name, Class, Path string
	Model             bool
	Dots              []dot
	KeyY              float64
}

type drawnPane struct {
	Title, XName, CutSays string
	TitleY, Top, Base     float64
	NameX, Aim, Cut       float64
	CutDX, CutAnchor      string
	XTicks, YTicks        []label
	Curves                []drawnCurve
}

// render draws the picture.
func (c chart) render() ([]byte, error) {
	y := 44.0
	var panels []drawnPane
	for _, p := range c.panels {
		panels = append(panels, p.draw(y))
		y += paneHeight + paneSpacing
	}
	var out bytes.Buffer
	err := svg.Execute(&out, map[string]any{
		"Title": c.title, "Width": chartWidth, "Height": y + 4, "InnerWidth": chartWidth - 1, "InnerHeight": y + 3,
		"Left": chartLeft, "Right": chartWidth - chartRight, "KeyX": chartWidth - chartRight + 14, "Panels": panels,
	})
	return out.Bytes(), err
}

func (p pane) draw(y float64) drawnPane {
	out := drawnPane{Title: p.title, TitleY: y + 14, Top: y + 30, XName: p.xName, NameX: (chartLeft + chartWidth - chartRight) / 2}
	out.Base = out.Top + paneHeight - 20
	for _, x := range p.xs {
		out.XTicks = append(out.XTicks, label{p.x(x), thousands(decimal(x, 1))})
	}
	for _, v := range p.levels() {
		text := figures(v)
		if p.share {
			text = decimal(100*v, 1) + " %"
		}
		out.YTicks = append(out.YTicks, label{p.y(v, out), text})
	}
	if !math.IsNaN(p.line) {
		out.Aim = p.y(p.line, out)
	}
	if !math.IsNaN(p.cut) && p.cut != 0 {
		out.Cut, out.CutSays, out.CutDX, out.CutAnchor = p.x(p.cut), p.cutSays, "4", "start"
		if out.Cut > out.NameX {
			out.CutDX, out.CutAnchor = "-4", "end"
		}
	}
	for i, c := range p.curves {
		d := drawnCurve{Name: c.name, Class: c.class, Model: c.model, KeyY: out.Top + 8 + 20*float64(i)}
		for k := range c.x {
			at := dot{p.x(c.x[k]), p.y(c.y[k], out)}
			verb := "L"
			if k == 0 {
				verb = "M"
			}
			d.Path += fmt.Sprintf("%s%s %s", verb, decimal(at.X, 1), decimal(at.Y, 1))
			d.Dots = append(d.Dots, at)
		}
		if len(c.x) > 0 {
			out.Curves = append(out.Curves, d)
		}
	}
	return out
}

// levels are where y has ticks.
func (p pane) levels() (list []float64) {
	if p.tall {
		for v := p.low; v <= p.high*1.001; v *= 10 {
			list = append(list, v)
		}
		return list
	}
	for i := 0; i <= p.ticks; i++ {
		list = append(list, p.low+(p.high-p.low)*float64(i)/float64(p.ticks))
	}
	return list
}

// x is the place of a number. On an even axis it lies between ticks.
func (p pane) x(v float64) float64 {
	const wide = chartWidth - chartRight - chartLeft
	first, last := p.xs[0], p.xs[len(p.xs)-1]
	if !p.even {
		return chartLeft + wide*math.Log(v/first)/math.Log(last/first)
	}
	for i := 1; i < len(p.xs); i++ {
		if v <= p.xs[i] {
			part := (v - p.xs[i-1]) / (p.xs[i] - p.xs[i-1])
			return chartLeft + wide*(float64(i-1)+part)/float64(len(p.xs)-1)
		}
	}
	return chartLeft + wide
}

func (p pane) y(v float64, out drawnPane) float64 {
	part := (v - p.low) / (p.high - p.low)
	if p.tall {
		part = math.Log(v/p.low) / math.Log(p.high/p.low)
	}
	return out.Base - (out.Base-out.Top)*min(max(part, 0), 1)
}
