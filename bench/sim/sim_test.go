package main_test

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	main "github.com/boxed-mesh/boxed/bench/sim"
)

// A probe of memberlist's that is under way when it is shut down ends with its own
// deadline, two seconds later at most.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

// Nodes fail, come back and are full, and nothing is promised twice, lost without
// a count or left without an answer. A node that takes what it has no room for
// panics.
func TestAWorldKeepsItsBooks(t *testing.T) {
	for _, system := range main.Systems {
		for _, load := range []float64{0.5, 0.98} {
			if _, err := main.Live(system, load, 5*time.Second, 1); err != nil {
				t.Errorf("%s at %v: %v", system, load, err)
			}
		}
	}
}

func TestASeedGivesTheSameWorldAgain(t *testing.T) {
	live := func(system string, seed uint64) main.Tally {
		tally, err := main.Live(system, 0.9, 10*time.Second, seed)
		if err != nil {
			t.Fatal(err)
		}
		return tally
	}
	same := cmp.AllowUnexported(main.Tally{}, live("boxed", 1).Misses())
	if diff := cmp.Diff(live("boxed", 1), live("boxed", 1), same); diff != "" {
		t.Errorf("the same seed gave another world:\n%s", diff)
	}
	if cmp.Equal(live("boxed", 1), live("boxed", 2), same) {
		t.Error("another seed gave the same world")
	}
	// What is asked does not hang on how it is placed.
	if a, b := main.Large(live("boxed", 1)), main.Large(live("omniscient-bestfit", 1)); a != b {
		t.Errorf("%d large asks by one system, and %d by another", a, b)
	}
}

func TestWhoKnowsAllFindsRoomAtTheFirstTry(t *testing.T) {
	for _, system := range []string{"omniscient-spread", "omniscient-bestfit"} {
		tally, err := main.Live(system, 0.8, 30*time.Second, 3)
		if err != nil {
			t.Fatal(err)
		}
		if first := main.First(tally); first < 0.999 {
			t.Errorf("%s: %v", system, first)
		}
	}
}

func TestLifetimesAreAsDescribed(t *testing.T) {
	drawn, mean := main.Lifetimes(200_000)
	slices.Sort(drawn)
	if median := drawn[len(drawn)/2]; median < 60 || median > 180 {
		t.Errorf("half live for %v s, not under three minutes", median)
	}
	if hour := drawn[len(drawn)*9/10]; hour < 1800 || hour > 7200 {
		t.Errorf("one in ten lives for %v s, not about an hour", hour)
	}
	sum := 0.0
	for _, v := range drawn {
		sum += v
	}
	if got := sum / float64(len(drawn)); math.Abs(got/mean-1) > 0.05 || drawn[len(drawn)-1] > 86400 {
		t.Errorf("the mean is %v and not %v, the most %v", got, mean, drawn[len(drawn)-1])
	}
}

func TestTheModelPassesNewsOnAndStops(t *testing.T) {
	for _, nodes := range []int{3, 20, 150} {
		took, sent, most := main.Spread(nodes)
		if took > 1 || sent > most || sent < int64(nodes)-1 {
			t.Errorf("%d nodes: all knew after %v s; it was sent %d times, and may be %d", nodes, took, sent, most)
		}
	}
	calm, hasty := main.ViewAges(40, 10*time.Second), main.ViewAges(40, 100*time.Millisecond)
	if slices.Max(calm) > 12 || slices.Max(hasty) < 0.5 {
		t.Errorf("views are up to %v s old in a calm mesh, and %v in one with too much news", slices.Max(calm), slices.Max(hasty))
	}
	if !slices.Equal(calm, main.ViewAges(40, 10*time.Second)) {
		t.Error("the same model gave something else")
	}
}

func TestRealMembershipIsMeasured(t *testing.T) {
	rows, err := main.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for metric, within := range map[string][2]float64{
		"join_all nodes=3 pace=lan":                           {0, 20},
		"change_to_all nodes=3 pace=lan":                      {0, 5},
		"death_to_all nodes=3 pace=lan":                       {0.2, 30},
		"quiet_datagrams nodes=3 pace=lan":                    {1, 50},
		"telling_datagram_bytes nodes=3 pace=lan publish=0.5": {500, 50_000},
		"view_age nodes=3 pace=lan publish=0.5":               {0.01, 10},
	} {
		if v := main.Get(rows, "boxed", metric); !(v >= within[0] && v <= within[1]) {
			t.Errorf("%s is %v", metric, v)
		}
	}
}

func TestRealDocumentsAreMeasured(t *testing.T) {
	rows, err := main.ObserveDocuments(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for metric, within := range map[string][2]float64{
		"document_to_all nodes=3":     {0.01, 5000},
		"document_bytes nodes=3":      {200, 20_000},
		"digest_bytes documents=50":   {500, 10_000},
		"digest_make documents=50":    {0, 1000},
		"digest_compare documents=50": {0, 1000},
	} {
		if v := main.Get(rows, "boxed", metric); !(v > within[0] && v <= within[1]) {
			t.Errorf("%s is %v", metric, v)
		}
	}
}

func TestRowsAreReadAsTheyWereWritten(t *testing.T) {
	rows := []main.Row{
		{Part: "placement", System: "boxed", Metric: "first_try nodes=5 load=90", Unit: "share", N: 7, P50: 0.5, P95: math.NaN(), P99: math.NaN(), Low: 0.25, High: 0.75},
		{Part: "model", System: "model", Metric: "fit, with a comma", Unit: "", N: 1, P50: -1, P95: 2, P99: 3, Low: math.NaN(), High: math.NaN()},
	}
	var text bytes.Buffer
	if err := main.WriteRows(&text, rows); err != nil {
		t.Fatal(err)
	}
	got, err := main.ReadRows(&text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(rows, got, cmp.Comparer(func(a, b float64) bool { return a == b || a != a && b != b })); diff != "" {
		t.Error(diff)
	}
	if _, err := main.ReadRows(strings.NewReader("a,b\n1,2\n")); err == nil {
		t.Error("another file passes for results")
	}
}

func TestThePageIsMadeFromTheRows(t *testing.T) {
	rows, runs, docs, err := main.Repository()
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("nothing has been simulated yet: go run ./bench/sim")
	}
	if err != nil {
		t.Fatal(err)
	}
	made, err := main.Documents(rows, runs)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range made {
		got, err := os.ReadFile(filepath.Join(docs, name))
		if err != nil {
			t.Errorf("%v: go run ./bench/sim report writes it", err)
			continue
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("docs/%s is not what bench/results/sim.csv gives; go run ./bench/sim report writes it:\n%s", name, diff)
		}
	}
	for name, text := range made {
		if strings.Contains(string(text), "NaN") || strings.Contains(string(text), "%!") {
			t.Errorf("docs/%s has what is no number", name)
		}
		if !strings.HasSuffix(name, ".svg") {
			continue
		}
		for decoder := xml.NewDecoder(bytes.NewReader(text)); ; {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
}

// The golden structure: what the page has, in this order, whatever the numbers are.
func TestThePageHasItsParts(t *testing.T) {
	rows := []main.Row{{Part: "placement", System: "boxed", Metric: "first_try nodes=5000 load=90 stale=30", Unit: "share", N: 1000, P50: 0.5, Low: 0.47, High: 0.53, P95: math.NaN(), P99: math.NaN()}}
	made, err := main.Documents(rows, map[string]main.Run{"placement": {Quick: true, Cores: 2}})
	if err != nil {
		t.Fatal(err)
	}
	text := string(made["simulation.md"])
	var heads []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			heads = append(heads, strings.TrimSpace(line))
		}
	}
	want := []string{
		"# How far a mesh goes", "## What is aimed at", "## What is real here, and what is a model", "## Placement by load", "## Placement by the age of views",
		"## Why the emptier half is equal", "## Other worlds", "## Membership", "## Documents", "## Where it breaks", "## What one would use beyond", "## How it was made",
	}
	if diff := cmp.Diff(want, heads); diff != "" {
		t.Error(diff)
	}
	for _, part := range []string{"50.00 % (47.00–53.00) | **no** |", "**a quick run: not to be believed**", "bench/sim-breaks.svg", "**all of it is the model's**"} {
		if !strings.Contains(text, part) {
			t.Errorf("the page does not have %q", part)
		}
	}
	if len(made) != 5 {
		t.Errorf("%d files were made", len(made))
	}
}

func TestMistakesOfTheCommandLineAreSaid(t *testing.T) {
	for _, args := range [][]string{{"-only", "nothing"}, {"reprot"}, {"-quick=maybe"}} {
		if err := main.Program(context.Background(), args, io.Discard, io.Discard); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
}
