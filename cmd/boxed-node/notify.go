package main

import (
	"fmt"
	"net"
)

// notify tells the service manager about the daemon's state, in the form of
// sd_notify(3): "READY=1", "STOPPING=1". socket is NOTIFY_SOCKET's value; ""
// is no manager.
func notify(socket, state string) error {
	if socket == "" {
		return nil
	}
	name := socket
	if name[0] == '@' { // an abstract socket
		name = "\x00" + name[1:]
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	return nil
}
