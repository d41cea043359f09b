//go:build !steps

package main

import "github.com/boxed-mesh/boxed/sandbox"

// hooked leaves the configuration as it is: only a build for tests (-tags steps)
// can be stopped at a step.
func hooked(_ string, c sandbox.Config) sandbox.Config { return c }

func hookedDriver(_ string, d sandbox.Driver) sandbox.Driver { return d }
