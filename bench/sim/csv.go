package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// header is that of every summary in bench/results.
var header = []string{"experiment", "system", "metric", "unit", "n", "p50", "p95", "p99", "ci_lo", "ci_hi"}

// The systems of sim.csv. What is a model's is never said to be boxed's.
const (
	sysBoxed   = "boxed"              // the project's own code: measured, or run in virtual time
	sysModel   = "model"              // fitted to what was measured
	sysSpread  = "omniscient-spread"  // the same scheduler, with views that are the truth
	sysBestFit = "omniscient-bestfit" // a packer that knows the truth: the fullest node with room
)

// row is one line. A field that says nothing is NaN, and empty in the file.
type row struct {
	Part                     string // the experiment, without "sim-"
	System, Metric, Unit     string
	N                        int
	P50, P95, P99, Low, High float64
}

// named is the name of a metric and of what it was measured under: "view_age
// nodes=50 publish=10". Parameters stand in the order in which they are given.
func named(what string, params ...any) string {
	var b strings.Builder
	b.WriteString(what)
	for i := 0; i+1 < len(params); i += 2 {
		fmt.Fprintf(&b, " %v=%v", params[i], params[i+1])
	}
	return b.String()
}

// number is the line of something that is one number.
func number(system, metric, unit string, n int, value float64) row {
	nan := math.NaN()
	return row{System: system, Metric: metric, Unit: unit, N: n, P50: value, P95: nan, P99: nan, Low: nan, High: nan}
}

// spread is the line of many values: their percentiles.
func spread(system, metric, unit string, values []float64) row {
	r := number(system, metric, unit, len(values), quantile(values, 0.5))
	r.P95, r.P99 = quantile(values, 0.95), quantile(values, 0.99)
	return r
}

// proportion is the line of a share of n, with Wilson's interval of 95 %.
func proportion(system, metric string, hits, n int) row {
	r := number(system, metric, "share", n, math.NaN())
	if n == 0 {
		return r
	}
	const z = 1.96
	p, all := float64(hits)/float64(n), float64(n)
	middle := (p + z*z/(2*all)) / (1 + z*z/all)
	half := z / (1 + z*z/all) * math.Sqrt(p*(1-p)/all+z*z/(4*all*all))
	r.P50, r.Low, r.High = p, max(0, middle-half), min(1, middle+half)
	return r
}

func writeRows(w io.Writer, rows []row) error {
	out := csv.NewWriter(w)
	out.Write(header)
	for _, r := range rows {
		line := []string{"sim-" + r.Part, r.System, r.Metric, r.Unit, strconv.Itoa(r.N)}
		for _, v := range []float64{r.P50, r.P95, r.P99, r.Low, r.High} {
			line = append(line, decimal(v, 5))
		}
		out.Write(line)
	}
	out.Flush()
	return out.Error()
}

func readRows(r io.Reader) ([]row, error) {
	lines, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(lines) == 0 || !slices.Equal(lines[0], header) {
		return nil, fmt.Errorf("the header is not %s", strings.Join(header, ","))
	}
	var rows []row
	for i, line := range lines[1:] {
		r := row{Part: strings.TrimPrefix(line[0], "sim-"), System: line[1], Metric: line[2], Unit: line[3]}
		if r.N, err = strconv.Atoi(line[4]); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+2, err)
		}
		for j, to := range []*float64{&r.P50, &r.P95, &r.P99, &r.Low, &r.High} {
			if *to = math.NaN(); line[5+j] != "" {
				if *to, err = strconv.ParseFloat(line[5+j], 64); err != nil {
					return nil, fmt.Errorf("line %d: %w", i+2, err)
				}
			}
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// replace writes a file whole or not at all.
func replace(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// decimal writes a number with at most so many decimals; NaN is empty.
func decimal(v float64, decimals int) string {
	if math.IsNaN(v) {
		return ""
	}
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// figures writes a number as people read it: three of them that count.
func figures(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a >= 100 || a == math.Trunc(a):
		return thousands(fmt.Sprintf("%.0f", v))
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.1:
		return fmt.Sprintf("%.2f", v)
	}
	return decimal(v, 4)
}

// percent writes a share, with more decimals where it is nearly all or none.
func percent(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v == 0 || v == 1:
		return fmt.Sprintf("%.0f %%", 100*v)
	case v > 0.999 || v < 0.001:
		return fmt.Sprintf("%.3f %%", 100*v)
	}
	return fmt.Sprintf("%.2f %%", 100*v)
}

func thousands(digits string) string {
	var b strings.Builder
	for i, c := range digits {
		if i > 0 && c != '-' && (len(digits)-i)%3 == 0 && digits[i-1] != '-' {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return b.String()
}

// quantile is the value below which the part q of the values lies, between two
// of them by their distance. NaN for none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}
