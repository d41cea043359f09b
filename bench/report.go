package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// results is everything that was measured, by experiment.
type results struct {
	rows  map[string][]row
	hosts map[string]host
}

func readResults(fsys fs.FS) (results, error) {
	rs := results{map[string][]row{}, map[string]host{}}
	for _, name := range names() {
		rows, err := readRows(fsys, name+".csv")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return rs, err
		}
		text, err := fs.ReadFile(fsys, name+".env.json")
		if err != nil {
			return rs, err
		}
		var h host
		if err := json.Unmarshal(text, &h); err != nil {
			return rs, fmt.Errorf("%s.env.json: %w", name, err)
		}
		rs.rows[name], rs.hosts[name] = rows, h
	}
	return rs, nil
}

// get finds one line; one of NaN where it is absent.
func (rs results) get(experiment, system, metric string) row {
	for _, r := range rs.rows[experiment] {
		if r.System == system && r.Metric == metric {
			return r
		}
	}
	nan := math.NaN()
	return row{P50: nan, P95: nan, P99: nan, Low: nan, High: nan}
}

// reportCommand writes the document and the plots.
func reportCommand(args []string, stderr io.Writer) error {
	root, err := repository()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("bench report", flag.ContinueOnError)
	flags.SetOutput(stderr)
	from := flags.String("results", filepath.Join(root, "bench", "results"), "directory of the results")
	to := flags.String("docs", filepath.Join(root, "docs"), "directory of benchmarks.md, which must be there, and of bench/*.svg")
	if err := flags.Parse(args); err != nil {
		return err
	}
	made, err := documents(os.DirFS(*from), os.DirFS(*to))
	if err != nil {
		return err
	}
	return writeDocuments(*to, made)
}

// simulated reports whether a picture is of bench/sim, which makes its own page.
func simulated(path string) bool { return strings.HasPrefix(filepath.Base(path), "sim-") }

// writeDocuments writes what documents made, and removes plots that are no more.
func writeDocuments(dir string, made map[string][]byte) error {
	if err := os.MkdirAll(filepath.Join(dir, "bench"), 0o755); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "bench", "*.svg"))
	if err != nil {
		return err
	}
	for _, path := range old {
		if made["bench/"+filepath.Base(path)] == nil && !simulated(path) {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	for name, text := range made {
		if err := replace(filepath.Join(dir, filepath.FromSlash(name)), text); err != nil {
			return err
		}
	}
	return nil
}

// documents are the files below docs that the results give: benchmarks.md, whose
// prose stays, and the plots.
func documents(from, docs fs.FS) (map[string][]byte, error) {
	rs, err := readResults(from)
	if err != nil {
		return nil, err
	}
	made := map[string][]byte{}
	for name, p := range rs.plots() {
		if made["bench/"+name], err = p.render(); err != nil {
			return nil, err
		}
	}
	text, err := fs.ReadFile(docs, "benchmarks.md")
	if err != nil {
		return nil, err
	}
	made["benchmarks.md"], err = fill(text, rs.blocks())
	return made, err
}

// fill replaces what is between the markers of each block. A block without a
// marker, or the reverse, is an error: nothing gets lost unseen.
func fill(text []byte, blocks map[string]string) ([]byte, error) {
	for _, name := range slices.Sorted(maps.Keys(blocks)) {
		begin, end := []byte("<!-- made: "+name+" -->\n"), []byte("<!-- end -->\n")
		from := bytes.Index(text, begin)
		if from < 0 {
			return nil, fmt.Errorf("benchmarks.md has no line <!-- made: %s -->", name)
		}
		from += len(begin)
		length := bytes.Index(text[from:], end)
		if length < 0 || bytes.Contains(text[from:from+length], []byte("<!-- made: ")) {
			return nil, fmt.Errorf("benchmarks.md has no line <!-- end --> after the one of %s", name)
		}
		text = slices.Concat(text[:from], []byte(blocks[name]), text[from+length:])
	}
	if n := bytes.Count(text, []byte("<!-- made: ")); n != len(blocks) {
		return nil, fmt.Errorf("benchmarks.md has %d blocks of which %d are known", n, len(blocks))
	}
	return text, nil
}

// blocks are what is made for the document, by name.
func (rs results) blocks() map[string]string {
	blocks := map[string]string{"aims": rs.aimsTable(), "hosts": rs.hostsTable()}
	plots := rs.plots()
	for _, e := range experiments() {
		if e.busy {
			continue
		}
		var b strings.Builder
		if _, ok := plots[e.name+".svg"]; ok {
			fmt.Fprintf(&b, "![%s](bench/%s.svg)\n\n", e.name, e.name)
		}
		for _, name := range []string{e.name, e.name + busySuffix} {
			b.WriteString(rs.section(name))
		}
		if b.Len() == 0 {
			b.WriteString("Not measured yet.\n")
		}
		blocks[e.name] = b.String()
	}
	return blocks
}

// section is the table of one experiment with the conditions it was made under.
func (rs results) section(name string) string {
	rows := rs.rows[name]
	if len(rows) == 0 {
		return ""
	}
	var b strings.Builder
	h := rs.hosts[name]
	condition := "Quiet machine"
	switch {
	case h.LoadProcesses > 0:
		condition = "Busy machine"
	case h.disturbed():
		condition = "No load of ours"
	}
	fmt.Fprintf(&b, "%s, %s trials", condition, figures(float64(h.Trials)))
	if h.Failed > 0 {
		fmt.Fprintf(&b, ", %d of them failed", h.Failed)
	} else {
		b.WriteString(", none failed")
	}
	if h.Quick {
		b.WriteString(". A quick run: not to be believed")
	}
	if h.disturbed() {
		fmt.Fprintf(&b, ". But the load average was %s when it began: the machine was not quiet", figures(h.LoadBefore))
	}
	b.WriteString(".\n\n")
	if strings.HasPrefix(name, "throughput") {
		b.WriteString(rs.rateTable(name))
	} else {
		b.WriteString(rowTable(rows))
	}
	b.WriteString("\n")
	return b.String()
}

func rowTable(rows []row) string {
	var b strings.Builder
	b.WriteString("| metric | system | unit | n | median | 95 % interval | p95 | p99 |\n|---|---|---|--:|--:|--:|--:|--:|\n")
	var metrics []string
	for _, r := range rows {
		if r.Metric != "failures" && !slices.Contains(metrics, r.Metric) {
			metrics = append(metrics, r.Metric)
		}
	}
	for _, metric := range metrics {
		for _, r := range rows {
			if r.Metric != metric {
				continue
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %d | %s | %s | %s | %s |\n", r.Metric, r.System, r.Unit, r.N, figures(r.P50),
				between(r.Low, r.High), figures(r.P95), figures(r.P99))
		}
	}
	return b.String()
}

func between(low, high float64) string {
	if math.IsNaN(low) || math.IsNaN(high) {
		return "–"
	}
	return figures(low) + "–" + figures(high)
}

// rateTable has a line for each number of callers.
func (rs results) rateTable(name string) string {
	var systems []string
	for _, r := range rs.rows[name] {
		if !slices.Contains(systems, r.System) {
			systems = append(systems, r.System)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| callers | %s, 1/s | share out of the pool |\n|---|%s--:|\n", strings.Join(systems, ", 1/s | "), strings.Repeat("--:|", len(systems)))
	line := func(label, suffix string) {
		cells := []string{}
		for _, system := range systems {
			r := rs.get(name, system, "rate"+suffix)
			if math.IsNaN(r.P50) {
				return
			}
			cell := fmt.Sprintf("%s (%s)", figures(r.P50), between(r.Low, r.High))
			if c := rs.get(name, system, suffix[1:]+"_concurrency"); !math.IsNaN(c.P50) {
				cell = fmt.Sprintf("%s by %s", cell, figures(c.P50))
			}
			cells = append(cells, cell)
		}
		share := rs.get(name, boxedPool, "pool_hit_share"+suffix).P50
		fmt.Fprintf(&b, "| %s | %s | %s |\n", label, strings.Join(cells, " | "), figures(share))
	}
	for _, level := range levels {
		line(fmt.Sprint(level), fmt.Sprintf("_c%d", level))
	}
	line("sustained", "_sustained")
	return b.String()
}

// aimsTable compares with what is aimed at.
func (rs results) aimsTable() string {
	var b strings.Builder
	b.WriteString("| what | aim | quiet | reached | busy |\n|---|--:|--:|---|--:|\n")
	busy := func(experiment, system, metric string) row { return rs.get(experiment+busySuffix, system, metric) }
	for _, a := range aims() {
		v := a.of(rs.get)
		reached := "–"
		if !math.IsNaN(v.value) {
			reached = map[bool]string{true: "yes", false: "**no**"}[a.reached(v)]
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", a.what, a.limit(), a.say(v), reached, a.say(a.of(busy)))
	}
	return b.String()
}

// hostsTable says where and when each experiment was made.
func (rs results) hostsTable() string {
	if len(rs.hosts) == 0 {
		return "Nothing was measured yet.\n"
	}
	var b strings.Builder
	seen := map[string]bool{}
	for _, name := range names() {
		h, ok := rs.hosts[name]
		if !ok {
			continue
		}
		machine := fmt.Sprintf("%d cores of %s, %s MiB of memory; Linux %s, cgroup v%s (%s); Docker %s (%s, containerd %s, runc %s) on %s; %s. Image %s. docker-stock has %s.\n",
			h.Cores, h.CPU, thousands(fmt.Sprint(h.MemoryMiB)), h.Kernel, h.Cgroup, h.CgroupDriver, h.Docker, h.Runtime, h.Containerd, h.Runc, h.Storage, h.Go, h.Image, networkText(h.Network))
		if !seen[machine] {
			seen[machine] = true
			b.WriteString(machine + "\n")
		}
	}
	b.WriteString("| experiment | date | revision | seconds | load before | load after |\n|---|---|---|--:|--:|--:|\n")
	for _, name := range names() {
		if h, ok := rs.hosts[name]; ok {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", name, h.Date.Format("2006-01-02 15:04"), h.Revision, figures(h.Seconds), figures(h.LoadBefore), figures(h.LoadAfter))
		}
	}
	return b.String()
}

func networkText(network string) string {
	if network == networkDefault {
		return "the engine's default network"
	}
	return network
}
