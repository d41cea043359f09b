// Command boxed-tools is what runs in a sandbox for whoever came in over SSH, as the
// sandbox's user and with no more rights than that: an SFTP server, and doors into the
// client's machine. It lies beside the agent's socket, and is no part of the agent,
// which is in memory in every sandbox. What clients send is parsed here, and not on the
// host. Start reading at serveSFTP and listen.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "boxed-tools:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "sftp-server":
		return serveSFTP()
	case len(args) == 3 && args[0] == "listen":
		return listen(args[1], args[2])
	case len(args) == 3 && args[0] == "take":
		return take(args[1], args[2])
	}
	return fmt.Errorf("usage: sftp-server | listen tcp|unix ADDRESS | take NAME NUMBER")
}
