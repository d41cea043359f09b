// Package sandbox runs the sandboxes of one host: their lifecycle, the warm
// pool, deadlines, recovery after a restart, and the link to the agent in each.
// How a sandbox is hardened is Go data here (seccomp.go, hardening.go).
//
// It does not know Docker (a [Driver] does), other nodes, owners' rights or
// HTTP. Start reading at [Manager].
package sandbox
