package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// resamples of a bootstrap.
const resamples = 2000

// quantile is the value below which the part q of the values lies, between two
// of them by their distance (R's type 7, and what spreadsheets do). NaN for none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	return quantileSorted(sorted, q)
}

func quantileSorted(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

func median(values []float64) float64 { return quantile(values, 0.5) }

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// bootstrap is the interval that holds of with a confidence of 95 %: the middle
// of what of gives for samples drawn from values with replacement. The draws are
// the same in every run.
func bootstrap(values []float64, of func([]float64) float64) (low, high float64) {
	if len(values) == 0 {
		return math.NaN(), math.NaN()
	}
	random := rand.New(rand.NewPCG(1, 2))
	found := make([]float64, resamples)
	draw := make([]float64, len(values))
	for i := range found {
		for j := range draw {
			draw[j] = values[random.IntN(len(values))]
		}
		found[i] = of(draw)
	}
	slices.Sort(found)
	return quantileSorted(found, 0.025), quantileSorted(found, 0.975)
}
