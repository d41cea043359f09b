// Package egress is the way out of sandboxes, and the only one: it takes what an
// agent hands over, decides by the sandbox's policy, resolves once, judges every
// address, dials only what it judged, swaps placeholders for credentials on the wire,
// and records it all. It fails shut.
//
// The pure parts (names, addresses, policy) know no network. Start reading at
// Proxy.Serve.
package egress
