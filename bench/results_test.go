package main_test

import (
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	main "github.com/boxed-mesh/boxed/bench"
)

var columns = []string{"create_ms", "exec_ms", "destroy_ms", "total_ms"}

func filled(t *testing.T) *main.Sheet {
	t.Helper()
	s := main.NewSheet("lifecycle", "r1", columns)
	s.Add(0, "boxed-warm", nil, 1, 20, 2, 23)
	s.Add(0, "docker-stock", nil, 300, 60, 80, 440)
	s.Add(1, "boxed-warm", errors.New("the output is \"\""), 1, math.NaN(), 2, 3.5)
	s.Add(1, "docker-stock", nil, 310.1234, 61, 81, 452)
	for _, system := range []string{"docker-stock", "boxed-warm"} {
		s.Summarize(system, "total", "ms", s.Column(system, "total_ms"))
	}
	s.Failures()
	return s
}

func TestSummaryIsReadAsItWasWritten(t *testing.T) {
	dir, s := t.TempDir(), filled(t)
	if err := s.Write(dir, &main.Host{Experiment: "lifecycle"}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "lifecycle.csv"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "experiment,system,metric,unit,n,p50,p95,p99,ci_lo,ci_hi\n"; !strings.HasPrefix(string(text), want) {
		t.Errorf("the header of %q is not %q", text, want)
	}
	got, err := main.ReadRows(os.DirFS(dir), "lifecycle.csv")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s.Rows(), got, cmpopts.EquateNaNs(), cmpopts.EquateApprox(0, 0.001)); diff != "" {
		t.Error(diff)
	}
}

func TestFailedTrialIsKeptAndCountsForNoTime(t *testing.T) {
	dir, s := t.TempDir(), filled(t)
	if err := s.Write(dir, &main.Host{}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "raw", "lifecycle.csv.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	got, err := csv.NewReader(zip).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	want := [][]string{
		{"run", "i", "system", "create_ms", "exec_ms", "destroy_ms", "total_ms", "ok"},
		{"r1", "0", "boxed-warm", "1", "20", "2", "23", "true"},
		{"r1", "0", "docker-stock", "300", "60", "80", "440", "true"},
		{"r1", "1", "boxed-warm", "1", "", "2", "3.5", "false"},
		{"r1", "1", "docker-stock", "310.123", "61", "81", "452", "true"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	rows := map[string]main.Row{}
	for _, r := range s.Rows() {
		rows[r.System+" "+r.Metric] = r
	}
	if r := rows["boxed-warm total"]; r.N != 1 || r.P50 != 23 {
		t.Errorf("a failed trial is in the times: %+v", r)
	}
	if r := rows["boxed-warm failures"]; r.N != 2 || r.P50 != 1 {
		t.Errorf("a failed trial is not counted: %+v", r)
	}
}

func TestSameTrialsGiveTheSameFiles(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	for _, dir := range []string{a, b} {
		if err := filled(t).Write(dir, &main.Host{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"lifecycle.csv", "raw/lifecycle.csv.gz", "lifecycle.env.json"} {
		x, err := os.ReadFile(filepath.Join(a, name))
		if err != nil {
			t.Fatal(err)
		}
		y, err := os.ReadFile(filepath.Join(b, name))
		if err != nil {
			t.Fatal(err)
		}
		if string(x) != string(y) {
			t.Errorf("%s differs", name)
		}
	}
}

func TestReadingRefusesWhatIsNoSummary(t *testing.T) {
	for name, text := range map[string]string{
		"another header": "a,b\n1,2\n",
		"nothing":        "",
		"a word":         "experiment,system,metric,unit,n,p50,p95,p99,ci_lo,ci_hi\ne,s,m,ms,1,fast,,,,\n",
		"a short line":   "experiment,system,metric,unit,n,p50,p95,p99,ci_lo,ci_hi\ne,s,m\n",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "x.csv"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if rows, err := main.ReadRows(os.DirFS(dir), "x.csv"); err == nil {
			t.Errorf("%s was read as %v", name, rows)
		}
	}
}

// What is committed must be whole: a summary, its trials and its machine.
func TestCommittedResultsAreWhole(t *testing.T) {
	summaries, err := filepath.Glob("results/*.csv")
	if err != nil {
		t.Fatal(err)
	}
	if len(summaries) == 0 {
		t.Fatal("there are no results: make bench makes them")
	}
	for _, path := range summaries {
		name := strings.TrimSuffix(filepath.Base(path), ".csv")
		if name == "sim" {
			continue // bench/sim's: several experiments, no trials of a machine; it has its own test
		}
		rows, err := main.ReadRows(os.DirFS("results"), name+".csv")
		if err != nil {
			t.Error(err)
		}
		for _, r := range rows {
			if r.Experiment != name || r.Unit == "" || r.N < 1 {
				t.Errorf("%s: %+v", path, r)
			}
		}
		text, err := os.ReadFile("results/" + name + ".env.json")
		var h main.Host
		if err == nil {
			err = json.Unmarshal(text, &h)
		}
		if err != nil || h.Experiment != name || h.Kernel == "" || h.Docker == "" || h.Trials == 0 {
			t.Errorf("%s.env.json: %+v: %v", name, h, err)
		}
		if trials := countTrials(t, "results/raw/"+name+".csv.gz"); trials != h.Trials {
			t.Errorf("%s has %d raw trials, not %d", name, trials, h.Trials)
		}
	}
}

func countTrials(t *testing.T, path string) int {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Error(err)
		return 0
	}
	lines, err := csv.NewReader(zip).ReadAll()
	if err != nil || len(lines) == 0 || strings.Join(lines[0][:3], ",") != "run,i,system" || lines[0][len(lines[0])-1] != "ok" {
		t.Errorf("%s: %v", path, err)
		return 0
	}
	return len(lines) - 1
}
