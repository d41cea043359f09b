package main

import (
	"context"
	"io"
	"time"

	"github.com/boxed-mesh/boxed/transport"
)

// What the tests need to see.
type (
	Row   = row
	Tally = tally
	Run   = run
)

var (
	ReadRows  = readRows
	WriteRows = writeRows
	Program   = program
	Systems   = []string{sysBoxed, "variant-most", "variant-remember", "variant-draw4", sysSpread, sysBestFit}
)

// Live runs a small mesh in which nodes fail all the time, and checks its books.
func Live(system string, load float64, stale time.Duration, seed uint64) (Tally, error) {
	s := meshOf(60)
	s.load, s.stale, s.seed, s.failures, s.asks = load, stale, seed, 2, 1500
	s.life = hectic()
	return point{scene: s, system: system}.run(context.Background())
}

// Lifetimes draws so many, in seconds, and says what their mean is to be.
func Lifetimes(count int) (drawn []float64, mean float64) {
	w, l := newWorld(meshOf(2)), ordinary()
	for range count {
		drawn = append(drawn, l.draw(w.chance).Seconds())
	}
	return drawn, l.mean()
}

// Spread gossips one change in a quiet mesh, and says after how many seconds all
// know and how often it was sent.
func Spread(nodes int) (took float64, sent, most int64) {
	g := gossipLAN(nodes, 3, 0)
	took = g.change(1)[0]
	r := g.start()
	r.tell(0)
	for number := range 200 {
		r.round(number)
	}
	return took, r.sent, int64(nodes * r.limit)
}

// ViewAges are those of the model, in seconds.
func ViewAges(nodes int, publish time.Duration) []float64 {
	ages, _, _ := gossipLAN(nodes, 3, publish).views(20*time.Second, 20*time.Second)
	return ages
}

// Observe measures a real mesh of three.
func Observe(ctx context.Context) ([]Row, error) {
	o, err := observe(ctx, crowd{3, transport.PaceLAN, 500 * time.Millisecond, time.Second, 2, 1}, io.Discard)
	return o.rows(), err
}

// ObserveDocuments measures real documents on three nodes, and a digest.
func ObserveDocuments(ctx context.Context) ([]Row, error) {
	rows, err := observeDocuments(ctx, 3, 3, io.Discard)
	if err != nil {
		return nil, err
	}
	more, err := observeDigest(50, io.Discard)
	return append(rows, more...), err
}

// Documents are made of rows.
func Documents(rows []Row, runs map[string]Run) (map[string][]byte, error) {
	return documents(rows, runs)
}

// Repository is what is in it.
func Repository() (rows []Row, runs map[string]Run, docs string, err error) {
	root, err := repository()
	if err != nil {
		return nil, nil, "", err
	}
	paths := placesIn(root)
	rows, runs, err = readResults(paths)
	return rows, runs, paths.docs, err
}

// Get is the value of a metric.
func Get(rows []Row, system, metric string) float64 { return measured(rows).value(system, metric) }

// First is the share that the first node took.
func First(t Tally) float64 { return t.first() }

// Large is how many large asks there were.
func Large(t Tally) int { return t.large[1] }

// Misses are of a type that a comparison has to be shown.
func (t tally) Misses() misses { return t.missed }
