package main_test

import (
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	main "github.com/boxed-mesh/boxed/bench"
)

var update = flag.Bool("update", false, "write docs/benchmarks.md and its plots from the results")

func TestDocumentIsMadeFromTheResults(t *testing.T) {
	const docs = "../docs"
	made, err := main.Documents(os.DirFS("results"), os.DirFS(docs))
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := main.WriteDocuments(docs, made); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range made {
		got, err := os.ReadFile(filepath.Join(docs, name))
		if err != nil {
			t.Errorf("%v: make bench-report writes it", err)
			continue
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("docs/%s is not what bench/results gives; make bench-report writes it:\n%s", name, diff)
		}
	}
	plots, err := filepath.Glob(docs + "/bench/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range plots {
		if made["bench/"+filepath.Base(path)] == nil && !strings.HasPrefix(filepath.Base(path), "sim-") { // bench/sim's, which has its own test
			t.Errorf("%s is made from no result", path)
		}
	}
}

// results are of two experiments, with a failure and with a system whose name
// would break the picture.
func results(t *testing.T) fstest.MapFS {
	t.Helper()
	const head = "experiment,system,metric,unit,n,p50,p95,p99,ci_lo,ci_hi\n"
	return fstest.MapFS{
		"lifecycle.csv": {Data: []byte(head +
			"lifecycle,docker-stock,total,ms,60,400,500,600,390,410\n" +
			"lifecycle,docker-hardened,total,ms,60,300,350,360,290,310\n" +
			"lifecycle,boxed-cold,total,ms,60,200,250,260,190,210\n" +
			"lifecycle,boxed-warm,total,ms,60,20,30,70,19,21\n" +
			"lifecycle,boxed-warm,failures,trials,60,1,,,,\n")},
		"lifecycle.env.json": {Data: []byte(`{"experiment":"lifecycle","trials":300,"failed_trials":1,"cores":2,"cpu":"a <fast> one"}`)},
		"exec.csv":           {Data: []byte(head + "exec,\"<b>&\"\"x\",exec_true,ms,400,1.5,2,3,,\n")},
		"exec.env.json":      {Data: []byte(`{"experiment":"exec","trials":400,"quick":true}`)},
	}
}

func TestAimsCompareWithinOneRun(t *testing.T) {
	blocks, err := main.Blocks(results(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		// 400/20, with 390/21 and 410/19 as the worst and the best.
		"| warm create + python print + destroy, faster than stock Docker | ≥ 15× | 20× (18.6–21.6) | yes | – |",
		// 70/20.
		"| the same, its 99th percentile against its median | ≤ 2.50× | 3.50× | **no** | – |",
		"| cold, faster than Docker hardened by hand | ≥ 1× | 1.50× (1.38–1.63) | yes | – |",
		"| exec of `true` at the driver | ≤ 1.20 ms | – | – | – |",
	} {
		if !strings.Contains(blocks["aims"], want+"\n") {
			t.Errorf("%s\nis not in\n%s", want, blocks["aims"])
		}
	}
	if text := blocks["lifecycle"]; !strings.Contains(text, "1 of them failed") {
		t.Errorf("a failure is not said: %s", text)
	}
	if text := blocks["exec"]; !strings.Contains(text, "not to be believed") {
		t.Errorf("a quick run passes for a full one: %s", text)
	}
	if text := blocks["memory"]; text != "Not measured yet.\n" {
		t.Errorf("what was not measured is described as %q", text)
	}
}

// document has every marker, and prose between them.
func document() string {
	text := "# Title\n"
	for _, name := range main.BlockNames() {
		text += "\nprose of " + name + "\n\n<!-- made: " + name + " -->\nold figures\n<!-- end -->\n"
	}
	return text + "\nlast words\n"
}

func TestProseStaysAndFiguresChange(t *testing.T) {
	made, err := main.Documents(results(t), fstest.MapFS{"benchmarks.md": {Data: []byte(document())}})
	if err != nil {
		t.Fatal(err)
	}
	text := string(made["benchmarks.md"])
	for _, name := range main.BlockNames() {
		if !strings.Contains(text, "prose of "+name+"\n") {
			t.Errorf("the prose of %s is lost", name)
		}
	}
	if strings.Contains(text, "old figures") || !strings.HasSuffix(text, "\nlast words\n") {
		t.Errorf("old figures stay, or the end is lost:\n%s", text)
	}
	again, err := main.Documents(results(t), fstest.MapFS{"benchmarks.md": {Data: []byte(text)}})
	if err != nil || string(again["benchmarks.md"]) != text {
		t.Errorf("making it twice changes it: %v", err)
	}
}

func TestDocumentWithoutAMarkerIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"none of one block": strings.Replace(document(), "<!-- made: memory -->", "", 1),
		"no end":            strings.Replace(document(), "<!-- end -->\n", "", 1),
		"an unknown one":    document() + "<!-- made: more -->\n<!-- end -->\n",
	} {
		if _, err := main.Documents(results(t), fstest.MapFS{"benchmarks.md": {Data: []byte(text)}}); err == nil {
			t.Errorf("%s: it is made all the same", name)
		}
	}
}

func TestPlotsAreWellFormedAndKeepInside(t *testing.T) {
	made, err := main.Documents(results(t), fstest.MapFS{"benchmarks.md": {Data: []byte(document())}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bench/lifecycle.svg", "bench/exec.svg"} {
		decoder := xml.NewDecoder(strings.NewReader(string(made[name])))
		for {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, made[name])
			}
		}
	}
	text := string(made["bench/lifecycle.svg"])
	for _, want := range []string{">docker-stock<", ">boxed-warm<", ">400<", ">20<", "prefers-color-scheme: dark"} {
		if !strings.Contains(text, want) {
			t.Errorf("the picture has no %s", want)
		}
	}
	if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
		t.Errorf("the picture has what is no number:\n%s", text)
	}
	if len(made) != 3 {
		t.Errorf("%d files were made of two experiments", len(made))
	}
}

func TestNumbersAreReadable(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.456: "0.46", 1.2: "1.20", 2: "2", 12.34: "12.3", 99.96: "100.0", 123.4: "123", 1234: "1,234", 1234567.8: "1,234,568", -1234: "-1,234",
	} {
		if got := main.Figures(v); got != want {
			t.Errorf("%v is written %q, not %q", v, got, want)
		}
	}
	if got := main.Figures(math.NaN()); got != "–" {
		t.Errorf("nothing is written %q", got)
	}
	for v, want := range map[float64]float64{400: 100, 8: 1, 1: 0.2, 70: 10, 1187: 200, 0: 1} {
		if got := main.NiceStep(v); got != want {
			t.Errorf("an axis to %v has ticks every %v, not %v", v, got, want)
		}
	}
}
