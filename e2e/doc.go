// Package e2e holds tests of the real programs, boxed-node and boxedctl, on a
// real container engine: what a user does, the commands that the documents
// show, the examples, and what must hold when the daemon or the engine goes
// away. It has no code of its own; start reading at harness_test.go.
package e2e
