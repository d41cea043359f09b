//go:build !linux

package ctl

import "context"

// host is this machine; only Linux runs nodes.
type host struct{}

func newHost(func(string) string) host { return host{} }

func hostChecks(context.Context, host) []check {
	return []check{{
		Name: "host", Title: "the host", Result: resultSkipped, Detail: "this is " + platform() + ": nodes run on Linux",
	}}
}
