package api

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// route is one call. What its request looks like, and whether it needs a key,
// the document says.
type route struct {
	method, path string
	handle       func(*call) error
	long         bool // may last: ends when its key is revoked or the node goes away
	follows      bool // only watches: ends at once when the node goes away
}

const (
	sandboxPath = "/v1/sandboxes/{id}"
	execPath    = sandboxPath + "/execs/{exec}"
	nodePath    = "/v1/nodes/{node}"
)

// routes is everything that is served.
func routes() []route {
	return []route{
		{method: "POST", path: "/v1/sandboxes", handle: (*call).createSandbox, long: true},
		{method: "GET", path: "/v1/sandboxes", handle: (*call).listSandboxes},
		{method: "GET", path: sandboxPath, handle: (*call).getSandbox},
		{method: "PATCH", path: sandboxPath, handle: (*call).updateSandbox},
		{method: "DELETE", path: sandboxPath, handle: (*call).destroySandbox},
		{method: "GET", path: sandboxPath + "/wait", handle: (*call).waitSandbox, long: true, follows: true},
		{method: "POST", path: sandboxPath + "/pause", handle: (*call).pauseSandbox},
		{method: "POST", path: sandboxPath + "/resume", handle: (*call).resumeSandbox},
		{method: "GET", path: sandboxPath + "/stats", handle: (*call).sandboxStats},
		{method: "POST", path: sandboxPath + "/exec", handle: (*call).exec, long: true},
		{method: "GET", path: sandboxPath + "/exec/stream", handle: (*call).execStream, long: true},
		{method: "POST", path: sandboxPath + "/execs", handle: (*call).startExec},
		{method: "GET", path: sandboxPath + "/execs", handle: (*call).listExecs},
		{method: "GET", path: execPath, handle: (*call).getExec},
		{method: "DELETE", path: execPath, handle: (*call).killExec},
		{method: "GET", path: execPath + "/wait", handle: (*call).waitExec, long: true, follows: true},
		{method: "POST", path: execPath + "/signal", handle: (*call).signalExec},
		{method: "GET", path: execPath + "/stream", handle: (*call).attachExec, long: true, follows: true},
		{method: "GET", path: execPath + "/output", handle: (*call).execOutput, long: true, follows: true},
		{method: "GET", path: sandboxPath + "/files", handle: (*call).readFile, long: true},
		{method: "PUT", path: sandboxPath + "/files", handle: (*call).writeFile, long: true},
		{method: "DELETE", path: sandboxPath + "/files", handle: (*call).removeFile},
		{method: "GET", path: sandboxPath + "/files/stat", handle: (*call).statFile},
		{method: "GET", path: sandboxPath + "/files/list", handle: (*call).listFiles},
		{method: "POST", path: sandboxPath + "/files/mkdir", handle: (*call).makeDirectory},
		{method: "POST", path: sandboxPath + "/files/move", handle: (*call).moveFile},
		{method: "GET", path: sandboxPath + "/tar", handle: (*call).readTar, long: true},
		{method: "PUT", path: sandboxPath + "/tar", handle: (*call).writeTar, long: true},
		{method: "GET", path: sandboxPath + "/ports", handle: (*call).listPorts},
		{method: "GET", path: sandboxPath + "/ports/{port}/tunnel", handle: (*call).tunnel, long: true},
		{method: "GET", path: sandboxPath + "/egress", handle: (*call).getEgress},
		{method: "PUT", path: sandboxPath + "/egress", handle: (*call).setEgress},
		{method: "POST", path: sandboxPath + "/egress/allow", handle: (*call).allowEgress},
		{method: "POST", path: sandboxPath + "/egress/check", handle: (*call).checkEgress},
		{method: "GET", path: sandboxPath + "/egress/suggest", handle: (*call).suggestEgress},
		{method: "POST", path: sandboxPath + "/egress/answer", handle: (*call).answerEgress},
		{method: "GET", path: "/v1/egress/log", handle: (*call).egressLog, long: true, follows: true},
		{method: "GET", path: "/v1/egress/relay", handle: (*call).relayEgress, long: true},
		{method: "GET", path: "/v1/egress/audit", handle: (*call).verifyAudit},
		{method: "GET", path: "/v1/egress/profiles", handle: (*call).listProfiles},
		{method: "POST", path: "/v1/egress/profiles", handle: (*call).applyProfile},
		{method: "GET", path: "/v1/egress/profiles/{profile}", handle: (*call).getProfile},
		{method: "DELETE", path: "/v1/egress/profiles/{profile}", handle: (*call).deleteProfile},
		{method: "GET", path: "/v1/egress/freezes", handle: (*call).listFreezes},
		{method: "POST", path: "/v1/egress/freezes", handle: (*call).freezeEgress},
		{method: "DELETE", path: "/v1/egress/freezes/{freeze}", handle: (*call).thawEgress},
		{method: "GET", path: "/v1/secrets", handle: (*call).listSecrets},
		{method: "PUT", path: "/v1/secrets/{secret}", handle: (*call).setSecret},
		{method: "DELETE", path: "/v1/secrets/{secret}", handle: (*call).revokeSecret},
		{method: "GET", path: "/v1/events", handle: (*call).events, long: true, follows: true},
		{method: "POST", path: "/v1/keys", handle: (*call).createKey},
		{method: "GET", path: "/v1/keys", handle: (*call).listKeys},
		{method: "DELETE", path: "/v1/keys/{key}", handle: (*call).revokeKey},
		{method: "POST", path: "/v1/ssh/keys", handle: (*call).addSSHKey},
		{method: "GET", path: "/v1/ssh/keys", handle: (*call).listSSHKeys},
		{method: "DELETE", path: "/v1/ssh/keys/{key}", handle: (*call).revokeSSHKey},
		{method: "GET", path: "/v1/ssh/recordings", handle: (*call).listRecordings},
		{method: "GET", path: "/v1/ssh/recordings/{recording}", handle: (*call).readRecording, long: true},
		{method: "GET", path: "/v1/ssh", handle: (*call).sshInfo},
		{method: "GET", path: "/v1/ssh/tunnel", handle: (*call).sshTunnel, long: true},
		{method: "GET", path: "/v1/node", handle: (*call).nodeInfo},
		{method: "GET", path: "/v1/nodes", handle: (*call).listNodes},
		{method: "GET", path: nodePath, handle: (*call).getNode},
		{method: "POST", path: nodePath + "/cordon", handle: (*call).cordonNode},
		{method: "POST", path: nodePath + "/uncordon", handle: (*call).uncordonNode},
		{method: "POST", path: nodePath + "/drain", handle: (*call).drainNode},
		{method: "POST", path: "/v1/explain", handle: (*call).explain},
		{method: "POST", path: "/v1/claim", handle: (*call).claim},
		{method: "GET", path: "/v1/cluster", handle: (*call).clusterStatus},
		{method: "POST", path: "/v1/cluster", handle: (*call).startCluster},
		{method: "DELETE", path: "/v1/cluster", handle: (*call).leaveCluster},
		{method: "GET", path: "/v1/cluster/token", handle: (*call).clusterToken},
		{method: "POST", path: "/v1/cluster/rotate-key", handle: (*call).rotateClusterKey},
		{method: "DELETE", path: "/v1/cluster/nodes/{node}", handle: (*call).removeNode},
		{method: "GET", path: "/healthz", handle: (*call).healthz},
		{method: "GET", path: "/readyz", handle: (*call).readyz},
		{method: "GET", path: "/version", handle: (*call).version},
		{method: "GET", path: "/openapi.yaml", handle: (*call).openapiYAML},
		{method: "GET", path: "/openapi.json", handle: (*call).openapiJSON},
		{method: "GET", path: "/docs", handle: (*call).docs},
	}
}

// router finds routes by the path as it was sent. http.ServeMux would redirect
// paths with dot segments or double slashes, and answers 404 and 405 in a shape
// of its own.
type router struct {
	root node
	ops  map[*route]*operation
}

type node struct {
	fixed   map[string]*node
	param   *node
	name    string            // of the parameter that leads here
	methods map[string]*route // nil: no call ends here
}

// newRouter fails if the routes and the document differ.
func newRouter(list []route, doc *document) (*router, error) {
	r := &router{ops: map[*route]*operation{}}
	seen := map[string]bool{}
	for i := range list {
		rt := &list[i]
		key := rt.method + " " + rt.path
		op := doc.operations[key]
		if op == nil {
			return nil, fmt.Errorf("api: %s is not in openapi.yaml", key)
		}
		if seen[key] {
			return nil, fmt.Errorf("api: %s is there twice", key)
		}
		seen[key] = true
		r.ops[rt] = op
		r.add(rt)
	}
	for key := range doc.operations {
		if !seen[key] {
			return nil, fmt.Errorf("api: %s of openapi.yaml is not served", key)
		}
	}
	return r, nil
}

func (r *router) add(rt *route) {
	n := &r.root
	for part := range strings.SplitSeq(rt.path[1:], "/") {
		if strings.HasPrefix(part, "{") {
			if n.param == nil {
				n.param = &node{name: part[1 : len(part)-1]}
			}
			n = n.param
			continue
		}
		if n.fixed == nil {
			n.fixed = map[string]*node{}
		}
		if n.fixed[part] == nil {
			n.fixed[part] = &node{}
		}
		n = n.fixed[part]
	}
	if n.methods == nil {
		n.methods = map[string]*route{}
	}
	n.methods[rt.method] = rt
}

// match finds the call's route and its path parameters, each decoded once.
func (c *call) match() (map[string]string, error) {
	notFound := boxed.Errorf(boxed.CodeNotFound, "there is no such call; /docs lists them")
	raw := c.r.URL.EscapedPath()
	if !strings.HasPrefix(raw, "/") {
		return nil, notFound
	}
	n, params := &c.s.router.root, map[string]string{}
	for part := range strings.SplitSeq(raw[1:], "/") {
		if next := n.fixed[part]; next != nil {
			n = next
			continue
		}
		if n = n.param; n == nil || part == "" {
			return nil, notFound
		}
		value, err := url.PathUnescape(part)
		if err != nil {
			return nil, notFound
		}
		params[n.name] = value
	}
	if n.methods == nil {
		return nil, notFound
	}
	method := c.r.Method
	if method == "HEAD" {
		if rt := n.methods["GET"]; rt != nil && c.s.router.ops[rt].open {
			method = "GET" // for probes; net/http drops the body
		}
	}
	rt := n.methods[method]
	if rt == nil {
		var allow []string
		for m := range n.methods {
			allow = append(allow, m)
		}
		slices.Sort(allow)
		c.w.Header().Set("Allow", strings.Join(allow, ", "))
		return nil, boxed.Errorf(boxed.CodeMethod, "this path takes %s", strings.Join(allow, ", "))
	}
	c.route, c.op = rt, c.s.router.ops[rt]
	return params, nil
}
