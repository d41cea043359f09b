package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/boxed-mesh/boxed"
)

// prepareDataDir makes the data directory. Others may pass through it to a path
// that they know: the engine and the sandboxes' agents mount and run files
// below. They may not list it, and what is secret in it is 0600 or 0700.
func prepareDataDir(dir string, log *slog.Logger) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("make the data directory: %w", err)
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("look at the data directory: %w", err)
	}
	switch mode := fi.Mode().Perm(); {
	case mode&0o002 != 0:
		return boxed.Errorf(boxed.CodeConflict, "every user of the host may write to %s: chmod o-w it, and see that nothing in it is foreign", dir)
	case mode&0o001 == 0:
		log.Warn("sandboxes cannot reach their agent through the data directory; chmod o+x it", "path", dir, "mode", fmt.Sprintf("%04o", mode))
	}
	return nil
}
