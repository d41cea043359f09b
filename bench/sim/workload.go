package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/boxed-mesh/boxed"
)

const gib = 1024 * boxed.MiB

// recipe is a template: what people ask for under one name.
type recipe struct {
	name   string
	limits boxed.Limits
	weight float64 // how often it is asked for
}

// templateMiB are the sizes of twenty templates, from the one that is asked for
// most. By Zipf's law with exponent 1 the first is a quarter of all asks, the
// first three half. Most are small, and one of the large ones is popular.
var templateMiB = []int64{512, 512, 1024, 256, 2048, 512, 1024, 4096, 256, 1024, 2048, 512, 8192, 1024, 256, 4096, 2048, 512, 1024, 8192}

// templates ask for less CPU than memory, as nodes have them, so that memory is
// what runs out.
func templates() (list []recipe) {
	for i, mib := range templateMiB {
		list = append(list, recipe{
			name:   fmt.Sprintf("template-%d", i+1),
			limits: boxed.Limits{MemoryBytes: mib * boxed.MiB, CPUs: max(0.25, float64(mib)/2048)},
			weight: 1 / float64(i+1),
		})
	}
	return list
}

// lifetimes is how long sandboxes live, in seconds: a mixture of two lognormal
// parts and a Pareto one, cut off at the highest ttl that a user may ask for.
type lifetimes struct {
	name          string
	short, medium lognormal
	long          pareto
	shares        [3]float64
}

type lognormal struct{ median, sigma float64 }

func (l lognormal) mean() float64 { return l.median * math.Exp(l.sigma*l.sigma/2) }

func (l lognormal) draw(r *rand.Rand) float64 { return l.median * math.Exp(l.sigma*r.NormFloat64()) }

// byLength draws one as they are met at some moment: the longer, the more often.
func (l lognormal) byLength(r *rand.Rand) float64 {
	return l.draw(r) * math.Exp(l.sigma*l.sigma)
}

type pareto struct{ least, alpha, most float64 } // alpha is not 1

func (p pareto) draw(r *rand.Rand) float64 {
	return min(p.most, p.least*math.Pow(1-r.Float64(), -1/p.alpha))
}

// parts are the integral of x f(x) below the cut, and what lies at it.
func (p pareto) parts() (below, at float64) {
	c := p.alpha * math.Pow(p.least, p.alpha) / (1 - p.alpha)
	return c * (math.Pow(p.most, 1-p.alpha) - math.Pow(p.least, 1-p.alpha)), p.most * math.Pow(p.least/p.most, p.alpha)
}

func (p pareto) mean() float64 { below, at := p.parts(); return below + at }

func (p pareto) byLength(r *rand.Rand) float64 {
	below, at := p.parts()
	if r.Float64()*(below+at) > below {
		return p.most
	}
	from, to := math.Pow(p.least, 1-p.alpha), math.Pow(p.most, 1-p.alpha)
	return math.Pow(from+r.Float64()*(to-from), 1/(1-p.alpha))
}

// ordinary is the mixture of the simulation: half of the sandboxes live for less
// than three minutes, one in ten for over an hour; the mean is half an hour.
func ordinary() lifetimes {
	return lifetimes{"ordinary", lognormal{60, 1}, lognormal{900, 1}, pareto{3600, 1.1, 86400}, [3]float64{0.6, 0.3, 0.1}}
}

// hectic is four times as much coming and going for the same load.
func hectic() lifetimes {
	return lifetimes{"hectic", lognormal{40, 1.2}, lognormal{480, 1}, pareto{1200, 1.5, 86400}, [3]float64{0.7, 0.25, 0.05}}
}

func (l lifetimes) mean() float64 {
	return l.shares[0]*l.short.mean() + l.shares[1]*l.medium.mean() + l.shares[2]*l.long.mean()
}

func (l lifetimes) draw(r *rand.Rand) time.Duration {
	var s float64
	switch u := r.Float64(); {
	case u < l.shares[0]:
		s = l.short.draw(r)
	case u < l.shares[0]+l.shares[1]:
		s = l.medium.draw(r)
	default:
		s = l.long.draw(r)
	}
	return seconds(s)
}

// rest is how long one that is there at some moment has still to live.
func (l lifetimes) rest(r *rand.Rand) time.Duration {
	var s float64
	first, second := l.shares[0]*l.short.mean(), l.shares[1]*l.medium.mean()
	switch u := r.Float64() * l.mean(); {
	case u < first:
		s = l.short.byLength(r)
	case u < first+second:
		s = l.medium.byLength(r)
	default:
		s = l.long.byLength(r)
	}
	return seconds(s * r.Float64())
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// demand draws what is asked for.
type demand struct {
	list []recipe
	sums []float64
}

func newDemand() *demand {
	d := &demand{list: templates()}
	sum := 0.0
	for _, t := range d.list {
		sum += t.weight
		d.sums = append(d.sums, sum)
	}
	return d
}

func (d *demand) draw(r *rand.Rand) int {
	u := r.Float64() * d.sums[len(d.sums)-1]
	for i, s := range d.sums {
		if u < s {
			return i
		}
	}
	return len(d.sums) - 1
}

// meanMemory is that of an ask, in bytes.
func (d *demand) meanMemory() float64 {
	sum, weights := 0.0, 0.0
	for _, t := range d.list {
		sum += t.weight * float64(t.limits.MemoryBytes)
		weights += t.weight
	}
	return sum / weights
}
