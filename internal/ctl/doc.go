// Package ctl is the command line of boxed: boxedctl, and the lobby of the SSH front
// door, which has some of its commands.
//
// It speaks to a node by the service port: over HTTP by api/client, or in the node's own
// process. It links neither Docker nor the store nor a tailnet, so that boxedctl builds
// for Linux, macOS and Windows and by `go install`. Start reading at [app]: one
// invocation. Each command's definition and action are together in the file named after
// what it is about; attach.go is the part that all commands share that run a program,
// args.go says how a command line is read, exit.go has the exit statuses.
package ctl

import "os"

// Main is boxedctl: it runs a command line and returns the exit status. version is the
// program's, or "".
func Main(programVersion string, args []string) int {
	version = programVersion
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	return a.main(args)
}
