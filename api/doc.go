// Package api is the HTTP and WebSocket front door over [boxed.API].
//
// openapi.yaml is the truth: it is embedded, every request is checked against
// it before a handler runs, and the pages at /docs and docs/api.md are made of
// it. The handlers decode, call the port once and encode; they decide nothing
// about sandboxes. Who asks is for an [Authenticator] to say, and what a
// principal may do is for the port behind.
//
// Start reading at [Server.ServeHTTP], then routes.go for what there is, and
// stream.go for the WebSockets. To add a call: write it into openapi.yaml, add
// a line to routes.go and a handler, and a method to api/client.
package api
