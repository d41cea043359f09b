package docker

import (
	"strings"

	"github.com/containerd/errdefs"

	"github.com/boxed-mesh/boxed"
)

// pullTexts tells the reasons apart by what the engine writes. Once a pull has
// begun there is nothing else: the status was sent, and the error is a line of
// text that the registry, Go or the kernel wrote. The first that fits counts.
var pullTexts = []struct {
	reason boxed.ImageReason
	texts  []string
}{
	{boxed.ImageNoSpace, []string{"no space left on device", "disk quota exceeded"}},
	{boxed.ImageUnusable, []string{"no matching manifest for", "image operating system", "does not match the specified platform"}},
	{boxed.ImageNotFound, []string{"pull access denied", "manifest unknown", "name unknown", "repository does not exist"}},
	{boxed.ImageUnauthorized, []string{
		"unauthorized", "authentication required", "no basic auth credentials", "requested access to the resource is denied",
		"incorrect username or password", "401 ", "403 ",
	}},
	{boxed.ImageNoRoute, []string{
		"connection refused", "no such host", "no route to host", "network is unreachable", "connection reset by peer",
		"name resolution", "server misbehaving", "proxyconnect", "i/o timeout", "address not available",
	}},
	{boxed.ImageTimeout, []string{"client.timeout exceeded", "tls handshake timeout", "deadline exceeded", "timed out"}},
	{boxed.ImageNotFound, []string{"not found", "404 "}}, // last: other texts quote a path that may hold it
}

// pullReason is why a pull failed, or "" for what nobody foresaw.
func pullReason(err error) boxed.ImageReason {
	text := strings.ToLower(err.Error())
	for _, p := range pullTexts {
		for _, t := range p.texts {
			if strings.Contains(text, t) {
				return p.reason
			}
		}
	}
	switch {
	case errdefs.IsNotFound(err):
		return boxed.ImageNotFound
	case errdefs.IsUnauthorized(err), errdefs.IsPermissionDenied(err):
		return boxed.ImageUnauthorized
	}
	return ""
}
