package main

import (
	"context"
	"io"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/boxed-mesh/boxed"
)

// What the tests, which are in package main_test, see of the rest.

type (
	Row   = row
	Sheet = sheet
	Host  = host
)

var (
	Quantile       = quantile
	Median         = median
	Mean           = mean
	Bootstrap      = bootstrap
	RateOf         = rateOf
	NewSheet       = newSheet
	ReadRows       = readRows
	Documents      = documents
	WriteDocuments = writeDocuments
	Figures        = figures
	NiceStep       = niceStep
	Fill           = fill
	Program        = program
	StartLoad      = startLoad
	WatchRSS       = watchRSS
	ServeRaw       = serveRaw
	ClientCommand  = clientCommand
)

func (s *sheet) Add(i int, system string, err error, values ...float64) {
	s.add(i, system, err, values...)
}

func (s *sheet) Summarize(system, metric, unit string, values []float64) {
	s.summarize(system, metric, unit, values)
}

func (s *sheet) Column(system, column string) []float64 { return s.column(system, column, nil) }

func (s *sheet) Failures()                       { s.failures() }
func (s *sheet) Rows() []row                     { return s.rows }
func (s *sheet) Write(dir string, h *host) error { return s.write(dir, h) }
func (l load) Stop()                             { l.stop() }
func Blocks(from fs.FS) (map[string]string, error) {
	rs, err := readResults(from)
	return rs.blocks(), err
}

// BlockNames are the markers that the document must have.
func BlockNames() []string { return slices.Sorted(maps.Keys(results{}.blocks())) }

// Settings are what the engine knows of a container with our settings and of a
// sandbox, both of which exist while it looks.
func Settings(ctx context.Context, image string, stderr io.Writer) (ours, sandbox container.InspectResponse, err error) {
	root, err := repository()
	if err != nil {
		return ours, sandbox, err
	}
	r, err := newRig(ctx, root, options{image: image, quick: true}, stderr)
	if err != nil {
		return ours, sandbox, err
	}
	defer r.close()
	n, err := r.startNode(ctx, settings{})
	if err != nil {
		return ours, sandbox, err
	}
	defer n.close()
	box, err := n.Create(ctx, boxed.Spec{TTL: boxed.Duration(time.Minute)})
	if err != nil {
		return ours, sandbox, err
	}
	c, err := r.ours()
	if err != nil {
		return ours, sandbox, err
	}
	id, err := c.create(ctx)
	if err != nil {
		return ours, sandbox, err
	}
	if ours, err = r.engine.ContainerInspect(ctx, id); err != nil {
		return ours, sandbox, err
	}
	sandbox, err = r.engine.ContainerInspect(ctx, "boxed-"+string(box.ID))
	return ours, sandbox, err
}
