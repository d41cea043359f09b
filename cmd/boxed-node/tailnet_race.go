//go:build race

package main

import (
	"context"
	"log/slog"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// openTailnet is not there under the race detector, for which tsnet alone compiles
// for minutes. It has tests of its own without it, and so has the whole program.
func openTailnet(context.Context, TailnetConfig, string, *transport.Gate, *slog.Logger) (tailnet, error) {
	return nil, boxed.Errorf(boxed.CodeUnavailable, "this boxed-node was built with the race detector, and without tailnets")
}
