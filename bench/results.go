package main

import (
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
)

// header is that of every summary.
var header = []string{"experiment", "system", "metric", "unit", "n", "p50", "p95", "p99", "ci_lo", "ci_hi"}

// row is one line of a summary. A field that says nothing is NaN, and empty in
// the file: a rate has no 99th percentile.
type row struct {
	Experiment, System, Metric, Unit string
	N                                int
	P50, P95, P99, Low, High         float64
}

// trial is one line of the raw results.
type trial struct {
	i      int
	system string
	values []float64 // by column; NaN where nothing was measured
	ok     bool
}

// sheet collects the results of one experiment. It is safe for concurrent use.
type sheet struct {
	experiment string
	run        string // names the run of the program
	columns    []string

	mu     sync.Mutex
	trials []trial
	faults []string // what went wrong in the first failed trials
	rows   []row
}

func newSheet(experiment, run string, columns []string) *sheet {
	return &sheet{experiment: experiment, run: run, columns: columns}
}

// maxFaults bounds what env.json says of failures; they are all counted.
const maxFaults = 20

// add records a trial. One that failed is recorded too, and is never dropped.
func (s *sheet) add(i int, system string, err error, values ...float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(values) != len(s.columns) {
		panic(fmt.Sprintf("%s: %d values for %d columns", s.experiment, len(values), len(s.columns)))
	}
	s.trials = append(s.trials, trial{i, system, values, err == nil})
	if err != nil && len(s.faults) < maxFaults {
		s.faults = append(s.faults, fmt.Sprintf("%s, trial %d: %v", system, i, err))
	}
}

// addSome records a trial in which only some columns were measured.
func (s *sheet) addSome(i int, system string, err error, measured map[string]float64) {
	values := make([]float64, len(s.columns))
	for c, name := range s.columns {
		values[c] = math.NaN()
		if v, ok := measured[name]; ok {
			values[c] = v
		}
	}
	s.add(i, system, err, values...)
}

// failed counts the trials that failed.
func (s *sheet) failed() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.trials {
		if !t.ok {
			n++
		}
	}
	return n
}

// systems in the order of their first trials, sorted so that runs are alike.
func (s *sheet) systems() (list []string) {
	for _, t := range s.trials {
		if !slices.Contains(list, t.system) {
			list = append(list, t.system)
		}
	}
	slices.SortFunc(list, bySystem)
	return list
}

// column is the values of a system's good trials that where (nil: all) picks.
func (s *sheet) column(system, column string, where func(trial) bool) (values []float64) {
	at := slices.Index(s.columns, column)
	for _, t := range s.trials {
		if t.system == system && t.ok && (where == nil || where(t)) && !math.IsNaN(t.values[at]) {
			values = append(values, t.values[at])
		}
	}
	return values
}

// value is one column of a trial.
func (s *sheet) value(t trial, column string) float64 {
	return t.values[slices.Index(s.columns, column)]
}

// summarize adds the line of a metric. Without values there is none.
func (s *sheet) summarize(system, metric, unit string, values []float64) {
	if len(values) == 0 {
		return
	}
	low, high := bootstrap(values, median)
	s.rows = append(s.rows, row{
		s.experiment, system, metric, unit, len(values),
		median(values), quantile(values, 0.95), quantile(values, 0.99), low, high,
	})
}

// number adds the line of something that is one number: out of n.
func (s *sheet) number(system, metric, unit string, n int, value float64) {
	s.rows = append(s.rows, row{s.experiment, system, metric, unit, n, value, math.NaN(), math.NaN(), math.NaN(), math.NaN()})
}

// failures adds a line for each system: how many of its trials failed.
func (s *sheet) failures() {
	for _, system := range s.systems() {
		n, bad := 0, 0
		for _, t := range s.trials {
			if t.system == system {
				n++
				if !t.ok {
					bad++
				}
			}
		}
		s.number(system, "failures", "trials", n, float64(bad))
	}
}

// write writes the three files, each whole or not at all.
func (s *sheet) write(dir string, host *host) error {
	if err := os.MkdirAll(filepath.Join(dir, "raw"), 0o755); err != nil {
		return err
	}
	var summary, raw bytes.Buffer
	if err := writeRows(&summary, s.rows); err != nil {
		return err
	}
	zip := gzip.NewWriter(&raw) // without a name or time: the same trials give the same file
	if err := s.writeTrials(zip); err != nil {
		return err
	}
	if err := zip.Close(); err != nil {
		return err
	}
	env, err := json.MarshalIndent(host, "", "  ")
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		text []byte
	}{
		{s.experiment + ".csv", summary.Bytes()},
		{filepath.Join("raw", s.experiment+".csv.gz"), raw.Bytes()},
		{s.experiment + ".env.json", append(env, '\n')},
	} {
		if err := replace(filepath.Join(dir, f.name), f.text); err != nil {
			return err
		}
	}
	return nil
}

func replace(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (s *sheet) writeTrials(w io.Writer) error {
	out := csv.NewWriter(w)
	out.Write(slices.Concat([]string{"run", "i", "system"}, s.columns, []string{"ok"}))
	for _, t := range s.trials {
		line := []string{s.run, strconv.Itoa(t.i), t.system}
		for _, v := range t.values {
			line = append(line, decimal(v, 3))
		}
		out.Write(append(line, strconv.FormatBool(t.ok)))
	}
	out.Flush()
	return out.Error()
}

func writeRows(w io.Writer, rows []row) error {
	out := csv.NewWriter(w)
	out.Write(header)
	for _, r := range rows {
		line := []string{r.Experiment, r.System, r.Metric, r.Unit, strconv.Itoa(r.N)}
		for _, v := range []float64{r.P50, r.P95, r.P99, r.Low, r.High} {
			line = append(line, decimal(v, 3))
		}
		out.Write(line)
	}
	out.Flush()
	return out.Error()
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

// readRows reads a summary; there is none where the file is absent.
func readRows(fsys fs.FS, name string) ([]row, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(lines) == 0 || !slices.Equal(lines[0], header) {
		return nil, fmt.Errorf("%s: its header is not %s", name, strings.Join(header, ","))
	}
	var rows []row
	for i, line := range lines[1:] {
		r := row{Experiment: line[0], System: line[1], Metric: line[2], Unit: line[3]}
		if r.N, err = strconv.Atoi(line[4]); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, i+2, err)
		}
		for j, to := range []*float64{&r.P50, &r.P95, &r.P99, &r.Low, &r.High} {
			if *to = math.NaN(); line[5+j] != "" {
				if *to, err = strconv.ParseFloat(line[5+j], 64); err != nil {
					return nil, fmt.Errorf("%s:%d: %w", name, i+2, err)
				}
			}
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// printRows shows a summary to a person.
func printRows(w io.Writer, rows []row) {
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(out, strings.Join(header, "\t")+"\t")
	for _, r := range rows {
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%d\t", r.Experiment, r.System, r.Metric, r.Unit, r.N)
		for _, v := range []float64{r.P50, r.P95, r.P99, r.Low, r.High} {
			fmt.Fprintf(out, "%s\t", decimal(v, 2))
		}
		fmt.Fprintln(out)
	}
	out.Flush()
	fmt.Fprintln(w)
}
