// Package boxed holds the vocabulary of boxed, a mesh of hosts that run
// sandboxes for AI agents: sandboxes, execs, errors, events, documents, peers,
// and the [Service] port that every front door and every client speaks.
//
// It imports only the standard library and does nothing by itself. Each other
// package adapts one outside thing (Docker, Badger, HTTP, …) to the nouns that
// are declared here; node is where a call finds the sandbox's owner, and cmd/
// is where parts are joined. Start reading at [Service].
package boxed
