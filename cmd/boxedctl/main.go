// Command boxedctl is the command line of boxed: it makes sandboxes, runs programs in
// them, copies files, forwards ports, and looks after keys and contexts. All of it is
// in internal/ctl, which the SSH lobby shares.
package main

import (
	"os"

	"github.com/boxed-mesh/boxed/internal/ctl"
)

// version is set by the linker; a program made by `go install` has it from its module.
var version string

func main() {
	os.Exit(ctl.Main(version, os.Args[1:]))
}
