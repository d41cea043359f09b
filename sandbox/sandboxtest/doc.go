// Package sandboxtest has what tests of sandboxes need: [Driver], a scriptable
// driver without an engine whose agents run in this process over the real agent
// link; [Records], durable records in memory; and [Run], the suite that every
// driver passes.
//
// It is imported by tests only. Start reading at [New] and [Run].
package sandboxtest
