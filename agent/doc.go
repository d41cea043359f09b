// Package agent is the wire between boxed-node and the small program that is
// PID 1 of every sandbox: its messages, the host's side ([Host]) and the
// guest's side ([Serve] with a [Handler]).
//
// The guest dials the host over a Unix socket. The first connection is the
// control connection, multiplexed by yamux; each request is a stream that
// starts with one JSON [Request] and is answered by one JSON [Response], after
// which the stream belongs to the operation. A bulk stream has a connection of
// its own with the same form. Losing a connection ends nothing: the guest dials
// again and proves the secret that its first connection got.
//
// Everything that comes from the guest is hostile: a guard bounds what the
// multiplexer may be made to hold, frames have a size limit, and every write of
// the host has a deadline. The package knows nothing of containers, and
// imports nothing of boxed. Start reading at wire.go.
package agent
