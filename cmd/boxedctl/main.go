// Command boxedctl is the command line of boxed: it makes sandboxes, runs programs in
// them, copies files, forwards ports, and looks after keys and contexts.
//
// It speaks to one node over HTTP by api/client and links neither Docker nor
// the store nor a tailnet, so that it builds for Linux, macOS and Windows and
// by `go install`. Start reading at [app]: one invocation. Each command's
// definition and action are together in the file named after what it is about;
// attach.go is the part that all commands share that run a program, args.go
// says how a command line is read, exit.go has the exit statuses.
package main

import "os"

func main() {
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	os.Exit(a.main(os.Args[1:]))
}
