package main_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	main "github.com/boxed-mesh/boxed/bench"
)

func TestQuantilesLieBetweenTwoValues(t *testing.T) {
	// Known from R's quantile(), type 7.
	values := []float64{15, 20, 35, 40, 50}
	for _, c := range []struct{ q, want float64 }{{0, 15}, {0.05, 16}, {0.25, 20}, {0.4, 29}, {0.5, 35}, {0.95, 48}, {0.99, 49.6}, {1, 50}} {
		if got := main.Quantile(values, c.q); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("the quantile %v is %v, not %v", c.q, got, c.want)
		}
	}
	if got := main.Median([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("the median of an even number of values is %v, not 2.5", got)
	}
	if got := main.Median([]float64{7}); got != 7 {
		t.Errorf("the median of one value is %v", got)
	}
	if got := main.Median(nil); !math.IsNaN(got) {
		t.Errorf("the median of nothing is %v", got)
	}
}

func TestQuantileLeavesItsValuesInOrder(t *testing.T) {
	values := []float64{3, 1, 2}
	main.Median(values)
	if values[0] != 3 || values[1] != 1 || values[2] != 2 {
		t.Errorf("the values are %v now: trials and times no longer belong together", values)
	}
}

func TestBootstrapHoldsTheTruthAsOftenAsItSays(t *testing.T) {
	// Samples of a distribution whose median is known, ln 2: about 95 of 100
	// intervals must hold it. What is drawn is the same in every run.
	random := rand.New(rand.NewPCG(1, 1))
	const samples = 80
	held, width := 0, 0.0
	for range samples {
		values := make([]float64, 61)
		for i := range values {
			values[i] = random.ExpFloat64()
		}
		low, high := main.Bootstrap(values, main.Median)
		width += (high - low) / samples
		if low <= math.Ln2 && math.Ln2 <= high {
			held++
		}
	}
	if held < samples*90/100 || held > samples*99/100 {
		t.Errorf("%d of %d intervals hold the median", held, samples)
	}
	// The standard error of the median of n is 1/sqrt(n) here: an interval is four of them wide.
	if want := 4 / math.Sqrt(61); width < want*0.75 || width > want*1.25 {
		t.Errorf("the intervals are %.3f wide on average, not about %.3f", width, want)
	}
}

func TestBootstrapIsTheSameInEveryRun(t *testing.T) {
	values := []float64{1, 5, 2, 8, 3, 9, 4}
	low, high := main.Bootstrap(values, main.Median)
	for range 3 {
		if l, h := main.Bootstrap(values, main.Median); l != low || h != high {
			t.Fatalf("%v–%v and then %v–%v", low, high, l, h)
		}
	}
	if low, high := main.Bootstrap([]float64{6}, main.Median); low != 6 || high != 6 {
		t.Errorf("one value has the interval %v–%v", low, high)
	}
}

func TestRateIsOfTheWholeWindow(t *testing.T) {
	// Two a second for four seconds, and one at the very end.
	ends := []float64{0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 3.999}
	rate, low, high := main.RateOf(ends, 4*time.Second)
	if rate != 9.0/4 {
		t.Errorf("the rate is %v, not 2.25", rate)
	}
	if low < 2 || high > 3 || low > rate || high < rate {
		t.Errorf("its interval is %v–%v", low, high)
	}
	if rate, low, high := main.RateOf(nil, 4*time.Second); rate != 0 || low != 0 || high != 0 {
		t.Errorf("nothing ended, at a rate of %v (%v–%v)", rate, low, high)
	}
}
